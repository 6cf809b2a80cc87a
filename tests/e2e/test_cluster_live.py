"""Servers that join and leave while programs run, and pools that notice."""

import base64
import json
import signal
import types
import urllib.request

from harness import MIB, eventually
from mechanics import Program
from servers import Proxy
from test_cluster import LEASE_SECONDS, etcd, joining  # noqa: F401
from test_pool_faults import holder, whole  # noqa: F401
from test_pools import pages_out
from test_stripes import protection, rebuilt
from test_takeover import begin, end

# A pool looks each second, and believes that a server has left when it was missed three times.
NOTICED_SECONDS = 10


def url_of(etcd, parameters=""):  # noqa: F811
    """The cluster that `joining` joins, as a pool."""
    return f"etcd://{etcd.address}/pool{parameters}"


def pages_at(spillway, etcd):  # noqa: F811
    """How many pages each server of the cluster holds."""
    told = spillway.cli("pool", "status", url_of(etcd), "--json")
    return {row["server"]: row["pages"] for row in json.loads(told.stdout or "[]")}


def entry_of(etcd, server):  # noqa: F811
    """What stands in etcd about a server."""
    key = base64.b64encode(f"/spillway/pool/servers/{server.address}".encode()).decode()
    ask = urllib.request.Request(f"http://{etcd.address}/v3/kv/range", json.dumps({"key": key}).encode())
    with urllib.request.urlopen(ask, timeout=5) as answer:
        (found,) = json.load(answer)["kvs"]
    return json.loads(base64.b64decode(found["value"]))


def pages_of(spillway, server):
    """How many pages a server holds, be it in a cluster or not."""
    told = spillway.cli("pool", "status", f"tcp://{server.address}", "--json")
    return json.loads(told.stdout)[0]["pages"]


def test_a_server_that_joins_gets_pages_at_once(processes, spillway, servers, build, etcd):  # noqa: F811
    joining(servers, etcd)
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url_of(etcd)]).ready()
    pages_out(spillway, target, 24)
    other = joining(servers, etcd)

    def used():
        target.ask("rewrite")
        return pages_of(spillway, other) > 1000

    eventually(used, "pages to arrive at the server that has joined", NOTICED_SECONDS)
    target.ask("verify")
    # Without etcd all goes on, also for the one that joined late; when it is back, the next one is found.
    etcd.kill()
    for command in ["rewrite", "verify"]:
        target.ask(command)
    servers.etcd(port=etcd.port)
    other = joining(servers, etcd)
    eventually(used, "pages to arrive at the third", NOTICED_SECONDS)
    target.ask("verify")
    target.tell("exit 7")
    assert target.status() == 7, target.err


def test_a_server_tells_how_busy_it_is(processes, spillway, servers, build, etcd):  # noqa: F811
    server = joining(servers, etcd, "--domain", "rack7")
    entry = entry_of(etcd, server)
    told = {"version": 1, "address": server.address, "domain": "rack7", "capacity_bytes": 512 * MIB}
    assert entry == told | {"load_percent": entry["load_percent"]}
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url_of(etcd)]).ready()

    def busy():
        target.ask("rewrite")
        return entry_of(etcd, server)["load_percent"] > 0

    eventually(busy, "its load to be told", 30)


def test_a_server_whose_entry_is_gone_gets_no_new_pages(processes, spillway, servers, build, etcd):  # noqa: F811
    # It is cut off from etcd, and from nobody else.
    proxy = Proxy(etcd.port, 1 << 40)
    proxy.start()
    stays, goes = joining(servers, etcd), joining(servers, types.SimpleNamespace(address=f"127.0.0.1:{proxy.port}"))
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url_of(etcd)]).ready()
    pages_out(spillway, target, 24)
    target.ask("verify")
    held = pages_of(spillway, goes)
    assert held > 2000
    proxy.end()
    eventually(lambda: goes.address not in pages_at(spillway, etcd), "its lease to end", 3 * LEASE_SECONDS, 0.5)

    def deserted():
        # What it has is read as ever; what is written anew goes elsewhere.
        target.ask("verify")
        target.ask("rewrite")
        # Copies of pages that never leave again stay there.
        return pages_of(spillway, goes) < held / 3

    eventually(deserted, "its pages to be elsewhere", 2 * NOTICED_SECONDS)
    target.ask("verify")
    assert pages_of(spillway, stays) > held


def test_a_server_that_joins_is_the_spare_of_a_dead_one(holder, spillway, servers, etcd):  # noqa: F811
    members = [joining(servers, etcd, "--domain", f"rack{at}") for at in range(3)]
    target, attached, _ = holder(url_of(etcd, "?data=2&parity=1&deadline=3s"))
    members[0].kill()
    whole(target)
    eventually(lambda: protection(spillway, target)["degraded"] > 500, "groups to be degraded")
    members.append(joining(servers, etcd, "--domain", "rack3"))
    rebuilt(spillway, target, 200)
    members[1].kill()
    whole(target)
    assert protection(spillway, target)["lost_pages"] == 0
    spillway.detach(target.pid)
    attached.finish(timeout=20).must_succeed()
    whole(target)


def test_a_pager_that_takes_over_knows_who_joined(processes, spillway, servers, build, etcd):  # noqa: F811
    joining(servers, etcd)
    target = Program(processes, [build("fill"), 64]).ready()
    pager, _ = begin(processes, spillway, target.pid, "--local", "8M", "--pool", url_of(etcd))
    spillway.settled(target.pid)
    for _ in range(2):
        other = joining(servers, etcd)

        def used(other=other):
            target.ask("rewrite")
            return pages_of(spillway, other) > 1000

        eventually(used, "pages to arrive at the server that has joined", NOTICED_SECONDS)
        held = pages_of(spillway, other)
        end(pager)
        pager, line = begin(processes, spillway, target.pid)
        assert "took process" in line
        target.ask("verify")
        assert pages_of(spillway, other) > held / 2
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    target.ask("verify")


def test_domains_that_are_too_few_are_told(processes, spillway, servers, build, etcd):  # noqa: F811
    for domain in ["rack1", "rack1", "rack2"]:
        joining(servers, etcd, "--domain", domain)
    parameters = "?data=2&parity=1"
    line = "groups of 3 pieces over 2 domains: losing a domain loses data"
    target = Program(processes, [build("fill"), 48], spillway, "12M", ["--pool", url_of(etcd, parameters)]).ready()
    pages_out(spillway, target, 24)
    assert f"spillway: {line}" in target.err.decode().splitlines()
    told = spillway.cli("pool", "status", url_of(etcd)).stdout
    assert line in told.splitlines() and "groups healthy" in told and told.count(" rack1\n") == 2, told
    rows = json.loads(spillway.cli("pool", "status", url_of(etcd), "--json").stdout)
    assert sorted(row["domain"] for row in rows) == ["rack1", "rack1", "rack2"]
    # Another pool's status says nothing of these groups.
    other = servers.spillway()
    assert "groups" not in spillway.cli("pool", "status", f"tcp://{other.address}").stdout
    # With a third domain there is nothing to tell any more.
    joining(servers, etcd, "--domain", "rack3")
    assert line not in spillway.cli("pool", "status", url_of(etcd, parameters)).stdout


def test_a_domain_may_be_lost(holder, spillway, servers, etcd):  # noqa: F811
    racks = [[joining(servers, etcd, "--domain", f"rack{rack}") for _ in range(2)] for rack in range(3)]
    target, _, entry = holder(url_of(etcd, "?data=2&parity=1&deadline=3s"))
    assert entry["stored_bytes"] > 8 * MIB
    for server in racks[1]:
        server.send(signal.SIGKILL)
    whole(target)
    assert protection(spillway, target)["lost_pages"] == 0
