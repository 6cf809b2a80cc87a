"""Memory that several processes have mapped outlives its pager: another takes it over, and no byte is wrong."""

import os
import pathlib
import random
import signal
import subprocess
import time

import pytest
from harness import MIB, PEAK_ALLOWANCE, eventually, thread_stats
from mechanics import NONZERO, Program, out_of, registered
from test_daemon import daemon  # noqa: F401
from test_shared import PAGES_A_MIB, SECONDS, SHARED, native_family, seed, sharers  # noqa: F401
from test_takeover import STOLEN_SECONDS, begin, end, nothing_of_ours, url_of

# Where pagers are killed: a child that is just being adopted is killed with it (docs/SHARED.md). How many of them may be.
SPARED = "with=killed"
KILLED_MAX = 3


KILLED = [
    ("anonymous", "local", SPARED),
    ("anonymous", "local", f"{SPARED},removing"),
    ("memfd", "local", SPARED),
    ("memfd", "tcp", SPARED),
]


@pytest.mark.limit(int(2 * SECONDS + 110))
@pytest.mark.parametrize(("mode", "pool", "options"), KILLED)
def test_pagers_killed_again_and_again(processes, spillway, servers, native_family, mode, pool, options):
    seconds = max(2 * SECONDS, 8)
    whole = native_family(mode, 64, 3, seconds, seed(), options)
    whole.local = 16
    pager, _ = begin(processes, spillway, whole.pid, "--local", "16M", "--pool", url_of(servers, pool), SHARED)
    eventually(whole.is_within_budget, "most of it to leave")
    chance, stalls = random.Random(), []
    whole.program.tell("go")
    deadline = time.monotonic() + seconds - 1
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.02, 0.5))
        killed = time.monotonic()
        end(pager)
        assert whole.program.lines.empty(), whole.program.lines.get()
        pager, line = begin(processes, spillway, whole.pid)
        stalls.append(time.monotonic() - killed)
    said = whole.program.answer("go", 60)
    lost = next(int(line.split()[1]) for line in said if line.startswith("killed "))
    print(f"{len(stalls)} pagers killed, {lost} children with them, longest without one {max(stalls) * 1e3:.0f} ms")
    eventually(whole.is_within_budget, "what was used to leave")
    whole.program.unharmed()
    spillway.detach(whole.pid)
    assert pager.wait(20) == 0
    nothing_of_ours(whole.pid)
    assert registered(whole.pid) == 0
    # What was removed and not touched again is nowhere: that may be as much as there is, where most of what they do is that.
    assert "removing" in options or whole.resident()[1] >= NONZERO * 64 * PAGES_A_MIB
    whole.program.unharmed()
    whole.end()
    # Others run beside it: how long that takes at rest is judged by test_takeover.py.
    assert len(stalls) >= 5 and max(stalls) < STOLEN_SECONDS and lost <= KILLED_MAX, (stalls, lost)


def test_a_takeover_that_fails_leaves_the_pages_where_they_are(processes, spillway, servers, need, native_family):
    """As it gave up, the server was told to forget all of them."""
    whole = native_family("memfd", 64, 3, SECONDS, seed(), SPARED)
    whole.local = 16
    pager, _ = begin(processes, spillway, whole.pid, "--local", "16M", "--pool", url_of(servers, "redis"), SHARED)
    eventually(whole.is_within_budget, "most of it to leave")
    end(pager)
    lacking = [need("setpriv")[0], "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run([*lacking, spillway.path, "attach", str(whole.pid)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0, done.stderr
    print(done.stderr)
    pager, _ = begin(processes, spillway, whole.pid)
    whole.program.unharmed()
    spillway.detach(whole.pid)
    assert pager.wait(20) == 0
    whole.program.unharmed()
    whole.end()


@pytest.mark.limit(int(2 * SECONDS + 90))
@pytest.mark.parametrize("source", ["private", "shared"])
def test_who_writes_to_a_memfd_as_its_pager_is_killed(processes, spillway, build, source):
    """Its write has the file's lock, for which a thread of the dead pager waits: that takes pages out yet."""
    program = Program(processes, [build("writer"), source, 16, 2 * SECONDS]).ready()
    pager, _ = begin(processes, spillway, program.pid, "--local", "16M", SHARED)
    eventually(lambda: spillway.find(program.pid)["evicted_pages"] > 1000, "some of it to leave")
    program.tell("go")
    deadline, killed, held_up = time.monotonic() + 2 * SECONDS - 1, 0, 0
    while time.monotonic() < deadline:
        time.sleep(0.2)
        pager.send_signal(signal.SIGKILL)
        # Not all of it: one of its threads may have to wait for who waits for its successor.
        stat = pathlib.Path(f"/proc/{pager.pid}/stat")
        eventually(lambda: ") Z " in stat.read_text(), "the pager to die", every=0.001)
        held_up += "(files) D " in "".join(thread_stats(pager.pid))
        last, (pager, _) = pager, begin(processes, spillway, program.pid)
        last.wait(10)
        killed += 1
    (said,) = program.answer("go", SECONDS + 30)
    assert said.startswith("WROTE ")
    print(f"{killed} pagers killed, {held_up} of them held up")
    spillway.detach(program.pid)
    assert pager.wait(20) == 0 and killed >= 5
    program.unharmed()
    program.tell("exit 7")
    assert program.status() == 7, program.err


def test_what_nobody_has_mapped_when_its_pager_is_killed_comes_home(processes, spillway, build):
    """It is found by the descriptor of it, and is managed again where it is mapped again."""
    mib, local = 32, 8
    program = Program(processes, [build("again"), mib]).ready()
    memfd = next(path for path in pathlib.Path(f"/proc/{program.pid}/fd").iterdir() if "/memfd:again" in os.readlink(path))
    there = lambda: os.stat(memfd).st_blocks * 512
    pager, _ = begin(processes, spillway, program.pid, "--local", f"{local}M", SHARED)
    for _ in range(3):
        eventually(lambda: there() <= PEAK_ALLOWANCE * local * MIB, "most of it to leave")
        end(pager)
        # Nobody hears of that before the next pager does.
        program.tell("unmap")
        pager, _ = begin(processes, spillway, program.pid)
        assert program.line() == "OK"
        end(pager)
        pager, _ = begin(processes, spillway, program.pid)
        eventually(lambda: not out_of(memfd, mib), "all of it to come home")
        program.ask("map")
        program.unharmed()
    spillway.detach(program.pid)
    assert pager.wait(20) == 0
    program.unharmed()


def test_a_daemon_that_is_killed_is_taken_over_by_the_next(spillway, daemon, native_family):
    daemon.start("--local", "16M", SHARED)
    whole = native_family("memfd", 64, 2, 2, seed(), SPARED)
    whole.local = 16
    done = spillway.cli("attach", whole.pid)
    assert done.returncode == 0, done.stderr
    for stop in (daemon.kill, lambda: daemon.process.send_signal(signal.SIGHUP)):
        eventually(whole.is_within_budget, "most of it to leave")
        stop()
        daemon.process.wait(10)
        assert "took 3 processes over" in daemon.start("--local", "16M", SHARED)
        whole.go(2)
    done = spillway.cli("detach", whole.pid)
    assert done.returncode == 0, done.stderr
    nothing_of_ours(whole.pid)
    whole.end()
