//! Jobs whose time has come and whose topic does not exist. They stay where they are, in the state topic and in the index;
//! only the range of due times in which they stand is remembered, by topic and application, so any number of them
//! takes no memory, and a takeover finds them again as it finds all others.
//!
//! When a topic exists again, or jobs have waited for too long, a *sweep* looks that range up again, beside the look ahead
//! and as far as there is room, so that a backlog of one topic keeps the jobs of others out of nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;

use crate::index::Cursor;
use crate::job::JobId;

/// The shortest time between the beginnings of two sweeps.
const PAUSE: Duration = Duration::from_secs(1);

/// The topic that is missed, and the application that misses it.
pub(crate) type Missed = (Arc<str>, Arc<str>);

#[derive(Clone, Copy, Debug)]
struct Range {
    first: Cursor,
    last: Cursor,
    /// How many jobs, about: one that is looked up twice counts twice until the next sweep.
    count: usize,
}

impl Range {
    fn merge(&mut self, other: Self) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
        self.count += other.count;
    }
}

/// What is parked.
#[derive(Debug, Default)]
pub(super) struct Parked {
    ranges: BTreeMap<Missed, Range>,
    sweep: Option<Sweep>,
    began: Option<Timestamp>,
}

/// A look at what is parked, in portions.
#[derive(Debug)]
struct Sweep {
    /// What was parked when it began.
    ranges: BTreeMap<Missed, Range>,
    after: Cursor,
    upto: Cursor,
    is_asking: bool,
}

/// What there is to be done about parked jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// They wait on.
    Nothing,
    /// The topic is no longer missing.
    All,
    /// Those that have been due since then have waited for long enough.
    Until(Timestamp),
}

fn last_of(due: Timestamp) -> Cursor {
    Cursor {
        due,
        id: JobId::from_bytes([0xff; 16]),
    }
}

impl Parked {
    /// A job waits for its topic.
    pub(super) fn note(&mut self, missed: Missed, place: Cursor) {
        self.add(
            missed,
            Range {
                first: place,
                last: place,
                count: 1,
            },
        );
    }

    fn add(&mut self, missed: Missed, range: Range) {
        self.ranges
            .entry(missed)
            .and_modify(|known| known.merge(range))
            .or_insert(range);
    }

    /// A job that may be parked is not any more.
    pub(super) fn forget(&mut self, missed: &Missed, place: Cursor) {
        let sweep = self.sweep.as_mut().map(|sweep| &mut sweep.ranges);
        for ranges in [Some(&mut self.ranges), sweep].into_iter().flatten() {
            if let Some(range) = ranges.get_mut(missed)
                && (range.first..=range.last).contains(&place)
                && range.count > 0
            {
                range.count -= 1;
                return;
            }
        }
    }

    /// How many jobs wait for each topic, about.
    pub(super) fn counts(&self) -> BTreeMap<Missed, usize> {
        let swept = self.sweep.iter().flat_map(|sweep| &sweep.ranges);
        let mut counts = BTreeMap::new();
        for (missed, range) in self.ranges.iter().chain(swept) {
            *counts.entry(missed.clone()).or_default() += range.count;
        }
        counts
    }

    /// Begins a sweep, if there is a reason, of what is known to be looked up.
    pub(super) fn look(&mut self, now: Timestamp, loaded: Option<Cursor>, due: impl Fn(&Arc<str>) -> Due) {
        let is_pause = |began: Timestamp| now < began.after(PAUSE) && now >= began;
        if self.sweep.is_some() || self.ranges.is_empty() || self.began.is_some_and(is_pause) {
            return;
        }
        let reasons = self
            .ranges
            .iter()
            .filter_map(|((topic, _), range)| match due(topic) {
                Due::Nothing => None,
                Due::All => Some(range.last),
                Due::Until(over) => (range.first.due <= over).then(|| range.last.min(last_of(over))),
            });
        let (Some(upto), Some(loaded)) = (reasons.max(), loaded) else {
            return;
        };
        // What is behind is looked up ahead anyway.
        let upto = upto.min(loaded);
        let ranges = std::mem::take(&mut self.ranges);
        let Some(first) = ranges.values().map(|range| range.first).min() else {
            return;
        };
        self.began = Some(now);
        self.sweep = Some(Sweep {
            ranges,
            after: first.before(),
            upto,
            is_asking: false,
        });
    }

    /// What is to be looked up next: behind this, up to then.
    pub(super) fn ask(&mut self) -> Option<(Cursor, Timestamp)> {
        let sweep = self.sweep.as_mut().filter(|sweep| !sweep.is_asking)?;
        sweep.is_asking = true;
        Some((sweep.after, sweep.upto.due))
    }

    /// Where the portion stands that was asked for: behind the one, up to the other.
    pub(super) fn portion(&self, last: Option<Cursor>) -> Option<(Cursor, Cursor)> {
        let sweep = self.sweep.as_ref()?;
        let end = last.map_or(sweep.upto, |last| last.min(sweep.upto));
        Some((sweep.after, end))
    }

    /// The sweep goes on behind this.
    pub(super) fn swept(&mut self, to: Cursor) {
        let Some(sweep) = &mut self.sweep else { return };
        sweep.is_asking = false;
        sweep.after = sweep.after.max(to);
        if sweep.after < sweep.upto {
            return;
        }
        let Some(Sweep { ranges, upto, .. }) = self.sweep.take() else {
            return;
        };
        for (missed, range) in ranges {
            if range.last > upto {
                let first = range.first.max(upto);
                self.add(missed, Range { first, ..range });
            }
        }
    }
}
