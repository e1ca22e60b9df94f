-- The tables of redeliver-lake, for DuckDB. Replace LAKE by lake.location:
--
--   cat duckdb.sql views.sql | sed "s|LAKE|/data/lake|" | duckdb lake.db
INSTALL delta;
LOAD delta;

CREATE OR REPLACE VIEW attempts AS SELECT * FROM delta_scan('LAKE/attempts');
CREATE OR REPLACE VIEW outcomes AS SELECT * FROM delta_scan('LAKE/outcomes');
CREATE OR REPLACE VIEW dead_letters AS SELECT * FROM delta_scan('LAKE/dead_letters');
CREATE OR REPLACE VIEW decisions AS SELECT * FROM delta_scan('LAKE/decisions');
CREATE OR REPLACE VIEW jobs AS SELECT * FROM delta_scan('LAKE/jobs');
CREATE OR REPLACE VIEW audit AS SELECT * FROM delta_scan('LAKE/audit');
CREATE OR REPLACE VIEW gaps AS SELECT * FROM delta_scan('LAKE/gaps');
