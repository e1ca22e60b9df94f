//! A limit of attempts per time, which all drivers of a pipeline in a process share.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota};

/// The part of a second whose attempts may start at once, if no burst is set.
const DEFAULT_BURSTS_PER_SECOND: u32 = 10;

/// How many attempts may start in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The number of attempts. 0 counts as 1.
    pub attempts: u32,
    /// The time.
    pub per: Duration,
    /// How many may start at once after a pause. `None`: as many as in 100 ms, at least 1.
    pub burst: Option<u32>,
}

pub(crate) struct Limiter(Option<DefaultDirectRateLimiter>);

impl Limiter {
    pub(crate) fn new(limit: Option<RateLimit>) -> Self {
        Self(limit.and_then(limiter))
    }

    /// Takes note that an attempt starts.
    ///
    /// # Errors
    /// How long it has to wait. It must ask again then.
    pub(crate) fn start(&self) -> Result<(), Duration> {
        let Some(limiter) = &self.0 else { return Ok(()) };
        limiter
            .check()
            .map_err(|not_until| not_until.wait_time_from(DefaultClock::default().now()))
    }
}

/// `None` if the time is 0, which is no limit.
fn limiter(limit: RateLimit) -> Option<DefaultDirectRateLimiter> {
    let attempts = limit.attempts.max(1);
    let quota = Quota::with_period(limit.per / attempts)?;
    let burst = limit.burst.unwrap_or_else(|| default_burst(attempts, limit.per));
    let burst = NonZeroU32::new(burst).unwrap_or(NonZeroU32::MIN);
    Some(DefaultDirectRateLimiter::direct(quota.allow_burst(burst)))
}

fn default_burst(attempts: u32, per: Duration) -> u32 {
    let bursts = per.as_millis() * u128::from(DEFAULT_BURSTS_PER_SECOND) / 1_000;
    let burst = u128::from(attempts)
        .checked_div(bursts)
        .unwrap_or_else(|| attempts.into());
    u32::try_from(burst).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_attempts_start_than_the_limit_allows() {
        let limit = RateLimit {
            attempts: 1,
            per: Duration::from_secs(3_600),
            burst: Some(3),
        };
        let limiter = Limiter::new(Some(limit));
        assert_eq!([limiter.start(), limiter.start(), limiter.start()], [Ok(()); 3]);
        let wait = limiter.start().unwrap_err();
        assert!(wait > Duration::from_secs(3_000) && wait <= limit.per, "{wait:?}");
        assert!((0..100).all(|_| Limiter::new(None).start().is_ok()));
    }

    #[test]
    fn a_burst_is_by_default_what_may_start_in_100_ms() {
        for (attempts, seconds, expected) in [(1_000, 1, 100), (5, 1, 0), (60_000, 60, 100), (10, 3_600, 0)] {
            assert_eq!(default_burst(attempts, Duration::from_secs(seconds)), expected);
        }
        assert_eq!(default_burst(7, Duration::from_millis(10)), 7);
    }
}
