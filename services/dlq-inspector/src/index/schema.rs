//! The schema, and opening a file that has it.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use super::{IndexError, database, query};

/// The schema's version. A file with another version is deleted and rebuilt.
const VERSION: i32 = 2;

/// Identifies one build of the index: a random number. Row numbers are valid within one generation only.
pub type Generation = i64;

const TABLES: &str = "
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);

CREATE TABLE positions (
    topic INTEGER NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;

CREATE TABLE topic_ids (topic INTEGER PRIMARY KEY, id BLOB NOT NULL);

CREATE TABLE letters (
    row INTEGER PRIMARY KEY,
    topic INTEGER NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    dead_at INTEGER NOT NULL, state INTEGER NOT NULL, dialect INTEGER NOT NULL,
    pipeline INTEGER NOT NULL, error_class INTEGER NOT NULL, error_code INTEGER NOT NULL,
    error_message TEXT NOT NULL, failed_at INTEGER, retry_count INTEGER NOT NULL,
    origin_topic INTEGER NOT NULL, origin_partition INTEGER, origin_offset INTEGER, origin_timestamp INTEGER,
    job_id TEXT NOT NULL, trace_id TEXT NOT NULL,
    value_size INTEGER, content BLOB NOT NULL
);
CREATE UNIQUE INDEX letters_by_position ON letters (topic, partition, offset);
CREATE INDEX letters_by_time ON letters (dead_at);
-- Counts are answered from this index, without reading the table.
CREATE INDEX letters_by_topic ON letters (topic, dead_at, state, error_class);
CREATE INDEX letters_by_state ON letters (state, dead_at);
CREATE INDEX letters_by_pipeline ON letters (pipeline, dead_at);
CREATE INDEX letters_by_class ON letters (error_class, dead_at);
CREATE INDEX letters_by_code ON letters (error_code, dead_at);
CREATE INDEX letters_by_job ON letters (job_id) WHERE job_id != '';
CREATE INDEX letters_by_trace ON letters (trace_id) WHERE trace_id != '';

CREATE TABLE bodies (row INTEGER PRIMARY KEY, key BLOB, headers BLOB NOT NULL);

CREATE TABLE ledger (
    topic INTEGER NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    state INTEGER NOT NULL, time INTEGER, who TEXT NOT NULL, note TEXT NOT NULL, content BLOB,
    PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;

INSERT INTO texts (text) VALUES ('');
";

/// SQL condition: whether a ledger entry applies to the dead letter at its position.
///
/// An entry with a content hash applies to the record with that hash. An entry without one applies unless it is older
/// than the dead letter: then it refers to an earlier record at this position, before the topic was deleted and created
/// again. Clocks may differ by a minute.
macro_rules! entry_applies {
    (entry: $content:literal, $time:literal, letter: $letters:literal, $dead_at:literal) => {
        concat!(
            "(",
            $content,
            " = ",
            $letters,
            " OR ",
            $content,
            " IS NULL AND (",
            $time,
            " IS NULL OR ",
            $time,
            " + 60000 >= ",
            $dead_at,
            "))"
        )
    };
}
pub(super) use entry_applies;

/// Why an existing file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("schema version is {0}; expected {VERSION}")]
    Version(i32),
    #[error("cannot read the file: {0}")]
    Damaged(#[from] rusqlite::Error),
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
        return Err(OpenError::Version(version));
    }
    configure(&connection)?;
    // Damage to the pages that the start needs is detected here, where the file can still be replaced.
    connection.query_row(
        "SELECT count(*) FROM (SELECT row FROM letters LIMIT 1)",
        (),
        |_| Ok(()),
    )?;
    connection.query_row("SELECT value FROM meta WHERE name = 'generation'", (), |_| Ok(()))?;
    query::read_positions(&connection)?;
    query::read_topic_ids(&connection)?;
    Ok(Some(connection))
}

/// Creates a new file.
pub(super) fn create(path: &Path) -> Result<Connection, IndexError> {
    let creating = database("creating the index");
    let connection = Connection::open(path).map_err(&creating)?;
    connection
        .pragma_update(None, "page_size", 8192)
        .map_err(&creating)?;
    configure(&connection).map_err(&creating)?;
    // The version is written in the same transaction as the tables: a crash while the index is created leaves a file
    // without a version, which the next start replaces.
    connection
        .execute_batch(&format!("BEGIN; {TABLES}"))
        .map_err(&creating)?;
    let generation = fastrand::i64(1..);
    let mut meta = connection
        .prepare("INSERT INTO meta (name, value) VALUES (?, ?)")
        .map_err(&creating)?;
    meta.execute(("generation", generation)).map_err(&creating)?;
    meta.execute(("next_row", 1)).map_err(&creating)?;
    drop(meta);
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
    // The data directory may be the only writable one.
    connection.pragma_update(None, "temp_store", "memory")?;
    connection.pragma_update(None, "cache_size", -64 * 1024)
}

pub(super) fn generation(connection: &Connection) -> Result<Generation, IndexError> {
    meta(connection, "generation")
        .and_then(|value| value.ok_or(rusqlite::Error::QueryReturnedNoRows))
        .map_err(database("reading the index"))
}

pub(super) fn meta(connection: &Connection, name: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT value FROM meta WHERE name = ?")?
        .query_row([name], |row| row.get("value"))
        .optional()
}
