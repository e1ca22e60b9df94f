//! Limits of attempts per time: that of a process, which its configuration sets, or that of a whole pipeline, which operators want at run
//! time. All drivers of a pipeline in a process share them.
//!
//! What operators want takes precedence. Each process has a part of it, in proportion to the partitions of the pipeline's topics that it has:
//! processes do not know of each other, and together they have each partition once.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota};
use redeliver_core::Timestamp;
use redeliver_core::token_bucket::Bucket;
use redeliver_service::control::value::RateLimit as WantedRate;
use tokio::time::Instant;

/// The part of a second whose attempts may start at once, if no burst is set.
const DEFAULT_BURSTS_PER_SECOND: u32 = 10;
/// When to look again for the partitions of a process.
const UNKNOWN_PART: Duration = Duration::from_millis(100);
/// When to ask again at the latest: the part of the process grows when others end.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

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

/// The part of the rate of a whole pipeline that a process has, from 0 to 1. `None` if it is not known, or if the process has none.
pub(crate) type PartOfRate = Box<dyn Fn() -> Option<f64> + Send + Sync>;

/// How many partitions of a pipeline's topics a process has. Clones share the number.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnedPartitions(Arc<AtomicUsize>);

impl OwnedPartitions {
    pub(crate) fn assigned(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn revoked(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }

    /// The part that they are of so many partitions; `None` if there are none.
    pub(crate) fn part_of(&self, partitions: u32) -> Option<f64> {
        let owned = u32::try_from(self.0.load(Ordering::SeqCst)).unwrap_or(u32::MAX);
        // The number of partitions may not be known yet that others were added.
        (owned > 0 && partitions > 0).then(|| (f64::from(owned) / f64::from(partitions)).min(1.0))
    }
}

pub(crate) struct Limiter {
    configured: Option<DefaultDirectRateLimiter>,
    part: PartOfRate,
    wanted: Mutex<Wanted>,
    /// The time from which the time of the bucket counts. A wall clock can step.
    start: Instant,
}

/// What operators want.
#[derive(Default)]
struct Wanted {
    /// `None`: what the configuration says.
    rate: Option<WantedRate>,
    /// The tokens of the process, if there is a rate and an attempt has started.
    bucket: Option<Bucket>,
}

impl Limiter {
    pub(crate) fn new(limit: Option<RateLimit>, part: PartOfRate) -> Self {
        Self {
            configured: limit.and_then(limiter),
            part,
            wanted: Mutex::default(),
            start: Instant::now(),
        }
    }

    /// Sets how many attempts per second operators want in the whole pipeline. Returns whether that is a change.
    pub(crate) fn set_wanted(&self, rate: Option<WantedRate>) -> bool {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let is_change = wanted.rate != rate;
        wanted.rate = rate;
        if rate.and_then(WantedRate::per_second).is_none() {
            wanted.bucket = None;
        }
        is_change
    }

    /// Takes note that an attempt starts.
    ///
    /// # Errors
    /// How long it has to wait. It must ask again then.
    pub(crate) fn start(&self) -> Result<(), Duration> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        match wanted.rate {
            None => self.start_as_configured(),
            Some(WantedRate::Unlimited) => Ok(()),
            Some(WantedRate::PerSecond(rate)) => {
                let rate = rate * (self.part)().ok_or(UNKNOWN_PART)?;
                let bucket = wanted.bucket.get_or_insert_with(|| Bucket::new(rate));
                bucket.set_rate(rate);
                let now = Timestamp::from_millis(0).after(self.start.elapsed());
                bucket
                    .take(now)
                    .map(drop)
                    .map_err(|at| at.since(now).min(LONGEST_WAIT))
            }
        }
    }

    fn start_as_configured(&self) -> Result<(), Duration> {
        let Some(limiter) = &self.configured else {
            return Ok(());
        };
        limiter
            .check()
            .map_err(|not_until| not_until.wait_time_from(DefaultClock::default().now()))
    }
}

/// `None` if the time is 0, which is not a limit.
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

    fn limiter(limit: Option<RateLimit>, part: Option<f64>) -> Limiter {
        Limiter::new(limit, Box::new(move || part))
    }

    /// How many attempts can start now.
    fn started(limiter: &Limiter) -> usize {
        (0..1_000).take_while(|_| limiter.start().is_ok()).count()
    }

    #[test]
    fn attempts_stay_within_the_limit() {
        let limit = RateLimit {
            attempts: 1,
            per: Duration::from_secs(3_600),
            burst: Some(3),
        };
        let limited = limiter(Some(limit), None);
        assert_eq!([limited.start(), limited.start(), limited.start()], [Ok(()); 3]);
        let wait = limited.start().unwrap_err();
        assert!(wait > Duration::from_secs(3_000) && wait <= limit.per, "{wait:?}");
        assert_eq!(started(&limiter(None, None)), 1_000);
    }

    #[tokio::test(start_paused = true)]
    async fn wanted_rate_is_divided_by_partitions() {
        let never = RateLimit {
            attempts: 1,
            per: Duration::from_secs(86_400),
            burst: None,
        };
        let limiter = limiter(Some(never), Some(0.25));
        let per_second = |rate| Some(WantedRate::PerSecond(rate));
        assert!(limiter.set_wanted(per_second(40.0)) && !limiter.set_wanted(per_second(40.0)));
        assert_eq!(started(&limiter), 10);
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(started(&limiter), 5);
        // A higher rate adds no tokens at once.
        assert!(limiter.set_wanted(per_second(80.0)));
        let wait = limiter.start().unwrap_err();
        tokio::time::advance(wait).await;
        assert_eq!(limiter.start(), Ok(()));
        assert!(limiter.set_wanted(Some(WantedRate::Unlimited)));
        assert_eq!(started(&limiter), 1_000);
        assert!(limiter.set_wanted(None));
        assert_eq!(started(&limiter), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn more_partitions_shorten_the_wait() {
        let owned = OwnedPartitions::default();
        owned.assigned();
        let limiter = Limiter::new(None, {
            let owned = owned.clone();
            Box::new(move || owned.part_of(100))
        });
        limiter.set_wanted(Some(WantedRate::PerSecond(1.0)));
        assert_eq!(started(&limiter), 1);
        let wait = limiter.start().unwrap_err();
        assert!(wait <= LONGEST_WAIT, "{wait:?}");
        (1..100).for_each(|_| owned.assigned());
        tokio::time::advance(wait).await;
        assert_eq!(limiter.start(), Ok(()));
    }

    #[test]
    fn unknown_part_waits() {
        let limiter = limiter(None, None);
        limiter.set_wanted(Some(WantedRate::PerSecond(40.0)));
        assert_eq!(limiter.start(), Err(UNKNOWN_PART));
    }

    #[test]
    fn part_follows_owned_partitions() {
        let owned = OwnedPartitions::default();
        assert_eq!(owned.part_of(12), None);
        for _ in 0..3 {
            owned.clone().assigned();
        }
        assert_eq!((owned.part_of(12), owned.part_of(0)), (Some(0.25), None));
        assert_eq!(owned.part_of(2), Some(1.0));
        owned.revoked();
        assert_eq!(owned.part_of(4), Some(0.5));
    }

    #[test]
    fn default_burst_is_100_ms() {
        for (attempts, seconds, expected) in [(1_000, 1, 100), (5, 1, 0), (60_000, 60, 100), (10, 3_600, 0)] {
            assert_eq!(default_burst(attempts, Duration::from_secs(seconds)), expected);
        }
        assert_eq!(default_burst(7, Duration::from_millis(10)), 7);
    }
}
