"""SQLite with its database in memory: look-ups by key, most of them in a part of it; ranges; an aggregate now and then.

    tables.py ROWS QUERIES       about 700 bytes a row, with its index; prints one JSON object
"""

import json
import random
import sqlite3
import sys
import time
import zlib

rows, queries = int(sys.argv[1]), int(sys.argv[2])
dice = random.Random(5)
began = time.monotonic()
base = sqlite3.connect(":memory:")
base.execute("create table item (id integer primary key, code text, price real, body blob)")
base.executemany(
    "insert into item values (?, ?, ?, ?)",
    ((i, f"{i * 2654435761 % 4294967296:08x}", i % 997 / 7, dice.randbytes(250) + b"item %d " % i * 25) for i in range(rows)),
)
base.execute("create index by_code on item (code)")
built_s = time.monotonic() - began

began = time.monotonic()
check = 0
for step in range(queries):
    number = int(rows * dice.random() ** 4)
    if step % 1000 == 999:
        found = base.execute("select count(*), sum(price) from item where id between ? and ?", (number, number + rows // 20)).fetchall()
    elif step % 10 == 9:
        found = base.execute("select id, price, length(body) from item where id between ? and ?", (number, number + 40)).fetchall()
    else:
        found = base.execute("select id, body from item where code = ?", (f"{number * 2654435761 % 4294967296:08x}",)).fetchall()
    check = zlib.crc32(repr(found).encode(), check)
queried_s = time.monotonic() - began
print(json.dumps({"build_s": built_s, "query_s": queried_s, "check": check}))
