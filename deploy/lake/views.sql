-- Views and queries for DuckDB, Spark and Trino, after the file with the tables for the engine.

-- What happened to each record of a source, and when its next row was written (`ended_at`): it waits, has succeeded or is dead.
CREATE OR REPLACE VIEW history AS
SELECT *, row_number() OVER newest_first AS newest, lag(kafka_timestamp) OVER newest_first AS ended_at
FROM (
    SELECT 'waiting' AS state, pipeline, tier, origin_topic, origin_partition, origin_offset, origin_timestamp, retry_count,
        process_after, failed_at, error_class, error_code, error_message, error_template, expects_result,
        kafka_timestamp
    FROM attempts
    UNION ALL
    SELECT outcome, pipeline, NULL, origin_topic, origin_partition, origin_offset, origin_timestamp, retry_count,
        NULL, NULL, error_class, error_code, NULL, NULL, NULL, kafka_timestamp
    FROM outcomes
)
WHERE origin_topic IS NOT NULL
WINDOW newest_first AS (
    PARTITION BY pipeline, origin_topic, origin_partition, origin_offset
    ORDER BY kafka_timestamp DESC, state <> 'waiting' DESC, retry_count DESC
);

-- The newest row of each record. A success without a result leaves no row: then, the state of a record that is due is unknown.
CREATE OR REPLACE VIEW records AS
SELECT CASE WHEN state = 'waiting' AND NOT expects_result AND process_after < now() THEN 'unknown' ELSE state END AS state, pipeline, tier, origin_topic, origin_partition, origin_offset, origin_timestamp, retry_count, process_after, failed_at, error_class,
    error_code, error_message, error_template, kafka_timestamp
FROM history
WHERE newest = 1;

CREATE OR REPLACE VIEW waiting AS SELECT * FROM records WHERE state = 'waiting';

-- All waits, from a failure to the end of the next attempt, at any time. `ended_at` is null while a record waits.
CREATE OR REPLACE VIEW waits AS
SELECT pipeline, tier, origin_topic, origin_partition, origin_offset, origin_timestamp, retry_count, process_after, failed_at, error_class, error_code,
    error_message, error_template, kafka_timestamp AS began_at,
    CASE WHEN newest = 1 AND NOT expects_result AND process_after < now() THEN process_after ELSE ended_at END AS ended_at
FROM history
WHERE state = 'waiting';

-- The state of each dead letter.
CREATE OR REPLACE VIEW letters AS
SELECT letter.*, coalesce(decision.state, 'OPEN') AS state, decision.decided_at, decision.decided_by, decision.reason
FROM dead_letters letter
LEFT JOIN (
    SELECT *, row_number() OVER (
        PARTITION BY letter_topic, letter_partition, letter_offset ORDER BY kafka_timestamp DESC, kafka_offset DESC
    ) AS newest
    FROM decisions
) decision
ON decision.newest = 1 AND decision.letter_topic = letter.kafka_topic
    AND decision.letter_partition = letter.kafka_partition AND decision.letter_offset = letter.kafka_offset;

-- Queries:
--
-- How many records wait, have succeeded or are dead:
--   SELECT state, count(*) FROM records GROUP BY state ORDER BY state;
-- How much waits, how often it was tried, and when the next record is due:
--   SELECT count(*), avg(retry_count), max(retry_count), min(process_after) FROM waiting;
-- How much waited a day ago:
--   SELECT count(*), avg(retry_count), max(retry_count), min(process_after) FROM waits WHERE began_at <= now() - INTERVAL '1' DAY AND coalesce(ended_at > now() - INTERVAL '1' DAY, true);
-- The newest dead letters:
--   SELECT kafka_timestamp, pipeline, error_code, error_message FROM letters ORDER BY kafka_timestamp DESC LIMIT 20;
-- Errors by count:
--   SELECT error_template, count(*) FROM letters GROUP BY error_template ORDER BY 2 DESC;
-- Records that have failed often and wait for long:
--   SELECT * FROM waiting WHERE retry_count > 3 AND origin_timestamp < now() - INTERVAL '1' HOUR;
-- docs/lake-questions.md has more.
