"""A stock kernel as a guest of QEMU's software emulation: its memory leaves and returns, and the guest never notices.

The guest's only program, tests/programs/guest/fill.c, checks every word of 160 MiB that it filled.
"""

import hashlib
import signal
import subprocess
import time

import guests
import pytest
from guests import Console, Monitor
from harness import MIB, anonymous_bytes, assert_kernel_sees, assert_paged, eventually
from lacking import give_up

GUEST_MIB, FILLED_MIB = 256, 160


@pytest.fixture(scope="module")
def guest_with(tools, tmp_path_factory):
    """`guest_with(MiB to fill, argument…, drivers=names)` gives the QEMU command of a guest."""
    image = guests.Image(tmp_path_factory.mktemp("guest"))
    return lambda fill, *arguments, drivers=(): guests.command(image, GUEST_MIB, fill, *arguments, drivers=drivers)


@pytest.fixture(scope="module")
def guest(guest_with):
    """The command of one that fills once."""
    return guest_with(FILLED_MIB)


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


@pytest.fixture
def cable(need):
    """A tap device for a guest; skipped where none may be made."""
    need("ip", "dropbear", "dropbearkey", "dbclient")
    made = guests.Cable()
    try:
        try:
            made.make()
        except OSError as refusal:
            give_up(f"no tap device in a network namespace here: {refusal}")
        yield made
    finally:
        made.remove()


@pytest.mark.limit(120)
def test_a_guest_of_a_few_pages_answers_and_recovers(native, spillway, tools, cable, tmp_path):
    """Its own memory alone shrinks: to 80 pages, where it answers pings; to 1, where it is alive; and it is let into afterwards."""
    if not guests.drivers():
        give_up("no drivers for the guest: scripts/setup-tests fetches them")
    image, mib = guests.Image(tmp_path, ssh=True), 128
    where = {"drivers": guests.NETWORK_DRIVERS, "address": cable.GUESTS, "before": cable.within(0)}
    running = native.start(guests.command(image, mib, 8, *cable.device(), **where), stdin=subprocess.PIPE)
    console = Console(running)
    first = console.filled(90)
    memory = guests.Memory(running.pid, mib)
    _, own = memory.occupied()
    pager = spillway.attach(running.pid, "64M", "--least-mapping", f"{mib}M")
    for pages in (80, 1):
        spillway.resize(running.pid, f"{pages * 4}K")

        def shrunk(pages=pages):
            now = spillway.find(running.pid)
            return now["budget_bytes"] == pages * 4096 and now["local_bytes"] <= pages * 4096 and memory.resident() <= pages

        eventually(shrunk, f"the guest to have {pages} pages", 30)
        if pages == 80:
            assert cable.pings(5), "no answer to any ping"
            # One look is not of one moment.
            assert min(memory.resident() for _ in range(5)) <= pages
    # The next pager manages no more than that either.
    pager.process.kill()
    assert pager.finish(timeout=10).status == -signal.SIGKILL
    pager = spillway.attach(running.pid, "64K")
    # What is QEMU's own is left alone.
    assert memory.occupied()[1] >= own * 9 // 10
    done = spillway.cli("resize", running.pid, "4095")
    assert done.returncode == 2 and "at least 4.0 KiB" in done.stderr, done.stderr
    time.sleep(2)
    spillway.resize(running.pid, "64M")
    proof, _ = cable.login(image, "sha256sum /bin/busybox", 60)
    assert proof.split()[0] == hashlib.sha256((image.root / "bin/busybox").read_bytes()).hexdigest()
    assert console.verified() == first
    spillway.detach(running.pid)
    assert pager.finish(timeout=10).status == 0
    console.filled()
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
    if not guests.drivers():
        give_up("no drivers for the guest: scripts/setup-tests fetches them")
    qmp, budget = tmp_path / "qmp", 64 * MIB
    device = "virtio-balloon-pci,id=balloon" + (",free-page-reporting=on" if how == "reported" else "")
    command = guest_with("160,8", "-device", device, "-qmp", f"unix:{qmp},server=on,wait=off", drivers=guests.BALLOON_DRIVERS)
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
