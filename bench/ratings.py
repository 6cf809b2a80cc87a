"""An analytics job in DuckDB: ratings of films, of which some get far more than others, as some viewers give more; asked about in SQL.

    ratings.py RATINGS [DIRECTORY]    some 50 bytes a rating; prints one JSON object; DuckDB may be in the directory
"""

import json
import sys
import time
import zlib

sys.path += sys.argv[2:]
import duckdb  # noqa: E402

ratings = int(sys.argv[1])
viewers, films = max(1, ratings // 40), max(1, ratings // 200)
# One thread, as a share of two CPUs would be chance. And no limit of its own: within a memory cgroup it would take four fifths of the
# cgroup's, and keep the rest in files, where it is the kernel's swap that is to be compared.
db = duckdb.connect(":memory:", config={"threads": 1, "memory_limit": "1TB", "temp_directory": ""})

began = time.monotonic()
db.execute(f"""
    CREATE TABLE films AS
    SELECT i::INTEGER AS film, 'film number ' || i AS title, (hash(i) % 18)::UTINYINT AS genre FROM range({films}) t(i)""")
db.execute(f"""
    CREATE TABLE ratings AS
    SELECT floor(pow((hash(i) % 1000003) / 1000003, 2) * {viewers})::INTEGER AS viewer,
           floor(pow((hash(i + {ratings}) % 1000003) / 1000003, 3) * {films})::INTEGER AS film,
           (1 + hash(i * 7 + 1) % 10)::UTINYINT AS stars,
           (16436 + hash(i * 13 + 5) % 3650)::INTEGER AS day
    FROM range({ratings}) t(i)""")
built_s = time.monotonic() - began

QUERIES = [
    # The best of what many have seen.
    """SELECT title, sum(stars), count(*) FROM ratings JOIN films USING (film) GROUP BY title HAVING count(*) >= 20
       ORDER BY sum(stars) / count(*) DESC, title LIMIT 100""",
    # How taste changes.
    "SELECT genre, day // 365 AS year, sum(stars), count(*) FROM ratings JOIN films USING (film) GROUP BY ALL ORDER BY ALL",
    # What each viewer likes best, by how many it is liked best.
    """SELECT genre, count(*) FROM (
           SELECT viewer, genre, row_number() OVER (PARTITION BY viewer ORDER BY sum(stars) DESC, genre) AS place
           FROM ratings JOIN films USING (film) GROUP BY viewer, genre) WHERE place = 1 GROUP BY genre ORDER BY genre""",
    # What is liked by who likes something else.
    """SELECT a.film, b.film, count(*) FROM ratings a JOIN ratings b ON a.viewer = b.viewer AND a.film < b.film
       WHERE a.viewer % 16 = 0 AND a.stars >= 9 AND b.stars >= 9 GROUP BY ALL ORDER BY 3 DESC, 1, 2 LIMIT 100""",
    "SELECT viewer, stars, day FROM ratings ORDER BY day, viewer, stars LIMIT 1000 OFFSET 100000",
]
began = time.monotonic()
told = [db.execute(query).fetchall() for _ in range(2) for query in QUERIES]
asked_s = time.monotonic() - began
((limit,),) = db.execute("SELECT current_setting('memory_limit')").fetchall()
check = zlib.crc32(json.dumps(told).encode())
print(json.dumps({"build_s": built_s, "query_s": asked_s, "memory_limit": limit, "check": check}))
