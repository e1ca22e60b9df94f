//! The connections that read, on threads that may block.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::Semaphore;

use super::{Generation, is_damage};
use crate::header_list;

/// Maximum number of concurrent queries. Further queries wait.
const CONNECTIONS: usize = 4;
/// Time limit of a query: a filter may require a scan of the whole index.
pub(crate) const QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of SQLite virtual machine instructions between two checks of the time limit.
const INSTRUCTIONS_PER_CHECK: i32 = 20_000;

/// Why a query failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It exceeded the time limit, or its caller went away.
    #[error("query exceeded {} s", QUERY_TIMEOUT.as_secs())]
    TooLong,
    /// The process is shutting down.
    #[error("shutting down")]
    ShuttingDown,
    /// The database failed.
    #[error("reading the index")]
    Database(#[from] rusqlite::Error),
}

/// The connections that read. Cheap to clone.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    path: PathBuf,
    generation: AtomicI64,
    /// Whether a query has found damage.
    is_damaged: AtomicBool,
    /// Held by queries for reading, and while the files are replaced for writing.
    gate: RwLock<()>,
    idle: Mutex<Vec<Connection>>,
    permits: Semaphore,
}

impl Pool {
    pub(super) fn new(path: PathBuf, generation: Generation) -> Self {
        Self(Arc::new(Inner {
            path,
            generation: AtomicI64::new(generation),
            is_damaged: AtomicBool::new(false),
            gate: RwLock::new(()),
            idle: Mutex::new(Vec::new()),
            permits: Semaphore::new(CONNECTIONS),
        }))
    }

    /// Identifies the build of the index that is read.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Whether a query has found damage. Then the index must be rebuilt.
    pub(crate) fn is_damaged(&self) -> bool {
        self.0.is_damaged.load(Ordering::Acquire)
    }

    /// Replaces the files. Waits for queries in progress, and closes all connections: a connection to deleted files would delete
    /// the new write-ahead log when it is closed. Further queries wait, and read the new files.
    pub(super) fn replace<E>(&self, replace: impl FnOnce() -> Result<Generation, E>) -> Result<(), E> {
        let _gate = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.0.lock_idle().clear();
        let generation = replace()?;
        self.0.generation.store(generation, Ordering::Release);
        self.0.is_damaged.store(false, Ordering::Release);
        Ok(())
    }

    /// Runs a query on one snapshot of the index. If the returned future is dropped, the query is interrupted.
    ///
    /// # Errors
    /// If the query takes longer than 20 seconds or the database fails.
    pub async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, ReadError> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let _cancel_on_drop = CancelOnDrop(cancelled.clone());
        let _permit = self
            .0
            .permits
            .acquire()
            .await
            .map_err(|_| ReadError::ShuttingDown)?;
        let inner = self.0.clone();
        let result = tokio::task::spawn_blocking(move || inner.run(&cancelled, query)).await;
        result.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ReadError::ShuttingDown),
        })
    }

    /// As [`Pool::read`], on the calling thread, which blocks.
    ///
    /// # Errors
    /// As [`Pool::read`].
    pub fn read_blocking<T>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        self.0.run(&Arc::new(AtomicBool::new(false)), query)
    }
}

/// Interrupts a query when its caller goes away.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Inner {
    fn lock_idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run<T>(
        &self,
        cancelled: &Arc<AtomicBool>,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let result = self.query(cancelled, query);
        if let Err(ReadError::Database(error)) = &result
            && is_damage(error)
        {
            self.is_damaged.store(true, Ordering::Release);
        }
        result
    }

    fn query<T>(
        &self,
        cancelled: &Arc<AtomicBool>,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        // Taken in a statement of its own, so that the lock is not held while a connection is opened.
        let connection = self.lock_idle().pop();
        let mut connection = match connection {
            Some(connection) => connection,
            None => open(&self.path)?,
        };
        let deadline = Instant::now() + QUERY_TIMEOUT;
        let cancelled = cancelled.clone();
        let interrupt = move || cancelled.load(Ordering::Relaxed) || Instant::now() > deadline;
        connection.progress_handler(INSTRUCTIONS_PER_CHECK, Some(interrupt))?;
        // A query may consist of several statements. A transaction gives them one snapshot.
        connection.execute_batch("BEGIN")?;
        let result = query(&connection);
        // A connection whose transaction does not end would pin its snapshot, so it is dropped.
        if connection.execute_batch("ROLLBACK").is_ok() {
            connection.progress_handler(INSTRUCTIONS_PER_CHECK, None::<fn() -> bool>)?;
            self.lock_idle().push(connection);
        }
        result.map_err(|error| match error.sqlite_error_code() {
            Some(ErrorCode::OperationInterrupted) => ReadError::TooLong,
            _ => error.into(),
        })
    }
}

fn open(path: &PathBuf) -> rusqlite::Result<Connection> {
    // In WAL mode, a reader writes to the shared memory of the log, so that a read-only handle is not enough.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.pragma_update(None, "query_only", true)?;
    connection.pragma_update(None, "cache_size", -8 * 1024)?;
    connection.pragma_update(None, "temp_store", "memory")?;
    connection.busy_timeout(Duration::from_secs(5))?;
    connection.set_prepared_statement_cache_capacity(32);
    add_functions(&connection)?;
    Ok(connection)
}

/// Adds the SQL functions that filters on headers use.
fn add_functions(connection: &Connection) -> rusqlite::Result<()> {
    let flags =
        FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_DIRECTONLY;
    connection.create_scalar_function("header_is", 3, flags, |context| {
        let expected = context.get_raw(2).as_blob()?;
        any_header(context, |value| value == Some(expected))
    })?;
    connection.create_scalar_function("header_has", 3, flags, |context| {
        let needle = context.get_raw(2).as_blob()?;
        any_header(context, |value| {
            value.is_some_and(|value| contains(value, needle))
        })
    })?;
    connection.create_scalar_function("header_exists", 2, flags, |context| any_header(context, |_| true))
}

fn any_header(context: &Context<'_>, test: impl Fn(Option<&[u8]>) -> bool) -> rusqlite::Result<bool> {
    let headers = context.get_raw(0).as_blob()?;
    let name = context.get_raw(1).as_str()?;
    Ok(header_list::iter(headers).any(|(header, value)| header == name && test(value)))
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    needle.is_empty() || haystack.windows(needle.len()).any(|window| window == needle)
}
