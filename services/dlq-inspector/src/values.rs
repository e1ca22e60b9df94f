//! Values of dead letters, read from their topics when they are asked for.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::{Position, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::lookup::Lookup;
use redeliver_kafka::reader::ReadError;
use tokio::sync::Semaphore;

/// How many looks at the same time; more wait their turn.
const LOOKUPS: usize = 4;
/// How long one look may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads records by their positions. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Values(Arc<Inner>);

struct Inner {
    settings: KafkaSettings,
    idle: Mutex<Vec<Lookup>>,
    permits: Semaphore,
}

impl Values {
    pub(crate) fn new(settings: KafkaSettings) -> Self {
        Self(Arc::new(Inner {
            settings,
            idle: Mutex::new(Vec::new()),
            permits: Semaphore::new(LOOKUPS),
        }))
    }

    /// The records at these positions, in their order; `None` where there is none any more.
    pub(crate) async fn get(&self, wanted: Vec<Position>) -> Result<Vec<Option<Record>>, ReadError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        // Never closed.
        let _permit = self.0.permits.acquire().await.ok();
        let inner = self.0.clone();
        let none = wanted.len();
        let asked = tokio::task::spawn_blocking(move || inner.get(&wanted)).await;
        asked.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only while the runtime ends.
            Err(_) => Ok(vec![None; none]),
        })
    }
}

impl Inner {
    fn get(&self, wanted: &[Position]) -> Result<Vec<Option<Record>>, ReadError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let found = idle().pop();
        let lookup = match found {
            Some(lookup) => lookup,
            None => Lookup::new(&self.settings)?,
        };
        // A client with which something went wrong is not used again.
        let records = lookup.get(wanted, PATIENCE)?;
        idle().push(lookup);
        Ok(records)
    }
}
