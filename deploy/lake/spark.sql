-- The tables of redeliver-lake, for Spark with Delta Lake. Replace LAKE by lake.location, with s3a:// instead of s3://:
--
--   cat spark.sql views.sql | sed "s|LAKE|/data/lake|" > lake.sql && spark-sql -f lake.sql
CREATE TABLE IF NOT EXISTS attempts USING delta LOCATION 'LAKE/attempts';
CREATE TABLE IF NOT EXISTS outcomes USING delta LOCATION 'LAKE/outcomes';
CREATE TABLE IF NOT EXISTS dead_letters USING delta LOCATION 'LAKE/dead_letters';
CREATE TABLE IF NOT EXISTS decisions USING delta LOCATION 'LAKE/decisions';
CREATE TABLE IF NOT EXISTS jobs USING delta LOCATION 'LAKE/jobs';
CREATE TABLE IF NOT EXISTS audit USING delta LOCATION 'LAKE/audit';
CREATE TABLE IF NOT EXISTS gaps USING delta LOCATION 'LAKE/gaps';
