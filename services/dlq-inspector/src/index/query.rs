//! What is asked of the index.

use std::collections::BTreeMap;

use bytes::Bytes;
use redeliver_core::Timestamp;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, Row, params, params_from_iter};

use super::schema;
use super::schema::means;
use crate::filter::{Condition, Expr, Param};
use crate::id::LetterId;
use crate::ledger::State;
use crate::letter::ContentHash;

/// A dead letter as the index has it: everything but its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number in the order of arrival.
    pub row: i64,
    /// Where it stands.
    pub id: LetterId,
    /// When it was written there.
    pub dead_at: Timestamp,
    /// What was done with it.
    pub state: State,
    /// When that was set, by whom and why.
    pub state_time: Option<Timestamp>,
    /// Who set it.
    pub state_by: String,
    /// Why.
    pub state_note: String,
    /// The number of its [`crate::dialect::Dialect`].
    pub dialect: i32,
    /// See [`crate::dialect::Facts`].
    pub pipeline: String,
    /// See [`crate::dialect::Facts`].
    pub error_class: String,
    /// See [`crate::dialect::Facts`].
    pub error_code: String,
    /// See [`crate::dialect::Facts`].
    pub error_message: String,
    /// See [`crate::dialect::Facts`].
    pub failed_at: Option<Timestamp>,
    /// See [`crate::dialect::Facts`].
    pub retry_count: u32,
    /// Empty: not known.
    pub origin_topic: String,
    /// See [`crate::dialect::Facts`].
    pub origin_partition: Option<i32>,
    /// See [`crate::dialect::Facts`].
    pub origin_offset: Option<i64>,
    /// See [`crate::dialect::Facts`].
    pub origin_timestamp: Option<Timestamp>,
    /// Empty: none.
    pub job_id: String,
    /// Empty: none.
    pub trace_id: String,
    /// `None`: a null value.
    pub value_size: Option<u64>,
    /// See [`ContentHash`].
    pub content: ContentHash,
    /// The record's key.
    pub key: Option<Bytes>,
    /// The headers, see [`crate::header_list`].
    pub headers: Bytes,
}

/// In which order of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// The newest first.
    #[default]
    Descending,
    /// The oldest first.
    Ascending,
}

/// A place in the order of time, behind which a page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The time in milliseconds.
    pub dead_at: i64,
    /// Among those of the same time.
    pub row: i64,
}

impl Found {
    /// Where it stands in the order of time.
    #[must_use]
    pub fn place(&self) -> Place {
        Place {
            dead_at: self.dead_at.as_millis(),
            row: self.row,
        }
    }
}

const COLUMNS: &str = "l.row, (SELECT text FROM texts WHERE id = l.topic), l.partition, l.offset, l.dead_at, l.state, \
    g.time, coalesce(g.who, ''), coalesce(g.note, ''), l.dialect, \
    (SELECT text FROM texts WHERE id = l.pipeline), (SELECT text FROM texts WHERE id = l.error_class), \
    (SELECT text FROM texts WHERE id = l.error_code), l.error_message, l.failed_at, l.retry_count, \
    (SELECT text FROM texts WHERE id = l.origin_topic), l.origin_partition, l.origin_offset, l.origin_timestamp, \
    l.job_id, l.trace_id, l.value_size, l.content, b.key, b.headers";

/// `CROSS JOIN` keeps the order: the narrow table `letters` first, these for rows that are left.
const BESIDE: &str = concat!(
    "CROSS JOIN bodies b ON b.row = l.row LEFT JOIN ledger g \
     ON g.topic = l.topic AND g.partition = l.partition AND g.offset = l.offset AND ",
    means!(entry: "g.content", "g.time", letter: "l.content", "l.dead_at")
);

fn found(row: &Row<'_>) -> rusqlite::Result<Found> {
    let time = |index| {
        row.get(index)
            .map(|millis: Option<i64>| millis.map(Timestamp::from_millis))
    };
    let state: i64 = row.get(5)?;
    let size: Option<i64> = row.get(22)?;
    Ok(Found {
        row: row.get(0)?,
        id: LetterId {
            topic: row.get(1)?,
            partition: row.get(2)?,
            offset: row.get(3)?,
        },
        dead_at: Timestamp::from_millis(row.get(4)?),
        state: State::from_number(state).unwrap_or_default(),
        state_time: time(6)?,
        state_by: row.get(7)?,
        state_note: row.get(8)?,
        dialect: row.get(9)?,
        pipeline: row.get(10)?,
        error_class: row.get(11)?,
        error_code: row.get(12)?,
        error_message: row.get(13)?,
        failed_at: time(14)?,
        retry_count: row.get(15)?,
        origin_topic: row.get(16)?,
        origin_partition: row.get(17)?,
        origin_offset: row.get(18)?,
        origin_timestamp: time(19)?,
        job_id: row.get(20)?,
        trace_id: row.get(21)?,
        value_size: size.and_then(|size| u64::try_from(size).ok()),
        content: row.get(23)?,
        key: row.get::<_, Option<Vec<u8>>>(24)?.map(Bytes::from),
        headers: row.get::<_, Vec<u8>>(25)?.into(),
    })
}

fn condition(connection: &Connection, filter: &Expr) -> rusqlite::Result<Condition> {
    let mut lookup = connection.prepare_cached("SELECT id FROM texts WHERE text = ?")?;
    let lookup = std::cell::RefCell::new(&mut lookup);
    let failure = std::cell::RefCell::new(None);
    let condition = Condition::of(filter, &|text| {
        let answer = lookup.borrow_mut().query_row([text], |row| row.get(0)).optional();
        answer.unwrap_or_else(|error| {
            failure.replace(Some(error));
            None
        })
    });
    match failure.into_inner() {
        Some(error) => Err(error),
        None => Ok(condition),
    }
}

fn values(params: Vec<Param>) -> impl Iterator<Item = Value> {
    params.into_iter().map(|param| match param {
        Param::Integer(number) => Value::Integer(number),
        Param::Text(text) => Value::Text(text),
        Param::Blob(bytes) => Value::Blob(bytes),
    })
}

/// Rows that were asked for, and whether there are more.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) found: Vec<Found>,
    pub(crate) has_more: bool,
}

/// How many bytes of keys and headers, which are anybody's, are read at once, about.
const PART_BYTES: usize = 4 << 20;

impl Part {
    /// Takes rows until there are `limit`, or until they are too large together. `rows` gives one more than
    /// the limit if there is one.
    fn take(rows: impl Iterator<Item = rusqlite::Result<Found>>, limit: usize) -> rusqlite::Result<Self> {
        let mut part = Self::default();
        let mut bytes = 0;
        for row in rows {
            if part.found.len() == limit || bytes >= PART_BYTES {
                part.has_more = true;
                break;
            }
            let row = row?;
            bytes += row.headers.len() + row.key.as_ref().map_or(0, Bytes::len);
            part.found.push(row);
        }
        Ok(part)
    }
}

/// A page in the order of time.
pub(crate) fn list(
    connection: &Connection,
    filter: &Expr,
    direction: Direction,
    behind: Option<Place>,
    limit: usize,
) -> rusqlite::Result<Part> {
    let condition = condition(connection, filter)?;
    let (order, beyond) = match direction {
        Direction::Descending => ("DESC", "<"),
        Direction::Ascending => ("ASC", ">"),
    };
    let mut values: Vec<Value> = values(condition.params).collect();
    let mut place = String::new();
    if let Some(behind) = behind {
        // The first part lets an index be used, the second is exact.
        place = format!(" AND l.dead_at {beyond}= ? AND (l.dead_at {beyond} ? OR l.row {beyond} ?)");
        values.extend([behind.dead_at, behind.dead_at, behind.row].map(Value::Integer));
    }
    values.push(one_more(limit));
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l {BESIDE} WHERE {}{place} ORDER BY l.dead_at {order}, l.row {order} LIMIT ?",
        condition.sql
    );
    let mut statement = connection.prepare_cached(&sql)?;
    Part::take(statement.query_map(params_from_iter(values), found)?, limit)
}

/// In the order of arrival: what has come behind a row, up to another one.
pub(crate) fn since(
    connection: &Connection,
    filter: &Expr,
    behind: i64,
    up_to: i64,
    limit: usize,
) -> rusqlite::Result<Part> {
    let condition = condition(connection, filter)?;
    let mut values: Vec<Value> = values(condition.params).collect();
    values.extend([behind, up_to].map(Value::Integer));
    values.push(one_more(limit));
    // An index would be looked through as a whole for a few rows at its end.
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l NOT INDEXED {BESIDE} WHERE {} AND l.row > ? AND l.row <= ? ORDER BY l.row LIMIT ?",
        condition.sql
    );
    let mut statement = connection.prepare_cached(&sql)?;
    Part::take(statement.query_map(params_from_iter(values), found)?, limit)
}

fn one_more(limit: usize) -> Value {
    Value::Integer(i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1))
}

/// One dead letter.
pub(crate) fn get(connection: &Connection, id: &LetterId) -> rusqlite::Result<Option<Found>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l {BESIDE} WHERE l.topic = (SELECT id FROM texts WHERE text = ?) \
         AND l.partition = ? AND l.offset = ?"
    );
    connection
        .prepare_cached(&sql)?
        .query_row(params![id.topic, id.partition, id.offset], found)
        .optional()
}

/// What there is of one topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicCounts {
    /// Those that wait for somebody.
    pub open: u64,
    /// All.
    pub total: u64,
    /// All that came since each of three times.
    pub since: [u64; 3],
    /// The oldest open one.
    pub oldest: Option<Timestamp>,
    /// The newest open one.
    pub newest: Option<Timestamp>,
    /// Open ones by error class.
    pub open_by_class: BTreeMap<String, u64>,
}

/// Counts by topic, of those that match.
pub(crate) fn counts(
    connection: &Connection,
    filter: &Expr,
    since: [Timestamp; 3],
) -> rusqlite::Result<BTreeMap<String, TopicCounts>> {
    let condition = condition(connection, filter)?;
    // Without a question about bodies an index answers alone.
    let bodies = if condition.sql.contains("b.") {
        " CROSS JOIN bodies b ON b.row = l.row"
    } else {
        ""
    };
    let sql = format!(
        "SELECT (SELECT text FROM texts WHERE id = l.topic), (SELECT text FROM texts WHERE id = l.error_class), l.state, \
         count(*), sum(l.dead_at >= ?), sum(l.dead_at >= ?), sum(l.dead_at >= ?), min(l.dead_at), max(l.dead_at) \
         FROM letters l{bodies} WHERE {} GROUP BY l.topic, l.error_class, l.state",
        condition.sql
    );
    let times = since.map(|time| Value::Integer(time.as_millis()));
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(
        times.into_iter().chain(values(condition.params)),
    ))?;
    let mut topics: BTreeMap<String, TopicCounts> = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let counts = topics.entry(row.get(0)?).or_default();
        let count = |index| row.get(index).map(|count: i64| count.unsigned_abs());
        let (class, state, total): (String, i64, u64) = (row.get(1)?, row.get(2)?, count(3)?);
        counts.total += total;
        for (index, lately) in counts.since.iter_mut().enumerate() {
            *lately += count(4 + index)?;
        }
        if State::from_number(state) == Some(State::Open) {
            let (oldest, newest): (i64, i64) = (row.get(7)?, row.get(8)?);
            let (oldest, newest) = (Timestamp::from_millis(oldest), Timestamp::from_millis(newest));
            counts.open += total;
            counts.oldest = Some(counts.oldest.map_or(oldest, |known| known.min(oldest)));
            counts.newest = counts.newest.max(Some(newest));
            *counts.open_by_class.entry(class).or_default() += total;
        }
    }
    Ok(topics)
}

/// Open dead letters by topic.
pub(crate) fn open_by_topic(connection: &Connection) -> rusqlite::Result<Vec<(String, i64)>> {
    connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = l.topic), sum(l.state = ?) FROM letters l GROUP BY l.topic",
        )?
        .query_map([State::Open as i64], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect()
}

/// How far a partition was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) next: i64,
}

/// How far each partition was read, and the number of the last row.
pub(crate) fn known(connection: &Connection) -> rusqlite::Result<(Vec<Known>, i64)> {
    let known = connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = p.topic), p.partition, p.next FROM positions p",
        )?
        .query_map((), |row| {
            Ok(Known {
                topic: row.get(0)?,
                partition: row.get(1)?,
                next: row.get(2)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    let next_row = schema::meta(connection, "next_row")?.unwrap_or(1);
    Ok((known, next_row - 1))
}

/// A record that is known to stand at an offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
    /// Its content.
    pub content: ContentHash,
}

/// The first and the last dead letter of each of a topic's partitions from `lows` on, to be compared with
/// what stands in Kafka.
pub(crate) fn samples(
    connection: &Connection,
    topic: &str,
    lows: &[(i32, i64)],
) -> rusqlite::Result<Vec<Sample>> {
    let mut samples: Vec<Sample> = Vec::new();
    for (partition, low) in lows {
        for order in ["ASC", "DESC"] {
            let sql = format!(
                "SELECT l.offset, l.content FROM letters l WHERE l.topic = (SELECT id FROM texts WHERE text = ?) \
                 AND l.partition = ? AND l.offset >= ? ORDER BY l.offset {order} LIMIT 1"
            );
            let sample = connection
                .prepare_cached(&sql)?
                .query_row(params![topic, partition, low], |row| {
                    Ok(Sample {
                        partition: *partition,
                        offset: row.get(0)?,
                        content: row.get(1)?,
                    })
                })
                .optional()?;
            samples.extend(sample.filter(|sample| !samples.contains(sample)));
        }
    }
    Ok(samples)
}
