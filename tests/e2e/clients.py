"""The few words of the Redis and memcached protocols that the tests speak, pipelined, over unix sockets."""

import socket

from harness import eventually


def connect(path, timeout=60):
    """A stream to a unix socket that a server is about to open."""

    def attempt():
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            stream.close()
            return None
        stream.settimeout(timeout)
        return stream

    return eventually(attempt, f"a server at {path}")


class Redis:
    """A Redis connection."""

    def __init__(self, path):
        self.stream = connect(path)
        self.reader = self.stream.makefile("rb")

    @staticmethod
    def encode(*words):
        """One command in wire format."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)

    def reply(self):
        """The next reply; an error reply is raised."""
        line = self.reader.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self.reader.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise AssertionError(f"redis answered {line!r}")

    def call(self, *words):
        """One command and its reply."""
        self.stream.sendall(self.encode(*words))
        return self.reply()

    def pipeline(self, commands, depth=64):
        """Sends commands `depth` at a time and yields their replies."""
        batch = []

        def flush():
            self.stream.sendall(b"".join(batch))
            for _ in batch:
                yield self.reply()
            batch.clear()

        for words in commands:
            batch.append(self.encode(*words))
            if len(batch) == depth:
                yield from flush()
        yield from flush()

    def info(self, field):
        """A field of INFO."""
        lines = self.call("INFO", "everything").decode().splitlines()
        return next(line.split(":", 1)[1] for line in lines if line.startswith(field + ":"))


class Memcached:
    """A memcached connection, text protocol."""

    def __init__(self, path):
        self.stream = connect(path)
        self.reader = self.stream.makefile("rb")

    def set_all(self, items, depth=64):
        """Stores (key, value) pairs and waits for every answer."""
        batch = []

        def flush():
            self.stream.sendall(b"".join(batch))
            for _ in batch:
                answer = self.reader.readline()
                assert answer == b"STORED\r\n", answer
            batch.clear()

        for key, value in items:
            batch.append(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
            if len(batch) == depth:
                flush()
        flush()

    def get_many(self, keys):
        """The values of up to a few hundred keys, as a dict."""
        self.stream.sendall(b"get " + b" ".join(keys) + b"\r\n")
        found = {}
        while (line := self.reader.readline()) != b"END\r\n":
            word, key, _flags, length = line.split()
            assert word == b"VALUE", line
            found[key] = self.reader.read(int(length) + 2)[:-2]
        return found

    def stat(self, name):
        """A number from `stats`."""
        self.stream.sendall(b"stats\r\n")
        value = None
        while (line := self.reader.readline()) != b"END\r\n":
            _, key, rest = line.split(None, 2)
            if key.decode() == name:
                value = int(rest)
        return value
