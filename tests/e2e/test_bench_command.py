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
