"""Pools beyond the pager's own memory: each holds what programs have, and what cannot be one is refused.

What servers do when they fail is in test_pool_faults.py.
"""

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess

import clients
import pytest
from harness import MIB, anonymous_bytes, eventually
from mechanics import Program, let_go, refused
from servers import answering, pages_in
from test_programs import cpython, redis_command, value
from test_torture import hung, options

SECRET = "a token of some sixteen bytes and more\n"

KINDS = {
    "tcp": lambda servers, _: f"tcp://{servers.spillway().address}",
    "two servers": lambda servers, _: f"tcp://{servers.spillway().address},{servers.spillway().address}",
    "memcached": lambda servers, _: f"memcached://{servers.memcached('-M').address}",
    "redis": lambda servers, _: f"redis://{servers.redis().address}",
    "valkey": lambda servers, _: f"redis://{servers.valkey().address}",
    "file": lambda _, scratch: f"file://{scratch}/pages?size=256M",
    "emulated": lambda *_: "emulated:?delay=20us",
}


@pytest.fixture(params=KINDS)
def pool(request, servers, tmp_path):
    """The URL of one pool of each kind."""
    return KINDS[request.param](servers, tmp_path)


def pages_out(spillway, target, mib):
    """Waits until so much of a program's memory is in the pool: what it does at full speed at first, no pager sees."""
    eventually(lambda: (spillway.find(target.pid) or {"stored_bytes": 0})["stored_bytes"] > mib * MIB, f"{mib} MiB in the pool")


def test_a_program_in_a_quarter_of_its_memory(processes, spillway, build, pool, tmp_path):
    stats = tmp_path / "stats.json"
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", pool, "--stats", stats]).ready()
    pages_out(spillway, target, 24)
    for command in ["verify", "rewrite", "fork", "verify"]:
        target.ask(command)
    target.tell("exit 7")
    assert target.status() == 7, target.err
    paged = json.loads(stats.read_text())
    assert paged["evicted_pages"] > 36 * 256 and paged["fetched_pages"] > 36 * 256 / 2, paged


def test_torture(processes, spillway, build, pool):
    command = [spillway.path, "run", "--local", "12M", "--pool", pool, "--", build("torture", "-Wshadow"), *options(4711, 3, 48, 2)]
    running = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = running.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        raise AssertionError(hung(running)) from None
    assert running.returncode == 0, f"status {running.returncode}\n{out}\n{err[-6000:]}"
    assert json.loads(out.splitlines()[-1])["pages_verified"] > 1000, out


def test_a_process_is_adopted_and_let_go(processes, spillway, build, pool):
    target = Program(processes, [build("fill"), 32]).ready()
    before = anonymous_bytes(target.pid)
    attached = spillway.attach(target.pid, "8M", "--pool", pool)
    entry = spillway.settled(target.pid)
    assert entry["stored_bytes"] > 16 * MIB, entry
    target.unharmed()
    spillway.settled(target.pid)
    spillway.detach(target.pid)
    assert attached.finish(timeout=10).must_succeed().stats["fetched_pages"] > 0
    assert anonymous_bytes(target.pid) > before * 7 / 8 - MIB, "pages did not come home"
    target.unharmed()


def test_cpython(native, spillway, servers):
    plain = native.run(cpython(24, 2)).must_succeed()
    budget = plain.anonymous_peak_bytes // 3 // MIB * MIB
    paged = spillway.run(cpython(24, 2), budget, "--pool", f"tcp://{servers.spillway().address}").must_succeed()
    assert paged.out == plain.out
    assert paged.stats["evicted_pages"] > 1000 and paged.stats["fetched_pages"] > 1000, paged.stats


def test_redis_saves_in_the_background(native, spillway, servers, need, tmp_path):
    (server,) = need("redis-server")
    dump, budget = tmp_path / "dump.rdb", 8 * MIB
    keys = [b"key:%d" % i for i in range(8000)]
    pool = f"tcp://{servers.spillway().address}"
    running = spillway.start([server, *redis_command(tmp_path, dump)], budget, "--pool", pool)
    redis = clients.Redis(tmp_path / "socket")
    assert set(redis.pipeline(("SET", key, value(key, 0)) for key in keys)) == {b"OK"}
    assert int(redis.info("used_memory")) >= 2 * budget
    digest = redis.call("DEBUG", "DIGEST")

    assert redis.call("BGSAVE") == b"Background saving started"
    dice, new = random.Random(3), set()
    while redis.info("rdb_bgsave_in_progress") == "1" or not new:
        some = dice.sample(keys, 200)
        assert set(redis.pipeline(("SET", key, value(key, 1)) for key in some)) == {b"OK"}
        new.update(some)
    assert redis.info("rdb_last_bgsave_status") == "ok"
    for at in range(0, len(keys), 500):
        some = keys[at : at + 500]
        assert redis.call("MGET", *some) == [value(key, int(key in new)) for key in some]
    redis.stream.sendall(redis.encode("SHUTDOWN", "NOSAVE"))
    stats = running.finish(timeout=20).must_succeed().stats
    assert stats["evicted_pages"] > 5000 and stats["fetched_pages"] > 5000, stats

    (tmp_path / "socket").unlink(missing_ok=True)
    restored = native.start([server, *redis_command(tmp_path, dump)])
    redis = clients.Redis(tmp_path / "socket")
    eventually(lambda: redis.info("loading") == "0", "redis to load its dump")
    assert redis.call("DEBUG", "DIGEST") == digest
    restored.process.send_signal(signal.SIGTERM)
    assert restored.finish(timeout=20).status == 0


# ---- what is refused


@pytest.fixture
def unusable(spillway, processes, build, tmp_path):
    """`unusable(url, words…)`: that a pool is refused by `run`, which starts nothing, and by `attach`, which harms nobody."""
    target = Program(processes, [build("fill"), 8]).ready()

    def check(url, *words):
        trace = tmp_path / "it ran"
        refused(spillway.cli("run", f"--pool={url}", "--", "touch", trace), *words)
        assert not trace.exists()
        refused(spillway.cli("attach", target.pid, f"--pool={url}"), *words)
        target.unharmed()

    return check


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("tcp:", "server"),
        ("tcp://", "server"),
        ("tcp://host:0", "HOST"),
        ("tcp://host:99999", "HOST"),
        ("tcp://127.0.0.1?nosuch=1", "nosuch"),
        ("tcp://127.0.0.1?compress=lz4", "compress"),
        ("tcp://127.0.0.1?deadline=1", "deadline"),
        ("tcp://127.0.0.1?deadline=1ms", "100ms"),
        ("tcp://127.0.0.1?deadline=1s&deadline=2s", "twice"),
        ("tcp://127.0.0.1?token-file=/no/such/file", "token"),
        ("tcp://127.0.0.1,localhost", "same server"),
        ("memcached://127.0.0.1?lossy=2", "lossy"),
        ("memcached://:password@127.0.0.1", "HOST"),
        ("redis://name@127.0.0.1", "PASSWORD"),
        ("redis://127.0.0.1?prefix=a b", "prefix"),
        ("file:pages?size=8M", "absolute"),
        ("file:///tmp/pages", "size"),
        ("file:///no/such/directory/pages?size=8M", "opened"),
        ("emulated:?delay=fast", "delay"),
        ("emulated:?lossy=1", "lossy"),
        ("tcp://no.such.host.invalid", "name"),
    ],
)
def test_urls(unusable, url, word):
    unusable(url, word)


@pytest.mark.parametrize("scheme", ["tcp", "memcached", "redis"])
def test_nobody_listens(unusable, port, scheme):
    unusable(f"{scheme}://127.0.0.1:{port()}?deadline=1s", "listens")


def test_one_of_two_servers_is_missing(unusable, servers, port):
    unusable(f"tcp://{servers.spillway().address},127.0.0.1:{port()}", "listens")


def say_nothing(connection):
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.recv(1 << 16)


def say_garbage(connection):
    connection.sendall(random.Random(1).randbytes(1 << 16))


def say_http(connection):
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("scheme", ["tcp", "memcached", "redis"])
@pytest.mark.parametrize("talk", [say_nothing, say_garbage, say_http])
def test_servers_of_something_else(unusable, scheme, talk):
    with answering(talk) as port:
        unusable(f"{scheme}://127.0.0.1:{port}?deadline=500ms", "it ")


def test_schemes_mixed_up(unusable, servers):
    addresses = {scheme: servers.of(scheme).address for scheme in ("tcp", "memcached", "redis")}
    for scheme in addresses:
        for other, address in addresses.items():
            if other != scheme:
                unusable(f"{scheme}://{address}?deadline=500ms", "it ")


def test_a_server_of_another_version(unusable):
    def talk(connection):
        connection.sendall(b"SPILLWAY" + bytes(range(32)))
        hello = connection.recv(160, socket.MSG_WAITALL)
        assert hello[:8] == b"SPILLWAY"
        text = b"versions 7 to 9"
        connection.sendall(struct.pack("<HHH", 2, 2 + len(text), 1) + text)

    with answering(talk) as port:
        unusable(f"tcp://127.0.0.1:{port}", "version")


def token(path, text=SECRET):
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_tokens(spillway, unusable, servers, tmp_path):
    right, wrong = token(tmp_path / "right"), token(tmp_path / "wrong", SECRET[::-1])
    address = servers.spillway(token_file=right).address
    for parameters in ["", f"?token-file={wrong}"]:
        unusable(f"tcp://{address}{parameters}", "token")
    assert spillway.cli("run", f"--pool=tcp://{address}?token-file={right}", "--", "true").returncode == 0
    unusable(f"tcp://{servers.spillway().address}?token-file={right}", "the server has no token")


def test_serve_refuses(spillway, servers, tmp_path):
    short, open_to_all = token(tmp_path / "short", "secret"), token(tmp_path / "open")
    open_to_all.chmod(0o644)
    taken = servers.spillway().address
    for arguments, word in [
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--listen", "[::]:0"], "--token-file"),
        (["--listen", "0.0.0.0:0", "--token-file", short], "guessed"),
        (["--listen", "0.0.0.0:0", "--token-file", open_to_all], "chmod"),
        (["--listen", "0.0.0.0:0", "--token-file", tmp_path / "none"], "read"),
        (["--listen", "nowhere"], "address"),
        (["--listen", taken], "use"),
        (["--memory", "1K"], "1M"),
        (["--memory", "nonsense"], "--memory"),
        (["--nosuch"], "--nosuch"),
    ]:
        refused(spillway.cli("serve", *arguments, timeout=10), word)


def test_a_memcached_that_may_evict(unusable, servers):
    unusable(f"memcached://{servers.memcached(mib=8).address}", "evict")


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_redis_that_may_evict(unusable, servers, kind):
    server = getattr(servers, kind)("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    unusable(f"redis://{server.address}", "evict")


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_redis_with_a_password(spillway, unusable, servers, kind):
    address = getattr(servers, kind)("--requirepass", "open-sesame").address
    for password in ["", ":wrong@"]:
        unusable(f"redis://{password}{address}", "password")
    assert spillway.cli("run", f"--pool=redis://:open-sesame@{address}", "--", "true").returncode == 0


def test_a_server_that_compresses(processes, spillway, build, servers):
    server = servers.spillway(memory="64M", options=["--compress"])
    pool = f"tcp://{server.address}"
    target = Program(processes, [build("fill"), 32]).ready()
    attached = spillway.attach(target.pid, "8M", "--pool", pool)
    spillway.settled(target.pid)
    for command in ["verify", "rewrite", "fork", "verify"]:
        target.ask(command)
    done = spillway.cli("pool", "status", "--json", pool)
    (told,) = json.loads(done.stdout)
    assert 0 < told["stored_bytes"] <= told["distinct_pages"] * 4096 and told["spilled_pages"] == 0, told
    let_go(attached)
    target.unharmed()


def test_what_a_server_holds_is_told_and_given_back(processes, spillway, build, servers):
    server = servers.spillway(options=["--lease", 1])
    pool = f"tcp://{server.address}"

    def told():
        done = spillway.cli("pool", "status", "--json", pool)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]

    target = Program(processes, [build("fill"), 32]).ready()
    attached = spillway.attach(target.pid, "8M", "--pool", pool)
    spillway.settled(target.pid)
    assert told()["pages"] >= 16 * 256, told()
    let_go(attached)
    eventually(lambda: told()["pages"] == 0, "the server to be empty", 5)
    target.unharmed()
    server.kill()
    assert spillway.cli("pool", "status", pool).returncode == 1


# How many pages leave depends on how soon the cache has a CPU.
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["memcached", "redis"])
def test_a_cache_is_left_as_it_was(processes, spillway, build, servers, kind):
    """It would keep for ever what nobody frees. It was: the pager was gone before the last, or all, had left."""
    server = servers.of(kind)
    url = f"{kind}://{server.address}"
    outcome = spillway.run([build("fill"), 48], "8M", "--pool", url, stdin="verify\nexit 0\n")
    assert outcome.status == 0, outcome.err
    assert outcome.stats["written_pages"] > 5000
    eventually(lambda: pages_in(kind, server.address) == 0, "the cache to be empty after `run`", 5)
    target = Program(processes, [build("fill"), 48]).ready()
    running = spillway.attach(target.pid, "8M", "--pool", url)
    spillway.settled(target.pid)
    assert pages_in(kind, server.address) > 5000
    spillway.detach(target.pid)
    assert running.process.wait(10) == 0 and pages_in(kind, server.address) == 0
    target.ask("verify")
