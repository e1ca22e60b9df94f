//! Instants on the wall clock, in milliseconds, and the clocks that give them.
//!
//! Milliseconds are Kafka's own resolution. A due time is rounded up when it is made from something
//! finer, so that rounding can never release a record early.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// Milliseconds since 1970-01-01T00:00:00Z. Written as RFC 3339 in UTC with three decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// A text that is not an RFC 3339 instant with an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not an RFC 3339 time such as 2026-01-31T12:00:00.000Z")]
pub struct InvalidTimestamp;

impl Timestamp {
    /// From milliseconds since the Unix epoch, negative before 1970.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// This instant plus a wait, rounded up to the next millisecond; saturates at the end of time.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(i64::try_from(millis).unwrap_or(i64::MAX)))
    }

    /// How long from `earlier` to this instant; zero when `earlier` is the later one.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(instant) => write!(f, "{instant:.3}"),
            // Outside of the years RFC 3339 can write; only untrusted record timestamps get here.
            Err(_) => write!(f, "{}ms", self.0),
        }
    }
}

impl FromStr for Timestamp {
    type Err = InvalidTimestamp;

    /// Reads an RFC 3339 instant. Fractions finer than a millisecond are rounded up: a due time may
    /// only move later.
    fn from_str(text: &str) -> Result<Self, InvalidTimestamp> {
        // jiff also accepts shapes that RFC 3339 does not, such as a bracketed zone; the protocol does not.
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

/// Where the time comes from. Services take one, so that tests can move it by hand.
pub trait Clock: Send + Sync {
    /// The time now, rounded down to the millisecond: a record is never released before its due time.
    fn now(&self) -> Timestamp;

    /// How long it is until `due`, as exactly as the clock knows; zero when it has passed.
    fn until(&self, due: Timestamp) -> Duration {
        due.since(self.now())
    }
}

/// The machine's wall clock.
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
}

/// A clock that only moves when told to.
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    /// A clock that stands at `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self(AtomicI64::new(start.0))
    }

    /// Moves the clock, forwards or backwards.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.0, Ordering::SeqCst);
    }

    /// Moves the clock forwards.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().after(by));
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
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
    fn times_are_written_with_milliseconds_in_utc() {
        assert_eq!(
            Timestamp::from_millis(1_700_000_000_000).to_string(),
            "2023-11-14T22:13:20.000Z"
        );
        assert_eq!(Timestamp::from_millis(7).to_string(), "1970-01-01T00:00:00.007Z");
    }

    #[test]
    fn offsets_are_read_and_finer_fractions_are_rounded_up() {
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
        fn every_time_is_read_back(millis in -60_000_000_000_000_i64..250_000_000_000_000) {
            let time = Timestamp::from_millis(millis);
            prop_assert_eq!(time.to_string().parse(), Ok(time));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,60}") {
            let _ = text.parse::<Timestamp>();
        }

        #[test]
        fn waiting_is_never_rounded_down(start in 0_i64..1_000_000, nanos in 0_u64..10_000_000_000) {
            let due = Timestamp::from_millis(start).after(Duration::from_nanos(nanos));
            prop_assert!(u128::try_from(due.as_millis() - start).unwrap() * 1_000_000 >= u128::from(nanos));
        }
    }
}
