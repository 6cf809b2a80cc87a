"""Guests of QEMU's software emulation: a stock kernel, and one program that checks every word of the memory that it filled.

With an address they also have an SSH server, behind a tap device in a network namespace of their own.
"""

import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import socket
import struct
import subprocess
import time

from harness import MIB, REPOSITORY, eventually
from servers import Network

PROGRAMS = REPOSITORY / "tests/programs"
PAGE = 4096
# A kernel says so of a CPU that stood still, and of what failed.
COMPLAINTS = ("rcu:", "soft lockup", "hung task", "BUG:", "Call Trace", "Out of memory", "segfault")
# In the order in which they need each other.
PCI_DRIVERS = ("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci")
NETWORK_DRIVERS = (*PCI_DRIVERS, "failover", "net_failover", "virtio_net")
BALLOON_DRIVERS = (*PCI_DRIVERS, "virtio_balloon")
DISK_DRIVERS = (*PCI_DRIVERS, "virtio_blk")


def cache():
    """Where scripts/setup-tests keeps what it does not install."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("SPILLWAY_TEST_CACHE") or pathlib.Path(home) / "spillway-tests")


def kernel():
    """The image that scripts/setup-tests fetched, or that SPILLWAY_GUEST_KERNEL names."""
    if named := os.environ.get("SPILLWAY_GUEST_KERNEL"):
        return pathlib.Path(named)
    return next(iter(sorted(cache().glob("guest-kernel/boot/vmlinuz-*"))), None)


def drivers():
    """The kernel's own, by name, which setup-tests unpacks beside it; none for one that SPILLWAY_GUEST_KERNEL names."""
    return {path.stem: path for path in kernel().parent.parent.glob("lib/modules/*/kernel/**/*.ko")}


def libraries(program):
    """The shared libraries of a program, the loader among them."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, timeout=10).stdout
    return [pathlib.Path(word) for word in said.split() if word.startswith("/")]


class Image:
    """An initial file system: busybox, `fill`, drivers; with `ssh` a server that lets in whoever has the key, with `store` memcached
    and a program that loads it, instead of `fill`, and with `disk` a program that writes and reads a disk."""

    USER = "root"

    def __init__(self, directory, ssh=False, store=False, disk=False):
        self.root, self.archive, self.key = directory / "root", directory / "initramfs", directory / "key"
        for name in ("bin", "proc", "dev", "sys", "lib", "etc/dropbear", "root/.ssh"):
            (self.root / name).mkdir(parents=True)
        busybox = shutil.which("busybox")
        shutil.copy(busybox, self.root / "bin/busybox")
        for name in ("sh", "sha256sum", "cat"):
            (self.root / "bin" / name).symlink_to("busybox")
        shutil.copy(PROGRAMS / "guest/init", self.root / "init")
        for driver in drivers().values():
            shutil.copy(driver, self.root / "lib")
        program = "gets" if store else "disk" if disk else "fill"
        self.program = self.root / "bin" / program
        compiled = ["cc", "-O2", "-static", "-Wall", "-Wextra", "-o", self.program, PROGRAMS / f"guest/{program}.c"]
        subprocess.run(compiled, check=True, timeout=60)
        if ssh:
            self._add_ssh()
        if store:
            self._add("memcached")
            self._add_user()
        names = "\n".join(str(path.relative_to(self.root)) for path in sorted(self.root.rglob("*")))
        pack = [busybox, "cpio", "-o", "-H", "newc"]
        with open(self.archive, "wb") as out:
            subprocess.run(pack, input=names.encode(), stdout=out, stderr=subprocess.DEVNULL, cwd=self.root, check=True)

    def _add(self, name):
        """A program of this host, with its libraries."""
        program = pathlib.Path(shutil.which(name))
        shutil.copy(program, self.root / "bin")
        for library in libraries(program):
            place = self.root / library.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)

    def _add_user(self):
        (self.root / "etc/passwd").write_text(f"{self.USER}:x:0:0::/root:/bin/sh\n")
        (self.root / "etc/group").write_text("root:x:0:\n")

    def _add_ssh(self):
        self._add("dropbear")
        for key in (self.key, self.root / "etc/dropbear/key"):
            subprocess.run(["dropbearkey", "-t", "ed25519", "-f", key], capture_output=True, check=True, timeout=20)
        told = subprocess.run(["dropbearkey", "-y", "-f", self.key], capture_output=True, text=True, check=True, timeout=20).stdout
        public = next(line for line in told.splitlines() if line.startswith("ssh-"))
        (self.root / "root/.ssh/authorized_keys").write_text(public + "\n")
        self._add_user()
        # It insists that nobody else could have written the key.
        for path in (self.root, self.root / "root", self.root / "root/.ssh", self.root / "root/.ssh/authorized_keys"):
            path.chmod(0o700)


class Cable(Network):
    """A tap device in a network namespace of its own: a guest's end, and ours."""

    OURS, GUESTS = Network.ADDRESSES

    def __init__(self):
        self.names = [f"spillway-{os.getpid()}-tap"]

    def make(self):
        (name,) = self.names
        self._ip("netns", "add", name)
        self._ip("-n", name, "tuntap", "add", "dev", "tap", "mode", "tap")
        self._ip("-n", name, "address", "add", f"{self.OURS}/30", "dev", "tap")
        self._ip("-n", name, "link", "set", "tap", "up")

    @staticmethod
    def device():
        """What QEMU is told."""
        network = ["-netdev", "tap,id=cable,ifname=tap,script=no,downscript=no"]
        return [*network, "-device", "virtio-net-pci,netdev=cable,romfile="]

    def pings(self, count=3):
        """How long answers to so many requests took, one a second, in milliseconds; those that took longer than that are missing."""
        command = [*self.within(0), "busybox", "ping", "-c", str(count), "-W", "1", self.GUESTS]
        said = subprocess.run(command, capture_output=True, text=True, timeout=count + 20).stdout
        return [float(time) for time in re.findall(r"time=([\d.]+) ms", said) if float(time) < 1000]

    def login(self, image, command, timeout=120):
        """Logs in and has a command carried out: what it says and how long all of it took, or none if it was not done in time."""
        words = ["dbclient", "-T", "-y", "-y", "-i", str(image.key), f"{image.USER}@{self.GUESTS}", command]
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run([*self.within(0), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
            if done.returncode == 0:
                return done.stdout, time.monotonic() - began
        return None


def command(image, mib, fill, *arguments, drivers=(), address=None, store=None, disk=None, before=()):
    """The QEMU command of a guest of so many MiB that runs `fill` on its serial console, which is standard input and output; or
    `gets`, with so many MiB in the memcached, where `store` tells it from others; or `disk`, with the device of that name."""
    machine = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]
    emulation = ["-accel", "tcg,tb-size=8", "-m", mib, "-kernel", kernel(), "-initrd", image.archive]
    # Some kernels fill memory with zeros before they give it to anyone, also to the balloon: that would touch all of it.
    words = f"console=ttyS0 quiet panic=-1 no_timer_check memhp_default_state=online init_on_alloc=0 fill={fill} drivers={','.join(drivers)}"
    # A seventh of what it takes to start, which is mostly what tests wait for.
    words += " cryptomgr.notests ipv6.disable=1 mitigations=off"
    words += f" address={address}/30" if address else ""
    words += f" store={store}" if store else ""
    words += f" disk={disk}" if disk else ""
    return [*before, shutil.which("qemu-system-x86_64"), *machine, *emulation, *arguments, "-append", words]


class Memory:
    """The memory of a guest as its monitor has it mapped: counted in the monitor's page tables, not by any pager."""

    def __init__(self, pid, mib):
        self.pid = pid
        for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if end - start == mib * MIB and line.split()[1] in ("rw-p", "rw-s"):
                self.first, self.pages = start // PAGE, (end - start) // PAGE
                return
        raise AssertionError(f"process {pid} has no mapping of {mib} MiB to write to")

    def resident(self):
        """Pages that are there, the kernel's page of zeros included."""
        with open(f"/proc/{self.pid}/pagemap", "rb") as pagemap:
            pagemap.seek(self.first * 8)
            entries = pagemap.read(self.pages * 8)
        return sum(1 for (entry,) in struct.iter_unpack("<Q", entries) if entry >> 63)

    def occupied(self):
        """Of those, the ones that take memory, and pages of anonymous memory that the monitor has besides."""
        guests, others, is_guests = 0, 0, False
        for line in pathlib.Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            word, *rest = line.split()
            if "-" in word and not word.endswith(":"):
                is_guests = int(word.split("-")[0], 16) == self.first * PAGE
            elif word == "Anonymous:":
                pages = int(rest[0]) * 1024 // PAGE
                guests, others = (guests + pages, others) if is_guests else (guests, others + pages)
        return guests, others


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
        self.lines = []

    def expect(self, pattern, timeout=60):
        """Reads until a whole line matches, and returns the match."""
        deadline = time.monotonic() + timeout
        while True:
            while "\n" in self.seen:
                line, self.seen = self.seen.split("\n", 1)
                self.lines.append(line.strip())
                if match := re.fullmatch(pattern, line.strip()):
                    return match
                assert "wrong=" not in line or "wrong=0" in line, line
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, left))
            assert ready, f"the guest did not say {pattern!r} within {timeout} s; last: {self.seen!r}"
            text = os.read(self.process.stdout.fileno(), 4096).decode(errors="replace")
            assert text, f"the console closed before {pattern!r}; last: {self.lines[-3:]}; stderr: {self.process.stderr.read()}"
            self.seen += text

    def say(self, line):
        """Types a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def complaints(self):
        """What the guest's kernel has complained of."""
        return [line for line in self.lines if any(each in line for each in COMPLAINTS)]

    def filled(self, timeout=60):
        """Waits for the guest to have filled and checked its memory; returns the checksum."""
        return self.expect(r"round \d+ filled (\w+) wrong=0", timeout)[1]

    def verified(self, timeout=60):
        """Lets the guest check its memory again; returns the checksum."""
        self.say("go")
        return self.expect(r"round \d+ verified (\w+) wrong=0", timeout)[1]

    def query(self, seconds):
        """Has the guest look pages up for so long."""
        self.say(f"query {seconds * 1000:.0f}")

    def queried(self, timeout=60):
        """How many it has looked up."""
        return int(self.expect(r"round \d+ queried (\d+) wrong=0", timeout)[1])

    def stop(self):
        """Lets `fill` end: its memory is free again, and the next one begins if there is one."""
        self.say("stop")
        self.expect(r"fill ended with status 0")

    def power_off(self):
        """The same, where it is the last and the guest ends with it."""
        self.stop()
