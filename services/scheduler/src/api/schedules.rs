//! The operations on recurring schedules, independent of the protocol.
//!
//! As for jobs, changes are commands of the ingest topic whose outcome comes back through the answers topic, and reads come from the
//! index. Each operation requires a scope for the application of the schedule's job:
//!
//! | operation | scope |
//! |---|---|
//! | create | `jobs:write` for the application of the request |
//! | get, preview | `jobs:read` |
//! | list | `jobs:read` for the application of the request, or for all applications if it names none |
//! | update | `jobs:write` for the previous and the new application |
//! | pause, resume, trigger, delete | `jobs:write` |
//!
//! A schedule of an application that the caller may neither read nor write is unknown to the caller. Only a creation with the same
//! id tells that it exists, because ids are unique among all applications.

use bytes::Bytes;
use redeliver_core::{Failure, Timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::change_schedule::{Change, Create, Update};
use redeliver_proto::v1::job_command::Command as Message;
use redeliver_recurrence::{Invalid, MAX_PREVIEW, Progress, Schedule, ScheduleId};
use redeliver_runtime::config::{Area, Verb};
use redeliver_runtime::error_chain::error_chain;
use redeliver_service::identity::Identity;
use tokio::time::Instant;

use super::call::Call;
use super::completeness::{KafkaWait, read_complete};
use super::error::RequestError;
use super::jobs::{Jobs, OUTCOME_TIMEOUT, is_visible};
use crate::index::{Index, Lookup};
use crate::request::{Field, Format, check_job, check_recurrence, other_state};
use crate::schedules::{self, RecordError, StoredSchedule};

pub(super) mod error;
pub(super) mod grpc;
pub(super) mod rest;
pub(super) mod view;

use error::ScheduleError;
pub(super) use view::UnreadableView;
pub use view::{OccurrenceView, ScheduleView};

/// The default number of occurrences of a preview.
const DEFAULT_PREVIEW: usize = 10;

/// A schedule in the index.
struct Known {
    record: Bytes,
    shown: v1::Schedule,
}

impl Known {
    fn app(&self) -> &str {
        app_of(&self.shown)
    }
}

fn app_of(schedule: &v1::Schedule) -> &str {
    let job = schedule.spec.as_ref().and_then(|spec| spec.job.as_ref());
    job.map_or("", |job| &job.app)
}

/// What a caller expects of a schedule that it updates.
pub(crate) struct Expected {
    /// Its state after the update, which an update does not change, unless it ends by it or goes on. REST only.
    pub(crate) state: Option<v1::ScheduleState>,
    /// Its revision before the update.
    pub(crate) revision: Option<u32>,
}

/// Which occurrences to preview.
pub(crate) struct PreviewRequest {
    pub(crate) schedule: Previewed,
    /// Only occurrences after this time. `None`: now.
    pub(crate) after: Option<Timestamp>,
    /// The maximum number of occurrences. 0 means the default.
    pub(crate) count: u32,
}

/// What to preview.
pub(crate) enum Previewed {
    /// The schedule with this id.
    Id(String),
    /// A definition. Its job may be missing.
    Definition(Box<v1::ScheduleSpec>),
}

impl<I: Index> Jobs<I> {
    /// Creates a schedule. Returns it without its payload, and whether it is new: another request may have created the same before. With
    /// another state than the one that the caller expects, it is not created.
    pub(crate) async fn create_schedule(
        &self,
        call: &Call,
        id: String,
        spec: v1::ScheduleSpec,
        state: Option<v1::ScheduleState>,
    ) -> Result<(v1::Schedule, bool), RequestError> {
        let format = call.format;
        self.require_job(&call.caller, Verb::Write, &spec, "create_schedule")?;
        let recurrence = state
            .map(|_| check_recurrence(&spec, &self.rules.time_zone, format))
            .transpose()?;
        let request = self.change_of(id, Change::Create(Create { spec: Some(spec) }), format)?;
        if let (Some(expected), Some(recurrence)) = (state, recurrence) {
            let id = request.id.parse::<ScheduleId>();
            let id = id.map_err(|Invalid { problem, .. }| Field("id").malformed(format, &problem))?;
            let new = StoredSchedule::new(id, recurrence, v1::JobTemplate::default(), self.clock.now());
            check_state(expected, new.state())?;
        }
        let outcome = self.send_change(call, request).await?;
        check_unchanged(state, &outcome)?;
        let is_new = outcome.outcome() == v1::Outcome::ScheduleChanged;
        Ok((changed(outcome)?, is_new))
    }

    /// A schedule with its payload.
    pub(crate) async fn get_schedule(&self, call: &Call, id: &str) -> Result<v1::Schedule, RequestError> {
        Ok(self.readable_schedule(call, id, "get_schedule").await?.shown)
    }

    /// Replaces the definition of a schedule, if it is as the caller expects.
    pub(crate) async fn update_schedule(
        &self,
        call: &Call,
        id: String,
        spec: v1::ScheduleSpec,
        expected: Expected,
    ) -> Result<v1::Schedule, RequestError> {
        self.require_job(&call.caller, Verb::Write, &spec, "update_schedule")?;
        let Expected { state, revision } = expected;
        let expected_revision = match state {
            Some(state) => Some(self.expect_state(call, &id, &spec, state, revision).await?),
            None => revision,
        };
        let change = Change::Update(Update {
            spec: Some(spec),
            expected_revision,
        });
        let outcome = self.change_schedule(call, id, change).await?;
        check_unchanged(state, &outcome)?;
        changed(outcome)
    }

    /// Checks that a schedule has this state with another definition. Returns the revision for which this is so: each pause or
    /// resumption increases it.
    async fn expect_state(
        &self,
        call: &Call,
        id: &str,
        spec: &v1::ScheduleSpec,
        state: v1::ScheduleState,
        revision: Option<u32>,
    ) -> Result<u32, RequestError> {
        // Before the look-up, so that an invalid change costs none.
        let change = Change::Update(Update {
            spec: Some(spec.clone()),
            expected_revision: revision,
        });
        self.change_of(id.to_owned(), change, call.format)?;
        let recurrence = check_recurrence(spec, &self.rules.time_zone, call.format)?;
        let known = self
            .find_schedule(&call.caller, Verb::Write, id, "update_schedule")
            .await?;
        let is = known.shown.revision;
        let revision = revision.unwrap_or(is);
        // With another revision, the shard refuses the update.
        if revision == is {
            let state_with = schedules::state_with(&known.record, recurrence, self.clock.now());
            check_state(state, state_with.map_err(|error| unreadable(&error))?)?;
        }
        Ok(revision)
    }

    /// Updates, pauses, resumes or triggers a schedule, or deletes it. An outcome without an effect is an error, unless the schedule is in
    /// the requested state already.
    pub(crate) async fn change_schedule(
        &self,
        call: &Call,
        id: String,
        change: Change,
    ) -> Result<v1::CommandOutcome, RequestError> {
        let operation = match change {
            Change::Create(_) => "create_schedule",
            Change::Update(_) => "update_schedule",
            Change::Pause(_) => "pause_schedule",
            Change::Resume(_) => "resume_schedule",
            Change::Trigger(_) => "trigger_schedule",
            Change::Delete(_) => "delete_schedule",
        };
        let caller = &call.caller;
        self.require_some(caller, Verb::Write, operation)?;
        // Before the look-up, so that an invalid change costs none.
        let mut change = self.change_of(id, change, call.format)?;
        if !caller.may(Area::Jobs, Verb::Write, None) {
            // The id does not tell the application.
            let known = self
                .find_schedule(caller, Verb::Write, &change.id, operation)
                .await?;
            // Meanwhile, the schedule may be replaced by one of another application.
            change.expected_app = known.app().to_owned();
        }
        self.send_change(call, change).await
    }

    /// The next occurrences of a schedule or of a definition.
    pub(crate) async fn preview_schedule(
        &self,
        call: &Call,
        request: PreviewRequest,
    ) -> Result<Vec<v1::OccurrencePreview>, RequestError> {
        let (caller, format) = (&call.caller, call.format);
        let count = match usize::try_from(request.count).unwrap_or(usize::MAX) {
            0 => DEFAULT_PREVIEW,
            count @ 1..=MAX_PREVIEW => count,
            count => {
                let problem = format!("is {count}; the maximum is {MAX_PREVIEW}");
                return Err(Field("count").malformed(format, &problem).into());
            }
        };
        let now = self.clock.now();
        let after = request.after.unwrap_or(now);
        let preview = match request.schedule {
            Previewed::Id(id) => {
                let known = self.readable_schedule(call, &id, "preview_schedule").await?;
                let stored = decode(&known.record)?;
                stored.schedule.preview(stored.progress, now, after, count)
            }
            Previewed::Definition(spec) => {
                match &spec.job {
                    Some(job) => {
                        self.require(caller, Verb::Read, Some(&job.app), "preview_schedule")?;
                        check_job(job, format, &self.rules, now)?;
                    }
                    None => self.require_some(caller, Verb::Read, "preview_schedule")?,
                }
                let recurrence = check_recurrence(&spec, &self.rules.time_zone, format)?;
                let id = PREVIEW.parse::<ScheduleId>();
                let id = id.map_err(|error| Failure::permanent("request.id", error.to_string()))?;
                Schedule::new(id, recurrence).preview(Progress::new(now.min(after)), now, after, count)
            }
        };
        Ok(preview.iter().map(schedules::write_preview).collect())
    }

    /// Requires a scope for the application of a definition. A definition without a job is invalid, and refused later.
    fn require_job(
        &self,
        caller: &Identity,
        verb: Verb,
        spec: &v1::ScheduleSpec,
        operation: &str,
    ) -> Result<(), RequestError> {
        match &spec.job {
            // Before the application is looked up, so that the answer does not reveal which applications exist.
            Some(job) => self.require(caller, verb, Some(&job.app), operation),
            None => self.require_some(caller, verb, operation),
        }
    }

    /// Checks a change with the rules of the shard that will read it, so that no invalid command is written.
    fn change_of(
        &self,
        id: String,
        change: Change,
        format: Format,
    ) -> Result<v1::ChangeSchedule, RequestError> {
        let change = v1::ChangeSchedule {
            id,
            change: Some(change),
            expected_app: String::new(),
        };
        self.check(&Message::ChangeSchedule(change.clone()), format)?;
        Ok(change)
    }

    /// Records a change, writes its command to the shard of the schedule, and waits for the outcome.
    async fn send_change(
        &self,
        call: &Call,
        change: v1::ChangeSchedule,
    ) -> Result<v1::CommandOutcome, RequestError> {
        self.changes.record_schedule(call, &change).await?;
        let outcome = self.outcome_of_change(call, change.clone()).await;
        if let Err(error) = &outcome
            && let Some(refusal) = refusal(error)
        {
            let recorded = self.changes.record_refusal(&call.caller, &change, refusal);
            recorded.await;
        }
        outcome
    }

    /// Writes the command of a change, and waits for its outcome.
    async fn outcome_of_change(
        &self,
        call: &Call,
        change: v1::ChangeSchedule,
    ) -> Result<v1::CommandOutcome, RequestError> {
        let id = change.id.clone();
        let is_trigger = matches!(change.change, Some(Change::Trigger(_)));
        let deadline = Instant::now() + OUTCOME_TIMEOUT;
        let partition = schedules::shard(&id, self.partitions);
        let mut pending = self.outcomes.register()?;
        let (message, trace) = (Message::ChangeSchedule(change), call.trace.clone());
        let written = self
            .write(message, partition, &pending.answer_to(), trace, deadline)
            .await;
        let written = match written {
            Ok(written) => written,
            Err(RequestError::Unconfirmed(reason)) => {
                return Err(ScheduleError::Unconfirmed {
                    id,
                    is_trigger,
                    reason,
                }
                .into());
            }
            Err(error) => return Err(error),
        };
        let outcome = match self.outcome(&mut pending, written, deadline).await {
            Ok(outcome) => outcome,
            Err(pending) => {
                let job = is_trigger.then_some(written);
                return Err(ScheduleError::Pending { id, job, pending }.into());
            }
        };
        match outcome.outcome() {
            v1::Outcome::ScheduleUnknown => Err(ScheduleError::Unknown(id).into()),
            v1::Outcome::ScheduleExists => {
                let schedule = outcome.schedule;
                let schedule = schedule.filter(|schedule| is_visible(&call.caller, app_of(schedule)));
                Err(ScheduleError::Exists {
                    id,
                    schedule: schedule.map(Box::new),
                }
                .into())
            }
            v1::Outcome::ScheduleRevised => Err(ScheduleError::Revised {
                id,
                schedule: outcome.schedule.map(Box::new),
            }
            .into()),
            v1::Outcome::Rejected => Err(rejected(outcome)),
            _ => Ok(outcome),
        }
    }

    /// A schedule that the caller may read.
    async fn readable_schedule(&self, call: &Call, id: &str, operation: &str) -> Result<Known, RequestError> {
        self.require_some(&call.caller, Verb::Read, operation)?;
        if let Err(Invalid { problem, .. }) = id.parse::<ScheduleId>() {
            return Err(Field("id").malformed(call.format, &problem).into());
        }
        self.find_schedule(&call.caller, Verb::Read, id, operation).await
    }

    /// A schedule for which the caller has the scope `verb`, which `operation` needs.
    async fn find_schedule(
        &self,
        caller: &Identity,
        verb: Verb,
        id: &str,
        operation: &str,
    ) -> Result<Known, RequestError> {
        if let Some(known) = self.look_up_schedule(id).await? {
            let permitted = self.require(caller, verb, Some(known.app()), operation);
            if is_visible(caller, known.app()) {
                return permitted.map(|()| known);
            }
            // Only operators learn that this was a refusal, from the log and the metric.
        }
        Err(ScheduleError::Unknown(id.to_owned()).into())
    }

    /// A schedule with all changes that were answered before. A change is answered once it is in the state topic.
    async fn look_up_schedule(&self, id: &str) -> Result<Option<Known>, RequestError> {
        let shard = schedules::shard(id, self.partitions);
        let lookups = [Lookup::Job(schedules::entry_id(id, shard))];
        let state_end = self.partition_end(shard);
        let wait = KafkaWait::new();
        let found = read_complete(&state_end, &wait, || async {
            Ok(self.index.look_up(shard, &lookups, self.clock.now()).await?)
        });
        let Some(record) = found.await?.into_iter().next().flatten() else {
            return Ok(None);
        };
        let shown = schedules::show(&record, true).map_err(|error| unreadable(&error))?;
        Ok((shown.id == id).then_some(Known { record, shown }))
    }
}

/// The id under which a definition without one is previewed. Nominal times do not depend on it.
const PREVIEW: &str = "preview";

fn unreadable(error: &RecordError) -> RequestError {
    tracing::error!(
        reason = error_chain(error),
        "invalid schedule record in the index"
    );
    RequestError::IndexIncomplete
}

fn decode(record: &Bytes) -> Result<StoredSchedule, RequestError> {
    schedules::decode(record).map_err(|error| match error {
        RecordError::Definition(_) => Failure::permanent("schedule.definition", error_chain(&error)).into(),
        RecordError::Malformed(_) | RecordError::Newer(_) => unreadable(&error),
    })
}

/// Why a change had no effect; `None` if it may have had one.
fn refusal(error: &RequestError) -> Option<&'static str> {
    match error {
        RequestError::Schedule(ScheduleError::Unknown(_)) => Some("the schedule is unknown"),
        RequestError::Schedule(ScheduleError::Exists { .. }) => Some("another schedule has the id"),
        RequestError::Schedule(ScheduleError::Revised { .. }) => Some("the schedule has another revision"),
        RequestError::Schedule(ScheduleError::Pending { .. } | ScheduleError::Unconfirmed { .. })
        | RequestError::Unconfirmed(_)
        | RequestError::Pending(..) => None,
        _ => Some("the scheduler did not accept it"),
    }
}

/// The schedule that an outcome contains.
fn changed(outcome: v1::CommandOutcome) -> Result<v1::Schedule, RequestError> {
    let schedule = outcome.schedule;
    schedule.ok_or_else(|| RequestError::Rejected("the scheduler returned no schedule".to_owned()))
}

/// Checks the state of a schedule that a caller expects.
fn check_state(expected: v1::ScheduleState, is: v1::ScheduleState) -> Result<(), RequestError> {
    if expected == is {
        return Ok(());
    }
    Err(other_state(expected, is).into())
}

/// Checks the state of a schedule that had the definition already. Nothing was written.
fn check_unchanged(
    expected: Option<v1::ScheduleState>,
    outcome: &v1::CommandOutcome,
) -> Result<(), RequestError> {
    match (expected, &outcome.schedule) {
        (Some(expected), Some(schedule)) if outcome.outcome() == v1::Outcome::ScheduleUnchanged => {
            check_state(expected, schedule.state())
        }
        _ => Ok(()),
    }
}

/// The command is valid here, but the shard rejected it: its configuration differs, or it has no memory.
fn rejected(outcome: v1::CommandOutcome) -> RequestError {
    let failure = Failure::permanent(outcome.code.clone(), outcome.reason.clone());
    match Field::of(&failure) {
        Some(_) => RequestError::Invalid(failure),
        None => outcome.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::RejectedForNow;

    #[test]
    fn shard_rejection_names_field_or_repeats() {
        let outcome = |code: &str| v1::CommandOutcome {
            code: code.into(),
            reason: "`cron.zone` is unknown".into(),
            ..v1::CommandOutcome::default()
        };
        let problem = rejected(outcome("request.cron.zone")).into_problem();
        assert_eq!(
            (
                problem.status.as_u16(),
                &*problem.body.code,
                problem.body.field.as_deref()
            ),
            (422, "request.cron.zone", Some("cron.zone"))
        );
        let problem = rejected(outcome(RejectedForNow::IndexFull.code())).into_problem();
        assert_eq!(
            (problem.status.as_u16(), &*problem.body.code),
            (503, "index_full")
        );
        let problem = rejected(outcome("schedule.definition")).into_problem();
        assert_eq!((problem.status.as_u16(), &*problem.body.code), (422, "rejected"));
    }
}
