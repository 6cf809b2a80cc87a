"""Pools that survive the loss of servers: some are killed, come back empty, or are stopped, and programs notice nothing."""

import json
import os
import random
import signal
import subprocess
import time

import clients
import pytest
from harness import MIB, eventually
from mechanics import Program
from test_pool_faults import counted, holder, whole  # noqa: F401
from test_pools import pages_out
from test_programs import redis_command, value


def pool_of(servers, count, parameters):
    """So many servers, and the URL that names them."""
    members = [servers.spillway() for _ in range(count)]
    return members, f"tcp://{','.join(member.address for member in members)}?{parameters}"


def protection(spillway, target):
    """How the pool of a program is."""
    return (spillway.find(target.pid) or {}).get("protection") or {}


def rebuilt(spillway, target, chunks):
    """Waits until so many chunks were rebuilt, and nothing is missing."""

    def done():
        now = protection(spillway, target)
        return now.get("rebuilt_chunks", 0) >= chunks and not now["degraded"] and not now["rebuilding"] and now

    return eventually(done, f"{chunks} chunks to be rebuilt", 40)


def anew(servers, members, at):
    """Another server in the place of one that was killed."""
    members[at] = servers.spillway(port=members[at].port)


def test_each_server_is_killed_and_comes_back_empty(holder, spillway, servers):  # noqa: F811
    members, url = pool_of(servers, 3, "data=2&parity=1&deadline=2s")
    target, attached, entry = holder(url)
    assert entry["stored_bytes"] > 8 * MIB and entry["protection"]["groups"] > 500, entry
    chunks = 0
    for at in range(3):
        members[at].kill()
        whole(target)
        assert protection(spillway, target)["reconstructed"] > 0
        anew(servers, members, at)
        chunks = rebuilt(spillway, target, chunks + 200)["rebuilt_chunks"]
        whole(target)
    now = protection(spillway, target)
    assert now["lost_pages"] == 0, now
    spillway.detach(target.pid)
    attached.finish(timeout=20).must_succeed()
    whole(target)


def test_two_servers_may_go_where_there_is_parity_for_two(holder, spillway, servers):  # noqa: F811
    members, url = pool_of(servers, 5, "data=3&parity=2&deadline=2s")
    target, _, _ = holder(url)
    members[0].kill()
    members[3].kill()
    whole(target)
    assert protection(spillway, target)["lost_pages"] == 0


def test_a_spare_takes_what_a_dead_server_had(holder, spillway, servers):  # noqa: F811
    members, url = pool_of(servers, 4, "data=2&parity=1&deadline=1s")
    target, _, _ = holder(url)
    members[2].kill()
    rebuilt(spillway, target, 200)
    members[0].kill()
    whole(target)


def test_a_stopped_server_does_not_stop_programs(processes, spillway, build, servers):
    members, url = pool_of(servers, 5, "data=4&parity=1&deadline=5s")
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url]).ready()
    pages_out(spillway, target, 24)
    members[1].send(signal.SIGSTOP)
    try:
        for command in ["verify", "rewrite", "verify"]:
            target.ask(command)
        # Not the time of it all, which is that of the machine: no fault waited for anything near the deadline.
        assert spillway.find(target.pid)["fault_us"]["max"] < 2e6
        assert protection(spillway, target)["reconstructed"] > 100
    finally:
        members[1].send(signal.SIGCONT)
    for command in ["verify", "fork", "rewrite", "verify"]:
        target.ask(command)
    target.tell("exit 7")
    assert target.status() == 7, target.err


def test_copies_of_local_pages_go_before_others_move(processes, spillway, servers):
    _, url = pool_of(servers, 5, "data=4&parity=1")
    walk = [spillway.path, "bench-walk", "--size", "48M", "--order", "zipf", "--write", "50", "--seconds", "8", "--accesses", "1000000000"]
    command = [spillway.path, "run", "-q", "--local", "24M", "--pool", url, "--", *walk]
    started = processes.start(command, stdout=subprocess.PIPE, text=True)

    def entry():
        return next((target for target in spillway.ps() if target["pool"] == url), {})

    def dropped(most):
        return lambda: (entry().get("protection") or {}).get("dropped_copies", 0) > most

    eventually(dropped(5000), "copies to be given up", 20)
    target = entry()
    # Few pages are left to be moved: else one in six of what is written is.
    assert target["protection"]["moved_pages"] < target["protection"]["chunks_put"] // 10, target
    # Also while nothing comes home.
    os.kill(target["pid"], signal.SIGSTOP)
    time.sleep(0.5)
    eventually(dropped(entry()["protection"]["dropped_copies"] + 200), "more copies to be given up", 10)
    os.kill(target["pid"], signal.SIGCONT)
    said = json.loads(started.stdout.read())
    assert started.wait(30) == 0 and said["wrong"] == 0, said


@pytest.mark.limit(240)
def test_servers_are_killed_while_a_program_writes(processes, spillway, build, servers):
    members, url = pool_of(servers, 3, "data=2&parity=1&deadline=2s")
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url]).ready()
    pages_out(spillway, target, 24)
    target.tell("rewrite")
    time.sleep(0.05)
    members[0].kill()
    while (line := target.line(60)) != "OK":
        assert not line.startswith("BAD"), line
    for command in ["verify", "rewrite", "verify"]:
        target.ask(command, 60)
    anew(servers, members, 0)
    rebuilt(spillway, target, 100)
    members[2].kill()
    for command in ["verify", "rewrite", "verify"]:
        target.ask(command, 60)
    target.tell("exit 7")
    assert target.status() == 7, target.err


@pytest.mark.limit(240)
def test_redis_keeps_every_value_while_servers_come_and_go(spillway, servers, need, tmp_path):
    (server,) = need("redis-server")
    members, url = pool_of(servers, 3, "data=2&parity=1&deadline=2s")
    running = spillway.start([server, *redis_command(tmp_path, tmp_path / "dump.rdb")], 40 * MIB, "--pool", url)
    redis = clients.Redis(tmp_path / "socket")
    keys = [b"key:%d" % i for i in range(30000)]
    version = dict.fromkeys(keys, 0)
    assert set(redis.pipeline(("SET", key, value(key, 0)) for key in keys)) == {b"OK"}
    eventually(lambda: spillway.find(running.pid)["stored_bytes"] > 16 * MIB, "pages in the pool")
    dice = random.Random(5)

    def churn():
        for _ in range(20):
            some = dice.sample(keys, 200)
            for key in some:
                version[key] += 1
            assert set(redis.pipeline(("SET", key, value(key, version[key])) for key in some)) == {b"OK"}
            some = dice.sample(keys, 200)
            assert redis.call("MGET", *some) == [value(key, version[key]) for key in some]

    for at in [1, 2]:
        churn()
        members[at].kill()
        churn()
        before = (spillway.find(running.pid)["protection"])["rebuilt_chunks"]
        anew(servers, members, at)

        def back(before=before):
            now = spillway.find(running.pid)["protection"]
            return now["rebuilt_chunks"] > before and not now["degraded"]

        eventually(back, "what was lost to be rebuilt", 40)
        churn()
    for at in range(0, len(keys), 500):
        some = keys[at : at + 500]
        assert redis.call("MGET", *some) == [value(key, version[key]) for key in some]
    redis.stream.sendall(redis.encode("SHUTDOWN", "NOSAVE"))
    running.finish(timeout=20).must_succeed()


@pytest.mark.parametrize("kind", ["memcached", "redis"])
def test_caches_are_members_too(holder, spillway, servers, kind):  # noqa: F811
    members = [servers.of(kind) for _ in range(3)]
    url = f"{kind}://{','.join(member.address for member in members)}?data=2&parity=1&deadline=2s"
    target, _, _ = holder(url)
    members[1].kill()
    whole(target)
    assert protection(spillway, target)["lost_pages"] == 0


def test_too_few_servers_are_refused(spillway):
    done = spillway.cli("run", "--pool", "tcp://a,b,c?data=4&parity=1", "--", "true")
    assert done.returncode == 2
    assert "needs 5 servers, but 3 are named: name 2 more, or give `data=2&parity=1`" in done.stderr


def drained(spillway, server, url, *more):
    """`spillway pool drain`, which must succeed; what it said."""
    done = spillway.cli("pool", "drain", server.address, url, *more)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("count", "parameters"), [(2, ""), (4, "?data=2&parity=1"), (3, "?data=2&parity=1")], ids=["without parity", "a spare", "no spare"]
)
def test_a_server_leaves_while_a_program_writes(processes, spillway, build, servers, count, parameters):
    members = [servers.spillway() for _ in range(count)]
    url = f"tcp://{','.join(member.address for member in members)}{parameters}"
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url]).ready()
    pages_out(spillway, target, 24)
    target.tell("rewrite")
    assert "holds nothing and takes nothing: it may be stopped" in drained(spillway, members[0], url)
    assert target.line(60) == "OK"
    # It may indeed be stopped.
    members[0].kill()
    for command in ["verify", "rewrite", "verify"]:
        target.ask(command, 60)
    target.tell("exit 7")
    assert target.status() == 7, target.err


def test_a_server_that_cannot_leave_says_why(processes, spillway, build, servers):
    (one,) = members = [servers.spillway()]
    url = f"tcp://{one.address}"
    target = Program(processes, [build("fill"), 24], spillway, "8M", ["--pool", url]).ready()
    pages_out(spillway, target, 8)
    done = spillway.cli("pool", "drain", one.address, url, "--patience", "3")
    assert done.returncode == 1 and "still has" in done.stderr and "has no other server" in done.stderr, done.stderr
    status = spillway.cli("pool", "status", url)
    assert "leaving" in status.stdout, status.stdout
    assert "takes pages again" in drained(spillway, members[0], url, "--cancel")
    target.ask("verify")
    done = spillway.cli("pool", "drain", "elsewhere:1", url)
    assert done.returncode == 2 and "is not a server of this pool" in done.stderr, done.stderr
