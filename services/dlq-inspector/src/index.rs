//! The index: a SQLite file that can be rebuilt from the topics at any time.
//!
//! One connection writes, on its own thread ([`Writer`]); a few connections read ([`Pool`]). Dead letters and the
//! offsets up to which they were read are written in the same transaction, so that a crash neither repeats nor skips
//! a record. A file that is damaged, or was written by another version, is deleted.
//!
//! The table `letters` is narrow, because filters scan it. The table `bodies`, with the same `row`, holds
//! the rest, such as the key and the headers, which few filters need. Row numbers increase in the order in which records are indexed and are never reused, so that a row
//! number is a resume position. Repeated texts (topics, codes, pipelines) are stored once, in the table `texts`, and
//! referenced by id.

mod pool;
mod query;
mod schema;
mod writer;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

pub(crate) use pool::QUERY_TIMEOUT;
pub use pool::{Pool, ReadError};
pub use query::{Cursor, Direction, IndexedLetter, RecordDigest, TopicCounts};
pub(crate) use query::{
    Page, count_by_topic, first_and_last, get, list, list_by_row, open_by_topic, read_positions,
    read_topic_ids,
};
pub use schema::Generation;
pub use writer::{Change, Writer};

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
            Self::Database { source, .. } => matches!(
                source.sqlite_error_code(),
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
            ),
        }
    }
}

fn is_damage(error: &rusqlite::Error) -> bool {
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

/// The name of the database file.
pub const FILE: &str = "dlq-index.db";

/// The size of the index on disk, in bytes.
pub(crate) fn size(directory: &Path) -> u64 {
    let sizes = SUFFIXES.iter().filter_map(|suffix| {
        let file = directory.join(format!("{FILE}{suffix}"));
        Some(std::fs::metadata(file).ok()?.len())
    });
    sizes.sum()
}

/// The files of a database: the database itself, its write-ahead log, its shared memory.
const SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];

impl Index {
    /// Opens the index in a directory, or creates it. A file that cannot be used is replaced by an empty index.
    ///
    /// # Errors
    /// If the directory cannot be used, or another process uses the index.
    pub fn open(directory: &Path) -> Result<Self, IndexError> {
        let in_directory = |source| IndexError::Directory {
            path: directory.to_owned(),
            source,
        };
        std::fs::create_dir_all(directory).map_err(in_directory)?;
        let lock = lock(directory)?;
        let path = directory.join(FILE);
        let (connection, is_new) = match schema::open_existing(&path) {
            Ok(Some(connection)) => (connection, false),
            Ok(None) => (schema::create(&path)?, true),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the index is unusable; rebuilding it");
                remove(&path).map_err(in_directory)?;
                (schema::create(&path)?, true)
            }
        };
        let generation = schema::generation(&connection)?;
        Ok(Self {
            writer: Writer::new(connection, path.clone(), lock)?,
            pool: Pool::new(path, generation),
            is_new,
        })
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
        let mut file = path.as_os_str().to_owned();
        file.push(suffix);
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
