"""What the end-to-end tests share: starting programs natively or under spillway, watching them, and ending them.

Every process is started in a session of its own and ended by its id, whatever the test did.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time

from lateness import Lateness

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
# A sampled peak may pass the budget by 5%.
PEAK_ALLOWANCE = 1.05
# Memory that no pager can take: stacks in use, pages of code that was written to, the agent. Seen by the kernel only.
UNMANAGED_BYTES = 16 * MIB


def undisturbed(measure, most=0.02, late_s=0.03, tries=4):
    """What `measure` returns, once the host took no more than so much of all CPUs' time meanwhile, and no CPU for as long as that; or
    the last of so many tries."""

    def stolen_s():
        ticks = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]
        return int(ticks) / os.sysconf("SC_CLK_TCK")

    with Lateness() as lateness:
        for _ in range(tries):
            lateness.take()
            began, before = time.monotonic(), stolen_s()
            result = measure()
            if stolen_s() - before <= most * (time.monotonic() - began) * os.cpu_count() and lateness.take() <= late_s:
                break
    return result


def eventually(condition, what, timeout=20.0, every=0.02):
    """Waits for a true value of `condition()` and returns it; fails naming `what` when the time is over."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(every)


def free_port():
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def thread_stats(pid):
    """What `/proc` says of each thread of a process, as far as it is there."""
    for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield stat.read_text()


def standing(pids):
    """Where each thread of processes stands: its name and state, what it waits in, and its system call."""
    found = {}
    for pid in pids:
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                name, state = re.match(r"\d+ \((.*)\) (\S)", (task / "stat").read_text()).groups()
                found[f"{pid}/{task.name}"] = f"{name} {state} {(task / 'wchan').read_text()} {(task / 'syscall').read_text().strip()}"
    return found


def status_field(pid, name):
    """A field of /proc/PID/status, or None when the process or the field is gone."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return line.split(":", 1)[1].strip()
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def anonymous_bytes(pid):
    """Resident anonymous memory of a process as the kernel counts it; 0 when it is gone."""
    field = status_field(pid, "RssAnon")
    return int(field.split()[0]) * 1024 if field else 0


def children(pid):
    """Ids of a process's children, whichever of its threads they belong to."""
    found = []
    # It may end at any moment, and so may each of its threads.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def tree(pid):
    """A process and all of its descendants, parents first."""
    found = [pid]
    for each in found:
        found += [child for child in children(each) if child not in found]
    return found


def executable(pid):
    """What a process runs, or None when it is gone."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return None


def those_who_run(program):
    """Ids of all processes that run this program."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if executable(pid) == str(program)]


def session_members(session):
    """Ids of the live processes of a session."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


class Processes:
    """Starts processes and, at the end, kills what is left of them and their descendants."""

    def __init__(self):
        self.started = []

    def start(self, argv, **options):
        """`subprocess.Popen` in a new session, remembered for `end`."""
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen([str(word) for word in argv], start_new_session=True, **options)
        self.started.append(process)
        return process

    def end(self):
        """Kills everything that was started, latest first."""
        for process in reversed(self.started):
            # Descendants may have left the session, session members may have lost their parents: both are ours.
            ours = set(session_members(process.pid))
            if process.poll() is None:
                ours |= set(tree(process.pid))
            for pid in sorted(ours, reverse=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    if pipe:
                        pipe.close()
        self.started.clear()


class Sampler(threading.Thread):
    """Follows the resident anonymous memory of a process tree: a witness that does not depend on the pager's figures.

    Processes that run `besides` (the pager itself) are left out. Pages that a fork shares are counted once a process.
    """

    def __init__(self, pid, besides=None, every=0.03):
        super().__init__(daemon=True)
        self.root, self.besides, self.every = pid, besides, every
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self):
        while not self.done.is_set():
            total = sum(anonymous_bytes(pid) for pid in tree(self.root) if not self.besides or executable(pid) != self.besides)
            self.peak_bytes = max(self.peak_bytes, total)
            self.done.wait(self.every)


@dataclasses.dataclass
class Result:
    """How a program ended."""

    status: int
    out: str
    err: str
    stats: dict
    seconds: float
    anonymous_peak_bytes: int

    def must_succeed(self):
        """Itself, if the exit status is 0."""
        assert self.status == 0, f"exit status {self.status}\nstdout: {self.out[-2000:]}\nstderr: {self.err[-4000:]}"
        return self


class Running:
    """A program that was started natively or under a pager."""

    def __init__(self, process, stats_path=None, pager=None):
        self.process = process
        self.stats_path = stats_path
        self.pager = pager
        self.began = time.monotonic()
        self.sampler = Sampler(process.pid, besides=pager)
        self.sampler.start()

    @property
    def pid(self):
        """The program's own process: the one started, or the first of its children that is not the pager."""
        if not self.pager:
            return self.process.pid

        def target():
            if self.process.poll() is not None:
                raise AssertionError(f"ended with status {self.process.returncode} before its program ran")
            return next((pid for pid in tree(self.process.pid) if executable(pid) not in (None, self.pager)), None)

        return eventually(target, "the program to start", 10)

    def line(self):
        """The next line of standard output, whose end it waits for. What follows is left for `finish`, which a buffer would keep it from."""
        stream, text = self.process.stdout, bytearray()
        while not text.endswith(b"\n") and (byte := os.read(stream.fileno(), 1)):
            text += byte
        return text.decode(stream.encoding, stream.errors)

    def finish(self, stdin=None, timeout=80):
        """Feeds the rest of standard input, waits for the end, and tells how it went."""
        try:
            out, err = self.process.communicate(stdin, timeout)
        finally:
            self.sampler.done.set()
        self.sampler.join()
        stats = {}
        if self.stats_path and self.stats_path.exists():
            stats = json.loads(self.stats_path.read_text())
        return Result(self.process.returncode, out or "", err or "", stats, time.monotonic() - self.began, self.sampler.peak_bytes)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "surrogateescape"}


class Native:
    """Runs programs as they are."""

    def __init__(self, processes):
        self.processes = processes

    def start(self, argv, **options):
        """Starts a program; options as for `subprocess.Popen`."""
        return Running(self.processes.start(argv, **PIPES, **options))

    def run(self, argv, stdin=None, timeout=80, **options):
        """Runs a program to its end."""
        options.setdefault("stdin", subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
        return self.start(argv, **options).finish(stdin, timeout)


class Spillway:
    """The command under test."""

    def __init__(self, path, processes, scratch, pool=None):
        """`pool`: the URL of what all that `run` and `attach` start is to keep its pages in, where that is not the default."""
        self.path = pathlib.Path(path).resolve()
        self.processes = processes
        self.scratch = pathlib.Path(scratch)
        self.pool = ["--pool", pool] if pool else []

    def cli(self, *arguments, timeout=60, **options):
        """One `spillway` command run to its end, as a `CompletedProcess` with text streams."""
        options = PIPES | {"stdin": subprocess.DEVNULL} | options
        return subprocess.run([str(self.path), *map(str, arguments)], timeout=timeout, **options)

    def stats_path(self):
        """A fresh name for a statistics file."""
        return pathlib.Path(tempfile.mkdtemp(prefix="stats", dir=self.scratch)) / "stats.json"

    def start(self, argv, local, *arguments, **options):
        """Starts `spillway run --local LOCAL` (bytes or text); options as for `subprocess.Popen`."""
        stats = self.stats_path()
        command = [self.path, "run", "--local", local, "--stats", stats, *self.pool, *arguments, "--", *argv]
        return Running(self.processes.start(command, **(PIPES | options)), stats, str(self.path))

    def run(self, argv, local, *arguments, stdin=None, timeout=80, **options):
        """Runs a program under `spillway run` to its end."""
        options.setdefault("stdin", subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
        return self.start(argv, local, *arguments, **options).finish(stdin, timeout)

    def begin_attach(self, pid, local=None, *arguments):
        """Starts `spillway attach`; without a budget it can only take over."""
        stats = self.stats_path()
        budget = ["--local", local, *self.pool] if local else []
        return Running(self.processes.start([self.path, "attach", pid, *budget, "--stats", stats, *arguments], **PIPES), stats)

    def attach(self, pid, local, *arguments):
        """Starts `spillway attach` and waits until the process is listed."""
        running = self.begin_attach(pid, local, *arguments)

        def listed():
            if running.process.poll() is not None:
                raise AssertionError(f"attach ended with status {running.process.returncode}: {running.process.stderr.read()}")
            return self.find(pid)

        eventually(listed, f"process {pid} in `spillway ps`", 15, every=0.03)
        return running

    def ps(self):
        """The targets as `spillway ps --json` gives them."""
        done = self.cli("ps", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def find(self, pid):
        """The entry of one target, or None."""
        return next((target for target in self.ps() if target["pid"] == pid), None)

    def settled(self, pid, timeout=30):
        """Waits until a target is within its budget, and returns its entry."""

        def within():
            target = self.find(pid)
            # A program is listed before it is adopted, with nothing touched.
            settled = target and target["touched_bytes"] and target["local_bytes"] <= target["budget_bytes"]
            return target if settled else None

        return eventually(within, f"process {pid} to settle within its budget", timeout, every=0.05)

    def resize(self, pid, size):
        """Gives a target another budget."""
        done = self.cli("resize", pid, size)
        assert done.returncode == 0, done.stderr

    def detach(self, pid, timeout=60):
        """Brings all pages home and lets go of a target."""
        done = self.cli("detach", pid, timeout=timeout)
        assert done.returncode == 0, done.stderr


def half(size_bytes):
    """A budget of at most half a size, in whole MiB, as bytes."""
    return size_bytes // 2 // MIB * MIB


def assert_kernel_sees(anonymous, budget_bytes):
    """That the kernel's own count of resident anonymous bytes bears a budget out."""
    limit = PEAK_ALLOWANCE * budget_bytes + UNMANAGED_BYTES
    assert anonymous <= limit, f"the kernel counts {anonymous} resident bytes under a budget of {budget_bytes}"


def assert_paged(result, budget_bytes):
    """That a run really paged and kept to its budget, by the pager's figures. By the kernel's the judge is test_budget.py: it samples once
    the first scan is over, before which a program may fill more."""
    stats = result.stats
    assert stats, "no stats were written"
    assert stats["evicted_pages"] > 0, stats
    assert stats["fetched_pages"] > 0, stats
    assert stats["faults"] > 0, stats
    assert stats["local_peak_bytes"] <= PEAK_ALLOWANCE * budget_bytes, stats