"""Memory servers under TLS: programs over it, and what is refused."""

import contextlib
import re
import signal
import socket
import time

import pytest
from harness import MIB, eventually
from mechanics import Program, refused
from servers import Authority, Proxy, answering
from test_pools import pages_out, token


@pytest.fixture
def authority(need, tmp_path):
    need("openssl")
    return Authority(tmp_path / "authority")


@pytest.fixture
def clients(need, tmp_path):
    """Signs the certificates of clients."""
    need("openssl")
    return Authority(tmp_path / "clients")


def started(servers, authority, *options, **more):
    """A server with a certificate for 127.0.0.1."""
    pem, key = authority.issue("server")
    return servers.spillway(options=["--tls-cert", pem, "--tls-key", key, *options], **more)


def test_a_program_while_connections_break(processes, spillway, build, servers, authority, clients, tmp_path):
    """With a token and certificates on both sides."""
    secret, (pem, key) = token(tmp_path / "token"), clients.issue("client")
    server = started(servers, authority, "--client-ca", clients.file, token_file=secret)
    proxy = Proxy(server.port, 8_000_003)
    proxy.start()
    try:
        pool = f"tcp://127.0.0.1:{proxy.port}?token-file={secret}&tls=1&tls-ca={authority.file}&tls-cert={pem}&tls-key={key}"
        target = Program(processes, [build("fill"), 24], spillway, "6M", ["--pool", pool]).ready()
        pages_out(spillway, target, 12)
        for command in ["verify", "rewrite", "fork", "verify"]:
            target.ask(command)
        assert proxy.resets > 0
        target.tell("exit 7")
        assert target.status() == 7, target.err
    finally:
        proxy.end()


def test_a_process_is_adopted_and_let_go(processes, spillway, build, servers, authority):
    pool = f"tcp://{started(servers, authority).address}?tls=1&tls-ca={authority.file}"
    target = Program(processes, [build("fill"), 32]).ready()
    attached = spillway.attach(target.pid, "8M", "--pool", pool)
    assert spillway.settled(target.pid)["stored_bytes"] > 16 * MIB
    target.unharmed()
    status = spillway.cli("pool", "status", pool)
    assert status.returncode == 0, status.stderr
    spillway.detach(target.pid)
    attached.finish(timeout=10).must_succeed()
    target.unharmed()


def test_pages_are_not_on_the_wire_in_clear(processes, spillway, build, servers, authority):
    """What a program holds is found in what plain connections carry, and not under TLS."""
    marker = b"MARKER-of-this-test-" * 4

    class Tap(Proxy):
        seen = b""
        found = False

        def _carry(self, client, server):
            client.setblocking(True)
            super()._carry(_Tapped(client, self), server)

    class _Tapped:
        def __init__(self, stream, tap):
            self.stream, self.tap = stream, tap

        def fileno(self):
            return self.stream.fileno()

        def recv(self, count):
            some = self.stream.recv(count)
            self.tap.found |= marker in self.tap.seen + some
            # The end is no bytes.
            self.tap.seen = some[-len(marker) :] or self.tap.seen
            return some

        def __getattr__(self, name):
            return getattr(self.stream, name)

    # Most of its 16 MB have left before a part is read. It leaves nothing to tidy up: that would bring all of it back.
    text = f"""
import os, re, time
def private(): return int(re.search("RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
b = [({marker!r} + bytes([i % 251]) * 4000) for i in range(4000)]
until = time.monotonic() + 10
while private() > 9000 and time.monotonic() < until: time.sleep(0.1)
os._exit(0 if b[7].count(b"MARKER") == 4 else 1)
"""
    program = ["python3", "-c", text]
    for port, parameters, clear in [
        (servers.spillway().port, "", True),
        (started(servers, authority).port, f"?tls=1&tls-ca={authority.file}", False),
    ]:
        tap = Tap(port, 1 << 40)
        tap.start()
        try:
            done = spillway.cli("run", "--local", "4M", f"--pool=tcp://127.0.0.1:{tap.port}{parameters}", "--", *program, timeout=60)
            assert done.returncode == 0, done.stderr
            assert tap.seen and tap.found == clear
        finally:
            tap.end()


def test_pools_that_are_refused(spillway, servers, authority, clients, tmp_path):
    address = started(servers, authority).address
    wanting = started(servers, authority, "--client-ca", clients.file).address
    other = authority.issue("other", "DNS:pool.example")
    named = servers.spillway(options=["--tls-cert", other[0], "--tls-key", other[1]]).address
    plain = servers.spillway().address
    pem, key = clients.issue("client")
    exposed = tmp_path / "exposed.key"
    exposed.write_bytes(key.read_bytes())
    exposed.chmod(0o644)
    garbled = tmp_path / "garbled.pem"
    garbled.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    ca, stranger = f"tls=1&tls-ca={authority.file}", authority.issue("client")
    for url, word in [
        (f"{address}?tls=1&tls-ca={clients.file}", "signed"),
        (f"{named}?{ca}", "pool.example"),
        (f"{named}?{ca}&tls-name=other.example", "tls-name"),
        (address, "tls=1"),
        (f"{plain}?{ca}", "--tls-cert"),
        (f"{wanting}?{ca}", "tls-cert"),
        (f"{wanting}?{ca}&tls-cert={stranger[0]}&tls-key={stranger[1]}", "--client-ca"),
        (f"{address}?{ca}&tls-cert={pem}&tls-key={exposed}", "chmod 600"),
        (f"{address}?{ca}&tls-cert={pem}&tls-key={stranger[1]}", "is not that of"),
        (f"{address}?tls=1&tls-ca={garbled}", "PEM"),
        (f"{address}?tls=1&tls-ca=/no/such/file", "read"),
        (f"{address}?tls=1", "tls-ca"),
        (f"{address}?tls-ca={authority.file}", "tls=1"),
        (f"{address}?{ca}&tls-cert={pem}", "tls-key"),
    ]:
        trace = tmp_path / "it ran"
        refused(spillway.cli("run", f"--pool=tcp://{url}", "--", "touch", trace), word)
        assert not trace.exists()
    for url in [f"{wanting}?{ca}&tls-cert={pem}&tls-key={key}", f"{named}?{ca}&tls-name=pool.example"]:
        assert spillway.cli("run", f"--pool=tcp://{url}", "--", "true").returncode == 0


def test_the_lender_is_told_who_was_refused(spillway, servers, authority, clients, tmp_path):
    right, wrong = token(tmp_path / "right"), token(tmp_path / "wrong", "0123456789abcdef" * 2)
    plain, wanting = servers.spillway(token_file=right), started(servers, authority, "--client-ca", clients.file)
    stranger, ca = authority.issue("client"), f"tls=1&tls-ca={authority.file}"
    for server, parameters, word in [
        (wanting, ca, "shows no certificate"),
        (wanting, f"{ca}&tls-cert={stranger[0]}&tls-key={stranger[1]}", "no authority in --client-ca"),
        (wanting, f"tls=1&tls-ca={clients.file}", "refuses the certificate in --tls-cert"),
        (wanting, "token-file=" + str(right), "speaks no TLS"),
        (plain, f"token-file={right}&{ca}", "speaks TLS"),
        (plain, f"token-file={wrong}", "the token is not the server's"),
        (plain, "", "the token is not the server's"),
    ]:
        before = len(server.said())
        assert spillway.cli("pool", "status", f"tcp://{server.address}?{parameters}").returncode == 1
        line = eventually(lambda: re.search(r"spillway: refused (\S+): (.+)\n", server.said()[before:]), f"`{word}` to be said", 3)
        assert line[1].startswith("127.0.0.1:") and word in line[2], line[0]
    # Strangers who knock all the time: a few lines a second, and how many others there were.
    before, begun = len(plain.said()), time.monotonic()
    knocks = 0
    while time.monotonic() < begun + 3:
        with socket.create_connection((plain.host, plain.port)) as stranger:
            stranger.sendall(b"?" * 200)
            while stranger.recv(1000):
                pass
        knocks += 1
    counted = lambda: [int(n) for n in re.findall(r"refused (\d+) more", plain.said()[before:])]
    eventually(lambda: sum(counted()) > knocks / 2, "the others to be counted", 3)
    lines = plain.said()[before:].splitlines()
    assert knocks > 100 and len(lines) <= 5 * (time.monotonic() - begun + 1), (knocks, lines)
    assert sum(counted()) + len(lines) - len(counted()) <= knocks
    plain.send(signal.SIGTERM)
    assert plain.process.wait(5) == 0


def test_a_server_that_stalls_in_the_handshake(spillway, authority):
    def talk(connection):
        connection.sendall(b"\x16\x03\x03\x40\x00")
        with contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.recv(1 << 16)

    with answering(talk) as port:
        pool = f"--pool=tcp://127.0.0.1:{port}?deadline=500ms&tls=1&tls-ca={authority.file}"
        refused(spillway.cli("run", pool, "--", "true"), "it does not answer")
