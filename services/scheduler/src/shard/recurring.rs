//! The recurring schedules of a shard: commands that change them, and the jobs of their occurrences.
//!
//! A schedule is an entry of the window, the overlay and the index, which is due with its next occurrence. Then the shard creates
//! the jobs of what is due, and writes the schedule with its new progress in the same turn. From there on, they are jobs like any
//! other.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Failure, Headers, Output, Record, Timestamp, mutant};
use redeliver_proto::v1;
use redeliver_recurrence::ScheduleId;
use redeliver_runtime::error_chain::error_chain;

use super::{Room, Shard, Writes, outcome, rejected_outcome};
use crate::index::{Change, Effect};
use crate::job::{Job, JobId};
use crate::request::{Action, CheckedChange, ScheduleDefinition, job_of};
use crate::schedules::{self, RecordError, StoredSchedule};

/// The time between two attempts to create the job of an occurrence.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

impl Shard {
    /// Changes a schedule.
    pub(super) fn change_schedule(
        &mut self,
        change: CheckedChange,
        record: &Record,
        found: Option<&Bytes>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let entry_id = schedules::entry_id(change.id.as_str(), self.number);
        let entry = self.newest(entry_id, found);
        let former = entry.and_then(|entry| entry.payload.value.clone());
        if let (Action::Delete, Some(_)) = (&change.action, &former) {
            self.delete_schedule(&change.id, entry_id, writes);
            return outcome(v1::Outcome::ScheduleChanged, None, String::new());
        }
        let stored = match former.as_ref().map(schedules::decode).transpose() {
            Ok(stored) => stored,
            Err(error) => {
                let failure = Failure::permanent("schedule.definition", error_chain(&error));
                writes.tally.rejected += 1;
                self.reject(record, &failure, now, writes);
                return rejected_outcome(&failure);
            }
        };
        let known = match (stored, former) {
            (Some(stored), Some(former)) => Some((stored, former)),
            _ => None,
        };
        match (change.action, known) {
            (Action::Create(definition), None) => {
                self.create_schedule(change.id, *definition, record, now, writes)
            }
            (Action::Create(definition), Some((stored, former))) => {
                let is_same = stored.schedule.id() == &change.id
                    && stored.is_same(&definition.recurrence, &definition.job);
                let result = if is_same {
                    v1::Outcome::ScheduleUnchanged
                } else {
                    v1::Outcome::ScheduleExists
                };
                refuse(result, &former, writes)
            }
            (_, Some((stored, _))) if stored.schedule.id() != &change.id => unknown_schedule(writes),
            (_, None) => unknown_schedule(writes),
            (
                Action::Update {
                    definition,
                    expected_revision,
                },
                Some((stored, former)),
            ) => {
                if expected_revision.is_some_and(|expected| expected != stored.progress.revision) {
                    return refuse(v1::Outcome::ScheduleRevised, &former, writes);
                }
                if stored.is_same(&definition.recurrence, &definition.job) {
                    return refuse(v1::Outcome::ScheduleUnchanged, &former, writes);
                }
                let changed = stored.redefine(definition.recurrence, definition.job, now);
                self.save_changed(changed, now, writes)
            }
            (Action::Pause, Some((mut stored, former))) => {
                if stored.progress.is_paused {
                    return refuse(v1::Outcome::ScheduleUnchanged, &former, writes);
                }
                stored.progress = stored.progress.pause();
                self.save_changed(stored, now, writes)
            }
            (Action::Resume(catch_up), Some((mut stored, former))) => {
                if !stored.progress.is_paused {
                    return refuse(v1::Outcome::ScheduleUnchanged, &former, writes);
                }
                let (progress, skipped) = stored.schedule.resume(stored.progress, now, catch_up);
                let skipped = skipped.map_or(0, |skipped| skipped.count);
                stored.progress = progress;
                stored.skipped += skipped;
                writes.tally.skipped_occurrences += skipped;
                v1::CommandOutcome {
                    skipped,
                    ..self.save_changed(stored, now, writes)
                }
            }
            (Action::Trigger, Some((stored, former))) => {
                self.trigger_schedule(&stored, &former, record, now, writes)
            }
            // Handled above, because it needs no valid definition.
            (Action::Delete, Some(_)) => unknown_schedule(writes),
        }
    }

    fn create_schedule(
        &mut self,
        id: ScheduleId,
        definition: ScheduleDefinition,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let stored = StoredSchedule::new(id, definition.recurrence, definition.job, now);
        let due = stored.next.unwrap_or(now);
        if let Err(failure) = self.check_free_memory(due, now) {
            writes.tally.no_room += 1;
            self.reject(record, &failure, now, writes);
            return rejected_outcome(&failure);
        }
        self.save_changed(stored, now, writes)
    }

    fn trigger_schedule(
        &mut self,
        stored: &StoredSchedule,
        former: &Bytes,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let request = match job_of(&stored.job, now, &self.settings.rules, now) {
            Ok(request) => request,
            Err(failure) => {
                writes.tally.rejected += 1;
                self.reject(record, &failure, now, writes);
                return rejected_outcome(&failure);
            }
        };
        let id = self.requested_id(record, now);
        let occurrence = stored.schedule.id().triggered(id);
        writes.tally.occurrences += 1;
        let job = self.accept_job(id, request, Some(occurrence.into()), None, now, writes);
        v1::CommandOutcome {
            job: Some(job),
            schedule: shown(former),
            ..outcome(v1::Outcome::ScheduleTriggered, None, String::new())
        }
    }

    fn delete_schedule(&mut self, id: &ScheduleId, entry_id: JobId, writes: &mut Writes) {
        writes.tally.schedules_changed += 1;
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(schedules::state_key(id.as_str()).into()),
            value: None,
            headers: Headers::new(),
        });
        self.changes.push(Change {
            id: entry_id,
            schedule: Some(id.as_str().into()),
            effect: Effect::Forgotten,
        });
        self.overlay.set(self.turn, entry_id, None);
        self.window.remove(entry_id);
    }

    /// Writes a schedule that a command has changed, and decides when it is due.
    fn save_changed(
        &mut self,
        mut stored: StoredSchedule,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        stored.plan();
        writes.tally.schedules_changed += 1;
        let record = self.save_schedule(&stored, now, writes);
        v1::CommandOutcome {
            schedule: shown(&record),
            ..outcome(v1::Outcome::ScheduleChanged, None, String::new())
        }
    }

    fn save_schedule(&mut self, stored: &StoredSchedule, now: Timestamp, writes: &mut Writes) -> Bytes {
        let id = schedules::entry_id(stored.schedule.id().as_str(), self.number);
        let entry = stored.entry(id);
        let record = entry.payload.value.clone().unwrap_or_default();
        self.save(Arc::new(entry), now, writes);
        record
    }

    /// Creates the jobs of the occurrences that are due, and writes the schedule with its progress.
    pub(super) fn run_schedule(&mut self, entry: &Job, room: Room, now: Timestamp, writes: &mut Writes) {
        let Some(record) = &entry.payload.value else {
            return;
        };
        let problem = match schedules::decode(record) {
            Ok(stored) => match self.create_due(stored, room, now, writes) {
                Ok(()) => return,
                Err(failure) => failure.message,
            },
            Err(error) => error_chain(&error),
        };
        let schedule = entry.occurrence.as_deref().unwrap_or_default();
        tracing::warn!(
            schedule,
            problem,
            "cannot create the job of an occurrence; trying again in a minute"
        );
        writes.tally.postponed_occurrences += 1;
        let postponed = schedules::postpone(record, problem, now.after(RETRY_INTERVAL));
        match postponed.map(|record| schedules::entry(entry.id, &record)) {
            Ok(Ok(entry)) => self.save(Arc::new(entry), now, writes),
            Ok(Err(error)) => tracing::error!(schedule, %error, "index contains an invalid schedule record"),
            Err(error) => tracing::error!(schedule, %error, "index contains an invalid schedule record"),
        }
    }

    /// Creates nothing if it fails, for example because the application does not exist any more.
    fn create_due(
        &mut self,
        mut stored: StoredSchedule,
        room: Room,
        now: Timestamp,
        writes: &mut Writes,
    ) -> Result<(), Failure> {
        // Each job takes two records, and one of them its data.
        let size = stored.job.data.len().max(1);
        let by_bytes = room.bytes.saturating_sub(writes.bytes) / size;
        let by_records = room.records.saturating_sub(writes.outputs.len()) / 2;
        let max = by_bytes.min(by_records).min(redeliver_recurrence::MAX_DISPATCH);
        let decision = stored.schedule.decide(stored.progress, now, max);
        let rules = &self.settings.rules;
        let requests = decision
            .dispatch
            .iter()
            .map(|of| job_of(&stored.job, of.due, rules, now));
        let requests = requests.collect::<Result<Vec<_>, _>>()?;
        for (occurrence, request) in decision.dispatch.iter().zip(requests) {
            // Each job of the turn adds a change, and each turn moves the end of the state topic by more than its changes.
            let number = self
                .end
                .saturating_add(i64::try_from(self.changes.len()).unwrap_or(i64::MAX));
            let id = JobId::of_occurrence(now, self.number, number);
            let name = stored.schedule.id().occurrence(occurrence.nominal);
            writes.tally.occurrences += 1;
            self.accept_job(id, request, Some(name.into()), None, now, writes);
        }
        if let Some(skipped) = decision.skipped {
            tracing::info!(
                schedule = %stored.schedule.id(), skipped = skipped.count, until = %skipped.until,
                "skipped occurrences that were missed"
            );
            stored.skipped += skipped.count;
            writes.tally.skipped_occurrences += skipped.count;
        }
        if !mutant!("shard-creates-jobs-of-occurrences-twice") {
            stored.progress = decision.progress;
        }
        stored.plan();
        self.save_schedule(&stored, now, writes);
        Ok(())
    }
}

fn shown(record: &Bytes) -> Option<v1::Schedule> {
    let shown = schedules::show(record, false);
    shown
        .map_err(|error: RecordError| tracing::error!(%error, "cannot show a schedule"))
        .ok()
}

fn refuse(result: v1::Outcome, record: &Bytes, writes: &mut Writes) -> v1::CommandOutcome {
    writes.tally.refused += 1;
    v1::CommandOutcome {
        schedule: shown(record),
        ..outcome(result, None, String::new())
    }
}

fn unknown_schedule(writes: &mut Writes) -> v1::CommandOutcome {
    writes.tally.refused += 1;
    outcome(v1::Outcome::ScheduleUnknown, None, String::new())
}
