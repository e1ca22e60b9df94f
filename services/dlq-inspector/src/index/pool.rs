//! The connections that read, on threads that may block.
//!
//! Queries of the API and those of the process itself have turns of their own, so that neither waits for the other. A query
//! of the API begins in the fast lane. If it turns out to read many rows, it is interrupted and begins again in the slow lane,
//! where one query runs at a time. So queries that an index answers stay fast next to any number of scans. Watches have a slow lane of
//! their own, because they never end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::{Semaphore, watch};

use super::{functions, is_damage};

/// Maximum number of concurrent queries of the API in the fast lane. Further queries wait.
const FAST_CONNECTIONS: usize = 4;
/// Maximum number of concurrent queries of the process itself.
const INTERNAL_CONNECTIONS: usize = 2;
/// Time limit of a query: a filter may require a scan of the whole index.
pub(crate) const QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a query waits for its turn.
pub(crate) const QUEUE_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of SQLite virtual machine instructions between two checks of the limits.
const INSTRUCTIONS_PER_CHECK: i32 = 20_000;
/// A query that needs more checks than this leaves the fast lane. A row of a scan takes about 20 instructions. Instructions are
/// counted and not time, because a busy machine makes fast queries take longer, too.
const FAST_CHECKS: u32 = 50;
/// A query also leaves the fast lane after this time, which is generous: an instruction may read much from the disk.
const FAST_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a query failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It exceeded the time limit, or its caller went away.
    #[error("query exceeded {} s", QUERY_TIMEOUT.as_secs())]
    TooLong,
    /// Too many others were before it in the queue.
    #[error("query waited for {} s for others", QUEUE_TIMEOUT.as_secs())]
    Busy,
    /// The index was damaged, and is replaced by an empty one.
    #[error("the index is being rebuilt")]
    Rebuilding,
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
    /// Whether the index was opened.
    is_open: watch::Sender<bool>,
    /// Whether a query has found damage.
    is_damaged: AtomicBool,
    /// Held by queries for reading, and while the files are replaced for writing.
    gate: RwLock<()>,
    /// Whether the files are to be replaced, which interrupts queries.
    is_replacing: AtomicBool,
    idle: Mutex<Vec<Connection>>,
    fast: Semaphore,
    slow: Semaphore,
    slow_watches: Semaphore,
    internal: Semaphore,
}

/// How a query ended.
enum Attempt<T> {
    Done(T),
    /// It exceeded the limit of the fast lane.
    Slow,
}

impl Pool {
    /// The connections to the index whose contents depend on these settings in a directory. Queries wait until [`super::Writer::open`] has opened it.
    #[must_use]
    pub fn new(directory: &Path, settings: &[String]) -> Self {
        Self(Arc::new(Inner {
            path: super::path(directory, settings),
            is_open: watch::Sender::new(false),
            is_damaged: AtomicBool::new(false),
            gate: RwLock::new(()),
            is_replacing: AtomicBool::new(false),
            idle: Mutex::new(Vec::new()),
            fast: Semaphore::new(FAST_CONNECTIONS),
            slow: Semaphore::new(1),
            slow_watches: Semaphore::new(1),
            internal: Semaphore::new(INTERNAL_CONNECTIONS),
        }))
    }

    /// Deletes the files of other versions and settings than those of this index.
    pub(crate) fn remove_outdated(&self) {
        super::remove_outdated(&self.0.path);
    }

    /// The file of the database.
    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    /// Lets queries read the index.
    pub(super) fn set_open(&self) {
        self.0.is_open.send_replace(true);
    }

    /// Whether a query has found damage. Then the index must be rebuilt.
    pub(crate) fn is_damaged(&self) -> bool {
        self.0.is_damaged.load(Ordering::Acquire)
    }

    /// Replaces the files. Interrupts queries in progress, and closes all connections: a connection to deleted files would delete
    /// the new write-ahead log when it is closed. Further queries wait, and read the new files.
    pub(super) fn replace<E>(&self, replace: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.0.is_replacing.store(true, Ordering::Release);
        let _gate = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.0.is_replacing.store(false, Ordering::Release);
        self.0.lock_idle().clear();
        replace()?;
        self.0.is_damaged.store(false, Ordering::Release);
        Ok(())
    }

    /// Runs a query of the API on one snapshot of the index. It is called a second time if it is slow. If the returned future is
    /// dropped, the query is interrupted.
    ///
    /// # Errors
    /// If the query takes longer than 20 seconds, waits longer than 20 seconds for others, or the database fails.
    pub async fn query<T: Send + 'static>(
        &self,
        query: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, ReadError> {
        self.fast_or(&self.0.slow, query).await
    }

    /// As [`Pool::query`], for a watch.
    ///
    /// # Errors
    /// As [`Pool::query`].
    pub async fn watch<T: Send + 'static>(
        &self,
        query: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, ReadError> {
        self.fast_or(&self.0.slow_watches, query).await
    }

    async fn fast_or<T: Send + 'static>(
        &self,
        slow: &Semaphore,
        query: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, ReadError> {
        let query = Arc::new(query);
        if let Attempt::Done(answer) = self.run(&self.0.fast, Some(FAST_CHECKS), query.clone()).await? {
            return Ok(answer);
        }
        done(self.run(slow, None, query).await?)
    }

    /// Runs a query of the process itself, which does not wait for those of the API.
    ///
    /// # Errors
    /// As [`Pool::query`].
    pub async fn internal<T: Send + 'static>(
        &self,
        query: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, ReadError> {
        done(self.run(&self.0.internal, None, Arc::new(query)).await?)
    }

    /// As [`Pool::internal`], on the calling thread, which blocks. It does not wait until the index is open.
    ///
    /// # Errors
    /// If the query takes longer than 20 seconds, or the database fails.
    pub fn read_blocking<T>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        done(self.0.run(None, &Arc::new(AtomicBool::new(false)), query)?)
    }

    async fn run<T: Send + 'static>(
        &self,
        lane: &Semaphore,
        checks: Option<u32>,
        query: Arc<impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static>,
    ) -> Result<Attempt<T>, ReadError> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let _cancel_on_drop = CancelOnDrop(cancelled.clone());
        let opened = self
            .0
            .is_open
            .subscribe()
            .wait_for(|is_open| *is_open)
            .await
            .is_ok();
        if !opened {
            return Err(ReadError::ShuttingDown);
        }
        let permit = tokio::time::timeout(QUEUE_TIMEOUT, lane.acquire()).await;
        let _permit = permit
            .map_err(|_| ReadError::Busy)?
            .map_err(|_| ReadError::ShuttingDown)?;
        let inner = self.0.clone();
        let run = move || inner.run(checks, &cancelled, |connection| query(connection));
        let result = tokio::task::spawn_blocking(run).await;
        result.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ReadError::ShuttingDown),
        })
    }
}

/// The answer of a query that has no limit of the fast lane.
fn done<T>(attempt: Attempt<T>) -> Result<T, ReadError> {
    match attempt {
        Attempt::Done(answer) => Ok(answer),
        Attempt::Slow => Err(ReadError::TooLong),
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

    /// `checks` limits how long the query may run, see [`FAST_CHECKS`].
    fn run<T>(
        self: &Arc<Self>,
        checks: Option<u32>,
        cancelled: &Arc<AtomicBool>,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<Attempt<T>, ReadError> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let result = self.query(checks, cancelled, query);
        if let Err(ReadError::Database(error)) = &result
            && is_damage(error)
        {
            self.is_damaged.store(true, Ordering::Release);
        }
        result
    }

    fn query<T>(
        self: &Arc<Self>,
        checks: Option<u32>,
        cancelled: &Arc<AtomicBool>,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<Attempt<T>, ReadError> {
        // Taken in a statement of its own, so that the lock is not held while a connection is opened.
        let connection = self.lock_idle().pop();
        let mut connection = match connection {
            Some(connection) => connection,
            None => open(&self.path)?,
        };
        let deadline = Instant::now() + QUERY_TIMEOUT;
        let fast_deadline = Instant::now() + FAST_TIMEOUT;
        let is_slow = Arc::new(AtomicBool::new(false));
        let interrupt = {
            let (cancelled, is_slow, inner) = (cancelled.clone(), is_slow.clone(), self.clone());
            let mut left = checks;
            move || {
                if let Some(left) = &mut left {
                    *left = left.saturating_sub(1);
                    if *left == 0 || Instant::now() > fast_deadline {
                        is_slow.store(true, Ordering::Relaxed);
                        return true;
                    }
                }
                let is_stopped =
                    cancelled.load(Ordering::Relaxed) || inner.is_replacing.load(Ordering::Acquire);
                is_stopped || Instant::now() > deadline
            }
        };
        connection.progress_handler(INSTRUCTIONS_PER_CHECK, Some(interrupt))?;
        // A query may consist of several statements. A transaction gives them one snapshot.
        connection.execute_batch("BEGIN")?;
        let result = query(&connection);
        // The handler must not interrupt the end of the transaction as well. A connection whose transaction does not end would
        // pin its snapshot, so it is dropped.
        connection.progress_handler(INSTRUCTIONS_PER_CHECK, None::<fn() -> bool>)?;
        if connection.execute_batch("ROLLBACK").is_ok() {
            self.lock_idle().push(connection);
        }
        match result {
            Ok(answer) => Ok(Attempt::Done(answer)),
            Err(error) => match error.sqlite_error_code() {
                Some(ErrorCode::OperationInterrupted) if is_slow.load(Ordering::Relaxed) => Ok(Attempt::Slow),
                Some(ErrorCode::OperationInterrupted) if self.is_replacing.load(Ordering::Acquire) => {
                    Err(ReadError::Rebuilding)
                }
                Some(ErrorCode::OperationInterrupted) => Err(ReadError::TooLong),
                _ => Err(error.into()),
            },
        }
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
    functions::add(&connection)?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fixture;
    use super::*;

    #[tokio::test]
    async fn slow_query_waits_20_seconds() {
        let fixture = Fixture::new();
        let pool = fixture.index.pool.clone();
        let count = |rows: u32| {
            move |connection: &Connection| {
                let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT count(*) FROM n";
                connection.query_row(sql, [rows], |row| row.get::<_, u32>(0))
            }
        };
        let other = pool.0.slow.acquire().await.unwrap();
        tokio::time::pause();
        let began = tokio::time::Instant::now();
        assert!(matches!(pool.query(count(1_000_000)).await, Err(ReadError::Busy)));
        assert_eq!(began.elapsed().as_secs(), QUEUE_TIMEOUT.as_secs());
        assert_eq!(pool.query(count(10)).await.unwrap(), 10);
        assert_eq!(pool.watch(count(1_000_000)).await.unwrap(), 1_000_000);
        drop(other);
        assert_eq!(pool.query(count(1_000_000)).await.unwrap(), 1_000_000);
    }
}
