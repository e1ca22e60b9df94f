"""Measures a Delta table that was written on this machine, with DuckDB.

    python lake_table.py TABLE

Prints, as JSON: its files, its rows, when they were committed after Kafka had their records (percentiles in milliseconds), and how long a query takes."""

import json
import os
import pathlib
import statistics
import sys
import time

import duckdb
import duckdb_extension_delta

table = sys.argv[1]
extension = next(pathlib.Path(duckdb_extension_delta.__file__).parent.glob("**/*.duckdb_extension"))
duck = duckdb.connect()
duck.execute(f"LOAD '{extension}'")

# A row is visible once the entry of its file is in the log.
added, live = [], set()
for entry in sorted(pathlib.Path(table, "_delta_log").glob("*.json")):
    visible = os.stat(entry).st_mtime_ns / 1e6
    for action in map(json.loads, entry.read_text().splitlines()):
        if add := action.get("add"):
            path = f"{table}/{add['path']}"
            live.add(path)
            if add["dataChange"]:
                added.append((path, visible))
        if remove := action.get("remove"):
            live.discard(f"{table}/{remove['path']}")
duck.execute("CREATE TABLE added (filename VARCHAR, visible DOUBLE)")
duck.executemany("INSERT INTO added VALUES (?, ?)", added)
present = [path for path, _ in added if os.path.exists(path)]
lateness = duck.execute(
    "SELECT quantile_cont(visible - epoch_ms(kafka_timestamp), [0.5, 0.99, 1.0]) FROM read_parquet(?, filename = true) JOIN added USING (filename)",
    [present],
).fetchone()[0]

query = f"""
SELECT error_code, tier, count(*) AS waits, sum(epoch(process_after - failed_at)) / 3600 AS hours
FROM delta_scan('{table}') WHERE day >= current_date - 30 GROUP BY ALL"""
times = []
for _ in range(7):
    started = time.monotonic()
    rows = sum(row[2] for row in duck.execute(query).fetchall())
    times.append((time.monotonic() - started) * 1e3)
print(json.dumps({"files": len(live), "rows": rows, "lateness_ms": lateness, "query_ms": statistics.median(times)}))
