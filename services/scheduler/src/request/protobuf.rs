//! Parses and writes requests in protobuf.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Failure, HumanDuration, Timestamp};
use redeliver_proto::convert::{
    from_duration, from_headers, from_priority, from_timestamp, to_duration, to_headers, to_priority,
    to_timestamp,
};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{Message as _, v1};
use redeliver_recurrence::CatchUp;

use super::field::{Field, Format, read_job_ref};
use super::parsed::{ConflictPolicy, Draft, JobRef, LongWait, ParsedRequest, When};
use super::schedule::{Action, Change, ParsedChange};
use crate::job::{Payload, Priority};

/// The maximum length of `answer_to` in bytes.
const MAX_ANSWER_TO: usize = 256;

/// Parses a `JobCommand`: the request, and the key for its outcome.
///
/// # Errors
/// When the value is not that message.
#[expect(
    clippy::type_complexity,
    reason = "the outcome is answered even if the request is invalid"
)]
pub fn read(value: &Bytes) -> Result<(Result<ParsedRequest, Failure>, Option<Arc<str>>), Failure> {
    let command = v1::JobCommand::decode(value.clone()).map_err(|error| {
        let message = format!("the request is not a JobCommand: {error}");
        Failure::malformed("request.protobuf", message)
    })?;
    if command.answer_to.len() > MAX_ANSWER_TO {
        let problem = format!(
            "has {} bytes; the maximum is {MAX_ANSWER_TO}",
            command.answer_to.len()
        );
        return Err(invalid(Field::AnswerTo, &problem));
    }
    let answer_to = (!command.answer_to.is_empty()).then(|| command.answer_to.into());
    let request = match command.command {
        Some(Command::Schedule(spec)) => draft(spec).map(|draft| ParsedRequest::Schedule(Box::new(draft))),
        Some(Command::Cancel(v1::CancelJob {
            id,
            app,
            idempotency_key,
        })) => read_job_ref(Field::Cancel, Format::Protobuf, &id, &app, &idempotency_key)
            .map(ParsedRequest::Cancel),
        Some(Command::Reschedule(command)) => reschedule(&command),
        Some(Command::ChangeSchedule(change)) => {
            change_schedule(change).map(|change| ParsedRequest::ChangeSchedule(Box::new(change)))
        }
        Some(Command::LongWait(wait)) => long_wait(wait).map(|wait| ParsedRequest::LongWait(Box::new(wait))),
        None => Err(invalid(
            Field::Command,
            "is missing; set schedule, cancel, reschedule or change_schedule",
        )),
    };
    Ok((request, answer_to))
}

/// Writes a request as a `JobCommand`.
#[must_use]
pub fn write(request: &ParsedRequest, answer_to: &str) -> Bytes {
    let command = match request {
        ParsedRequest::Schedule(draft) => Command::Schedule(spec(draft)),
        ParsedRequest::Cancel(job) => {
            let (id, app, idempotency_key) = names(job);
            Command::Cancel(v1::CancelJob {
                id,
                app,
                idempotency_key,
            })
        }
        ParsedRequest::Reschedule { job, when } => {
            let (id, app, idempotency_key) = names(job);
            Command::Reschedule(v1::RescheduleJob {
                id,
                app,
                idempotency_key,
                when: Some(match when {
                    When::At(time) => v1::reschedule_job::When::ScheduledTime(to_timestamp(*time)),
                    When::After(delay) => v1::reschedule_job::When::Delay(to_duration(*delay)),
                }),
            })
        }
        ParsedRequest::ChangeSchedule(change) => Command::ChangeSchedule(write_change(change)),
        ParsedRequest::LongWait(wait) => Command::LongWait(v1::LongWait {
            pipeline: wait.pipeline.clone(),
            due: Some(to_timestamp(wait.due)),
            key: wait.payload.key.clone(),
            value: wait.payload.value.clone(),
            headers: to_headers(&wait.payload.headers),
        }),
    };
    let command = v1::JobCommand {
        command: Some(command),
        answer_to: answer_to.to_owned(),
    };
    command.encode_to_vec().into()
}

/// The id, application and idempotency key with which a message names a job. Empty fields are not set.
fn names(job: &JobRef) -> (String, String, String) {
    match job {
        JobRef::Id(id) => (id.to_string(), String::new(), String::new()),
        JobRef::Key { app, key } => (String::new(), app.to_string(), key.to_string()),
    }
}

/// The protobuf message of a new job.
#[must_use]
pub fn spec(draft: &Draft) -> v1::JobSpec {
    v1::JobSpec {
        app: draft.app.clone(),
        when: Some(match draft.when {
            When::At(time) => v1::job_spec::When::ScheduledTime(to_timestamp(time)),
            When::After(delay) => v1::job_spec::When::Delay(to_duration(delay)),
        }),
        priority: to_priority(draft.priority).into(),
        idempotency_key: draft.idempotency_key.clone(),
        data: draft.payload.value.clone().unwrap_or_default(),
        key: draft.payload.key.clone(),
        headers: to_headers(&draft.payload.headers),
        expire_after: draft.expire_after.map(to_duration),
        request_id: draft.request_id.clone(),
        on_conflict: match draft.on_conflict {
            ConflictPolicy::Reject => v1::ConflictPolicy::Unspecified,
            ConflictPolicy::Replace => v1::ConflictPolicy::Replace,
        }
        .into(),
    }
}

fn invalid(field: Field, problem: &str) -> Failure {
    field.malformed(Format::Protobuf, problem)
}

/// Parses the message of a new job.
pub(crate) fn draft(spec: v1::JobSpec) -> Result<Draft, Failure> {
    let on_conflict = match v1::ConflictPolicy::try_from(spec.on_conflict) {
        Ok(v1::ConflictPolicy::Unspecified | v1::ConflictPolicy::Reject) => ConflictPolicy::Reject,
        Ok(v1::ConflictPolicy::Replace) => ConflictPolicy::Replace,
        Err(_) => {
            let problem = format!("is {}; expected 1 (reject) or 2 (replace)", spec.on_conflict);
            return Err(invalid(Field::OnConflict, &problem));
        }
    };
    let when = match spec.when {
        Some(v1::job_spec::When::ScheduledTime(time)) => When::At(time_of(Field::ScheduledTime, &time)?),
        Some(v1::job_spec::When::Delay(delay)) => When::After(duration(Field::Delay, &delay)?),
        None => return Err(missing_time()),
    };
    Ok(Draft {
        app: spec.app,
        when,
        priority: priority(spec.priority)?,
        idempotency_key: spec.idempotency_key,
        request_id: spec.request_id,
        payload: Payload {
            value: Some(spec.data),
            key: spec.key,
            headers: from_headers(&spec.headers),
        },
        expire_after: spec
            .expire_after
            .map(|wait| duration(Field::ExpireAfter, &wait))
            .transpose()?,
        on_conflict,
    })
}

fn priority(number: i32) -> Result<Priority, Failure> {
    let priority = v1::Priority::try_from(number).map_err(|_| {
        let problem = format!("is {number}; expected 1 (high), 2 (normal) or 3 (low)");
        invalid(Field::Priority, &problem)
    })?;
    Ok(from_priority(priority))
}

/// Parses the job of a recurring schedule.
pub(super) fn template_draft(template: v1::JobTemplate, when: When) -> Result<Draft, Failure> {
    Ok(Draft {
        app: template.app,
        when,
        priority: priority(template.priority)?,
        idempotency_key: None,
        on_conflict: ConflictPolicy::Reject,
        request_id: None,
        payload: Payload {
            value: Some(template.data),
            key: template.key,
            headers: from_headers(&template.headers),
        },
        expire_after: template
            .expire_after
            .map(|wait| duration(Field::ExpireAfter, &wait))
            .transpose()?,
    })
}

fn change_schedule(change: v1::ChangeSchedule) -> Result<ParsedChange, Failure> {
    use v1::change_schedule::Change as Proto;
    let missing = || invalid(Field::Command, "has no `spec`");
    let action = match change.change {
        Some(Proto::Create(create)) => Action::Create(Box::new(create.spec.ok_or_else(missing)?)),
        Some(Proto::Update(update)) => Action::Update {
            definition: Box::new(update.spec.ok_or_else(missing)?),
            expected_revision: update.expected_revision,
        },
        Some(Proto::Pause(_)) => Action::Pause,
        Some(Proto::Resume(resume)) => Action::Resume(if resume.catch_up {
            CatchUp::Misfire
        } else {
            CatchUp::Skip
        }),
        Some(Proto::Trigger(_)) => Action::Trigger,
        Some(Proto::Delete(_)) => Action::Delete,
        None => return Err(invalid(Field::Command, "has no `change`")),
    };
    Ok(Change {
        id: change.id,
        action,
        expected_app: (!change.expected_app.is_empty()).then_some(change.expected_app),
    })
}

fn write_change(change: &ParsedChange) -> v1::ChangeSchedule {
    use v1::change_schedule::{self as proto, Change as Proto};
    v1::ChangeSchedule {
        id: change.id.clone(),
        expected_app: change.expected_app.clone().unwrap_or_default(),
        change: Some(match &change.action {
            Action::Create(spec) => Proto::Create(proto::Create {
                spec: Some((**spec).clone()),
            }),
            Action::Update {
                definition,
                expected_revision,
            } => Proto::Update(proto::Update {
                spec: Some((**definition).clone()),
                expected_revision: *expected_revision,
            }),
            Action::Pause => Proto::Pause(proto::Pause {}),
            Action::Resume(catch_up) => Proto::Resume(proto::Resume {
                catch_up: *catch_up == CatchUp::Misfire,
            }),
            Action::Trigger => Proto::Trigger(proto::Trigger {}),
            Action::Delete => Proto::Delete(proto::Delete {}),
        }),
    }
}

fn reschedule(command: &v1::RescheduleJob) -> Result<ParsedRequest, Failure> {
    let v1::RescheduleJob {
        id,
        app,
        idempotency_key,
        ..
    } = command;
    Ok(ParsedRequest::Reschedule {
        job: read_job_ref(Field::Reschedule, Format::Protobuf, id, app, idempotency_key)?,
        when: read_when(command.when.as_ref())?,
    })
}

/// Parses the new due time of a job.
pub(crate) fn read_when(when: Option<&v1::reschedule_job::When>) -> Result<When, Failure> {
    match when {
        Some(v1::reschedule_job::When::ScheduledTime(time)) => {
            Ok(When::At(time_of(Field::ScheduledTime, time)?))
        }
        Some(v1::reschedule_job::When::Delay(delay)) => Ok(When::After(duration(Field::Delay, delay)?)),
        None => Err(missing_time()),
    }
}

fn long_wait(wait: v1::LongWait) -> Result<LongWait, Failure> {
    let due = wait.due.ok_or_else(|| invalid(Field::Due, "is missing"))?;
    Ok(LongWait {
        pipeline: wait.pipeline,
        due: time_of(Field::Due, &due)?,
        payload: Payload {
            value: wait.value,
            key: wait.key,
            headers: from_headers(&wait.headers),
        },
    })
}

fn missing_time() -> Failure {
    invalid(Field::ScheduledTime, "is missing; set it or `delay`")
}

/// Parses a time, rounded up to the millisecond.
pub(crate) fn time_of(field: Field, time: &prost_types::Timestamp) -> Result<Timestamp, Failure> {
    from_timestamp(time).ok_or_else(|| {
        invalid(
            field,
            "is out of range; expected a time in the years 1 to 9999 and nanoseconds from 0 to 999999999",
        )
    })
}

fn duration(field: Field, duration: &prost_types::Duration) -> Result<HumanDuration, Failure> {
    from_duration(duration).ok_or_else(|| invalid(field, "is out of range; expected a duration of 0 or more"))
}
