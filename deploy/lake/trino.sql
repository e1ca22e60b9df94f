-- The tables of redeliver-lake, for a catalog `delta` of Trino with delta.register-table-procedure.enabled=true. Replace LAKE by lake.location:
--
--   cat trino.sql views.sql | sed "s|LAKE|s3://bucket/redeliver|" > lake.sql && trino --catalog delta --schema redeliver --file lake.sql
CREATE SCHEMA IF NOT EXISTS delta.redeliver;
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'attempts', table_location => 'LAKE/attempts');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'outcomes', table_location => 'LAKE/outcomes');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'dead_letters', table_location => 'LAKE/dead_letters');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'decisions', table_location => 'LAKE/decisions');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'jobs', table_location => 'LAKE/jobs');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'audit', table_location => 'LAKE/audit');
CALL delta.system.register_table(schema_name => 'redeliver', table_name => 'gaps', table_location => 'LAKE/gaps');
