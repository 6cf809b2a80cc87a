"""Replacement policies: every one gives right bytes and keeps the budget, also when it takes over from another."""

import json
import subprocess

import pytest
from harness import MIB, PEAK_ALLOWANCE, REPOSITORY
from mechanics import Program

POLICIES = ["rr", "clock", "nru", "fifo", "lru", "lru3", "s3fifo", "sieve"]


@pytest.mark.parametrize("evict", ["pre-evict", "on-demand"])
@pytest.mark.parametrize("scope", ["global", "target"])
def test_policies_take_over_from_each_other(processes, spillway, build, evict, scope):
    target = Program(processes, [build("fill"), 48], spillway, "24M").ready()
    for policy in [*POLICIES, "clock"]:
        done = spillway.cli("set", target.pid, f"policy={policy}", f"evict={evict}", f"scope={scope}")
        assert (done.returncode, done.stderr) == (0, ""), done
        before = spillway.find(target.pid)
        assert [before[key] for key in ("policy", "evict", "scope")] == [policy, evict, scope]
        target.ask("rewrite")
        after = spillway.find(target.pid)
        assert after["evicted_pages"] > before["evicted_pages"], f"{policy} lets nothing leave"
        assert after["local_bytes"] <= 24 * MIB * PEAK_ALLOWANCE, policy
        target.unharmed()


def test_what_is_in_use_stays(spillway, build, tmp_path):
    """A clock comes by everything in turn; one that sees access bits passes over what is used all the time."""
    hot_mib, cold_mib, turns = 12, 36, 6
    # A first touch of every page, and one fault for each page of the scan.
    unavoidable = 256 * (hot_mib + cold_mib + turns * cold_mib)
    avoidable = {}
    for policy in ("clock", "nru"):
        stats = tmp_path / policy
        options = ["--local", "24M", "--block", "4k", "--policy", policy, "--stats", stats]
        ended = spillway.cli("run", *options, "--", build("hot"), hot_mib, cold_mib, turns, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, "READY\nDONE\n"), ended
        counters = json.loads(stats.read_text())
        if policy == "nru" and not counters["access_bits"]:
            pytest.skip("SKIPPED: access bits need CAP_BPF, CAP_PERFMON, and a kernel with BPF and BTF")
        avoidable[policy] = counters["faults"] - unavoidable
    assert avoidable["nru"] < avoidable["clock"] / 2, avoidable


def recorded(processes, spillway, words, tmp_path):
    """Runs a comparison; its record, which says what it printed."""
    out = [*words, "--record", "tiny", "--into", tmp_path, "--spillway", spillway.path]
    run = processes.start(out, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    record = (tmp_path / "tiny.md").read_text()
    assert said in record and (tmp_path / "tiny.json").exists()
    return record


def test_a_tiny_comparison_is_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/policies", "--tiny", "--rounds", 1, "--only", "zipf,python"]
    record = recorded(processes, spillway, words, tmp_path)
    # Time, faults, pages fetched: each with a head, and a row for each variant.
    rows = [line for line in record.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 * (1 + len(POLICIES) + 2), record


@pytest.mark.parametrize("pool", ["local:", "emulated:?delay=4us&serialize=1"])
def test_blocks_of_every_size_give_right_bytes(processes, spillway, build, pool):
    target = Program(processes, [build("fill"), 48], spillway, "24M", ["--pool", pool]).ready()
    for block in ["64k", "elastic", "4k", "16k", "elastic", "8k", "32k", "elastic"]:
        done = spillway.cli("set", target.pid, f"block={block}")
        assert (done.returncode, done.stderr) == (0, ""), done
        before = spillway.find(target.pid)
        assert before["block"] == block
        target.ask("rewrite")
        after = spillway.find(target.pid)
        fetched, ahead = (after[key] - before[key] for key in ("fetched_pages", "prefetched_pages"))
        assert fetched > 0 and (ahead == 0 if block == "4k" else ahead > fetched / 4), (block, fetched, ahead)
        assert after["local_bytes"] <= 24 * MIB * PEAK_ALLOWANCE, block
        target.unharmed()


def test_a_tiny_comparison_of_blocks_is_recorded(processes, spillway, tmp_path):
    words = [REPOSITORY / "bench/blocks", "--tiny", "--rounds", 1, "--only", "seq,sqlite", "--pool", "local", "--share", "50"]
    record = recorded(processes, spillway, words, tmp_path)
    # One of the sequential program; speeds, with a mean; accuracy, faults and pages fetched.
    rows = [line for line in record.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + (1 + 2 + 1) + 3 * (1 + 2), record
