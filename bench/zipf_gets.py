"""Reads keys from a Redis server over its socket, some far more often than others (Zipf, 0.99).

    zipf_gets.py SOCKET KEYS GETS       keys as redis-benchmark names them; prints one JSON object
"""

import bisect
import itertools
import json
import random
import socket
import sys
import time

path, keys, gets = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# Requests sent together: the server's time counts, not that of a client that waits for each.
TOGETHER = 16

sums = list(itertools.accumulate((rank + 1) ** -0.99 for rank in range(keys)))
dice = random.Random(3)
# An odd multiplier scatters popular ranks over all keys.
wanted = [bisect.bisect_left(sums, dice.random() * sums[-1]) * 2654435761 % keys for _ in range(gets)]
requests = [b"*2\r\n$3\r\nGET\r\n$16\r\nkey:%012d\r\n" % key for key in wanted]

with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(path)
    answers = stream.makefile("rb")
    check, times = 0, []
    for first in range(0, gets, TOGETHER):
        batch = requests[first : first + TOGETHER]
        began = time.monotonic()
        stream.sendall(b"".join(batch))
        for _ in batch:
            length = int(answers.readline()[1:])
            check += len(answers.read(length + 2)) if length >= 0 else -1
        times.append(time.monotonic() - began)
print(json.dumps({"gets_s": sum(times), "check": check}))
