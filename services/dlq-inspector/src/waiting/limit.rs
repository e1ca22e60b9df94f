//! How many calls read from Kafka at the same time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// How many scans run at the same time. Each of them reads as fast as Kafka sends.
pub(crate) const SCANS: usize = 2;
/// How long a scan may wait for others to end.
pub(crate) const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);

/// Permits scans. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ScanLimit(Arc<Semaphore>);

impl ScanLimit {
    /// For this many at the same time.
    pub(crate) fn new(scans: usize) -> Self {
        Self(Arc::new(Semaphore::new(scans)))
    }

    /// Waits until a scan may run, which it may while it has the permit. `None`: others took too long.
    pub(crate) async fn enter(&self) -> Option<OwnedSemaphorePermit> {
        let permit = timeout(QUEUE_TIMEOUT, self.0.clone().acquire_owned());
        // The semaphore is never closed.
        permit.await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn excess_scans_wait_and_give_up() {
        let limit = ScanLimit::new(SCANS);
        let mut running = Vec::new();
        for _ in 0..SCANS {
            running.push(limit.enter().await.unwrap());
        }
        assert!(limit.enter().await.is_none());
        let (entered, ()) = tokio::join!(limit.enter(), async { drop(running.pop()) });
        assert!(entered.is_some(), "one has ended");
    }
}
