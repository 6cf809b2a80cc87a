"""Compression in memory: text in pieces of 1 MiB is compressed with zlib, twice, and unpacked and compared.

    pack.py MIB       prints one JSON object
"""

import json
import random
import sys
import time
import zlib

mib = int(sys.argv[1])
dice = random.Random(9)
words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))).encode() for _ in range(20000)]
one = b" ".join(dice.choices(words, weights=[1 / (rank + 1) for rank in range(len(words))], k=160_000))
began = time.monotonic()
pieces = []
for number in range(mib):
    at = number * 7919 % 9973
    pieces.append((b"%d " % number + one[at:] + one[:at])[: 1 << 20])
built_s = time.monotonic() - began

began = time.monotonic()
packed, wrong = [], 0
for _ in range(2):
    packed = [zlib.compress(piece, 1) for piece in pieces]
    wrong += sum(zlib.decompress(small) != piece for small, piece in zip(packed, pieces))
packed_s = time.monotonic() - began
print(json.dumps({"build_s": built_s, "pack_s": packed_s, "wrong": wrong, "check": zlib.crc32(b"".join(packed))}))
