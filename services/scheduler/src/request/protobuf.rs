//! Requests as protobuf, read and written.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Failure, Span, Timestamp};
use redeliver_proto::convert::{
    from_duration, from_headers, from_priority, from_timestamp, to_duration, to_headers, to_priority,
    to_timestamp,
};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{Message as _, v1};

use super::field::{Field, Format};
use super::{Draft, LongWait, MAX_ANSWER_TO, ParsedRequest, When, read_id};
use crate::job::Payload;

/// Reads a `JobCommand`: what it says, and who waits for the outcome.
///
/// # Errors
/// When it is not that message.
#[expect(
    clippy::type_complexity,
    reason = "whoever waits is told even if the command is wrong"
)]
pub fn read(value: &Bytes) -> Result<(Result<ParsedRequest, Failure>, Option<Arc<str>>), Failure> {
    let command = v1::JobCommand::decode(value.clone()).map_err(|error| {
        let message = format!("the request is not a JobCommand: {error}");
        Failure::malformed("request.protobuf", message)
    })?;
    if command.answer_to.len() > MAX_ANSWER_TO {
        let problem = format!("has more than {MAX_ANSWER_TO} bytes");
        return Err(wrong(Field::AnswerTo, &problem));
    }
    let answer_to = (!command.answer_to.is_empty()).then(|| command.answer_to.into());
    let wish = match command.command {
        Some(Command::Schedule(spec)) => draft(spec).map(|draft| ParsedRequest::Schedule(Box::new(draft))),
        Some(Command::Cancel(cancel)) => {
            read_id(Field::Cancel, Format::Protobuf, &cancel.id).map(ParsedRequest::Cancel)
        }
        Some(Command::Reschedule(asked)) => reschedule(&asked),
        Some(Command::LongWait(wait)) => long_wait(wait).map(|wait| ParsedRequest::LongWait(Box::new(wait))),
        None => Err(wrong(
            Field::Command,
            "is missing; it is one of schedule, cancel and reschedule",
        )),
    };
    Ok((wish, answer_to))
}

/// Writes a wish as a `JobCommand`.
#[must_use]
pub fn write(wish: &ParsedRequest, answer_to: &str) -> Bytes {
    let command = match wish {
        ParsedRequest::Schedule(draft) => Command::Schedule(spec(draft)),
        ParsedRequest::Cancel(id) => Command::Cancel(v1::CancelJob { id: id.to_string() }),
        ParsedRequest::Reschedule { id, when } => Command::Reschedule(v1::RescheduleJob {
            id: id.to_string(),
            when: Some(match when {
                When::At(time) => v1::reschedule_job::When::ScheduledTime(to_timestamp(*time)),
                When::After(delay) => v1::reschedule_job::When::Delay(to_duration(*delay)),
            }),
        }),
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

/// A job to be, on the wire.
#[must_use]
pub fn spec(draft: &Draft) -> v1::JobSpec {
    v1::JobSpec {
        app: draft.app.clone(),
        when: Some(match draft.when {
            When::At(time) => v1::job_spec::When::ScheduledTime(to_timestamp(time)),
            When::After(delay) => v1::job_spec::When::Delay(to_duration(delay)),
        }),
        priority: to_priority(draft.priority).into(),
        idempotency_key: draft.idempotency_key.clone().unwrap_or_default(),
        data: draft.payload.value.clone().unwrap_or_default(),
        key: draft.payload.key.clone(),
        headers: to_headers(&draft.payload.headers),
        expire_after: draft.expire_after.map(to_duration),
        request_id: draft.request_id.clone().unwrap_or_default(),
    }
}

fn wrong(field: Field, problem: &str) -> Failure {
    field.malformed(Format::Protobuf, problem)
}

/// Reads a job to be.
pub(crate) fn draft(spec: v1::JobSpec) -> Result<Draft, Failure> {
    let priority = v1::Priority::try_from(spec.priority).map_err(|_| {
        let problem = format!("is {}; expected 1 (high), 2 (normal) or 3 (low)", spec.priority);
        wrong(Field::Priority, &problem)
    })?;
    let when = match spec.when {
        Some(v1::job_spec::When::ScheduledTime(time)) => When::At(time_of(Field::ScheduledTime, &time)?),
        Some(v1::job_spec::When::Delay(delay)) => When::After(span(Field::Delay, &delay)?),
        None => return Err(no_time()),
    };
    Ok(Draft {
        app: spec.app,
        when,
        priority: from_priority(priority),
        idempotency_key: (!spec.idempotency_key.is_empty()).then_some(spec.idempotency_key),
        request_id: (!spec.request_id.is_empty()).then_some(spec.request_id),
        payload: Payload {
            value: Some(spec.data),
            key: spec.key,
            headers: from_headers(&spec.headers),
        },
        expire_after: spec
            .expire_after
            .map(|wait| span(Field::ExpireAfter, &wait))
            .transpose()?,
    })
}

fn reschedule(asked: &v1::RescheduleJob) -> Result<ParsedRequest, Failure> {
    Ok(ParsedRequest::Reschedule {
        id: read_id(Field::Reschedule, Format::Protobuf, &asked.id)?,
        when: read_when(asked.when.as_ref())?,
    })
}

/// Reads the new time of a job.
pub(crate) fn read_when(when: Option<&v1::reschedule_job::When>) -> Result<When, Failure> {
    match when {
        Some(v1::reschedule_job::When::ScheduledTime(time)) => {
            Ok(When::At(time_of(Field::ScheduledTime, time)?))
        }
        Some(v1::reschedule_job::When::Delay(delay)) => Ok(When::After(span(Field::Delay, delay)?)),
        None => Err(no_time()),
    }
}

fn long_wait(wait: v1::LongWait) -> Result<LongWait, Failure> {
    let due = wait.due.ok_or_else(|| wrong(Field::Due, "is missing"))?;
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

fn no_time() -> Failure {
    wrong(Field::ScheduledTime, "is missing; give it or `delay`")
}

fn time_of(field: Field, time: &prost_types::Timestamp) -> Result<Timestamp, Failure> {
    from_timestamp(time).ok_or_else(|| {
        wrong(
            field,
            "is out of range; expected a time of the years 1 to 9999, with 0 to 999999999 nanoseconds",
        )
    })
}

fn span(field: Field, duration: &prost_types::Duration) -> Result<Span, Failure> {
    from_duration(duration)
        .ok_or_else(|| wrong(field, "is out of range; expected a duration that is not negative"))
}
