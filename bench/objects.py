"""A plain CPython workload with locality: a table of records, nine of ten look-ups in a tenth of it.

    objects.py RECORDS LOOKUPS       about 1 KiB a record; prints one JSON object
"""

import json
import random
import sys
import time
import zlib

records, lookups = int(sys.argv[1]), int(sys.argv[2])
dice = random.Random(11)
began = time.monotonic()
table = [{"number": i, "name": f"record {i}", "body": dice.randbytes(256) + b"%d" % i * 40} for i in range(records)]
built_s = time.monotonic() - began

began = time.monotonic()
check = 0
hot = records // 10
for step in range(lookups):
    record = table[dice.randrange(hot) if step % 10 else dice.randrange(records)]
    check = zlib.crc32(record["body"], check)
    if step % 5 == 0:
        record["name"] = f"record {record['number']} of step {step}"
looked_up_s = time.monotonic() - began
print(json.dumps({"build_s": built_s, "lookups_s": looked_up_s, "check": check}))
