"""Where a program under comparison may have its memory: native, in the kernel's swap to zram, or under Spillway."""

import argparse
import atexit
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from record import ENDINGS


# Under a cgroup's limit the kernel sometimes kills with swap still free: such runs are repeated this often, and counted.
TRIES = 5
KILLED = "killed by the kernel for want of memory"


class Failure(Exception):
    """A program did not end as it should; the text says how."""


def survived(mode, local_mib, run):
    """What `run(started)` gives in a mode, and why each run before that did not end well: under zram those begin again, and none
    comes of it when that happens too often."""
    ends = []
    while len(ends) < TRIES:
        try:
            with mode.within(local_mib) as started:
                return run(started), ends
        except (Failure, OSError, subprocess.SubprocessError) as failure:
            if mode.name != "zram":
                raise
            ends.append(KILLED if mode.kills else str(failure))
            print(f"\nbench: again, since {failure}", file=sys.stderr)
    return None, ends


def ends_told(ends):
    """How many runs did not end well under zram, as a sentence."""
    killed = sum(end == KILLED for end in ends)
    others = f"; others: {'; '.join(sorted({end[:100] for end in ends if end != KILLED}))}" if killed < len(ends) else ""
    return f"Runs that did not end well under zram, and began again: {len(ends)}, of which the kernel killed {killed} for want of memory{others}."


def kills_in(group):
    """How many processes of a memory cgroup the kernel has killed for want of memory: version 1, version 2."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(FileNotFoundError):
            return int(dict(line.split() for line in (group / name).read_text().splitlines())["oom_kill"])
    return 0


@contextlib.contextmanager
def undisturbed():
    """Lets signals wait, for us and for what we start, while something is made or undone that must not be left half-way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def running(words, ending=signal.SIGKILL, **options):
    """A program for as long as this lasts, from what a mode made of its command; killed if it is still there at the end, or told to end by
    another signal, and waited for, where it has something to clean up. A signal comes before it is started or ends it: between fork and
    exec the child would take one for itself and forget it."""
    enter = words.get("preexec_fn")

    def begin():
        if enter:
            enter()
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    process = None
    try:
        process = subprocess.Popen(**words | {"preexec_fn": begin}, **options)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield process
    finally:
        if process and process.poll() is None:
            process.send_signal(ending)
            process.wait()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def persist(action):
    """A cgroup or a device may be busy for a moment after its last use."""
    for attempt in range(50):
        try:
            return action()
        except OSError:
            if attempt == 49:
                raise
            time.sleep(0.1)


def give_back(control):
    """Takes the memory controller from a cgroup's children again, unless one of them has a limit by now, which would go with it, or the
    kernel refuses."""
    with contextlib.suppress(OSError):
        if all(limit.read_text().strip() == "max" for limit in control.parent.glob("*/memory.max")):
            control.write_text("-memory")


class Native:
    """All memory local."""

    name = "native"

    def __init__(self, _given):
        pass

    @contextlib.contextmanager
    def within(self, _local_mib):
        """Yields what turns a command into arguments of Popen."""
        yield lambda command: {"args": command}


class Zram:
    """The kernel's swap to a compressed RAM disk, the program held to its budget by a memory cgroup."""

    name = "zram"
    # Processes that the kernel killed for want of memory in the last run.
    kills = 0
    control = pathlib.Path("/sys/class/zram-control")

    def __init__(self, _given):
        if not (self.control / "hot_add").exists():
            raise Failure("this kernel has no zram")
        self.groups, self.limit = self.hierarchy()

    @staticmethod
    def hierarchy(root=pathlib.Path("/sys/fs/cgroup")):
        """Where memory cgroups can be made, and the name of their limit."""
        if (root / "memory/memory.limit_in_bytes").exists():
            return root / "memory", "memory.limit_in_bytes"
        # Version 2 alone, or beside version 1 with the memory controller in it.
        for group in (root, root / "unified"):
            with contextlib.suppress(FileNotFoundError):
                if "memory" not in (group / "cgroup.controllers").read_text().split():
                    continue
                # Refused in a cgroup that has processes, as in a container, unless its children have the controller already.
                control = group / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    with undisturbed():
                        control.write_text("+memory")
                        atexit.register(give_back, control)
                return group, "memory.max"
        raise Failure("there is no memory cgroup")

    @contextlib.contextmanager
    def within(self, local_mib):
        """A fresh device and cgroup, undone in the opposite order."""
        undo = contextlib.ExitStack()
        try:
            with undisturbed():
                group = self.prepare(undo, local_mib)

            def enter():
                (group / "cgroup.procs").write_text(str(os.getpid()))

            yield lambda command: {"args": command, "preexec_fn": enter}
        finally:
            with undisturbed():
                undo.close()

    def count_kills(self, group):
        self.kills = kills_in(group)

    def prepare(self, undo, local_mib):
        number = (self.control / "hot_add").read_text().strip()
        undo.callback(persist, lambda: (self.control / "hot_remove").write_text(number))
        device, settings = f"/dev/zram{number}", pathlib.Path(f"/sys/block/zram{number}")
        undo.callback(persist, lambda: (settings / "reset").write_text("1"))
        (settings / "comp_algorithm").write_text("lz4")
        (settings / "disksize").write_text("4G")
        subprocess.run(["mkswap", device], check=True, stdout=subprocess.DEVNULL)
        # Before any other swap of this machine.
        subprocess.run(["swapon", "-p", "32767", device], check=True)
        undo.callback(subprocess.run, ["swapoff", device], check=True)
        group = self.groups / f"spillway-bench-{os.getpid()}"
        group.mkdir()
        undo.callback(persist, group.rmdir)
        undo.callback(self.count_kills, group)
        (group / self.limit).write_text(f"{local_mib}M")
        return group


class Spillway:
    """The embedded pool, under the binary that was built."""

    name = "spillway"
    # What else `run` is told, and where the pager's counters go after each run, if anybody wants them.
    options, stats = (), None

    def __init__(self, given):
        self.binary = given.spillway
        # A daemon of this host would serve its programs by a build, and within a budget, of its own.
        os.environ["SPILLWAY_DAEMON"] = "off"

    @contextlib.contextmanager
    def within(self, local_mib):
        """Yields what puts `spillway run` before a command."""
        counted = ["--stats", str(self.stats)] if self.stats else []
        yield lambda command: {"args": [self.binary, "run", "-q", *self.options, "--local", f"{local_mib}M", *counted, "--", *command]}


def add_pools(parser):
    """Where the pages are that are not local."""

    def pools(text):
        if unknown := set(text.split(",")) - {"local", "tcp"}:
            raise argparse.ArgumentTypeError(f"no {' or '.join(sorted(unknown))} here, only local and tcp")
        return text.split(",")

    parser.add_argument("--pool", type=pools, default=["local"], help="local, tcp or both")


def pool_of(kind, binary):
    """A pool of that kind for as long as this lasts; gives its URL."""
    return memory_server(binary) if kind == "tcp" else contextlib.nullcontext("local:")


@contextlib.contextmanager
def memory_server(binary):
    """A memory server on this host for as long as this lasts; gives the URL of a pool of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = {"args": [binary, "serve", "--listen", address, "--memory", "1G"]}
    with running(words, ending=signal.SIGTERM, stderr=subprocess.DEVNULL):
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(address.split(":")):
                break
            time.sleep(0.05)
        yield f"tcp://{address}"
