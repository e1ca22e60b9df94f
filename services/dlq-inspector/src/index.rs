//! The index: a database in a file that can always be built again from the topics.
//!
//! One connection writes, on a thread of its own ([`Writer`]); a few read ([`Pool`]). What was read of the
//! topics stands in the same transaction as how far they were read, so a crash repeats nothing and leaves
//! nothing out. A file that is damaged, or was made by another version, is thrown away.
//!
//! `letters` is narrow, because filters go through it; `bodies` has what is only shown, under the same `row`.
//! Rows are numbered as they come and numbers are never used twice, so a number is a place to go on from.
//! Texts that repeat (topics, codes, pipelines) are kept once, in `texts`, and compared by their number.

mod pool;
mod query;
mod schema;
mod writer;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

pub use pool::{Pool, ReadError};
pub use query::{Direction, Found, Place, Sample, TopicCounts};
pub(crate) use query::{Part, counts, get, known, list, open_by_topic, samples, since};
pub use schema::Generation;
pub use writer::{Change, Writer};

/// The index cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The directory cannot be made or used.
    #[error("cannot use the directory {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process has it open.
    #[error("the index in {} is in use by another process: give each its own dlq_inspector.data_dir", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The database refused.
    #[error("{step}")]
    Database {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: rusqlite::Error,
    },
}

impl IndexError {
    /// Whether the file is damaged, so that only a new one helps.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        let Self::Database { source, .. } = self else {
            return false;
        };
        matches!(
            source.sqlite_error_code(),
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
        )
    }
}

pub(crate) fn database(step: &'static str) -> impl Fn(rusqlite::Error) -> IndexError {
    move |source| IndexError::Database { step, source }
}

/// The open index.
pub struct Index {
    /// The one that writes.
    pub writer: Writer,
    /// Those that read.
    pub pool: Pool,
    /// Which making of the index this is.
    pub generation: Generation,
    /// Whether it was made just now, and not found.
    pub is_new: bool,
}

/// The name of the database's file.
pub const FILE: &str = "dlq-index.db";

/// How many bytes the index has on disk.
pub(crate) fn size(directory: &Path) -> u64 {
    let sizes = PARTS.iter().filter_map(|suffix| {
        let file = directory.join(format!("{FILE}{suffix}"));
        Some(std::fs::metadata(file).ok()?.len())
    });
    sizes.sum()
}

/// What a database's file is written with behind its name: itself, its log, its shared memory.
const PARTS: [&str; 3] = ["", "-wal", "-shm"];

impl Index {
    /// Opens the index in a directory, or makes a new one.
    ///
    /// # Errors
    /// When the directory cannot be used or another process uses it.
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
            Err(unusable) => {
                tracing::warn!(path = %path.display(), reason = %unusable, "the index cannot be used and is built again");
                remove(&path).map_err(in_directory)?;
                (schema::create(&path)?, true)
            }
        };
        let generation = schema::generation(&connection)?;
        Ok(Self {
            writer: Writer::new(connection, path.clone(), lock)?,
            pool: Pool::new(path),
            generation,
            is_new,
        })
    }
}

/// Keeps other processes away from the directory as long as the file is open.
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

/// Removes the database with what belongs to it.
fn remove(path: &Path) -> io::Result<()> {
    for suffix in PARTS {
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
