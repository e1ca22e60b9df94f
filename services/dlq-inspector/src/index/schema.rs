//! The schema, and opening a file that has it.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::tables::{BodyRow, LetterRow};
use super::{IndexError, counters, database, entries, group_counts, positions, sources, terms};

/// The version of the schema. It is part of the file's name, see [`super::file_name`]. Increase it with every change of the
/// tables or of what they contain.
pub(super) const VERSION: i32 = 17;

const SMALL_TABLES: &str = "
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

-- Topics, pipelines, error classes and codes. The first text is empty and stands for a missing field.
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
INSERT INTO texts (text) VALUES ('');

-- See `message.rs`. Ids are never reused, see `message_cache.rs`.
CREATE TABLE templates (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL UNIQUE);
INSERT INTO templates (text) VALUES ('');

CREATE TABLE positions (
    topic_id INTEGER NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID;

CREATE TABLE topic_ids (topic_id INTEGER PRIMARY KEY, id BLOB NOT NULL);
";

/// Equalities of all other fields are in the table `terms`. The state is not, because it changes.
const INDEXES: &str = "
CREATE UNIQUE INDEX letters_by_position ON letters (topic_id, partition, offset);
CREATE INDEX letters_by_topic_and_state ON letters (topic_id, state, dead_at);
CREATE INDEX letters_by_state_and_code ON letters (state, error_code_id, dead_at);
CREATE INDEX letters_by_state ON letters (state, dead_at);
";

/// Why an existing file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("the file was not completely created")]
    Unfinished,
    #[error("cannot read the file: {0}")]
    Database(#[from] rusqlite::Error),
}

/// Opens an existing file; `None` if there is none.
pub(super) fn open_existing(path: &Path) -> Result<Option<Connection>, OpenError> {
    if !path.exists() {
        return Ok(None);
    }
    let connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    let version: i32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if version != VERSION {
        return Err(OpenError::Unfinished);
    }
    configure(&connection)?;
    // Damage to the pages that the start needs is detected here, where the file can still be replaced.
    connection.query_row(
        "SELECT count(*) FROM (SELECT row FROM letters LIMIT 1)",
        (),
        |_| Ok(()),
    )?;
    positions::read_positions(&connection)?;
    positions::read_topic_ids(&connection)?;
    Ok(Some(connection))
}

/// Creates a new file. After an error, there is none.
pub(super) fn create(path: &Path) -> Result<Connection, IndexError> {
    create_file(path).inspect_err(|_| {
        if let Err(error) = super::remove(path) {
            tracing::debug!(path = %path.display(), %error, "cannot delete an unfinished index");
        }
    })
}

fn create_file(path: &Path) -> Result<Connection, IndexError> {
    let creating = database("creating the index");
    let connection = Connection::open(path).map_err(&creating)?;
    connection
        .pragma_update(None, "page_size", 8192)
        .map_err(&creating)?;
    configure(&connection).map_err(&creating)?;
    // The version is written in the same transaction as the tables: a crash while the index is created leaves a file
    // without a version, which the next start replaces.
    connection.execute_batch("BEGIN").map_err(&creating)?;
    for sql in [
        SMALL_TABLES,
        LetterRow::CREATE,
        BodyRow::CREATE,
        INDEXES,
        entries::CREATE,
        counters::CREATE,
        group_counts::CREATE,
        terms::CREATE,
        sources::CREATE,
    ] {
        connection.execute_batch(sql).map_err(&creating)?;
    }
    connection
        .execute_batch(&format!("PRAGMA user_version = {VERSION}; COMMIT"))
        .map_err(&creating)?;
    Ok(connection)
}

fn configure(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "journal_mode", "wal")?;
    // A crash of the machine may lose the last transactions, but never an earlier one. Their records are read again,
    // because their positions are lost with them.
    connection.pragma_update(None, "synchronous", "normal")?;
    connection.pragma_update(None, "wal_autocheckpoint", 4000)?;
    // After a long reader has kept the log from being reused, it shrinks to this size again.
    connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
    // The data directory may be the only writable one.
    connection.pragma_update(None, "temp_store", "memory")?;
    connection.pragma_update(None, "cache_size", -48 * 1024)
}

/// Whether the index has contained everything once.
pub(super) fn has_caught_up(connection: &Connection) -> rusqlite::Result<bool> {
    Ok(meta(connection, "caught_up")?.is_some())
}

/// Remembers that the index has contained everything once.
pub(super) fn set_caught_up(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT OR REPLACE INTO meta (name, value) VALUES ('caught_up', 1)",
        (),
    )?;
    Ok(())
}

fn meta(connection: &Connection, name: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT value FROM meta WHERE name = ?")?
        .query_row([name], |row| row.get("value"))
        .optional()
}
