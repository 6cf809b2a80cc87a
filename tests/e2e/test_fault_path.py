"""What the thread that serves faults must not do, as the kernel's probes see it; and where its code lies."""

import contextlib
import fnmatch
import os
import re
import subprocess

import harness
import pytest
from mechanics import Program, threads

pytestmark = pytest.mark.alone

# For how long they are counted.
SECONDS = 1.5
ALLOCATORS = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")


@contextlib.contextmanager
def probes(perf, library, group):
    """Events for each call of the C library's allocators, removed afterwards."""
    try:
        for name in ALLOCATORS:
            words = [perf, "probe", "-q", "-x", library, "--add", f"{group}:{name}={name}"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
            if done.returncode:
                pytest.skip(f"this kernel takes no probes: {done.stderr.strip()}")
        yield [f"{group}:{name}" for name in ALLOCATORS]
    finally:
        subprocess.run([perf, "probe", "-q", "--del", f"{group}:*"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)


@pytest.mark.parametrize("pool", ["local:", "tcp"])
def test_faults_are_served_without_an_allocation(processes, spillway, servers, build, need, pool):
    """Of a pool in this process or at a server: a fault that waits for the allocator waits for whoever holds its lock."""
    (perf,) = need("perf")
    url = f"tcp://{servers.spillway().address}" if pool == "tcp" else pool
    target = Program(processes, [build("fill"), 96], spillway, "32M", ["--pool", url]).ready()
    pager = spillway.settled(target.pid)["pager_pid"]
    library = next(words[-1] for line in open(f"/proc/{pager}/maps") if (words := line.split())[-1].endswith("/libc.so.6"))
    (thread,) = [thread for thread, name in threads(pager) if name == "faults"]
    with probes(perf, library, f"spillway{os.getpid()}") as events:
        # What it needs once it has by then.
        target.ask("churn 500")
        target.tell("churn 2500")
        before = spillway.find(target.pid)["faults"]
        counting = [perf, "stat", "-x", ",", *(word for event in events for word in ("-e", event)), "-t", str(thread), "--", "sleep", str(SECONDS)]
        counted = subprocess.run(counting, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
        faults = spillway.find(target.pid)["faults"] - before
        assert target.line() == "OK"
    calls = [int(said) for said in re.findall(r"^(\d+),,spillway", counted.stderr, re.M)]
    assert counted.returncode == 0 and len(calls) == len(ALLOCATORS), counted.stderr
    # Ten times a second at most it looks which threads the pager has, which takes some twenty calls.
    most = SECONDS * 10 * 30 + faults / 1000
    assert faults > 5000 and sum(calls) < most, f"{dict(zip(ALLOCATORS, calls, strict=True))} calls in {faults} faults"


def test_code_that_a_fault_touches_lies_together(spillway, need):
    """In a section of its own, all of what the linker script names; a function that is named otherwise now would be missed."""
    (nm, readelf) = need("nm", "readelf")
    script = (harness.REPOSITORY / "crates/cli/fault-path.ld").read_text()
    patterns = [pattern.removeprefix("*(.text.").removesuffix(")") for pattern in re.findall(r"^ +(\*\(.*\))$", script, re.M)]
    assert len(patterns) > 50
    sections = subprocess.run([readelf, "-SW", spillway.path], capture_output=True, text=True, check=True).stdout
    found = re.search(r" \.text\.fault_path +PROGBITS +(\S+) \S+ (\S+)", sections)
    assert found, "it was linked without the script: see crates/cli/build.rs"
    start, size = found.groups()
    section = range(int(start, 16), int(start, 16) + int(size, 16))
    assert len(section) < 384 << 10, "it is meant to be little"
    symbols = subprocess.run([nm, "--defined-only", spillway.path], capture_output=True, text=True, check=True).stdout
    functions = {name: int(at, 16) for at, kind, name in map(str.split, symbols.splitlines()) if kind in "tTwW"}
    for pattern in patterns:
        named = fnmatch.filter(functions, pattern)
        assert named, f"{pattern} names no function any more: `bench/profile --functions` tells which ones a fault calls"
        away = [name for name in named if functions[name] not in section]
        assert not away, f"{pattern} has been left elsewhere: {away}"
