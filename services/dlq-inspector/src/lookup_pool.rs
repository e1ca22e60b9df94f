//! Reads records from Kafka by position, such as the values of dead letters, which the index does not store.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::Position;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::credentials::Replaceable;
use redeliver_kafka::lookup::{Lookup, StoredRecord};
use redeliver_kafka::reader::ReadError;
use tokio::sync::Semaphore;

/// Maximum number of concurrent lookups. Further lookups wait.
const CONNECTIONS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(10);

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
        if positions.is_empty() {
            return Ok(Vec::new());
        }
        // The semaphore is never closed.
        let _permit = self.0.permits.acquire().await.ok();
        let inner = self.0.clone();
        let count = positions.len();
        let result = tokio::task::spawn_blocking(move || inner.get(&positions)).await;
        result.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Cancelled, because the runtime is shutting down.
            Err(_) => Ok(vec![None; count]),
        })
    }
}

impl Inner {
    fn get(&self, positions: &[Position]) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let pool = self.idle.get();
        let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken in a statement of its own, so that the lock is not held while a client is created.
        let lookup = idle().pop();
        let lookup = match lookup {
            Some(lookup) => lookup,
            None => Lookup::new(&self.settings)?,
        };
        // A client is dropped if its lookup fails, because it may be in an unknown state.
        let records = lookup.get(positions, TIMEOUT)?;
        idle().push(lookup);
        Ok(records)
    }
}
