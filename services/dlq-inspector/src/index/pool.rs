//! The connections that read, on threads where they may block.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::Semaphore;

use crate::header_list;

/// How many questions are answered at the same time; more wait their turn.
const CONNECTIONS: usize = 4;
/// After how long a question is given up: a filter may ask for everything there is.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How many steps of the database's machine are made between two looks at the time.
const STEPS: i32 = 20_000;

/// A question that got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It took too long.
    #[error("the question took longer than {} s", PATIENCE.as_secs())]
    TooLong,
    /// The process is ending.
    #[error("the process is ending")]
    Ending,
    /// The database refused.
    #[error("reading the index")]
    Database(#[from] rusqlite::Error),
}

/// The connections that read. Cheap to clone.
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

struct Shared {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
    permits: Semaphore,
}

impl Pool {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(Arc::new(Shared {
            path,
            idle: Mutex::new(Vec::new()),
            permits: Semaphore::new(CONNECTIONS),
        }))
    }

    /// Asks the index, all in one look: what is written meanwhile is not seen. When the caller goes away the
    /// question is given up.
    ///
    /// # Errors
    /// When it takes too long or the database refuses.
    pub async fn read<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, ReadError> {
        let abandoned = Arc::new(AtomicBool::new(false));
        let _abandon = Abandon(abandoned.clone());
        let _permit = self.0.permits.acquire().await.map_err(|_| ReadError::Ending)?;
        let shared = self.0.clone();
        let asked = tokio::task::spawn_blocking(move || shared.ask(&abandoned, question)).await;
        asked.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ReadError::Ending),
        })
    }

    /// As [`Pool::read`], on the caller's own thread, which may block.
    ///
    /// # Errors
    /// As [`Pool::read`].
    pub fn read_here<T>(
        &self,
        question: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        self.0.ask(&Arc::new(AtomicBool::new(false)), question)
    }
}

/// Says that nobody waits for the answer any more.
struct Abandon(Arc<AtomicBool>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn ask<T>(
        &self,
        abandoned: &Arc<AtomicBool>,
        question: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let found = idle().pop();
        let mut connection = match found {
            Some(connection) => connection,
            None => open(&self.path)?,
        };
        let deadline = Instant::now() + PATIENCE;
        let abandoned = abandoned.clone();
        let give_up = move || abandoned.load(Ordering::Relaxed) || Instant::now() > deadline;
        connection.progress_handler(STEPS, Some(give_up))?;
        connection.execute_batch("BEGIN")?;
        let answer = question(&connection);
        // A connection that cannot go back to its beginning is not used again.
        let usable = connection.execute_batch("ROLLBACK").is_ok();
        if usable {
            connection.progress_handler(STEPS, None::<fn() -> bool>)?;
            idle().push(connection);
        }
        answer.map_err(|error| match error.sqlite_error_code() {
            Some(ErrorCode::OperationInterrupted) => ReadError::TooLong,
            _ => error.into(),
        })
    }
}

fn open(path: &PathBuf) -> rusqlite::Result<Connection> {
    // Even one that only reads takes part in the log that is shared with the writer.
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

/// What filters ask about headers.
fn add_functions(connection: &Connection) -> rusqlite::Result<()> {
    let flags =
        FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_DIRECTONLY;
    connection.create_scalar_function("header_is", 3, flags, |context| {
        let expected = context.get_raw(2).as_blob()?;
        any_header(context, |value| value == Some(expected))
    })?;
    connection.create_scalar_function("header_has", 3, flags, |context| {
        let part = context.get_raw(2).as_blob()?;
        any_header(context, |value| value.is_some_and(|value| contains(value, part)))
    })?;
    connection.create_scalar_function("header_exists", 2, flags, |context| any_header(context, |_| true))
}

fn any_header(context: &Context<'_>, test: impl Fn(Option<&[u8]>) -> bool) -> rusqlite::Result<bool> {
    let headers = context.get_raw(0).as_blob()?;
    let name = context.get_raw(1).as_str()?;
    Ok(header_list::iter(headers).any(|(found, value)| found == name && test(value)))
}

fn contains(value: &[u8], part: &[u8]) -> bool {
    part.is_empty() || value.windows(part.len()).any(|window| window == part)
}
