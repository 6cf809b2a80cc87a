"""Memory churned in every way there is, under pressure, each byte checked against a shadow: tests/programs/torture.c.

A failure prints its seed and what each thread did last. SPILLWAY_TORTURE_SECONDS makes each run longer than the 10 s
that CI can afford; SPILLWAY_TORTURE_SEED repeats one.
"""

import json
import os
import signal
import subprocess
import time

import pytest
from harness import MIB, status_field

SECONDS = float(os.environ.get("SPILLWAY_TORTURE_SECONDS", "10"))
SLACK_SECONDS = 45


@pytest.fixture
def torture(build):
    return build("torture", "-Wshadow")


def seed_for(shape):
    """A fresh seed, unlike that of the other shapes."""
    return int(os.environ.get("SPILLWAY_TORTURE_SEED", "0")) or int(time.time() * 1000) + shape


def counters(process, seed):
    """Waits for a torture run that was started with pipes, and returns its counters."""
    print(f"seed {seed}")
    try:
        out, err = process.communicate(timeout=SECONDS + SLACK_SECONDS)
    except subprocess.TimeoutExpired:
        tails = hung(process)
        raise AssertionError(f"seed {seed}: not done after {SECONDS + SLACK_SECONDS} s; each thread's last steps:\n{tails}") from None
    assert process.returncode == 0, f"seed {seed}: status {process.returncode}\n{out}\n{err[-6000:]}"
    counted = json.loads(out.splitlines()[-1])
    # README.md, Limits: mremap may refuse what was mapped at one time, now and then.
    assert counted["found_apart"] <= 1 + counted["steps"] // 10000, counted
    return counted


def hung(process):
    """What a run says about itself when it is asked, before it is killed."""
    os.killpg(process.pid, signal.SIGUSR1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1][-6000:]


def start(processes, argv):
    return processes.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def options(seed, seconds, mib, threads):
    return ["--seed", seed, "--seconds", seconds, "--mib", mib, "--threads", threads]


@pytest.mark.limit(int(SECONDS + SLACK_SECONDS + 20))
@pytest.mark.parametrize(
    ("mib", "local", "threads"),
    [(64, "16M", 2), (48, "4M", 1), (96, "50%", 4)],
    ids=["a quarter", "the floor", "half, threads"],
)
def test_under_a_budget(processes, spillway, torture, tmp_path, mib, local, threads):
    seed, stats = seed_for(threads), tmp_path / "stats.json"
    command = [spillway.path, "run", "--local", local, "--stats", stats, "--", torture, *options(seed, SECONDS, mib, threads)]
    counted = counters(start(processes, command), seed)
    assert counted["pages_verified"] > 10000, counted
    paged = json.loads(stats.read_text())
    assert paged["evicted_pages"] > 1000 and paged["fetched_pages"] > 100, paged


@pytest.mark.limit(int(SECONDS + SLACK_SECONDS + 20))
def test_adopted_and_let_go_again_and_again(processes, spillway, torture):
    seed = seed_for(0)
    process = start(processes, [torture, *options(seed, SECONDS + SLACK_SECONDS, 64, 2)])
    begun, rounds = time.monotonic(), 0
    time.sleep(0.5)
    while time.monotonic() < begun + SECONDS - 4 and process.poll() is None:
        spillway.attach(process.pid, "24M")
        for size in ["8M", "48M", "12M"]:
            time.sleep(0.3)
            spillway.resize(process.pid, size)
        time.sleep(0.3)
        spillway.detach(process.pid)
        assert status_field(process.pid, "TracerPid") in ("0", None)
        rounds += 1
    process.terminate()
    counters(process, seed)
    assert rounds >= 2


# ---- the torture program itself: that it is right without a pager, repeatable, and not blind


def test_mappings_that_are_changed_while_they_are_registered(spillway, build):
    """Natively no mremap fails. One of a mapping that a call has just cut does, until the next call: rarely (before the scanner
    asked of every mapping again, one in 2300)."""
    ended = spillway.cli("run", "--local", "8M", "--", build("remap"), "6", "4", "32", timeout=60)
    _, refused, _, calls = ended.stdout.split()
    print(f"{refused} of {calls} mremaps were refused")
    assert int(calls) > 10_000 and int(refused) * 4000 < int(calls)


def test_natively(processes, torture):
    seed = seed_for(9)
    counted = counters(start(processes, [torture, *options(seed, 4, 64, 2)]), seed)
    idle = [name for name, count in counted["ops"].items() if count == 0]
    assert not idle, f"never done in 4 s: {idle}"
    assert counted["found_apart"] == 0, counted


def test_a_seed_repeats_the_run(processes, torture):
    command = [torture, *options(5, 60, 32, 2), "--ops", 1500]
    first, second = (counters(start(processes, command), 5) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["flip", "zero", "drop", "stale", "lost", "child"])
def test_sabotage_is_noticed(processes, torture, kind):
    process = start(processes, [torture, *options(11, 20, 16, 2), "--sabotage", kind])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "FAILED" in err and "--seed 11" in err, err
    assert {"lost": "lost update", "child": "forked child"}.get(kind, "wrong content") in err, err


def test_it_uses_more_than_the_budgets_above(processes, torture):
    process = start(processes, [torture, *options(3, 5, 64, 2)])
    peak = 0
    while process.poll() is None:
        peak = max(peak, int((status_field(process.pid, "RssAnon") or "0 kB").split()[0]) * 1024)
        time.sleep(0.1)
    assert peak > 32 * MIB, peak
