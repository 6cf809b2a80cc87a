"""Who was just forked when its pager is killed: a guardian keeps its userfaultfd for the next one."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import time
import types

import pytest
from harness import children, eventually, executable, standing, those_who_run, tree
from mechanics import Program, running
from test_takeover import begin, end, fill, url_of  # noqa: F401


@pytest.fixture
def heirs(build):
    return build("heirs")


class Family:
    """A program that forks all the time, and whose children look at what they have inherited."""

    def __init__(self, processes, spillway, heirs, mode, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.program = processes.start([heirs, mode, "24"], **pipes)
        assert self.program.stdout.readline() == "READY\n"
        self.again = lambda *more: begin(processes, spillway, self.program.pid, *more)
        self.pager, _ = self.again("--local", "8M", *arguments)

    def take_over(self):
        """Another pager in place of the one that was killed."""
        try:
            self.pager, _ = self.again()
        except AssertionError as why:
            said = self.program.stdout.readline() if self.program.poll() is not None else "it goes on"
            raise AssertionError(f"{why}\n{said}") from why

    def end(self):
        """How many children there were."""
        try:
            said, err = self.program.communicate("\n", 20)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on: {standing(tree(self.program.pid))}; its pager: {standing([self.pager.pid])}") from None
        assert said.startswith("OK ") and self.program.returncode == 0, said + err
        assert self.pager.wait(10) == 0
        return int(said.split()[1])


# Which pages are checked by whom: tests/programs/heirs.c. Grandchildren are forked by who has no agent; a relay's parent has ended.
@pytest.mark.parametrize(("mode", "pool"), [("always", "local"), ("lasting", "local"), ("lasting", "tcp"), ("relay", "local")])
def test_children_outlive_the_pager_that_has_just_heard_of_them(processes, spillway, servers, heirs, mode, pool):
    """Nobody else had a child's userfaultfd, for tens of milliseconds: it read zeros where its pages were out."""
    family = Family(processes, spillway, heirs, mode, "--pool", url_of(servers, pool))
    chance = random.Random()
    for _ in range(25):
        time.sleep(chance.uniform(0.02, 0.2))
        end(family.pager)
        family.take_over()
    assert family.end() > 10


@pytest.mark.parametrize("limit", [16, 24])
def test_a_guardian_may_have_as_many_descriptors_as_its_pager(processes, spillway, heirs, tmp_path, limit):
    """It could not look which of them to keep: the pager alone had raised its limit, and whoever takes over had not yet."""
    limited = tmp_path / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -Sn {limit}\nexec {spillway.path} "$@"\n')
    limited.chmod(0o700)
    spillway.path = limited
    family = Family(processes, spillway, heirs, "lasting")
    for _ in range(10):
        time.sleep(0.1)
        end(family.pager)
        family.take_over()
    assert family.end() > 10


def test_who_has_too_few_descriptors_takes_nobody_over(processes, spillway, heirs, tmp_path):
    """It did, and then had none to look at page tables and mappings with: no room was ever made, and whoever needed some waited for ever. And the
    guardian of one that ends so could not look what to keep, and never ended."""
    limited = tmp_path / "limited"
    family = Family(processes, spillway, heirs, "lasting")
    refused = 0
    for limit in [*range(14, 40, 2), *range(15, 40, 4)]:
        time.sleep(0.05)
        end(family.pager)
        limited.write_text(f'#!/bin/sh\nulimit -n {limit}\nexec {spillway.path} "$@"\n')
        limited.chmod(0o700)
        try:
            family.pager, _ = begin(processes, types.SimpleNamespace(path=limited), family.program.pid)
        except AssertionError as why:
            said = str(why).splitlines()[0]
            assert "(`ulimit -n`)" in said, said
            refused += 1
            family.take_over()
    assert 0 < refused < 20
    assert family.end() > 3
    eventually(lambda: not guardians_of(family.program.pid), "guardians to end", 10)


def guardians_of(pid):
    """Processes that keep userfaultfds for pagers which have adopted this one."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text().split("\0")
            if (process / "comm").read_text() == "guardian\n" and str(pid) in command:
                found.add(int(process.name))
    return found


def test_a_guardian_is_there_for_as_long_as_it_is_needed(processes, spillway, fill):
    target = Program(processes, [fill, 64]).ready()
    own = lambda: guardians_of(target.pid)
    pager, _ = begin(processes, spillway, target.pid, "--local", "8M")
    spillway.settled(target.pid)
    (first,) = own()
    end(pager)
    # It closes what is not to be kept: who reads what the pager said comes to its end, and it has no terminal.
    assert pager.stderr.read() is not None
    links = lambda: {os.readlink(path) for path in pathlib.Path(f"/proc/{first}/fd").iterdir()}
    eventually(lambda: links() == {"anon_inode:[userfaultfd]"}, "all else to be closed")
    pager, _ = begin(processes, spillway, target.pid)
    eventually(lambda: first not in own(), "the first to end")
    assert len(own()) == 1
    # Without it nobody can take over from the moment of a fork on, and all else is as it was.
    (second,) = own()
    os.kill(second, signal.SIGKILL)
    target.ask("verify")
    spillway.detach(target.pid)
    assert pager.wait(10) == 0 and not own()
    target.ask("verify")
    # What nobody takes over is kept until it ends.
    pager, _ = begin(processes, spillway, target.pid, "--local", "8M")
    end(pager)
    assert len(own()) == 1
    target.process.kill()
    target.process.wait()
    eventually(lambda: not own(), "the guardian to end")


@pytest.mark.alone
def test_a_pager_is_killed_quickly_where_others_want_the_cpus(processes, spillway, fill):
    """A process ends with its slowest thread: one that was in the idle class freed all memory of the pager, for seconds."""
    target = Program(processes, [fill, 64]).ready()
    # In one session, as the kernel shares CPUs among those first.
    last = max(os.sched_getaffinity(0))
    busy = f"taskset -c {last} nice -n-20 sh -c 'while :; do :; done' &"
    attach = f"exec {spillway.path} attach {target.pid} --local 8M"
    pager = processes.start(["sh", "-c", f"{busy} {attach}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spillway.settled(target.pid)
    others = [int(thread) for thread in os.listdir(f"/proc/{pager.pid}/task") if int(thread) != pager.pid]
    for thread in others:
        os.sched_setaffinity(thread, {last})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    killed = time.monotonic()
    end(pager)
    took = time.monotonic() - killed
    print(f"{len(others)} threads: {took:.3f} s")
    assert took < 1
    begin(processes, spillway, target.pid)
    target.ask("verify")


# Whoever is late to kill the pager finds the child done.
@pytest.mark.alone
def test_a_child_that_nobody_takes_over_reads_no_zeros(processes, spillway, servers, daemonise, tmp_path):
    """It has no agent yet, and its parent has ended: when the pager of `run` was killed nobody found the child to kill it."""
    said = tmp_path / "said"
    options = ["--pool", f"tcp://{servers.spillway().address}?delay=60ms"]
    for _ in range(3):
        # It looks at 73 pages, most of which are out, and waits 60 ms for each of these: it is killed long before it is done.
        program = Program(processes, [daemonise, 14, said, 49], spillway, "8M", options)
        front = program.process.pid
        pager = eventually(lambda: [pid for pid in children(front) if executable(pid) == str(spillway.path)], "its pager")[0]
        guardian = eventually(lambda: children(pager), "the pager's guardian")[0]
        assert program.status(30) == 0 and those_who_run(daemonise)
        os.kill(pager, signal.SIGKILL)
        eventually(lambda: not those_who_run(daemonise), "the child to end", 10)
        assert not said.exists() or said.read_text() == ""
        eventually(lambda: not running(guardian), "the guardian to end")
