"""SQLite with its database in memory: look-ups by key, most of them in a part of it; ranges; an aggregate now and then; and, one
step in five, an order: a transaction that reads an item, lowers its stock and writes what was bought.

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
base = sqlite3.connect(":memory:", isolation_level=None)
base.execute("create table item (id integer primary key, code text, price real, stock integer, body blob)")
base.execute("create table sale (id integer primary key, item integer, price real, note text)")
base.execute("begin")
base.executemany(
    "insert into item values (?, ?, ?, 1000, ?)",
    ((i, f"{i * 2654435761 % 4294967296:08x}", i % 997 / 7, dice.randbytes(250) + b"item %d " % i * 25) for i in range(rows)),
)
base.execute("commit")
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
    elif step % 5 == 3:
        base.execute("begin immediate")
        found = base.execute("select price, stock from item where id = ?", (number,)).fetchall()
        base.execute("update item set stock = stock - 1 where id = ?", (number,))
        base.execute("insert into sale (item, price, note) values (?, ?, ?)", (number, found[0][0], f"sale {step} of {number}"))
        base.execute("commit")
    else:
        found = base.execute("select id, body from item where code = ?", (f"{number * 2654435761 % 4294967296:08x}",)).fetchall()
    check = zlib.crc32(repr(found).encode(), check)
queried_s = time.monotonic() - began
# What was sold is what is missing, item by item.
sold = "select item, count(*) as pieces from sale group by item"
missing = f"select count(*) from item left join ({sold}) on item = id where stock != 1000 - coalesce(pieces, 0)"
wrong = base.execute(missing).fetchone()[0]
print(json.dumps({"build_s": built_s, "query_s": queried_s, "check": check, "wrong": wrong}))
