//! A cron expression on the clock of a time zone.
//!
//! Times are seconds since the Unix epoch. A local time that is missing, because the clock goes forward, is one of the zone's
//! previous offset: 02:30 in a gap from 02:00 to 03:00 is 03:30, as RFC 5545 (3.3.5) says. So several times in a gap stay as far apart
//! as they are, and expressions for every hour or minute get no additional occurrence, because the shifted one coincides with
//! a regular one.

use std::sync::Arc;

use jiff::civil::DateTime;

use crate::cron::Calendar;
use crate::occurrence::Reason;
use crate::zone::{Segment, Zone};

/// What happens to a local time that a day does not have, because the clock goes forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gap {
    /// It is later by the length of the gap: 02:30 becomes 03:30. The default: a daily job runs every day.
    #[default]
    Shift,
    /// It has no occurrence.
    Skip,
}

/// What happens to a local time that a day has twice, because the clock goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// Only the first one is an occurrence. The default, unless the expression selects every hour: a daily job runs once a day.
    First,
    /// Both are. The default if the expression selects every hour: a job for every 10 minutes does not pause for an hour.
    Both,
}

/// A cron expression in a time zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalCalendar {
    pub(crate) calendar: Arc<Calendar>,
    pub(crate) zone: Zone,
    pub(crate) gap: Gap,
    pub(crate) overlap: Overlap,
}

/// An occurrence, in seconds.
pub(crate) type Hit = (i64, Reason);

/// More than the difference of two offsets of any zone.
const TWO_DAYS: i64 = 2 * 86_400;

impl LocalCalendar {
    /// The first occurrence after `after`.
    pub(crate) fn next(&self, after: i64) -> Option<Hit> {
        let mut from = after.checked_add(1)?;
        loop {
            let segment = self.zone.segment(from);
            let regular = self
                .regular(&segment, from, segment.last)
                .and_then(|(first, last)| {
                    let local = self.calendar.at_or_after(first + segment.offset)?;
                    Some(local - segment.offset).filter(|instant| *instant <= last)
                });
            let shifted = self
                .shifted(&segment, from, segment.last)
                .and_then(|(first, last)| {
                    let local = self.calendar.at_or_after(first + segment.before)?;
                    Some(local - segment.before).filter(|instant| *instant <= last)
                });
            match (regular, shifted) {
                (Some(regular), shifted) if shifted.is_none_or(|shifted| regular <= shifted) => {
                    return Some((regular, self.reason(&segment, regular)));
                }
                (_, Some(shifted)) => return Some((shifted, missing(&segment, shifted))),
                (_, None) => {}
            }
            // Skips the segments before the next match of the expression in any zone.
            let local = from.saturating_add(segment.offset).saturating_sub(TWO_DAYS);
            let nearest = self.calendar.at_or_after(local)? - TWO_DAYS;
            from = segment.last.checked_add(1)?.max(nearest);
        }
    }

    /// The last occurrence after `after` and not after `until`.
    pub(crate) fn last(&self, after: i64, until: i64) -> Option<Hit> {
        let mut to = until;
        while to > after {
            let segment = self.zone.segment(to);
            let from = segment.first.max(after.saturating_add(1));
            let regular = self.regular(&segment, from, to).and_then(|(first, last)| {
                let local = self.calendar.at_or_before(last + segment.offset)?;
                Some(local - segment.offset).filter(|instant| *instant >= first)
            });
            let shifted = self.shifted(&segment, from, to).and_then(|(first, last)| {
                let local = self.calendar.at_or_before(last + segment.before)?;
                Some(local - segment.before).filter(|instant| *instant >= first)
            });
            match (regular, shifted) {
                (Some(regular), shifted) if shifted.is_none_or(|shifted| regular >= shifted) => {
                    return Some((regular, self.reason(&segment, regular)));
                }
                (_, Some(shifted)) => return Some((shifted, missing(&segment, shifted))),
                (_, None) => {}
            }
            to = segment.first.checked_sub(1)?;
        }
        None
    }

    /// The number of occurrences after `after` and not after `until`. The cost depends on the number of months and transitions.
    pub(crate) fn count(&self, after: i64, until: i64) -> u64 {
        let mut count = 0;
        let mut from = after.saturating_add(1);
        while from <= until {
            let segment = self.zone.segment(from);
            let to = segment.last.min(until);
            if let Some((first, last)) = self.regular(&segment, from, to) {
                count += self.calendar.count(first + segment.offset, last + segment.offset);
            }
            if let Some((first, last)) = self.shifted(&segment, from, to) {
                count += self.count_shifted(&segment, first, last);
            }
            let Some(next) = segment.last.checked_add(1) else {
                break;
            };
            from = next;
        }
        count
    }

    /// The number of shifted occurrences that do not coincide with a regular one. Local times of one hour have the same minutes and
    /// seconds after a shift by whole hours, so either all or none of them coincide; and likewise for minutes.
    fn count_shifted(&self, segment: &Segment, first: i64, last: i64) -> u64 {
        let gap = segment.gap();
        let unit = [3600, 60].into_iter().find(|unit| gap % unit == 0).unwrap_or(1);
        let last = last + segment.before;
        let mut count = 0;
        let mut from = first + segment.before;
        while let Some(local) = self.calendar.at_or_after(from).filter(|local| *local <= last) {
            let end = last.min(local - local.rem_euclid(unit) + unit - 1);
            if !self.calendar.contains(local + gap) {
                count += self.calendar.count(local, end);
            }
            from = end + 1;
        }
        count
    }

    /// The part of a segment that has regular occurrences.
    fn regular(&self, segment: &Segment, from: i64, to: i64) -> Option<(i64, i64)> {
        let first = match self.overlap {
            Overlap::First => from.max(segment.first.saturating_add(segment.repeated())),
            Overlap::Both => from,
        };
        (first <= to).then_some((first, to))
    }

    /// The part of a segment that has occurrences whose local time is missing.
    fn shifted(&self, segment: &Segment, from: i64, to: i64) -> Option<(i64, i64)> {
        if self.gap == Gap::Skip || segment.gap() == 0 {
            return None;
        }
        let first = from.max(segment.first);
        let last = to.min(segment.first + segment.gap() - 1);
        (first <= last).then_some((first, last))
    }

    fn reason(&self, segment: &Segment, instant: i64) -> Reason {
        if segment.repeated() > 0 && instant < segment.first + segment.repeated() {
            Reason::SecondOfOverlap
        } else if segment.repeats() > 0 && instant > segment.last - segment.repeats() {
            Reason::FirstOfOverlap
        } else {
            Reason::Regular
        }
    }
}

fn missing(segment: &Segment, instant: i64) -> Reason {
    let local = jiff::Timestamp::from_second(instant + segment.before);
    let local = local.map_or(DateTime::MAX, |at| jiff::tz::Offset::UTC.to_datetime(at));
    Reason::ShiftedByGap { missing: local }
}
