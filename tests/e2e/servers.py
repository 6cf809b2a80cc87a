"""Servers that keep pages and certificates for them, a proxy that breaks connections to them, and a network between two namespaces."""

import contextlib
import dataclasses
import os
import pathlib
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading

from harness import eventually, free_port, thread_stats


@dataclasses.dataclass
class Server:
    """A server that was started."""

    process: subprocess.Popen
    host: str
    port: int
    log: pathlib.Path | None = None

    def said(self):
        """What it has said so far."""
        return self.log.read_text()

    @property
    def address(self):
        """`HOST:PORT`."""
        return f"{self.host}:{self.port}"

    def send(self, number):
        """Sends it a signal; one that is to stop it is waited for, as each of its threads answers until it has seen it."""
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            stopped = lambda: all(") T " in stat for stat in thread_stats(self.process.pid))
            eventually(stopped, "the server to stop", every=0.001)

    def kill(self):
        """Ends it at once, without a word to its clients."""
        self.send(signal.SIGKILL)
        self.process.wait(5)


def pages_in(kind, address):
    """How many pages a memcached or Redis at `HOST:PORT` has."""
    question, answer = {"memcached": (b"stats\r\n", r"STAT curr_items (\d+)"), "redis": (b"DBSIZE\r\n", r":(\d+)")}[kind]
    with socket.create_connection(address.split(":"), 5) as cache:
        cache.sendall(question)
        return int(re.search(answer, cache.recv(1 << 16).decode())[1])


class Servers:
    """Starts servers on loopback ports that are free, unless told otherwise. `processes` ends them."""

    def __init__(self, processes, spillway, need, scratch):
        self.processes, self.path, self.need, self.scratch = processes, spillway, need, scratch

    def spillway(self, memory="512M", port=0, token_file=None, host="127.0.0.1", within=(), options=()):
        """`spillway serve`; `within`: a command to run it by."""
        log = tempfile.NamedTemporaryFile("w+", dir=self.scratch, prefix="serve", delete=False)
        command = [*within, self.path, "serve", "--listen", f"{host}:{port}", "--memory", memory, *options]
        command += ["--token-file", token_file] if token_file else []
        process = self.processes.start(command, stdout=log, stderr=log)

        server = Server(process, host, 0, pathlib.Path(log.name))

        def listening():
            text = server.said()
            assert process.poll() is None, f"spillway serve ended: {text}"
            return re.search(r"lending .* on \S+:(\d+);", text)

        server.port = int(eventually(listening, "spillway serve to listen", 10)[1])
        return server

    def of(self, scheme, **where):
        """A server for pools of this scheme, which forgets nothing; `where`: its host, and a command to run it by."""
        options = ["-M"] if scheme == "memcached" else []
        return {"tcp": self.spillway, "memcached": self.memcached, "redis": self.redis}[scheme](*options, **where)

    def memcached(self, *options, mib=512, host="127.0.0.1", within=()):
        """A memcached that evicts nothing if `-M` is among the options."""
        (path,) = self.need("memcached")
        port = free_port()
        command = [*within, path, "-u", "root", "-l", host, "-U", 0, "-p", port, "-m", mib, "-t", 1, *options]
        return self._listening(command, port, host)

    def redis(self, *options, program="redis-server", host="127.0.0.1", within=()):
        """A redis-server that writes nothing to disk, and hears hosts that its own is connected with."""
        (path,) = self.need(program)
        port = free_port()
        command = [*within, path, "--port", port, "--bind", host, "--save", "", "--appendonly", "no", "--dir", self.scratch]
        return self._listening([*command, "--protected-mode", "no", *options], port, host)

    def valkey(self, *options):
        """The same of a valkey-server, which is spoken to as Redis is."""
        return self.redis(*options, program="valkey-server")

    def etcd(self, port=0):
        """An etcd of one node, whose data lasts until the test ends: the same port brings it back."""
        (path,) = self.need("etcd")
        port, peer = port or free_port(), free_port()
        url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        command = [path, "--data-dir", self.scratch / f"etcd-{port}", "--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        return self._listening(command, port)

    def _listening(self, command, port, host="127.0.0.1"):
        process = self.processes.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        place = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"

        def listens():
            assert process.poll() is None, f"{command[0]} ended with status {process.returncode}"
            # As its own network namespace has it, if it has one.
            sockets = [line.split() for line in pathlib.Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
            return any(each[1] == place and each[3] == "0A" for each in sockets)

        eventually(listens, f"{command[0]} to listen", 10)
        return Server(process, host, port)


class Authority:
    """Signs certificates as docs/NETWORK.md shows, in a directory of its own."""

    CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def __init__(self, directory):
        directory.mkdir()
        self.directory, self.file = directory, directory / "ca.pem"
        self._make("-subj", f"/CN={directory.name}", "-days", "30", "-keyout", directory / "ca.key", "-out", self.file)

    def _make(self, *words):
        command = ["openssl", "req", "-x509", *self.CURVE, *map(str, words)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr

    def issue(self, name, alternative="IP:127.0.0.1"):
        """A certificate's file and its key's."""
        pem, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        by = ["-CA", self.file, "-CAkey", self.directory / "ca.key", "-addext", "basicConstraints=critical,CA:false"]
        self._make(*by, "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}", "-days", "3", "-keyout", key, "-out", pem)
        return pem, key


def answering(talk):
    """A server that accepts connections and gives each to `talk`: a context that yields its port."""

    @contextlib.contextmanager
    def serving():
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve():
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        connection.settimeout(5)
                        with connection, contextlib.suppress(OSError):
                            talk(connection)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            yield listener.getsockname()[1]
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)

    return serving()


class Proxy(threading.Thread):
    """Passes one connection at a time on to `port`, and resets it whenever it has carried `cut_bytes`: amid a frame."""

    def __init__(self, port, cut_bytes):
        super().__init__(daemon=True)
        self.to, self.cut_bytes, self.resets = port, cut_bytes, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.over = threading.Event()

    def run(self):
        self.listener.settimeout(0.1)
        while not self.over.is_set():
            with contextlib.suppress(OSError):
                client, _ = self.listener.accept()
                with client, socket.create_connection(("127.0.0.1", self.to)) as server:
                    self._carry(client, server)

    def _carry(self, client, server):
        left = self.cut_bytes
        others = {client: server, server: client}
        for stream in others:
            # Otherwise each waits for the other side's delayed acknowledgements, 40 ms a time.
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while left and not self.over.is_set():
            for stream in select.select([client, server], [], [], 0.1)[0]:
                some = stream.recv(min(left, 1 << 16))
                if not some:
                    return
                others[stream].sendall(some)
                left -= len(some)
        for stream in others:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.resets += left == 0

    def end(self):
        """Ends all connections."""
        self.over.set()
        self.join()
        self.listener.close()


class Network:
    """Two network namespaces, each with its own address on a cable to the other."""

    ADDRESSES = ("192.0.2.1", "192.0.2.2")

    def __init__(self):
        self.names = [f"spillway-{os.getpid()}-{side}" for side in "ab"]

    @staticmethod
    def _ip(*words):
        done = subprocess.run(["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def make(self):
        """Makes it; an `OSError` where that is not allowed."""
        for name in self.names:
            self._ip("netns", "add", name)
        here, there = self.names
        self._ip("-n", here, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", there)
        for name, address in zip(self.names, self.ADDRESSES):
            self._ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            self._ip("-n", name, "link", "set", "cable", "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    def within(self, side):
        """The command to run a program on one side, 0 or 1."""
        return ["ip", "netns", "exec", self.names[side]]

    def cut(self):
        """Pulls the cable."""
        self._ip("-n", self.names[0], "link", "set", "cable", "down")

    def mend(self):
        """Puts it in again."""
        self._ip("-n", self.names[0], "link", "set", "cable", "up")

    def remove(self):
        """Leaves nothing behind."""
        for name in self.names:
            with contextlib.suppress(OSError):
                self._ip("netns", "delete", name)


class Star(Network):
    """So many network namespaces; the first has a cable to each of the others."""

    def __init__(self, count):
        self.names = [f"spillway-{os.getpid()}-{at}" for at in range(count)]

    @staticmethod
    def address(at):
        """Of a namespace, on its cable."""
        return f"192.0.2.{10 + at}"

    def make(self):
        for name in self.names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        hub = self.names[0]
        for at, name in list(enumerate(self.names))[1:]:
            self._ip("-n", hub, "link", "add", f"cable{at}", "type", "veth", "peer", "name", "cable", "netns", name)
            self._ip("-n", name, "address", "add", f"{self.address(at)}/32", "peer", self.address(0), "dev", "cable")
            self._ip("-n", hub, "address", "add", f"{self.address(0)}/32", "peer", self.address(at), "dev", f"cable{at}")
            self._ip("-n", name, "link", "set", "cable", "up")
            self._ip("-n", hub, "link", "set", f"cable{at}", "up")

    def cut(self, at):
        """Pulls the cable of one; its own end stays up, as where a switch fails."""
        self._ip("-n", self.names[at], "link", "set", "cable", "down")

    def mend(self, at):
        """Puts it in again."""
        self._ip("-n", self.names[at], "link", "set", "cable", "up")
