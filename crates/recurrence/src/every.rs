//! A fixed interval: `anchor + k * interval`, for every whole number `k`. The anchor decides the phase, not the beginning.

use redeliver_core::{HumanDuration, Timestamp};

use crate::invalid::Invalid;
use crate::occurrence::Reason;
use crate::range::check_time;

/// The shortest interval.
pub const MIN_INTERVAL: HumanDuration = HumanDuration::from_secs(1);
/// The longest interval: 366 days.
pub const MAX_INTERVAL: HumanDuration = HumanDuration::from_secs(366 * 86_400);

/// A fixed interval. Times are milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Every {
    interval: i64,
    anchor: i64,
}

impl Every {
    pub(crate) fn new(interval: HumanDuration, anchor: Timestamp) -> Result<Self, Invalid> {
        if !(MIN_INTERVAL..=MAX_INTERVAL).contains(&interval) {
            let problem =
                format!("{interval} is out of range: must be between {MIN_INTERVAL} and {MAX_INTERVAL}");
            return Err(Invalid::new("every.interval", problem));
        }
        check_time("every.anchor", anchor)?;
        let millis = i64::try_from(interval.as_millis()).unwrap_or(i64::MAX);
        Ok(Self {
            interval: millis,
            anchor: anchor.as_millis(),
        })
    }

    pub(crate) fn next(self, after: i64) -> Option<(i64, Reason)> {
        self.at(self.number_at(after).checked_add(1)?)
    }

    pub(crate) fn last(self, after: i64, until: i64) -> Option<(i64, Reason)> {
        self.at(self.number_at(until))
            .filter(|(nominal, _)| *nominal > after)
    }

    pub(crate) fn count(self, after: i64, until: i64) -> u64 {
        let count = self.number_at(until) - self.number_at(after);
        u64::try_from(count).unwrap_or(0)
    }

    /// The number of the last occurrence up to `time`.
    fn number_at(self, time: i64) -> i64 {
        time.saturating_sub(self.anchor).div_euclid(self.interval)
    }

    fn at(self, number: i64) -> Option<(i64, Reason)> {
        let nominal = number.checked_mul(self.interval)?.checked_add(self.anchor)?;
        let reason = if number == 0 {
            Reason::Anchor
        } else {
            Reason::Regular
        };
        Some((nominal, reason))
    }
}
