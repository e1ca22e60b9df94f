//! The nominal times of a recurring schedule: a pure function of its definition.

use redeliver_core::{HumanDuration, Timestamp};

use crate::cron;
use crate::every::Every;
use crate::invalid::Invalid;
use crate::local::{Gap, LocalCalendar, Overlap};
use crate::misfire::Misfire;
use crate::occurrence::Reason;
use crate::range::{FIRST, LAST, check_time};
use crate::zone::Zone;

/// The longest jitter: one day.
pub const MAX_JITTER: HumanDuration = HumanDuration::from_secs(86_400);
/// The greatest number of occurrences in a preview.
pub const MAX_PREVIEW: usize = 1_000;

/// A recurring schedule as its author writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// When it recurs.
    pub timing: Timing,
    /// No nominal time is before `start`, if it is set.
    pub start: Option<Timestamp>,
    /// No nominal time is after `end`, if it is set.
    pub end: Option<Timestamp>,
    /// How many occurrences are dispatched, if it is set. Neither skipped nor triggered ones count.
    pub max_count: Option<u64>,
    /// How much later than its nominal time an occurrence may be due, at most [`MAX_JITTER`].
    pub jitter: HumanDuration,
    /// What happens to occurrences that are not dispatched in time.
    pub misfire: Misfire,
}

/// When a schedule recurs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Timing {
    /// At the local times that a cron expression selects.
    Cron {
        /// Five fields, or six with the second in front; or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.
        expression: String,
        /// The name of an IANA time zone, such as `Europe/Berlin`.
        zone: String,
        /// What happens to local times that are missing.
        gap: Gap,
        /// What happens to local times that occur twice. By default, [`Overlap::Both`] if the expression selects every hour,
        /// and otherwise [`Overlap::First`].
        overlap: Option<Overlap>,
    },
    /// Every `interval`, whatever the clocks do.
    Every {
        /// From [`MIN_INTERVAL`](crate::MIN_INTERVAL) to [`MAX_INTERVAL`](crate::MAX_INTERVAL).
        interval: HumanDuration,
        /// One of the times, which decides the phase. By default `start`, and otherwise the Unix epoch.
        anchor: Option<Timestamp>,
    },
}

/// A valid [`Definition`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recurrence {
    definition: Definition,
    times: Times,
    first: Timestamp,
    last: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Times {
    Local(Box<LocalCalendar>),
    Every(Every),
}

/// An occurrence in a preview.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// The nominal time, which is also the earliest due time.
    pub nominal: Timestamp,
    /// The latest due time; later than `nominal` if the schedule has jitter.
    pub latest_due: Timestamp,
    /// The nominal time on the clock of the zone, such as `2026-03-29T03:30:00+02:00[Europe/Berlin]`.
    pub local: String,
    /// Why it is at its nominal time.
    pub reason: Reason,
}

impl Recurrence {
    /// Checks a definition.
    ///
    /// # Errors
    /// If a field is invalid, or if there is no occurrence between `start` and `end`.
    pub fn new(mut definition: Definition) -> Result<Self, Invalid> {
        let times = match &mut definition.timing {
            Timing::Cron {
                expression,
                zone,
                gap,
                overlap,
            } => {
                let calendar = cron::calendar(expression)?;
                let found = Zone::named(zone)?;
                found.name().clone_into(zone);
                let default = if calendar.is_every_hour() {
                    Overlap::Both
                } else {
                    Overlap::First
                };
                Times::Local(Box::new(LocalCalendar {
                    calendar,
                    zone: found,
                    gap: *gap,
                    overlap: *overlap.get_or_insert(default),
                }))
            }
            Timing::Every { interval, anchor } => {
                let anchor = *anchor.get_or_insert(definition.start.unwrap_or(FIRST));
                Times::Every(Every::new(*interval, anchor)?)
            }
        };
        check_range(&definition)?;
        if definition.jitter > MAX_JITTER {
            let problem = format!(
                "{} is out of range: must be at most {MAX_JITTER}",
                definition.jitter
            );
            return Err(Invalid::new("jitter", problem));
        }
        if definition.max_count == Some(0) {
            return Err(Invalid::new("max_count", "is 0; must be at least 1, or not set"));
        }
        definition.misfire.check()?;
        let recurrence = Self {
            first: definition.start.unwrap_or(FIRST),
            last: definition.end.unwrap_or(LAST),
            definition,
            times,
        };
        if recurrence.next(before(recurrence.first)).is_none() {
            return Err(match recurrence.definition.end {
                Some(_) => Invalid::new("end", "is before the first occurrence"),
                None => Invalid::new("start", "has no occurrence after it before the year 10000"),
            });
        }
        Ok(recurrence)
    }

    /// The definition, with all defaults filled in.
    #[must_use]
    pub fn definition(&self) -> &Definition {
        &self.definition
    }

    /// The first nominal time after `after`.
    #[must_use]
    pub fn next(&self, after: Timestamp) -> Option<(Timestamp, Reason)> {
        let after = after.max(before(self.first));
        let (nominal, reason) = self.times.next(after.as_millis())?;
        let nominal = Timestamp::from_millis(nominal);
        (nominal <= self.last).then_some((nominal, reason))
    }

    /// The last nominal time after `after` and not after `until`.
    #[must_use]
    pub fn last(&self, after: Timestamp, until: Timestamp) -> Option<(Timestamp, Reason)> {
        let (after, until) = self.clamp(after, until);
        let (nominal, reason) = self.times.last(after, until)?;
        Some((Timestamp::from_millis(nominal), reason))
    }

    /// The number of nominal times after `after` and not after `until`. The cost does not depend on it.
    #[must_use]
    pub fn count(&self, after: Timestamp, until: Timestamp) -> u64 {
        let (after, until) = self.clamp(after, until);
        if after < until {
            self.times.count(after, until)
        } else {
            0
        }
    }

    /// How much later than `nominal` the occurrence may be due, in milliseconds: the jitter, but less than the time to the next
    /// occurrence. So the due times have the order of the nominal times.
    #[must_use]
    pub(crate) fn spread(&self, nominal: Timestamp) -> u64 {
        let jitter = self.definition.jitter.as_millis();
        if jitter == 0 {
            return 0;
        }
        let next = self.times.next(nominal.as_millis());
        let room = next.map_or(jitter, |(next, _)| next.abs_diff(nominal.as_millis()) - 1);
        jitter.min(room)
    }

    /// The next occurrences after `after`, at most `count` and at most [`MAX_PREVIEW`], with reasons.
    #[must_use]
    pub fn preview(&self, after: Timestamp, count: usize) -> Vec<Preview> {
        let mut after = after;
        let next = || {
            let (nominal, reason) = self.next(after)?;
            after = nominal;
            let spread = std::time::Duration::from_millis(self.spread(nominal));
            Some(Preview {
                nominal,
                latest_due: nominal.after(spread),
                local: self.local(nominal),
                reason,
            })
        };
        let count = count.min(MAX_PREVIEW);
        std::iter::from_fn(next).take(count).collect()
    }

    fn local(&self, nominal: Timestamp) -> String {
        let zone = match &self.times {
            Times::Local(local) => &local.zone,
            Times::Every(_) => &Zone::UTC,
        };
        let text = zone.text(nominal.as_millis());
        text.unwrap_or_else(|| nominal.to_string())
    }

    fn clamp(&self, after: Timestamp, until: Timestamp) -> (i64, i64) {
        let after = after.max(before(self.first));
        (after.as_millis(), until.min(self.last).as_millis())
    }
}

impl Times {
    fn next(&self, after: i64) -> Option<(i64, Reason)> {
        match self {
            Self::Every(every) => every.next(after),
            Self::Local(local) => local.next(seconds(after)).and_then(millis),
        }
    }

    fn last(&self, after: i64, until: i64) -> Option<(i64, Reason)> {
        match self {
            Self::Every(every) => every.last(after, until),
            Self::Local(local) => local.last(seconds(after), seconds(until)).and_then(millis),
        }
    }

    fn count(&self, after: i64, until: i64) -> u64 {
        match self {
            Self::Every(every) => every.count(after, until),
            Self::Local(local) => local.count(seconds(after), seconds(until)),
        }
    }
}

/// Nominal times of cron expressions are whole seconds, so only whole seconds matter.
fn seconds(millis: i64) -> i64 {
    millis.div_euclid(1000)
}

fn millis((second, reason): (i64, Reason)) -> Option<(i64, Reason)> {
    Some((second.checked_mul(1000)?, reason))
}

fn before(time: Timestamp) -> Timestamp {
    Timestamp::from_millis(time.as_millis() - 1)
}

fn check_range(definition: &Definition) -> Result<(), Invalid> {
    if let Some(start) = definition.start {
        check_time("start", start)?;
    }
    let Some(end) = definition.end else {
        return Ok(());
    };
    check_time("end", end)?;
    match definition.start {
        Some(start) if end < start => {
            let problem = format!("{end} is before the start {start}; must not be earlier");
            Err(Invalid::new("end", problem))
        }
        _ => Ok(()),
    }
}
