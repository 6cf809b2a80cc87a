"""A guest under KVM: the pages that the kernel maps for it leave and return like those of any program, and it never notices.

The monitor is tests/programs/flat.c, whose guest checks every word of its memory. KVM has page tables of its own for a guest:
what leaves must leave those as well, and what the guest touches is fetched for the kernel.
"""

import re
import subprocess
import time

import pytest
from guests import Memory
from harness import MIB, assert_kernel_sees, eventually
from mechanics import Program, let_go, rollup, squeeze, traits
from test_takeover import begin, end, nothing_of_ours

GUEST_MIB = 64


@pytest.fixture(scope="module")
def flat(build):
    """The monitor; skipped with the reason where KVM cannot run its guest, or only by emulation."""
    program = build("flat")
    probed = subprocess.run([program, "--probe"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    if probed.returncode:
        said = probed.stdout.splitlines() or [f"status {probed.returncode}"]
        why = said[-1].removeprefix("BAD ")
        pytest.skip(f"no guest runs under KVM here: {why}")
    return program


@pytest.fixture
def guest(processes, flat):
    """One that has filled its memory, without Spillway."""
    return Program(processes, [flat, GUEST_MIB]).ready()


def worked(guest):
    """How many chunks of its memory the guest has checked, written, or both."""
    (said,) = guest.ask("worked")
    return int(said.removeprefix("worked "))


def works(guest, chunks=200):
    """That it goes on working."""
    before = worked(guest)
    eventually(lambda: worked(guest) >= before + chunks, f"the guest to work on {chunks} chunks more", 30)


@pytest.mark.parametrize("waits", ["halted", "deaf"])
def test_a_guest_with_half_of_its_size(processes, spillway, flat, waits):
    """A guest that takes interrupts is halted while a thread of the kernel waits for its page; else its own virtual CPU waits."""
    budget = GUEST_MIB // 2 * MIB
    guest = Program(processes, [flat, GUEST_MIB, waits], spillway, budget).ready()
    # It fills its memory faster than a pager finds it (README.md, what a burst can do).
    eventually(lambda: spillway.find(guest.pid)["evicted_pages"] > 1000, "the pager to have found it")
    guest.ask("work")
    works(guest, 2000)
    guest.unharmed()
    guest.ask("rest")
    stats = spillway.settled(guest.pid)
    assert stats["fetched_pages"] > 1000 and stats["evicted_pages"] > 1000 and stats["faults"] > 1000, stats
    assert_kernel_sees(rollup(guest.pid), budget)
    guest.unharmed()
    guest.tell("exit 7")
    assert guest.status() == 7


def test_a_guest_at_work_is_adopted_shrunk_grown_and_let_go(spillway, guest):
    before = traits(guest.pid)
    guest.ask("work")
    attached = spillway.attach(guest.pid, "50%")
    works(guest)
    squeeze(spillway, guest.pid)
    works(guest)
    assert_kernel_sees(rollup(guest.pid), 4 * MIB)
    guest.unharmed()
    spillway.resize(guest.pid, "all")
    works(guest, 2000)
    squeeze(spillway, guest.pid, "16M")
    let_go(attached)
    works(guest)
    guest.ask("rest")
    guest.unharmed()
    assert traits(guest.pid) == before


def test_a_guest_of_a_few_pages_works_on(spillway, guest):
    """Three page tables, a page of code and one of data: so many it needs at a time. With fewer it stands still, and goes on later."""
    memory = Memory(guest.pid, GUEST_MIB)
    attached = spillway.attach(guest.pid, "8M", "--least-mapping", f"{GUEST_MIB}M")
    guest.ask("work")
    for pages in (64, 5, 1):
        spillway.resize(guest.pid, f"{pages * 4}K")
        eventually(lambda pages=pages: memory.resident() <= pages, f"no more than {pages} pages to be resident")
        if pages > 1:
            works(guest, 20)
    time.sleep(0.3)
    spillway.resize(guest.pid, "all")
    works(guest)
    guest.unharmed()
    let_go(attached)
    guest.ask("rest")
    guest.unharmed()


def test_another_pager_takes_over_while_the_guest_works(processes, spillway, guest):
    guest.ask("work")
    pager, _ = begin(processes, spillway, guest.pid, "--local", "8M")
    squeeze(spillway, guest.pid, "8M")
    for verb in ("attach", "attach", "upgrade"):
        if verb == "attach":
            end(pager)
            time.sleep(0.2)
        before, (pager, _) = pager, begin(processes, spillway, guest.pid, verb=verb)
        assert before.wait(5) is not None
        works(guest)
        guest.unharmed()
    guest.ask("rest")
    assert spillway.settled(guest.pid)["budget_bytes"] == 8 * MIB
    guest.unharmed()
    spillway.detach(guest.pid)
    assert pager.wait(10) == 0
    nothing_of_ours(guest.pid)
    guest.unharmed()


def test_what_the_monitor_takes_from_the_guest_is_zeros(spillway, settled, guest):
    """Some while the guest works, wherever it was by then; and at last all of it, which nothing is fetched for."""
    attached = spillway.attach(guest.pid, "16M")
    settled(guest.pid)
    guest.ask("work")
    for _ in range(20):
        guest.ask("drop 50")
        time.sleep(0.02)
    works(guest)
    guest.ask("rest")
    guest.unharmed()
    before = settled(guest.pid)
    guest.ask("zap")
    guest.unharmed()
    after = eventually(lambda: spillway.find(guest.pid), "its figures")
    assert after["fetched_pages"] - before["fetched_pages"] < 256, (before, after)
    assert after["stored_bytes"] < 4 * MIB, after
    guest.ask("work")
    works(guest)
    let_go(attached)
    guest.ask("rest")
    guest.unharmed()


def test_a_guest_is_adopted_while_all_of_the_threads_are_busy(spillway, guest):
    """But for one that KVM has made in the process: it sleeps, and can be stopped, but never makes a system call for anyone."""
    guest.ask("work")
    guest.tell("spin 1500")
    time.sleep(0.1)
    attached = spillway.attach(guest.pid, "16M")
    assert guest.line() == "OK"
    works(guest)
    guest.ask("rest")
    guest.unharmed()
    let_go(attached)
    guest.unharmed()


@pytest.mark.parametrize("page", [9, GUEST_MIB * 256 - 1])
def test_the_guest_would_notice_a_wrong_bit(guest, page):
    """Without which the other tests would say nothing."""
    guest.ask(f"spoil {page}")
    guest.tell("verify")
    said = [guest.line() for _ in range(3)]
    assert said[-1] == "BAD verify" and {re.search("the (guest|monitor)", line)[1] for line in said[:2]} == {"guest", "monitor"}, said
