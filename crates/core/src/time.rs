//! Timestamps in milliseconds, and clocks.
//!
//! The resolution is that of Kafka's timestamps. Conversions from a finer resolution round up, so that rounding never
//! makes a record early.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Milliseconds since 1970-01-01T00:00:00Z. Displayed as RFC 3339 in UTC with three decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// The text is not an RFC 3339 time with an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not an RFC 3339 time such as 2026-01-31T12:00:00.000Z")]
pub struct InvalidTimestamp;

impl Timestamp {
    /// The time `millis` milliseconds after the Unix epoch; negative before 1970.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// The milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// The time `wait` after this one, rounded up to the next millisecond. Saturates at the maximum.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(i64::try_from(millis).unwrap_or(i64::MAX)))
    }

    /// The duration from `earlier` to this time; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl Timestamp {
    /// The text that a header contains: RFC 3339 with milliseconds. `None` if the year is not from 1 to 9999, which only the
    /// timestamps of untrusted records can be.
    #[must_use]
    pub fn to_rfc3339(self) -> Option<String> {
        /// 0001-01-01T00:00:00Z.
        const YEAR_1: i64 = -62_135_596_800_000;
        let instant = jiff::Timestamp::from_millisecond(self.0).ok();
        let instant = instant.filter(|_| self.0 >= YEAR_1)?;
        Some(format!("{instant:.3}"))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_rfc3339() {
            Some(text) => f.write_str(&text),
            None => write!(f, "{}ms", self.0),
        }
    }
}

impl FromStr for Timestamp {
    type Err = InvalidTimestamp;

    /// Parses an RFC 3339 time. Rounds up to the next millisecond, so that a due time never becomes earlier.
    fn from_str(text: &str) -> Result<Self, InvalidTimestamp> {
        // jiff also accepts forms that RFC 3339 does not have, such as a time zone in brackets.
        let plain = text.len() >= 20 && text.len() <= 40 && !text.contains('[');
        let instant: jiff::Timestamp = plain
            .then(|| text.parse().ok())
            .flatten()
            .ok_or(InvalidTimestamp)?;
        let nanos = instant.as_nanosecond();
        let millis = nanos.div_euclid(1_000_000) + i128::from(nanos.rem_euclid(1_000_000) > 0);
        i64::try_from(millis).map(Self).map_err(|_| InvalidTimestamp)
    }
}

/// The source of the current time. Tests replace it by a [`ManualClock`].
pub trait Clock: Send + Sync {
    /// The current time, rounded down to the millisecond, so that no record is early.
    fn now(&self) -> Timestamp;

    /// The time since a fixed moment, which is not affected when the wall clock is set.
    fn monotonic(&self) -> Duration;

    /// The current time, if it is certain enough to release what is due. `None` after a step of the wall clock, until the new
    /// time is confirmed; see [`GuardedClock`](crate::clock_guard::GuardedClock). [`Clock::now`] then continues the former
    /// time.
    fn confirmed(&self) -> Option<Timestamp> {
        Some(self.now())
    }

    /// The earliest and the latest time that may be the current one. They differ after a step of the wall clock, until the new
    /// time is confirmed.
    fn possible(&self) -> (Timestamp, Timestamp) {
        let now = self.now();
        (now, now)
    }

    /// The duration until `due`; zero if it has passed.
    fn until(&self, due: Timestamp) -> Duration {
        due.since(self.now())
    }
}

/// The system clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the wall clock"
    )]
    fn now(&self) -> Timestamp {
        let since_epoch = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        Timestamp(i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX))
    }

    fn monotonic(&self) -> Duration {
        static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
        // Read before the clock: the first call initialises it.
        let origin = *ORIGIN;
        origin.elapsed()
    }
}

/// A clock for tests, which only moves when it is set.
#[derive(Debug)]
pub struct ManualClock {
    wall: AtomicI64,
    monotonic: AtomicU64,
}

impl ManualClock {
    /// A clock that shows `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self {
            wall: AtomicI64::new(start.0),
            monotonic: AtomicU64::new(0),
        }
    }

    /// Sets the time, forwards or backwards. The monotonic clock does not move.
    pub fn set(&self, now: Timestamp) {
        self.wall.store(now.0, Ordering::SeqCst);
    }

    /// Lets time pass on both clocks. Rounded up to the next millisecond.
    pub fn advance(&self, by: Duration) {
        let before = self.now();
        let after = before.after(by);
        self.monotonic
            .fetch_add(u64::try_from(after.0 - before.0).unwrap_or(0), Ordering::SeqCst);
        self.set(after);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.wall.load(Ordering::SeqCst))
    }

    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.monotonic.load(Ordering::SeqCst))
    }
}

/// The system clock with a wall clock that can be set, for tests with real services.
#[derive(Debug, Default)]
pub struct AdjustableClock(AtomicI64);

impl AdjustableClock {
    /// Sets how far the wall clock is ahead of that of the system, in milliseconds.
    pub fn set_error(&self, millis: i64) {
        self.0.store(millis, Ordering::SeqCst);
    }
}

impl Clock for AdjustableClock {
    fn now(&self) -> Timestamp {
        Timestamp(SystemClock.now().0.saturating_add(self.0.load(Ordering::SeqCst)))
    }

    fn monotonic(&self) -> Duration {
        SystemClock.monotonic()
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    fn monotonic(&self) -> Duration {
        (**self).monotonic()
    }

    fn confirmed(&self) -> Option<Timestamp> {
        (**self).confirmed()
    }

    fn possible(&self) -> (Timestamp, Timestamp) {
        (**self).possible()
    }

    fn until(&self, due: Timestamp) -> Duration {
        (**self).until(due)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_timestamp_is_displayed_in_utc_with_milliseconds() {
        assert_eq!(
            Timestamp::from_millis(1_700_000_000_000).to_string(),
            "2023-11-14T22:13:20.000Z"
        );
        assert_eq!(Timestamp::from_millis(7).to_string(), "1970-01-01T00:00:00.007Z");
    }

    #[test]
    fn offsets_are_parsed_and_finer_fractions_are_rounded_up() {
        let read = |text: &str| text.parse::<Timestamp>().map(Timestamp::as_millis);
        assert_eq!(read("1970-01-01T01:00:00.001+01:00"), Ok(1));
        assert_eq!(read("1970-01-01T00:00:00.0010001Z"), Ok(2));
        assert_eq!(read("1970-01-01T00:00:00.001000Z"), Ok(1));
        for wrong in [
            "",
            "now",
            "0",
            "1700000000000",
            "2023-11-14",
            "2023-11-14T22:13:20",
            "2023-13-01T00:00:00Z",
        ] {
            assert_eq!(read(wrong), Err(InvalidTimestamp), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn every_timestamp_is_parsed_back(millis in -60_000_000_000_000_i64..250_000_000_000_000) {
            let time = Timestamp::from_millis(millis);
            prop_assert_eq!(time.to_string().parse(), Ok(time));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,60}") {
            let _ = text.parse::<Timestamp>();
        }

        #[test]
        fn a_wait_is_never_rounded_down(start in 0_i64..1_000_000, nanos in 0_u64..10_000_000_000) {
            let due = Timestamp::from_millis(start).after(Duration::from_nanos(nanos));
            prop_assert!(u128::try_from(due.as_millis() - start).unwrap() * 1_000_000 >= u128::from(nanos));
        }
    }
}
