//! Parses and checks the requests in the ingest topic.
//!
//! Both formats, JSON and protobuf, are parsed to the protobuf message. One set of rules turns it into a [`Command`], or into a
//! [`Failure`] that names the field. The API applies the same rules before it writes a request. There is no IO: the same
//! record with the same configuration always gives the same result.
//!
//! The code of a failure is `request.` and the name of the field in JSON, for both formats. `request.json`,
//! `request.protobuf`, `request.contentType` and `request.value` concern the whole request. A message never contains the
//! job's data.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::headers::{Origin, ReservedHeaders};
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{Failure, Headers, HumanDuration, Pipeline, Record, Timestamp};
use redeliver_proto::v1::job_command::Command as Message;
use redeliver_proto::{Message as _, v1};

use crate::job::{Job, JobId, JobState, Kind, Payload, Priority, RequestHash};

mod field;
mod hash;
mod job;
mod json;
mod schedule;
mod when;

pub(crate) use field::{CONTENT_TYPE, NOT_JSON};
pub use field::{Field, Format};
pub use hash::{key_hash, request_id_hash};
pub use job::{ConflictPolicy, JobRef, MAX_NAME};
pub(crate) use job::{check_listed, read_id, read_job_ref, read_timestamp, read_when, reschedule};
pub use json::job::read as read_json;
pub(crate) use json::job::{DueRequest, JobRequest, Priority as PriorityName, read_due};
pub(crate) use json::schedule::{Gap, MisfirePolicy, Overlap, ScheduleRequest, ScheduleState};
pub use json::schedule::{ReadSchedule, other_state, read as read_schedule_json};
pub(crate) use json::{as_data, read_instant};
pub use redeliver_kafka::murmur2::shard_of;
pub use schedule::{Action, ScheduleChange, ScheduleDefinition, check_recurrence};
pub(crate) use schedule::{check_job, job_of};
pub use when::When;

/// The scheduler's name in the lineage of forwarded records and dead letters, in place of a pipeline.
pub(crate) const NAME: &str = "scheduler";
/// The maximum length of `answer_to` in bytes.
const MAX_ANSWER_TO: usize = 256;

/// The rules for requests, from the configuration.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The topic of each application.
    pub apps: BTreeMap<String, Arc<str>>,
    /// The configured pipelines; see `Rules::pipeline`.
    pub pipelines: BTreeMap<String, Arc<Pipeline>>,
    /// The time zone of times without an offset.
    pub time_zone: TimeZone,
    /// How far ahead a job may be due.
    pub max_ahead: HumanDuration,
    /// How old a request can be: its topic does not retain older ones.
    pub max_request_age: HumanDuration,
    /// The maximum size of a job's data, key and headers together, in bytes.
    pub max_data: usize,
}

impl Rules {
    /// The pipeline of a long wait. While a change of the configuration is rolled out, workers know pipelines that this process does not know yet, or not any
    /// more. Such a one has the topics that follow from its name, so its waits end in the due topic. `None` if no pipeline can have this name.
    pub(crate) fn pipeline(&self, name: &str) -> Option<Arc<Pipeline>> {
        if let Some(known) = self.pipelines.get(name) {
            return Some(known.clone());
        }
        let unknown = Pipeline::new(name);
        let is_valid = is_topic_name(name) && is_topic_name(&unknown.due_topic());
        is_valid.then(|| Arc::new(unknown))
    }

    /// The topics to which jobs are dispatched, and those of the dead letters of pipelines with long waits.
    pub(crate) fn topics(&self) -> Vec<Arc<str>> {
        let of_pipelines = self
            .pipelines
            .values()
            .filter(|pipeline| pipeline.long_waits.is_some());
        let of_pipelines =
            of_pipelines.flat_map(|pipeline| [pipeline.return_topic(), pipeline.dead_letter_topic()]);
        self.apps.values().cloned().chain(of_pipelines).collect()
    }
}

/// A record of the ingest topic, parsed and checked.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The command, or why the request is rejected.
    pub command: Result<Command, Failure>,
    /// The key for the outcome in the answers topic, if a client waits for it.
    pub answer_to: Option<Arc<str>>,
    /// Whether the timestamp of the request is too old to be its time.
    pub is_timestamp_too_old: bool,
    /// The record of a long wait that is rejected.
    pub rejected_wait: Option<Box<RejectedWait>>,
}

/// The record of a rejected long wait. It becomes a dead letter of its pipeline.
#[derive(Clone, Debug)]
pub struct RejectedWait {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// Key, value and headers of the record.
    pub payload: Payload,
}

/// A request that complies with the rules.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Create a job.
    Schedule(Box<Request>),
    /// Cancel a job.
    Cancel(JobRef),
    /// Change the due time of a job.
    Reschedule {
        /// The job.
        job: JobRef,
        /// The new due time.
        due: Timestamp,
    },
    /// Change a recurring schedule.
    ChangeSchedule(Box<ScheduleChange>),
    /// Act on a long wait before it is due.
    ActOnWait(WaitChange),
}

/// What an operator wants done with a long wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitChange {
    /// Its job.
    pub job: JobId,
    /// What is done with it.
    pub action: WaitAction,
    /// Who wants it.
    pub by: String,
    /// Why.
    pub reason: String,
}

/// What can be done with a long wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitAction {
    /// It is due now.
    Retry,
    /// It becomes a dead letter of its pipeline.
    Dead,
}

/// A request for a new job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The application, or the pipeline of a long wait.
    pub app: Arc<str>,
    /// Whether it is a job of an application or a long wait.
    pub kind: Kind,
    /// The topic to which the job is dispatched.
    pub topic: Arc<str>,
    /// The due time, which can be in the past.
    pub due: Timestamp,
    /// Whether the due time is a delay, so that a repetition of the request has another one.
    pub is_delayed: bool,
    /// Which of several due jobs is dispatched first.
    pub priority: Priority,
    /// The idempotency key.
    pub idempotency_key: Option<Arc<str>>,
    /// What happens if the idempotency key is in use.
    pub on_conflict: ConflictPolicy,
    /// The hash of the request's content.
    pub request_hash: RequestHash,
    /// The client's identifier of the request.
    pub request_id: Option<Arc<str>>,
    /// The content of the dispatched record.
    pub payload: Payload,
    /// The time after which the job is not dispatched any more.
    pub expires: Option<Timestamp>,
}

impl Request {
    /// The job of an accepted request, which waits.
    pub(crate) fn into_job(self, id: JobId, accepted: Timestamp) -> Job {
        Job {
            id,
            app: self.app,
            kind: self.kind,
            state: JobState::Scheduled,
            priority: self.priority,
            due: self.due,
            accepted,
            revision: 1,
            idempotency_key: self.idempotency_key,
            request_hash: self.request_hash,
            request_id: self.request_id,
            topic: self.topic,
            payload: self.payload,
            ended: None,
            expires: self.expires,
            occurrence: None,
            released: None,
        }
    }
}

/// The context of a request.
#[derive(Clone, Debug)]
pub struct Envelope<'a> {
    /// The time of the request, from which a `delay` counts.
    pub requested: Timestamp,
    /// The current time.
    pub now: Timestamp,
    /// The key of the ingest record.
    pub key: Option<&'a Bytes>,
    /// The headers of the ingest record.
    pub headers: &'a Headers,
}

/// Parses and checks a record of the ingest topic.
#[must_use]
pub fn read(record: &Record, rules: &Rules, now: Timestamp) -> Incoming {
    let parsed = format_of(record).and_then(|format| Ok((format, parse(record, format, rules)?)));
    let timestamp = first_origin(record).timestamp;
    // Producers write timestamps, also in seconds or of a clock that was never set. A delay from there would be over at once.
    let is_timestamp_too_old = timestamp.is_some_and(|at| now.since(at) > rules.max_request_age.duration());
    let envelope = Envelope {
        // A producer's clock that is ahead must not make the job late.
        requested: timestamp
            .filter(|_| !is_timestamp_too_old)
            .map_or(now, |at| at.min(now)),
        now,
        key: record.key.as_ref(),
        headers: &record.headers,
    };
    let (checked, answer_to) = match parsed {
        Ok((format, message)) => (
            check(message.command, format, rules, &envelope),
            (!message.answer_to.is_empty()).then(|| message.answer_to.into()),
        ),
        Err(failure) => (Err(failure.into()), None),
    };
    let (command, rejected_wait) = match checked {
        Ok(command) => (Ok(command), None),
        Err(Rejected { failure, wait }) => (Err(failure), wait),
    };
    Incoming {
        command,
        answer_to,
        is_timestamp_too_old,
        rejected_wait,
    }
}

/// Where a request was written first. Another shard may have forwarded it from there.
pub(crate) fn first_origin(record: &Record) -> Origin {
    let forwarded = ReservedHeaders::read(record)
        .ok()
        .filter(|reserved| reserved.is_retry_of(NAME));
    forwarded
        .and_then(|reserved| reserved.origin().ok())
        .filter(|origin| origin.topic == record.position.topic)
        .unwrap_or_else(|| Origin::of(record))
}

fn parse(record: &Record, format: Format, rules: &Rules) -> Result<v1::JobCommand, Failure> {
    let value = record.value.as_ref().ok_or_else(|| {
        let message = "the record has no value; write the request as the value";
        Failure::malformed("request.value", message)
    })?;
    if format == Format::Json {
        return Ok(v1::JobCommand {
            command: Some(read_json(value, &rules.time_zone)?),
            answer_to: String::new(),
        });
    }
    let command = v1::JobCommand::decode(value.clone()).map_err(|error| {
        let message = format!("the request is not a JobCommand: {error}");
        Failure::malformed("request.protobuf", message)
    })?;
    match command.answer_to.len() {
        0..=MAX_ANSWER_TO => Ok(command),
        length => {
            let problem = format!("has {length} bytes; the maximum is {MAX_ANSWER_TO}");
            Err(Field("answerTo").malformed(format, &problem))
        }
    }
}

fn format_of(record: &Record) -> Result<Format, Failure> {
    const NAME: &str = "content-type";
    if record.unreadable_headers > 0 {
        let message = format!(
            "{} headers have names that are not UTF-8",
            record.unreadable_headers
        );
        return Err(Failure::malformed("header.name", message));
    }
    let invalid = |problem: String| {
        let expected = format!("expected application/json or {}", redeliver_proto::CONTENT_TYPE);
        Err(Failure::malformed(
            CONTENT_TYPE,
            format!("header `{NAME}` {problem}; {expected}"),
        ))
    };
    let Ok(found) = record.headers.single(NAME) else {
        return invalid("appears more than once".to_owned());
    };
    let Some(value) = found else {
        return Ok(Format::Json);
    };
    let text = value
        .and_then(|value| std::str::from_utf8(value).ok())
        .unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        Ok(Format::Json)
    } else if essence.eq_ignore_ascii_case(redeliver_proto::CONTENT_TYPE) {
        Ok(Format::Protobuf)
    } else {
        invalid(format!("is `{}`", bounded_text(text, 60)))
    }
}

/// Why a request does not comply with the rules.
#[derive(Debug)]
pub struct Rejected {
    /// What is wrong, with the field's name in the format of the request.
    pub failure: Failure,
    /// The record of a long wait.
    wait: Option<Box<RejectedWait>>,
}

impl From<Failure> for Rejected {
    fn from(failure: Failure) -> Self {
        Self { failure, wait: None }
    }
}

/// Checks a request, which was written in `format`, against the rules.
///
/// # Errors
/// When it breaks a rule.
pub fn check(
    message: Option<Message>,
    format: Format,
    rules: &Rules,
    envelope: &Envelope<'_>,
) -> Result<Command, Rejected> {
    let job_ref = |field, id: &str, app: &str, key: &str| {
        let job = read_job_ref(Field(field), format, id, app, key)?;
        job::check_job_ref(&job, format, rules)?;
        Ok::<_, Failure>(job)
    };
    Ok(match message {
        Some(Message::Schedule(spec)) => {
            Command::Schedule(Box::new(job::check(spec, format, rules, envelope)?))
        }
        Some(Message::Cancel(cancel)) => {
            let v1::CancelJob {
                id,
                app,
                idempotency_key,
            } = cancel;
            Command::Cancel(job_ref("cancel", &id, &app, &idempotency_key)?)
        }
        Some(Message::Reschedule(reschedule)) => {
            let v1::RescheduleJob {
                id,
                app,
                idempotency_key,
                when,
            } = reschedule;
            let job = job_ref("reschedule", &id, &app, &idempotency_key)?;
            let due = job::due(read_when(when.as_ref())?, format, rules, envelope)?;
            Command::Reschedule { job, due }
        }
        Some(Message::ChangeSchedule(change)) => {
            Command::ChangeSchedule(Box::new(schedule::check(change, format, rules, envelope)?))
        }
        Some(Message::LongWait(wait)) => {
            Command::Schedule(Box::new(job::check_long_wait(wait, format, rules, envelope.now)?))
        }
        Some(Message::ActOnLongWait(act)) => Command::ActOnWait(job::check_wait_change(act, format)?),
        None => {
            let problem = "is missing, or this version does not know it; set schedule, cancel, reschedule or change_schedule";
            return Err(Field("command").malformed(format, problem).into());
        }
    })
}

#[cfg(test)]
mod tests;
