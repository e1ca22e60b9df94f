//! The local times that a cron expression selects, as bit sets.
//!
//! Local times are seconds since 1970-01-01T00:00:00 on the local clock, without a zone. A search visits at most one month after
//! another, and no expression that matches at all leaves more than 40 years between two matches. Counting adds up bits, so its
//! cost depends on the number of months, not on the number of matches.

use croner::errors::CronError;
use croner::{CronPattern, Weekday};
use jiff::SignedDuration;
use jiff::civil::{Date, date};

const SECONDS_PER_DAY: i64 = 86_400;
const EPOCH: Date = date(1970, 1, 1);

/// A month of each length, for croner: 28, 29, 30 and 31 days.
const MONTHS: [(i32, u32); 4] = [(2001, 2), (2004, 2), (2001, 4), (2001, 1)];
const SHORTEST_MONTH: u32 = 28;

/// The local times of an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Calendar {
    seconds: u64,
    minutes: u64,
    hours: u64,
    months: u64,
    /// The days of a month, by its length (28 to 31) and the weekday of its first day (from Sunday). Bit 0 is the first day.
    days: [[u64; 7]; 4],
}

impl Calendar {
    /// Reads the fields of a parsed expression.
    ///
    /// # Errors
    /// If croner cannot evaluate them.
    pub(super) fn new(pattern: &CronPattern) -> Result<Self, CronError> {
        let mut days = [[0; 7]; 4];
        for ((by_weekday, (year, month)), length) in days.iter_mut().zip(MONTHS).zip(SHORTEST_MONTH..) {
            for (set, first) in by_weekday.iter_mut().zip(0..) {
                for index in 0..length {
                    let weekday = Weekday::from_days_from_sunday(first + index);
                    if pattern.day_match(year, month, index + 1, weekday)? {
                        *set |= 1 << index;
                    }
                }
            }
        }
        Ok(Self {
            seconds: bits(&pattern.seconds.values()),
            minutes: bits(&pattern.minutes.values()),
            hours: bits(&pattern.hours.values()),
            months: bits(&pattern.months.values()),
            days,
        })
    }

    /// Whether no time matches. Each month begins on each weekday, and February has 29 days on each, in some year.
    pub(super) fn is_empty(&self) -> bool {
        let has_day = |month: usize| {
            let lengths = match month {
                2 => 0..=1,
                4 | 6 | 9 | 11 => 2..=2,
                _ => 3..=3,
            };
            self.days[lengths].iter().flatten().any(|days| *days != 0)
        };
        let has_month = (1..=12).any(|month| self.months & 1 << month != 0 && has_day(month));
        !has_month || self.hours == 0 || self.minutes == 0 || self.seconds == 0
    }

    /// Whether the expression selects every hour of a day.
    pub(crate) fn is_every_hour(&self) -> bool {
        self.hours.count_ones() == 24
    }

    /// Whether a local time matches.
    pub(crate) fn contains(&self, local: i64) -> bool {
        self.at_or_after(local) == Some(local)
    }

    /// The first match from `local` on. `None` after the year 9999.
    pub(crate) fn at_or_after(&self, local: i64) -> Option<i64> {
        let (day, time) = split(local)?;
        if self.has_day(day)
            && let Some(time) = self.time_at_or_after(time)
        {
            return Some(join(day, time));
        }
        let day = self.day_at_or_after(day.tomorrow().ok()?)?;
        Some(join(day, self.time_at_or_after(0)?))
    }

    /// The last match up to `local`. `None` before the year -9999.
    pub(crate) fn at_or_before(&self, local: i64) -> Option<i64> {
        let (day, time) = split(local)?;
        if self.has_day(day)
            && let Some(time) = self.time_at_or_before(time)
        {
            return Some(join(day, time));
        }
        let day = self.day_at_or_before(day.yesterday().ok()?)?;
        Some(join(day, self.time_at_or_before(SECONDS_PER_DAY - 1)?))
    }

    /// The number of matches from `first` to `last`, both included.
    pub(crate) fn count(&self, first: i64, last: i64) -> u64 {
        if first > last {
            return 0;
        }
        let (Some((first, from)), Some((last, until))) = (split(first), split(last)) else {
            return 0;
        };
        let per_day = self.times_before(SECONDS_PER_DAY);
        let mut count = self.count_days(first, last) * per_day;
        if self.has_day(first) {
            count -= self.times_before(from);
        }
        if self.has_day(last) {
            count -= per_day - self.times_before(until + 1);
        }
        count
    }

    /// The matching days of the month that begins with `first`.
    fn days_of(&self, first: Date) -> u64 {
        if self.months & 1 << first.month() == 0 {
            return 0;
        }
        let length = first.days_in_month().unsigned_abs() as usize - SHORTEST_MONTH as usize;
        let weekday = first.weekday().to_sunday_zero_offset().unsigned_abs() as usize;
        self.days[length][weekday]
    }

    fn has_day(&self, day: Date) -> bool {
        self.days_of(day.first_of_month()) & 1 << index(day) != 0
    }

    fn day_at_or_after(&self, day: Date) -> Option<Date> {
        let mut first = day.first_of_month();
        let mut from = index(day);
        loop {
            if let Some(found) = next_bit(self.days_of(first), from) {
                return nth_day(first, found);
            }
            first = first.last_of_month().tomorrow().ok()?;
            from = 0;
        }
    }

    fn day_at_or_before(&self, day: Date) -> Option<Date> {
        let mut first = day.first_of_month();
        let mut until = index(day);
        loop {
            if let Some(found) = previous_bit(self.days_of(first), until) {
                return nth_day(first, found);
            }
            let last = first.yesterday().ok()?;
            first = last.first_of_month();
            until = index(last);
        }
    }

    fn count_days(&self, first: Date, last: Date) -> u64 {
        let mut count = 0;
        let mut month = first.first_of_month();
        while month <= last {
            let mut days = self.days_of(month);
            if month == first.first_of_month() {
                days &= u64::MAX << index(first);
            }
            if month == last.first_of_month() {
                days &= below(index(last) + 1);
            }
            count += u64::from(days.count_ones());
            let Ok(next) = month.last_of_month().tomorrow() else {
                break;
            };
            month = next;
        }
        count
    }

    fn time_at_or_after(&self, time: i64) -> Option<i64> {
        let (hour, minute, second) = clock(time);
        if self.hours & 1 << hour != 0 {
            if self.minutes & 1 << minute != 0
                && let Some(second) = next_bit(self.seconds, second)
            {
                return Some(seconds(hour, minute, second));
            }
            if let Some(minute) = next_bit(self.minutes, minute + 1) {
                return Some(seconds(hour, minute, next_bit(self.seconds, 0)?));
            }
        }
        let hour = next_bit(self.hours, hour + 1)?;
        Some(seconds(
            hour,
            next_bit(self.minutes, 0)?,
            next_bit(self.seconds, 0)?,
        ))
    }

    fn time_at_or_before(&self, time: i64) -> Option<i64> {
        let (hour, minute, second) = clock(time);
        if self.hours & 1 << hour != 0 {
            if self.minutes & 1 << minute != 0
                && let Some(second) = previous_bit(self.seconds, second)
            {
                return Some(seconds(hour, minute, second));
            }
            if let Some(minute) = previous_bit(self.minutes & below(minute), 63) {
                return Some(seconds(hour, minute, previous_bit(self.seconds, 63)?));
            }
        }
        let hour = previous_bit(self.hours & below(hour), 63)?;
        Some(seconds(
            hour,
            previous_bit(self.minutes, 63)?,
            previous_bit(self.seconds, 63)?,
        ))
    }

    /// The number of matching times of a day before `time`.
    fn times_before(&self, time: i64) -> u64 {
        let ones = |set: u64| u64::from(set.count_ones());
        let (hour, minute, second) = clock(time);
        let per_minute = ones(self.seconds);
        let per_hour = ones(self.minutes) * per_minute;
        let mut count = ones(self.hours & below(hour)) * per_hour;
        if self.hours & 1 << hour != 0 {
            count += ones(self.minutes & below(minute)) * per_minute;
            if self.minutes & 1 << minute != 0 {
                count += ones(self.seconds & below(second));
            }
        }
        count
    }
}

fn bits(values: &[u16]) -> u64 {
    values.iter().fold(0, |set, value| set | 1 << value)
}

/// The bits below `end`.
fn below(end: u32) -> u64 {
    if end >= 64 { u64::MAX } else { (1 << end) - 1 }
}

fn next_bit(set: u64, from: u32) -> Option<u32> {
    let set = set & !below(from);
    (set != 0).then(|| set.trailing_zeros())
}

fn previous_bit(set: u64, until: u32) -> Option<u32> {
    let set = set & below(until + 1);
    (set != 0).then(|| 63 - set.leading_zeros())
}

/// The bit of a day in its month.
fn index(day: Date) -> u32 {
    u32::from(day.day().unsigned_abs()) - 1
}

fn nth_day(first: Date, index: u32) -> Option<Date> {
    first
        .checked_add(SignedDuration::from_hours(24 * i64::from(index)))
        .ok()
}

fn split(local: i64) -> Option<(Date, i64)> {
    let days = local.div_euclid(SECONDS_PER_DAY);
    let day = EPOCH
        .checked_add(SignedDuration::from_secs(days.checked_mul(SECONDS_PER_DAY)?))
        .ok()?;
    Some((day, local.rem_euclid(SECONDS_PER_DAY)))
}

fn join(day: Date, time: i64) -> i64 {
    day.duration_since(EPOCH).as_secs() + time
}

/// Hour, minute and second of a time of day. The end of a day is hour 24.
fn clock(time: i64) -> (u32, u32, u32) {
    let time = u32::try_from(time.clamp(0, SECONDS_PER_DAY)).unwrap_or(0);
    (time / 3600, time / 60 % 60, time % 60)
}

fn seconds(hour: u32, minute: u32, second: u32) -> i64 {
    i64::from(hour * 3600 + minute * 60 + second)
}
