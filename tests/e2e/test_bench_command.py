"""`spillway bench`: that it measures, tells, judges and cleans up rightly; its figures are no test's business."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest
from harness import eventually, session_members

SMALL = ["bench", "--quick", "--rounds", 1, "--size"]


def left_behind(swap_directory):
    """Swap, zram devices, cgroups and files that a run may forget."""
    roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified")
    groups = [str(path) for root in roots for path in pathlib.Path(root).glob("spillway-bench-*")]
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
