"""Gets, sets and adds as a wiki asks a cache for its pages: popularity by Zipf's law, values of 6.4 KB on average.

    wiki.py redis|memcached SOCKET KEYS REQUESTS       prints one JSON object

Lim et al. (HPCA 2012, section 6) replayed such a trace of Wikipedia: 6.4 KB a value on average, gets, sets and adds. Sizes here
are log-normal around that, one request in ten is a set, one in fifty adds a page that was not there (and every other time
finds that it is), and half of a value does not compress. Every value that comes back is compared with what was set. One request
at a time: its latency is the answer's. Then as many again, of which sixteen gets at a time are asked without waiting, with two
sets in between: how many of these are answered a second is told apart.
"""

import bisect
import itertools
import json
import math
import random
import socket
import sys
import time
import zlib

kind, path, keys, requests = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
MEAN_BYTES, SIGMA, LARGEST_BYTES = 6400, 1.0, 100_000
AT_ONCE, SETS_BETWEEN = 16, 2
NOISE = random.Random(1).randbytes(1 << 20)
TEXT = b"== A heading == and some words of an article. " * 4000


def value(key, version):
    """What a key holds after so many sets: half noise, half text, of a length that is its own."""
    dice = random.Random(key)
    length = min(LARGEST_BYTES, int(dice.lognormvariate(math.log(MEAN_BYTES) - SIGMA**2 / 2, SIGMA)) + 64)
    at = (key * 7919 + version * 104729) % (len(NOISE) - length)
    return b"%d %d " % (key, version) + NOISE[at : at + length // 2] + TEXT[: length // 2]


class Redis:
    """Its protocol, as far as this needs it."""

    def __init__(self, stream):
        self.stream, self.answers = stream, stream.makefile("rb")

    def set(self, key, held):
        self.stream.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\npage:%d\r\n$%d\r\n%s\r\n" % (len(b"page:%d" % key), key, len(held), held))
        return self.answers.readline() == b"+OK\r\n"

    def add(self, key, held):
        """Whether it was not there before."""
        self.stream.sendall(b"*3\r\n$5\r\nSETNX\r\n$%d\r\npage:%d\r\n$%d\r\n%s\r\n" % (len(b"page:%d" % key), key, len(held), held))
        return {b":1\r\n": True, b":0\r\n": False}.get(self.answers.readline())

    def ask(self, keys):
        self.stream.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\npage:%d\r\n" % (len(b"page:%d" % key), key) for key in keys))

    def answer(self):
        length = int(self.answers.readline()[1:])
        return self.answers.read(length + 2)[:-2] if length >= 0 else None


class Memcached:
    """Its text protocol."""

    def __init__(self, stream):
        self.stream, self.answers = stream, stream.makefile("rb")

    def set(self, key, held):
        self.stream.sendall(b"set page:%d 0 0 %d\r\n%s\r\n" % (key, len(held), held))
        return self.answers.readline() == b"STORED\r\n"

    def add(self, key, held):
        """Whether it was not there before."""
        self.stream.sendall(b"add page:%d 0 0 %d\r\n%s\r\n" % (key, len(held), held))
        return {b"STORED\r\n": True, b"NOT_STORED\r\n": False}.get(self.answers.readline())

    def ask(self, keys):
        self.stream.sendall(b"".join(b"get page:%d\r\n" % key for key in keys))

    def answer(self):
        head = self.answers.readline()
        if head == b"END\r\n":
            return None
        held = self.answers.read(int(head.split()[3]) + 2)[:-2]
        self.answers.readline()
        return held


def gets(cache, keys):
    """What keys hold, asked for together."""
    cache.ask(keys)
    return [cache.answer() for _ in keys]


with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(path)
    cache = {"redis": Redis, "memcached": Memcached}[kind](stream)
    versions = [0] * keys
    wrong = sum(not cache.set(key, value(key, 0)) for key in range(keys))
    sums = list(itertools.accumulate((rank + 1) ** -0.99 for rank in range(keys)))
    dice = random.Random(3)
    # An odd multiplier scatters popular ranks over all keys.
    popular = lambda: bisect.bisect_left(sums, dice.random() * sums[-1]) * 2654435761 % keys
    times, check, added = [], 0, 0
    for number in range(requests):
        key = popular()
        kind_of = dice.random()
        adds, sets = kind_of < 0.02, 0.02 <= kind_of < 0.12
        if adds and number % 2:
            key, added = keys + added, added + 1
        elif sets:
            versions[key] += 1
        held = value(key, versions[key] if key < keys else 0)
        began = time.perf_counter()
        answer = cache.add(key, held) if adds else cache.set(key, held) if sets else gets(cache, [key])[0]
        times.append(time.perf_counter() - began)
        wrong += answer != (key >= keys if adds else True if sets else held)
        check = zlib.crc32(b"%d" % len(held), check)
    wrong += sum(gets(cache, [key])[0] != value(key, 0) for key in range(keys, keys + added))
    together, together_s = 0, 0.0
    while together < requests:
        wanted, changed = [popular() for _ in range(AT_ONCE)], [popular() for _ in range(SETS_BETWEEN)]
        found = [value(key, versions[key]) for key in wanted]
        for key in changed:
            versions[key] += 1
        held = [value(key, versions[key]) for key in changed]
        began = time.perf_counter()
        came = gets(cache, wanted)
        done = [cache.set(*one) for one in zip(changed, held)]
        together_s += time.perf_counter() - began
        wrong += sum(one != other for one, other in zip(came, found)) + done.count(False)
        together += AT_ONCE + SETS_BETWEEN
times.sort()
at = lambda share: 1e6 * times[min(len(times) - 1, int(share * len(times)))]
cdf = [[round(share / 1000, 3), round(at(share / 1000), 2)] for share in (*range(0, 1000, 20), 990, 995, 999)]
rates = {"requests_s": sum(times), "requests_per_s": len(times) / sum(times), "together_per_s": together / together_s}
figures = {"p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}
print(json.dumps(rates | figures | {"latency_us": cdf, "added": added, "check": check, "wrong": wrong}))
sys.exit(wrong != 0)
