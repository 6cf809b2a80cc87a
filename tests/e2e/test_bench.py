"""The benchmarks: that they measure, record, clean up and judge rightly; their figures are no test's business."""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import types

import pytest
from harness import REPOSITORY, eventually, session_members, those_who_run
from lacking import give_up

RUN = REPOSITORY / "bench/run"


def loaded(name):
    """A script of bench/ as a module."""
    sys.path.insert(0, str(RUN.parent))
    loader = importlib.machinery.SourceFileLoader(f"bench_{name}", str(RUN.parent / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(str(RUN.parent))
    return module


def text_of(name):
    """Of a script of bench/; nothing where it is no file."""
    path = RUN.parent / name
    return path.read_text() if path.is_file() else ""


@pytest.fixture(scope="module")
def bench():
    """bench/run as a module."""
    return loaded("run")


def left_behind():
    """Swap, zram devices and cgroups that a run may forget."""
    groups = [str(path) for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory") for path in pathlib.Path(root).glob("spillway-bench-*")]
    swaps = [line.split()[0] for line in pathlib.Path("/proc/swaps").read_text().splitlines()]
    return swaps, sorted(os.listdir("/sys/block")), groups


def test_a_tiny_run_is_recorded(processes, spillway, tmp_path):
    before = left_behind()
    words = [RUN, "--tiny", "--rounds", 1, "--fit-rounds", 2, "--only", "fits,touch,python", "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    record = (tmp_path / "tiny.md").read_text()
    assert out in record
    rows = [line.split(" | ") for line in record.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 + 4 + 2 + 2 + 2 and len({len(row) for row in rows}) == 1, record
    goals = [row[-1] for row in rows if " of " in row[-1]]
    assert len(goals) == 7 and all("met" in goal or "missed" in goal or "not measured" in goal for goal in goals), goals
    assert (tmp_path / "tiny.json").exists()
    assert left_behind() == before


# All but those that may show earlier records alone.
@pytest.mark.parametrize("script", [name for name in sorted(os.listdir(RUN.parent)) if '"--rounds"' in text_of(name) and name not in ("blocks", "papers")])
def test_nothing_is_measured_in_no_rounds(script):
    refused = subprocess.run([RUN.parent / script, "--rounds", "0"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert refused.returncode == 2 and "give at least one round" in refused.stderr, refused.stderr


# But for the one that measures nothing.
@pytest.mark.parametrize("script", [name for name in sorted(os.listdir(RUN.parent)) if "def main" in text_of(name) and name != "goals"])
def test_every_script_ends_what_it_began(script):
    assert "exit_on_signals()" in text_of(script)


def test_a_short_churn_is_recorded(processes, spillway, tmp_path):
    # With one seed in fifteen nobody gets a share that is less than what it has.
    words = [REPOSITORY / "bench/churn", "--minutes", 0, "--rounds", 3, "--targets", 8, "--active", 2, "--rest", 0, "--seed", 2, "--record", "tiny"]
    run = processes.start([*words, "--into", tmp_path, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    assert out in (tmp_path / "tiny.md").read_text() and out.count("did not grow") == 4
    rounds = json.loads((tmp_path / "tiny.json").read_text())["rounds"]
    evicted = [each["evicted_pages"] for each in rounds]
    assert len(rounds) == 3 and 0 < evicted[0] < evicted[2] and all(each["has"]["threads"] > 3 for each in rounds), rounds


# Scripts that set up swap, or have a program do it, and a form of each that does so soon. What they do is of no interest.
WALK = ["--size", "256M", "--rounds", "1", "--order", "uniform", "--mode", "zram"]
SWAPPING = {
    "run": ["--only", "touch", "--rounds", 1],
    "overview": WALK,
    "zram": ["--only", "uniform", "--rounds", 1, "--compare"],
    "apps": ["--tiny", "--only", "memcached", "--share", 50, "--rounds", 2],
}


def limited_by_the_kernel(session):
    """Whether one of a session has made a cgroup, which comes after swap to zram."""
    return any(str(pid) == group.rpartition("-")[2] for group in left_behind()[2] for pid in session_members(session))


def memcached_under_a_pager(session):
    """Whether one of a session has less memory than it wants."""
    words = [pathlib.Path(f"/proc/{pid}/cmdline") for pid in session_members(session)]
    with contextlib.suppress(OSError):
        told = [path.read_bytes().split(b"\0") for path in words]
        return any(b"--local" in each and b"all" not in each for each in told) and any(each[0] == b"memcached" for each in told)
    return False


# As a key on the terminal does it, to all of the group, or as others do, to the script alone. What is done about a signal is one thing
# for all scripts, and what there is to clean up is each one's own.
ENDINGS = {"INT": (signal.SIGINT, os.killpg), "TERM": (signal.SIGTERM, os.kill), "HUP": (signal.SIGHUP, os.killpg)}
INTERRUPTED = [*((name, "zram", "INT") for name in SWAPPING), ("run", "zram", "TERM"), ("run", "zram", "HUP"), ("apps", "spillway", "TERM")]


@pytest.mark.parametrize("script, mode, ending", INTERRUPTED)
def test_it_cleans_up_when_it_is_interrupted(processes, spillway, tmp_path, script, mode, ending):
    number, send = ENDINGS[ending]
    before = left_behind()
    if not pathlib.Path("/sys/class/zram-control").exists():
        pytest.skip("this kernel has no zram")
    # Whoever runs this is ours.
    binary = shutil.copy(spillway.path, tmp_path / "measured")
    words = [RUN.parent / script, *SWAPPING[script]]
    if script == "zram":
        yardstick = tmp_path / "yardstick"
        yardstick.write_text(f"#!/bin/sh\nexec {binary} bench --json {' '.join(WALK)}\n")
        yardstick.chmod(0o755)
        words.append(yardstick)
    run = processes.start([*words, "--spillway", binary], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    begun = {"zram": limited_by_the_kernel, "spillway": memcached_under_a_pager}[mode]
    eventually(lambda: begun(run.pid) or run.poll() is not None, f"a program under {mode}", 30)
    # By an impatient hand.
    for _ in range(2):
        send(run.pid, number)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + number, err
    # A pager ends when it hears that its program has.
    eventually(lambda: not session_members(run.pid) + those_who_run(binary), "what it started to end", 5)
    left = {name for kind in left_behind() for name in kind}

    def all_gone():
        # What others make meanwhile goes at some time.
        left.intersection_update(name for kind in left_behind() for name in kind)
        return left <= {name for kind in before for name in kind}

    eventually(all_gone, f"{left} to be gone, where others made it")


# Between fork and exec of a program that it starts, the program gets SIGINT if a second argument says so; else it waits there.
STARTS = """
import ctypes, functools, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import modes, record
record.exit_on_signals()
signalled = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
waits = lambda: (os.write(1, b"forked\\n"), time.sleep(0.5))
with modes.running({"args": ["sleep", "60"], "preexec_fn": signalled if sys.argv[2:] else waits}) as process:
    print("status", process.wait(5))
"""


def test_a_program_is_signalled_before_it_is_begun(processes):
    words = [sys.executable, "-B", "-c", STARTS, RUN.parent, "signalled"]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.communicate(timeout=10)[0] == f"status -{signal.SIGINT:d}\n"


def test_a_script_is_signalled_while_it_begins_a_program(processes):
    words = [sys.executable, "-B", "-c", STARTS, RUN.parent]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "forked\n"
    for _ in range(2):
        run.send_signal(signal.SIGINT)
    # The program has its streams: it is at an end when they are.
    _, err = run.communicate(timeout=10)
    assert run.returncode == 128 + signal.SIGINT, err


def test_who_was_killed_for_want_of_memory_is_counted(bench, tmp_path):
    kills_in = sys.modules[bench.Zram.__module__].kills_in
    assert kills_in(tmp_path) == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert kills_in(tmp_path) == 2
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kills_in(tmp_path) == 3


# As soon as a program runs, and before whoever starts it can know, it gets SIGINT.
SERVES = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import modes, record
record.exit_on_signals()
class Popen(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen = Popen
with modes.memory_server(sys.argv[2]):
    print("goes on")
"""


def test_a_script_is_signalled_while_it_begins_a_server(processes, tmp_path):
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\nexec sleep 60\n")
    server.chmod(0o755)
    words = [sys.executable, "-B", "-c", SERVES, RUN.parent, server]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The server has its output: it is at an end when that is.
    out, err = run.communicate(timeout=10)
    assert (run.returncode, out) == (128 + signal.SIGINT, ""), out + err


def test_cgroups_of_both_versions(bench, tmp_path):
    hierarchy = bench.Zram.hierarchy
    with pytest.raises(bench.Failure):
        hierarchy(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("cpu\n")
    assert hierarchy(tmp_path) == (tmp_path, "memory.max")
    assert control.read_text() == "+memory"
    control.write_text("cpu memory\n")
    assert hierarchy(tmp_path) == (tmp_path, "memory.max")
    assert control.read_text() == "cpu memory\n"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("")
    assert hierarchy(tmp_path) == (tmp_path / "memory", "memory.limit_in_bytes")


# Looks for memory cgroups, says so, and waits to be ended.
LOOKS = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import modes, record
record.exit_on_signals()
print(modes.Zram.hierarchy(pathlib.Path(sys.argv[2])), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_controller_is_given_back(processes, tmp_path, number):
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    control = tmp_path / "cgroup.subtree_control"

    def written(had):
        """What the file has while the script is there, and afterwards."""
        control.write_text(had)
        run = processes.start([sys.executable, "-B", "-c", LOOKS, RUN.parent, tmp_path], stdout=subprocess.PIPE, text=True)
        assert "memory.max" in run.stdout.readline()
        meanwhile = control.read_text()
        run.send_signal(number)
        assert run.wait(10) == 128 + number
        return meanwhile, control.read_text()

    assert written("cpu\n") == ("+memory", "-memory")
    assert written("cpu memory\n") == ("cpu memory\n", "cpu memory\n")
    # Somebody else relies on it by now.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/memory.max").write_text("1048576\n")
    assert written("cpu\n") == ("+memory", "+memory")
    (tmp_path / "theirs/memory.max").write_text("max\n")
    assert written("cpu\n") == ("+memory", "-memory")


def test_goals_are_told_as_they_are_recorded(tmp_path):
    run = subprocess.run([REPOSITORY / "bench/goals", "--into", tmp_path], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    there = (REPOSITORY / "docs/bench/GOALS.md").read_text()
    assert (tmp_path / "GOALS.md").read_text() == there, "a record is newer: run bench/goals"
    linked = re.findall(r"\]\(([^)]+)\)", there)
    assert len(linked) > 10
    for target in linked:
        page, _, heading = target.partition("#")
        headings = re.findall(r"^#+ (.*)$", (REPOSITORY / "docs/bench" / page).read_text(), re.MULTILINE)
        assert not heading or heading in [text.lower().replace(" ", "-").replace("`", "") for text in headings], target
    # Who reads that a goal is missed wants to know why.
    missed = [line for line in there.splitlines() if "**missed**" in line]
    assert missed and [line for line in missed if not re.search(r"\*\*missed\*\*[^|]*: \[why\]\([^)]+\)", line)] == []


def test_the_worst_figure_decides_of_a_goal():
    goals, bound = loaded("goals"), loaded("wanted.py").Bound
    verdict = lambda figures, goal, **more: goals.Goal("it", "that", "none", figures, goal, **more).verdict()
    assert verdict([0.6, 0.2], bound(0.6)) == "met"
    assert verdict([0.7, 0.2], bound(0.6)) == "**missed**"
    assert verdict([0.7], bound(0.6), bound="README.md") == "**missed**: [why](README.md)"
    assert verdict([3.0, 2.9], bound(3.0, at_least=True)) == "**missed**"
    assert verdict([3.0, 3.1], bound(3.0, at_least=True)) == "met"
    assert verdict([1.01], bound(1.005), spread=(0.99, 1.02)) == "**missed**, within the spread"
    assert verdict([1.0], bound(1.005), spread=(0.99, 1.02)) == "met, within the spread"
    assert verdict([3.1], bound(3.0, at_least=True), spread=(2.9, 3.2)) == "met, within the spread"


def test_records_judge_by_what_is_wanted(bench):
    """The tables of committed pages are what their scripts make of their figures today."""

    def is_told(name, lines_of):
        page, figures = (REPOSITORY / "docs/bench" / f"{name}.{kind}" for kind in ("md", "json"))
        lines = list(lines_of(json.loads(figures.read_text())))
        assert any("met" in line or "missed" in line for line in lines)
        assert [line for line in lines if line not in page.read_text().splitlines()] == [], name

    zram, far, fits, sharing, serve = map(loaded, ("zram", "far", "fits", "sharing", "serve"))
    is_told("0001-half-local-against-zram", lambda told: (line for case, each in told["cases"].items() for line in zram.table(case, each)))
    is_told("0002-memory-server-against-memcached", serve.told)
    fitting = [work for work in bench.workloads(False) if work.group == "fits"]
    modes = [bench.Native, bench.Zram, bench.Spillway]
    is_told("0002-programs-that-fit", lambda told: bench.table(fitting, told["runs"], modes))
    is_told("0004-faults-over-tcp", lambda told: far.table(told["rounds"]))
    given = types.SimpleNamespace(guests=5, memory_mib=256, image_mib=64)
    is_told("0010-sharing", lambda told: sharing.report(given, told["machine"], told["pool"], told["memory"], told["wrong"]))
    is_told("0017-fits", lambda told: fits.table(told["pairs"]))


def test_what_is_told_of_noisy_figures(bench):
    assert bench.interval([3, 1, 2]) == (1, 3)
    assert bench.interval(range(1, 7)) == (1, 6)
    # Binomial, n = 15: P(at most 3 of them below the median) = 1.8%, at most 4: 5.9%.
    assert bench.interval(range(1, 16)) == (4, 12)
    assert bench.verdict((1.0, 0.99, 1.005), 1.01) == "met"
    assert bench.verdict((1.0, 0.99, 1.02), 1.01) == "met, within the spread"
    assert bench.verdict((1.02, 1.0, 1.03), 1.01) == "**missed**, within the spread"
    assert bench.verdict((1.02, 1.011, 1.03), 1.01) == "**missed**"
    runs = {"native": [{"s": 1.0}, {"s": 2.0}], "spillway": [{"s": 1.1}, {"s": 2.2}]}
    assert bench.compared(runs, "s", "native") == pytest.approx((1.1, 1.1, 1.1))
    assert bench.compared(runs, "s", "zram") is None


def test_faults_over_tcp_are_recorded(processes, spillway, tmp_path):
    before = left_behind()
    words = [RUN.parent / "far", "--tiny", "--rounds", 1, "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    rounds = json.loads((tmp_path / "tiny.json").read_text())["rounds"]
    assert min(rounds[0]["bare"].values()) > 0 and rounds[0]["fault"]["p50_us"] > 1
    assert "| fault over TCP, p50 |" in out and (tmp_path / "tiny.md").read_text().startswith("# tiny")
    assert left_behind() == before


@pytest.mark.limit(180)
def test_guests_on_one_host_are_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/consolidate", "--tiny", "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=170)
    assert run.returncode == 0, err
    assert out in (tmp_path / "tiny.md").read_text()
    (only,) = json.loads((tmp_path / "tiny.json").read_text())["steps"]
    # It has half of what it wants: nothing but a pool makes it fit.
    assert only["Base"] is None and only["CBPS"]["does_not_fit"] and only["CBPS"]["saved_bytes"] > 0, only
    assert all(only[name]["requests_s"] > 0 and only[name]["fetched_pages"] > 0 for name in ("DM", "DM-shares", "DM+CBPS")), only
    assert "Base" not in out.split("```")[1] and "compared" in out, out


@pytest.mark.limit(180)
def test_papers_are_repeated_and_recorded(processes, spillway, tmp_path):
    # The first trace is empty, as where a busy machine has run the program before the pager found it.
    late = tmp_path / "late"
    late.write_text(
        f"""#!/bin/sh
        if [ "$1" = trace ] && mkdir {tmp_path}/once 2>/dev/null; then
            trace=$5; shift 6; {spillway.path} trace -q --exact -o "$trace" -- true && exec "$@"
        fi
        exec {spillway.path} "$@"
        """
    )
    late.chmod(0o755)
    words = [REPOSITORY / "bench/papers", "--tiny", "--rounds", 1, "--only", "near", "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, "--spillway", late], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=170)
    assert run.returncode == 0, err
    record = (tmp_path / "tiny.md").read_text()
    assert all(line in record for line in out.splitlines())
    rows = [line.split(" | ") for line in record.splitlines() if line.startswith("| touch")]
    assert [len(row) for row in rows] == [9] * 12 + [6] * 3, record
    assert (tmp_path / "once").exists()
    # From its own record, without a run.
    words = [REPOSITORY / "bench/papers", "--tiny", "--rounds", 0, "--with", tmp_path / "tiny.json", "--spillway", spillway.path]
    again = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert again.communicate(timeout=20) == (out, ""), "the record says something else"


def test_findings_follow_from_figures():
    findings = loaded("findings.py")

    def measured(pre_evict, clock_fetches):
        """A program that pre-evict, and clock's choice, make better or not."""
        runs = {"all local": [{"accesses_s": 1.0}]}
        cases = []
        for remote in (25, 50, 75):
            for policy in ("rr", "nru"):
                for evict in ("on-demand", "pre-evict"):
                    better = pre_evict if evict == "pre-evict" else 1
                    fetched = clock_fetches if policy == "nru" else 100
                    runs[findings.case(remote, (policy, evict))] = [{"accesses_s": 3 * better, "fetched_pages": fetched, "fault_p50_us": 10.0}]
                    parts = {"link": 8 * better, "eviction": 1 * better, "rest": 1 * better, "total": 10 * better}
                    cases.append({"local": f"{100 - remote}%", "policy": policy, "evict": evict, "handling_us": parts})
        return {"a": {"time": "accesses_s", "runs": runs, "replay": {"cases": cases}}}

    def told(pre_evict, clock_fetches):
        return findings.findings(measured(pre_evict, clock_fetches), (25, 50, 75), [(p, e) for p in ("rr", "nru") for e in ("on-demand", "pre-evict")])

    assert [finding.agrees for finding in told(0.75, 70)] == [False, True, True, True, True]
    assert [finding.agrees for finding in told(1, 100)] == [False, False, True, False, False]
    served, scheme, *_ = told(1, 100)
    assert "access bits" in served.line() and "8.0 us" in scheme.line() and "**Different here:**" in scheme.line()
    assert "25 % less" in told(0.75, 70)[1].line()


YARDSTICK = """#!/usr/bin/env python3
import json, pathlib, sys
wrong, told = int(pathlib.Path(__file__).with_name("wrong").read_text()), sys.argv[sys.argv.index("--json") + 1]
keys = ["populate_us_per_page", "mean_us", "p50_us", "p99_us", "p999_us", "accesses_per_s", "scan_us_per_page"]
median = {mode: {key: us for key in keys} for mode, us in [("native", 1.0), ("zram", 10.0), ("spillway", 7.5)]}
runs = {mode: [each | {"wrong": wrong * (mode == "spillway")}] for mode, each in median.items()}
pathlib.Path(told).write_text(json.dumps({"median": median, "runs": runs}))
"""


def test_the_page_about_zram_follows_from_the_yardstick(tmp_path):
    yardstick, wrong = tmp_path / "yardstick", tmp_path / "wrong"
    yardstick.write_text(YARDSTICK)
    yardstick.chmod(0o755)
    command = [REPOSITORY / "bench/zram", "--compare", yardstick, "--spillway", "true", "--only", "uniform,threads"]
    command += ["--record", "page", "--into", tmp_path]
    page = tmp_path / "page.md"
    page.write_text("old\n## What bounds it\nby hand\n")
    for bytes, status in [(0, 0), (3, 1)]:
        wrong.write_text(str(bytes))
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert done.returncode == status, done.stderr
        text = page.read_text()
        assert f"came back wrong: {2 * bytes}." in text
        assert "| first touch, us a page | 1.00 | 10.00 | 7.50 | 0.75 | 0.8: met |" in text
        assert "| mean access, us | 1.00 | 10.00 | 7.50 | 0.75 | 0.6: **missed** |" in text
        assert "at least 1: **missed**" in text
        assert text.endswith("## What bounds it\nby hand\n") and "old" not in text
        assert set(json.loads((tmp_path / "page.json").read_text())["cases"]) == {"uniform", "threads"}


FUZZER = """#!/bin/sh
echo '#2 INITED cov: 3 ft: 4 corp: 1/1b' >&2
echo '#10 DONE   cov: 5 ft: 7 corp: 3/12b lim: 4' >&2
echo 'stat::number_of_executed_units: 10' >&2
echo 'stat::average_exec_per_sec:     9' >&2
echo "$@" >>{told}
exit {status}
"""


def test_what_a_fuzzer_says_is_recorded(tmp_path):
    """With a cargo and fuzzers that are made up."""
    cargo, told = tmp_path / "cargo", tmp_path / "told"
    cargo.write_text("#!/bin/sh\n")
    cargo.chmod(0o755)
    (tmp_path / "any/release").mkdir(parents=True)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CARGO_TARGET_DIR": str(tmp_path)}

    def fuzz(statuses, *words):
        for name, status in statuses.items():
            fuzzer = tmp_path / "any/release" / name
            fuzzer.write_text(FUZZER.format(told=told, status=status))
            fuzzer.chmod(0o755)
        command = [REPOSITORY / "bench/fuzz", "--only", ",".join(statuses), "--record", "page", "--into", tmp_path, *words]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, env=environment)
        return done.returncode, done.stdout, done.stderr

    status, out, said = fuzz({"wire_request": 0, "wire_answer": 0}, "--runs", "10")
    assert status == 0 and "| wire_request | 10 | 9 | 5 | 3 |" in out and "fail: none." in out, out + said
    assert (tmp_path / "page.md").read_text().endswith(out) and "-runs=10 " in told.read_text()
    status, out, _ = fuzz({"wire_request": 0, "wire_answer": 77}, "--runs", "10")
    assert status == 1 and "fail: wire_answer." in out
    assert fuzz({"nothing": 0})[0] == 2
    (tmp_path / "any/release/wire_answer").unlink()
    status, _, said = fuzz({}, "--only", "wire_answer")
    assert status == 1 and "wire_answer was not built" in said


@pytest.mark.limit(300)
def test_applications_are_compared_and_recorded(processes, spillway, tmp_path):
    before = left_behind()
    only = "sort,graph,redis,memcached,guest"
    words = [REPOSITORY / "bench/apps", "--tiny", "--rounds", 1, "--share", 50, "--only", only, "--record", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=290)
    assert run.returncode == 0, err
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith(out) and "Wrong results: 0." in out and "geometric mean of these" in out
    # Pictures are for who has matplotlib.
    pictures = {"results-slowdown.svg", "results-latency.svg"} if loaded("apps").plotting("") else set()
    assert {path.name for path in tmp_path.glob("*.svg")} == pictures and all(f"](./{name})" in page for name in pictures)
    record = json.loads((tmp_path / "results-apps.json").read_text())
    told = record["applications"]
    assert "\n".join(loaded("apps").page(record["machine"], record["told"], record["remarks"], told)) + "\n" == out
    counting, checked = ("quicksort", "Redis, wiki trace", "memcached, wiki trace"), ("graph kernel (BFS, PageRank)", "a guest of QEMU (TCG)")
    for name in (*counting, *checked):
        one = told[name]
        assert one["footprint_mib"] > 16 and f"| {name} | {one['footprint_mib']:.0f} MiB |" in out
        (native,), (ours,) = one["runs"]["native"], one["runs"]["spillway 50"]
        assert ours["wrong"] == 0 if name in counting else ours["check"] == native["check"]
        assert ours[one["time"]] > 0 and native[one["time"]] > 0
        # What it waited for is part of what is told.
        assert ours["pager"]["faults"] > 100 and ours["pager"]["fault_us"]["mean"] > 0
        assert f"| {name} | 50 % |" in out
    assert told["graph kernel (BFS, PageRank)"]["runs"]["native"][0]["teps"] > 1e6
    assert re.search(r"^## graph kernel \(BFS, PageRank\): searches\n\n.*\n.*\n\| native \| [\d,]{9,} \|$", out, re.M), out
    assert all(run["together_per_s"] > 100 for runs in told["Redis, wiki trace"]["runs"].values() for run in runs if run)
    latencies = [us for _, us in told["Redis, wiki trace"]["runs"]["native"][0]["latency_us"]]
    assert latencies == sorted(latencies) and latencies[0] > 0
    assert left_behind() == before


def test_a_part_of_all_applications_does_not_replace_their_record(spillway):
    for part in (["--tiny"], ["--only", "sort"], ["--share", "50"]):
        words = [REPOSITORY / "bench/apps", *part, "--record", "--spillway", spillway.path]
        refused = subprocess.run([*map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert refused.returncode == 2 and "give --into" in refused.stderr, refused.stderr


def test_results_are_what_their_figures_say():
    record, page = (REPOSITORY / "docs/bench" / name for name in ("results-apps.json", "RESULTS.md"))
    told = json.loads(record.read_text())
    lines = loaded("apps").page(told["machine"], told["told"], told["remarks"], told["applications"])
    assert page.read_text().startswith("\n".join(lines) + "\n")


def test_what_is_lost_is_told_by_what_is_lost_under_zram():
    apps = loaded("apps")
    run = lambda excess: excess and {"total_s": 10 * (1 + excess), "pager": None}
    one = {"footprint_mib": 100, "time": "total_s", "runs": {"native": [run(1e-9)] * 3}}
    one["runs"] |= {"zram 50": [run(0.4), run(0.2), None], "spillway 50": [run(0.1), run(0.2), run(0.9)]}
    assert [round(it, 3) for it in apps.ratios(apps.beside_zram(one, 50))] == [0.25, 1.0]
    assert "Of 1 that also end under zram in more than half of the rounds, 0 lose nothing or at most half" in "".join(apps.goals({"it": one}, 50))
    # Where nothing is lost under zram, nothing is to be lost.
    assert apps.ratios([(0.1, -0.1), (-0.1, -0.2), (0.0, 0.0)]) == [float("inf"), 0.0, 0.0]
    # One round of three is too few to judge by.
    one["runs"]["zram 50"] = [run(0.4), None, None]
    assert apps.comparable({"it": one}, 50) == []
    told = {"ends": {"it, zram 50": [apps.KILLED] * 5}}
    assert apps.unfinished(told, "it, zram 50") == "killed each time"
    told["ends"]["it, zram 50"].append("timed out")
    assert apps.unfinished(told, "it, zram 50") == "ended well in no round"
    assert apps.ends_told(told["ends"]["it, zram 50"]).endswith("began again: 6, of which the kernel killed 5 for want of memory; others: timed out.")


def test_builds_are_compared_on_applications_and_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/apps-ab", "--tiny", "--rounds", 1, "--only", "sort", "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, f"one={spillway.path}", f"two={spillway.path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "Wrong results: 0." in out, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    rows = dict(re.findall(r"^\| quicksort \| (\w+) \| [^|]+ \| ([\d.]+|-) \| [\d,]+ \|", out, re.M))
    assert list(rows) == ["one", "two"] and rows["one"] in ("1.00", "-"), out
    runs = json.loads((tmp_path / "tiny.json").read_text())["applications"]["quicksort"]["runs"]
    assert list(runs) == ["native", "one", "two"]
    assert all(runs[build][0]["pager"]["fetched_pages"] > 100 for build in ("one", "two")), runs
    for bad, told in [(["one"], "is no NAME=PATH"), (["one=/dev/null"], "is no NAME=PATH"), ([f"one={spillway.path}"] * 2, "names of their own"),
                      ([f"native={spillway.path}"], "names of their own")]:
        refused = subprocess.run([*map(str, words), *bad], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr


def test_a_build_under_which_nothing_is_lost_is_no_negative_multiple():
    waits = {"mean": 46, "p50": 13, "p99": 385, "p999": 2163}
    run = lambda excess: {"total_s": 10 * (1 + excess), "pager": {"fault_us": waits, "faults": 3000}}
    for first, second, told in [(0.5, 0.25, ["1.00", "0.50"]), (0.5, -0.25, ["1.00", "-"]), (-0.25, 0.5, ["-", "-"])]:
        one = {"time": "total_s", "runs": {"native": [run(0)], "one": [run(first)], "two": [run(second)]}}
        _head, _rule, *rows, _end = loaded("apps-ab").lines_of({"quicksort": one})
        assert [row.split(" | ")[3] for row in rows] == told, rows


def test_builds_are_compared_access_by_access_and_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/walk-ab", "--rounds", 1, "--seconds", 0.5, "--size", 64, "--order", "sequential", "--pool", "local,tcp"]
    words += ["--busy", 1, "--record", "tiny", "--into", tmp_path]
    # One that listens, and answers nobody: it is not asked.
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "daemon.sock"))
        daemon.listen()
        run = processes.start([*words, f"one={spillway.path}", f"two={spillway.path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, env=os.environ | {"SPILLWAY_DAEMON": str(tmp_path / "daemon.sock")})
        out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "Wrong results: 0." in out, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    measured = json.loads((tmp_path / "tiny.json").read_text())["measured"]
    assert [(one["order"], one["pool"]) for one in measured] == [("sequential", "local"), ("sequential", "tcp")]
    for one in measured:
        assert all(run["fetched_pages"] > 100 and run["accesses"] > 1000 for runs in one["runs"].values() for run in runs), one
    assert len(re.findall(r"^\| one \|(?: [\d.]+ \([\d.]+\) \| 1\.00 \(1\.00\.\.1\.00\) \|){5}$", out, re.M)) == len(measured), out
    for bad, told in [(["one"], "is no NAME=PATH"), ([f"one={spillway.path}"] * 2, "names of their own"), (["--pool", "udp", f"one={spillway.path}"], "no udp here")]:
        refused = subprocess.run([*map(str, words), *bad], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr


def test_threads_and_pagers_are_measured_and_recorded(processes, spillway, tmp_path):
    words = [RUN.parent / "threads", "--rounds", 1, "--seconds", 0.5, "--size", 64, "--order", "uniform"]
    words += ["--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "Wrong results: 0." in out, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    runs = json.loads((tmp_path / "tiny.json").read_text())["measured"]["uniform"]
    assert all(len(mine) == 1 and mine[0]["accesses_per_s"] > 1000 for mine in runs.values()), runs
    # Each row is told beside one thread.
    rows = dict(re.findall(r"^\| ([^|]+) \| [\d,]+ \| ([\d.]+) \(", out, re.M))
    assert list(rows) == list(runs) and len(rows) == 5 and rows["one thread"] == "1.00", out


@pytest.mark.alone
def test_what_interrupts_cost_is_measured_and_recorded(processes, spillway, tmp_path):
    words = [RUN.parent / "interrupts", "--rounds", 1, "--seconds", 0.5, "--size", 64, "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "Wrong results: 0." in out, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    runs = {name: one for name, (one,) in json.loads((tmp_path / "tiny.json").read_text())["runs"].items()}
    assert all(one["accesses_per_s"] > 1000 for one in runs.values()), runs
    rows = re.findall(r"^\| ([^|]+) \| [\d,]+ \| [\d.]+ \([^|]+\) \| [\d.]+ \|$", out, re.M)
    assert rows == list(runs) and len(rows) == 3, out
    # Only who shares its memory is interrupted for its pages.
    alone, _apart, shared = (one["interrupts_per_access"] for one in runs.values())
    assert shared > 0.01 > alone, runs


def test_a_database_is_among_applications(processes, spillway, tmp_path):
    if not loaded("applications.py").has_duckdb():
        pytest.skip("DuckDB for Python not found: scripts/setup-tests fetches it")
    words = [REPOSITORY / "bench/apps", "--tiny", "--rounds", 1, "--share", 50, "--only", "duckdb", "--record", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=70)
    assert run.returncode == 0 and "Wrong results: 0." in out, out + err
    runs = json.loads((tmp_path / "results-apps.json").read_text())["applications"]["analytics in DuckDB"]["runs"]
    (native,), (ours,) = runs["native"], runs["spillway 50"]
    assert ours["check"] == native["check"] and ours["pager"]["fetched_pages"] > 1000, ours
    # What the kernel is to page the database does not keep in files of its own instead.
    # (zram need not get to the end at half: then there is no run to tell of.)
    ended = [run for mode in runs.values() for run in mode if run is not None]
    assert len({run["memory_limit"] for run in ended}) == 1 < len(runs), runs


def test_what_a_neighbour_costs_is_measured_and_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/fairness", "--rounds", 1, "--seconds", 1, "--goal", 1000, "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text() and "| of faults |" in out
    (one,) = json.loads((tmp_path / "tiny.json").read_text())["rounds"]
    assert all(one[when]["faults"] > 100 and one[when]["fault_p99_us"] >= one[when]["fault_p50_us"] > 0 for when in ("alone", "fitting", "thrashing"))


def test_what_idle_neighbours_cost_is_measured_and_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/crowd", "--neighbours", "0,8", "--rounds", 1, "--seconds", 1, "--goal", 1000, "--record", "tiny", "--into", tmp_path]
    run = processes.start([*words, "--spillway", spillway.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text() and "| spillway | 8 |" in out
    (one,) = json.loads((tmp_path / "tiny.json").read_text())["rounds"]
    assert all(figures["accesses"] > 1000 and figures["p99_us"] > figures["mean_us"] > 0 for figures in one["spillway"].values())


@pytest.mark.limit(150)
def test_how_fast_a_lost_server_is_rebuilt_is_measured_and_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/rebuild", "--tiny", "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=140)
    assert run.returncode == 0 and "wrong results: 0" in out and "lost pages: 0" in out, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    (one,) = json.loads((tmp_path / "tiny.json").read_text())["rounds"]
    assert one["rebuilt_mib"] > 0.25 and one["mb_per_s"] > 0
    # Each window is of accesses of its own.
    assert all(one[window]["accesses"] > 100 and one[window]["p99_us"] > one[window]["p50_us"] for window in ("before", "degraded", "meanwhile"))


def test_a_wiki_client_tells_a_value_that_changed(tmp_path):
    """A server that answers with other bytes than it was given."""
    import socket
    import threading

    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def lie():
            stream, _ = listener.accept()
            with stream, stream.makefile("rb") as asked:
                for line in asked:
                    if line.startswith(b"set"):
                        asked.read(int(line.split()[-1]) + 2)
                        stream.sendall(b"STORED\r\n")
                    else:
                        stream.sendall(b"VALUE x 0 3\r\nabc\r\nEND\r\n")

        threading.Thread(target=lie, daemon=True).start()
        words = [sys.executable, REPOSITORY / "bench/wiki.py", "memcached", path, 10, 50]
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    # Of 50 requests those that are gets, and 3 times 16 that are made together.
    assert 30 + 48 < told["wrong"] <= 50 + 48, told["wrong"]


def test_what_the_command_measures_is_kept(processes, spillway, tmp_path):
    options = ["--size", "32M", "--rounds", "1", "--order", "uniform", "--mode", "local"]
    words = [REPOSITORY / "bench/overview", "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path, *options]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    record = (tmp_path / "tiny.md").read_text()
    assert "uniform, 50 % local" in out and out.strip() in record and f"`spillway bench {' '.join(options)}`" in record
    kept = json.loads((tmp_path / "tiny.json").read_text())
    assert kept["machine"]["cpus"] and kept["results"]


def test_where_the_time_goes_is_measured_and_recorded(processes, servers, spillway, need, tmp_path):
    need("perf")
    # A memory server of someone else, and who uses it, are not counted.
    server = servers.spillway()
    walk = [spillway.path, "bench-walk", "--size", "64M", "--order", "uniform", "--accesses", "1000000000", "--seconds", "600"]
    pool = ["--local", "32M", "--pool", f"tcp://{server.address}"]
    beside = processes.start([spillway.path, "run", "-q", *pool, "--", *walk], stdout=subprocess.DEVNULL)
    words = [REPOSITORY / "bench/profile", "--order", "sequential", "--pool", "local,tcp", "--seconds", "1", "--size", "64"]
    words += ["--functions", "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=60)
    assert beside.poll() is None
    beside.terminate()
    assert run.returncode == 0, out + err
    assert out.strip() in (tmp_path / "tiny.md").read_text()
    one, far = json.loads((tmp_path / "tiny.json").read_text())["profiles"]
    assert one["fetched_pages"] > one["faults"] > 100, one
    threads, about = one["threads_s"], one["fault_thread_s"]
    assert threads["the fault thread"] > 0 and threads["the agent, in the program"] > 0, one
    assert about["installs pages (UFFDIO_COPY)"] > 0 and abs(sum(about.values()) - threads["the fault thread"]) < 1e-6, one
    assert far["threads_s"]["the memory server"] > 0 and far["fault_thread_s"]["talks to the memory server"] > 0, far
    assert "the memory server" not in threads, one
    assert any("spillway_core" in function for function in one["functions_s"]), one
    assert abs(sum(one["functions_s"].values()) - threads["the fault thread"]) < 1e-6, one


@pytest.mark.limit(200)
def test_what_applications_wait_for_is_measured_and_recorded(processes, spillway, need, tmp_path):
    need("perf")
    # Whoever else has such a name, and a pager, is not counted.
    bystander = shutil.copy(spillway.path, tmp_path / "redis-bystander")
    walk = ["nice", "-n", 19, bystander, "bench-walk", "--size", "64M", "--order", "uniform", "--accesses", "1000000000", "--seconds", "600"]
    beside = processes.start([spillway.path, "run", "-q", "--local", "32M", "--", *walk], stdout=subprocess.DEVNULL)
    out, page, kept = tiny(processes, spillway, tmp_path, "waits", "--only", "sort,redis")
    assert beside.poll() is None
    beside.terminate()
    assert out.strip() in page
    told = kept["applications"]
    assert set(told) == {"quicksort", "Redis, wiki trace"}
    for one in told.values():
        # Several may wait for one page, and who is served soon enough from another CPU does not even fall asleep.
        assert one["faults"] > 100 and 100 < one["waits_for_pages"] < 2 * one["faults"], one
        assert one["spent_s"]["page"] > 0 and one["spent_s"]["running"] > 0 and one["system_calls"]["faults"] > one["faults"], one
        # Those on another CPU than the fault thread are left out, and those that took several calls.
        steps = one["steps_us"]
        assert 20 < one["steps"] <= one["waits_for_pages"] and len(steps) == 6, one
        assert min(steps["leaves"], steps["reads"], steps["installs"], steps["woken"]) > 0 and sum(steps.values()) < 1000, steps
    assert told["Redis, wiki trace"]["spent_s"]["else"] > told["quicksort"]["spent_s"]["else"], told


def test_churn_tells_a_daemon_that_grows_from_one_that_does_not():
    from daemons import Resources

    churn = loaded("churn")

    def grew(**more):
        """What grew over six rounds, by so much from each to the next."""
        calm = {"descriptors": 8, "threads": 6, "resident_kib": 20000, "memory_files_kib": 9000}
        rounds = [{name: had + nth * more.get(name, 0) for name, had in calm.items()} for nth in range(6)]
        return [row[0] for row in churn.growth([{"has": Resources(**has)} for has in rounds]) if row[-1]]

    assert grew() == [] and grew(resident_kib=-100, threads=-1) == []
    assert grew(descriptors=1, threads=1) == ["descriptors", "threads"]
    # What it has at hand differs from moment to moment.
    assert grew(resident_kib=churn.ALLOWED_KIB // 4) == [] and grew(resident_kib=churn.ALLOWED_KIB // 3) == ["resident kib"]
    assert grew(memory_files_kib=churn.ALLOWED_KIB) == ["memory files kib"]


def tiny(processes, spillway, tmp_path, name, *more):
    """Runs the small form of a script that records: what it printed, and what it kept."""
    words = [RUN.parent / name, "--tiny", *more, "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = run.communicate(timeout=180)
    assert run.returncode == 0, out + err
    return out, (tmp_path / "tiny.md").read_text(), json.loads((tmp_path / "tiny.json").read_text())


@pytest.mark.limit(200)
def test_a_database_that_shares_memory_is_measured_and_recorded(processes, spillway, tmp_path):
    if not list(pathlib.Path("/usr/lib/postgresql").glob("*/bin/pgbench")):
        give_up("no PostgreSQL: scripts/setup-tests installs it")
    if not pathlib.Path("/sys/class/zram-control").exists():
        pytest.skip("this kernel has no zram")
    out, page, kept = tiny(processes, spillway, tmp_path, "postgres")
    assert out.strip() in page and "- wrong results: 0" in out
    (one,) = kept["rounds"]
    for figure in ("uniform queries/s", "uniform mean, us", "zipf queries/s", "zipf mean, us"):
        # zram need not get to the end.
        assert all(run[figure] > 0 for run in one.values() if run) and f"| {figure} |" in out, one
    assert one["native"]["sums"] == one["spillway"]["sums"] and one["spillway"]["fetched_pages"] > 1000, one


@pytest.mark.limit(200)
def test_how_fast_a_guest_shrinks_is_measured_and_recorded(processes, spillway, tmp_path):
    out, page, kept = tiny(processes, spillway, tmp_path, "shrink")
    assert out.strip() in page and "goal 100,000 pages a second" in out and "Every checksum was right" in out
    (one,) = kept["rounds"]
    assert one["left_pages"] > 25_000 and one["pages_s"] == pytest.approx(one["left_pages"] / one["shrink_s"]), one
    assert f"| {one['left_pages']:,} |" in out and f"{one['pages_s']:,.0f} pages a second" in out
    assert ("**missed**" in out) == (one["pages_s"] < 100_000)
    # It looks pages up all the while, and what left comes back for that.
    assert min(one[f"lookups_{when}_s"] for when in ("before", "small", "after")) > 1000 and one["came_back_pages"] > 1000, one
    # It has 24 MiB, and its monitor some of its own that is not managed.
    assert kept["whole_mib"] > 128 > one["resident_mib"], kept


@pytest.mark.limit(200)
def test_how_little_a_guest_lives_on_is_measured_and_recorded(processes, spillway, need, tmp_path):
    need("ip", "dropbear", "dropbearkey", "dbclient")
    out, page, kept = tiny(processes, spillway, tmp_path, "footprint")
    assert out.strip() in page and "were checked: all right" in out
    started, small, let_go = kept["rows"]
    # What comes and goes while pages are counted may count twice.
    assert max(small["resident"]) <= 300 < 20_000 < min(started["resident"]) and small["faults"] > 256, kept
    assert all(row["right"] and row["login_s"] > 0 for row in (started, small, let_go)), kept
    assert sum(len(row["pings_ms"]) for row in (started, small, let_go)) >= 2 and " of 1, " in out
    assert small["revived_s"] > 0 and "| SSH logs in | 256 | 180 | **missed** |" in out
    # The balloon leaves the guest more than it could live on.
    mib, pages = kept["balloon"]
    assert mib == 96 and 256 < pages <= mib * 256 and f"| balloon at its largest (96 MiB left) | {pages} |" in out


@pytest.mark.limit(200)
def test_what_equal_guests_cost_is_measured_and_recorded(processes, spillway, need, tmp_path):
    need("qemu-system-x86_64", "busybox")
    settings = {path: path.read_text() for path in pathlib.Path("/sys/kernel/mm/ksm").glob("run")}
    out, page, kept = tiny(processes, spillway, tmp_path, "sharing")
    lines = page.splitlines()
    assert all(line in out for line in lines[2:]) and "read their image wrong afterwards: 0" in out and kept["wrong"] == 0
    for name, steps in kept["pool"].items():
        alone, both = steps
        assert [each["guests"] for each in steps] == [1, 2]
        # The second has little that the first has not.
        assert both["kept_bytes"] < 1.7 * alone["kept_bytes"] and both["left_bytes"] > 1.8 * alone["left_bytes"], steps
        assert 0.2 < alone["saved"] < both["saved"] == 1 - both["kept_bytes"] / both["left_bytes"], steps
        judged = "met" if both["saved"] >= 0.86 else "**missed**"
        assert f"| {name} | {100 * both['saved']:.1f} % | at least 86 % (MemX, Table II: 85 % of up to 50 guests) | {judged} |" in lines
    once, compressed = (steps[-1]["kept_bytes"] for steps in kept["pool"].values())
    assert compressed < once
    if settings:
        assert kept["memory"]["merged_bytes"] > 0 and f"guests the kernel has merged {kept['memory']['merged_bytes'] >> 20} MiB" in out
    assert all(path.read_text() == before for path, before in settings.items())
