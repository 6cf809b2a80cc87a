"""The real programs once more, with their memory across a network or in a file: under half of what they use they say what they say natively.

Each over one pool, in turn; with SPILLWAY_TESTS_POOLS=all over each of them, which takes ten minutes.
"""

import os

import pytest
import servers as keepers
from harness import Spillway
from test_pools import KINDS
from test_programs import (  # noqa: F401 they are run here as well
    test_cpython,
    test_cpython_attached_while_running,
    test_jvm,
    test_memcached,
    test_node,
    test_redis_saves_in_the_background_while_its_memory_is_elsewhere,
    test_sqlite,
    test_static_go,
    test_stress_ng_verifies_its_memory,
)
from test_qemu import guest, guest_with, test_guest_adopted_while_it_runs_and_shrunk_hard, test_guest_under_half_its_memory  # noqa: F401


POOLS = ["tcp", "memcached", "redis", "file"]
TESTS = [name for name in list(globals()) if name.startswith("test_")]


def pytest_generate_tests(metafunc):
    if os.environ.get("SPILLWAY_TESTS_POOLS") == "all":
        pools = POOLS
    else:
        pools = [POOLS[TESTS.index(metafunc.function.__name__) % len(POOLS)]]
    metafunc.parametrize("spillway", pools, indirect=True)


@pytest.fixture
def spillway(request, spillway, processes, need, tmp_path):
    servers = keepers.Servers(processes, spillway.path, need, tmp_path)
    return Spillway(spillway.path, processes, tmp_path, KINDS[request.param](servers, tmp_path))
