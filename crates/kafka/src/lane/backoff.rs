//! How long a lane waits before it tries again.

use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::wait::{Backoff, LogThrottle};
use tokio_util::sync::CancellationToken;

use super::ROUND;

const MAX_DELAY: Duration = Duration::from_secs(5);
/// After this time without another failure, a lane is ready again even if it had nothing to write.
const SETTLED: Duration = Duration::from_secs(30);

/// The delays between attempts of a lane to connect, or to write what it could not write.
pub(super) fn new() -> Backoff {
    Backoff::new(ROUND, MAX_DELAY)
}

/// Blocks the thread until the delay is over or the lane is told to stop.
pub(super) fn sleep_unless_stopped(delay: Duration, stop: &CancellationToken) {
    let until = Instant::now() + delay;
    while Instant::now() < until && !stop.is_cancelled() {
        thread::park_timeout(ROUND.min(until.saturating_duration_since(Instant::now())));
    }
}

/// The failed transactions since the last commit.
pub(super) struct FailedTransactions {
    pub(super) count: u32,
    last: Option<Instant>,
    backoff: Backoff,
    paused_until: Option<Instant>,
    log_throttle: LogThrottle,
}

impl FailedTransactions {
    pub(super) fn new() -> Self {
        Self {
            count: 0,
            last: None,
            backoff: new(),
            paused_until: None,
            log_throttle: LogThrottle::default(),
        }
    }

    /// Records a failure and returns whether to log it.
    pub(super) fn record(&mut self, now: Instant) -> bool {
        self.count += 1;
        self.last = Some(now);
        // A single abort is normal, for example after a rebalance, so the first retry comes at once.
        if self.count > 1 {
            self.paused_until = Some(now + self.backoff.next_delay());
        }
        self.log_throttle.should_log()
    }

    /// Lets the next attempt begin at once, because its cause may have ended.
    pub(super) fn end_pause(&mut self) {
        self.paused_until = None;
    }

    /// Begins again after a commit. Log lines stay throttled: failures and commits may alternate.
    pub(super) fn reset(&mut self) {
        if self.count > 0 {
            self.count = 0;
            self.last = None;
            self.backoff.reset();
        }
    }

    pub(super) fn is_backing_off(&mut self, now: Instant) -> bool {
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        if !is_paused {
            self.paused_until = None;
        }
        is_paused
    }

    /// Whether more than one transaction in a row failed, the last one recently.
    pub(super) fn are_repeated(&self, now: Instant) -> bool {
        self.count > 1 && self.last.is_some_and(|last| now.duration_since(last) < SETTLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_commit() {
        let mut failed = FailedTransactions::new();
        let now = Instant::now();
        let mut pause = || {
            failed.record(now);
            failed.paused_until.map(|until| until - now)
        };
        // The first retry comes at once.
        assert_eq!(pause(), None);
        let pauses = std::iter::from_fn(&mut pause).map(|pause| pause.as_millis());
        let pauses: Vec<u128> = pauses.take(8).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
        failed.reset();
        failed.end_pause();
        failed.record(now);
        assert!(!failed.is_backing_off(now));
        failed.record(now);
        assert_eq!(failed.paused_until, Some(now + ROUND));
    }
}
