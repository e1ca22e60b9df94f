//! The index: a SQLite file that can be rebuilt from the topics at any time.
//!
//! One connection writes, on its own thread ([`Writer`]); a few connections read ([`Pool`]). Dead letters and the
//! offsets up to which they were read are written in the same transaction, so that a crash neither repeats nor skips
//! a record. A damaged file is deleted.
//!
//! The table `letters` is narrow, because filters scan it. The table `bodies`, with the same `row`, holds
//! the rest, such as the key and the headers. Row numbers increase with `dead_at` (`row_key`), so that the table itself and the
//! full-text index of equalities (`terms`) are in the order of lists. Watches read partitions in the order of offsets. Repeated texts and
//! the templates of messages (`message`) are stored once and referenced by id.
//!
//! Each version of the schema, and each list of JSON fields, has a file of its own. A new one is built beside the old one,
//! which is deleted once the new one has caught up.

mod attention;
mod breakdown;
mod change;
mod counters;
mod entries;
mod functions;
mod group_counts;
mod groups;
mod message;
mod message_cache;
mod plan;
mod pool;
mod positions;
mod query;
mod removal;
mod row_key;
mod schema;
mod sources;
mod sql;
mod states;
mod sweep;
mod tables;
mod terms;
mod texts;
mod writer;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, ErrorCode};

pub(crate) use attention::{TopicGroup, groups_in_need};
pub(crate) use breakdown::{Breakdown, COUNT_FIELDS, CountField, Shown, count_by};
pub use change::Change;
pub(crate) use group_counts::{Trends, trends};
pub use groups::{GroupOrder, GroupPage, IndexedGroup};
pub(crate) use groups::{GroupQuery, list_groups, open_groups, topics_of_group, with_letters};
pub(crate) use message::certain_part;
pub(crate) use message_cache::MessageCache;
pub use pool::{Pool, ReadError};
pub(crate) use pool::{QUERY_TIMEOUT, QUEUE_TIMEOUT};
pub(crate) use positions::{ReadPosition, read_positions};
pub use query::{Cursor, Direction, IndexedLetter, RecordDigest, TopicCounts};
pub(crate) use query::{
    Page, PageLimit, Unread, count_by_topic, first_and_last, get, list, list_unread, open_by_topic, topics,
};
use schema::OpenError;
pub(crate) use sources::{IndexedSource, read_sources};
pub use writer::Writer;

/// Opening or writing the index failed.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The directory cannot be created, or its files cannot be accessed.
    #[error("cannot use the directory {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process uses the index.
    #[error("the index in {} is in use by another process; set dlq_inspector.data_dir to a different directory for each process", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A database operation failed.
    #[error("{step}")]
    Database {
        /// The operation.
        step: &'static str,
        /// The cause.
        source: rusqlite::Error,
    },
}

impl IndexError {
    /// Whether the file is damaged, so that the index must be rebuilt.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Database { source, .. } if is_damage(source))
    }

    /// Whether the operation can succeed later without a change of the program or the file: the disk is full or fails, files
    /// cannot be accessed, or another process holds a lock.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Directory { .. } => true,
            Self::InUse { .. } => false,
            Self::Database { source, .. } => is_temporary(source),
        }
    }

    /// Whether the index may be opened later. A directory that cannot be used is a wrong setting, unless its disk is full.
    pub(crate) fn can_be_opened_later(&self) -> bool {
        match self {
            Self::Directory { .. } => self.is_disk_full(),
            Self::InUse { .. } | Self::Database { .. } => self.is_temporary(),
        }
    }

    /// Whether there was no space left on the disk.
    pub(crate) fn is_disk_full(&self) -> bool {
        match self {
            Self::Directory { source, .. } => source.kind() == io::ErrorKind::StorageFull,
            Self::InUse { .. } => false,
            Self::Database { source, .. } => is_disk_full(source),
        }
    }
}

fn is_disk_full(error: &rusqlite::Error) -> bool {
    // Without space for the shared memory of the write-ahead log, the error is one of its input and output.
    let is_shared_memory =
        |error: &rusqlite::ffi::Error| error.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE;
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
        || error.sqlite_error().is_some_and(is_shared_memory)
}

fn is_temporary(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::DiskFull
                | ErrorCode::SystemIoFailure
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied
                | ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::FileLockingProtocolFailed
                | ErrorCode::OutOfMemory
        )
    )
}

/// Whether the file of the index is damaged.
pub(crate) fn is_damage(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}

pub(crate) fn database(step: &'static str) -> impl Fn(rusqlite::Error) -> IndexError {
    move |source| IndexError::Database { step, source }
}

/// The open index.
pub struct Index {
    /// The writing connection.
    pub writer: Writer,
    /// The reading connections.
    pub pool: Pool,
    /// Whether the index was created, as opposed to opened.
    pub is_new: bool,
}

/// The name of the database file if its contents depend on no settings.
pub const FILE: &str = "dlq-index-v17.db";

/// What the names of the files of all versions begin with.
const PREFIX: &str = "dlq-index";

/// The name of the database file with this schema, whose contents depend on these settings.
fn file_name(settings: &[String]) -> String {
    let version = schema::VERSION;
    if settings.is_empty() {
        return format!("{PREFIX}-v{version}.db");
    }
    let hash = terms::stable_hash(settings.iter().map(String::as_bytes));
    format!("{PREFIX}-v{version}-{hash:016x}.db")
}

/// The size of the index on disk in bytes, with files of previous versions.
pub(crate) fn size(directory: &Path) -> u64 {
    let sizes = files(directory).filter_map(|path| Some(std::fs::metadata(path).ok()?.len()));
    sizes.sum()
}

/// The files of databases in a directory.
fn files(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let is_database = |name: &str| name.starts_with(PREFIX) && name.ends_with(".db");
        SUFFIXES
            .iter()
            .any(|suffix| name.strip_suffix(suffix).is_some_and(is_database))
    })
}

/// The files of other databases than this one in its directory.
fn outdated(path: &Path) -> Vec<PathBuf> {
    let own = SUFFIXES.map(|suffix| with_suffix(path, suffix));
    let files = path.parent().map(files).into_iter().flatten();
    files.filter(|file| !own.contains(file)).collect()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut file = path.as_os_str().to_owned();
    file.push(suffix);
    file.into()
}

/// The files of a database: the database itself, its write-ahead log, its shared memory.
const SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];

impl Index {
    /// Opens the index whose contents depend on these settings in a directory, or creates it, see [`Writer::open`].
    ///
    /// # Errors
    /// As [`Writer::open`].
    pub fn open(directory: &Path, settings: &[String]) -> Result<Self, IndexError> {
        let pool = Pool::new(directory, settings);
        let (writer, is_new) = Writer::open(&pool, directory)?;
        Ok(Self { writer, pool, is_new })
    }
}

/// The database file with this schema, whose contents depend on these settings, in a directory.
fn path(directory: &Path, settings: &[String]) -> PathBuf {
    directory.join(file_name(settings))
}

/// Opens the file, or creates it. Returns whether it is new.
fn open_or_create(path: &Path) -> Result<(Connection, bool), IndexError> {
    match schema::open_existing(path) {
        Ok(Some(connection)) => return Ok((connection, false)),
        Ok(None) => {}
        // The file may be intact.
        Err(OpenError::Database(error)) if is_temporary(&error) => {
            return Err(database("opening the index")(error));
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "index unusable; rebuilding it");
            remove(path).map_err(|source| IndexError::Directory {
                path: path.to_owned(),
                source,
            })?;
        }
    }
    Ok((schema::create(path)?, true))
}

/// Deletes the files of other databases than this one in its directory.
fn remove_outdated(path: &Path) {
    for file in outdated(path) {
        match std::fs::remove_file(&file) {
            Ok(()) => tracing::info!(path = %file.display(), "previous index deleted"),
            Err(error) => tracing::warn!(path = %file.display(), %error, "cannot delete a previous index"),
        }
    }
}

/// Locks the directory against other processes for as long as the returned file is open.
fn lock(directory: &Path) -> Result<File, IndexError> {
    let in_directory = |source| IndexError::Directory {
        path: directory.to_owned(),
        source,
    };
    let mut options = File::options();
    options.create(true).truncate(false).write(true);
    let file = options
        .open(directory.join("dlq-index.lock"))
        .map_err(in_directory)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(IndexError::InUse {
            path: directory.to_owned(),
        }),
        Err(TryLockError::Error(source)) => Err(in_directory(source)),
    }
}

/// Deletes the files of the database.
fn remove(path: &Path) -> io::Result<()> {
    for suffix in SUFFIXES {
        match std::fs::remove_file(with_suffix(path, suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
