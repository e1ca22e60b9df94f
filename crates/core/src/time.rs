//! Timestamps in milliseconds, and clocks.
//!
//! The resolution is that of Kafka's timestamps. Conversions from a finer resolution round up, so that rounding never
//! makes a record early.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jiff::SignedDuration;
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};

/// Milliseconds since 1970-01-01T00:00:00Z. Displayed as RFC 3339 in UTC with three decimals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// The first millisecond of the year 1 and the last one of the year 9999: what RFC 3339 and protobuf can represent.
const REPRESENTABLE: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;
/// 1970-01-01T00:00:00 as a local time.
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

/// Why a text is not a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTimestamp {
    /// It does not have the form of RFC 3339.
    #[error("is not an RFC 3339 time such as 2026-01-31T12:00:00.000Z")]
    Form,
    /// It has no offset.
    #[error("has no offset; end it with Z for UTC, or with an offset such as +01:00")]
    NoOffset,
    /// It has a month, day, hour or minute that does not exist.
    #[error("names a month, day, hour or minute that does not exist")]
    Field,
    /// Seconds do not go beyond 59. Leap seconds cannot be represented, and any other second would be early or late.
    #[error("has a second of 60 or more; must be from 00 to 59, even in a minute with a leap second")]
    Second,
    /// Offsets do not go beyond 23:59.
    #[error("has an offset beyond 23:59; must be from -23:59 to +23:59")]
    Offset,
    /// It is before the year 1 or after the year 9999 in UTC.
    #[error("is not in the years 1 to 9999")]
    Range,
}

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
        if !REPRESENTABLE.contains(&self.0) {
            return None;
        }
        // Local times reach to the end of the year 9999, unlike jiff's timestamps.
        let utc = EPOCH.checked_add(SignedDuration::from_millis(self.0)).ok()?;
        Some(format!("{utc:.3}Z"))
    }

    /// Parses a time as [`str::parse`] does, but interprets it in `zone` if it has no offset: a local time that is missing because the
    /// clock goes forward is moved forward by the length of the gap, and of a repeated one, the first is used.
    ///
    /// # Errors
    /// Why the text is not a time. Never [`InvalidTimestamp::NoOffset`].
    pub fn parse_in(text: &str, zone: &TimeZone) -> Result<Self, InvalidTimestamp> {
        let time = ParsedTime::read(text)?;
        let offset = time.offset.unwrap_or_else(|| {
            let ambiguous = zone.to_ambiguous_timestamp(time.local).offset();
            let (AmbiguousOffset::Unambiguous { offset: before }
            | AmbiguousOffset::Gap { before, .. }
            | AmbiguousOffset::Fold { before, .. }) = ambiguous;
            before.seconds()
        });
        time.at(offset)
    }
}

/// A date and time as it is written.
struct ParsedTime {
    /// To the second.
    local: DateTime,
    /// The rest, rounded up; at most 1,000.
    millis: i64,
    /// In seconds east of UTC.
    offset: Option<i32>,
}

impl ParsedTime {
    /// `2026-01-31T12:00:00.5+01:00`. More than RFC 3339, it may lack the seconds or the offset, as many programs write it, and the offset
    /// may lack its colon or its minutes.
    fn read(text: &str) -> Result<Self, InvalidTimestamp> {
        use InvalidTimestamp::{Field, Form, Offset, Second};
        let mut rest = Digits(text.as_bytes());
        let year = rest.number(4).ok_or(Form)?;
        let month = rest.after(b"-").ok_or(Form)?;
        let day = rest.after(b"-").ok_or(Form)?;
        let hour = rest.after(b"Tt ").ok_or(Form)?;
        let minute = rest.after(b":").ok_or(Form)?;
        let (mut second, mut millis) = (0, 0);
        if rest.skip(b":") {
            second = rest.number(2).ok_or(Form)?;
            if rest.skip(b".") {
                millis = rest.fraction().ok_or(Form)?;
            }
        }
        let sign = match rest.0.first() {
            None => None,
            Some(b'Z' | b'z') => Some(0),
            Some(b'+') => Some(1),
            Some(b'-') => Some(-1),
            Some(_) => return Err(Form),
        };
        rest.0 = rest.0.get(1..).unwrap_or_default();
        let mut offset = sign.map(|_| 0);
        if let Some(sign @ (1 | -1)) = sign {
            let hours = rest.number(2).ok_or(Form)?;
            let has_minutes = rest.skip(b":") || !rest.0.is_empty();
            let minutes = if has_minutes {
                rest.number(2).ok_or(Form)?
            } else {
                0
            };
            if hours > 23 || minutes > 59 {
                return Err(Offset);
            }
            offset = Some(sign * (i32::from(hours) * 60 + i32::from(minutes)) * 60);
        }
        if !rest.0.is_empty() {
            return Err(Form);
        }
        if second > 59 {
            return Err(Second);
        }
        let small = |number| i8::try_from(number).map_err(|_| Field);
        let [month, day, hour, minute, second] = [month, day, hour, minute, second].map(small);
        let local = DateTime::new(year, month?, day?, hour?, minute?, second?, 0);
        Ok(Self {
            local: local.map_err(|_| Field)?,
            millis,
            offset,
        })
    }

    fn at(&self, offset: i32) -> Result<Timestamp, InvalidTimestamp> {
        let seconds = self.local.duration_since(EPOCH).as_secs() - i64::from(offset);
        let millis = seconds * 1_000 + self.millis;
        match REPRESENTABLE.contains(&millis) {
            true => Ok(Timestamp(millis)),
            false => Err(InvalidTimestamp::Range),
        }
    }
}

/// The bytes of a text that are not read yet.
struct Digits<'t>(&'t [u8]);

impl Digits<'_> {
    /// Whether the next byte is one of these, which is then read.
    fn skip(&mut self, one_of: &[u8]) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if one_of.contains(first) => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    /// A number with this many digits.
    fn number(&mut self, digits: usize) -> Option<i16> {
        let (number, rest) = self.0.split_at_checked(digits)?;
        if !number.iter().all(u8::is_ascii_digit) {
            return None;
        }
        self.0 = rest;
        Some(
            number
                .iter()
                .fold(0, |sum, digit| sum * 10 + i16::from(digit - b'0')),
        )
    }

    /// A number with two digits after one of these bytes.
    fn after(&mut self, one_of: &[u8]) -> Option<i16> {
        self.skip(one_of).then(|| self.number(2)).flatten()
    }

    /// A fraction of a second in milliseconds, rounded up.
    fn fraction(&mut self) -> Option<i64> {
        let length = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(length);
        self.0 = rest;
        let (millis, finer) = digits.split_at(length.min(3));
        let padded = millis.iter().chain(b"00").take(3);
        let millis = padded.fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0'));
        (length > 0).then(|| millis + i64::from(finer.iter().any(|digit| *digit != b'0')))
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

    /// Parses a time with an offset. Rounds up to the next millisecond, so that a due time never becomes earlier.
    fn from_str(text: &str) -> Result<Self, InvalidTimestamp> {
        let time = ParsedTime::read(text)?;
        time.at(time.offset.ok_or(InvalidTimestamp::NoOffset)?)
    }
}

/// The source of the current time. Tests replace it by a [`ManualClock`].
pub trait Clock: Send + Sync {
    /// The current time, rounded down to the millisecond, so that no record is early.
    fn now(&self) -> Timestamp;

    /// The time since a fixed moment, which is not affected when the wall clock is set.
    fn monotonic(&self) -> Duration;

    /// The current time, if it is certain enough to release what is due. `None` after a step of the wall clock, until the new
    /// time is confirmed; see [`GuardedClock`](crate::clock_guard::GuardedClock). [`Clock::now`] then continues the previous
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
    fn timestamp_is_displayed_in_utc() {
        assert_eq!(
            Timestamp::from_millis(1_700_000_000_000).to_string(),
            "2023-11-14T22:13:20.000Z"
        );
        assert_eq!(Timestamp::from_millis(7).to_string(), "1970-01-01T00:00:00.007Z");
    }

    fn read(text: &str) -> Result<i64, InvalidTimestamp> {
        text.parse().map(Timestamp::as_millis)
    }

    #[test]
    fn offsets_and_fractions_are_parsed() {
        for (text, millis) in [
            ("1970-01-01T01:00:00.001+01:00", 1),
            ("1970-01-01T00:00:00.0010001Z", 2),
            ("1970-01-01T00:00:00.001000Z", 1),
            ("1970-01-01t00:00:59.99900000000000000000000000000000001z", 60_000),
            ("1970-01-01 00:01-0000", 60_000),
            ("1970-01-01T05:30:00+0530", 0),
            ("1969-12-31T23:00:00-01", 0),
            ("9999-12-31T23:59:59Z", 253_402_300_799_000),
            ("0001-01-01T00:00:00Z", -62_135_596_800_000),
        ] {
            assert_eq!(read(text), Ok(millis), "{text}");
        }
    }

    #[test]
    fn invalid_text_has_a_reason() {
        use InvalidTimestamp::{Field, Form, NoOffset, Offset, Range, Second};
        for (reason, texts) in [
            (
                Form,
                "|now|0|1700000000000|2023-11-14|20231114T221320Z|2023-11-14T22Z|2023-11-14T22:13:20.Z|\
                 2023-11-14T22:13:20,5Z|2023-11-14T22:13:20 Z|2023-11-14T22:13:20ZZ|\
                 2023-11-14T22:13:20+01:|2023-11-14T22:13:20+1:00|2023-11-14T22:13:20+01:00:00|\
                 2023-11-14T22:13:20Z[UTC]|2023-11-14T22:13:20[UTC]|+002023-11-14T22:13:20Z",
            ),
            (NoOffset, "2023-11-14T22:13:20|2023-11-14 22:13"),
            (
                Field,
                "2023-13-01T00:00:00Z|2023-00-01T00:00:00Z|2023-02-29T00:00:00Z|2023-02-28T24:00:00Z|\
                 2023-02-28T00:60:00Z",
            ),
            (
                Second,
                "2023-11-14T12:30:60Z|2016-12-31T23:59:60Z|2023-11-14T12:30:99.5Z",
            ),
            (
                Offset,
                "2023-11-14T12:00:00+24:00|2023-11-14T12:00:00+25:00|2023-11-14T12:00:00-01:60",
            ),
            (
                Range,
                "9999-12-31T23:59:59-00:01|0001-01-01T00:00:00+00:01|0000-01-01T00:00:00Z|\
                 9999-12-31T23:59:59.9991Z",
            ),
        ] {
            for text in texts.split('|') {
                assert_eq!(read(text), Err(reason), "{text}");
            }
        }
    }

    #[test]
    fn local_time_is_in_its_zone() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let read = |text: &str| Timestamp::parse_in(text, &zone).map(|time| time.to_string());
        for (text, utc) in [
            ("2025-12-01T10:00:00.0001", "2025-12-01T09:00:00.001Z"),
            ("2025-12-01T10:00:00Z", "2025-12-01T10:00:00.000Z"),
            // Missing when the clocks go forward, and repeated when they go back.
            ("2026-03-29T02:30", "2026-03-29T01:30:00.000Z"),
            ("2026-10-25T02:30", "2026-10-25T00:30:00.000Z"),
            ("9999-12-31T23:59:59", "9999-12-31T22:59:59.000Z"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(utc), "{text}");
        }
        assert_eq!(read("2025-12-01T10:00:60"), Err(InvalidTimestamp::Second));
    }

    /// The days from 1970-01-01 to a date of the Gregorian calendar, counted one by one.
    fn days(year: i64, month: i64, day: i64) -> Option<i64> {
        let is_leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let lengths = [
            31,
            28 + i64::from(is_leap(year)),
            31,
            30,
            31,
            30,
            31,
            31,
            30,
            31,
            30,
            31,
        ];
        let index = usize::try_from(month).ok()?.checked_sub(1)?;
        (1..=*lengths.get(index)?).contains(&day).then_some(())?;
        let years = (0..year).map(|year| 365 + i64::from(is_leap(year))).sum::<i64>();
        // 0000-01-01 is 719,528 days before 1970-01-01.
        Some(years - 719_528 + lengths[..index].iter().sum::<i64>() + day - 1)
    }

    proptest! {
        #[test]
        fn every_timestamp_is_parsed_back(millis in REPRESENTABLE) {
            let time = Timestamp::from_millis(millis);
            prop_assert_eq!(time.to_string().parse(), Ok(time));
        }

        #[test]
        fn accepted_text_is_exact(
            (year, month, day) in (prop_oneof![0_i64..10_000, 1_900_i64..2_100], 0_i64..=13, 0_i64..=32),
            (hour, minute, second) in (0_i64..=25, 0_i64..=61, proptest::option::of(0_i64..=61)),
            fraction in "|\\.[0-9]{1,12}",
            offset in proptest::option::of((prop_oneof![Just('+'), Just('-')], 0_i64..=26, 0_i64..=61)),
            separator in "[Tt ]",
        ) {
            let mut text = format!("{year:04}-{month:02}-{day:02}{separator}{hour:02}:{minute:02}");
            let mut picos = 0_i128;
            if let Some(second) = second {
                text += &format!(":{second:02}{fraction}");
                picos = i128::from(second) * 1_000_000_000_000;
                if !fraction.is_empty() {
                    picos += format!("{:0<12}", &fraction[1..]).parse::<i128>().unwrap();
                }
            }
            let offset_minutes = match offset {
                None => 0,
                Some((sign, hours, minutes)) => {
                    text += &format!("{sign}{hours:02}:{minutes:02}");
                    (hours * 60 + minutes) * if sign == '+' { 1 } else { -1 }
                }
            };
            if offset.is_none() {
                text.push('Z');
            }
            let is_valid = hour < 24 && minute < 60 && second.unwrap_or(0) < 60
                && offset.is_none_or(|(_, hours, minutes)| hours < 24 && minutes < 60);
            let expected = days(year, month, day).filter(|_| is_valid).map(|days| {
                let minutes = (days * 24 + hour) * 60 + minute - offset_minutes;
                // In picoseconds, rounded up to a millisecond.
                let picos = i128::from(minutes) * 60_000_000_000_000 + picos;
                i64::try_from(picos.div_euclid(1_000_000_000) + i128::from(picos.rem_euclid(1_000_000_000) > 0)).unwrap()
            });
            let expected = expected.filter(|millis| REPRESENTABLE.contains(millis));
            prop_assert_eq!(read(&text).ok(), expected, "{}", text);
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
