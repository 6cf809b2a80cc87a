"""`spillway vmm`: monitors that hand over their userfaultfd, as Firecracker does, and as is proposed for Cloud Hypervisor; and those that
send nonsense.

tests/programs/vmm.c is the former and its guest in one, handoff.c the latter with a vhost-user back end; they know every byte.
"""

import array
import contextlib
import ctypes
import json
import mmap
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from harness import MIB, PIPES, anonymous_bytes, assert_kernel_sees, eventually
from mechanics import has_agent, refused

GUEST_MIB = 96
GUEST_PAGES = GUEST_MIB * 256
BUDGET = 24 * MIB


class Pager:
    """`spillway vmm` at work, and what it has said."""

    def __init__(self, spillway, processes, socket_path, *arguments):
        self.spillway, self.socket, self.stats = spillway, socket_path, spillway.stats_path()
        command = [spillway.path, "vmm", "--socket", socket_path, "--stats", self.stats, *arguments]
        self.process = processes.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=lambda: [self.lines.put(line.strip()) for line in self.process.stderr], daemon=True).start()
        self.says("listening at")

    def says(self, words, timeout=15):
        """Its next line, which has these words in it."""
        line = self.lines.get(timeout=timeout)
        assert words in line, line
        return line

    def is_quiet(self):
        """Whether it has said nothing more, and lives."""
        return self.lines.empty() and self.process.poll() is None

    def listing(self):
        """Its entry in `spillway ps`."""
        return self.spillway.find(self.process.pid)

    def let_go(self, number=signal.SIGINT):
        """Ends it as Ctrl-C does, and gives its final counters."""
        self.process.send_signal(number)
        assert self.process.wait(30) == 0
        assert not os.path.exists(self.socket)
        return json.loads(self.stats.read_text())


class Guest:
    """A running monitor with its guest."""

    def __init__(self, processes, program, *arguments):
        self.process = processes.start([program, "run", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = int(self.process.stdout.readline().split()[1])

    def tell(self, line):
        """Sends a line without waiting for its answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line):
        """Sends a line, and gives the answer."""
        self.tell(line)
        return self.process.stdout.readline().strip()

    def is_right(self):
        """Lets it check all of its memory."""
        assert self.ask("check") == "checked wrong=0"

    def end(self):
        """Ends it."""
        self.tell("stop")
        assert self.process.wait(10) == 0


@pytest.fixture
def program(build):
    return build("vmm", "-Wshadow")


@pytest.fixture
def image(program, tmp_path):
    """The memory file of a snapshot."""
    path = tmp_path / "memory"
    subprocess.run([program, "image", path, str(GUEST_MIB)], check=True, timeout=60)
    return path


@pytest.fixture
def serve(spillway, processes, tmp_path):
    """`serve(argument…)` starts `spillway vmm`."""
    return lambda *arguments: Pager(spillway, processes, tmp_path / "vmm.sock", *arguments)


@pytest.fixture
def resume(processes, program, tmp_path):
    """`resume(option…)` starts a monitor that connects."""
    return lambda *options: Guest(processes, program, tmp_path / "vmm.sock", GUEST_MIB, *options)


def test_a_guest_goes_on_from_its_snapshot_in_a_quarter_of_its_memory(serve, resume, image):
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    pager.says(f"manages 96.0 MiB of guest memory of process {guest.pid}")
    for _ in range(2):
        guest.is_right()
        assert guest.ask("write 4000") == "written"
    guest.is_right()
    assert guest.ask("call 5000 2000") == "called wrong=0"
    stats = eventually(lambda: (now := pager.listing()) and now["local_bytes"] <= BUDGET and now, "the guest within its budget")
    assert stats["pids"] == [guest.pid] and stats["evicted_pages"] > 0 and stats["fetched_pages"] > GUEST_PAGES
    # What the guest has only read is in the file, and was never written elsewhere.
    assert stats["clean_drops"] > GUEST_PAGES / 2
    assert stats["written_pages"] < 20_000, stats
    assert_kernel_sees(anonymous_bytes(guest.pid), BUDGET)
    guest.end()
    eventually(lambda: pager.listing()["processes"] == 0, "the guest to be gone")
    assert pager.is_quiet()
    assert pager.let_go()["lost_pages"] == 0


@pytest.mark.limit(120)
def test_churn_under_pressure(serve, resume, image):
    """Threads that change, check and give back pages while they leave: what was given back reads as zeros ever after."""
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    turns, wrong = map(int, re.fullmatch(r"churned (\d+) wrong=(\d+)", guest.ask("churn 8")).groups())
    assert wrong == 0 and turns > 5000
    guest.is_right()
    assert pager.listing()["evicted_pages"] > 5000
    guest.end()
    pager.let_go()


def test_letting_go_brings_everything_home(serve, resume, image):
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    pager.says("manages")
    guest.is_right()
    assert guest.ask("write 3000") == "written" and guest.ask("drop 100 50") == "dropped"
    eventually(lambda: pager.listing()["local_bytes"] <= BUDGET, "the guest within its budget")
    assert pager.let_go()["evicted_pages"] > GUEST_PAGES / 2
    # Nobody serves any more: what is there is all that there is.
    guest.is_right()
    assert int(guest.ask("resident").split()[1]) >= GUEST_PAGES - 50
    assert not has_agent(guest.pid)
    guest.end()


def test_clones_of_one_snapshot_share_a_budget(serve, resume, image):
    pager = serve("--memory", image, "--local", 2 * BUDGET)
    guests = [resume() for _ in range(3)]
    for _ in guests:
        pager.says("manages")
    for turn in range(2):
        for guest in guests:
            assert guest.ask(f"write {1000 * (turn + 1)}") == "written"
        for guest in guests:
            guest.is_right()
    assert sorted(pager.listing()["pids"]) == sorted(guest.pid for guest in guests)
    # One is killed, and the others go on.
    os.kill(guests[1].pid, signal.SIGKILL)
    eventually(lambda: pager.listing()["processes"] == 2, "the killed one to be gone")
    for guest in (guests[0], guests[2]):
        guest.is_right()
        guest.end()
    assert pager.is_quiet()
    pager.let_go()


def test_memory_that_starts_as_zeros(serve, resume):
    pager = serve("--fresh", "--local", BUDGET)
    guest = resume("fresh")
    assert guest.ask("write 20000") == "written"
    guest.is_right()
    guest.end()
    assert pager.let_go()["evicted_pages"] > 1000


def test_what_was_there_before_is_not_the_snapshots(serve, resume, image):
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume("touched")
    pager.says("manages")
    eventually(lambda: pager.listing()["local_bytes"] <= BUDGET, "what was there to leave")
    assert_kernel_sees(anonymous_bytes(guest.pid), BUDGET)
    for _ in range(2):
        guest.is_right()
        assert guest.ask(f"drop 0 {GUEST_PAGES // 3}") == "dropped"
    guest.is_right()
    guest.end()
    pager.let_go()


def test_a_monitor_that_waits_in_the_kernel_is_served_before_it_is_adopted(serve, resume, image):
    """It has one thread, which the kernel lets nobody stop while it waits for a page inside of a system call."""
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume("eager")
    pager.says("manages")
    guest.is_right()
    eventually(lambda: pager.listing()["evicted_pages"] > 1000, "an agent")
    guest.end()
    pager.let_go()


def test_what_no_event_would_tell_is_impossible(serve, resume, image):
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    pager.says("manages")
    guest.is_right()
    assert guest.ask("fork") == "child has=0"
    for change in ("unmap", "move", "over"):
        assert guest.ask(change) == str(1), change  # EPERM
    guest.is_right()
    guest.end()
    pager.let_go()


@pytest.mark.parametrize("features, words", [("0", "UFFD_FEATURE_EVENT_REMOVE"), ("a", "EVENT_FORK"), ("88", "SIGBUS")])
def test_features_that_would_not_do(serve, resume, image, features, words):
    pager = serve("--memory", image)
    guest = resume("features", features)
    assert words in pager.says("a monitor was refused")
    assert "spillway" not in open(f"/proc/{guest.pid}/maps").read()
    pager.let_go()


def test_shared_memory_is_refused(serve, resume, image):
    pager = serve("--memory", image)
    resume("shared")
    assert "is shared" in pager.says("a monitor was refused")
    pager.let_go()


def test_a_file_of_another_snapshot_is_refused(serve, resume, program, tmp_path):
    small = tmp_path / "small"
    subprocess.run([program, "image", small, "32"], check=True, timeout=60)
    pager = serve("--memory", small)
    resume()
    assert "give --memory the file of this snapshot" in pager.says("a monitor was refused")
    pager.let_go()


def test_bad_arguments(spillway, tmp_path, image):
    path = tmp_path / "a.sock"
    refused(spillway.cli("vmm", "--socket", path), "--memory")
    refused(spillway.cli("vmm", "--memory", image), "--socket")
    refused(spillway.cli("vmm", "--socket", path, "--memory", image, "--fresh"))
    refused(spillway.cli("vmm", "--socket", path, "--memory", tmp_path / "none"), "give --memory")
    refused(spillway.cli("vmm", "--socket", path, "--memory", tmp_path), "regular file")
    refused(spillway.cli("vmm", "--socket", tmp_path / "no" / "such", "--fresh"), "cannot listen")
    refused(spillway.cli("vmm", "--socket", image, "--fresh"), "something else has this name")
    assert image.stat().st_size == GUEST_MIB * MIB


def test_one_socket_has_one_pager(spillway, serve, tmp_path):
    pager = serve("--fresh")
    refused(spillway.cli("vmm", "--socket", tmp_path / "vmm.sock", "--fresh"), "another process has it")
    # A name that a killed one has left is taken.
    pager.process.kill()
    pager.process.wait(5)
    serve("--fresh").let_go()


# ---- strangers -------------------------------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)
WHERE = 0x7000_0000_0000


def region(start=WHERE, size=1 << 20, offset=0, **more):
    return {"base_host_virt_addr": start, "size": size, "offset": offset, "page_size": 4096, **more}


def userfaultfd(agree=True, features=8):
    """A userfaultfd of our own; by default one that tells of removals."""
    descriptor = LIBC.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
    assert descriptor >= 0
    if agree:
        api = (ctypes.c_uint64 * 3)(0xAA, features, 0)
        assert LIBC.ioctl(descriptor, ctypes.c_ulong(0xC018AA3F), api) == 0
    return descriptor


@contextlib.contextmanager
def connection(path):
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(path))
        yield stream


def send(path, data, *descriptors):
    """Sends a message with descriptors, and hangs up."""
    with connection(path) as stream:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        stream.sendmsg([data if isinstance(data, bytes) else json.dumps(data).encode()], rights)


def own_memory(size=1 << 20):
    """Memory of our own, and where it is."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_strangers_are_told_off_and_others_served(serve, resume, image):
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    pager.says("manages")
    good, raw, file = userfaultfd(), userfaultfd(agree=False), os.memfd_create("x")
    memory, address = own_memory()
    large, parts = own_memory((GUEST_MIB + 1) * MIB)
    whole = json.dumps([region()]).encode()
    cases = [
        (b"", [], "closed the socket without a word"),
        (b"hello", [good], "no list of guest regions"),
        (b"\xff" * 100, [good], "no list of guest regions"),
        (whole[:20], [good], "ended before the JSON"),
        (b"[" * 5000, [good], "no list of guest regions"),
        (b"[" + b" " * (80 << 10), [good], "longer than"),
        ([], [good], "0 regions"),
        ([region()] * 300, [good], "300 regions"),
        ([region(), region()], [good], "overlapping"),
        ([region(start=WHERE + 1)], [good], "cannot be"),
        ([region(size=1 << 63)], [good], "cannot be"),
        ([region(size=(1 << 64) - 4096, offset=8192)], [good], "cannot be"),
        ([region(size=-4096)], [good], "no list of guest regions"),
        ([region(size=1 << 40)], [good], "does not have"),
        ([region(page_size=2 << 20)], [good], "turn huge pages off"),
        ({"type": "handoff", "version": 1, "regions": []}, [good], "no list of guest regions"),
        ([region()], [], "no userfaultfd came"),
        ([region()], [file], "is no userfaultfd"),
        ([region()], [file, good], "is no userfaultfd"),
        ([region()], [raw], "was not agreed on"),
        ([region()], [good], "does not have"),
        ([region(start=address, offset=GUEST_MIB * MIB)], [good], "give --memory"),
        ([region(start=parts + part * MIB) for part in range(GUEST_MIB + 1)], [good], "bytes in all"),
    ]
    for data, descriptors, words in cases:
        send(pager.socket, data, *descriptors)
        assert words in pager.says("a monitor was refused"), data
    # Who comes and says nothing is not waited for.
    with connection(pager.socket):
        guest.is_right()
        assert "not there in time" in pager.says("a monitor was refused")
    assert memory[:10] == large[:10] == bytes(10)
    guest.is_right()
    assert pager.is_quiet()
    assert len(os.listdir(f"/proc/{pager.process.pid}/fd")) < 40
    guest.end()
    pager.let_go()


def test_a_message_may_come_in_pieces(serve, program, processes, image):
    """A stream has no borders: what is not all there yet is waited for."""
    pager = serve("--memory", image)
    good = userfaultfd()
    text = json.dumps([region()]).encode()
    with connection(pager.socket) as stream:
        stream.sendmsg([text[:10]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [good]))])
        time.sleep(0.2)
        stream.sendall(text[10:])
        assert "does not have" in pager.says("a monitor was refused")
    pager.let_go()


def test_the_memory_of_another_process_is_refused(serve, processes, program, image, tmp_path):
    """A userfaultfd is sent by a process that it is not of: neither is touched."""
    pager = serve("--memory", image)
    guest = Guest(processes, program, tmp_path / "vmm.sock", GUEST_MIB, "silent")
    pidfd = os.pidfd_open(guest.pid)
    number = next(int(fd) for fd in os.listdir(f"/proc/{guest.pid}/fd") if "userfaultfd" in os.readlink(f"/proc/{guest.pid}/fd/{fd}"))
    stolen = LIBC.syscall(438, pidfd, number, 0)
    assert stolen >= 0
    # At an address that both have.
    script = f"""
import array, json, mmap, os, socket, sys, ctypes
memory = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect({str(pager.socket)!r})
    text = json.dumps([dict(base_host_virt_addr=address, size=1 << 20, offset=0, page_size=4096)]).encode()
    stream.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [{stolen}]))])
sys.stdin.read()
print(memory[:4])
"""
    thief = processes.start(["python3", "-c", script], **(PIPES | {"stdin": subprocess.PIPE}), pass_fds=[stolen])
    said = pager.lines.get(timeout=15)
    assert "refused" in said and ("not of its own memory" in said or "registering" in said), said
    assert thief.communicate("", 10)[0].strip() == repr(bytes(4))
    assert pager.is_quiet()
    pager.let_go()


OTHER_MEMORY = """
import array, ctypes, json, mmap, os, socket, sys
libc, size = ctypes.CDLL(None), 1 << 20
memory = mmap.mmap(-1, 2 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
uffd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
assert libc.ioctl(uffd, ctypes.c_ulong(0xC018AA3F), (ctypes.c_uint64 * 3)(0xAA, 8, 0)) == 0
assert libc.ioctl(uffd, ctypes.c_ulong(0xC020AA00), (ctypes.c_uint64 * 4)(address, 2 * size, 1, 0)) == 0
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(sys.argv[1])
    text = json.dumps([dict(base_host_virt_addr=address, size=size, offset=0)]).encode()
    stream.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [uffd]))])
print(memory[size - 8 : size], flush=True)
sys.stdin.readline()
print(memory[size : size + 8])
"""


def test_what_was_registered_and_not_named_is_an_error(serve, processes, image):
    """Nobody knows what is there: an access fails, rather than find zeros."""
    pager = serve("--memory", image)
    monitor = processes.start(["python3", "-c", OTHER_MEMORY, pager.socket], **(PIPES | {"stdin": subprocess.PIPE}))
    pager.says("manages 1.0 MiB")
    out, _ = monitor.communicate("\n", timeout=15)
    assert out.splitlines() == [repr(image.read_bytes()[MIB - 8 : MIB])]
    assert monitor.returncode == -signal.SIGBUS
    eventually(lambda: pager.listing()["processes"] == 0, "it to be gone")
    pager.let_go()


def test_a_descriptor_that_waits_keeps_nobody_waiting(serve, resume, image, spillway):
    """A monitor can make its userfaultfd one that waits to be read, at any time: the pager never waits for a message."""
    pager = serve("--memory", image, "--local", BUDGET)
    guest = resume()
    pager.says("manages")
    descriptor = next(fd for fd in os.listdir(f"/proc/{guest.pid}/fd") if "userfaultfd" in os.readlink(f"/proc/{guest.pid}/fd/{fd}"))
    mine = LIBC.syscall(438, os.pidfd_open(guest.pid), int(descriptor), 0)
    os.set_blocking(mine, True)
    os.close(mine)
    guest.is_right()
    spillway.resize(guest.pid, 8 * MIB)
    eventually(lambda: pager.listing()["local_bytes"] <= 8 * MIB, "the guest within its budget, though it does nothing")
    guest.is_right()
    guest.end()
    pager.let_go()


# ---- Cloud Hypervisor's hand-off ---------------------------------------------------------------------------------------

# Of its userfaultfd: MISSING_SHMEM and WP_HUGETLBFS_SHMEM.
SHARED = 0x1020


class SharedGuest(Guest):
    """A running monitor that shares its guest's memory with a vhost-user back end."""

    def __init__(self, processes, program, *arguments):
        self.process = processes.start([program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, pid, peer, acked = self.process.stdout.readline().split()
        self.pid, self.peer, self.acked = int(pid), int(peer), acked == "acked=1"

    def is_right(self):
        """Lets both check all of its memory."""
        assert self.ask("check") == "checked wrong=0 peer=0"

    def resident(self):
        """Pages that its files have."""
        return int(self.ask("resident").split()[1])


@pytest.fixture
def hand_off(processes, build, tmp_path):
    """`hand_off(option…)` starts a monitor that connects."""
    program = build("handoff", "-Wshadow")
    return lambda *options: SharedGuest(processes, program, tmp_path / "vmm.sock", GUEST_MIB, *options)


def ready(pager, files):
    """Waits until all who have mapped so many files of memory are managed."""
    eventually(lambda: pager.listing().get("shared_files_ready") == files, "all who share the memory to be managed")


def test_shared_memory_in_a_quarter(serve, hand_off):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off()
    assert guest.acked
    pager.says(f"manages 96.0 MiB of guest memory of process {guest.pid}")
    ready(pager, 2)
    for _ in range(2):
        assert guest.ask("write 15000") == "written" and guest.ask("peer 5000") == "written"
        guest.is_right()
    assert guest.ask("call 5000 2000") == "called wrong=0"
    stats = eventually(lambda: (now := pager.listing()) and now["local_bytes"] <= BUDGET and now, "the guest within its budget")
    # Of the back end nothing else is managed than what it shares.
    assert sorted(stats["pids"]) == sorted([guest.pid, guest.peer])
    assert stats["evicted_pages"] > 10_000 and stats["fetched_pages"] > 10_000
    eventually(lambda: guest.resident() * 4096 <= BUDGET, "the kernel to see that")
    assert "um" not in private_flags(guest.peer)
    guest.end()
    eventually(lambda: pager.listing()["processes"] == 0, "both to be gone")
    assert pager.is_quiet()
    assert pager.let_go()["lost_pages"] == 0


def private_flags(pid):
    """All flags that private mappings of a process carry, but those of its agent."""
    flags, private = set(), False
    for line in open(f"/proc/{pid}/smaps").read().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            private = line.split()[1][3] == "p"
        elif line.startswith("VmFlags:") and private:
            flags |= set(line.split()[1:])
    return flags


@pytest.mark.limit(120)
def test_shared_churn_under_pressure(serve, hand_off):
    """Threads of two processes change and check pages while they leave; then each has those of the other."""
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off("touched")
    assert guest.acked
    ready(pager, 2)
    said = guest.ask("churn 8")
    turns, wrong, peer_turns, peer_wrong = map(int, re.fullmatch(r"churned (\d+) wrong=(\d+) peer=(\d+) wrong=(\d+)", said).groups())
    assert wrong == peer_wrong == 0 and min(turns, peer_turns) > 2000, said
    guest.is_right()
    assert pager.listing()["evicted_pages"] > 5000
    guest.end()
    pager.let_go()


def test_letting_go_of_shared_memory_brings_everything_home(serve, hand_off, spillway):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off("touched")
    ready(pager, 2)
    assert guest.ask("write 15000") == "written"
    assert guest.ask("call 0 100000") == "called wrong=0"
    there = pager.listing()
    eventually(lambda: pager.listing()["local_bytes"] <= BUDGET, "the guest within its budget")
    spillway.detach(guest.pid)
    assert pager.process.wait(30) == 0
    assert json.loads(pager.stats.read_text())["evicted_pages"] >= there["evicted_pages"] > GUEST_PAGES // 4
    assert guest.resident() >= GUEST_PAGES // 2
    assert not has_agent(guest.pid) and not has_agent(guest.peer)
    guest.is_right()
    assert guest.ask("write 1000") == "written" and guest.ask("peer 1000") == "written"
    guest.is_right()
    guest.end()


def test_another_hand_off_after_it_was_let_go(serve, hand_off):
    """A manager may go, and the monitor hand over to the next."""
    first = serve("--fresh", "--local", BUDGET)
    guest = hand_off("touched")
    ready(first, 2)
    guest.is_right()
    first.let_go()
    pager = serve("--fresh", "--local", BUDGET)
    assert guest.ask("again") == "acked=1"
    ready(pager, 2)
    eventually(lambda: guest.resident() * 4096 <= BUDGET, "it to leave")
    guest.is_right()
    guest.end()
    pager.let_go()


def test_memory_that_is_plugged_in(serve, hand_off):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off()
    pager.says("manages 96.0 MiB")
    assert guest.ask("write 10000") == "written"
    for more in (32, 16):
        assert guest.ask(f"plug {more}") == "plugged"
        pager.says(f"manages {more}.0 MiB more of process {guest.pid}")
    ready(pager, 4)
    assert guest.ask("write 30000") == "written" and guest.ask("peer 10000") == "written"
    guest.is_right()
    eventually(lambda: guest.resident() * 4096 <= BUDGET, "the guest within its budget")
    assert guest.ask("late unmap") == "1"
    # What is not understood is passed over, also again; and memory that is not there is refused.
    assert guest.ask('tell {"type":"news"}') == guest.ask('tell {"type":"more news"}') == "told"
    pager.says("not understood")
    assert guest.ask('tell {"type":"add_region","region":{"host_virt_addr":65536,"size":4096}}') == "told"
    assert "does not have" in pager.says("is not managed")
    assert guest.ask("plug 8") == "plugged"
    pager.says("manages 8.0 MiB more")
    assert guest.ask("tell nonsense") == "told"
    pager.says("is not listened to any more")
    assert guest.ask("write 5000") == "written"
    guest.is_right()
    guest.end()
    pager.let_go()


def test_a_monitor_that_hangs_up_is_served_on(serve, hand_off):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off()
    ready(pager, 2)
    assert guest.ask("hangup") == "hung up"
    assert guest.ask("write 20000") == "written"
    guest.is_right()
    assert pager.listing()["evicted_pages"] > 1000
    guest.end()
    pager.let_go()


def test_what_no_event_would_tell_of_shared_memory_is_impossible(serve, hand_off):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off("touched")
    ready(pager, 2)
    guest.is_right()
    assert guest.ask("fork") == "child has=0"
    for change in ("unmap", "move", "over"):
        assert guest.ask(change) == str(1), change  # EPERM
    guest.is_right()
    guest.end()
    pager.let_go()


def test_both_kinds_of_monitors_share_a_budget(serve, resume, hand_off):
    pager = serve("--fresh", "--local", 2 * BUDGET)
    private, shared = resume("fresh"), hand_off()
    ready(pager, 2)
    for _ in range(2):
        assert private.ask("write 10000") == shared.ask("write 10000") == shared.ask("peer 5000") == "written"
        private.is_right()
        shared.is_right()
    eventually(lambda: pager.listing()["local_bytes"] <= 2 * BUDGET, "both within their budget")
    # The monitor is killed, and with it goes its back end.
    os.kill(shared.pid, signal.SIGKILL)
    eventually(lambda: pager.listing()["pids"] == [private.pid], "the killed one to be gone")
    eventually(lambda: pager.listing().get("shared_files", 0) == 0, "its memory to be gone")
    private.is_right()
    private.end()
    pager.let_go()


@pytest.mark.parametrize(
    "options, words",
    [
        (["mode", "MISSING|WP|WP_ASYNC", "features", "9020"], "uffd_handoff_mode=MISSING|WP"),
        (["mode", "MISSING"], "uffd_handoff_mode=MISSING|WP"),
        (["mode", "WP|MINOR"], "uffd_handoff_mode=MISSING|WP"),
        (["features", "9020"], "UFFD_FEATURE_WP_ASYNC"),
        (["features", "1022"], "UFFD_FEATURE_EVENT_FORK"),
        (["features", "10a0"], "UFFD_FEATURE_SIGBUS"),
        (["pid", "1"], "calls itself process 1"),
        (["private"], "`spillway attach PID`"),
    ],
)
def test_hand_offs_that_would_not_do(serve, hand_off, options, words):
    pager = serve("--fresh")
    guest = hand_off(*options)
    assert not guest.acked
    assert words in pager.says("a monitor was refused")
    assert "spillway" not in open(f"/proc/{guest.pid}/maps").read()
    assert pager.is_quiet()
    pager.let_go()


def test_a_hand_off_is_not_from_a_snapshot(serve, hand_off, image):
    pager = serve("--memory", image)
    assert not hand_off().acked
    assert "--fresh" in pager.says("a monitor was refused")
    pager.let_go()


def framed(body, length=None):
    """A message with its length before it."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (len(body) if length is None else length).to_bytes(4, "little") + body


def shared_region(start, size=1 << 20, **more):
    return {"guest_phys_addr": 0, "host_virt_addr": start, "size": size, "backing_file_offset": 0, **more}


def test_strangers_that_hand_off_nonsense(serve, hand_off):
    pager = serve("--fresh", "--local", BUDGET)
    guest = hand_off()
    pager.says("manages")
    good, file = userfaultfd(features=SHARED), os.memfd_create("x")
    os.truncate(file, 2 << 20)
    memory = mmap.mmap(file, 2 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    named = open(__file__, "rb")
    code = mmap.mmap(named.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)

    def handed(*regions, **more):
        return framed({"type": "handoff", "version": 0, "vmm_pid": os.getpid(), "mode": "MISSING|WP", "regions": list(regions), **more})

    whole = handed(shared_region(address))
    with open("/proc/self/maps") as maps:
        named_at = next(int(line.split("-")[0], 16) for line in maps if line.strip().endswith(__file__))
    cases = [
        (whole[:3], [good], "ended before"),
        (whole[:40], [good], "ended before"),
        (framed(b"{}", (64 << 10) + 1), [good], "longer than"),
        (framed(b"{}", 1 << 31), [good], "longer than"),
        (framed(b"nonsense"), [good], "no list of guest regions"),
        (framed(b"[" * 5000), [good], "no list of guest regions"),
        (framed({"type": "add_region", "region": shared_region(address)}), [good], "it is no hand-off"),
        (handed(), [good], "0 regions"),
        (handed(*[shared_region(address)] * 300), [good], "300 regions"),
        (handed(shared_region(address), shared_region(address + 4096)), [good], "overlapping"),
        (handed(shared_region(address + 1)), [good], "cannot be"),
        (handed(shared_region(address, 1 << 63)), [good], "cannot be"),
        (handed(shared_region(address, backing_file_offset=(1 << 64) - 4096)), [good], "cannot be"),
        (handed(shared_region(WHERE)), [good], "does not have"),
        (handed(shared_region(WHERE, 1 << 40)), [good], "does not have"),
        (handed(shared_region(named_at, 4096)), [good], "cannot be managed"),
        (handed(shared_region(address), mode="WP"), [good], "uffd_handoff_mode"),
        (handed(shared_region(address), mode="\n\x1b" * 1000), [good], "uffd_handoff_mode"),
        (handed(shared_region(address), vmm_pid=-1), [good], "calls itself process -1"),
        (whole, [], "no userfaultfd came"),
        (whole, [file], "is no userfaultfd"),
        (whole, [userfaultfd(agree=False)], "was not agreed on"),
        (whole, [userfaultfd(features=SHARED | 2)], "EVENT_FORK"),
    ]
    for data, descriptors, words in cases:
        send(pager.socket, data, *descriptors)
        assert words in pager.says("a monitor was refused"), data
    # Who begins to say something and does not go on is not waited for.
    with connection(pager.socket) as stream:
        stream.sendmsg([whole[:-1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [good]))])
        guest.is_right()
        assert "not there in time" in pager.says("a monitor was refused")
    assert memory[:10] == bytes(10) and len(code) > 0
    assert guest.ask("write 20000") == "written"
    guest.is_right()
    assert pager.is_quiet()
    assert len(os.listdir(f"/proc/{pager.process.pid}/fd")) < 60
    guest.end()
    pager.let_go()


# What is not the sender's own: it sends the userfaultfd of another, or has another one over the memory that it names.
FOREIGN_HAND_OFF = """
import array, ctypes, json, mmap, os, socket, sys
libc, size = ctypes.CDLL(None), 1 << 20
file = os.memfd_create("x")
os.truncate(file, size)
memory = mmap.mmap(file, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
def make():
    uffd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
    assert libc.ioctl(uffd, ctypes.c_ulong(0xC018AA3F), (ctypes.c_uint64 * 3)(0xAA, 0x1020, 0)) == 0
    return uffd
uffd = int(sys.argv[2]) or make()
if sys.argv[2] == "0":
    assert libc.ioctl(make(), ctypes.c_ulong(0xC020AA00), (ctypes.c_uint64 * 4)(address, size, 3, 0)) == 0
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(sys.argv[1])
    body = json.dumps(dict(type="handoff", vmm_pid=os.getpid(), mode="MISSING|WP", regions=[dict(host_virt_addr=address, size=size)])).encode()
    stream.sendmsg([len(body).to_bytes(4, "little") + body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [uffd]))])
    stream.settimeout(5)
    print(stream.recv(1) == b"")
sys.stdin.readline()
print(os.pread(file, 4, 0))
"""


@pytest.mark.parametrize("whose", ["another userfaultfd", "another process"])
def test_a_hand_off_of_what_is_not_its_own(serve, processes, hand_off, whose):
    pager = serve("--fresh")
    stolen = userfaultfd(features=SHARED) if whose == "another process" else 0
    thief = processes.start(
        ["python3", "-c", FOREIGN_HAND_OFF, pager.socket, str(stolen)], **(PIPES | {"stdin": subprocess.PIPE}), pass_fds=[stolen] if stolen else []
    )
    pager.says("refused")
    out, err = thief.communicate("\n", timeout=15)
    assert out.splitlines() == ["True", repr(bytes(4))], err
    assert thief.returncode == 0
    guest = hand_off()
    ready(pager, 2)
    guest.is_right()
    guest.end()
    pager.let_go()
