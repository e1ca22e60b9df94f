//! Groups attempts into calls for several records.
//!
//! A call waits for more records until it is full or its time is over, and as long as too many other calls are in progress.
//! So calls contain more records the slower the endpoint is. The attempts of a call poll one shared future: the call goes on
//! as long as one of them is not cancelled, and needs no task of its own. Each record keeps its own attempt, because order, limits, the
//! circuit breaker, retries and spans would otherwise need a second form for batches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use crate::handler::Attempt;

/// How many records are processed together, and how often at the same time.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Maximum number of records of a call.
    pub records: usize,
    /// Maximum size of their values. A record with a larger one is alone.
    pub bytes: usize,
    /// For how long a call waits for more records.
    pub wait: Duration,
    /// Maximum number of calls in progress.
    pub calls: usize,
}

/// The results of a call's items, in their order.
type Results<R> = Arc<[R]>;
type Call<T, R> = Box<dyn Fn(Vec<T>) -> BoxFuture<'static, Vec<R>> + Send + Sync>;

/// Calls that process several items. Clones share them.
pub struct Batcher<T, R>(Arc<Shop<T, R>>);

struct Shop<T, R> {
    limits: BatchLimits,
    calls: Semaphore,
    call: Call<T, R>,
    open: Mutex<Option<Open<T, R>>>,
}

/// A call that accepts more items.
struct Open<T, R> {
    items: Arc<Items<T>>,
    bytes: usize,
    /// Only attempts own the call, so that it ends with the last of them.
    results: WeakShared<BoxFuture<'static, Results<R>>>,
}

struct Items<T> {
    items: Mutex<Vec<T>>,
    is_full: Notify,
}

impl<T: Send + 'static, R: Clone + Send + Sync + 'static> Batcher<T, R> {
    /// `call` returns one result for each item, in their order.
    pub fn new(
        limits: BatchLimits,
        call: impl Fn(Vec<T>) -> BoxFuture<'static, Vec<R>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shop {
            limits,
            calls: Semaphore::new(limits.calls.clamp(1, Semaphore::MAX_PERMITS)),
            call: Box::new(call),
            open: Mutex::default(),
        }))
    }

    /// The result of an item, from a call together with other items. `bytes` is its size.
    async fn process(&self, item: T, bytes: usize) -> R {
        let (place, results) = self.join(item, bytes);
        results.await[place].clone()
    }

    /// The result of an item, from a call of its own.
    async fn process_alone(&self, item: T) -> R {
        let mut results = self.0.run(vec![item]).await;
        results.swap_remove(0)
    }

    /// The place of the item in its call, and the results of the call.
    fn join(&self, item: T, bytes: usize) -> (usize, Shared<BoxFuture<'static, Results<R>>>) {
        let limits = &self.0.limits;
        let mut slot = lock(&self.0.open);
        if let Some(open) = &mut *slot
            && let Some(results) = open.results.upgrade()
        {
            let is_fitting = open.bytes.saturating_add(bytes) <= limits.bytes;
            if is_fitting {
                open.bytes += bytes;
                let place = open.items.add(item);
                if place + 1 >= limits.records || open.bytes >= limits.bytes {
                    open.items.is_full.notify_one();
                    *slot = None;
                }
                return (place, results);
            }
            open.items.is_full.notify_one();
        }
        let items = Arc::new(Items {
            items: Mutex::new(vec![item]),
            is_full: Notify::new(),
        });
        let results = self.0.clone().run_when_full(items.clone()).boxed().shared();
        *slot = None;
        if limits.records > 1 && bytes < limits.bytes {
            *slot = results.downgrade().map(|results| Open {
                items,
                bytes,
                results,
            });
        } else {
            items.is_full.notify_one();
        }
        (0, results)
    }
}

impl<R: Clone + Send + Sync + 'static> Batcher<Attempt, R> {
    /// The result of an attempt, from a call together with others. A record that has failed before is alone, so that it does not use up the attempts of others if
    /// it makes the whole call fail.
    pub async fn process_attempt(&self, attempt: Attempt) -> R {
        let bytes = attempt.record.value.as_ref().map_or(0, Bytes::len);
        match attempt.failed_attempts > 0 || attempt.is_repeated {
            true => self.process_alone(attempt).await,
            false => self.process(attempt, bytes).await,
        }
    }
}

impl<T, R> Shop<T, R> {
    async fn run_when_full(self: Arc<Self>, items: Arc<Items<T>>) -> Results<R> {
        // Either the call is full, or its time is over.
        let _ = timeout(self.limits.wait, items.is_full.notified()).await;
        // Never closed, so there always is a permit sooner or later. Until then, the call accepts more items.
        let _permit = self.calls.acquire().await;
        {
            let mut slot = lock(&self.open);
            if slot.as_ref().is_some_and(|open| Arc::ptr_eq(&open.items, &items)) {
                *slot = None;
            }
        }
        let items = std::mem::take(&mut *lock(&items.items));
        (self.call)(items).await.into()
    }

    async fn run(&self, items: Vec<T>) -> Vec<R> {
        let _permit = self.calls.acquire().await;
        (self.call)(items).await
    }
}

impl<T> Items<T> {
    /// Returns the place of the item.
    fn add(&self, item: T) -> usize {
        let mut items = lock(&self.items);
        items.push(item);
        items.len() - 1
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use tokio::time::{Instant, sleep};

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMITS: BatchLimits = BatchLimits {
        records: 4,
        bytes: 100,
        wait: Duration::from_millis(10),
        calls: 2,
    };

    type Calls = Arc<Mutex<Vec<Vec<u32>>>>;

    /// Doubles each item, in calls that take `time`. Also returns the items of the calls.
    fn doubling(limits: BatchLimits, time: Duration) -> (Batcher<u32, u32>, Calls) {
        let calls = Calls::default();
        let batcher = Batcher::new(limits, {
            let calls = calls.clone();
            move |items: Vec<u32>| {
                lock(&calls).push(items.clone());
                async move {
                    sleep(time).await;
                    items.iter().map(|item| item * 2).collect()
                }
                .boxed()
            }
        });
        (batcher, calls)
    }

    /// Processes items of this size together.
    async fn process(batcher: &Batcher<u32, u32>, items: std::ops::Range<u32>, bytes: usize) {
        let results = join_all(items.clone().map(|item| batcher.process(item, bytes))).await;
        assert!(results.into_iter().eq(items.map(|item| item * 2)));
    }

    #[tokio::test(start_paused = true)]
    async fn full_call_starts_at_once() {
        let (batcher, calls) = doubling(LIMITS, MS);
        let started = Instant::now();
        process(&batcher, 0..4, 1).await;
        assert_eq!(started.elapsed(), MS);
        let started = Instant::now();
        process(&batcher, 4..7, 1).await;
        assert_eq!(started.elapsed(), LIMITS.wait + MS);
        assert_eq!(*lock(&calls), [vec![0, 1, 2, 3], vec![4, 5, 6]]);
        assert!(lock(&batcher.0.open).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn call_size_is_limited() {
        let (batcher, calls) = doubling(LIMITS, MS);
        process(&batcher, 0..5, 40).await;
        assert_eq!(*lock(&calls), [vec![0, 1], vec![2, 3], vec![4]]);
        lock(&calls).clear();
        let started = Instant::now();
        process(&batcher, 0..1, 1_000).await;
        assert_eq!(started.elapsed(), MS);
        assert_eq!(*lock(&calls), [vec![0]]);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_call_accepts_more_items() {
        let limits = BatchLimits { calls: 1, ..LIMITS };
        let (batcher, calls) = doubling(limits, 100 * MS);
        let late = async {
            process(&batcher, 0..4, 1).await;
        };
        let more = async {
            sleep(20 * MS).await;
            let early = process(&batcher, 4..6, 1);
            let later = async {
                sleep(50 * MS).await;
                process(&batcher, 6..7, 1).await;
            };
            tokio::join!(early, later);
        };
        tokio::join!(late, more);
        assert_eq!(*lock(&calls), [vec![0, 1, 2, 3], vec![4, 5, 6]]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_item_can_be_alone() {
        let (batcher, calls) = doubling(LIMITS, MS);
        let (alone, ()) = tokio::join!(batcher.process_alone(9), process(&batcher, 0..2, 1));
        assert_eq!(alone, 18);
        assert_eq!(*lock(&calls), [vec![9], vec![0, 1]]);
    }

    #[tokio::test(start_paused = true)]
    async fn call_survives_partial_cancellation() {
        let (batcher, calls) = doubling(LIMITS, 100 * MS);
        let cancelled = timeout(50 * MS, batcher.process(1, 1));
        let (cancelled, result) = tokio::join!(cancelled, batcher.process(2, 1));
        assert!(cancelled.is_err());
        assert_eq!(result, 4);
        // All are cancelled before the call.
        assert!(timeout(5 * MS, batcher.process(3, 1)).await.is_err());
        assert_eq!(batcher.process(4, 1).await, 8);
        assert_eq!(*lock(&calls), [vec![1, 2], vec![4]]);
    }
}
