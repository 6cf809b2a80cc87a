"""The programs under comparison, at full size or tiny, and the goals for them."""

import contextlib
import csv
import json
import pathlib
import random
import socket
import subprocess
import sys
import time
from typing import Callable, NamedTuple

from modes import Failure, running
from wanted import BY_ZRAM, FITS

HERE = pathlib.Path(__file__).resolve().parent
# Longest time for one program, before it counts as hung.
LIMIT_SECONDS = 180
# So often a program is run at most that may be over, on a busy machine, before the pager has found it.
ATTEMPTS = 5


class Workload(NamedTuple):
    """A program, the budget it is given, and what is told of it: of each figure less is better but for `gets_per_s`."""

    group: str
    name: str
    local_mib: int
    run: Callable
    figures: dict  # figure: (the mode it is compared with, the largest ratio that is good enough) or None


def program(started, command, directory):
    """Runs a program that prints one JSON object; its figures, and `total_s` from start to end."""
    began = time.monotonic()
    with open(directory / "stderr", "w+") as errors:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with running(started([*map(str, command)]), **pipes) as process:
            out, _ = process.communicate(timeout=LIMIT_SECONDS)
        errors.seek(0)
        text = errors.read()
    total_s = time.monotonic() - began
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        raise Failure(f"{command[0]}: no result, exit status {process.returncode}: {text[-500:]}")
    return json.loads(lines[-1]) | {"total_s": total_s}


def touch(order, mib, accesses, writes=10):
    """A workload that runs bench/touch.c."""
    return lambda started, tools: program(started, [tools / "touch", mib, order, accesses, writes], tools)


def python(records, lookups):
    """A workload that runs bench/objects.py."""
    return lambda started, tools: program(started, [sys.executable, HERE / "objects.py", records, lookups], tools)


def redis(keys, gets):
    """A workload that fills a server with values of 2 kB and reads random keys with redis-benchmark, four connections."""
    return lambda started, tools: serve(started, tools, keys, gets)


def serve(started, tools, keys, gets):
    fill = tools / "redis.fill"
    if not fill.exists():
        write_redis_fill(fill, keys)
    with redis_server(started, tools, fill) as path:
        load = ["redis-benchmark", "-s", path, "-t", "get", "-n", str(gets), "-r", str(keys), "-c", "4", "--csv"]
        done = subprocess.run(load, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode != 0:
            raise Failure(f"redis-benchmark: status {done.returncode}: {done.stderr[-500:]}")
        row = list(csv.DictReader(done.stdout.splitlines()))[-1]
    return {"gets_per_s": float(row["rps"]), "p50_us": 1000 * float(row["p50_latency_ms"]), "p99_us": 1000 * float(row["p99_latency_ms"])}


@contextlib.contextmanager
def redis_server(started, tools, fill):
    """A server that holds what `fill` says, as the path of its socket; it is shut down, and must have lived until then."""
    path = tools / "redis.sock"
    path.unlink(missing_ok=True)
    server = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tools)]
    with running(started(server), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"redis-server did not start, status {process.returncode}")
            time.sleep(0.02)
        subprocess.run(["redis-cli", "-s", path, "--pipe"], stdin=open(fill), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        yield path
        if process.poll() is not None:
            raise Failure(f"redis-server ended, status {process.returncode}")
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(path))
            stream.sendall(b"SHUTDOWN NOSAVE\r\n")
            stream.recv(100)
        process.wait(20)


def write_redis_fill(path, keys):
    """The commands that fill the server, values half noise and half text, keys as redis-benchmark names them."""
    dice = random.Random(5)
    with open(path, "wb") as out:
        for i in range(keys):
            body = dice.randbytes(1000) + (b"value %d " % i * 128)[:1000]
            out.write(b"*3\r\n$3\r\nSET\r\n$16\r\nkey:%012d\r\n$%d\r\n%s\r\n" % (i, len(body), body))



def endless_walk(binary, mib, order, seconds, threads=1):
    """The words for `spillway bench-walk` to touch so much memory for so long."""
    words = [binary, "bench-walk", "--size", f"{mib}M", "--order", order, "--accesses", "1000000000"]
    return [*map(str, [*words, "--seconds", seconds, "--threads", threads])]


def workloads(tiny):
    """All of them; tiny ones test the comparison itself and say nothing."""
    mib, accesses, records, lookups = (24, 20_000, 20_000, 20_000) if tiny else (512, 200_000, 400_000, 1_000_000)
    # Programs that fit run for some seconds, so that starting a pager (10 ms) does not count, and fill more than half of
    # the budget: below that nothing is managed and there is nothing to measure.
    fit_mib, fit_accesses, fit_lookups = (8, 100_000, 10_000) if tiny else (128, 20_000_000, 2_500_000)
    keys, gets, redis_mib = (10_000, 2_000, 16) if tiny else (100_000, 150_000, 105)
    whole = {"total_s": ("native", FITS.value)}
    by_zram = lambda figure, case="uniform": ("zram", BY_ZRAM[case][figure].value)
    return [
        Workload("fits", f"touch {fit_mib} of {fit_mib + 32} MiB", fit_mib + 32, touch("uniform", fit_mib, fit_accesses), whole),
        Workload("fits", "python within 128 MiB", 128, python(records // 4, fit_lookups), whole),
        Workload(
            "touch",
            f"touch {mib} MiB, uniform",
            mib // 2,
            touch("uniform", mib, accesses),
            {"populate_us": by_zram("populate_us_per_page"), "mean_us": by_zram("mean_us"), "p50_us": None, "p99_us": by_zram("p99_us")},
        ),
        Workload("touch", f"touch {mib} MiB, zipf", mib // 2, touch("zipf", mib, accesses), {"mean_us": by_zram("mean_us", "zipf"), "p99_us": None}),
        Workload(
            "touch",
            f"touch {mib} MiB, scan",
            mib // 2,
            touch("seq", mib, 4 * mib * 256),
            {"mean_us": by_zram("scan_us_per_page"), "p99_us": None},
        ),
        Workload("python", f"python, {records} records", records * 175 // 400_000, python(records, lookups), {"lookups_s": None, "total_s": None}),
        Workload("redis", f"redis, {keys} keys, GET", redis_mib, redis(keys, gets), {"gets_per_s": None, "p50_us": None, "p99_us": None}),
    ]
