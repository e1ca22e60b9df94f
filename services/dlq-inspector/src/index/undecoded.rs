//! The dead letters whose values could not be decoded, so that their JSON fields are missing.
//!
//! Those of the first kind, which are pending, make answers about JSON fields incomplete. Those without a schema do not, see
//! [`Undecoded`].

use redeliver_core::Position;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension as _, params, params_from_iter};

use super::message_cache::MessageCache;
use super::query::{SCANNED_ROWS, dictionary, values};
use super::texts::{TextTable, Texts};
use crate::filter::{Condition, Expr};
use crate::letter::{ContentHash, Undecoded};

/// Sequence numbers are those of watches, which do not pass a dead letter that is pending.
pub(super) const CREATE: &str = "
CREATE TABLE undecoded (
    sequence INTEGER PRIMARY KEY, row INTEGER NOT NULL, schema_id INTEGER NOT NULL, is_pending INTEGER NOT NULL
);
CREATE INDEX undecoded_by_schema ON undecoded (is_pending, schema_id, sequence);
";

/// A higher number of dead letters is not counted.
const MAX_COUNT: i64 = 10_000;

/// How far a watch may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    /// The watch may pass the dead letters up to this number.
    pub(crate) up_to: i64,
    /// Whether the next one is pending and matches.
    pub(crate) is_pending: bool,
}

/// A dead letter to decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UndecodedLetter {
    pub(crate) sequence: i64,
    pub(crate) position: Position,
    pub(crate) content: ContentHash,
    /// The size of its value in bytes.
    pub(crate) value_size: u64,
}

/// Notes that a dead letter is not decoded.
pub(super) fn put(
    connection: &Connection,
    sequence: i64,
    row: i64,
    undecoded: Undecoded,
) -> rusqlite::Result<()> {
    let (schema_id, is_pending) = match undecoded {
        Undecoded::Pending(schema_id) => (schema_id, true),
        Undecoded::NoSchema(schema_id) => (schema_id, false),
    };
    connection
        .prepare_cached(
            "INSERT OR REPLACE INTO undecoded (sequence, row, schema_id, is_pending) VALUES (?, ?, ?, ?)",
        )?
        .execute((sequence, row, schema_id, is_pending))?;
    Ok(())
}

/// Notes that a dead letter is decoded, or removed.
pub(super) fn remove(connection: &Connection, sequence: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("DELETE FROM undecoded WHERE sequence = ?")?
        .execute([sequence])?;
    Ok(())
}

/// Whether any dead letter is pending.
pub(crate) fn has_pending(connection: &Connection) -> rusqlite::Result<bool> {
    connection
        .prepare_cached("SELECT 1 FROM undecoded WHERE is_pending = 1 LIMIT 1")?
        .exists(())
}

/// The number of all dead letters that are pending.
pub(crate) fn pending_count(connection: &Connection) -> rusqlite::Result<i64> {
    connection
        .prepare_cached("SELECT count(*) AS count FROM undecoded WHERE is_pending = 1")?
        .query_row((), |row| row.get("count"))
}

/// The number of dead letters that are pending, match a filter, and are numbered after `after`: at most [`MAX_COUNT`].
pub(crate) fn pending(connection: &Connection, filter: &Expr, after: i64) -> rusqlite::Result<u64> {
    let condition = Condition::of(filter, &dictionary(connection, filter, &MessageCache::default())?);
    let sql = format!(
        "SELECT count(*) AS count FROM ({})",
        matching(&condition, "undecoded u")
    );
    let params = parameters(&condition, after, i64::MAX, MAX_COUNT);
    let count: i64 = connection
        .prepare_cached(&sql)?
        .query_row(params_from_iter(params), |row| row.get("count"))?;
    Ok(count.unsigned_abs())
}

/// How far a watch may go that has passed `after`, at most up to `up_to`, so that it passes no dead letter that is pending and matches. Tests a bounded
/// number of them: a watch asks for each page.
pub(crate) fn reach(
    connection: &Connection,
    filter: &Expr,
    after: i64,
    up_to: i64,
) -> rusqlite::Result<Reach> {
    let tested = connection
        .prepare_cached(
            "SELECT sequence FROM undecoded NOT INDEXED WHERE sequence > ? AND sequence <= ? \
             ORDER BY sequence LIMIT 1 OFFSET ?",
        )?
        .query_row((after, up_to, SCANNED_ROWS - 1), |row| row.get("sequence"))
        .optional()?
        .unwrap_or(up_to);
    let condition = Condition::of(filter, &dictionary(connection, filter, &MessageCache::default())?);
    let params = parameters(&condition, after, tested, 1);
    let first: Option<i64> = connection
        .prepare_cached(&matching(&condition, "undecoded u NOT INDEXED"))?
        .query_row(params_from_iter(params), |row| row.get("sequence"))
        .optional()?;
    Ok(Reach {
        up_to: first.map_or(tested, |first| first - 1),
        is_pending: first.is_some(),
    })
}

/// Selects the numbers of the dead letters that are pending and match a condition. The parameters are [`parameters`].
fn matching(condition: &Condition, undecoded: &str) -> String {
    let bodies = if condition.reads_bodies {
        " CROSS JOIN bodies b ON b.row = u.row"
    } else {
        ""
    };
    format!(
        "SELECT u.sequence AS sequence FROM {undecoded} CROSS JOIN letters l NOT INDEXED ON l.row = u.row{bodies} \
         WHERE u.sequence > ? AND u.sequence <= ? AND u.is_pending = 1 AND {} ORDER BY u.sequence LIMIT ?",
        condition.sql
    )
}

fn parameters(condition: &Condition, after: i64, up_to: i64, limit: i64) -> impl Iterator<Item = Value> {
    [after, up_to]
        .map(Value::Integer)
        .into_iter()
        .chain(values(&condition.params))
        .chain([Value::Integer(limit)])
}

/// The first schema after this one that undecoded values have, of those that are pending or of the others.
pub(crate) fn next_schema(
    connection: &Connection,
    is_pending: bool,
    after: Option<u32>,
) -> rusqlite::Result<Option<u32>> {
    connection
        .prepare_cached(
            "SELECT schema_id FROM undecoded INDEXED BY undecoded_by_schema \
             WHERE is_pending = ? AND schema_id > ? ORDER BY schema_id LIMIT 1",
        )?
        .query_row((is_pending, after.map_or(-1, i64::from)), |row| {
            row.get("schema_id")
        })
        .optional()
}

/// Undecoded dead letters of a schema, in the order of their numbers, after this one.
pub(crate) fn of_schema(
    connection: &Connection,
    is_pending: bool,
    schema_id: u32,
    after: i64,
    limit: u32,
) -> rusqlite::Result<Vec<UndecodedLetter>> {
    let mut texts = Texts::new(connection);
    let mut statement = connection.prepare_cached(
        "SELECT u.sequence AS sequence, l.topic_id AS topic_id, l.partition AS partition, l.offset AS offset, \
         l.content AS content, coalesce(l.value_size, 0) AS value_size FROM undecoded u INDEXED BY undecoded_by_schema \
         CROSS JOIN letters l NOT INDEXED ON l.row = u.row \
         WHERE u.is_pending = ? AND u.schema_id = ? AND u.sequence > ? ORDER BY u.sequence LIMIT ?",
    )?;
    let mut rows = statement.query(params![is_pending, schema_id, after, limit])?;
    let mut letters = Vec::new();
    while let Some(row) = rows.next()? {
        letters.push(UndecodedLetter {
            sequence: row.get("sequence")?,
            position: Position {
                topic: texts.text(TextTable::Texts, row.get("topic_id")?)?.into(),
                partition: row.get("partition")?,
                offset: row.get("offset")?,
            },
            content: row.get("content")?,
            value_size: row.get::<_, i64>("value_size")?.unsigned_abs(),
        });
    }
    Ok(letters)
}
