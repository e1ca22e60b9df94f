//! Reading requests: what stands in a record of the ingest topic, checked against what may be scheduled.
//!
//! Two formats, JSON and protobuf, become one [`ParsedRequest`], and one set of rules makes a [`Command`] of it or a
//! [`Failure`] that names the field. The API checks what it is asked with the same rules before it writes
//! anything. All of it is pure: the same record under the same configuration always means the same.
//!
//! A failure's code is `request.` and the field's name in JSON, whatever the format was; `request.json`,
//! `request.protobuf`, `request.contentType` and `request.value` concern the whole. Its message never shows
//! the job's data.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::headers::{Origin, ReservedHeaders, TRACEPARENT, TRACESTATE, is_ours};
use redeliver_core::{Failure, Headers, Pipeline, Record, Span, Timestamp};

use crate::job::{JobId, Kind, Payload, Priority, RequestHash};

mod field;
mod hash;
mod json;
mod protobuf;

pub use field::{Field, Format};
pub use hash::key_hash;
pub use json::read as read_json;
pub(crate) use json::read_time as read_json_time;
pub(crate) use protobuf::{draft, read_when};
pub use protobuf::{read as read_protobuf, spec, write as write_protobuf};
pub use redeliver_kafka::murmur2::shard_of;

/// The name that stands as the pipeline's in the lineage of what we pass on.
pub(crate) const NAME: &str = "scheduler";
/// The longest idempotency key and request id, in bytes.
pub const MAX_NAME: usize = 512;
/// The longest `answer_to`, in bytes.
const MAX_ANSWER_TO: usize = 256;
/// The longest header of a trace context that is handed on, in bytes.
const MAX_TRACE: usize = 512;
/// Headers that dispatched jobs get from us, beside those that begin with `job-`.
const JOB_HEADERS: [&str; 3] = ["scheduled-time", "dispatched-at", "idempotency-key"];

/// What may be scheduled, from the configuration.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The topic of each application.
    pub apps: BTreeMap<String, Arc<str>>,
    /// The pipelines whose long waits are held.
    pub pipelines: BTreeMap<String, Arc<Pipeline>>,
    /// Where times without an offset are meant.
    pub time_zone: TimeZone,
    /// How far ahead a job may be due.
    pub max_ahead: Span,
    /// The most bytes of a job's data, key and headers together.
    pub max_data: usize,
}

impl Rules {
    /// Where jobs may go.
    pub(crate) fn topics(&self) -> Vec<Arc<str>> {
        let of_pipelines = self.pipelines.values().map(|pipeline| pipeline.return_topic());
        self.apps.values().cloned().chain(of_pipelines).collect()
    }
}

/// A record of the ingest topic, read.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// What it asks for, or why it cannot be had.
    pub command: Result<Command, Failure>,
    /// Whoever waits for the outcome.
    pub answer_to: Option<Arc<str>>,
    /// The record of a long wait that cannot be had.
    pub refused_wait: Option<Box<RefusedWait>>,
}

/// A record that cannot wait here. It is its pipeline's, which counts it among its own.
#[derive(Clone, Debug)]
pub struct RefusedWait {
    /// Its pipeline.
    pub pipeline: Arc<Pipeline>,
    /// Key, value and headers as they should have come back.
    pub payload: Payload,
}

/// What can be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A new job.
    Schedule(Box<Request>),
    /// A job is not to be dispatched.
    Cancel(JobId),
    /// A job gets a new time.
    Reschedule {
        /// The job.
        id: JobId,
        /// Its new time.
        due: Timestamp,
    },
}

/// A job to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The application, or the pipeline of a long wait.
    pub app: Arc<str>,
    /// Whose it is.
    pub kind: Kind,
    /// Where it goes.
    pub topic: Arc<str>,
    /// Not before; may be over already.
    pub due: Timestamp,
    /// Which of several due jobs goes first.
    pub priority: Priority,
    /// What its application calls the request.
    pub idempotency_key: Option<Arc<str>>,
    /// Over everything that makes two requests the same.
    pub request_hash: RequestHash,
    /// A name that the caller gives the request.
    pub request_id: Option<Arc<str>>,
    /// What goes to the topic.
    pub payload: Payload,
    /// After this it is not worth being dispatched.
    pub expires: Option<Timestamp>,
}

/// What a request says, not yet checked against the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedRequest {
    /// A job of an application.
    Schedule(Box<Draft>),
    /// No job.
    Cancel(JobId),
    /// A new time.
    Reschedule {
        /// The job.
        id: JobId,
        /// Its new time.
        when: When,
    },
    /// A record of a pipeline that waits longer than its longest tier.
    LongWait(Box<LongWait>),
}

/// A job of an application as the caller describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The application.
    pub app: String,
    /// When it is due.
    pub when: When,
    /// Which of several due jobs goes first.
    pub priority: Priority,
    /// What its application calls the request.
    pub idempotency_key: Option<String>,
    /// A name that the caller gives the request.
    pub request_id: Option<String>,
    /// What goes to the topic. Without a key, that of the ingest record is kept.
    pub payload: Payload,
    /// How long after its time it is still worth being dispatched.
    pub expire_after: Option<Span>,
}

/// A failed record of a pipeline on its way back to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongWait {
    /// The pipeline.
    pub pipeline: String,
    /// Not before.
    pub due: Timestamp,
    /// The record, with all of its headers.
    pub payload: Payload,
}

/// A time, or a wait from the request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Not before.
    At(Timestamp),
    /// So long after the request.
    After(Span),
}

/// What surrounds a request: when and with what it came.
#[derive(Clone, Debug)]
pub struct Envelope<'a> {
    /// When it was made; a `delay` counts from then.
    pub requested: Timestamp,
    /// The time now.
    pub now: Timestamp,
    /// The key of the ingest record.
    pub key: Option<&'a bytes::Bytes>,
    /// The headers of the ingest record.
    pub headers: &'a Headers,
}

/// Reads a record of the ingest topic.
#[must_use]
pub fn read(record: &Record, rules: &Rules, now: Timestamp) -> Incoming {
    let (format, wish, answer_to) = match format_of(record) {
        Ok(Format::Json) => (
            Format::Json,
            read_value(record, |value| json::read(value, &rules.time_zone)),
            None,
        ),
        Ok(Format::Protobuf) => match read_value(record, protobuf::read) {
            Ok((wish, answer_to)) => (Format::Protobuf, wish, answer_to),
            Err(failure) => (Format::Protobuf, Err(failure), None),
        },
        Err(failure) => (Format::Json, Err(failure), None),
    };
    let envelope = Envelope {
        // A clock that is ahead of ours must not make a job late.
        requested: first_origin(record).timestamp.map_or(now, |at| at.min(now)),
        now,
        key: record.key.as_ref(),
        headers: &record.headers,
    };
    let mut refused_wait = None;
    let command = match wish {
        Ok(ParsedRequest::LongWait(wait)) => {
            wait.check(format, rules, &envelope).map_err(|(failure, wait)| {
                let pipeline = rules.pipelines.get(&wait.pipeline).cloned();
                let payload = wait.payload;
                refused_wait = pipeline.map(|pipeline| Box::new(RefusedWait { pipeline, payload }));
                failure
            })
        }
        Ok(wish) => wish.check(format, rules, &envelope),
        Err(failure) => Err(failure),
    };
    Incoming {
        command,
        answer_to,
        refused_wait,
    }
}

/// Where a request was written first: another shard may have passed it on from there.
pub(crate) fn first_origin(record: &Record) -> Origin {
    let passed_on = ReservedHeaders::read(record)
        .ok()
        .filter(|ours| ours.is_retry_of(NAME));
    passed_on
        .and_then(|ours| ours.origin().ok())
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
            "the record has no value; a request is its value",
        )),
    }
}

fn format_of(record: &Record) -> Result<Format, Failure> {
    const NAME: &str = "content-type";
    if record.unreadable_headers > 0 {
        let message = format!(
            "{} headers cannot be read: there are names that are not UTF-8",
            record.unreadable_headers
        );
        return Err(Failure::malformed("header.name", message));
    }
    let wrong = |what: String| {
        let right = format!("expected application/json or {}", redeliver_proto::CONTENT_TYPE);
        Err(Failure::malformed(
            "request.contentType",
            format!("header `{NAME}` {what}; {right}"),
        ))
    };
    let Ok(found) = record.headers.single(NAME) else {
        return wrong("stands more than once".to_owned());
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
        wrong(format!("is `{}`", bounded_text(text, 60)))
    }
}

impl ParsedRequest {
    /// Checks a wish against the rules.
    ///
    /// # Errors
    /// When it breaks one; the message names the field as `format` calls it.
    pub fn check(self, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Command, Failure> {
        match self {
            Self::Schedule(draft) => {
                let request = draft.check(format, rules, envelope)?;
                Ok(Command::Schedule(Box::new(request)))
            }
            Self::Cancel(id) => Ok(Command::Cancel(id)),
            Self::Reschedule { id, when } => {
                let due = due(when, format, rules, envelope)?;
                Ok(Command::Reschedule { id, due })
            }
            Self::LongWait(wait) => wait
                .check(format, rules, envelope)
                .map_err(|(failure, _)| failure),
        }
    }
}

impl Draft {
    fn check(self, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Request, Failure> {
        let Some((app, topic)) = rules.apps.get_key_value(&self.app) else {
            let known = rules.apps.keys().map(String::as_str);
            let shown = bounded_text(&self.app, 60);
            let problem = format!("names no application `{shown}`{}", field::hint(&self.app, known));
            return Err(Field::App.refused(format, &problem));
        };
        let due = due(self.when, format, rules, envelope)?;
        check_name(Field::IdempotencyKey, format, self.idempotency_key.as_deref())?;
        check_name(Field::RequestId, format, self.request_id.as_deref())?;
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
        keep_trace(&mut payload.headers, envelope.headers);
        Ok(Request {
            app: app.as_str().into(),
            kind: Kind::App,
            topic: topic.clone(),
            due,
            priority: self.priority,
            idempotency_key: self.idempotency_key.map(Into::into),
            request_hash,
            request_id: self.request_id.map(Into::into),
            payload,
            expires: self.expire_after.map(|wait| due.after(wait.duration())),
        })
    }
}

impl LongWait {
    /// Gives itself back when it cannot be had.
    fn check(
        self: Box<Self>,
        format: Format,
        rules: &Rules,
        envelope: &Envelope<'_>,
    ) -> Result<Command, (Failure, Box<Self>)> {
        let Some((pipeline, settings)) = rules.pipelines.get_key_value(&self.pipeline) else {
            let known = rules.pipelines.keys().map(String::as_str);
            let shown = bounded_text(&self.pipeline, 60);
            let problem = format!(
                "names no pipeline `{shown}` that lets records wait here{}",
                field::hint(&self.pipeline, known)
            );
            return Err((Field::Pipeline.refused(format, &problem), self));
        };
        if self.due > envelope.now.after(rules.max_ahead.duration()) {
            return Err((too_far(Field::Due, format, self.due, rules), self));
        }
        // However long it is, it fits: the topics are made and checked to take what the pipeline's source takes.
        let request_hash = hash::Identity {
            app: pipeline,
            kind: Kind::LongWait,
            when: When::At(self.due),
            priority: Priority::Normal,
            payload: &self.payload,
            expire_after: None,
        }
        .hash();
        Ok(Command::Schedule(Box::new(Request {
            app: pipeline.as_str().into(),
            kind: Kind::LongWait,
            topic: settings.return_topic(),
            due: self.due,
            priority: Priority::Normal,
            idempotency_key: None,
            request_hash,
            request_id: None,
            payload: self.payload,
            expires: None,
        })))
    }
}

fn due(when: When, format: Format, rules: &Rules, envelope: &Envelope<'_>) -> Result<Timestamp, Failure> {
    let (due, field) = match when {
        When::At(time) => (time, Field::ScheduledTime),
        When::After(delay) => (envelope.requested.after(delay.duration()), Field::Delay),
    };
    if due > envelope.now.after(rules.max_ahead.duration()) {
        return Err(too_far(field, format, due, rules));
    }
    Ok(due)
}

fn too_far(field: Field, format: Format, due: Timestamp, rules: &Rules) -> Failure {
    let problem = format!("{due} is further ahead than the allowed {}", rules.max_ahead);
    field.refused(format, &problem)
}

/// Reads the id of a job.
pub(crate) fn read_id(field: Field, format: Format, text: &str) -> Result<JobId, Failure> {
    text.parse()
        .map_err(|error| field.malformed(format, &format!("`{}` {error}", bounded_text(text, 60))))
}

fn check_name(field: Field, format: Format, name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some("") => Err(field.malformed(format, "is empty; leave it out instead")),
        Some(name) if name.len() > MAX_NAME => {
            let problem = format!("has {} bytes; at most {MAX_NAME} are allowed", name.len());
            Err(field.malformed(format, &problem))
        }
        _ => Ok(()),
    }
}

/// Whether a caller may not give this header, because it is ours on the way.
fn is_reserved(name: &str) -> bool {
    is_ours(name) || name.starts_with("job-") || JOB_HEADERS.contains(&name)
}

fn check_headers(headers: &Headers, format: Format) -> Result<(), Failure> {
    for (name, _) in headers.iter() {
        if name.is_empty() {
            return Err(Field::Headers.malformed(format, "has a header without a name"));
        }
        if is_reserved(name) {
            let name = bounded_text(name, 60);
            let problem = format!("has `{name}`, which Redeliver writes itself; give it another name");
            return Err(Field::Headers.malformed(format, &problem));
        }
    }
    Ok(())
}

/// What is too big for the state topic must not be accepted: it would stop its partition.
fn check_size(payload: &Payload, format: Format, rules: &Rules) -> Result<(), Failure> {
    let length = |bytes: &Option<bytes::Bytes>| bytes.as_ref().map_or(0, bytes::Bytes::len);
    let size = length(&payload.value) + length(&payload.key) + payload.headers.byte_len();
    if size > rules.max_data {
        let problem = format!(
            "has, with key and headers, {size} bytes; at most {} are allowed",
            rules.max_data
        );
        return Err(Field::Data.refused(format, &problem));
    }
    Ok(())
}

/// Hands the trace of the ingest record on, unless the request has its own.
fn keep_trace(headers: &mut Headers, ingest: &Headers) {
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
