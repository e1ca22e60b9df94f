//! Parses schemas and decodes values on threads for blocking work, a few at a time: both can take seconds and
//! megabytes, and cannot be stopped.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

/// Maximum number of threads that parse or decode. Others wait.
const THREADS: usize = 2;
/// How long they wait.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct DecodingPool(Arc<Semaphore>);

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// Others took too long.
    Busy,
    /// The parser or decoder has panicked. The panic is in the log.
    Panicked,
    ShuttingDown,
}

impl DecodingPool {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(THREADS)))
    }

    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let turn = tokio::time::timeout(QUEUE_TIMEOUT, self.0.clone().acquire_owned());
        // The semaphore is never closed.
        let Ok(Ok(permit)) = turn.await else {
            return Err(NoResult::Busy);
        };
        let working = tokio::task::spawn_blocking(move || {
            // Held until the work ends, even if its caller has given up.
            let _permit = permit;
            work()
        });
        working.await.map_err(|error| {
            if error.is_panic() {
                NoResult::Panicked
            } else {
                NoResult::ShuttingDown
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn abandoned_work_holds_its_thread() {
        let pool = DecodingPool::new();
        let mut ends = Vec::new();
        for _ in 0..THREADS {
            let (end, ended) = mpsc::sync_channel::<()>(1);
            let (start, started) = tokio::sync::oneshot::channel();
            let running = pool.run(move || {
                start.send(()).unwrap();
                ended.recv().unwrap_err();
            });
            tokio::select! {
                _ = running => panic!("it has not ended"),
                started = started => started.unwrap(),
            }
            ends.push(end);
        }
        assert_eq!(pool.0.available_permits(), 0);
        ends.pop();
        assert_eq!(pool.run(|| 1).await, Ok(1));
    }

    #[tokio::test(start_paused = true)]
    async fn busy_pool_and_panic_are_results() {
        let pool = DecodingPool::new();
        let panicked = pool.run::<()>(|| panic!("as expected")).await;
        assert_eq!(panicked, Err(NoResult::Panicked));
        let all = pool.0.acquire_many(u32::try_from(THREADS).unwrap()).await;
        assert_eq!(pool.run(|| ()).await, Err(NoResult::Busy));
        drop(all);
        assert_eq!(pool.run(|| ()).await, Ok(()));
    }
}
