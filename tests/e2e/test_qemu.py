"""A stock kernel as a guest of QEMU's software emulation: its memory leaves and returns, and the guest never notices.

The guest's only program, tests/programs/guest/fill.c, checks every word of 160 MiB that it filled.
"""

import json
import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import time

import pytest
from harness import MIB, anonymous_bytes, assert_kernel_sees, assert_paged, eventually

GUEST_MIB, FILLED_MIB = 256, 160


def guest_kernel():
    """The image that scripts/setup-tests fetched, or that SPILLWAY_GUEST_KERNEL names."""
    if named := os.environ.get("SPILLWAY_GUEST_KERNEL"):
        return pathlib.Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(os.environ.get("SPILLWAY_TEST_CACHE") or pathlib.Path(home) / "spillway-tests")
    return next(iter(sorted(cache.glob("guest-kernel/boot/vmlinuz-*"))), None)


def give_up(why):
    """Skips the test, or fails it where all are to run."""
    (pytest.fail if os.environ.get("SPILLWAY_TESTS_STRICT") == "1" else pytest.skip)(why)


def virtio_drivers():
    """The kernel's own, which setup-tests unpacks beside it; empty for one that SPILLWAY_GUEST_KERNEL names."""
    return sorted(guest_kernel().parent.parent.glob("lib/modules/*/kernel/drivers/virtio/*.ko"))


@pytest.fixture(scope="module")
def guest_with(need, programs, tmp_path_factory):
    """`guest_with(MiB to fill, argument…, drivers=names)` gives the QEMU command of a guest that runs `fill` on its serial console, which is
    standard input and output."""
    kernel = guest_kernel()
    if not kernel or not kernel.exists():
        give_up("no guest kernel: scripts/setup-tests fetches one")
    qemu, busybox, _cc = need("qemu-system-x86_64", "busybox", "cc")
    root = tmp_path_factory.mktemp("guest")
    for directory in ("bin", "proc", "dev", "lib"):
        (root / directory).mkdir()
    shutil.copy(busybox, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    shutil.copy(programs / "guest/init", root / "init")
    for driver in virtio_drivers():
        shutil.copy(driver, root / "lib")
    compile_fill = ["cc", "-O2", "-static", "-Wall", "-Wextra", "-o", root / "bin/fill", programs / "guest/fill.c"]
    subprocess.run(compile_fill, check=True, timeout=60)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    archive = root.parent / "initramfs"
    with open(archive, "wb") as out:
        subprocess.run([busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), stdout=out, stderr=subprocess.DEVNULL, cwd=root, check=True)
    machine = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]
    emulation = ["-accel", "tcg,tb-size=8", "-m", GUEST_MIB, "-kernel", kernel, "-initrd", archive]
    # Some kernels fill memory with zeros before they give it to anyone, also to the balloon: that would touch all of it.
    words = "console=ttyS0 quiet panic=-1 memhp_default_state=online init_on_alloc=0"

    def command(fill, *arguments, drivers=()):
        return [qemu, *machine, *emulation, *arguments, "-append", f"{words} fill={fill} drivers={','.join(drivers)}"]

    return command


@pytest.fixture(scope="module")
def guest(guest_with):
    """The command of one that fills once."""
    return guest_with(FILLED_MIB)


class Monitor:
    """QEMU's own control socket."""

    def __init__(self, path):
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(20)
        eventually(lambda: self.stream.connect_ex(str(path)) == 0, "QEMU's socket")
        self.lines = self.stream.makefile("r")
        assert "QMP" in json.loads(self.lines.readline())
        self.ask("qmp_capabilities")

    def ask(self, command, **arguments):
        """A command, and its answer."""
        self.stream.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self.lines.readline())
            assert "error" not in answer, answer
            if "return" in answer:
                return answer["return"]


class Console:
    """The guest's serial console."""

    def __init__(self, running):
        self.process = running.process
        self.seen = ""

    def expect(self, pattern, timeout=60):
        """Reads until a whole line matches, and returns the match."""
        deadline = time.monotonic() + timeout
        while True:
            while "\n" in self.seen:
                line, self.seen = self.seen.split("\n", 1)
                if match := re.fullmatch(pattern, line.strip()):
                    return match
                assert "wrong=" not in line or "wrong=0" in line, line
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, left))
            assert ready, f"the guest did not say {pattern!r} within {timeout} s; last: {self.seen!r}"
            text = os.read(self.process.stdout.fileno(), 4096).decode(errors="replace")
            assert text, f"the console closed before {pattern!r}; stderr: {self.process.stderr.read()}"
            self.seen += text

    def say(self, line):
        """Types a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def filled(self, timeout=60):
        """Waits for the guest to have filled and checked its memory; returns the checksum."""
        return self.expect(r"round \d+ filled (\w+) wrong=0", timeout)[1]

    def verified(self, timeout=60):
        """Lets the guest check its memory again; returns the checksum."""
        self.say("go")
        return self.expect(r"round \d+ verified (\w+) wrong=0", timeout)[1]

    def stop(self):
        """Lets `fill` end: its memory is free again, and the next one begins if there is one."""
        self.say("stop")
        self.expect(r"fill ended with status 0")

    def power_off(self):
        """The same, where it is the last and the guest ends with it."""
        self.stop()


@pytest.mark.limit(120)
def test_guest_under_half_its_memory(spillway, guest):
    budget = GUEST_MIB // 2 * MIB
    running = spillway.start(guest, budget, stdin=subprocess.PIPE)
    console = Console(running)
    for _ in range(2):
        before = console.filled()
        time.sleep(1)  # an idle guest: what is cold leaves
        assert console.verified() == before
    console.filled()
    console.power_off()
    assert_paged(running.finish(timeout=20).must_succeed(), budget)


@pytest.mark.limit(120)
def test_guest_adopted_while_it_runs_and_shrunk_hard(native, spillway, settled, guest):
    running = native.start(guest, stdin=subprocess.PIPE)
    console = Console(running)
    first = console.filled()
    whole = anonymous_bytes(running.pid)
    assert whole >= FILLED_MIB * MIB

    pager = spillway.attach(running.pid, GUEST_MIB // 2 * MIB)
    assert console.verified() == first
    second = console.filled()

    small = 32 * MIB
    spillway.resize(running.pid, small)
    settled(running.pid)
    assert_kernel_sees(anonymous_bytes(running.pid), small)
    stored = spillway.find(running.pid)
    assert stored["stored_bytes"] >= (FILLED_MIB - 40) * MIB and stored["evicted_pages"] > 0, stored

    # Room enough to verify at speed; what had left comes back by faults.
    spillway.resize(running.pid, GUEST_MIB // 2 * MIB)
    assert console.verified() == second
    assert spillway.find(running.pid)["fetched_pages"] >= FILLED_MIB * 256 // 2

    console.filled()
    spillway.detach(running.pid)
    assert pager.finish(timeout=10).status == 0
    console.power_off()
    assert running.finish(timeout=20).status == 0


@pytest.mark.limit(150)
def test_memory_that_is_plugged_in_is_managed(native, spillway, settled, guest_with, tmp_path):
    """What a guest gets at run time is managed as it appears, and leaves like the rest. (Room for more costs this guest 64 MiB, as
    its kernel then prepares for devices that cannot reach all of it.)"""
    more, fill, budget = 256, 320, 128 * MIB
    qmp = tmp_path / "qmp"
    room = f"{GUEST_MIB},slots=1,maxmem=1G"
    running = native.start(guest_with(f"64,{fill}", "-m", room, "-qmp", f"unix:{qmp},server=on,wait=off"), stdin=subprocess.PIPE)
    console = Console(running)
    console.filled()
    pager = spillway.attach(running.pid, budget)
    monitor = Monitor(qmp)
    monitor.ask("object-add", **{"qom-type": "memory-backend-ram", "id": "more", "size": more * MIB})
    monitor.ask("device_add", driver="pc-dimm", id="dimm", memdev="more")
    console.stop()
    # More than the guest had before: without what was plugged in it would run out of memory.
    assert fill > GUEST_MIB
    first = console.filled(100)
    stats = settled(running.pid)
    assert stats["touched_bytes"] > fill * MIB and stats["stored_bytes"] > (fill * MIB - budget) // 2, stats
    assert_kernel_sees(anonymous_bytes(running.pid), budget)
    assert console.verified(100) == first
    console.power_off()
    assert running.finish(timeout=20).status == 0
    assert pager.finish(timeout=10).status == 0


@pytest.mark.limit(150)
@pytest.mark.parametrize("how", ["reported", "ballooned"])
def test_memory_that_a_guest_gives_back_is_dropped(native, spillway, settled, guest_with, tmp_path, how):
    """Free pages, by free page reporting or by the balloon, are gone wherever they were: none is fetched or sent for that."""
    if not virtio_drivers():
        give_up("no drivers for the guest: scripts/setup-tests fetches them")
    qmp, budget = tmp_path / "qmp", 64 * MIB
    device = "virtio-balloon-pci,id=balloon" + (",free-page-reporting=on" if how == "reported" else "")
    # In the order in which they need each other.
    drivers = ["virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_balloon"]
    command = guest_with("160,8", "-device", device, "-qmp", f"unix:{qmp},server=on,wait=off", drivers=drivers)
    running = native.start(command, stdin=subprocess.PIPE)
    console, monitor = Console(running), Monitor(qmp)
    console.filled(100)
    pager = spillway.attach(running.pid, budget)
    eventually(lambda: spillway.find(running.pid)["stored_bytes"] > (FILLED_MIB - 64) * MIB, "most of it to leave")
    time.sleep(2)  # what is still being written, or is found to be zeros
    before = settled(running.pid)

    def given_back():
        now = spillway.find(running.pid)
        return now if now["touched_bytes"] < before["touched_bytes"] - 100 * MIB else None

    console.stop()
    if how == "ballooned":
        monitor.ask("balloon", value=96 * MIB)
    after = eventually(given_back, "the guest's free memory to be gone", 60)
    gone = before["stored_bytes"] - after["stored_bytes"]
    assert gone > 60 * MIB, (before, after)
    for counter in ("fetched_pages", "evicted_pages", "written_pages"):
        assert after[counter] - before[counter] < 20 * 256, (counter, before, after)
    # And what is left is right.
    first = console.filled()
    assert console.verified() == first
    console.power_off()
    assert running.finish(timeout=20).status == 0
    assert pager.finish(timeout=10).status == 0
