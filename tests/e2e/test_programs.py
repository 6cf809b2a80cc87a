"""Real programs under half the memory they use: their output is what it is natively, and they did page.

Budgets come from a native run of the same program, measured by the kernel, so that "half" is half.
"""

import hashlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading

import clients
import pytest
from harness import MIB, anonymous_bytes, assert_kernel_sees, assert_paged, eventually, half

# Builds a buffer of noise, text and zeros, then hashes and rewrites it, a line a round, `rounds` times or until SIGTERM.
CPYTHON = """
import hashlib, random, signal, sys
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
mib, rounds = int(sys.argv[1]), int(sys.argv[2])
dice = random.Random(7)
text = b"".join(b"line %d of a text that compresses\\n" % i for i in range(20000))[:1 << 19]
memory = bytearray()
for _ in range(mib):
    memory += dice.randbytes(3 << 17) + text + bytes(1 << 17)
objects = [{"id": i, "name": f"object {i}"} for i in range(mib * 500)]
for round in range(rounds):
    for _ in range(2000):
        at = dice.randrange(len(memory) - 64)
        memory[at:at + 64] = dice.randbytes(64)
    for _ in range(2000):
        objects[dice.randrange(len(objects))]["name"] = str(dice.random())
    digest = hashlib.sha256(memory)
    for each in objects:
        digest.update(each["name"].encode())
    print(round, digest.hexdigest(), flush=True)
    if stop:
        break
print("goodbye")
"""


def cpython(mib, rounds):
    """The command of the CPython program."""
    return [sys.executable, "-c", CPYTHON, mib, rounds]


def compare_with_native(native, spillway, command, **options):
    """Runs a single-process program natively, then with half of what it used, and demands the same output."""
    plain = native.run(command, **options).must_succeed()
    budget = half(plain.anonymous_peak_bytes)
    assert budget >= 64 * MIB, "too small a program to say anything"
    paged = spillway.run(command, budget, **options)
    assert (paged.out, paged.status) == (plain.out, plain.status), paged.err
    assert_paged(paged, budget)


def test_cpython(native, spillway):
    compare_with_native(native, spillway, cpython(160, 6))


def test_lines_after_one_that_was_read_are_kept(native):
    running = native.start(["printf", "one\\ntwo\\nthree\\n"])
    running.process.wait(10)
    assert running.line() == "one\n" and running.finish().out == "two\nthree\n"


def test_cpython_attached_while_running(native, spillway, settled):
    running = native.start(cpython(160, 1000))
    lines = [running.line()]
    before = anonymous_bytes(running.pid)
    budget = half(before)

    pager = spillway.attach(running.pid, budget)
    lines.append(running.line())
    settled(running.pid)
    assert_kernel_sees(anonymous_bytes(running.pid), budget)
    for _ in range(3):
        lines.append(running.line())
    entry = spillway.find(running.pid)
    assert entry["evicted_pages"] > 0 and entry["fetched_pages"] > 0 and entry["stored_bytes"] > 0, entry

    spillway.detach(running.pid)
    stats = pager.finish(timeout=10).must_succeed().stats
    assert stats["evicted_pages"] > 0 and stats["fetched_pages"] > 0, stats
    assert anonymous_bytes(running.pid) >= 0.9 * before, "pages did not come home"
    assert status_is_untraced(running.pid)
    lines.append(running.line())
    running.process.send_signal(signal.SIGTERM)
    found = "".join(lines) + running.finish().must_succeed().out

    rounds = len(found.splitlines()) - 1
    assert found == native.run(cpython(160, rounds)).must_succeed().out


def status_is_untraced(pid):
    """Whether nobody traces a process."""
    return "TracerPid:\t0" in pathlib.Path(f"/proc/{pid}/status").read_text()


def value(key, version, length=2048):
    """What a key holds: half noise, half text, reproducible."""
    noise = random.Random(f"{key}:{version}").randbytes(length // 2)
    return noise + (b"%s version %d " % (key, version) * (length // 32))[: length // 2]


def redis_command(directory, save_path, *further):
    """A redis-server that keeps to a directory and writes only when told to."""
    options = ["--port", 0, "--unixsocket", directory / "socket", "--dir", directory, "--dbfilename", save_path.name]
    return [*options, "--save", "", "--enable-debug-command", "yes", *further]


@pytest.mark.limit(120)
def test_redis_saves_in_the_background_while_its_memory_is_elsewhere(native, spillway, need, tmp_path):
    (server,) = need("redis-server")
    dump = tmp_path / "dump.rdb"
    budget = 80 * MIB
    keys = [b"key:%d" % i for i in range(60000)]
    version = dict.fromkeys(keys, 0)

    running = spillway.start([server, *redis_command(tmp_path, dump)], budget)
    redis = clients.Redis(tmp_path / "socket")
    assert set(redis.pipeline(("SET", key, value(key, 0)) for key in keys)) == {b"OK"}
    for kind in range(20):
        list(redis.pipeline(("HSET", f"hash:{kind}", f"field {i}", value(b"h%d" % i, kind, 512)) for i in range(500)))
        list(redis.pipeline(("ZADD", f"zset:{kind}", i * 7919 % 1000, f"member {i}") for i in range(500)))
        list(redis.pipeline(("RPUSH", f"list:{kind}", value(b"l%d" % i, kind, 256)) for i in range(500)))
    assert int(redis.info("used_memory")) >= 2 * budget
    digest = redis.call("DEBUG", "DIGEST")
    # The peak over the whole run would count the pages that a fork shares twice.
    assert_kernel_sees(anonymous_bytes(running.pid), budget)
    evicted = spillway.find(running.pid)["evicted_pages"]

    assert redis.call("BGSAVE") == b"Background saving started"
    dice = random.Random(3)
    writes_while_saving = 0
    while redis.info("rdb_bgsave_in_progress") == "1" or writes_while_saving == 0:
        some = dice.sample(keys, 500)
        for key in some:
            version[key] += 1
        assert set(redis.pipeline(("SET", key, value(key, version[key])) for key in some)) == {b"OK"}
        writes_while_saving += len(some)
    assert redis.info("rdb_last_bgsave_status") == "ok"
    assert spillway.find(running.pid)["evicted_pages"] > evicted, "nothing was evicted during BGSAVE"

    # The parent kept every byte, those written meanwhile too.
    for at in range(0, len(keys), 500):
        some = keys[at : at + 500]
        assert redis.call("MGET", *some) == [value(key, version[key]) for key in some]
    redis.stream.sendall(redis.encode("SHUTDOWN", "NOSAVE"))
    assert_paged(running.finish(timeout=20).must_succeed(), budget)

    # The child saved the moment of its fork.
    (tmp_path / "socket").unlink(missing_ok=True)
    restored = native.start([server, *redis_command(tmp_path, dump)])
    redis = clients.Redis(tmp_path / "socket")
    eventually(lambda: redis.info("loading") == "0", "redis to load its dump")
    assert redis.call("DEBUG", "DIGEST") == digest
    for at in range(0, len(keys), 500):
        some = keys[at : at + 500]
        assert redis.call("MGET", *some) == [value(key, 0) for key in some]
    restored.process.send_signal(signal.SIGTERM)
    assert restored.finish(timeout=20).status == 0


def test_memcached(spillway, need, tmp_path):
    (server,) = need("memcached")
    path = tmp_path / "socket"
    budget = 80 * MIB
    keys = [b"key:%d" % i for i in range(82000)]
    command = [server, "-u", "root", "-s", path, "-m", 512, "-t", 2]
    running = spillway.start(command, budget)
    cache = clients.Memcached(path)
    cache.set_all((key, value(key, 0)) for key in keys)
    assert cache.stat("bytes") > 2 * budget and cache.stat("evictions") == 0

    # Two clients at once, one reading from either end, and one that rewrites what the readers leave alone.
    wrong = []

    def read(mine):
        connection = clients.Memcached(path)
        for at in range(0, len(mine), 200):
            some = mine[at : at + 200]
            if connection.get_many(some) != {key: value(key, 0) for key in some}:
                wrong.append(some)

    readers = [threading.Thread(target=read, args=[mine]) for mine in (keys[10000:], keys[:9999:-1])]
    for reader in readers:
        reader.start()
    cache.set_all((key, value(key, 1)) for key in keys[:10000])
    for reader in readers:
        reader.join()
    assert not wrong
    for at in range(0, 10000, 200):
        some = keys[at : at + 200]
        assert cache.get_many(some) == {key: value(key, 1) for key in some}

    os.kill(running.pid, signal.SIGTERM)
    done = running.finish(timeout=20)
    assert_paged(done, budget)


def test_static_go(native, spillway, need, programs, tmp_path):
    (go,) = need("go")
    program = tmp_path / "churn"
    alone = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOFLAGS": "-mod=mod"}
    subprocess.run([go, "build", "-o", program, "."], cwd=programs / "go", env=alone, check=True, timeout=80)
    compare_with_native(native, spillway, [program])


@pytest.mark.parametrize("collector", ["Serial", "G1"])
def test_jvm(native, spillway, need, programs, tmp_path, collector):
    javac, java = need("javac", "java")
    subprocess.run([javac, "-d", tmp_path, programs / "java/Churn.java"], check=True, timeout=60)
    compare_with_native(native, spillway, [java, f"-XX:+Use{collector}GC", "-Xmx400m", "-cp", tmp_path, "Churn"])


def test_jvm_where_every_cpu_is_busy(native, spillway, need, programs, tmp_path):
    """What makes room gets no CPU time of its own accord there. The budget holds all the same, and faults do not wait long."""
    javac, java = need("javac", "java")
    subprocess.run([javac, "-d", tmp_path, programs / "java/Churn.java"], check=True, timeout=60)
    command = [java, "-XX:+UseSerialGC", "-Xmx400m", "-cp", str(tmp_path), "Churn"]
    plain = native.run(command).must_succeed()
    budget = half(plain.anonymous_peak_bytes)
    # In its own session: the scheduler's automatic groups give each session a share of its own.
    hogs = "(while :; do :; done) & busy=\"$busy $!\"; " * os.cpu_count()
    paged = spillway.run(["sh", "-c", f'{hogs} "$@"; status=$?; kill $busy; exit $status', "sh", *command], budget)
    assert (paged.out, paged.status) == (plain.out, plain.status), paged.err
    assert_paged(paged, budget)


def test_node(native, spillway, need, programs):
    (node,) = need("node")
    compare_with_native(native, spillway, [node, programs / "node/churn.js"])


SQLITE = """
CREATE TABLE item (id INTEGER PRIMARY KEY, class INTEGER, weight REAL, text TEXT);
WITH RECURSIVE step(id, x) AS (SELECT 1, 12345 UNION ALL SELECT id + 1, (x * 1103515245 + 12345) % 2147483648 FROM step WHERE id < 250000)
  INSERT INTO item SELECT id, x % 97, x / 1000.0, printf('%016x-%016x-', x * 7919, x * 104729) || hex(zeroblob(150)) || x FROM step;
CREATE INDEX by_class ON item (class, weight);
UPDATE item SET text = upper(text) || class WHERE class % 7 = 3;
DELETE FROM item WHERE class % 11 = 5;
SELECT class, count(*), round(sum(weight), 3), min(text), max(length(text)) FROM item GROUP BY class ORDER BY class;
SELECT count(*), sum(length(a.text)) FROM item a JOIN item b ON b.id = (a.id * 31) % 250000 WHERE a.class = b.class;
PRAGMA integrity_check;
"""


def test_sqlite(native, spillway, need):
    (sqlite,) = need("sqlite3")
    compare_with_native(native, spillway, [sqlite, "-batch", "-bail", ":memory:"], stdin=SQLITE)


def test_stress_ng_verifies_its_memory(spillway, need):
    (stress,) = need("stress-ng")
    operations = 100000
    command = [stress, "--vm", 2, "--vm-bytes", "256M", "--vm-method", "all", "--verify", "--vm-ops", operations]
    budget = 128 * MIB
    # The time-out only bounds a failure: it would leave the operations undone, and they are counted.
    done = spillway.run([*command, "--timeout", "75", "--metrics"], budget, timeout=85).must_succeed()
    counted = next(line.split() for line in (done.out + done.err).splitlines() if " vm " in line and "bogo" not in line)
    assert int(counted[counted.index("vm") + 1]) >= operations, done.err
    assert_paged(done, budget)


def test_the_two_witnesses_agree(native):
    """The harness itself: what a program writes is seen by the sampler, and a digest sees a changed byte."""
    done = native.run([sys.executable, "-c", "import time; b = bytearray(b'x' * (100 << 20)); time.sleep(0.2)"]).must_succeed()
    assert 100 * MIB <= done.anonymous_peak_bytes <= 240 * MIB
    assert hashlib.sha256(value(b"a", 0)).digest() != hashlib.sha256(value(b"a", 1)).digest()
