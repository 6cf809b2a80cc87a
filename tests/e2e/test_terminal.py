"""What is said while something takes long: on a terminal a line that is overwritten, elsewhere none of that; and no fault waits for it.

Keys on a terminal are in test_syscalls.py.
"""

import contextlib
import os
import pathlib
import pty
import re
import signal
import threading
import tty

import pytest
from harness import eventually
from mechanics import Program, gone

BAR = re.compile(r"pages come home \[(#*) *\] (\d+)% of ([0-9.]+) MiB(, \d+ s left)? *")
SMALL_BENCH = ["bench", "--quick", "--rounds", 1, "--size", "32M", "--mode", "native", "--order", "uniform,sequential", "--out"]


@pytest.fixture
def fill(build):
    return build("fill")


class Screen:
    """A terminal that shows what is written to it as it is, line ends included, and knows colours."""

    ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}

    def __init__(self):
        self.ours, self.theirs = pty.openpty()
        tty.setraw(self.theirs)
        self.bytes = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        # EIO once nobody can write to it any more.
        with contextlib.suppress(OSError):
            while some := os.read(self.ours, 65536):
                self.bytes += some

    @property
    def said(self):
        """What was written to it so far."""
        return self.bytes.decode()

    def close(self):
        """Waits for all that was written by those who have ended."""
        if self.theirs is not None:
            os.close(self.theirs)
            self.theirs = None
            self.reader.join(10)
            os.close(self.ours)
        return self.said


@pytest.fixture
def screen():
    one = Screen()
    yield one
    one.close()


@pytest.fixture
def away(servers):
    """The pool at a server that waits for as long as it takes; and that server."""
    server = servers.spillway()
    return f"tcp://{server.address}?deadline=60s", server


def shares(shown):
    """How far each of these pieces of a line says that the pages are, in percent."""
    found = []
    for piece in shown:
        match = BAR.fullmatch(piece)
        assert match, f"not a line of progress: {piece!r}"
        assert len(match[1]) == int(match[2]) // 5 and float(match[3]) > 30, piece
        found.append(int(match[2]))
    assert found == sorted(found), shown
    return found


def test_detach_overwrites_one_line_on_a_terminal(processes, spillway, fill, away, screen):
    pool, server = away
    target = Program(processes, [fill, 48]).ready()
    attached = spillway.attach(target.pid, "8M", "--pool", pool)
    spillway.settled(target.pid)
    # Nothing comes home before there is something to see.
    server.send(signal.SIGSTOP)
    detach = processes.start([spillway.path, "detach", target.pid], stdout=screen.theirs, stderr=screen.theirs, env=screen.ENVIRONMENT)
    eventually(lambda: BAR.search(screen.said), "a line that tells how far the pages are")
    server.send(signal.SIGCONT)
    assert detach.wait(30) == 0
    said = screen.close()
    # Each piece begins at the line's start, the last one ends it. No colours: nobody needs NO_COLOR.
    assert said.startswith("\r") and said.endswith("\n") and said.count("\n") == 1 and "\x1b" not in said, said
    told = shares(said.removesuffix("\n").split("\r")[1:])
    assert told[0] < 100 and told[-1] == 100, told
    assert attached.finish(timeout=10).must_succeed().err.count("\r") == 0
    target.unharmed()


def test_attach_that_is_ended_by_a_key_overwrites_one_line_too(processes, spillway, fill, away, screen):
    pool, server = away
    target = Program(processes, [fill, 48]).ready()
    command = [spillway.path, "attach", target.pid, "--local", "8M", "--pool", pool]
    attached = processes.start(command, stdout=screen.theirs, stderr=screen.theirs, env=screen.ENVIRONMENT)
    eventually(lambda: spillway.find(target.pid), "it to be managed")
    spillway.settled(target.pid)
    server.send(signal.SIGSTOP)
    attached.send_signal(signal.SIGINT)
    eventually(lambda: BAR.search(screen.said), "a line that tells how far the pages are")
    # An impatient hand is told what it would lose, in a line of its own, below which it goes on.
    attached.send_signal(signal.SIGINT)
    eventually(lambda: BAR.search(screen.said.rpartition("would lose the rest\n")[2]), "the line to go on")
    server.send(signal.SIGCONT)
    assert attached.wait(30) == 0
    said = screen.close()
    assert "\x1b" not in said, said
    adopted, first, told, second, summary, nothing = said.split("\n")
    assert nothing == "" and all(line.startswith("spillway: ") for line in (adopted, told, summary)), said
    assert first[0] == second[0] == "\r" and "pages are home" in told, said
    assert shares(first.split("\r")[1:] + second.split("\r")[1:])[-1] == 100
    target.unharmed()


def test_detach_into_a_file_says_nothing(processes, spillway, fill, tmp_path):
    target = Program(processes, [fill, 48]).ready()
    attached = spillway.attach(target.pid, "8M")
    spillway.settled(target.pid)
    with open(tmp_path / "said", "w+") as file:
        detach = processes.start([spillway.path, "detach", target.pid], stdout=file, stderr=file, env=Screen.ENVIRONMENT)
        assert detach.wait(30) == 0
        file.seek(0)
        assert file.read() == ""
    assert attached.finish(timeout=10).must_succeed().err.count("\r") == 0
    target.unharmed()


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_bench_overwrites_one_line_on_a_terminal_alone(processes, spillway, screen, tmp_path, terminal):
    step = re.compile(r" *\d+ of about \d+ s: round 1: (uniform|sequential), 50 % local: native *")
    with open(tmp_path / "said", "w+") as file:
        streams = {"stdout": file, "stderr": screen.theirs if terminal else file}
        bench = processes.start([spillway.path, *SMALL_BENCH, tmp_path / "out"], **streams, env=screen.ENVIRONMENT)
        assert bench.wait(60) == 0
        file.seek(0)
        written = file.read()
    shown = screen.close()
    assert "\x1b" not in shown + written and "\r" not in written and "Wrong bytes: none" in written, written
    if not terminal:
        assert shown == ""
        steps = [line.removeprefix("spillway: bench: ") for line in written.splitlines() if " of about " in line]
        assert [step.fullmatch(each)[1] for each in steps] == ["uniform", "sequential"], written
        return
    before, line, after, nothing = shown.split("\n")
    assert nothing == "" and all(each.startswith("spillway: bench: ") for each in (before, after)), shown
    assert [each and step.fullmatch(each)[1] for each in line.split("\r")] == ["", "uniform", "sequential"], shown


def full_pipe():
    """Both ends of a pipe that takes no more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return reading, writing


def waits_to_say(pid):
    """Whether a thread of a process is in write(2) to its standard error."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "syscall").read_text().split()[:2] == ["1", "0x2"]:
                return True
    return False


@pytest.mark.parametrize("verb", ["run", "attach"])
def test_no_fault_waits_for_whoever_reads_what_the_pager_says(processes, spillway, fill, servers, verb):
    reading, writing = full_pipe()
    try:
        # A pool that takes no pages is what a pager has something to say about; this one takes them at the second try, or the third.
        pool = f"tcp://{servers.spillway().address}?fault=decline:2"
        if verb == "run":
            target = Program(processes, [fill, 32], spillway, "8M", ["-q", "--pool", pool], stderr=writing).ready()
        else:
            target = Program(processes, [fill, 32]).ready()
            processes.start([spillway.path, "attach", target.pid, "--local", "8M", "--pool", pool], stderr=writing)
        os.close(writing)
        writing = None
        pager = eventually(lambda: spillway.find(target.pid), "it to be managed")["pager_pid"]
        # It looks a few times a second; until it has seen the pool at the wrong moment, pages have to be on their way there.
        eventually(lambda: target.ask("rewrite") or waits_to_say(pager), "the pager to wait for whoever reads what it says", 30)
        before = spillway.find(target.pid)
        for command in ["rewrite", "fork", "churn 200", "verify"]:
            target.ask(command)
        after = spillway.find(target.pid)
        moved = {key: after[key] - before[key] for key in ("faults", "fetched_pages", "evicted_pages")}
        print(moved)
        assert min(moved.values()) > 2000, moved
        assert waits_to_say(pager), "all the while"
        if verb == "run":
            target.tell("exit 7")
            assert target.status() == 7
        else:
            spillway.detach(target.pid)
            target.unharmed()
        # It ends when nobody is left who could read that.
        os.close(reading)
        reading = None
        gone(pager)
    finally:
        for end in (reading, writing):
            if end is not None:
                os.close(end)
