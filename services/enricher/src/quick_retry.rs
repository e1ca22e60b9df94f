//! Quick retries within an attempt, before the record waits in a tier.
//!
//! They are for short failures, such as a broken connection or a restart of one process behind a load balancer. Delays
//! double and have full jitter, so that records that failed together are not retried together. In the long run, only a share
//! of the calls is repeated, so that an endpoint that fails does not get several times the load.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder, Retryable as _};
use tokio::time::Instant;
use tower::retry::budget::{Budget as _, TpsBudget};

/// The time whose calls determine how many retries there may be.
const WINDOW: Duration = Duration::from_secs(10);
/// This many retries per second are always possible.
const MIN_PER_SECOND: u32 = 10;

/// How often, after which delays, and for how long a call is repeated.
#[derive(Clone, Debug)]
pub struct QuickRetry {
    /// Maximum number of retries; 0 means a single call.
    pub retries: u32,
    /// Upper bound of the first delay; doubles with each retry.
    pub delay: Duration,
    /// No retry starts later than this after the start of the first call, so that a slow endpoint does not occupy a
    /// slot of `concurrency` for `retries` times as long.
    pub within: Duration,
    /// Limits how many calls are repeated. Clones share it.
    pub budget: Arc<TpsBudget>,
}

/// A budget of `share` retries per call, from 0 to 5. At least 10 retries per second are possible.
#[must_use]
pub fn retry_budget(share: f64) -> Arc<TpsBudget> {
    // The budget takes a whole number of calls for each retry, or of retries for each call, and rounds to more retries.
    let share = match share.clamp(0.0, 5.0) {
        share if share > 0.0 && share < 1.0 => 1.0 / ((1.0 / share).ceil() + 0.001),
        share => share,
    };
    #[expect(clippy::cast_possible_truncation, reason = "the precision does not matter")]
    let share = share as f32;
    Arc::new(TpsBudget::new(WINDOW, MIN_PER_SECOND, share))
}

impl QuickRetry {
    /// Calls until a call succeeds, `may_retry` returns false, or `retries`, `within` or `budget` is used up. Each call gets
    /// the number of retries, itself included.
    ///
    /// # Errors
    /// The error of the last call.
    pub async fn run<T, E, F, Fut>(&self, mut call: F, may_retry: impl FnMut(&E) -> bool) -> Result<T, E>
    where
        F: FnMut(u32) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let started = Instant::now();
        self.budget.deposit();
        // Evaluated after each failure, so the elapsed time includes the calls.
        let delays = self
            .max_delays()
            .map(|max| max.mul_f64(fastrand::f64()))
            .take_while(|delay| started.elapsed() + *delay <= self.within && self.budget.withdraw());
        let mut calls = 0..;
        let numbered = || call(calls.next().unwrap_or(u32::MAX));
        numbered.retry(delays).when(may_retry).await
    }

    fn max_delays(&self) -> impl Iterator<Item = Duration> + Send + Sync + Unpin + 'static {
        ExponentialBuilder::new()
            .with_min_delay(self.delay)
            .with_factor(2.0)
            .without_max_delay()
            .with_max_times(self.retries as usize)
            .build()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn quick(retries: u32, share: f64) -> QuickRetry {
        QuickRetry {
            retries,
            delay: MS,
            within: 1_000 * MS,
            budget: retry_budget(share),
        }
    }

    /// Runs calls that take `each` and fail. Returns their number and the total time.
    async fn failing(quick: &QuickRetry, each: Duration) -> (u32, Duration) {
        let (calls, started) = (Cell::new(0), Instant::now());
        let calls = &calls;
        let call = |retries| async move {
            assert_eq!(retries, calls.get());
            calls.set(calls.get() + 1);
            tokio::time::sleep(each).await;
            Err::<(), _>(calls.get())
        };
        assert_eq!(quick.run(call, |_| true).await, Err(calls.get()));
        (calls.get(), started.elapsed())
    }

    #[test]
    fn delays_double() {
        let quick = QuickRetry {
            delay: 100 * MS,
            within: Duration::MAX,
            ..quick(4, 0.2)
        };
        let delays: Vec<_> = quick.max_delays().map(|delay| delay.as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800]);
    }

    #[tokio::test(start_paused = true)]
    async fn retries_are_limited_and_jittered() {
        let quick = QuickRetry {
            delay: 100 * MS,
            within: 60_000 * MS,
            ..quick(3, 0.2)
        };
        let mut totals = Vec::new();
        for _ in 0..20 {
            let (calls, took) = failing(&quick, MS).await;
            assert_eq!(calls, 4);
            // tokio's clock rounds each delay up to a millisecond.
            assert!(took <= (100 + 200 + 400 + 4 + 4) * MS, "{took:?}");
            totals.push(took);
        }
        assert!(totals.iter().any(|took| *took != totals[0]), "{totals:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_failures_are_not_retried() {
        let quick = quick(5, 0.2);
        let (calls, took) = failing(&quick, 600 * MS).await;
        assert_eq!(calls, 2, "{took:?}");
        let (calls, _) = failing(&quick, 1_001 * MS).await;
        assert_eq!(calls, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_failure_is_final() {
        let quick = quick(5, 0.2);
        let calls = Cell::new(0);
        let call = |_| async {
            calls.set(calls.get() + 1);
            Err::<(), _>("permanent")
        };
        assert_eq!(quick.run(call, |_| false).await, Err("permanent"));
        assert_eq!(calls.get(), 1);
        let none = QuickRetry { retries: 0, ..quick };
        assert_eq!(failing(&none, MS).await.0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn retries_are_limited_to_a_share() {
        let quick = quick(2, 0.5);
        let mut calls = 0;
        for _ in 0..1_000 {
            calls += failing(&quick, MS).await.0;
        }
        // All 1,000 calls take less time than the window. 10 per second of it are always possible.
        let (share, always) = (1_000 / 2, 10 * 10);
        assert_eq!(calls, 1_000 + share + always);
        // The time without calls makes new retries possible.
        tokio::time::advance(2 * WINDOW).await;
        assert_eq!(failing(&quick, MS).await.0, 3);
    }
}
