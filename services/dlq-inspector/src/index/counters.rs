//! Counts of dead letters by topic, error class, state and time, which the writer keeps up to date, so that statistics do not
//! read the dead letters.
//!
//! A counter exists on several levels: for all times, and for each hour, minute and second in which there are dead letters. A
//! count since a time adds whole hours, minutes and seconds, and reads dead letters of less than a second.

use std::collections::{BTreeMap, HashMap};

use redeliver_core::Timestamp;
use rusqlite::types::Value;
use rusqlite::{Connection, params_from_iter};

use super::sql::values;
use super::{group_counts, row_key};
use crate::filter::Condition;

pub(super) const CREATE: &str = "
CREATE TABLE counters (
    width INTEGER NOT NULL, bucket INTEGER NOT NULL, topic_id INTEGER NOT NULL, error_class_id INTEGER NOT NULL,
    state INTEGER NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (width, bucket, topic_id, error_class_id, state)
) WITHOUT ROWID;
";

/// The widths of the levels in milliseconds, each a multiple of the next one.
const WIDTHS: [i64; 3] = [3_600_000, 60_000, SECOND];
const SECOND: i64 = 1_000;
/// The width of the level for all times, whose only bucket is 0.
const ALL_TIMES: i64 = 0;

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Counted {
    pub(super) topic_id: i64,
    pub(super) error_class_id: i64,
    pub(super) state: i64,
}

/// Changes of counters that are not stored yet.
#[derive(Debug, Default)]
pub(super) struct Changes {
    by_second: HashMap<(Counted, i64), i64>,
    groups: group_counts::Changes,
}

impl Changes {
    /// Adds `count` dead letters of a group, which may be negative.
    pub(super) fn add(&mut self, counted: Counted, group_id: i64, dead_at: i64, count: i64) {
        let second = dead_at.div_euclid(SECOND);
        *self.by_second.entry((counted, second)).or_default() += count;
        let in_group = group_counts::Counted {
            group_id,
            topic_id: counted.topic_id,
            state: counted.state,
        };
        self.groups.add(in_group, dead_at, count);
    }

    /// Stores the changes, after those of the rows and of the full-text index, and clears them.
    pub(super) fn store(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let mut buckets: HashMap<(i64, i64, Counted), i64> = HashMap::new();
        for ((counted, second), count) in self.by_second.drain() {
            *buckets.entry((ALL_TIMES, 0, counted)).or_default() += count;
            for width in WIDTHS {
                let bucket = second.div_euclid(width / SECOND);
                *buckets.entry((width, bucket, counted)).or_default() += count;
            }
        }
        let mut add = connection.prepare_cached(
            "INSERT INTO counters (width, bucket, topic_id, error_class_id, state, count) VALUES (?, ?, ?, ?, ?, ?) \
             ON CONFLICT DO UPDATE SET count = count + excluded.count",
        )?;
        let mut remove_empty = connection.prepare_cached(
            "DELETE FROM counters WHERE width = ? AND bucket = ? AND topic_id = ? AND error_class_id = ? AND state = ? \
             AND count = 0",
        )?;
        // Changes that cancel out must not leave counters of 0: they would count as known topics.
        for ((width, bucket, counted), count) in buckets.into_iter().filter(|(_, count)| *count != 0) {
            let Counted {
                topic_id,
                error_class_id,
                state,
            } = counted;
            add.execute((width, bucket, topic_id, error_class_id, state, count))?;
            remove_empty.execute((width, bucket, topic_id, error_class_id, state))?;
        }
        self.groups.store(connection)
    }
}

/// The ids of the topics of all dead letters.
pub(super) fn topics(connection: &Connection) -> rusqlite::Result<Vec<i64>> {
    let sql = "SELECT DISTINCT topic_id FROM counters WHERE width = ? AND bucket = 0";
    let mut statement = connection.prepare_cached(sql)?;
    let ids = statement.query_map([ALL_TIMES], |row| row.get("topic_id"))?;
    ids.collect()
}

/// The number of dead letters of each topic, error class and state for which a condition holds. The condition may only refer to
/// the columns of [`Counted`], of the table `l`.
pub(super) fn totals(
    connection: &Connection,
    condition: &Condition,
) -> rusqlite::Result<Vec<(Counted, i64)>> {
    let sql = format!(
        "SELECT topic_id, error_class_id, state, count FROM counters l WHERE l.width = ? AND l.bucket = 0 AND l.count != 0 AND {}",
        condition.sql
    );
    let params = [Value::Integer(ALL_TIMES)]
        .into_iter()
        .chain(values(&condition.params));
    let mut statement = connection.prepare_cached(&sql)?;
    let totals = statement.query_map(params_from_iter(params), |row| {
        let counted = Counted {
            topic_id: row.get("topic_id")?,
            error_class_id: row.get("error_class_id")?,
            state: row.get("state")?,
        };
        Ok((counted, row.get("count")?))
    })?;
    totals.collect()
}

/// The number of dead letters of each topic since a time for which a condition holds, see [`totals`].
pub(super) fn since(
    connection: &Connection,
    condition: &Condition,
    time: Timestamp,
) -> rusqlite::Result<BTreeMap<i64, i64>> {
    let mut counts: BTreeMap<i64, i64> = BTreeMap::new();
    let mut add = |sql: &str, range: [i64; 4]| -> rusqlite::Result<()> {
        let params = range
            .map(Value::Integer)
            .into_iter()
            .chain(values(&condition.params));
        let mut statement = connection.prepare_cached(sql)?;
        let mut rows = statement.query(params_from_iter(params))?;
        while let Some(row) = rows.next()? {
            *counts.entry(row.get("topic_id")?).or_default() += row.get::<_, i64>("count")?;
        }
        Ok(())
    };
    let buckets = format!(
        "SELECT l.topic_id AS topic_id, sum(l.count) AS count FROM counters l \
         WHERE l.width = ? AND l.bucket > ? AND l.bucket <= ? AND l.count > ? AND {} GROUP BY l.topic_id",
        condition.sql
    );
    let time = time.as_millis();
    // Up to where the wider level, which comes first, has not counted.
    let mut end = i64::MAX;
    for width in WIDTHS {
        let partial = time.div_euclid(width);
        add(&buckets, [width, partial, end.div_euclid(width), 0])?;
        end = partial.saturating_mul(width).saturating_add(width - 1);
    }
    let letters = format!(
        "SELECT l.topic_id AS topic_id, count(*) AS count FROM letters l NOT INDEXED \
         WHERE l.row >= ? AND l.row <= ? AND l.dead_at >= ? AND l.dead_at <= ? AND {} GROUP BY l.topic_id",
        condition.sql
    );
    let rows = [time, end].map(Timestamp::from_millis);
    add(
        &letters,
        [row_key::first(rows[0]), row_key::last(rows[1]), time, end],
    )?;
    Ok(counts)
}
