//! What a schedule does next, decided from its definition, its progress and the time.
//!
//! A decision and the new [`Progress`] belong in one transaction. Then an occurrence is dispatched exactly once, and what happens to
//! its job has no influence on the schedule: deleting, cancelling or delaying one job cannot end it.

use std::time::Duration;

use redeliver_core::{HumanDuration, Timestamp};
use sha2::{Digest as _, Sha256};

use crate::occurrence::{Occurrence, ScheduleId};
use crate::recurrence::{Preview, Recurrence};

/// A schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    id: ScheduleId,
    recurrence: Recurrence,
}

/// How far a schedule has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Every occurrence whose nominal time is not later has been decided on.
    pub position: Timestamp,
    /// The number of dispatched occurrences. Skipped and triggered ones do not count.
    pub count: u64,
    /// Whether the schedule is paused.
    pub is_paused: bool,
    /// Starts at 1 and increases with each pause, resumption and change of the definition.
    pub revision: u32,
}

impl Progress {
    /// The progress of a schedule that is created at `now`. Its first occurrence is after `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self {
            position: now,
            count: 0,
            is_paused: false,
            revision: 1,
        }
    }

    /// The progress after a pause. A paused schedule dispatches nothing, except what is triggered.
    #[must_use]
    pub fn pause(self) -> Self {
        if self.is_paused {
            return self;
        }
        Self {
            is_paused: true,
            ..self.revise()
        }
    }

    /// The progress after a change of the times at `now`: the next occurrence is the first one of the new definition after both
    /// `now` and the last decided one. Occurrences of the previous definition up to `now` that were not decided on are skipped.
    #[must_use]
    pub fn redefine(self, now: Timestamp) -> Self {
        Self {
            position: self.position.max(now),
            ..self.revise()
        }
    }

    /// The progress after a change that leaves the times as they are.
    #[must_use]
    pub fn revise(self) -> Self {
        Self {
            revision: self.revision.saturating_add(1),
            ..self
        }
    }
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The occurrences to dispatch, by time.
    pub dispatch: Vec<Occurrence>,
    /// The occurrences that are skipped, if there are any.
    pub skipped: Option<Skipped>,
    /// The next occurrence. If it is due already, there were too many for one decision. `None` if the schedule is paused or
    /// finished.
    pub next: Option<Occurrence>,
    /// Whether the schedule will never have another occurrence.
    pub is_finished: bool,
    /// The progress after this decision.
    pub progress: Progress,
}

/// Occurrences that are not dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Their number, at least 1.
    pub count: u64,
    /// The nominal time of the last one.
    pub until: Timestamp,
}

/// Whether a resumed schedule makes up for what fell due while it was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CatchUp {
    /// It is skipped. The default, because a pause means that these jobs are not to run.
    #[default]
    Skip,
    /// It is subject to the misfire policy, as after an outage.
    Misfire,
}

impl Schedule {
    /// A schedule with this id.
    #[must_use]
    pub fn new(id: ScheduleId, recurrence: Recurrence) -> Self {
        Self { id, recurrence }
    }

    /// The id.
    #[must_use]
    pub fn id(&self) -> &ScheduleId {
        &self.id
    }

    /// When it recurs.
    #[must_use]
    pub fn recurrence(&self) -> &Recurrence {
        &self.recurrence
    }

    /// The first occurrence after a nominal time.
    pub(crate) fn next_after(&self, nominal: Timestamp) -> Option<Occurrence> {
        let (nominal, reason) = self.recurrence.next(nominal)?;
        Some(Occurrence {
            nominal,
            due: self.due(nominal),
            reason,
        })
    }

    /// Decides what is to be done at `now`. At most `max` occurrences are dispatched, but one if `max` is 0. The work is bounded,
    /// however long the schedule was not served.
    #[must_use]
    pub fn decide(&self, progress: Progress, now: Timestamp, max: usize) -> Decision {
        let max = max.max(1);
        let mut decision = Decision {
            dispatch: Vec::new(),
            skipped: None,
            next: None,
            is_finished: false,
            progress,
        };
        if progress.is_paused {
            return decision;
        }
        self.decide_missed(&mut decision, now, max);
        self.dispatch_due(&mut decision, now, max);
        decision.next = self.next(decision.progress);
        decision.is_finished = decision.next.is_none();
        decision
    }

    /// The next occurrence; `None` if the schedule is paused or finished.
    #[must_use]
    pub fn next(&self, progress: Progress) -> Option<Occurrence> {
        if progress.is_paused || self.remaining(progress) == 0 {
            return None;
        }
        self.next_after(progress.position)
    }

    /// Resumes a paused schedule at `now`. Returns the new progress, and what is skipped.
    #[must_use]
    pub fn resume(
        &self,
        progress: Progress,
        now: Timestamp,
        catch_up: CatchUp,
    ) -> (Progress, Option<Skipped>) {
        if !progress.is_paused {
            return (progress, None);
        }
        let mut resumed = Progress {
            is_paused: false,
            ..progress.revise()
        };
        let last = match catch_up {
            CatchUp::Skip => self.last_due(progress.position, now),
            CatchUp::Misfire => None,
        };
        let skipped = last.map(|last| Skipped {
            count: self.recurrence.count(progress.position, last.nominal),
            until: last.nominal,
        });
        resumed.position = skipped.map_or(progress.position, |skipped| skipped.until);
        (resumed, skipped)
    }

    /// The next occurrences after `after`, at most `count`, if the schedule is not paused and dispatches all occurrences from `now`
    /// on.
    #[must_use]
    pub fn preview(
        &self,
        progress: Progress,
        now: Timestamp,
        after: Timestamp,
        count: usize,
    ) -> Vec<Preview> {
        // Which of those up to now are dispatched is not known: they may be skipped, for example because of a pause.
        let before = self.recurrence.count(progress.position.max(now), after);
        let remaining = self.remaining(progress).saturating_sub(before);
        let remaining = usize::try_from(remaining).unwrap_or(usize::MAX);
        self.recurrence
            .preview(progress.position.max(after), count.min(remaining))
    }

    /// Dispatches the missed occurrences that the policy selects, and skips the others.
    fn decide_missed(&self, decision: &mut Decision, now: Timestamp, max: usize) {
        let progress = decision.progress;
        let misfire = self.recurrence.definition().misfire;
        let Some(last) = self.last_due(progress.position, before_grace(now, misfire.grace)) else {
            return;
        };
        let total = self.recurrence.count(progress.position, last.nominal);
        let limit = misfire.limit().min(self.remaining(progress));
        let mut skipped_until = Some(last.nominal);
        while (decision.dispatch.len() as u64) < limit {
            let Some(until) = skipped_until else { break };
            let Some(occurrence) = self.last(progress.position, until) else {
                break;
            };
            decision.dispatch.push(occurrence);
            let earlier = Timestamp::from_millis(occurrence.nominal.as_millis() - 1);
            skipped_until = self
                .last(progress.position, earlier)
                .map(|occurrence| occurrence.nominal);
        }
        decision.dispatch.reverse();
        decision.skipped = skipped_until.map(|until| Skipped {
            count: total - decision.dispatch.len() as u64,
            until,
        });
        decision.progress.position = last.nominal;
        // The next decision selects the same ones again, without those that this one dispatches.
        if decision.dispatch.len() > max {
            decision.dispatch.truncate(max);
            decision.progress.position = decision.dispatch[max - 1].nominal;
        }
        decision.progress.count += decision.dispatch.len() as u64;
    }

    /// Dispatches what is due and not missed.
    fn dispatch_due(&self, decision: &mut Decision, now: Timestamp, max: usize) {
        while decision.dispatch.len() < max && self.remaining(decision.progress) > 0 {
            let next = self.next_after(decision.progress.position);
            let Some(next) = next.filter(|next| next.due <= now) else {
                return;
            };
            decision.progress.position = next.nominal;
            decision.progress.count += 1;
            decision.dispatch.push(next);
        }
    }

    /// How many more occurrences may be dispatched.
    fn remaining(&self, progress: Progress) -> u64 {
        let max = self.recurrence.definition().max_count;
        max.map_or(u64::MAX, |max| max.saturating_sub(progress.count))
    }

    /// The last occurrence with a nominal time after `position` that is due at `now`.
    fn last_due(&self, position: Timestamp, now: Timestamp) -> Option<Occurrence> {
        let last = self.last(position, now)?;
        if last.due <= now {
            return Some(last);
        }
        // The one before it is due before the nominal time of this one.
        self.last(position, Timestamp::from_millis(last.nominal.as_millis() - 1))
    }

    fn last(&self, after: Timestamp, until: Timestamp) -> Option<Occurrence> {
        let (nominal, reason) = self.recurrence.last(after, until)?;
        Some(Occurrence {
            nominal,
            due: self.due(nominal),
            reason,
        })
    }

    /// The due time: the nominal time and a part of the jitter that depends on the id and the nominal time only.
    fn due(&self, nominal: Timestamp) -> Timestamp {
        let spread = self.recurrence.spread(nominal);
        if spread == 0 {
            return nominal;
        }
        let digest = Sha256::new()
            .chain_update(self.id.as_str())
            .chain_update([0])
            .chain_update(nominal.as_millis().to_be_bytes())
            .finalize();
        let random = digest[..8]
            .iter()
            .fold(0, |sum, byte| sum << 8 | u128::from(*byte));
        // The upper half of a product is evenly distributed below the factor.
        let offset = (random * (u128::from(spread) + 1)) >> 64;
        nominal.after(Duration::from_millis(u64::try_from(offset).unwrap_or(0)))
    }
}

/// The last time that is longer ago than `grace`.
fn before_grace(now: Timestamp, grace: HumanDuration) -> Timestamp {
    let grace = i64::try_from(grace.as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millis(now.as_millis().saturating_sub(grace).saturating_sub(1))
}
