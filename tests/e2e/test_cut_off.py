"""A pager is killed when it has read what its program did, and has made nothing of it: the next one makes up for that. Or while it borrows
a thread: that one goes on as if nothing had been."""

import random
import signal
import subprocess
import time

import pytest
from mechanics import Program
from test_adoption import SLEEPS
from test_daemon import attach, daemon  # noqa: F401
from test_guardian import Family, heirs  # noqa: F401
from test_takeover import SLACK_SECONDS, WITHIN, begin, fill, torture  # noqa: F401

SECONDS = 8


@pytest.fixture
def cut_off(processes, build):
    """Kills a pager that has read so many messages of a kind since `begin`; false if it came to its end before."""
    cutoff = build("cutoff", "-Wshadow")

    def kill(pager, event, messages, begin=lambda: None):
        cut = processes.start([cutoff, pager.pid, event, messages], stdout=subprocess.PIPE, text=True)
        ready = cut.stdout.readline()
        begin()
        # Not by `communicate`: where both lines come at once, the other is with the first in the reader's buffer.
        said = cut.stdout.read()
        return pager.wait(5) == -signal.SIGKILL and (ready, said) == ("READY\n", "KILLED\n")

    return kill


@pytest.mark.parametrize("mode", ["always", "lasting", "relay"])
def test_a_fork_is_heard_of_again(processes, spillway, heirs, cut_off, mode):  # noqa: F811
    """Of a relay, who has forked has ended: the next pager, with no such target any more, came to its own end over that."""
    family = Family(processes, spillway, heirs, mode)
    for at in range(10):
        assert cut_off(family.pager, "fork", 1 + at % 5)
        family.take_over()
    assert family.end() > 10


# A killed pager is gone within seconds unless others want the CPUs.
@pytest.mark.alone
@pytest.mark.parametrize("event", ["remove", "unmap"])
def test_what_was_given_up_is_heard_of_again(processes, spillway, torture, cut_off, event):  # noqa: F811
    seed = int(time.time() * 1000)
    chance = random.Random(seed)
    options = ["--seed", seed, "--seconds", SECONDS + SLACK_SECONDS, "--mib", 24, "--threads", 2, *WITHIN]
    program = processes.start([torture, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    pager, _ = begin(processes, spillway, program.pid, "--local", "8M")
    deadline, cut = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline and program.poll() is None and cut_off(pager, event, chance.randint(1, 8)):
        cut += 1
        pager, _ = begin(processes, spillway, program.pid)
    spillway.detach(program.pid)
    assert pager.wait(10) == 0
    program.terminate()
    out, err = program.communicate(timeout=SLACK_SECONDS)
    assert program.returncode == 0 and cut >= 3, f"seed {seed}, cut off {cut} times: {out}\n{err[-6000:]}"


# Beginnings and ends of ptrace calls in an adoption: those about the borrowed thread, and all. Two calls let it go with its own registers,
# and its rank is taken back behind them.
BORROWED, ADOPTION, LETTING_GO = 42, 270, 3
# Those as an agent leaves.
DEPARTURE = 38
# What has been adopted for so long is not being adopted.
ADOPTED_SECONDS = 15


@pytest.fixture
def cut_off_adopting(processes, spillway, build):
    """Kills a pager at such a moment of adopting a process; false if it had adopted it before that."""
    cutoff = build("cutoff", "-Wshadow")

    def kill(pid, moment):
        command = [cutoff, "start", "ptrace", moment, spillway.path, "attach", pid, "--local", "8M"]
        cut = processes.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            said = cut.communicate(timeout=ADOPTED_SECONDS)[0]
        except subprocess.TimeoutExpired:
            # It serves; what is traced by it is killed with it.
            cut.kill()
            said = cut.communicate()[0]
        assert said in ("READY\n", "READY\nKILLED\n")
        return "KILLED" in said

    return kill


def test_a_thread_that_was_borrowed_goes_on_with_all_that_is_its_own(processes, spillway, build, cut_off_adopting):
    """It was killed with its pager: of the children of a program that forked all the time, now and then one."""
    hurried = []
    for moment in [*range(1, BORROWED + 6), *random.sample(range(BORROWED + 6, ADOPTION), 15)]:
        program = Program(processes, [build("whole")]).ready()
        assert cut_off_adopting(program.pid, moment), f"at {moment} it had been adopted"
        program.tell("")
        said = program.line()
        assert said.split()[0] in ("OK", "HURRIED") and program.status() == 0, f"{moment}: {said}"
        hurried += [moment] if said.startswith("HURRIED") else []
    assert len(hurried) <= LETTING_GO and set(hurried) <= set(range(BORROWED - 5, BORROWED + 6)), hurried


# Where others want its CPU a pager may be in other calls at the same moment, and whoever finds no room is killed with its pager.
@pytest.mark.alone
def test_who_was_borrowed_can_be_adopted_again_and_again(processes, spillway, fill, cut_off_adopting):  # noqa: F811
    """Each time a thread has yet to go back, a bit of the vDSO is used up: there is room for four."""
    target = Program(processes, [fill, 32]).ready()
    # In the last quarter there is an agent of which nobody has heard.
    for moment in [20, 24, *random.sample(range(BORROWED + 1, ADOPTION), 5), *random.sample(range(220, ADOPTION), 5), 28, 32]:
        assert cut_off_adopting(target.pid, moment)
        target.ask("verify")
    pager, _ = begin(processes, spillway, target.pid, "--local", "8M")
    spillway.settled(target.pid)
    target.ask("verify")
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    target.ask("verify")


@pytest.mark.parametrize("kind", ["nanosleep", "until", "futex"])
def test_a_sleep_that_was_borrowed_ends_when_it_should(processes, build, cut_off_adopting, kind):
    sleep_ms, asleep_s = 1000, 0.5
    for moment in random.sample(range(1, BORROWED + 6), 5):
        program = Program(processes, [build("sleeper"), kind, sleep_ms, 8, 1]).ready()
        time.sleep(asleep_s)
        assert cut_off_adopting(program.pid, moment)
        word, elapsed, result = program.line().split(" ", 2)
        assert (word, result) == ("SLEPT", SLEEPS[kind]), f"{moment}: {result} after {elapsed} ms"
        # One that began anew would take half as long again.
        assert sleep_ms - 2 <= float(elapsed) <= sleep_ms + 400, f"{moment}: {elapsed} ms"
        assert program.line() == "OK"


def test_a_daemon_that_was_adopting_its_first_program_is_followed_by_another(processes, spillway, daemon, fill, cut_off):  # noqa: F811
    """An agent of which nobody had heard kept the next daemon from starting, and its program from ever being adopted."""
    target = Program(processes, [fill, 32]).ready()
    for moment in (20, 120, 230, 260):
        daemon.start("--local", "16M")
        asks = lambda: processes.start([spillway.path, "attach", target.pid], stderr=subprocess.DEVNULL)
        assert cut_off(daemon.process, "ptrace", moment, asks)
        target.ask("verify")
    daemon.start("--local", "16M")
    attach(spillway, target.pid)
    spillway.settled(target.pid)
    target.unharmed()
    spillway.detach(target.pid)
    target.unharmed()


def test_a_child_that_is_being_adopted_outlives_its_pager(processes, spillway, heirs, cut_off):  # noqa: F811
    family = Family(processes, spillway, heirs, "staying")
    for _ in range(40):
        assert cut_off(family.pager, "ptrace", random.randint(1, ADOPTION))
        family.take_over()
    assert family.end() > 3


def test_who_is_being_let_go_outlives_its_pager(processes, spillway, fill, cut_off):  # noqa: F811
    for moment in random.sample(range(1, DEPARTURE + 1), 12):
        target = Program(processes, [fill, 16]).ready()
        pager, _ = begin(processes, spillway, target.pid, "--local", "8M")
        asks = lambda pid=target.pid: processes.start([spillway.path, "detach", pid], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert cut_off(pager, "ptrace", moment, asks)
        target.ask("verify")
