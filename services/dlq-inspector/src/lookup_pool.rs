//! Reads records from Kafka by position, such as the values of dead letters, which the index does not store.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::Position;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::credentials::Replaceable;
use redeliver_kafka::lookup::{Found, Lookup, StoredRecord};
use redeliver_kafka::reader::ReadError;
use tokio::sync::Semaphore;

/// Maximum number of concurrent lookups. Further lookups wait.
const CONNECTIONS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(10);

/// A method of [`Lookup`].
type LookUp<T> = fn(&mut Lookup, &[Position], Duration) -> Result<Vec<T>, ReadError>;

/// A pool of Kafka clients that read single records. Cheap to clone.
#[derive(Clone)]
pub(crate) struct LookupPool(Arc<Inner>);

struct Inner {
    settings: KafkaSettings,
    /// A client returns to the pool from which it was taken. So replaced clients are dropped after their last lookup.
    idle: Arc<Replaceable<Mutex<Vec<Lookup>>>>,
    permits: Semaphore,
}

impl LookupPool {
    pub(crate) fn new(settings: KafkaSettings) -> Self {
        let Ok(idle) = Replaceable::new(&settings, "lookups", || Ok::<_, Infallible>(Mutex::default()));
        Self(Arc::new(Inner {
            idle,
            settings,
            permits: Semaphore::new(CONNECTIONS),
        }))
    }

    /// The records at these positions, in the same order; `None` for a position without a record.
    pub(crate) async fn get(&self, positions: Vec<Position>) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let count = positions.len();
        let found = self.run(positions, Lookup::get).await?;
        Ok(found.unwrap_or_else(|| vec![None; count]))
    }

    /// What is known of the first ones of these positions, which must be of one partition and in the order of their offsets. At least one, unless the
    /// runtime is shutting down. See [`Lookup::find`].
    pub(crate) async fn find(&self, positions: Vec<Position>) -> Result<Vec<Found>, ReadError> {
        let found = self.run(positions, Lookup::find).await?;
        Ok(found.unwrap_or_default())
    }

    /// `None` if the runtime is shutting down.
    async fn run<T: Send + 'static>(
        &self,
        positions: Vec<Position>,
        look_up: LookUp<T>,
    ) -> Result<Option<Vec<T>>, ReadError> {
        if positions.is_empty() {
            return Ok(Some(Vec::new()));
        }
        // The semaphore is never closed.
        let _permit = self.0.permits.acquire().await.ok();
        let inner = self.0.clone();
        let result = tokio::task::spawn_blocking(move || inner.run(&positions, look_up)).await;
        match result {
            Ok(found) => found.map(Some),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Cancelled.
                Err(_) => Ok(None),
            },
        }
    }
}

impl Inner {
    fn run<T>(&self, positions: &[Position], look_up: LookUp<T>) -> Result<Vec<T>, ReadError> {
        let pool = self.idle.get();
        let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken in a statement of its own, so that the lock is not held while a client is created.
        let lookup = idle().pop();
        let mut lookup = match lookup {
            Some(lookup) => lookup,
            None => Lookup::new(&self.settings)?,
        };
        // A client is dropped if its lookup fails, because it may be in an unknown state.
        let found = look_up(&mut lookup, positions, TIMEOUT)?;
        idle().push(lookup);
        Ok(found)
    }
}
