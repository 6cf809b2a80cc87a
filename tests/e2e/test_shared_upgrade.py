"""Memory that several processes have mapped is handed over to another pager."""

import time

import pytest
from harness import eventually
from test_shared import SHARED, native_family, seed, sharers  # noqa: F401
from test_takeover import PAUSE_MILLISECONDS, begin, milliseconds, nothing_of_ours

pytestmark = pytest.mark.alone


def test_upgrade_while_it_works(processes, spillway, native_family):
    whole = native_family("memfd", 64, 3, 6, seed())
    whole.local = 16
    pager, _ = begin(processes, spillway, whole.pid, "--local", "16M", SHARED)
    eventually(whole.is_within_budget, "most of it to leave")
    whole.program.tell("go")
    pauses = []
    for _ in range(5):
        time.sleep(0.5)
        old, (pager, line) = pager, begin(processes, spillway, whole.pid, verb="upgrade")
        assert old.wait(10) == 0
        pauses.append(milliseconds(line))
    print(f"upgrades took {pauses} ms")
    assert min(pauses) < PAUSE_MILLISECONDS, pauses
    whole.program.answer("go", 60)
    spillway.detach(whole.pid)
    assert pager.wait(20) == 0
    nothing_of_ours(whole.pid)
    whole.end()
