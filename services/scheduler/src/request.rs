//! Parses and checks the requests in the ingest topic.
//!
//! Both formats, JSON and protobuf, are parsed to a [`ParsedRequest`]. One set of rules turns it into a [`Command`], or into a
//! [`Failure`] that names the field. The API applies the same rules before it writes a request. There is no IO: the same
//! record with the same configuration always gives the same result.
//!
//! The code of a failure is `request.` and the name of the field in JSON, for both formats. `request.json`,
//! `request.protobuf`, `request.contentType` and `request.value` concern the whole request. A message never contains the
//! job's data.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::headers::{Origin, ReservedHeaders, TRACEPARENT, TRACESTATE, is_reserved};
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{Failure, Headers, HumanDuration, Pipeline, Record, Timestamp};

use crate::job::{Kind, Payload, Priority, RequestHash};

mod field;
mod hash;
mod json;
mod parsed;
mod protobuf;
mod schedule;

pub use field::{Field, Format};
pub(crate) use field::{read_id, read_job_ref};
pub use hash::{key_hash, request_id_hash};
pub use json::{ReadSchedule, other_state, read as read_json, read_schedule as read_schedule_json};
pub(crate) use json::{as_data, read_instant, read_time as read_json_time, state_name};
pub use parsed::{ConflictPolicy, Draft, JobRef, LongWait, ParsedRequest, When};
pub(crate) use protobuf::{draft, read_when, time_of as read_timestamp};
pub use protobuf::{read as read_protobuf, spec, write as write_protobuf};
pub use redeliver_kafka::murmur2::shard_of;
pub use schedule::{Action, Change, CheckedChange, ParsedChange, ScheduleDefinition, check_recurrence};
pub(crate) use schedule::{check_job, job_of};

/// The scheduler's name in the lineage of forwarded records and dead letters, in place of a pipeline.
pub(crate) const NAME: &str = "scheduler";
/// The maximum length of idempotency keys and request ids in bytes.
pub const MAX_NAME: usize = 512;
/// The maximum of `expireAfter`, which is also that of `scheduler.max_ahead`. So no time of a job is beyond the year 9999, after
/// which neither RFC 3339 nor protobuf can represent it.
const MAX_EXPIRE_AFTER: HumanDuration = HumanDuration::from_secs(36_500 * 86_400);
/// The maximum length of an inherited header of a trace context in bytes.
const MAX_TRACE: usize = 512;
/// Headers that the scheduler adds to dispatched jobs, besides those that begin with `job-`.
const JOB_HEADERS: [&str; 3] = ["scheduled-time", "dispatched-at", "idempotency-key"];

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
    ChangeSchedule(Box<CheckedChange>),
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

/// The context of a request.
#[derive(Clone, Debug)]
pub struct Envelope<'a> {
    /// The time of the request, from which a `delay` counts.
    pub requested: Timestamp,
    /// The current time.
    pub now: Timestamp,
    /// The key of the ingest record.
    pub key: Option<&'a bytes::Bytes>,
    /// The headers of the ingest record.
    pub headers: &'a Headers,
}

/// Parses and checks a record of the ingest topic.
#[must_use]
pub fn read(record: &Record, rules: &Rules, now: Timestamp) -> Incoming {
    let (format, request, answer_to) = match format_of(record) {
        Ok(Format::Json) => (
            Format::Json,
            read_value(record, |value| json::read(value, &rules.time_zone)),
            None,
        ),
        Ok(Format::Protobuf) => match read_value(record, protobuf::read) {
            Ok((request, answer_to)) => (Format::Protobuf, request, answer_to),
            Err(failure) => (Format::Protobuf, Err(failure), None),
        },
        Err(failure) => (Format::Json, Err(failure), None),
    };
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
    let mut rejected_wait = None;
    let command = match request {
        Ok(ParsedRequest::LongWait(wait)) => {
            wait.check(format, rules, &envelope).map_err(|(failure, wait)| {
                let pipeline = rules.pipeline(&wait.pipeline);
                let payload = wait.payload;
                rejected_wait = pipeline.map(|pipeline| Box::new(RejectedWait { pipeline, payload }));
                failure
            })
        }
        Ok(request) => request.check(format, rules, &envelope),
        Err(failure) => Err(failure),
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

fn read_value<T>(
    record: &Record,
    read: impl FnOnce(&bytes::Bytes) -> Result<T, Failure>,
) -> Result<T, Failure> {
    match &record.value {
        Some(value) => read(value),
        None => Err(Failure::malformed(
            "request.value",
            "the record has no value; write the request as the value",
        )),
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
            "request.contentType",
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

impl ParsedRequest {
    /// Checks the request against the rules.
    ///
    /// # Errors
    /// When it breaks a rule. The message contains the field's name in `format`.
    pub fn check(self, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Command, Failure> {
        match self {
            Self::Schedule(draft) => {
                let request = draft.check(format, rules, envelope)?;
                Ok(Command::Schedule(Box::new(request)))
            }
            Self::Cancel(job) => {
                check_job_ref(&job, format, rules)?;
                Ok(Command::Cancel(job))
            }
            Self::Reschedule { job, when } => {
                check_job_ref(&job, format, rules)?;
                let due = due(when, format, rules, envelope)?;
                Ok(Command::Reschedule { job, due })
            }
            Self::ChangeSchedule(change) => {
                let change = change.check(format, rules, envelope)?;
                Ok(Command::ChangeSchedule(Box::new(change)))
            }
            Self::LongWait(wait) => wait
                .check(format, rules, envelope)
                .map_err(|(failure, _)| failure),
        }
    }
}

impl Draft {
    fn check(self, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Request, Failure> {
        let (app, topic) = application(&self.app, format, rules)?;
        let due = due(self.when, format, rules, envelope)?;
        check_name(Field::IdempotencyKey, format, self.idempotency_key.as_deref())?;
        check_name(Field::RequestId, format, self.request_id.as_deref())?;
        if self.on_conflict == ConflictPolicy::Replace && self.idempotency_key.is_none() {
            let key = Field::IdempotencyKey.name(format);
            let problem = format!("is `replace`, which needs an `{key}`");
            return Err(Field::OnConflict.rejected(format, &problem));
        }
        check_expire_after(format, self.expire_after)?;
        check_headers(&self.payload.headers, format)?;
        let mut payload = self.payload;
        payload.key = payload.key.or_else(|| envelope.key.cloned());
        check_size(&payload, format, rules)?;
        let request_hash = hash::Identity {
            app: &self.app,
            kind: Kind::App,
            when: self.when,
            priority: self.priority,
            payload: &payload,
            expire_after: self.expire_after,
        }
        .hash();
        inherit_trace(&mut payload.headers, envelope.headers);
        Ok(Request {
            app: app.as_str().into(),
            kind: Kind::App,
            topic: topic.clone(),
            due,
            is_delayed: matches!(self.when, When::After(_)),
            priority: self.priority,
            idempotency_key: self.idempotency_key.map(Into::into),
            on_conflict: self.on_conflict,
            request_hash,
            request_id: self.request_id.map(Into::into),
            payload,
            expires: self.expire_after.map(|wait| due.after(wait.duration())),
        })
    }
}

impl LongWait {
    /// Returns itself with the failure, so that the record is not lost.
    fn check(
        self: Box<Self>,
        format: Format,
        rules: &Rules,
        envelope: &Envelope<'_>,
    ) -> Result<Command, (Failure, Box<Self>)> {
        let Some(pipeline) = rules.pipeline(&self.pipeline) else {
            let shown = bounded_text(&self.pipeline, 60);
            let problem = format!("is `{shown}`, which cannot be the name of a pipeline");
            return Err((Field::Pipeline.rejected(format, &problem), self));
        };
        if self.due > envelope.now.after(rules.max_ahead.duration()) {
            return Err((too_far_ahead(Field::Due, format, self.due, rules), self));
        }
        // No check of the size: the topology ensures that the state topic accepts records of the size of the pipeline's source.
        let request_hash = hash::Identity {
            app: &self.pipeline,
            kind: Kind::LongWait,
            when: When::At(self.due),
            priority: Priority::Normal,
            payload: &self.payload,
            expire_after: None,
        }
        .hash();
        Ok(Command::Schedule(Box::new(Request {
            app: pipeline.name.clone(),
            kind: Kind::LongWait,
            topic: pipeline.return_topic(),
            due: self.due,
            is_delayed: false,
            priority: Priority::Normal,
            idempotency_key: None,
            on_conflict: ConflictPolicy::Reject,
            request_hash,
            request_id: None,
            payload: self.payload,
            expires: None,
        })))
    }
}

/// An application of the configuration, with its topic.
fn application<'r>(
    name: &str,
    format: Format,
    rules: &'r Rules,
) -> Result<(&'r String, &'r Arc<str>), Failure> {
    rules.apps.get_key_value(name).ok_or_else(|| {
        let known = rules.apps.keys().map(String::as_str);
        let shown = bounded_text(name, 60);
        let hint = field::hint(name, known);
        Field::App.rejected(
            format,
            &format!("is `{shown}`, which is not an application{hint}"),
        )
    })
}

/// Checks that a list or count is about an application of the configuration, or about the long waits of one of its pipelines. Otherwise, a typing
/// error would look like an application without jobs.
pub(crate) fn check_listed(app: &str, format: Format, rules: &Rules) -> Result<(), Failure> {
    if rules.pipelines.contains_key(app) {
        return Ok(());
    }
    application(app, format, rules).map(drop)
}

/// A job that is named by its key belongs to an application of the configuration. Otherwise, a typing error would look like a key
/// that is not in use.
fn check_job_ref(job: &JobRef, format: Format, rules: &Rules) -> Result<(), Failure> {
    match job {
        JobRef::Id(_) => Ok(()),
        JobRef::Key { app, key } => {
            application(app, format, rules)?;
            check_name(Field::IdempotencyKey, format, Some(key))
        }
    }
}

fn due(when: When, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Timestamp, Failure> {
    let (due, field) = match when {
        When::At(time) => (time, Field::ScheduledTime),
        When::After(delay) => (envelope.requested.after(delay.duration()), Field::Delay),
    };
    if due > envelope.now.after(rules.max_ahead.duration()) {
        return Err(too_far_ahead(field, format, due, rules));
    }
    Ok(due)
}

fn too_far_ahead(field: Field, format: Format, due: Timestamp, rules: &Rules) -> Failure {
    let problem = format!("is too far ahead ({due}); the maximum is {}", rules.max_ahead);
    field.rejected(format, &problem)
}

fn check_name(field: Field, format: Format, name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some("") => Err(field.malformed(format, "is empty; omit it instead")),
        Some(name) if name.len() > MAX_NAME => {
            let problem = format!("has {} bytes; the maximum is {MAX_NAME}", name.len());
            Err(field.malformed(format, &problem))
        }
        _ => Ok(()),
    }
}

fn check_expire_after(format: Format, wait: Option<HumanDuration>) -> Result<(), Failure> {
    match wait {
        Some(wait) if wait > MAX_EXPIRE_AFTER => {
            let problem = format!("is too long ({wait}); the maximum is {MAX_EXPIRE_AFTER}");
            Err(Field::ExpireAfter.rejected(format, &problem))
        }
        _ => Ok(()),
    }
}

/// Whether a request must not set this header, because Redeliver sets it.
fn is_refused_header(name: &str) -> bool {
    is_reserved(name) || name.starts_with("job-") || JOB_HEADERS.contains(&name)
}

fn check_headers(headers: &Headers, format: Format) -> Result<(), Failure> {
    for (name, _) in headers.iter() {
        if name.is_empty() {
            return Err(Field::Headers.malformed(format, "contains a header without a name"));
        }
        if is_refused_header(name) {
            let name = bounded_text(name, 60);
            let problem = format!("contains `{name}`, which is reserved; use another name");
            return Err(Field::Headers.malformed(format, &problem));
        }
    }
    Ok(())
}

/// A job that the state topic refuses for its size would stop the partition, so it is rejected here.
fn check_size(payload: &Payload, format: Format, rules: &Rules) -> Result<(), Failure> {
    let length = |bytes: &Option<bytes::Bytes>| bytes.as_ref().map_or(0, bytes::Bytes::len);
    let size = length(&payload.value) + length(&payload.key) + payload.headers.byte_len();
    if size > rules.max_data {
        let problem = format!(
            "has {size} bytes including key and headers; the maximum is {}",
            rules.max_data
        );
        return Err(Field::Data.rejected(format, &problem));
    }
    Ok(())
}

/// Inherits the trace context of the ingest record, unless the request has its own.
fn inherit_trace(headers: &mut Headers, ingest: &Headers) {
    if headers
        .iter()
        .any(|(name, _)| name == TRACEPARENT || name == TRACESTATE)
    {
        return;
    }
    let given = |name| ingest.single(name).ok().flatten().flatten();
    let short = |value: &&[u8]| value.len() <= MAX_TRACE;
    if let Some(parent) = given(TRACEPARENT).filter(short) {
        headers.push(TRACEPARENT, Some(parent));
        if let Some(state) = given(TRACESTATE).filter(short) {
            headers.push(TRACESTATE, Some(state));
        }
    }
}

#[cfg(test)]
mod tests;
