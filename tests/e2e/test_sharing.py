"""Equal pages of different targets are kept once: in memory by the kernel, where `--share` asks for it, and in the pool."""

import ctypes
import json
import pathlib

import ksm as kernels
import pytest
from harness import MIB, eventually
from mechanics import Program, refused
from test_daemon import attach, daemon, fill  # noqa: F401
from test_takeover import begin, end, nothing_of_ours

pytestmark = pytest.mark.alone

# Pages of the programs' pattern that are not all zeros: those are never stored.
NONZERO = 7 / 8
SET_MEMORY_MERGE = 67


@pytest.fixture
def ksm():
    """The kernel's merging thread at work, and quick; `ksm(knob=value)` changes it. What was set before is set again."""
    if not kernels.is_there():
        pytest.skip("this kernel merges no pages")
    with kernels.at_work(pages_to_scan=2000, sleep_millisecs=10, smart_scan=0):
        yield kernels.set_knobs


def merging(pid):
    """What the kernel says of merging in a process: pages merged, and whether it is asked to."""
    fields = dict(line.split(maxsplit=1) for line in pathlib.Path(f"/proc/{pid}/ksm_stat").read_text().splitlines())
    asked = fields.get("ksm_merge_any:")
    return int(fields["ksm_merging_pages"]), None if asked is None else asked == "yes"


def is_merging(pid):
    pages, asked = merging(pid)
    return pages > 0 if asked is None else asked


def merged(pid, least_mib):
    """Waits until the kernel has merged so much of a process; how many pages."""

    def enough():
        pages, _ = merging(pid)
        return pages if pages >= least_mib * 256 else None

    return eventually(enough, f"{least_mib} MiB of process {pid} to be merged", 40)


def merges_no_more(pid):
    eventually(lambda: not is_merging(pid) and merging(pid)[0] == 0, f"process {pid} to be as it was")


@pytest.mark.limit(150)
def test_merged_pages_leave_and_return(processes, spillway, daemon, fill, ksm):
    daemon.start("--local", "256M")
    targets = [Program(processes, [fill, 48]).ready() for _ in range(2)]
    for target in targets:
        attach(spillway, target.pid, "--share")
    pages = [merged(target.pid, 30) for target in targets]
    rows = {row["pid"]: row for row in spillway.ps()}
    for target, least in zip(targets, pages):
        row = rows[target.pid]
        assert row["share_pages"] and row["merged_bytes"] >= least * 4096 * 0.9 and row["merged_profit_bytes"] > 0, row
    whole = rows[daemon.pid]
    assert whole["merged_peak_bytes"] >= whole["merged_bytes"] >= sum(pages) * 4096 * 0.9, whole
    table = spillway.cli("ps").stdout.splitlines()
    assert "MERGED" in table[0]
    # Merging goes on at full speed while they leave.
    spillway.resize(daemon.pid, "16M")
    eventually(lambda: sum(spillway.find(target.pid)["local_bytes"] for target in targets) <= 16 * MIB, "both to leave", 60)
    whole = spillway.find(daemon.pid)
    assert whole["stored_bytes"] >= 2 * (48 * NONZERO - 10) * MIB, whole
    assert whole["stuck_pages"] > 0, "merged pages were in the way"
    # One program's worth, and of that what does not compress: three pages in eight.
    assert whole["stored_compressed_bytes"] <= 48 * MIB * 4 / 8, whole
    for _ in range(2):
        for target in targets:
            target.ask("verify")
    for target in targets:
        target.ask("rewrite")
        target.ask("verify")
    one, other = targets
    spillway.detach(one.pid)
    merges_no_more(one.pid)
    nothing_of_ours(one.pid)
    one.unharmed()
    assert is_merging(other.pid)
    other.unharmed()
    daemon.done(op="shutdown")
    merges_no_more(other.pid)
    other.unharmed()


@pytest.mark.limit(120)
def test_a_program_that_is_churned_while_it_is_merged(processes, spillway, daemon, fill, ksm):
    daemon.start("--local", "40M")
    targets = [Program(processes, [fill, 32]).ready() for _ in range(3)]
    for target in targets:
        attach(spillway, target.pid, "--share")
    for _ in range(3):
        for target in targets:
            target.tell("churn 1500")
        for target in targets:
            assert target.line(60) == "OK"
    eventually(lambda: max(merging(target.pid)[0] for target in targets) > 0, "merged pages")
    for target in targets:
        target.ask("fork")
        spillway.detach(target.pid)
        target.unharmed()


def test_sharing_is_switched_while_it_runs(processes, spillway, daemon, fill, ksm):
    daemon.start("--local", "64M")
    one, other = (Program(processes, [fill, 16]).ready() for _ in range(2))
    attach(spillway, one.pid)
    daemon.done(op="adopt", pid=other.pid, share_pages=True)
    eventually(lambda: is_merging(other.pid), "merging to begin in one")
    assert not is_merging(one.pid) and not spillway.find(one.pid)["share_pages"]
    assert spillway.cli("set", one.pid, "share-pages=on").returncode == 0
    merged(one.pid, 8)
    assert spillway.find(one.pid)["share_pages"]
    daemon.done(op="share_pages", pid=one.pid, on=False)
    merges_no_more(one.pid)
    assert is_merging(other.pid)
    one.unharmed()
    refused(spillway.cli("set", daemon.pid, "share-pages=on"), "for one target")
    refused(spillway.cli("set", one.pid, "share-pages=perhaps"), "neither on nor off")
    refused(spillway.cli("set", one.pid, "share-pages=on", "min=8M"), "alone")
    assert "error" in daemon.ask(op="share_pages", pid=1, on=True)[-1]
    for target in (one, other):
        spillway.detach(target.pid)
        target.unharmed()
        merges_no_more(target.pid)


def test_a_program_under_run_shares(processes, spillway, fill, ksm, tmp_path):
    stats = tmp_path / "stats.json"
    first = Program(processes, [fill, 32], spillway, "24M", ["--share", "--stats", stats]).ready()
    other = Program(processes, [fill, 32], spillway, "24M", ["--share"]).ready()
    merged(first.pid, 4)
    for target in (first, other):
        target.unharmed()
    assert spillway.cli("set", first.pid, "share-pages=off").returncode == 0
    merges_no_more(first.pid)
    assert spillway.cli("set", first.pid, "share-pages=on").returncode == 0
    merged(first.pid, 4)
    first.tell("exit 0")
    assert first.status() == 0
    written = json.loads(stats.read_text())
    assert written["share_pages"] and written["merged_peak_bytes"] >= 4 * MIB, written


def test_what_merged_before_merges_afterwards(processes, spillway, fill, ksm):
    def merge():
        ctypes.CDLL(None).prctl(SET_MEMORY_MERGE, 1, 0, 0, 0)

    target = Program(processes, [fill, 16], preexec_fn=merge).ready()
    if not is_merging(target.pid):
        pytest.skip("this kernel forgets at exec that it merges")
    pager, _ = begin(processes, spillway, target.pid, "--local", "8M", "--share")
    spillway.settled(target.pid)
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    assert is_merging(target.pid)
    target.unharmed()


MARKED = """
import mmap, sys
def memory():
    area = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(area), 4096):
        area[at:at + 4096] = bytes([at // 4096 % 251 + 1]) * 4096
    return area
kept = [memory() for _ in range(3)]
kept[1].madvise(mmap.MADV_MERGEABLE)
for line in sys.stdin:
    assert all(area[at:at + 4096] == bytes([at // 4096 % 251 + 1]) * 4096 for area in kept for at in range(0, len(area), 4096))
    print("OK", flush=True)
"""


def marked(pid):
    """The mappings that are to be merged, each by itself or with the process."""
    found, mapping = [], None
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "VmFlags:":
            found += [mapping] if "mg" in words else []
        elif not words[0].endswith(":"):
            mapping = words[0]
    return found


@pytest.mark.parametrize("how", ["detached", "switched off"])
def test_a_mapping_that_merged_before_merges_afterwards(processes, spillway, ksm, how):
    """As QEMU marks its guest's memory."""
    target = Program(processes, ["python3", "-c", MARKED])
    target.ask("begin")
    before = marked(target.pid)
    assert before
    pager, _ = begin(processes, spillway, target.pid, "--local", "16M")
    assert spillway.cli("set", target.pid, "share-pages=on").returncode == 0
    eventually(lambda: is_merging(target.pid), "merging to begin")
    spillway.settled(target.pid)
    if how == "switched off":
        assert spillway.cli("set", target.pid, "share-pages=off").returncode == 0
        eventually(lambda: not is_merging(target.pid), "merging to end")
        eventually(lambda: marked(target.pid), "the mapping to be marked again")
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    assert not is_merging(target.pid)

    def bounds(spans):
        return [tuple(int(word, 16) for word in span.split("-")) for span in spans]

    # What is marked again may be cut, and covers what was marked, and nothing else.
    (start, end), again = bounds(before)[0], bounds(marked(target.pid))
    assert len(before) == 1 and again[0][0] == start and again[-1][1] == end, (before, again)
    target.ask("end")


def test_another_pager_knows_that_merging_is_to_end(processes, spillway, fill, ksm):
    target = Program(processes, [fill, 32]).ready()
    pager, _ = begin(processes, spillway, target.pid, "--local", "16M", "--share")
    eventually(lambda: is_merging(target.pid), "merging to begin")
    spillway.settled(target.pid)
    end(pager)
    pager, line = begin(processes, spillway, target.pid)
    assert "took process" in line
    # The watcher hears of what was taken over a moment later.
    eventually(lambda: spillway.find(target.pid)["share_pages"], "what is taken over to be told")
    target.unharmed()
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    merges_no_more(target.pid)
    target.unharmed()


FAMILY = """
import mmap, os, sys
memory, kinds = mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 251
def fill():
    for at in range(0, len(memory), 4096):
        memory[at:at + 4096] = bytes([at // 4096 % kinds + 1]) * 4096
def right():
    return all(memory[at:at + 4096] == bytes([at // 4096 % kinds + 1]) * 4096 for at in range(0, len(memory), 4096))
fill()
child = None
for line in sys.stdin:
    if line == "fork\\n":
        reading, telling = os.pipe()
        ordering, order = os.pipe()
        child = os.fork()
        if child == 0:
            # A page of its own everywhere, so that it is managed in full.
            fill()
            os.write(telling, b"ready")
            os.read(ordering, 1)
            os._exit(0 if right() else 1)
        os.read(reading, 5)
        print(child, flush=True)
    elif line == "end\\n":
        os.write(order, b"x")
        assert os.waitpid(child, 0)[1] == 0
    assert right()
    print("OK", flush=True)
"""


def test_a_forked_child_inherits_it_and_loses_it_too(processes, spillway, fill, ksm):
    target = Program(processes, ["python3", "-c", FAMILY])
    target.ask("begin")
    pager, _ = begin(processes, spillway, target.pid, "--local", "32M", "--share")
    eventually(lambda: is_merging(target.pid), "merging to begin")
    child = int(target.ask("fork")[0])
    assert is_merging(child)
    eventually(lambda: child in spillway.find(target.pid)["pids"], "the child to be managed", 30)
    spillway.resize(target.pid, "12M")
    spillway.settled(target.pid)
    target.ask("look")
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    for pid in (target.pid, child):
        merges_no_more(pid)
    target.ask("end")


def test_where_the_kernel_does_not_merge_it_is_refused(processes, spillway, fill, ksm):
    ksm(run=0)
    target = Program(processes, [fill, 8]).ready()
    refused(spillway.cli("attach", target.pid, "--share"), "echo 1", "ksm/run")
    refused(spillway.cli("run", "--share", "--", fill, 8, "--once"), "echo 1", "ksm/run")
    nothing_of_ours(target.pid)
    target.unharmed()
    pager, _ = begin(processes, spillway, target.pid)
    refused(spillway.cli("set", target.pid, "share-pages=on"), "echo 1")
    assert not is_merging(target.pid)
    checks = {check["name"]: check for check in json.loads(spillway.cli("doctor", "--json").stdout)}
    assert checks["sharing"]["ok"] and "echo 1" in checks["sharing"]["found"], checks["sharing"]
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    target.unharmed()


@pytest.mark.limit(120)
@pytest.mark.parametrize("where", ["embedded", "server"])
def test_equal_pages_are_once_in_the_pool(processes, spillway, servers, daemon, fill, where):
    """Without any merging in memory: one pager is one tenant."""
    url = "local:?compress=none" if where == "embedded" else f"tcp://{servers.spillway().address}"
    daemon.start("--local", "12M", "--pool", url)
    targets = []

    def kept():
        if where == "embedded":
            return spillway.find(daemon.pid)["stored_compressed_bytes"]
        status = spillway.cli("pool", "status", "--json", url)
        assert status.returncode == 0, status.stderr
        return json.loads(status.stdout)[0]["distinct_pages"] * 4096

    sizes = []
    for _ in range(2):
        targets.append(Program(processes, [fill, 24]).ready())
        attach(spillway, targets[-1].pid)
        least = len(targets) * 24 * NONZERO * MIB - 13 * MIB
        eventually(lambda: spillway.find(daemon.pid)["stored_bytes"] >= least, "the rest to leave", 60)
        for target in targets:
            target.ask("verify")
        sizes.append(kept())
    # The first had a part of it in memory.
    assert sizes[0] > 0 and sizes[1] <= 25 * MIB, sizes
    stored = spillway.find(daemon.pid)["stored_bytes"]
    assert stored >= 2 * 24 * NONZERO * MIB - 13 * MIB, (stored, sizes)
