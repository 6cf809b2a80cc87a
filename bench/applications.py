"""Applications that people know, as bench/apps compares them: each has one figure that is its run time."""

import contextlib
import importlib
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import types
from typing import Callable, NamedTuple

from modes import Failure, running
from workloads import HERE, LIMIT_SECONDS, program

MIB = 1 << 20
LEAST_MIB = 8


class Application(NamedTuple):
    """How it is run, and which figure is its run time."""

    group: str
    name: str
    run: Callable
    time: str
    needs: str | None = None


def starts(*command):
    """A program that ends by itself. `@` stands for the directory of what was compiled."""
    told = lambda tools: [tools / word[1:] if str(word).startswith("@") else word for word in command]
    return lambda started, tools: program(started, told(tools), tools)


def cache(kind, server, keys, requests):
    """A server that has its memory where it is told to; its client, unmanaged, has a CPU of its own if there are two: a request that
    stays on one takes a third of the time of one that goes to another, and chance would decide which."""
    *others, last = sorted(os.sched_getaffinity(0))

    def run(started, tools):
        path = tools / "cache.sock"
        path.unlink(missing_ok=True)
        command = [str(word).replace("@", str(tools)) for word in server]
        if others:
            command = ["taskset", "-c", ",".join(map(str, others)), *command]
        with running(started(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 20
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failure(f"{kind} did not start, status {process.returncode}")
                time.sleep(0.02)
            words = [*(["taskset", "-c", last] if others else []), sys.executable, HERE / "wiki.py", kind, path, keys, requests]
            done = subprocess.run([*map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS)
            if not done.stdout.startswith("{"):
                raise Failure(f"{kind}: status {process.poll()}: {done.stderr[-300:]}")
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        return json.loads(done.stdout)

    return run


def guests():
    """What runs guests, which is beside the tests."""
    beside = str(HERE.parent / "tests/e2e")
    if beside not in sys.path:
        sys.path.append(beside)
    return importlib.import_module("guests")


def python_packages():
    """Where scripts/setup-tests puts what Python programs here need."""
    return guests().cache() / "python"


def has_duckdb():
    """Whether this interpreter finds DuckDB, there or elsewhere."""
    looking = [sys.executable, "-c", "import sys; sys.path += sys.argv[1:]; import duckdb", python_packages()]
    return subprocess.run(looking, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def guest(mib, fill, rounds):
    """A guest of QEMU's software emulation that fills its memory, then checks every word and writes a seventh anew, so many times."""

    def run(started, tools):
        archive = tools / "image/initramfs"
        if not archive.exists():
            shutil.rmtree(archive.parent, ignore_errors=True)
            archive.parent.mkdir()
            guests().Image(archive.parent)
        command = guests().command(types.SimpleNamespace(archive=archive), mib, fill)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        began = time.monotonic()
        with running(started([str(word) for word in command]), **pipes) as process:
            console = guests().Console(types.SimpleNamespace(process=process))
            try:
                sums = [console.filled(LIMIT_SECONDS)]
                filled = time.monotonic()
                sums += [console.verified(LIMIT_SECONDS) for _ in range(rounds)]
                verified_s = time.monotonic() - filled
                console.power_off()
                process.wait(20)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as failure:
                raise Failure(f"the guest, status {process.poll()}: {failure}") from failure
        return {"verify_s": verified_s, "total_s": time.monotonic() - began, "check": " ".join(sums)}

    return run


def applications(tiny):
    """All of them; tiny ones test the comparison itself and say nothing."""
    orders, ratings, scale, text, sort_mib = (200_000, 400_000, 18, 24, 24) if tiny else (1_000_000, 2_000_000, 20, 64, 128)
    rows, queries, keys, requests = (20_000, 2_000, 4_000, 4_000) if tiny else (150_000, 40_000, 16_000, 30_000)
    python = sys.executable
    memory = "64" if tiny else "256"
    mib, fill, rounds = (128, 40, 2) if tiny else (192, 120, 20)
    # These are looked for as programs are, and told to be missing as such.
    database = None if has_duckdb() else "DuckDB for Python (scripts/setup-tests fetches it)"
    emulator = "qemu-system-x86_64" if guests().kernel() and shutil.which("busybox") else "what guests run (scripts/setup-tests fetches it)"
    redis = ["redis-server", "--port", "0", "--unixsocket", "@/cache.sock", "--save", "", "--dir", "@"]
    memcached = ["memcached", "-u", "root", "-s", "@/cache.sock", "-t", "1", "-M", "-m", memory]
    return [
        Application("sort", "quicksort", starts("@sort", sort_mib), "sort_s"),
        Application("graph", "graph kernel (BFS, PageRank)", starts("@graph", scale, 4), "kernel_s"),
        Application("sqlite", "SQLite, in memory", starts(python, HERE / "tables.py", rows, queries), "query_s"),
        Application("analytics", "analytics in Python", starts(python, HERE / "analytics.py", orders), "query_s"),
        Application("duckdb", "analytics in DuckDB", starts(python, HERE / "ratings.py", ratings, python_packages()), "query_s", database),
        Application("zlib", "compression (zlib)", starts(python, HERE / "pack.py", text), "pack_s"),
        Application("redis", "Redis, wiki trace", cache("redis", redis, keys, requests), "requests_s", "redis-server"),
        Application("memcached", "memcached, wiki trace", cache("memcached", memcached, keys, requests), "requests_s", "memcached"),
        Application("guest", "a guest of QEMU (TCG)", guest(mib, fill, rounds), "verify_s", emulator),
    ]


def chosen(only, tiny):
    """Those that are asked for, or all; and what is to be said of those that cannot run here."""
    every = applications(tiny)
    if unknown := set(only or []) - {app.group for app in every}:
        script = pathlib.Path(sys.argv[0]).name
        sys.exit(f"{script}: no such application: {', '.join(sorted(unknown))}; there are {', '.join(app.group for app in every)}")
    asked = [app for app in every if not only or app.group in only]
    is_missing = lambda app: app.needs and not shutil.which(app.needs)
    return [app for app in asked if not is_missing(app)], [f"Not run: {app.name}: {app.needs} is not installed." for app in asked if is_missing(app)]


def compile_into(tools):
    """What they need that is compiled."""
    for source in ("sort", "graph"):
        subprocess.run(["cc", "-O2", "-o", tools / source, HERE / f"{source}.c", "-lm"], check=True)


def footprint_mib(app, spillway, tools):
    """The most managed memory that it has by itself."""
    stats = tools / "stats.json"
    under = [spillway, "run", "-q", "--local", "all", "--stats", str(stats), "--"]
    app.run(lambda command: {"args": [*under, *map(str, command)]}, tools)
    return counted(app, stats)["local_peak_bytes"] / MIB


def counted(app, stats):
    """What the pager counted in the run that has just ended: of all of it."""
    if not stats.exists():
        raise Failure(f"{app.name}: no counters")
    told = json.loads(stats.read_text())
    stats.unlink()
    return told


def share_mib(footprint, percent):
    """So much of a footprint, in whole MiB."""
    return max(LEAST_MIB, math.ceil(footprint * percent / 100))


def losses(one, *keys):
    """Under each of these, time by the native time of the same round, less 1: all rounds that it ended in everywhere."""
    rounds = zip(one["runs"]["native"], *(one["runs"].get(key, []) for key in keys))
    return [tuple(run[one["time"]] / native[one["time"]] - 1 for run in runs) for native, *runs in rounds if native and all(runs)]


def excess(one, key):
    """The same under one of them."""
    return [loss for (loss,) in losses(one, key)]


def beside_zram(one, share):
    """Excess under Spillway and under zram, of each round that ended well in both."""
    return losses(one, f"spillway {share}", f"zram {share}")


def ratios(pairs):
    """Excess by zram's, of each round: where nothing is lost under zram, nothing is to be lost here."""
    return [ours / theirs if theirs > 0 else math.inf if ours > 0 else 0.0 for ours, theirs in pairs]


def comparable(measured, share):
    """`beside_zram` of each application that ended well in both in more than half of the rounds."""
    both = [(beside_zram(one, share), len(one["runs"]["native"])) for one in measured.values()]
    return [pairs for pairs, rounds in both if 2 * len(pairs) > rounds]


def cell(values, rounds=0):
    """A median with the least and the most; of how many rounds, where it is not of all."""
    few = f", {len(values)} of {rounds} rounds" if len(values) < rounds else ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f}{few})" if values else "-"


def wrong_results(measured):
    """How many things programs found wrong, and how many programs came to another result than elsewhere, of {name: {"runs": {mode: ...}}}."""
    wrong = 0
    for one in measured.values():
        done = [run for runs in one["runs"].values() for run in runs if run]
        wrong += sum(run.get("wrong", 0) for run in done) + len({run.get("check") for run in done}) - 1
    return wrong
