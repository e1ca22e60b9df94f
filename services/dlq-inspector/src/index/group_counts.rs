//! Groups of dead letters with the same [`crate::fingerprint`], which the writer keeps up to date with the rows.
//!
//! For each group, there is the number of its dead letters. For each group, topic and state, there is a count with the times of the first and the last dead letter; for each group, topic and
//! hour of the last day, a count for the trend. A group exists as long as it has dead letters. When its first or last one is removed or changes its state, the next
//! one is found with the full-text index, which returns rows in the order of time. The search is bounded, so that the first or last time may
//! be one before or after all counted dead letters if most of the group in the topic are in other states.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;

use redeliver_core::Timestamp;
use rusqlite::{Connection, OptionalExtension as _};

use super::sql::{SLICE_ROWS, sql_limit};
use super::texts::{TextTable, Texts};
use super::{row_key, terms};

pub(super) const CREATE: &str = "
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, pipeline_id INTEGER NOT NULL, error_class_id INTEGER NOT NULL,
    error_code_id INTEGER NOT NULL, template TEXT NOT NULL, count INTEGER NOT NULL DEFAULT 0
);
-- Ids are compared as numbers without a sign.
CREATE INDEX groups_by_count ON groups (count, id < 0);
CREATE TABLE group_counts (
    group_id INTEGER NOT NULL, topic_id INTEGER NOT NULL, state INTEGER NOT NULL,
    count INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    PRIMARY KEY (group_id, topic_id, state)
) WITHOUT ROWID;
CREATE INDEX group_counts_by_first ON group_counts (first);
CREATE INDEX group_counts_by_last ON group_counts (last);
CREATE TABLE group_hours (
    group_id INTEGER NOT NULL, topic_id INTEGER NOT NULL, hour INTEGER NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (group_id, topic_id, hour)
) WITHOUT ROWID;
CREATE INDEX group_hours_by_hour ON group_hours (hour);
";

const HOUR: i64 = 3_600_000;
/// The maximum number of dead letters of a group that are read for the next first or last one, or for a sample: those of other states may be
/// millions.
const SCANNED: usize = 1_000;
/// The number of hours of a trend.
pub(super) const TREND_HOURS: i64 = 24;

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Counted {
    pub(super) group_id: i64,
    pub(super) topic_id: i64,
    pub(super) state: i64,
}

/// A change of a count.
#[derive(Clone, Copy, Debug)]
struct Change {
    count: i64,
    added: Option<(i64, i64)>,
    removed: Option<(i64, i64)>,
}

/// Extends a range of times.
fn extend(range: &mut Option<(i64, i64)>, time: i64) {
    let (first, last) = range.unwrap_or((time, time));
    *range = Some((first.min(time), last.max(time)));
}

/// Changes of groups that are not stored yet.
#[derive(Debug, Default)]
pub(super) struct Changes {
    counts: HashMap<Counted, Change>,
    /// By group, topic and hour.
    hours: HashMap<(i64, i64, i64), i64>,
}

impl Changes {
    /// Adds `count` dead letters with the same time, which may be negative.
    pub(super) fn add(&mut self, counted: Counted, dead_at: i64, count: i64) {
        let change = self.counts.entry(counted).or_insert(Change {
            count: 0,
            added: None,
            removed: None,
        });
        change.count += count;
        let range = if count > 0 {
            &mut change.added
        } else {
            &mut change.removed
        };
        extend(range, dead_at);
        *self
            .hours
            .entry((counted.group_id, counted.topic_id, hour(dead_at)))
            .or_default() += count;
    }

    /// Stores the changes, after those of the rows and of the full-text index, and clears them.
    pub(super) fn store(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let mut emptied = HashSet::new();
        // A dead letter that changes its state changes no number of a group.
        let mut changed: HashMap<i64, i64> = HashMap::new();
        for (counted, change) in self.counts.drain() {
            *changed.entry(counted.group_id).or_default() += change.count;
            if !store(connection, counted, change)? {
                emptied.insert(counted.group_id);
            }
        }
        for ((group_id, topic_id, hour), count) in self.hours.drain().filter(|(_, count)| *count != 0) {
            if count > 0 {
                connection
                    .prepare_cached(
                        "INSERT INTO group_hours (group_id, topic_id, hour, count) VALUES (?, ?, ?, ?) \
                         ON CONFLICT DO UPDATE SET count = count + excluded.count",
                    )?
                    .execute((group_id, topic_id, hour, count))?;
                continue;
            }
            // Unless the hour is forgotten.
            connection
                .prepare_cached(
                    "UPDATE group_hours SET count = count + ? WHERE group_id = ? AND topic_id = ? AND hour = ?",
                )?
                .execute((count, group_id, topic_id, hour))?;
            connection
                .prepare_cached(
                    "DELETE FROM group_hours WHERE group_id = ? AND topic_id = ? AND hour = ? AND count <= 0",
                )?
                .execute((group_id, topic_id, hour))?;
        }
        for (group_id, count) in changed.into_iter().filter(|(_, count)| *count != 0) {
            connection
                .prepare_cached("UPDATE groups SET count = count + ? WHERE id = ?")?
                .execute((count, group_id))?;
        }
        for group_id in emptied {
            connection
                .prepare_cached(
                    "DELETE FROM groups WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM group_counts WHERE group_id = ?1)",
                )?
                .execute([group_id])?;
        }
        Ok(())
    }
}

/// The hour of a time in milliseconds.
pub(super) const fn hour(time: i64) -> i64 {
    time.div_euclid(HOUR)
}

/// How many dead letters of each topic died in each of the last 24 hours, the current one last. A topic without any is missing.
pub(crate) type Trends = BTreeMap<String, Vec<u64>>;

/// Reads all trends.
pub(crate) fn trends(connection: &Connection, now: Timestamp) -> rusqlite::Result<Trends> {
    let last = hour(now.as_millis());
    let from = last - TREND_HOURS + 1;
    let mut texts = Texts::new(connection);
    let mut trends = Trends::new();
    let mut statement = connection.prepare_cached(
        "SELECT topic_id, hour, sum(count) AS count FROM group_hours WHERE hour BETWEEN ? AND ? GROUP BY topic_id, hour",
    )?;
    let mut rows = statement.query((from, last))?;
    while let Some(row) = rows.next()? {
        let topic = texts.text(TextTable::Texts, row.get("topic_id")?)?;
        let trend = trends
            .entry(topic)
            .or_insert_with(|| vec![0; usize::try_from(TREND_HOURS).unwrap_or_default()]);
        let index = usize::try_from(row.get::<_, i64>("hour")? - from).unwrap_or_default();
        if let Some(count) = trend.get_mut(index) {
            *count = row.get::<_, i64>("count")?.unsigned_abs();
        }
    }
    Ok(trends)
}

/// Removes some of the hours that are in no trend any more when this one has begun. After a long time without changes, there are many.
/// Returns whether there are more.
pub(super) fn forget_hours(connection: &Connection, hour: i64) -> rusqlite::Result<bool> {
    let forgotten: Vec<(i64, i64, i64)> = connection
        .prepare_cached("SELECT group_id, topic_id, hour FROM group_hours WHERE hour <= ? LIMIT ?")?
        .query_map((hour - TREND_HOURS, sql_limit(SLICE_ROWS)), |row| {
            Ok((row.get("group_id")?, row.get("topic_id")?, row.get("hour")?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    for key in &forgotten {
        connection
            .prepare_cached("DELETE FROM group_hours WHERE group_id = ? AND topic_id = ? AND hour = ?")?
            .execute(*key)?;
    }
    Ok(forgotten.len() == SLICE_ROWS)
}

/// Stores the change of a count. `false` if nothing is left to count.
fn store(connection: &Connection, counted: Counted, change: Change) -> rusqlite::Result<bool> {
    let Counted {
        group_id,
        topic_id,
        state,
    } = counted;
    let known: Option<(i64, i64, i64)> = connection
        .prepare_cached(
            "SELECT count, first, last FROM group_counts WHERE group_id = ? AND topic_id = ? AND state = ?",
        )?
        .query_row((group_id, topic_id, state), |row| {
            Ok((row.get("count")?, row.get("first")?, row.get("last")?))
        })
        .optional()?;
    let (known_count, mut range) =
        known.map_or((0, None), |(count, first, last)| (count, Some((first, last))));
    let count = known_count + change.count;
    for time in change.added.iter().flat_map(|(first, last)| [*first, *last]) {
        extend(&mut range, time);
    }
    let (true, Some((mut first, mut last))) = (count > 0, range) else {
        connection
            .prepare_cached("DELETE FROM group_counts WHERE group_id = ? AND topic_id = ? AND state = ?")?
            .execute((group_id, topic_id, state))?;
        return Ok(false);
    };
    if let Some((first_removed, last_removed)) = change.removed {
        // What is left begins and ends within the known range, which also limits the search.
        let (known_first, known_last) = (first, last);
        if first_removed <= first {
            let found = end(connection, counted, End::First, first)?.unwrap_or(first);
            first = found.clamp(known_first, known_last);
        }
        if last_removed >= last {
            let found = end(connection, counted, End::Last, last)?.unwrap_or(last);
            last = found.clamp(first, known_last);
        }
    }
    connection
        .prepare_cached(
            "INSERT OR REPLACE INTO group_counts (group_id, topic_id, state, count, first, last) VALUES (?, ?, ?, ?, ?, ?)",
        )?
        .execute((group_id, topic_id, state, count, first, last))?;
    Ok(true)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    First,
    Last,
}

impl End {
    /// The one of two times that is nearer to this end.
    fn outer(self, one: i64, other: i64) -> i64 {
        match self {
            Self::First => one.min(other),
            Self::Last => one.max(other),
        }
    }
}

/// The time of the first counted dead letter not before a time, or of the last one not after it. If there is none among as many dead
/// letters of the group as are read, the time up to which there is none, so that the next search continues there.
fn end(connection: &Connection, counted: Counted, end: End, time: i64) -> rusqlite::Result<Option<i64>> {
    let mut found: Option<(i64, i64)> = None;
    let mut searched = None;
    let of = (counted.group_id, counted.topic_id);
    scan(connection, &mut Texts::new(connection), of, end, time, |letter| {
        let bucket = row_key::bucket(Timestamp::from_millis(letter.dead_at));
        if found.is_some_and(|(_, of)| of != bucket) {
            return ControlFlow::Break(());
        }
        searched = Some(letter.dead_at);
        if letter.state == counted.state {
            // The rows of a bucket are in no particular order.
            let nearest = found.map_or(letter.dead_at, |(time, _)| end.outer(time, letter.dead_at));
            found = Some((nearest, bucket));
        }
        ControlFlow::Continue(())
    })?;
    Ok(found.map(|(time, _)| time).or(searched))
}

/// A dead letter of a group in a topic.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) state: i64,
    pub(super) dead_at: i64,
}

/// The dead letters of a group in a topic, in the order of time from one end, not beyond a time, and at most [`SCANNED`]. Those of other
/// topics are not read, because who asks may not see them.
pub(super) fn scan(
    connection: &Connection,
    texts: &mut Texts<'_>,
    (group_id, topic_id): (i64, i64),
    end: End,
    time: i64,
    mut each: impl FnMut(&Member) -> ControlFlow<()>,
) -> rusqlite::Result<()> {
    let (limit, order, row) = match end {
        End::First => (">=", "ASC", row_key::first(Timestamp::from_millis(time))),
        End::Last => ("<=", "DESC", row_key::last(Timestamp::from_millis(time))),
    };
    let term = terms::of_group(group_id, &texts.text(TextTable::Texts, topic_id)?);
    let sql = format!(
        "SELECT l.partition AS partition, l.offset AS offset, l.state AS state, l.dead_at AS dead_at \
         FROM terms CROSS JOIN letters l NOT INDEXED ON l.row = terms.rowid \
         WHERE terms MATCH ? AND terms.rowid {limit} ? AND l.group_id = ? AND l.topic_id = ? \
         ORDER BY terms.rowid {order} LIMIT {SCANNED}"
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query((term, row, group_id, topic_id))?;
    while let Some(row) = rows.next()? {
        let member = Member {
            partition: row.get("partition")?,
            offset: row.get("offset")?,
            state: row.get("state")?,
            dead_at: row.get("dead_at")?,
        };
        if each(&member).is_break() {
            break;
        }
    }
    Ok(())
}

/// What the dead letters of a group have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Definition<'t> {
    pub(super) id: i64,
    pub(super) pipeline_id: i64,
    pub(super) error_class_id: i64,
    pub(super) error_code_id: i64,
    pub(super) template: &'t str,
}

impl Definition<'_> {
    /// Stores a group, unless it exists. Returns whether it is new.
    pub(super) fn insert(&self, connection: &Connection) -> rusqlite::Result<bool> {
        let inserted = connection
            .prepare_cached(
                "INSERT INTO groups (id, pipeline_id, error_class_id, error_code_id, template) VALUES (?, ?, ?, ?, ?) \
                 ON CONFLICT DO NOTHING",
            )?
            .execute((
                self.id,
                self.pipeline_id,
                self.error_class_id,
                self.error_code_id,
                self.template,
            ))?;
        Ok(inserted > 0)
    }
}
