//! Short retries within the process, before a record is sent on its way through the tiers.
//!
//! They are for what is over in a moment: a connection that broke, one process behind a load balancer
//! that restarts. Waits double and are spread over their whole length ("full jitter"), so that records
//! that failed together do not come back together.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder, Retryable as _};
use tokio::time::Instant;

/// How often, after which waits and for how long a call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuickRetry {
    /// Repeats at most; 0 is a single call.
    pub retries: u32,
    /// The longest first wait; it doubles with each repeat.
    pub delay: Duration,
    /// No repeat begins later than this after the first call began: a call that fails slowly must not
    /// hold its place `retries` times as long.
    pub budget: Duration,
}

impl QuickRetry {
    /// Calls until one call succeeds, fails in a way that must not be repeated, or repeats are used up.
    ///
    /// # Errors
    /// The error of the last call.
    pub async fn run<T, E, F, Fut>(&self, call: F, may_repeat: impl FnMut(&E) -> bool) -> Result<T, E>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let started = Instant::now();
        // The wait is computed when a call has failed, so the time that the calls took counts as well.
        let waits = self
            .longest_waits()
            .map(|longest| longest.mul_f64(fastrand::f64()))
            .take_while(|wait| started.elapsed() + *wait <= self.budget);
        call.retry(waits).when(may_repeat).await
    }

    fn longest_waits(&self) -> impl Iterator<Item = Duration> + Send + Sync + Unpin + 'static {
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

    /// Runs calls that take `each` and fail; gives their number and how long all took.
    async fn failing(quick: QuickRetry, each: Duration) -> (u32, Duration) {
        let (calls, started) = (Cell::new(0), Instant::now());
        let call = || async {
            calls.set(calls.get() + 1);
            tokio::time::sleep(each).await;
            Err::<(), _>(calls.get())
        };
        assert_eq!(quick.run(call, |_| true).await, Err(calls.get()));
        (calls.get(), started.elapsed())
    }

    #[test]
    fn waits_double() {
        let quick = QuickRetry {
            retries: 4,
            delay: 100 * MS,
            budget: Duration::MAX,
        };
        let waits: Vec<_> = quick.longest_waits().map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800]);
    }

    #[tokio::test(start_paused = true)]
    async fn repeats_are_counted_and_spread() {
        let quick = QuickRetry {
            retries: 3,
            delay: 100 * MS,
            budget: 60_000 * MS,
        };
        let mut totals = Vec::new();
        for _ in 0..20 {
            let (calls, took) = failing(quick, MS).await;
            assert_eq!(calls, 4);
            // tokio's clock has a resolution of one millisecond, rounded up for each wait.
            assert!(took <= (100 + 200 + 400 + 4 + 4) * MS, "{took:?}");
            totals.push(took);
        }
        assert!(totals.iter().any(|took| *took != totals[0]), "{totals:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_failures_are_not_repeated_beyond_the_budget() {
        let quick = QuickRetry {
            retries: 5,
            delay: MS,
            budget: 1_000 * MS,
        };
        let (calls, took) = failing(quick, 600 * MS).await;
        assert_eq!(calls, 2, "{took:?}");
        let (calls, _) = failing(quick, 1_001 * MS).await;
        assert_eq!(calls, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_must_not_be_repeated_is_called_once() {
        let quick = QuickRetry {
            retries: 5,
            delay: MS,
            budget: 1_000 * MS,
        };
        let calls = Cell::new(0);
        let call = || async {
            calls.set(calls.get() + 1);
            Err::<(), _>("for good")
        };
        assert_eq!(quick.run(call, |_| false).await, Err("for good"));
        assert_eq!(calls.get(), 1);
        let none = QuickRetry { retries: 0, ..quick };
        assert_eq!(failing(none, MS).await.0, 1);
    }
}
