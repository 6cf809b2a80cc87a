"""Servers that join a cluster in etcd, and pools that find them there."""

import json
import signal

import pytest
from harness import eventually
from mechanics import Program, refused
from test_pools import pages_out

# A lease is 6 s.
LEASE_SECONDS = 6


@pytest.fixture
def etcd(servers):
    return servers.etcd()


def joining(servers, etcd, *options):
    """A server that has joined `etcd://…/pool`."""
    server = servers.spillway(options=["--join", f"etcd://{etcd.address}/pool", *options])
    eventually(lambda: f"joined etcd://{etcd.address}/pool as" in server.said(), "the server to join", 20)
    return server


def listed(spillway, etcd):
    """The addresses of the servers that a pool would find, or what is said instead."""
    told = spillway.cli("pool", "status", f"etcd://{etcd.address}/pool", "--json")
    return {row["server"] for row in json.loads(told.stdout)} if told.stdout.strip() else told.stderr


def test_a_pool_uses_the_servers_that_have_joined(processes, spillway, servers, build, etcd, tmp_path):
    one, two = joining(servers, etcd), joining(servers, etcd, "--domain", "rack2")
    assert listed(spillway, etcd) == {one.address, two.address}
    stats = tmp_path / "stats.json"
    pool = f"etcd://{etcd.address}/pool"
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", pool, "--stats", stats]).ready()
    pages_out(spillway, target, 24)
    rows = json.loads(spillway.cli("pool", "status", pool, "--json").stdout)
    assert all(row["pages"] > 500 for row in rows), rows

    # Without etcd, pages come and go as before.
    etcd.kill()
    for command in ["verify", "rewrite", "verify"]:
        target.ask(command)
    eventually(lambda: "does not answer" in one.said() and "does not answer" in two.said(), "both servers to tell", 20)
    again = servers.etcd(port=etcd.port)
    eventually(lambda: listed(spillway, again) == {one.address, two.address}, "the servers to join again", 30, 0.5)
    target.tell("exit 7")
    assert target.status() == 7, target.err
    assert json.loads(stats.read_text())["fetched_pages"] > 48 * 256 / 2


def test_servers_that_end_or_vanish_are_found_no_more(spillway, servers, etcd):
    one, two, three = (joining(servers, etcd) for _ in range(3))
    one.send(signal.SIGTERM)
    one.process.wait(10)
    assert listed(spillway, etcd) == {two.address, three.address}
    two.kill()
    eventually(lambda: listed(spillway, etcd) == {three.address}, "the lease to end", 3 * LEASE_SECONDS, 0.5)
    three.send(signal.SIGTERM)
    three.process.wait(10)
    assert "no server has joined: start some with `spillway serve --join" in listed(spillway, etcd)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--join", "tcp://127.0.0.1/pool"], ["--join takes the cluster's URL", "etcd://HOST[:PORT],.../NAME"]),
        (["--join", "etcd://127.0.0.1"], ["`etcd:` names no cluster"]),
        (["--join", "etcd://127.0.0.1/pool", "--advertise", "here"], ["--advertise must be HOST:PORT"]),
        (["--join", "etcd://127.0.0.1/pool", "--advertise", "http://10.0.0.7:7070"], ["--advertise must be HOST:PORT"]),
        (["--join", "etcd://127.0.0.1/pool", "--domain", "a b"], ["--domain must be a name without spaces"]),
        (["--domain", "rack1"], ["--join"]),
    ],
)
def test_what_cannot_be_joined_is_refused(spillway, options, words):
    refused(spillway.cli("serve", "--memory", "64M", "--listen", "127.0.0.1:0", *options), *words)


def test_a_place_that_is_none_is_not_told_to_clients(spillway, tmp_path):
    token = tmp_path / "token"
    token.write_text("a token of some sixteen bytes and more\n")
    token.chmod(0o600)
    listen = ["--listen", "0.0.0.0:0", "--token-file", token]
    refused(spillway.cli("serve", "--memory", "64M", *listen, "--join", "etcd://127.0.0.1/pool"), "--advertise HOST:PORT")


def test_pools_in_a_cluster_that_is_none_are_refused(spillway, servers, etcd):
    refused(spillway.cli("run", f"--pool=etcd://{etcd.address}/pool", "--", "true"), "no server has joined")
    refused(spillway.cli("run", "--pool=etcd://127.0.0.1:1/pool", "--", "true"), "etcd at 127.0.0.1:1 does not answer")
    # Something else than etcd.
    redis = servers.redis()
    told = spillway.cli("run", f"--pool=etcd://{redis.address}/pool", "--", "true")
    assert told.returncode == 2 and len(told.stderr.splitlines()) == 1, told.stderr
