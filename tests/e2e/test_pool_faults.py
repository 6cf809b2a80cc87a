"""Servers that die, stop, are cut off, break connections, or are full: pages come back right or are said to be lost.

A lost page is SIGBUS for who touches it. It is never zeros, and never another page.
"""

import signal
import time

import pytest
from harness import MIB, eventually
from mechanics import Program, refused
from servers import Network, Proxy
from test_pools import pages_out, token

MIB_HELD = 24
PAGES = MIB_HELD * 256


@pytest.fixture
def holder(processes, spillway, build):
    """`holder(pool)`: a program that survives losses, adopted with a third of its memory local; and its pager."""

    def start(pool, local="8M"):
        target = Program(processes, [build("lost"), MIB_HELD]).ready()
        attached = spillway.attach(target.pid, local, "--pool", pool)
        return target, attached, spillway.settled(target.pid)

    return start


def counted(target, command="count", timeout=60):
    """How many pages were right, wrong, and lost."""
    (line,) = target.ask(command, timeout)
    words = line.split()
    assert words[::2] == ["RIGHT", "WRONG", "LOST"], line
    return [int(word) for word in words[1::2]]


def steady(spillway, pid):
    """The entry of a target of which no more pages leave: those go on for a while once it is within its budget."""
    seen = []

    def the_same():
        seen.append(spillway.find(pid))
        return seen[-1] if len(seen) > 1 and seen[-1]["stored_bytes"] == seen[-2]["stored_bytes"] else None

    return eventually(the_same, "pages to stay where they are", every=0.3)


def whole(target):
    """That every page is right."""
    assert counted(target) == [PAGES, 0, 0]


def lost_in_time(target, seconds):
    """How many pages are lost; none may be wrong, and all are known after so many seconds."""
    began = time.monotonic()
    right, wrong, lost = counted(target)
    assert (wrong, right + lost) == (0, PAGES)
    assert time.monotonic() - began < seconds
    return lost


def test_a_server_that_is_killed_and_started_anew(holder, spillway, servers):
    server = servers.spillway()
    target, attached, _ = holder(f"tcp://{server.address}?deadline=1s")
    entry = steady(spillway, target.pid)
    server.kill()
    # Not all of them: some are to be asked of the new server.
    right, wrong, lost = counted(target, "count 96")
    assert wrong == 0 and lost > 0
    # What the new server does not know is lost at once, and nothing else is.
    servers.spillway(port=server.port)
    eventually(lambda: spillway.cli("pool", "status", f"tcp://{server.address}").returncode == 0, "the new server")
    time.sleep(1.5)
    right, wrong, lost = counted(target)
    assert wrong == 0 and right + lost == PAGES
    assert 0 <= entry["stored_bytes"] // 4096 - lost < 64, f"{lost} lost, {entry}"
    # It stays lost until it is given back; what is written then goes to the new server.
    assert counted(target) == [right, 0, lost]
    target.ask("mend")
    whole(target)
    assert spillway.settled(target.pid)["stored_bytes"] > 8 * MIB
    whole(target)
    spillway.detach(target.pid)
    attached.finish(timeout=10).must_succeed()
    whole(target)


def test_one_of_two_servers_is_killed(holder, servers):
    one, other = servers.spillway(), servers.spillway()
    target, _, entry = holder(f"tcp://{one.address},{other.address}?deadline=1s")
    one.kill()
    # Hundreds of blocks, one after the other: a deadline is waited for once, not for each of them.
    assert 0 < lost_in_time(target, 6) < PAGES * 3 // 4, entry


@pytest.mark.parametrize("kind", ["memcached", "redis"])
def test_a_cache_that_is_killed(holder, servers, kind):
    server = servers.of(kind)
    target, _, _ = holder(f"{kind}://{server.address}?deadline=1s")
    server.kill()
    assert lost_in_time(target, 6) > 0


def test_detaching_from_a_dead_server_ends(holder, spillway, servers):
    server = servers.spillway()
    target, attached, _ = holder(f"tcp://{server.address}?deadline=1s")
    server.kill()
    began = time.monotonic()
    spillway.detach(target.pid)
    attached.finish(timeout=20)
    assert time.monotonic() - began < 15
    right, wrong, lost = counted(target)
    assert (wrong, right + lost) == (0, PAGES) and lost > 0


def test_a_program_under_run_is_ended_by_a_loss(processes, spillway, build, servers):
    server = servers.spillway()
    pool = f"tcp://{server.address}?deadline=100ms"
    target = Program(processes, [build("fill"), 32], spillway, "8M", ["--pool", pool]).ready()
    pages_out(spillway, target, 16)
    server.kill()
    target.tell("verify")
    assert target.status() == 128 + signal.SIGBUS, target.err


def test_new_memory_stays_local_while_no_server_is_there(processes, spillway, build, servers):
    server = servers.spillway()
    target = Program(processes, [build("fill"), 4], spillway, "8M", ["--pool", f"tcp://{server.address}?deadline=1s"]).ready()
    server.kill()
    target.ask("blank 4")
    target.ask("grow 24")
    # Nothing had left before the server did.
    target.unharmed()

    def beyond():
        entry = spillway.find(target.pid)
        return entry["local_bytes"] > 2 * entry["budget_bytes"]

    eventually(beyond, "the new memory to count")
    target.tell("exit 0")
    assert target.status() == 0, target.err


def test_a_server_that_stops_for_a_while(processes, spillway, build, servers):
    server = servers.spillway()
    target = Program(processes, [build("fill"), 32], spillway, "8M", ["--pool", f"tcp://{server.address}?deadline=20s"]).ready()
    pages_out(spillway, target, 16)
    target.tell("churn 11500")
    time.sleep(0.7)
    server.send(signal.SIGSTOP)
    time.sleep(10)
    server.send(signal.SIGCONT)
    assert target.line() == "OK"
    target.ask("rewrite")
    target.unharmed()


def test_a_server_that_stops_for_longer_than_the_deadline(holder, spillway, servers):
    server = servers.spillway()
    target, attached, _ = holder(f"tcp://{server.address}?deadline=1s")
    server.send(signal.SIGSTOP)
    target.tell("count")
    time.sleep(3)
    server.send(signal.SIGCONT)
    _, right, _, wrong, _, lost = target.line().split()
    assert target.line() == "OK"
    assert (int(wrong), int(right) + int(lost)) == (0, PAGES) and int(lost) > 0
    target.ask("mend")
    whole(target)
    spillway.detach(target.pid)
    attached.finish(timeout=10).must_succeed()
    whole(target)


@pytest.mark.parametrize("kind", ["tcp", "memcached", "redis"])
def test_connections_that_are_reset(processes, spillway, build, servers, kind):
    proxy = Proxy(servers.of(kind).port, 2_000_003)
    proxy.start()
    try:
        pool = f"{kind}://127.0.0.1:{proxy.port}"
        target = Program(processes, [build("fill"), 16], spillway, "4M", ["--pool", pool]).ready()
        pages_out(spillway, target, 8)
        for command in ["verify", "rewrite", "verify"]:
            target.ask(command)
        assert proxy.resets > 5
        target.tell("exit 0")
        assert target.status() == 0, target.err
    finally:
        proxy.end()


def test_a_server_that_is_full(processes, spillway, build, servers):
    server = servers.spillway(memory="4M")
    target = Program(processes, [build("fill"), 32], spillway, "8M", ["--pool", f"tcp://{server.address}"]).ready()
    pages_out(spillway, target, 1)
    for command in ["verify", "rewrite", "verify"]:
        target.ask(command)
    entry = spillway.find(target.pid)
    assert entry["local_bytes"] > 2 * entry["budget_bytes"], entry
    target.tell("exit 0")
    assert target.status() == 0, target.err


def test_what_one_server_has_no_room_for_goes_to_the_other(processes, spillway, build, servers):
    pool = f"tcp://{servers.spillway(memory='4M').address},{servers.spillway().address}"
    target = Program(processes, [build("fill"), 32]).ready()
    spillway.attach(target.pid, "8M", "--pool", pool)
    spillway.settled(target.pid)
    target.ask("rewrite")
    spillway.settled(target.pid)
    target.unharmed()


def test_a_cache_that_evicts(holder, servers):
    server = servers.memcached(mib=8)
    target, attached, entry = holder(f"memcached://{server.address}?lossy=1")
    assert entry["stored_bytes"] > 14 * MIB
    right, wrong, lost = counted(target)
    assert wrong == 0 and right + lost == PAGES and lost > 0
    attached.process.send_signal(signal.SIGINT)
    attached.finish(timeout=20).must_succeed()
    # Whoever adopts it later does not make zeros of what is lost.
    again = counted(target)
    assert again[1] == 0, again


def test_faults_on_purpose(holder, servers):
    target, _, _ = holder(f"tcp://{servers.spillway().address}?fault=lose:50,corrupt:50,decline:10,stall:200:20ms&delay=100us")
    right, wrong, lost = counted(target)
    assert wrong == 0 and right + lost == PAGES and 0 < lost < PAGES // 4
    target.ask("mend")


# ---- two hosts, as far as a network is concerned


def fill_across(network, processes, spillway, build, pool):
    """`fill` in one namespace, its pages in a pool in the other."""
    command = [spillway.path, "run", "--local", "8M", "--pool", pool, "--", build("fill"), 32]
    return Program(processes, [*network.within(0), *command]).ready()


def pool_across(network, servers, tmp_path):
    """A memory server in the other namespace, as a pool."""
    secret = token(tmp_path / "token")
    server = servers.spillway(host=Network.ADDRESSES[1], token_file=secret, within=network.within(1))
    return f"tcp://{server.address}?token-file={secret}"


def churns_while_cut_off(target, network):
    """It touches its memory while there is no network for two seconds."""
    target.tell("churn 4000")
    time.sleep(0.7)
    network.cut()
    time.sleep(2)
    network.mend()
    assert target.line() == "OK"


def test_a_server_on_another_host(network, processes, spillway, servers, build, tmp_path):
    refused(spillway.cli("serve", "--listen", f"{Network.ADDRESSES[1]}:0"), "--token-file")
    target = fill_across(network, processes, spillway, build, pool_across(network, servers, tmp_path))
    for command in ["verify", "rewrite", "fork", "verify"]:
        target.ask(command)
    target.tell("exit 0")
    assert target.status() == 0, target.err


@pytest.mark.parametrize("kind", ["memcached", "redis"])
def test_a_cache_on_another_host(network, processes, spillway, servers, build, kind):
    server = servers.of(kind, host=Network.ADDRESSES[1], within=network.within(1))
    target = fill_across(network, processes, spillway, build, f"{kind}://{server.address}")
    for command in ["verify", "rewrite", "fork", "verify"]:
        target.ask(command)
    churns_while_cut_off(target, network)
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0, target.err


def test_a_network_that_is_cut_for_a_while(network, processes, spillway, servers, build, tmp_path):
    target = fill_across(network, processes, spillway, build, pool_across(network, servers, tmp_path))
    churns_while_cut_off(target, network)
    target.ask("rewrite")
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0, target.err
