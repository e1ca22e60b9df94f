//! Queries of the index.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, Row, params, params_from_iter};

use super::schema;
use super::schema::entry_applies;
use crate::filter::{Condition, Expr, Param};
use crate::id::LetterId;
use crate::ledger::State;
use crate::letter::ContentHash;

/// A dead letter as the index stores it: everything but its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedLetter {
    /// Its row number. Rows are numbered in the order in which they are indexed.
    pub row: i64,
    /// Its position in the dead-letter topic.
    pub id: LetterId,
    /// The timestamp of its record in the dead-letter topic.
    pub dead_at: Timestamp,
    /// Its state according to the ledger.
    pub state: State,
    /// When the state was set.
    pub state_time: Option<Timestamp>,
    /// Who set the state.
    pub state_by: String,
    /// Why the state was set.
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
    /// See [`crate::dialect::Facts`]; empty if unknown.
    pub origin_topic: String,
    /// See [`crate::dialect::Facts`].
    pub origin_partition: Option<i32>,
    /// See [`crate::dialect::Facts`].
    pub origin_offset: Option<i64>,
    /// See [`crate::dialect::Facts`].
    pub origin_timestamp: Option<Timestamp>,
    /// See [`crate::dialect::Facts`]; empty if there is none.
    pub job_id: String,
    /// See [`crate::dialect::Facts`]; empty if there is none.
    pub trace_id: String,
    /// The size of the value in bytes; `None` for a null value.
    pub value_size: Option<u64>,
    /// The hash of the record.
    pub content: ContentHash,
    /// The record's key.
    pub key: Option<Bytes>,
    /// The encoded headers, see [`crate::header_list`].
    pub headers: Bytes,
}

/// The order of a list by `dead_at`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Newest first.
    #[default]
    Descending,
    /// Oldest first.
    Ascending,
}

/// A point in a list, after which the next page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// `dead_at` of the last dead letter of a page, in milliseconds.
    pub dead_at: i64,
    /// Its row, which orders dead letters with the same `dead_at`.
    pub row: i64,
}

impl IndexedLetter {
    /// The cursor after this dead letter.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        Cursor {
            dead_at: self.dead_at.as_millis(),
            row: self.row,
        }
    }

    /// Reads a row with [`COLUMNS`].
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        let time = |column| {
            row.get(column)
                .map(|millis: Option<i64>| millis.map(Timestamp::from_millis))
        };
        let state: i64 = row.get("state")?;
        let value_size: Option<i64> = row.get("value_size")?;
        Ok(Self {
            row: row.get("row")?,
            id: LetterId {
                topic: row.get("topic")?,
                partition: row.get("partition")?,
                offset: row.get("offset")?,
            },
            dead_at: Timestamp::from_millis(row.get("dead_at")?),
            state: State::from_number(state).unwrap_or_default(),
            state_time: time("state_time")?,
            state_by: row.get("state_by")?,
            state_note: row.get("state_note")?,
            dialect: row.get("dialect")?,
            pipeline: row.get("pipeline")?,
            error_class: row.get("error_class")?,
            error_code: row.get("error_code")?,
            error_message: row.get("error_message")?,
            failed_at: time("failed_at")?,
            retry_count: row.get("retry_count")?,
            origin_topic: row.get("origin_topic")?,
            origin_partition: row.get("origin_partition")?,
            origin_offset: row.get("origin_offset")?,
            origin_timestamp: time("origin_timestamp")?,
            job_id: row.get("job_id")?,
            trace_id: row.get("trace_id")?,
            value_size: value_size.and_then(|size| u64::try_from(size).ok()),
            content: row.get("content")?,
            key: row.get::<_, Option<Vec<u8>>>("key")?.map(Bytes::from),
            headers: row.get::<_, Vec<u8>>("headers")?.into(),
        })
    }
}

/// The columns of an [`IndexedLetter`].
const COLUMNS: &str = "l.row AS row, (SELECT text FROM texts WHERE id = l.topic) AS topic, l.partition AS partition, \
    l.offset AS offset, l.dead_at AS dead_at, l.state AS state, g.time AS state_time, \
    coalesce(g.who, '') AS state_by, coalesce(g.note, '') AS state_note, l.dialect AS dialect, \
    (SELECT text FROM texts WHERE id = l.pipeline) AS pipeline, \
    (SELECT text FROM texts WHERE id = l.error_class) AS error_class, \
    (SELECT text FROM texts WHERE id = l.error_code) AS error_code, l.error_message AS error_message, \
    l.failed_at AS failed_at, l.retry_count AS retry_count, \
    (SELECT text FROM texts WHERE id = l.origin_topic) AS origin_topic, l.origin_partition AS origin_partition, \
    l.origin_offset AS origin_offset, l.origin_timestamp AS origin_timestamp, l.job_id AS job_id, \
    l.trace_id AS trace_id, l.value_size AS value_size, l.content AS content, b.key AS key, b.headers AS headers";

/// The tables that [`COLUMNS`] needs besides `letters`. `CROSS JOIN` fixes the join order: SQLite scans the narrow
/// table `letters` first and looks up the other tables only for the rows that match.
const JOINS: &str = concat!(
    "CROSS JOIN bodies b ON b.row = l.row LEFT JOIN ledger g \
     ON g.topic = l.topic AND g.partition = l.partition AND g.offset = l.offset AND ",
    entry_applies!(entry: "g.content", "g.time", letter: "l.content", "l.dead_at")
);

fn condition(connection: &Connection, filter: &Expr) -> rusqlite::Result<Condition> {
    let mut statement = connection.prepare_cached("SELECT id FROM texts WHERE text = ?")?;
    let statement = RefCell::new(&mut statement);
    // `Condition::of` is pure and cannot fail, so that the error of a lookup is passed around it.
    let failure = RefCell::new(None);
    let condition = Condition::of(filter, &|text| {
        let id = statement
            .borrow_mut()
            .query_row([text], |row| row.get("id"))
            .optional();
        id.unwrap_or_else(|error| {
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

/// One page of dead letters.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) letters: Vec<IndexedLetter>,
    pub(crate) has_more: bool,
}

/// A page ends once its keys and headers exceed this many bytes. Their size is up to the producers.
const PAGE_BYTES: usize = 4 << 20;

impl Page {
    /// Reads up to `limit` rows, or fewer if they are large. The query returns one row more than `limit` if there is
    /// one, see [`one_more`].
    fn read(
        rows: impl Iterator<Item = rusqlite::Result<IndexedLetter>>,
        limit: usize,
    ) -> rusqlite::Result<Self> {
        let mut page = Self::default();
        let mut bytes = 0;
        for letter in rows {
            if page.letters.len() == limit || bytes >= PAGE_BYTES {
                page.has_more = true;
                break;
            }
            let letter = letter?;
            bytes += letter.headers.len() + letter.key.as_ref().map_or(0, Bytes::len);
            page.letters.push(letter);
        }
        Ok(page)
    }
}

/// A page in the order of `dead_at`, beginning after a cursor.
pub(crate) fn list(
    connection: &Connection,
    filter: &Expr,
    direction: Direction,
    after: Option<Cursor>,
    limit: usize,
) -> rusqlite::Result<Page> {
    let condition = condition(connection, filter)?;
    let (order, comparison) = match direction {
        Direction::Descending => ("DESC", "<"),
        Direction::Ascending => ("ASC", ">"),
    };
    let mut values: Vec<Value> = values(condition.params).collect();
    let mut range = String::new();
    if let Some(after) = after {
        // The first comparison is redundant, but lets SQLite seek in an index on `dead_at`.
        range =
            format!(" AND l.dead_at {comparison}= ? AND (l.dead_at {comparison} ? OR l.row {comparison} ?)");
        values.extend([after.dead_at, after.dead_at, after.row].map(Value::Integer));
    }
    values.push(one_more(limit));
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l {JOINS} WHERE {}{range} ORDER BY l.dead_at {order}, l.row {order} LIMIT ?",
        condition.sql
    );
    let mut statement = connection.prepare_cached(&sql)?;
    Page::read(
        statement.query_map(params_from_iter(values), IndexedLetter::from_row)?,
        limit,
    )
}

/// A page in the order of row numbers: after row `after`, up to and including row `up_to`.
pub(crate) fn list_by_row(
    connection: &Connection,
    filter: &Expr,
    after: i64,
    up_to: i64,
    limit: usize,
) -> rusqlite::Result<Page> {
    let condition = condition(connection, filter)?;
    let mut values: Vec<Value> = values(condition.params).collect();
    values.extend([after, up_to].map(Value::Integer));
    values.push(one_more(limit));
    // With an index on a filtered column, SQLite would visit all matching rows to find the few in the range.
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l NOT INDEXED {JOINS} WHERE {} AND l.row > ? AND l.row <= ? ORDER BY l.row LIMIT ?",
        condition.sql
    );
    let mut statement = connection.prepare_cached(&sql)?;
    Page::read(
        statement.query_map(params_from_iter(values), IndexedLetter::from_row)?,
        limit,
    )
}

/// The limit of a query that also tells whether there are more rows.
fn one_more(limit: usize) -> Value {
    Value::Integer(i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1))
}

/// The dead letter with this id.
pub(crate) fn get(connection: &Connection, id: &LetterId) -> rusqlite::Result<Option<IndexedLetter>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM letters l {JOINS} WHERE l.topic = (SELECT id FROM texts WHERE text = ?) \
         AND l.partition = ? AND l.offset = ?"
    );
    connection
        .prepare_cached(&sql)?
        .query_row(
            params![id.topic, id.partition, id.offset],
            IndexedLetter::from_row,
        )
        .optional()
}

/// Counts of the dead letters of one topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicCounts {
    /// Open dead letters.
    pub open: u64,
    /// All dead letters.
    pub total: u64,
    /// All dead letters since each of the three requested times.
    pub since: [u64; 3],
    /// `dead_at` of the oldest open dead letter.
    pub oldest: Option<Timestamp>,
    /// `dead_at` of the newest open dead letter.
    pub newest: Option<Timestamp>,
    /// Open dead letters by error class.
    pub open_by_class: BTreeMap<String, u64>,
}

/// Counts of the dead letters of one topic, error class and state.
struct GroupCounts {
    topic: String,
    error_class: String,
    state: Option<State>,
    total: u64,
    since: [u64; 3],
    oldest: Timestamp,
    newest: Timestamp,
}

impl GroupCounts {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        let count = |column| row.get(column).map(|count: i64| count.unsigned_abs());
        Ok(Self {
            topic: row.get("topic")?,
            error_class: row.get("error_class")?,
            state: State::from_number(row.get("state")?),
            total: count("total")?,
            since: [count("since_0")?, count("since_1")?, count("since_2")?],
            oldest: Timestamp::from_millis(row.get("oldest")?),
            newest: Timestamp::from_millis(row.get("newest")?),
        })
    }
}

impl TopicCounts {
    fn add(&mut self, group: GroupCounts) {
        self.total += group.total;
        for (sum, count) in self.since.iter_mut().zip(group.since) {
            *sum += count;
        }
        if group.state == Some(State::Open) {
            self.open += group.total;
            self.oldest = Some(
                self.oldest
                    .map_or(group.oldest, |oldest| oldest.min(group.oldest)),
            );
            self.newest = self.newest.max(Some(group.newest));
            *self.open_by_class.entry(group.error_class).or_default() += group.total;
        }
    }
}

/// Counts of the dead letters that match, by topic.
pub(crate) fn count_by_topic(
    connection: &Connection,
    filter: &Expr,
    since: [Timestamp; 3],
) -> rusqlite::Result<BTreeMap<String, TopicCounts>> {
    let condition = condition(connection, filter)?;
    // Without the join, SQLite answers from an index alone.
    let bodies = if condition.reads_bodies {
        " CROSS JOIN bodies b ON b.row = l.row"
    } else {
        ""
    };
    let sql = format!(
        "SELECT (SELECT text FROM texts WHERE id = l.topic) AS topic, \
         (SELECT text FROM texts WHERE id = l.error_class) AS error_class, l.state AS state, count(*) AS total, \
         sum(l.dead_at >= ?) AS since_0, sum(l.dead_at >= ?) AS since_1, sum(l.dead_at >= ?) AS since_2, \
         min(l.dead_at) AS oldest, max(l.dead_at) AS newest \
         FROM letters l{bodies} WHERE {} GROUP BY l.topic, l.error_class, l.state",
        condition.sql
    );
    let times = since.map(|time| Value::Integer(time.as_millis()));
    let mut statement = connection.prepare_cached(&sql)?;
    let groups = statement.query_map(
        params_from_iter(times.into_iter().chain(values(condition.params))),
        GroupCounts::from_row,
    )?;
    let mut topics: BTreeMap<String, TopicCounts> = BTreeMap::new();
    for group in groups {
        let group = group?;
        topics.entry(group.topic.clone()).or_default().add(group);
    }
    Ok(topics)
}

/// The open dead letters of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenLetters {
    pub(crate) count: i64,
    /// `dead_at` of the oldest one.
    pub(crate) oldest: Timestamp,
}

/// The open dead letters of each topic that has any.
pub(crate) fn open_by_topic(connection: &Connection) -> rusqlite::Result<BTreeMap<String, OpenLetters>> {
    connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = l.topic) AS topic, count(*) AS open, min(l.dead_at) AS oldest \
             FROM letters l WHERE l.state = ? GROUP BY l.topic",
        )?
        .query_map([State::Open as i64], |row| {
            let open = OpenLetters {
                count: row.get("open")?,
                oldest: Timestamp::from_millis(row.get("oldest")?),
            };
            Ok((row.get("topic")?, open))
        })?
        .collect()
}

/// The next offset to read of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadPosition {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) next: i64,
}

impl ReadPosition {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            topic: row.get("topic")?,
            partition: row.get("partition")?,
            next: row.get("next")?,
        })
    }
}

/// The position of each partition, and the number of the last row.
pub(crate) fn read_positions(connection: &Connection) -> rusqlite::Result<(Vec<ReadPosition>, i64)> {
    let positions = connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = p.topic) AS topic, p.partition AS partition, p.next AS next \
             FROM positions p",
        )?
        .query_map((), ReadPosition::from_row)?
        .collect::<rusqlite::Result<_>>()?;
    let next_row = schema::meta(connection, "next_row")?.unwrap_or(1);
    Ok((positions, next_row - 1))
}

/// The ids of the topics that were read.
pub(crate) fn read_topic_ids(connection: &Connection) -> rusqlite::Result<Vec<(Arc<str>, TopicId)>> {
    connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = i.topic) AS topic, i.id AS id FROM topic_ids i",
        )?
        .query_map((), |row| {
            let topic: String = row.get("topic")?;
            let bits = u128::from_be_bytes(row.get("id")?);
            Ok((topic.into(), TopicId::from_bits(bits)))
        })?
        .collect()
}

/// The content hash of the record at an offset of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordDigest {
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
    /// The hash of the record.
    pub content: ContentHash,
}

impl RecordDigest {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            partition: row.get("partition")?,
            offset: row.get("offset")?,
            content: row.get("content")?,
        })
    }
}

/// The first and the last dead letter of each given partition of a topic. Dead letters below the partition's low
/// watermark are ignored, because Kafka no longer has them.
pub(crate) fn first_and_last(
    connection: &Connection,
    topic: &str,
    low_watermarks: &[(i32, i64)],
) -> rusqlite::Result<Vec<RecordDigest>> {
    let mut digests: Vec<RecordDigest> = Vec::new();
    for (partition, low) in low_watermarks {
        for order in ["ASC", "DESC"] {
            let sql = format!(
                "SELECT l.partition AS partition, l.offset AS offset, l.content AS content FROM letters l \
                 WHERE l.topic = (SELECT id FROM texts WHERE text = ?) \
                 AND l.partition = ? AND l.offset >= ? ORDER BY l.offset {order} LIMIT 1"
            );
            let digest = connection
                .prepare_cached(&sql)?
                .query_row(params![topic, partition, low], RecordDigest::from_row)
                .optional()?;
            digests.extend(digest.filter(|digest| !digests.contains(digest)));
        }
    }
    Ok(digests)
}
