"""Gets and sets as a wiki asks a cache for its pages: popularity by Zipf's law, values of 6.4 KB on average.

    wiki.py redis|memcached SOCKET KEYS REQUESTS       prints one JSON object

Lim et al. (HPCA 2012, section 6) replayed such a trace of Wikipedia: 6.4 KB a value on average, gets, sets and adds. Sizes here
are log-normal around that, one request in ten is a set, and half of a value does not compress. Every value that comes back is
compared with what was set. One request at a time: its latency is the answer's.
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

    def get(self, key):
        self.stream.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\npage:%d\r\n" % (len(b"page:%d" % key), key))
        length = int(self.answers.readline()[1:])
        return self.answers.read(length + 2)[:-2] if length >= 0 else None


class Memcached:
    """Its text protocol."""

    def __init__(self, stream):
        self.stream, self.answers = stream, stream.makefile("rb")

    def set(self, key, held):
        self.stream.sendall(b"set page:%d 0 0 %d\r\n%s\r\n" % (key, len(held), held))
        return self.answers.readline() == b"STORED\r\n"

    def get(self, key):
        self.stream.sendall(b"get page:%d\r\n" % key)
        head = self.answers.readline()
        if head == b"END\r\n":
            return None
        held = self.answers.read(int(head.split()[3]) + 2)[:-2]
        self.answers.readline()
        return held


with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(path)
    cache = {"redis": Redis, "memcached": Memcached}[kind](stream)
    versions = [0] * keys
    wrong = sum(not cache.set(key, value(key, 0)) for key in range(keys))
    sums = list(itertools.accumulate((rank + 1) ** -0.99 for rank in range(keys)))
    dice = random.Random(3)
    times, check = [], 0
    for number in range(requests):
        # An odd multiplier scatters popular ranks over all keys.
        key = bisect.bisect_left(sums, dice.random() * sums[-1]) * 2654435761 % keys
        sets = dice.random() < 0.1
        versions[key] += sets
        held = value(key, versions[key])
        began = time.perf_counter()
        answer = cache.set(key, held) if sets else cache.get(key)
        times.append(time.perf_counter() - began)
        wrong += answer is not True if sets else answer != held
        check = zlib.crc32(b"%d" % len(held), check)
times.sort()
at = lambda share: 1e6 * times[min(len(times) - 1, int(share * len(times)))]
cdf = [[round(share / 1000, 3), round(at(share / 1000), 2)] for share in (*range(0, 1000, 20), 990, 995, 999)]
figures = {"requests_s": sum(times), "requests_per_s": len(times) / sum(times), "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999)}
print(json.dumps(figures | {"latency_us": cdf, "check": check, "wrong": wrong}))
sys.exit(wrong != 0)
