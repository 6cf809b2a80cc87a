"""A plain CPython analytics job: columns of orders, filtered, grouped, joined with customers, and sorted.

    analytics.py ORDERS       about 100 bytes an order; prints one JSON object
"""

import array
import collections
import json
import random
import sys
import time
import zlib

orders = int(sys.argv[1])
customers = max(1, orders // 20)
dice = random.Random(3)
began = time.monotonic()
customer = array.array("l", (int(customers * dice.random() ** 2) for _ in range(orders)))
day = array.array("l", (i * 365 // orders for i in range(orders)))
amount = array.array("d", (dice.random() * 100 for _ in range(orders)))
names = {number: f"customer {number} of {dice.choice('ABCDEFGH')}" for number in range(customers)}
built_s = time.monotonic() - began

began = time.monotonic()
by_month = collections.defaultdict(float)
for when, how_much in zip(day, amount):
    by_month[when // 31] += how_much
spent = collections.defaultdict(float)
for who, how_much in zip(customer, amount):
    spent[who] += how_much
by_class = collections.defaultdict(float)
for who, how_much in spent.items():
    by_class[names[who][-1]] += how_much
last = {who: when for who, when in zip(customer, day) if when >= 180}
largest = sorted(range(orders), key=amount.__getitem__)[-1000:]
told = [sorted(by_month.items()), sorted(by_class.items()), len(last), sum(last.values()), [names[customer[i]] for i in largest]]
asked_s = time.monotonic() - began
print(json.dumps({"build_s": built_s, "query_s": asked_s, "check": zlib.crc32(json.dumps(told).encode())}))
