"""What the tests of mechanics share: small programs that are told what to do, and looking into a process from outside.

Their programs are in tests/programs; each checks its own memory and says OK, or BAD and what is wrong.
"""

import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

from harness import MIB, children, eventually, executable, status_field

# Anonymous memory of a small C program that no pager takes: written pages of its libraries, the part of the stack in use.
SMALL_UNMANAGED_BYTES = 1 * MIB
# One page in eight of the programs' pattern is all zeros: once evicted it is as if never touched.
NONZERO = 7 / 8

# For programs in Python: waits in the kernel for a child to end, as after vfork(2). Nobody can stop it meanwhile; `first` is done in the
# child, which has memory of its own.
UNSTOPPABLE = """
import ctypes, os, time
def be_unstoppable(seconds, first):
    CLONE_VFORK, SIGCHLD, SYS_clone = 0x4000, 17, 56
    if ctypes.CDLL(None).syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
        first()
        time.sleep(seconds)
        os._exit(0)
"""


class Silence(AssertionError):
    """A program did not answer in time."""


def verdict(file, timeout=20):
    """What a program that nobody waits for has written to a file, once it has. The file is gone then."""
    text = eventually(lambda: file.exists() and file.read_text(), f"a verdict in {file.name}", timeout)
    file.unlink()
    return text


class Program:
    """A program that reads commands and answers in lines: natively, or under `spillway run` with a budget."""

    def __init__(self, processes, argv, spillway=None, local=None, options=(), **popen):
        self.pager = spillway
        command = [spillway.path, "run", "--local", local, *options, "--", *argv] if spillway else argv
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = processes.start(command, **(pipes | popen))
        self.lines = queue.Queue()
        self.err = b""
        self.readers = [threading.Thread(target=self._read_out, daemon=True), threading.Thread(target=self._read_err, daemon=True)]
        for reader in self.readers:
            reader.start()

    def _read_out(self):
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout:
                self.lines.put(line.decode(errors="replace").rstrip("\n"))
        self.lines.put(None)

    def _read_err(self):
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stderr or ():
                self.err += line

    @property
    def pid(self):
        """The program's own process id, also when `spillway run` started it."""
        if not self.pager:
            return self.process.pid

        def target():
            assert self.process.poll() is None, f"ended with status {self.process.returncode}: {self.err.decode()}"
            ours = str(self.pager.path)
            return next((pid for pid in children(self.process.pid) if executable(pid) not in (None, ours)), None)

        return eventually(target, "the program to start", 10)

    def line(self, timeout=30):
        """The next line it says."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise Silence(f"no line in {timeout} s; it said on standard error: {self.err.decode()}") from None
        assert line is not None, f"it ended with status {self.process.wait(5)}: {self.err.decode()}"
        return line

    def ready(self):
        """Itself, once it has said READY."""
        assert self.line() == "READY"
        return self

    def tell(self, command):
        """Gives a command without waiting for its answer."""
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, command, timeout=30):
        """Gives a command, which must be answered with OK; returns the lines before that."""
        self.tell(command)
        return self.answer(command, timeout)

    def answer(self, command, timeout=30):
        """The same for a command that it was told."""
        before = []
        while (line := self.line(timeout)) != "OK":
            assert not line.startswith("BAD"), f"{command}: {line}"
            before.append(line)
        return before

    def unharmed(self):
        """That the program answers and all of its memory is right."""
        assert self.process.poll() is None, f"it ended with status {self.process.returncode}: {self.err.decode()}"
        self.ask("verify")

    def status(self, timeout=20):
        """The exit status, once the process that was started has ended: as a shell would tell it, or -signal."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Silence(f"did not end within {timeout} s") from None
        for reader in self.readers:
            reader.join(2)
        return status


def refused(done, *words):
    """That a command was refused as all bad input is: status 2 and one line on standard error, holding `words`."""
    assert done.returncode == 2, f"status {done.returncode}: {done.stderr}"
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and 20 <= len(lines[0]) <= 300, done.stderr
    assert not any(word in lines[0] for word in ("panicked", "Error(", "os error")), done.stderr
    for word in words:
        assert word.lower() in lines[0].lower(), f"'{word}' is not in: {lines[0]}"


def threads(pid):
    """The threads of a process, as (id, name)."""
    found = []
    # Each may end at any moment, and so may the process.
    with contextlib.suppress(OSError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.append((int(task.name), (task / "comm").read_text().strip()))
    return found


def out_of(memfd, mib):
    """The pages that are not in a file of the pattern but the zeros, of which some may be and others not: its size does not tell."""
    here, at = set(), 0
    with open(memfd, "rb") as file:
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            begin, at = at, os.lseek(file.fileno(), at, os.SEEK_HOLE)
            here.update(range(begin >> 12, at >> 12))
    return {page for page in range(mib << 8) if page % 8 != 5} - here


def has_agent(pid):
    """Whether a thread of ours is in a process."""
    return any(name == "spillway-agent" for _, name in threads(pid))


# Has the first thread of a process, and then the one that is ours as soon as it can be had; says so, and lets go when it is told to.
DEBUGGER = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
for thread in map(int, sys.argv[1:]):
    # PTRACE_SEIZE: nothing stops.
    while libc.ptrace(0x4206, thread, ctypes.c_void_p(), ctypes.c_void_p()):
        time.sleep(0.001)
print("HAS", flush=True)
sys.stdin.read()
"""


def debug_agent(processes, pid):
    """Starts what has a process and its agent as a debugger would have them, until its standard input ends."""
    agent = next(thread for thread, name in threads(pid) if name == "spillway-agent")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return processes.start([sys.executable, "-c", DEBUGGER, pid, agent], **pipes)


def outlasts_a_debugger(processes, spillway, target):
    """What is let go while a debugger comes waits for that, and is let go then."""
    detach = processes.start([spillway.path, "detach", target.pid], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: spillway.find(target.pid)["local_bytes"] > 12 * MIB, "pages to come home", every=0.02)
    debugger = debug_agent(processes, target.pid)
    assert debugger.stdout.readline() == b"HAS\n"
    eventually(lambda: traits(target.pid)["registered"] == 0, "all to be home")
    time.sleep(0.3)
    assert detach.poll() is None and running(target.pid) and has_agent(target.pid)
    debugger.stdin.close()
    assert debugger.wait(10) == 0
    assert detach.wait(20) == 0
    assert not has_agent(target.pid)
    target.unharmed()


def mappings(pid):
    """The process's mappings as (start, end, permissions, name)."""
    found = []
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        start, end = (int(word, 16) for word in fields[0].split("-"))
        found.append((start, end, fields[1], fields[5] if len(fields) > 5 else ""))
    return found


def coverage(pid):
    """Which addresses are mapped how, whatever the kernel's own boundaries between mappings that are alike."""
    joined = []
    for start, end, permissions, name in mappings(pid):
        if joined and joined[-1][1:] == [start, permissions, name]:
            joined[-1][1] = end
        else:
            joined.append([start, end, permissions, name])
    return [tuple(each) for each in joined]


def descriptors(pid):
    """What each descriptor of a process is."""
    return {int(entry.name): os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()}


def registered(pid):
    """How many mappings of a process are registered with some userfaultfd."""
    flags = (line.split()[1:] for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines() if line.startswith("VmFlags:"))
    return sum(1 for each in flags if {"um", "uw", "ui"} & set(each))


def traits(pid):
    """All that a pager might leave behind in a process, to be compared before and after."""
    fields = ["Threads", "TracerPid", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "Seccomp", "NoNewPrivs", "CapEff", "VmLck"]
    return {name: status_field(pid, name) for name in fields} | {
        "mappings": coverage(pid),
        "descriptors": descriptors(pid),
        "registered": registered(pid),
        "threads": sorted(os.listdir(f"/proc/{pid}/task")),
    }


def rollup(pid, field="Anonymous"):
    """A field of /proc/PID/smaps_rollup in bytes; 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def running(pid):
    """Whether there is such a process and it is not a zombie."""
    state = status_field(pid, "State")
    return state is not None and state[0] not in "ZX"


def state(pid):
    """The letter of a process's state, or None when it is gone."""
    field = status_field(pid, "State")
    return field[0] if field else None


def gone(pid, timeout=10):
    """Waits until a process has ended."""
    eventually(lambda: not running(pid), f"process {pid} to end", timeout)


def squeeze(spillway, pid, size="4M"):
    """Gives a target a budget in MiB and waits until that is in force and kept."""
    spillway.resize(pid, size)
    budget = int(size.removesuffix("M")) * MIB
    eventually(lambda: (spillway.find(pid) or {}).get("budget_bytes") == budget, f"the budget of {size}", 10)
    return spillway.settled(pid)


def let_go(attached, timeout=30):
    """Ctrl-C for an attached pager, which must bring all pages home and end with status 0."""
    attached.process.send_signal(signal.SIGINT)
    done = attached.finish(timeout=timeout)
    assert done.status == 0, done.err
    return done


class Witness(threading.Thread):
    """Samples the resident anonymous memory of processes, every few ms, as the kernel counts it.

    The first scan is over when a sample within the limit follows the first one above it, or when none was ever above;
    `late` are the samples above the limit after that.
    """

    def __init__(self, pids, limit, every=0.004):
        super().__init__(daemon=True)
        self.pids, self.limit, self.every = pids, limit, every
        self.samples, self.late, self.peak = 0, [], 0
        self.first_over = self.first_within = None
        self.over = threading.Event()

    def run(self):
        began = time.monotonic()
        while not self.over.wait(self.every):
            looked, spent = time.monotonic(), time.thread_time()
            try:
                resident = sum(rollup(pid) for pid in self.pids())
            except OSError:  # a process ended between being listed and being looked at
                continue
            at = time.monotonic() - began
            # Interrupted on its way through the pages, it would count those that left behind it and those that came before it.
            if time.monotonic() - looked > 3 * (time.thread_time() - spent) + 0.005:
                continue
            self.samples += 1
            self.peak = max(self.peak, resident)
            if resident > self.limit:
                if self.first_within:
                    self.late.append((round(at, 3), resident))
                self.first_over = self.first_over or at
            elif self.first_over and not self.first_within:
                self.first_within = at

    def end(self):
        """Ends sampling."""
        self.over.set()
        self.join()

    def finish(self, burst_s=0.0, first_scan_s=2.0):
        """Ends sampling and demands that the budget held, from `first_scan_s` after it was first passed at the latest.

        `burst_s`: no event tells a pager of a new mapping, so memory that is mapped and touched at full speed later on may
        be resident above the budget for so long, until the pager has seen it grow.
        """
        self.end()
        assert self.samples >= 20, f"{self.samples} samples say nothing"
        if self.first_over:
            assert self.first_within, f"never within {self.limit} bytes again: peak {self.peak}"
            assert self.first_within - self.first_over < first_scan_s, f"the first scan took {self.first_within - self.first_over:.1f} s"
        bursts = []
        for at, resident in self.late:
            if bursts and at - bursts[-1][1] < 0.1:
                bursts[-1][1:] = [at, max(bursts[-1][2], resident)]
            else:
                bursts.append([at, at, resident])
        print(f"bursts above the limit as [from, to, peak]: {bursts}")
        if all(end - start < burst_s for start, end, _ in bursts):
            return self.peak
        assert not self.late, f"{len(self.late)} of {self.samples} samples above {self.limit}: {self.late[:5]}, peak {self.peak}"
        return self.peak
