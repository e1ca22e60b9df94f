"""Reads tables with DuckDB, delta-rs and Polars again and again, until a file exists.

    python readers.py LAKE SQL QUESTIONS END PAST TABLE...

No row may be there twice, and no row may disappear. Prints, as JSON, how many rows of each table each of them has read at the end, and what the queries
have answered: those in the comments of SQL/views.sql, which are printed, too, and those in QUESTIONS, a page of Markdown. PAST replaces
the time a day ago."""

import json
import pathlib
import sys

import deltalake
import duckdb
import duckdb_extension_delta
import polars

lake, sql, questions, end, past, *tables = sys.argv[1:]
columns = ["kafka_topic", "kafka_topic_id", "kafka_partition", "kafka_offset"]
# Of `gaps`, whose rows are about several tables.
names = {"gaps": [*columns, "table_name"]}

extension = next(pathlib.Path(duckdb_extension_delta.__file__).parent.glob("**/*.duckdb_extension"))
duck = duckdb.connect()
duck.execute(f"LOAD '{extension}'")


def with_duckdb(path, columns):
    return duck.execute(f"SELECT {','.join(columns)} FROM delta_scan('{path}')").fetchall()


def with_delta_rs(path, columns):
    table = deltalake.DeltaTable(path)
    query = f"SELECT {','.join(columns)} FROM rows"
    batches = deltalake.QueryBuilder().register("rows", table).execute(query)
    return [row for batch in batches for row in polars.DataFrame(batch).rows()]


def with_polars(path, columns):
    return polars.read_delta(path, columns=columns).rows()


readers = {"duckdb": with_duckdb, "delta-rs": with_delta_rs, "polars": with_polars}
seen = {table: set() for table in tables}


def read_all():
    counts = {}
    for table in tables:
        for reader, read in readers.items():
            rows = read(f"{lake}/{table}", names.get(table, columns))
            distinct = set(rows)
            assert len(distinct) == len(rows), f"{reader} reads rows of {table} twice"
            assert seen[table] <= distinct, f"{reader} lacks rows of {table}"
            seen[table] = distinct
            counts[f"{table} {reader}"] = len(rows)
    return counts


rounds = 0
while not pathlib.Path(end).exists():
    read_all()
    rounds += 1
    print(f"round {rounds}", flush=True)
counts = read_all()


def statements(engine):
    return pathlib.Path(sql, f"{engine}.sql").read_text()


for engine in ["duckdb", "spark", "trino"]:
    assert all(f"'LAKE/{table}'" in statements(engine) for table in tables), engine
lines = (statements("duckdb") + statements("views")).replace("LAKE", lake).splitlines()
duck.execute("\n".join(line for line in lines if line not in ("INSTALL delta;", "LOAD delta;")))
queries = {}
for section in pathlib.Path(questions).read_text().split("\n## ")[1:]:
    queries[section.splitlines()[0]] = section.split("```sql\n")[1].split(";\n```")[0]
question = None
for line in lines:
    if line.startswith("--   SELECT"):
        queries[question] = line[2:].strip(" ;").replace("now() - INTERVAL '1' DAY", past)
    elif line.startswith("-- "):
        question = line[3:].rstrip(":")
answers = {
    question: duck.execute(f"SELECT coalesce(CAST(COLUMNS(*) AS VARCHAR), 'NULL') FROM ({query})").fetchall()
    for question, query in queries.items()
}
print(json.dumps({"counts": counts, "queries": queries, "answers": answers}))
