"""`spillway bench`: that it measures, tells, judges and cleans up rightly; its figures are no test's business."""

import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import termios

import harness
import pytest
from harness import eventually, session_members

SMALL = ["bench", "--quick", "--rounds", 1, "--size"]


def left_behind(swap_directory):
    """Swap, zram devices, cgroups with what they have, and files that a run may forget."""
    roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified")
    groups = [str(path) for root in roots for path in pathlib.Path(root).glob("spillway-bench-*")]
    groups += [path.read_text() for root in roots for path in pathlib.Path(root).glob("cgroup.subtree_control")]
    swaps = [line.split()[0] for line in pathlib.Path("/proc/swaps").read_text().splitlines()[1:]]
    return swaps, sorted(os.listdir("/sys/block")), groups, os.listdir(swap_directory)


@pytest.fixture
def bench(processes, spillway, tmp_path):
    """Starts the command; its swap file and its report have directories of their own."""
    swap, out = tmp_path / "swap", tmp_path / "out"
    swap.mkdir()

    def start(*words, size="32M"):
        command = [spillway.path, *SMALL, size, "--swap-dir", swap, "--out", out, *words]
        return processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    start.swap, start.out = swap, out
    return start


@pytest.mark.limit(300)
def test_all_that_can_run_is_compared(bench):
    before = left_behind(bench.swap)
    run = bench("--json", "--order", "uniform")
    out, err = run.communicate(timeout=290)
    assert run.returncode == 0, err
    told = json.loads(out)
    assert told["wrong"] == 0 and told["rounds"] == 1
    expected = ["native", "local", "tcp"]
    expected += ["memcached"] if shutil.which("memcached") else []
    for case in told["cases"]:
        modes = {mode["mode"]: mode for mode in case["modes"]}
        assert set(expected) <= set(modes), err
        # A mode runs, or is named with the reason.
        for mode, title in (("zram", "kernel swap, zram"), ("file", "kernel swap, file")):
            assert mode in modes or any(title in remark for remark in told["remarks"]), told["remarks"]
        for name, mode in modes.items():
            figures = mode["rounds"][0]
            assert figures["pages"] == 8192 and figures["wrong"] == 0 and 0 < figures["p50_us"] <= figures["p99_us"]
            assert sum(count for _, count in figures["histogram_ns"]) == figures["accesses"]
            assert (name == "native") == ("native" not in mode["ratio_to"])
        # It was managed: with half of the pages elsewhere the mean cannot be as native.
        assert modes["local"]["ratio_to"]["native"]["mean_us"]["median"] > 1.5, modes["local"]["median"]
        assert modes["local"]["median"]["local_peak_mib"]["median"] >= 15
    assert sorted(os.listdir(bench.out)) == ["report.html", "results.json"]
    page = (bench.out / "report.html").read_text()
    assert page.count("<svg") == len(told["cases"]) == 1
    assert not re.search(r"src=|href=|url\(|@import|<script|https?://(?!www\.w3\.org/2000/svg)", page)
    assert json.loads((bench.out / "results.json").read_text()) == told
    assert left_behind(bench.swap) == before


def test_a_wrong_byte_is_told(bench):
    run = bench("--mode", "native", "--order", "uniform", "--spoil")
    out, err = run.communicate(timeout=50)
    assert run.returncode == 1, err
    assert re.search(r"Wrong bytes: [1-9]", out), out
    assert re.search(r"came back wrong: [1-9]", (bench.out / "report.html").read_text())


# Says a number and more than a pipe holds, whatever becomes of its 50 MiB.
HASH = "python3 -c 'import hashlib; b = bytearray(range(256)) * 200_000; print([hashlib.sha1(b).hexdigest() for _ in range(3)], 50_000 * \"word\")'"


# How much of a short program is local at most tells how soon it is found, and what it loses who ran beside it.
@pytest.mark.alone
@pytest.mark.limit(150)
def test_programs_of_the_users_are_compared(bench):
    before = left_behind(bench.swap)
    clock = f"{HASH} >/dev/null; date +%s%N"
    run = bench("--mode", "zram,local", "--program", HASH, "--program", clock)
    out, err = run.communicate(timeout=140)
    assert run.returncode == 0, err
    told = json.loads((bench.out / "results.json").read_text())
    assert told["cases"] == [] and [of["verified"] for of in told["programs"]] == [True, False], out
    assert f"{clock[:40]}...: it says nothing, or something else every time: no wrong result would be seen." in out
    for of, line in zip(told["programs"], (HASH, clock), strict=True):
        assert of["command"] == line and 50 << 20 <= of["footprint_bytes"] < 90 << 20
        assert [share["local_percent"] for share in of["shares"]] == [25, 50, 75]
        for share in of["shares"]:
            modes = {mode["mode"]: mode for mode in share["modes"]}
            assert "local" in modes and ("zram" in modes or any("kernel swap, zram" in remark for remark in told["remarks"]))
            assert modes["local"]["ratio_to"]["native"]["median"] > 1, share
            # One round: what is lost is of the same two runs.
            (alone,) = of["native"]["rounds"]
            lost = {name: mode["rounds"][0]["seconds"] / alone["seconds"] - 1 for name, mode in modes.items() if mode["rounds"]}
            for name, mode in modes.items():
                assert (mode["excess"] is None) == (name not in lost) and ("excess_to_zram" in mode), mode
                assert name not in lost or mode["excess"]["median"] == pytest.approx(lost[name]), mode
                assert name not in lost or mode["ratio_to"]["native"]["median"] == pytest.approx(1 + lost[name]), mode
            if lost.get("zram", 0) > 0:
                assert modes["local"]["excess_to_zram"]["median"] == pytest.approx(lost["local"] / lost["zram"]), share
            else:
                assert modes["local"]["excess_to_zram"] is None, share
            assert modes["local"]["rounds"][0]["local_peak_bytes"] <= of["footprint_bytes"] * share["local_percent"] / 100 * 1.05 + (2 << 20)
    page = (bench.out / "report.html").read_text()
    charts = re.findall(r"<figcaption>(Slowdown by program: \d+ % local)</figcaption><svg", page)
    assert charts == [f"Slowdown by program: {share} % local" for share in (75, 50, 25)]
    assert left_behind(bench.swap) == before


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("print({resident} > 48_000)", "it said something else than with all of its memory local"),
        ("exit(0 if {resident} > 48_000 else 3)", "no result: exit status: 3"),
    ],
)
def test_a_wrong_result_of_a_program_is_told(bench, line, what):
    """That of one that says whether all of its memory is local, or fails where it is not."""
    resident = 'int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])'
    run = bench("--mode", "local", "--program", f"python3 -c 'b = bytearray(range(256)) * 200_000; {line.format(resident=resident)}'")
    out, err = run.communicate(timeout=100)
    assert run.returncode == 1, out + err
    assert f"50 % local: spillway: {what}" in out


@pytest.mark.limit(200)
def test_the_example_of_a_program_can_be_compared(bench, spillway, processes):
    """README.md, "See for yourself", and --help have the same."""
    (line,) = re.findall(r"spillway bench --quick --program '([^']+)'", (harness.REPOSITORY / "README.md").read_text())
    told, _ = processes.start([spillway.path, "bench", "--help"], stdout=subprocess.PIPE, text=True).communicate(timeout=10)
    assert f"'{line}'" in " ".join(told.split()) and "no chart of slowdowns by application" in " ".join(told.split())
    run = bench("--mode", "local", "--program", line)
    out, err = run.communicate(timeout=190)
    assert run.returncode == 0, out + err
    (of,) = json.loads((bench.out / "results.json").read_text())["programs"]
    assert of["verified"] and all(mode["excess"] for share in of["shares"] for mode in share["modes"]), of
    assert (bench.out / "report.html").read_text().count("<figcaption>Slowdown by program: ") == 3


@pytest.mark.parametrize(
    ("line", "status", "what"),
    [
        ("exit 3", 1, "with all of its memory local: native: no result: exit status: 3: it said nothing"),
        ("echo it broke >&2; exit 3", 1, "exit status: 3: it broke"),
        (" ", 2, "give a line for the shell"),
        ("true", 2, "too little to compare; give it work that needs 32.0 MiB or more"),
    ],
)
def test_programs_that_say_nothing_of_speed_are_refused(bench, line, status, what):
    run = bench("--program", line)
    _, err = run.communicate(timeout=50)
    assert run.returncode == status and what in err.splitlines()[-1], err
    assert not bench.out.exists()


@pytest.mark.limit(150)
def test_what_a_program_leaves_running_ends_with_its_run(bench, tmp_path):
    """In groups and sessions of its own, and with its output open: the next run finds nothing of it."""
    before = left_behind(bench.swap)
    stays = shutil.copy(shutil.which("sleep"), tmp_path / "stays")
    left = f"setsid {stays} 1000 & {stays} 1000 >/dev/null 2>&1 & timeout 990 {stays} 1000 &"
    run = bench("--mode", "zram,local", "--program", f"{left} {HASH}")
    out, err = run.communicate(timeout=140)
    assert run.returncode == 0, out + err
    assert "no wrong result would be seen" not in out and left_behind(bench.swap) == before
    assert harness.those_who_run(stays) == []


def test_a_program_that_asks_is_told(spillway, tmp_path):
    """It would wait for an answer for as long as it may run."""
    front, ours = pty.openpty()
    begins = lambda: (os.setsid(), fcntl.ioctl(ours, termios.TIOCSCTTY, 0))
    words = [spillway.path, "bench", "--quick", "--out", tmp_path / "out", "--program", "read -r answer </dev/tty"]
    with subprocess.Popen(words, stdin=ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=begins) as run:
        _, err = run.communicate(timeout=50)
    os.close(front), os.close(ours)
    assert run.returncode == 1 and "it wants to read from the terminal; give a line that asks nothing" in err, err


@pytest.mark.parametrize("mode", ["local", "zram"])
def test_programs_of_the_users_end_with_it(bench, mode):
    """All of a pipeline, also where one part takes no notice of the first signal."""
    before = left_behind(bench.swap)
    stubborn = "trap '' TERM; while :; do sleep 0.1; done"
    run = bench("--mode", mode, "--program", f"{HASH} | md5sum; test -e {bench.swap}/go || exit 0; ({stubborn}) | ({stubborn}) | sleep 100")
    said = ""
    during = {"local": "25 % local: spillway\n", "zram": "25 % local: kernel swap, zram\n"}[mode]
    while during not in said:
        line = run.stderr.readline()
        if "not run: " in line:
            pytest.skip(line)
        assert line, said
        said += line
        if "round 1" in line and "native" not in line:
            (bench.swap / "go").touch()
            during = line
    eventually(lambda: len(session_members(run.pid)) > 4, "the pipeline", 20)
    os.kill(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=40)
    assert run.returncode == 128 + signal.SIGINT, err
    assert eventually(lambda: not session_members(run.pid), "the end of all that was started", 10)
    (bench.swap / "go").unlink()
    assert left_behind(bench.swap) == before and not bench.out.exists()


@pytest.mark.parametrize(
    ("number", "mode", "during"),
    [
        (signal.SIGINT, "zram", "kernel swap, zram"),
        (signal.SIGTERM, "file", "kernel swap, file"),
        (signal.SIGINT, "tcp", "spillway, tcp"),
        (signal.SIGTERM, "memcached", "spillway, memcached"),
    ],
)
def test_it_cleans_up_when_it_is_interrupted(bench, number, mode, during):
    before = left_behind(bench.swap)
    run = bench("--order", "uniform", "--mode", mode, size="256M")
    said = ""
    while f": {during}\n" not in said:
        line = run.stderr.readline()
        assert line, said
        if f"not run: {during}" in line:
            pytest.skip(line)
        said += line
    # In the midst of it: the workload is there.
    eventually(lambda: len(session_members(run.pid)) > 1, "the workload", 20)
    # As a key on the terminal does it, to all of the group, and by an impatient hand.
    for _ in range(2):
        os.killpg(run.pid, number)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + number, err
    assert left_behind(bench.swap) == before
    assert not bench.out.exists()
    assert eventually(lambda: not session_members(run.pid), "the end of all that was started", 10)


def test_without_rights_it_says_what_lacks(bench, spillway, processes, tmp_path):
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv")
    tmp_path.chmod(0o777)
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", spillway.path, *SMALL, "32M", "--mode", "zram,file", "--json"]
    run = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out, err = run.communicate(timeout=50)
    assert run.returncode == 0, err
    told = json.loads(out)
    assert told["remarks"][:2] == ["not run: kernel swap, zram: it needs root", "not run: kernel swap, file: it needs root"]
    assert [mode["mode"] for mode in told["cases"][0]["modes"]] == ["native"]


ZRAM = pathlib.Path("/sys/class/zram-control")
NO_MKSWAP = "`mkswap` is not installed; it comes with util-linux"
NO_ZRAM = "this kernel has no zram, or has not loaded it: `modprobe zram num_devices=0`"
NO_CGROUP = "there is no memory cgroup, of version 1 or 2"
NO_PLACE = "no swap file in {swap}: %s; --swap-dir names another place"

# A machine that lacks something, by the command that makes it so in a mount namespace of its own; and what is said of which mode then.
LACKS = {
    "programs": (":", {"zram": NO_MKSWAP if ZRAM.exists() else NO_ZRAM, "file": NO_MKSWAP, "memcached": "`memcached` is not installed"}),
    "zram": (f"test ! -d {ZRAM} || mount -t tmpfs none {ZRAM}", {"zram": NO_ZRAM}),
    "memory cgroups": ("mount -t tmpfs none /sys/fs/cgroup", {"file": NO_CGROUP}),
    "room": ("mount -t tmpfs -o size=1M none {swap}", {"file": NO_PLACE % "No space left on device"}),
    "a disk": ("mount -t tmpfs none {swap}", {"file": NO_PLACE % "Invalid argument"}),
}
TITLES = {"zram": "kernel swap, zram", "file": "kernel swap, file", "memcached": "spillway, memcached"}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_cannot_run_is_named_with_the_reason(bench, spillway, processes, need, tmp_path, lacks):
    need("unshare", "mkswap")
    make, reasons = LACKS[lacks]
    left, path = tmp_path / "left", tmp_path if lacks == "programs" else os.environ["PATH"]
    # What is put into a namespace goes with it: what the command has left there is listed before.
    script = f'{make}; PATH={path} "$@" && ls -A {{swap}} >{left}'.format(swap=bench.swap)
    wanted = ["--order", "uniform", "--mode", ",".join(reasons)]
    command = [spillway.path, *SMALL, "32M", "--swap-dir", bench.swap, "--out", bench.out, *wanted]
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", *command]
    run = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    said = [f"not run: {TITLES[mode]}: {reason.format(swap=bench.swap)}" for mode, reason in reasons.items()]
    told = json.loads((bench.out / "results.json").read_text())
    found = [remark for remark in told["remarks"] if remark.startswith("not run: ")]
    if lacks in ("room", "a disk") and NO_CGROUP in found[0]:
        pytest.skip(found[0])
    assert found == said
    # In what is printed, in the page, and before anything is measured.
    page = (bench.out / "report.html").read_text()
    for remark in said:
        assert f"\n{remark}\n" in out and f"<li>{remark}</li>" in page and f"spillway: bench: {remark}\n" in err
    assert [mode["mode"] for mode in told["cases"][0]["modes"]] == ["native"]
    assert left.read_text() == ""


def test_a_kernel_that_cannot_move_pages_is_named_with_the_reason(processes, spillway, need, tmp_path):
    (setarch,) = need("setarch")
    command = [setarch, "--uname-2.6", spillway.path, *SMALL, "32M", "--order", "uniform", "--mode", "local,tcp", "--json"]
    run = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out, err = run.communicate(timeout=50)
    assert run.returncode == 0, err
    told = json.loads(out)
    for remark, title in zip(told["remarks"], ["spillway", "spillway, tcp"]):
        assert remark.startswith(f"not run: {title}: ") and "Linux 6.8 or newer" in remark, remark
    assert [mode["mode"] for mode in told["cases"][0]["modes"]] == ["native"]


def curves(svg):
    """The curves of a chart, each as its points; and in how many lines its legend says what they are."""
    lines = re.findall(r'<polyline [^>]*stroke-width="2" points="([^"]+)"', svg)
    points = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    # A sample in the legend is a short level stroke.
    legend = [line for line in points if len(line) == 2 and line[0][1] == line[1][1] and abs(line[1][0] - line[0][0]) == 20]
    return [line for line in points if line not in legend], len(legend)


@pytest.mark.limit(150)
def test_the_page_has_a_chart_of_all_that_was_compared(bench):
    run = bench("--order", "uniform,zipf,sequential", "--mode", "local")
    out, err = run.communicate(timeout=140)
    assert run.returncode == 0, err
    told = json.loads((bench.out / "results.json").read_text())
    shares = {}
    for case in told["cases"]:
        shares.setdefault(case["workload"], []).append(case["local_percent"])
    assert sorted(map(len, shares.values())) == [1, 1, 3], shares
    charts = dict(re.findall(r"<figure><figcaption>(.*?)</figcaption>(<svg.*?</svg>)", (bench.out / "report.html").read_text(), re.DOTALL))
    expected = {f"How long an access takes: {workload}, {share} % local" for workload, each in shares.items() for share in each}
    several = [workload for workload, each in shares.items() if len(each) > 1]
    expected |= {f"{what} by local share: {workload}" for workload in several for what in ("Throughput", "Slowdown")}
    assert set(charts) == expected and len(expected) == 7
    for heading, svg in charts.items():
        lines, legend = curves(svg)
        text = [word.strip() for word in re.findall(r"<text [^>]*>([^<]*)</text>", svg)]
        assert len(lines) == legend == 2 and {"native", "spillway"} <= set(text), f"{heading}: {text}"
        if "local share" in heading:
            what = "accesses per second" if "Throughput" in heading else "times slower than native"
            assert what in text and [len(line) for line in lines] == [3, 3], heading
            continue
        assert {"at most so many microseconds", "accesses, %"} <= set(text), heading
        # Each rises from left to right, and both to the height of all accesses.
        for line in lines:
            assert line == sorted(line, key=lambda point: (point[0], -point[1])), heading
        assert len({line[-1][1] for line in lines}) == 1, heading
    # Half of it is elsewhere: the curves and the figures are of the same runs, and no two of them are the same.
    assert len(set(charts.values())) == len(charts)
