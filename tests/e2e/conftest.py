"""Fixtures of the end-to-end tests. `harness.py` holds what they hand out."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess

import guests
import harness
import pytest
import servers as keepers
from lacking import give_up

# No test may hang a run: 90 s unless it says otherwise with @pytest.mark.limit(seconds).
LIMIT_SECONDS = 90


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: it judges time or looks at the whole machine, and nothing runs beside it")
    config.addinivalue_line("markers", "limit(seconds): how long the test may take")


def pytest_collection_modifyitems(items):
    if os.geteuid() != 0:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs root: pages of other processes are moved"))


@pytest.fixture(autouse=True)
def time_limit(request):
    """Fails the test when its time is over, wherever it waits."""
    mark = request.node.get_closest_marker("limit")
    seconds = mark.args[0] if mark else LIMIT_SECONDS

    def over(_signal, _frame):
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def processes(time_limit):
    """Starts processes; those left at the end of the test are killed."""
    started = harness.Processes()
    yield started
    signal.alarm(0)
    started.end()


@pytest.fixture
def native(processes):
    """Runs programs without spillway."""
    return harness.Native(processes)


@pytest.fixture
def spillway(processes, tmp_path):
    """Runs programs under the binary named by SPILLWAY, else the release build."""
    path = pathlib.Path(os.environ.get("SPILLWAY", harness.REPOSITORY / "target/release/spillway"))
    if not path.exists():
        pytest.fail(f"{path} does not exist: run `make build`, or set SPILLWAY")
    return harness.Spillway(path, processes, tmp_path)


@pytest.fixture
def settled(spillway):
    """`settled(pid)` waits until `spillway ps` shows a target within its budget."""
    return spillway.settled


@pytest.fixture
def port():
    """`port()` gives a TCP port on loopback that is free now."""
    return harness.free_port


@pytest.fixture(scope="session")
def need():
    """`need("tool", …)` gives the tools' paths; a missing one skips the test, or fails it under SPILLWAY_TESTS_STRICT=1."""

    def paths(*tools):
        found = {tool: shutil.which(tool) or shutil.which(tool, path=guests.cache() / "valkey/usr/bin") for tool in tools}
        missing = [tool for tool, path in found.items() if not path]
        if missing:
            give_up(f"{', '.join(missing)} not found: scripts/setup-tests installs what the tests need")
        return list(found.values())

    return paths


@pytest.fixture(scope="session")
def tools(need):
    """What every guest takes."""
    kernel = guests.kernel()
    if not kernel or not kernel.exists():
        give_up("no guest kernel: scripts/setup-tests fetches one")
    need("qemu-system-x86_64", "busybox", "cc")


@pytest.fixture
def servers(processes, spillway, need, tmp_path):
    """Starts servers that keep pages; `processes` ends them."""
    return keepers.Servers(processes, spillway.path, need, tmp_path)


@pytest.fixture
def network(need):
    """Two network namespaces with a cable between them; skipped where none may be made."""
    need("ip")
    made = keepers.Network()
    try:
        try:
            made.make()
        except OSError as refusal:
            pytest.skip(f"no network namespaces here: {refusal}")
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="session")
def programs():
    """The sources of the programs that the tests run."""
    return harness.REPOSITORY / "tests/programs"


@pytest.fixture(scope="session")
def build(programs, tmp_path_factory):
    """`build("name", *flags)` compiles tests/programs/name.c, once a session, and gives the path of the program."""
    directory = tmp_path_factory.mktemp("build")
    done = {}

    def compile_one(name, *flags):
        key = (name, *flags)
        if key not in done:
            program = directory / "-".join([name, *(flag.strip("-=").replace("/", "_") for flag in flags)])
            command = ["cc", "-O2", "-g", "-Wall", "-Wextra", "-pthread", "-o", program, programs / f"{name}.c", *flags, "-lm"]
            compiled = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
            assert compiled.returncode == 0, compiled.stderr
            done[key] = program
        return done[key]

    return compile_one


@pytest.fixture
def daemonise(build):
    """A program that becomes a daemon; those left at the end of the test are killed."""
    program = build("daemonise")
    yield program
    for pid in harness.those_who_run(program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
