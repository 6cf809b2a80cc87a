"""Programs whose first thread ends before others do: what the kernel tells of a process, it tells of its first thread."""

import os
import signal
import subprocess
import time

import pytest
from harness import eventually, those_who_run, thread_stats
from mechanics import Program, let_go, squeeze, state, verdict

MIB_USED = 32


@pytest.fixture
def outlive(build):
    return build("outlive")


def alone(target):
    """Its id, once its first thread has ended."""
    pid = target.pid
    target.tell("")
    assert target.line() == "ALONE" and state(pid) == "Z"
    return pid


def checked(target):
    """That all of its memory is right; all of it is written anew."""
    target.tell("")
    assert target.line() == "OK"


def test_first_thread_ends_before_the_others(processes, spillway, outlive):
    target = Program(processes, [outlive, str(MIB_USED)], spillway, "8M").ready()
    pid = alone(target)
    for _ in range(3):
        checked(target)
    # It was taken note of that memory is left, and it was evicted and brought back.
    entry = spillway.settled(pid)
    assert entry["evicted_pages"] > 2000 and entry["fetched_pages"] > 1000, entry
    target.process.stdin.close()
    assert target.status() == 7


def test_adopted_after_its_first_thread_ended(processes, spillway, outlive):
    target = Program(processes, [outlive, str(MIB_USED)]).ready()
    alone(target)
    attached = spillway.attach(target.pid, "8M")
    squeeze(spillway, target.pid, "8M")
    for _ in range(3):
        checked(target)
    assert spillway.settled(target.pid)["fetched_pages"] > 1000
    let_go(attached)
    checked(target)
    target.process.stdin.close()
    assert target.status() == 7


@pytest.mark.parametrize("adopted", [False, True])
def test_ends_with_its_only_thread(processes, spillway, outlive, adopted):
    """By exit, not exit_group: our own thread in it must not keep it."""
    argv = [outlive, str(MIB_USED), "alone"]
    target = Program(processes, argv).ready() if adopted else Program(processes, argv, spillway, "8M").ready()
    attached = spillway.attach(target.pid, "8M") if adopted else None
    spillway.settled(target.pid)
    checked(target)
    target.process.stdin.close()
    assert target.status() == 7
    if attached:
        assert attached.finish(timeout=10).status == 0


@pytest.mark.parametrize("adopted", [False, True])
def test_threads_that_follow_each_other_are_not_taken_for_dead(processes, spillway, build, adopted):
    """The only one that was seen had ended when it was looked at, and had made another: its process was given up."""
    argv = [build("torch"), 24, 4]
    target = Program(processes, argv) if adopted else Program(processes, argv, spillway, "8M")
    attached = spillway.attach(target.pid, "8M") if adopted else None
    assert target.line(30) == "OK"
    assert target.status() == 0
    assert not attached or attached.finish(timeout=10).status == 0


def test_memory_outlives_the_process_that_somebody_shares_it_with(processes, spillway, servers, build, tmp_path):
    """Its end was seen before its agent's, as a slow pool was waited for: the other process read zeros."""
    said, lodger = tmp_path / "said", build("lodger")
    options = ["--pool", f"tcp://{servers.spillway().address}?delay=60ms"]
    for _ in range(2):
        program = Program(processes, [lodger, 14, said, 512], spillway, "8M", options)
        assert program.status(30) == 0
        assert verdict(said) == "OK\n"
        eventually(lambda: not those_who_run(lodger), "the other to end")


def test_memory_outlives_a_process_that_is_killed_while_pages_leave_it(processes, spillway, build, tmp_path):
    """Nobody is left to read what its agent had moved to where it is read: those pages may raise SIGBUS, and never read as zeros."""
    said, lodger = tmp_path / "said", build("lodger")
    for milliseconds in [200, 215, 231, 248]:
        program = Program(processes, [lodger, 24, said, 1, milliseconds], spillway, "8M")
        assert program.status(30) == 128 + signal.SIGKILL
        assert verdict(said) == "OK\n"
        eventually(lambda: not those_who_run(lodger), "the other to end")


@pytest.mark.parametrize("shared", [False, True])
def test_what_another_process_gives_up_while_its_owner_sleeps_reads_as_zeros(processes, spillway, build, shared):
    """Only the owner's threads were looked at for who may be at it still: what left before the other had got to it came back."""
    ours, its = sorted(os.sched_getaffinity(0))[:2]
    target = Program(processes, ["taskset", "-c", str(ours), build("giver"), "48", str(its), *["shared"] * shared]).ready()
    attached = spillway.attach(target.pid, "96M", *["--shared-memory"] * shared)
    eventually(lambda: spillway.find(target.pid)["touched_bytes"] >= 48 << 20, "its memory to be known")
    eventually(lambda: spillway.find(target.pid)["shared_files_ready"] == shared, "it to be known who has it")
    attached.process.send_signal(signal.SIGSTOP)
    eventually(lambda: all(") T " in stat for stat in thread_stats(attached.pid)), "the pager to be stopped")
    target.tell("")
    giver = int(target.line().removeprefix("GIVER "))
    eventually(lambda: state(giver) == "D", "the other to wait until it is heard of")
    # Heard of, it goes on when it has a CPU: in a second, when the kernel takes that from who has real-time priority.
    hog = processes.start(["chrt", "-f", "1", "taskset", "-c", str(its), "sh", "-c", "echo; while :; do :; done"], stdout=subprocess.PIPE)
    assert hog.stdout.readline() == b"\n"
    attached.process.send_signal(signal.SIGCONT)
    spillway.resize(target.pid, "8M")
    time.sleep(0.9)
    hog.kill()
    assert target.line(30) == "OK"
    assert target.status() == 0
    assert attached.finish(timeout=10).status == 0
