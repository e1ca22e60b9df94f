//! Backoff and log throttling while something is unavailable.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

/// Exponential backoff: delays that double from a minimum to a maximum.
#[derive(Debug)]
pub struct Backoff {
    builder: ExponentialBuilder,
    delays: ExponentialBackoff,
    max: Duration,
}

impl Backoff {
    /// A backoff whose delays grow from `min` to `max`.
    #[must_use]
    pub fn new(min: Duration, max: Duration) -> Self {
        let builder = ExponentialBuilder::default()
            .with_min_delay(min)
            .with_max_delay(max)
            .without_max_times();
        Self {
            builder,
            delays: builder.build(),
            max,
        }
    }

    /// The delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        self.delays.next().unwrap_or(self.max)
    }

    /// Starts again with the minimum delay; call it after a success.
    pub fn reset(&mut self) {
        self.delays = self.builder.build();
    }
}

/// Limits a repeated log line to one every 30 seconds.
#[derive(Clone, Debug, Default)]
pub struct LogThrottle {
    last: Option<Instant>,
}

impl LogThrottle {
    /// The time between two log lines.
    pub const INTERVAL: Duration = Duration::from_secs(30);

    /// Whether to log now. If so, the interval starts again.
    pub fn should_log(&mut self) -> bool {
        self.should_log_at(Instant::now())
    }

    fn should_log_at(&mut self, now: Instant) -> bool {
        let should_log = self
            .last
            .is_none_or(|last| now.duration_since(last) >= Self::INTERVAL);
        if should_log {
            self.last = Some(now);
        }
        should_log
    }

    /// Whether a line was logged since the last reset.
    #[must_use]
    pub fn has_logged(&self) -> bool {
        self.last.is_some()
    }

    /// Lets the next call log at once; call it after the cause has ended.
    pub fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_until_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(1));
        let delays: Vec<u128> = (0..5).map(|_| backoff.next_delay().as_millis()).collect();
        assert_eq!(delays, [200, 400, 800, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.next_delay(), Duration::from_millis(200));
    }

    #[test]
    fn log_line_repeats_after_interval() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        assert!(throttle.should_log_at(start));
        assert!(!throttle.should_log_at(start + LogThrottle::INTERVAL / 2));
        assert!(throttle.should_log_at(start + LogThrottle::INTERVAL));
        throttle.reset();
        assert!(!throttle.has_logged());
        assert!(throttle.should_log_at(start + LogThrottle::INTERVAL));
    }
}
