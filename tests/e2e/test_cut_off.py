"""A pager is killed when it has read what its program did, and has made nothing of it: the next one makes up for that."""

import random
import signal
import subprocess
import time

import pytest
from test_guardian import Family, heirs  # noqa: F401
from test_takeover import SLACK_SECONDS, WITHIN, begin, torture  # noqa: F401

SECONDS = 8


@pytest.fixture
def cut_off(processes, build):
    """Kills a pager that has read so many messages of a kind; false if it came to its end before."""
    cutoff = build("cutoff", "-Wshadow")

    def kill(pager, event, messages):
        cut = processes.start([cutoff, pager.pid, event, messages], stdout=subprocess.PIPE, text=True)
        said = cut.communicate(timeout=SLACK_SECONDS)[0]
        return pager.wait(5) == -signal.SIGKILL and said == "READY\nKILLED\n"

    return kill


@pytest.mark.parametrize("mode", ["always", "lasting", "relay"])
def test_a_fork_is_heard_of_again(processes, spillway, heirs, cut_off, mode):  # noqa: F811
    """Of a relay, who has forked has ended: the next pager, with no such target any more, came to its own end over that."""
    family = Family(processes, spillway, heirs, mode)
    for at in range(10):
        assert cut_off(family.pager, "fork", 1 + at % 5)
        family.take_over()
    assert family.end() > 10


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
