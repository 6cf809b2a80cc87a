"""Programs whose first thread ends before others do: what the kernel tells of a process, it tells of its first thread."""

import signal

import pytest
from harness import eventually, those_who_run
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
