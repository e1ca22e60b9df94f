//! Parked jobs: jobs that are due while their topic does not exist. They stay in the state topic and in the index. Only the
//! range of their due times is remembered, by topic and application. So any number of them takes no memory, and a
//! takeover finds them again like all other jobs.
//!
//! When a topic exists again, or jobs have waited for too long, a *sweep* looks up that range again. It runs next to the
//! look-ahead and has room of its own in the window, so that the backlog of one topic does not delay other jobs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;

use crate::index::Cursor;
use crate::job::JobId;

/// The minimum time between the starts of two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The topic and the application of a job.
pub(crate) type Target = (Arc<str>, Arc<str>);

#[derive(Clone, Copy, Debug)]
struct ParkedRange {
    first: Cursor,
    last: Cursor,
    /// Approximate: a job that is looked up twice counts twice until the next sweep.
    count: usize,
}

impl ParkedRange {
    fn merge(&mut self, other: Self) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
        self.count += other.count;
    }
}

/// The parked jobs of a shard.
#[derive(Debug, Default)]
pub(super) struct Parked {
    ranges: BTreeMap<Target, ParkedRange>,
    sweep: Option<Sweep>,
    last_began: Option<Timestamp>,
}

/// A sweep in progress. It reads its range in several scans.
#[derive(Debug)]
struct Sweep {
    /// The ranges that were known when the sweep began.
    ranges: BTreeMap<Target, ParkedRange>,
    after: Cursor,
    end: Cursor,
    is_requested: bool,
}

/// Which parked jobs of a topic need not wait any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SweepScope {
    Nothing,
    /// All: the topic exists.
    All,
    /// The jobs that were due at or before this time: they have waited for too long.
    Until(Timestamp),
}

fn end_of(due: Timestamp) -> Cursor {
    Cursor {
        due,
        id: JobId::from_bytes([0xff; 16]),
    }
}

impl Parked {
    /// Parks a job until its topic exists.
    pub(super) fn park(&mut self, target: Target, cursor: Cursor) {
        self.add(
            target,
            ParkedRange {
                first: cursor,
                last: cursor,
                count: 1,
            },
        );
    }

    fn add(&mut self, target: Target, range: ParkedRange) {
        self.ranges
            .entry(target)
            .and_modify(|known| known.merge(range))
            .or_insert(range);
    }

    /// Removes a job that may be parked from the counts.
    pub(super) fn unpark(&mut self, target: &Target, cursor: Cursor) {
        let sweep = self.sweep.as_mut().map(|sweep| &mut sweep.ranges);
        for ranges in [Some(&mut self.ranges), sweep].into_iter().flatten() {
            if let Some(range) = ranges.get_mut(target)
                && (range.first..=range.last).contains(&cursor)
                && range.count > 0
            {
                range.count -= 1;
                return;
            }
        }
    }

    /// The approximate number of parked jobs, by topic and application.
    pub(super) fn counts(&self) -> BTreeMap<Target, usize> {
        let swept = self.sweep.iter().flat_map(|sweep| &sweep.ranges);
        let mut counts = BTreeMap::new();
        for (target, range) in self.ranges.iter().chain(swept) {
            *counts.entry(target.clone()).or_default() += range.count;
        }
        counts
    }

    /// Begins a sweep if some parked jobs need not wait any longer.
    pub(super) fn begin_sweep(
        &mut self,
        now: Timestamp,
        look_ahead_cursor: Option<Cursor>,
        scope: impl Fn(&Arc<str>) -> SweepScope,
    ) {
        let is_too_soon = |last_began: Timestamp| now < last_began.after(SWEEP_INTERVAL) && now >= last_began;
        if self.sweep.is_some() || self.ranges.is_empty() || self.last_began.is_some_and(is_too_soon) {
            return;
        }
        let ends = self
            .ranges
            .iter()
            .filter_map(|((topic, _), range)| match scope(topic) {
                SweepScope::Nothing => None,
                SweepScope::All => Some(range.last),
                SweepScope::Until(due) => (range.first.due <= due).then(|| range.last.min(end_of(due))),
            });
        let (Some(end), Some(look_ahead_cursor)) = (ends.max(), look_ahead_cursor) else {
            return;
        };
        // The due scan finds the jobs after the look-ahead cursor anyway.
        let end = end.min(look_ahead_cursor);
        let ranges = std::mem::take(&mut self.ranges);
        let Some(first) = ranges.values().map(|range| range.first).min() else {
            return;
        };
        self.last_began = Some(now);
        self.sweep = Some(Sweep {
            ranges,
            after: first.before(),
            end,
            is_requested: false,
        });
    }

    /// The next range to scan: after this cursor, up to this time.
    pub(super) fn next_range(&mut self) -> Option<(Cursor, Timestamp)> {
        let sweep = self.sweep.as_mut().filter(|sweep| !sweep.is_requested)?;
        sweep.is_requested = true;
        Some((sweep.after, sweep.end.due))
    }

    /// The range that the last scan covered: after the first cursor, up to the second. `last` is the last row of a scan
    /// that was cut off by its limit.
    pub(super) fn swept_range(&self, last: Option<Cursor>) -> Option<(Cursor, Cursor)> {
        let sweep = self.sweep.as_ref()?;
        let end = last.map_or(sweep.end, |last| last.min(sweep.end));
        Some((sweep.after, end))
    }

    /// Continues the sweep after this cursor.
    pub(super) fn advance(&mut self, to: Cursor) {
        let Some(sweep) = &mut self.sweep else { return };
        sweep.is_requested = false;
        sweep.after = sweep.after.max(to);
        if sweep.after < sweep.end {
            return;
        }
        let Some(Sweep { ranges, end, .. }) = self.sweep.take() else {
            return;
        };
        for (target, range) in ranges {
            if range.last > end {
                let first = range.first.max(end);
                self.add(target, ParkedRange { first, ..range });
            }
        }
    }
}
