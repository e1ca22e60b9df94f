//! The recurring schedules of a shard: commands that change them, and the jobs of their occurrences.
//!
//! A schedule is an entry of the window, the overlay and the index, which is due with its next occurrence. Then the shard creates
//! the jobs of what is due, and writes the schedule with its new progress in the same turn. From there on, they are jobs like any
//! other.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Failure, Headers, Output, Record, Timestamp, mutant};
use redeliver_proto::{Message as _, v1};
use redeliver_recurrence::ScheduleId;
use redeliver_runtime::error_chain::error_chain;

use super::{Room, Shard, Writes};
use crate::index::{Change, Effect};
use crate::index_messages::Found;
use crate::job::{Job, JobId, Kind};
use crate::request::{Action, Command, Field, Format, Incoming, ScheduleChange, ScheduleDefinition, job_of};
use crate::schedules::{self, RecordError, StoredSchedule};
use crate::window::Window;
use crate::{codec, schedule_key};

/// The maximum time between two attempts to create the job of an occurrence, and the part of its grace. It must not be missed because of one attempt.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
const RETRIES_IN_GRACE: u32 = 4;
/// The code of a rejected command for a schedule whose state is not valid here.
const INVALID_DEFINITION: &str = "schedule.definition";

/// The maximum number of jobs that a schedule creates before others that are due have their turn.
const MAX_AT_ONCE: usize = 50;
/// The approximate size of a record without the job's data.
const OVERHEAD: usize = 500;

/// The order of due jobs and schedules in a turn. They alternate until schedules have had a quarter of it; after that, schedules only
/// run when no job is due.
pub(super) struct DueOrder {
    /// How many more records may be written for schedules beside jobs.
    records: usize,
    /// Whether the last one was a schedule, in this turn or maybe in the one before. Its job, which may be due, comes first.
    was_schedule: bool,
}

impl DueOrder {
    pub(super) fn new(room: Room) -> Self {
        Self {
            records: room.quarters(1).records,
            was_schedule: true,
        }
    }

    /// Takes the next due job or schedule from the window.
    pub(super) fn next(&mut self, window: &mut Window, until: Timestamp) -> Option<Arc<Job>> {
        let may_be_schedule = !self.was_schedule && self.records > 0;
        let schedule = may_be_schedule.then(|| window.pop_due_schedule(until)).flatten();
        let due = schedule
            .or_else(|| window.pop_due(until))
            .or_else(|| window.pop_due_schedule(until));
        self.was_schedule = due.as_ref().is_some_and(|due| due.kind == Kind::Schedule);
        due
    }

    /// A schedule has written this many records.
    pub(super) fn has_written(&mut self, records: usize) {
        self.records = self.records.saturating_sub(records);
    }
}

impl Shard {
    /// Changes a schedule.
    pub(super) fn change_schedule(
        &mut self,
        change: ScheduleChange,
        record: &Record,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let previous = match self.previous(&change.id, found.job.as_ref()) {
            Ok(previous) => previous,
            Err(failure) => return self.reject_command(record, &failure, now, writes),
        };
        let is_expected = |app: &str| {
            change
                .expected_app
                .as_deref()
                .is_none_or(|expected| expected == app)
        };
        let previous = match previous {
            Some((_, app)) if !is_expected(&app) => return unknown_schedule(writes),
            previous => previous.map(|(record, _)| record),
        };
        let Some(previous) = previous else {
            return match change.action {
                Action::Create(definition) => {
                    self.create_schedule(change.id, *definition, record, now, writes)
                }
                _ => unknown_schedule(writes),
            };
        };
        // Neither needs a definition that is valid here.
        if change.action == Action::Delete {
            return self.delete_schedule(&change.id, writes);
        }
        match (schedules::decode(&previous), change.action) {
            (Ok(stored), action) => self.change_stored(stored, &previous, action, record, now, writes),
            (Err(_), Action::Create(_)) => refuse(v1::Outcome::ScheduleExists, &previous, writes),
            (Err(RecordError::Definition(_)), Action::Update { definition, .. }) => {
                let ScheduleDefinition { recurrence, job } = *definition;
                match schedules::replace_definition(&previous, recurrence, job, now) {
                    Ok(stored) => self.save_changed(stored, now, writes),
                    Err(error) => self.reject_command(record, &invalid(&error), now, writes),
                }
            }
            (Err(error), _) => self.reject_command(record, &invalid(&error), now, writes),
        }
    }

    /// The newest state record of a schedule, and the application of its job.
    fn previous(
        &self,
        id: &ScheduleId,
        found: Option<&Arc<Job>>,
    ) -> Result<Option<(Bytes, Arc<str>)>, Failure> {
        let entry_id = schedules::entry_id(id.as_str(), self.number);
        let Some(entry) = self.newest_job(entry_id, found) else {
            return Ok(None);
        };
        match &entry.occurrence {
            Some(name) if **name == *id.as_str() => {
                let record = entry.payload.value.clone();
                Ok(record.map(|record| (record, entry.app.clone())))
            }
            other => {
                let other = other.as_deref().unwrap_or_default();
                let message =
                    format!("`id` has the same hash as that of the schedule {other}; choose another one");
                Err(Failure::permanent("request.id", message))
            }
        }
    }

    fn change_stored(
        &mut self,
        mut stored: StoredSchedule,
        previous: &Bytes,
        action: Action,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let mut skipped = 0;
        match action {
            Action::Create(definition) => {
                let is_same = stored.is_same(&definition.recurrence, &definition.job);
                return refuse(existing(is_same), previous, writes);
            }
            Action::Update {
                definition,
                expected_revision,
            } => {
                let ScheduleDefinition { recurrence, job } = *definition;
                // First, because an update whose answer was lost has changed the revision.
                if stored.is_same(&recurrence, &job) {
                    return refuse(v1::Outcome::ScheduleUnchanged, previous, writes);
                }
                if expected_revision.is_some_and(|expected| expected != stored.progress.revision) {
                    return refuse(v1::Outcome::ScheduleRevised, previous, writes);
                }
                if let Err(failure) = self.check_growth(previous.len(), &job, now) {
                    return self.reject_command(record, &failure, now, writes);
                }
                skipped = stored.redefine(recurrence, job, now);
            }
            Action::Pause if stored.progress.is_paused => {
                return refuse(v1::Outcome::ScheduleUnchanged, previous, writes);
            }
            Action::Pause => stored.progress = stored.progress.pause(),
            Action::Resume(_) if !stored.progress.is_paused => {
                return refuse(v1::Outcome::ScheduleUnchanged, previous, writes);
            }
            Action::Resume(catch_up) => {
                let (progress, missed) = stored.schedule.resume(stored.progress, now, catch_up);
                skipped = missed.map_or(0, |missed| missed.count);
                stored.progress = progress;
                stored.skipped += skipped;
            }
            Action::Trigger => return self.trigger_schedule(&stored, previous, record, now, writes),
            Action::Delete => {
                let id = stored.schedule.id().clone();
                return self.delete_schedule(&id, writes);
            }
        }
        writes.tally.skipped_occurrences += skipped;
        v1::CommandOutcome {
            skipped,
            ..self.save_changed(stored, now, writes)
        }
    }

    /// Creates the jobs of what is due of a schedule before a command updates it, as far as they can be created. Returns whether more is due than has room in this
    /// turn, so that the command must wait for the next one.
    pub(super) fn run_before_update(
        &mut self,
        incoming: &Incoming,
        found: &Found,
        room: Room,
        now: Timestamp,
        writes: &mut Writes,
    ) -> bool {
        let Ok(Command::ChangeSchedule(change)) = &incoming.command else {
            return false;
        };
        if !matches!(change.action, Action::Update { .. }) || self.owner_shard(incoming) != self.number {
            return false;
        }
        let previous = self.previous(&change.id, found.job.as_ref()).ok().flatten();
        let Some(mut stored) = previous.and_then(|(record, _)| schedules::decode(&record).ok()) else {
            return false;
        };
        let is_due = |stored: &StoredSchedule| {
            let next = stored.schedule.next(stored.progress);
            next.is_some_and(|next| next.due <= now)
        };
        let max = room_for(&stored.job, room, writes).min(MAX_AT_ONCE);
        if !is_due(&stored) || self.create_due(&mut stored, max, now, writes).is_err() {
            return false;
        }
        stored.plan(now);
        self.save_schedule(&stored, now, writes);
        is_due(&stored)
    }

    /// Checks that the index has memory for a definition that is larger than the state record of the previous one. A schedule stays
    /// there, so it is checked as a job that is not due soon.
    fn check_growth(&self, previous: usize, job: &v1::JobTemplate, now: Timestamp) -> Result<(), Failure> {
        if job.encoded_len() <= previous {
            return Ok(());
        }
        self.check_free_memory(schedules::NEVER, now)
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
        if stored.state() == v1::ScheduleState::Finished {
            let failure = Field("end").rejected(Format::Json, "is before the first occurrence after now");
            return self.reject_command(record, &failure, now, writes);
        }
        if let Err(failure) = self.check_growth(0, &stored.job, now) {
            return self.reject_command(record, &failure, now, writes);
        }
        self.save_changed(stored, now, writes)
    }

    fn trigger_schedule(
        &mut self,
        stored: &StoredSchedule,
        previous: &Bytes,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let request = match job_of(&stored.job, now, &self.settings.rules, now) {
            Ok(request) => request,
            Err(failure) => return self.reject_command(record, &failure, now, writes),
        };
        let checked = self
            .check_quota(&request)
            .and_then(|()| self.check_admission(&request, now));
        if let Err(failure) = checked {
            return self.reject_command(record, &failure, now, writes);
        }
        let id = self.requested_id(record, now);
        let occurrence = stored.schedule.id().triggered(id);
        writes.tally.accepted += 1;
        writes.tally.occurrences += 1;
        let job = self.accept_job(id, request, Some(occurrence.into()), None, now, writes);
        v1::CommandOutcome {
            job: Some(job),
            schedule: shown(previous),
            ..codec::outcome(v1::Outcome::ScheduleTriggered, None, String::new())
        }
    }

    fn delete_schedule(&mut self, id: &ScheduleId, writes: &mut Writes) -> v1::CommandOutcome {
        let entry_id = schedules::entry_id(id.as_str(), self.number);
        writes.tally.schedules_changed += 1;
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(schedule_key::state_key(id.as_str()).into()),
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
        codec::outcome(v1::Outcome::ScheduleChanged, None, String::new())
    }

    /// Writes a schedule that a command has changed, and decides when it is due.
    fn save_changed(
        &mut self,
        mut stored: StoredSchedule,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        stored.plan(now);
        writes.tally.schedules_changed += 1;
        let record = self.save_schedule(&stored, now, writes);
        v1::CommandOutcome {
            schedule: shown(&record),
            ..codec::outcome(v1::Outcome::ScheduleChanged, None, String::new())
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
        let (problem, delay) = match schedules::decode(record) {
            Ok(mut stored) => {
                let max = room_for(&stored.job, room, writes).min(MAX_AT_ONCE);
                match self.create_due(&mut stored, max, now, writes) {
                    Ok(()) => {
                        stored.plan(now);
                        self.save_schedule(&stored, now, writes);
                        return;
                    }
                    Err(failure) => (failure.message, retry_delay(&stored)),
                }
            }
            Err(error) => (error_chain(&error), RETRY_INTERVAL),
        };
        let schedule = entry.occurrence.as_deref().unwrap_or_default();
        tracing::warn!(
            schedule,
            problem,
            ?delay,
            "cannot create the job of an occurrence; retrying"
        );
        writes.tally.postponed_occurrences += 1;
        let postponed = schedules::postpone(record, problem, now.after(delay));
        match postponed.map(|record| schedules::entry(entry.id, &record)) {
            Ok(Ok(entry)) => self.save(Arc::new(entry), now, writes),
            Ok(Err(error)) => tracing::error!(schedule, %error, "invalid schedule record in the index"),
            Err(error) => tracing::error!(schedule, %error, "invalid schedule record in the index"),
        }
    }

    /// Creates the jobs of at most `max` occurrences that are due. Creates nothing if it fails, for example because the
    /// application does not exist any more or has used up its quota.
    fn create_due(
        &mut self,
        stored: &mut StoredSchedule,
        max: usize,
        now: Timestamp,
        writes: &mut Writes,
    ) -> Result<(), Failure> {
        let app = &stored.job.app;
        self.quotas.check(app)?;
        let room = usize::try_from(self.quotas.room(app)).unwrap_or(usize::MAX);
        let decision = stored.schedule.decide(stored.progress, now, max.min(room));
        let settings = self.settings.clone();
        // The requests differ only in their times, which are over, so either all of them are valid or none.
        if let Some(first) = decision.dispatch.first() {
            let request = job_of(&stored.job, first.due, &settings.rules, now)?;
            self.check_admission(&request, now)?;
        }
        for occurrence in &decision.dispatch {
            let request = job_of(&stored.job, occurrence.due, &settings.rules, now)?;
            // Each job of the turn adds a change, and each turn moves the end of the state topic by at least its changes.
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
                "missed occurrences skipped"
            );
            stored.skipped += skipped.count;
            writes.tally.skipped_occurrences += skipped.count;
        }
        if !mutant!("shard-creates-jobs-of-occurrences-twice") {
            stored.progress = decision.progress;
        }
        Ok(())
    }
}

/// When to try again to create the job of an occurrence.
fn retry_delay(stored: &StoredSchedule) -> Duration {
    let grace = stored.schedule.recurrence().definition().misfire.grace;
    RETRY_INTERVAL.min(grace.duration() / RETRIES_IN_GRACE)
}

/// How many jobs of a schedule fit into the rest of a turn.
fn room_for(job: &v1::JobTemplate, room: Room, writes: &Writes) -> usize {
    // A job that waits because others are before it takes one record with its data, a dispatched one another record, and, while the index is full, one that
    // deletes its state.
    let by_bytes = room.bytes.saturating_sub(writes.bytes()) / (job.encoded_len() + OVERHEAD);
    let by_records = room.records.saturating_sub(writes.outputs.len()) / 3;
    by_bytes.min(by_records)
}

fn existing(is_same: bool) -> v1::Outcome {
    if is_same {
        v1::Outcome::ScheduleUnchanged
    } else {
        v1::Outcome::ScheduleExists
    }
}

fn invalid(error: &RecordError) -> Failure {
    Failure::permanent(INVALID_DEFINITION, error_chain(error))
}

fn shown(record: &Bytes) -> Option<v1::Schedule> {
    let shown = schedules::show(record, false);
    shown
        .map_err(|error: RecordError| tracing::error!(%error, "cannot decode a schedule"))
        .ok()
}

fn refuse(result: v1::Outcome, record: &Bytes, writes: &mut Writes) -> v1::CommandOutcome {
    writes.tally.refused += 1;
    v1::CommandOutcome {
        schedule: shown(record),
        ..codec::outcome(result, None, String::new())
    }
}

fn unknown_schedule(writes: &mut Writes) -> v1::CommandOutcome {
    writes.tally.refused += 1;
    codec::outcome(v1::Outcome::ScheduleUnknown, None, String::new())
}
