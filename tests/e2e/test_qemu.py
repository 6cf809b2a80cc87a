"""A stock kernel as a guest of QEMU's software emulation: its memory leaves and returns, and the guest never notices.

The guest's only program, tests/programs/guest/fill.c, checks every word of 160 MiB that it filled.
"""

import os
import pathlib
import re
import select
import shutil
import subprocess
import time

import pytest
from harness import MIB, anonymous_bytes, assert_kernel_sees, assert_paged

GUEST_MIB, FILLED_MIB = 256, 160


def guest_kernel():
    """The image that scripts/setup-tests fetched, or that SPILLWAY_GUEST_KERNEL names."""
    if named := os.environ.get("SPILLWAY_GUEST_KERNEL"):
        return pathlib.Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(os.environ.get("SPILLWAY_TEST_CACHE") or pathlib.Path(home) / "spillway-tests")
    return next(iter(sorted(cache.glob("guest-kernel/boot/vmlinuz-*"))), None)


@pytest.fixture(scope="module")
def guest(need, programs, tmp_path_factory):
    """The QEMU command of a guest that runs `fill` on its serial console, which is standard input and output."""
    kernel = guest_kernel()
    if not kernel or not kernel.exists():
        give_up = pytest.fail if os.environ.get("SPILLWAY_TESTS_STRICT") == "1" else pytest.skip
        give_up("no guest kernel: scripts/setup-tests fetches one")
    qemu, busybox, _cc = need("qemu-system-x86_64", "busybox", "cc")
    root = tmp_path_factory.mktemp("guest")
    for directory in ("bin", "proc", "dev"):
        (root / directory).mkdir()
    shutil.copy(busybox, root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    shutil.copy(programs / "guest/init", root / "init")
    compile_fill = ["cc", "-O2", "-static", "-Wall", "-Wextra", "-o", root / "bin/fill", programs / "guest/fill.c"]
    subprocess.run(compile_fill, check=True, timeout=60)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    archive = root.parent / "initramfs"
    with open(archive, "wb") as out:
        subprocess.run([busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), stdout=out, stderr=subprocess.DEVNULL, cwd=root, check=True)
    machine = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]
    emulation = ["-accel", "tcg,tb-size=8", "-m", GUEST_MIB, "-kernel", kernel, "-initrd", archive]
    return [qemu, *machine, *emulation, "-append", f"console=ttyS0 quiet panic=-1 fill={FILLED_MIB}"]


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

    def power_off(self):
        """Lets the guest end."""
        self.say("stop")
        self.expect(r"fill ended with status 0")


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
