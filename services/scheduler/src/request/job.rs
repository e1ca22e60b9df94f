//! Requests for jobs: what they name, and the rules for them.

use std::sync::Arc;

use redeliver_core::failure::bounded_text;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE, is_reserved};
use redeliver_core::{Failure, Headers, HumanDuration, Timestamp};
use redeliver_proto::convert::{
    from_duration, from_headers, from_priority, from_timestamp, to_duration, to_timestamp,
};
use redeliver_proto::v1;
use serde::Deserialize;
use utoipa::ToSchema;

use super::field::{Field, Format, hint};
use super::hash::Identity;
use super::when::When;
use super::{Envelope, Rejected, RejectedWait, Request, Rules, WaitAction, WaitChange};
use crate::job::{JobId, Kind, Payload, Priority};

/// The maximum length of idempotency keys and request ids in bytes.
pub const MAX_NAME: usize = 512;
/// The maximum of `expireAfter`, which is also that of `scheduler.max_ahead`. So no time of a job is beyond the year 9999, after
/// which neither RFC 3339 nor protobuf can represent it.
const MAX_EXPIRE_AFTER: HumanDuration = HumanDuration::from_secs(36_500 * 86_400);
/// The maximum length of an inherited header of a trace context in bytes.
const MAX_TRACE: usize = 512;
/// Headers that the scheduler adds to dispatched jobs, besides those that begin with `job-`.
const JOB_HEADERS: [&str; 3] = ["scheduled-time", "dispatched-at", "idempotency-key"];

/// What happens to a request whose idempotency key is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = OnConflict)]
pub enum ConflictPolicy {
    /// The first request counts: the same request is a duplicate, and another one a conflict.
    #[default]
    Reject,
    /// The newest request counts: it takes the place of a job that waits.
    Replace,
}

/// How a command names its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobRef {
    /// By its id.
    Id(JobId),
    /// By its application and idempotency key: the newest job with this key, as long as the key is in use.
    Key {
        /// The application.
        app: Arc<str>,
        /// The idempotency key.
        key: Arc<str>,
    },
}

impl From<ConflictPolicy> for v1::ConflictPolicy {
    fn from(policy: ConflictPolicy) -> Self {
        match policy {
            ConflictPolicy::Reject => Self::Reject,
            ConflictPolicy::Replace => Self::Replace,
        }
    }
}

impl From<When> for v1::job_spec::When {
    fn from(when: When) -> Self {
        match when {
            When::At(time) => Self::ScheduledTime(to_timestamp(time)),
            When::After(delay) => Self::Delay(to_duration(delay)),
        }
    }
}

impl From<When> for v1::reschedule_job::When {
    fn from(when: When) -> Self {
        match when {
            When::At(time) => Self::ScheduledTime(to_timestamp(time)),
            When::After(delay) => Self::Delay(to_duration(delay)),
        }
    }
}

impl JobRef {
    /// The message that cancels the job. Empty fields are not set.
    pub(crate) fn cancel(&self) -> v1::CancelJob {
        let mut message = v1::CancelJob::default();
        match self {
            Self::Id(id) => message.id = id.to_string(),
            Self::Key { app, key } => {
                (message.app, message.idempotency_key) = (app.to_string(), key.to_string());
            }
        }
        message
    }
}

/// The message that reschedules a job, which is named as in one that cancels it.
pub(crate) fn reschedule(job: v1::CancelJob, when: When) -> v1::RescheduleJob {
    v1::RescheduleJob {
        id: job.id,
        app: job.app,
        idempotency_key: job.idempotency_key,
        when: Some(when.into()),
    }
}

/// Reads how a command names its job, from the fields of a message of which empty ones are not set.
pub(crate) fn read_job_ref(
    field: Field<'_>,
    format: Format,
    id: &str,
    app: &str,
    key: &str,
) -> Result<JobRef, Failure> {
    let names = ["appName", "idempotencyKey"].map(|field| Field(field).name(format));
    match (id, app, key) {
        ("", "", "") => {
            let problem = format!("is missing; set it, or set `{}` and `{}`", names[0], names[1]);
            Err(field.malformed(format, &problem))
        }
        (_, "", "") => read_id(field, format, id).map(JobRef::Id),
        ("", "", _) => Err(missing_app(format)),
        ("", _, "") => {
            Err(Field("idempotencyKey").malformed(format, "is missing; set it to the key of the job"))
        }
        ("", _, _) => Ok(JobRef::Key {
            app: app.into(),
            key: key.into(),
        }),
        _ => {
            let problem = format!("cannot be combined with `{}` and `{}`", names[0], names[1]);
            Err(field.malformed(format, &problem))
        }
    }
}

/// Parses a job id.
pub(crate) fn read_id(field: Field<'_>, format: Format, text: &str) -> Result<JobId, Failure> {
    text.parse()
        .map_err(|error| field.malformed(format, &format!("`{}` {error}", bounded_text(text, 60))))
}

pub(super) fn missing_app(format: Format) -> Failure {
    Field("appName").malformed(format, "is missing; set it to the name of the application")
}

/// Parses the new due time of a job.
pub(crate) fn read_when(when: Option<&v1::reschedule_job::When>) -> Result<When, Failure> {
    use v1::reschedule_job::When as Proto;
    match when {
        Some(Proto::ScheduledTime(time)) => Ok(When::At(read_timestamp(Field("scheduledTime"), time)?)),
        Some(Proto::Delay(delay)) => Ok(When::After(duration(Field("delay"), delay)?)),
        None => Err(missing_time()),
    }
}

fn missing_time() -> Failure {
    Field("scheduledTime").malformed(Format::Protobuf, "is missing; set it or `delay`")
}

/// Parses a time, rounded up to the millisecond.
pub(crate) fn read_timestamp(field: Field<'_>, time: &prost_types::Timestamp) -> Result<Timestamp, Failure> {
    from_timestamp(time).ok_or_else(|| {
        let right = "expected a time in the years 1 to 9999 and nanoseconds from 0 to 999999999";
        field.malformed(Format::Protobuf, &format!("is out of range; {right}"))
    })
}

fn duration(field: Field<'_>, duration: &prost_types::Duration) -> Result<HumanDuration, Failure> {
    from_duration(duration).ok_or_else(|| {
        field.malformed(
            Format::Protobuf,
            "is out of range; expected a duration of 0 or more",
        )
    })
}

fn read_priority(number: i32, format: Format) -> Result<Priority, Failure> {
    let priority = v1::Priority::try_from(number).map_err(|_| {
        let problem = format!("is {number}; expected 1 (high), 2 (normal) or 3 (low)");
        Field("priority").malformed(format, &problem)
    })?;
    Ok(from_priority(priority))
}

fn read_policy(number: i32, format: Format) -> Result<ConflictPolicy, Failure> {
    match v1::ConflictPolicy::try_from(number) {
        Ok(v1::ConflictPolicy::Unspecified | v1::ConflictPolicy::Reject) => Ok(ConflictPolicy::Reject),
        Ok(v1::ConflictPolicy::Replace) => Ok(ConflictPolicy::Replace),
        Err(_) => {
            let problem = format!("is {number}; expected 1 (reject) or 2 (replace)");
            Err(Field("onConflict").malformed(format, &problem))
        }
    }
}

/// Checks a request for a job of an application.
pub(super) fn check(
    spec: v1::JobSpec,
    format: Format,
    rules: &Rules,
    envelope: &Envelope<'_>,
) -> Result<Request, Failure> {
    let on_conflict = read_policy(spec.on_conflict, format)?;
    let when = match spec.when {
        Some(v1::job_spec::When::ScheduledTime(time)) => {
            When::At(read_timestamp(Field("scheduledTime"), &time)?)
        }
        Some(v1::job_spec::When::Delay(delay)) => When::After(duration(Field("delay"), &delay)?),
        None => return Err(missing_time()),
    };
    let priority = read_priority(spec.priority, format)?;
    let expire_after = spec
        .expire_after
        .map(|wait| duration(Field("expireAfter"), &wait))
        .transpose()?;
    let (app, topic) = application(&spec.app, format, rules)?;
    let due = due(when, format, rules, envelope)?;
    check_name("idempotencyKey", format, spec.idempotency_key.as_deref())?;
    check_name("requestId", format, spec.request_id.as_deref())?;
    if on_conflict == ConflictPolicy::Replace && spec.idempotency_key.is_none() {
        let key = Field("idempotencyKey").name(format);
        let problem = format!("is `replace`, which needs an `{key}`");
        return Err(Field("onConflict").rejected(format, &problem));
    }
    check_expire_after(format, expire_after)?;
    let mut payload = Payload {
        value: Some(spec.data),
        key: spec.key.or_else(|| envelope.key.cloned()),
        headers: from_headers(&spec.headers),
    };
    check_headers(&payload.headers, format)?;
    check_size(&payload, format, rules)?;
    let request_hash = Identity {
        app,
        kind: Kind::App,
        when,
        priority,
        payload: &payload,
        expire_after,
    }
    .hash();
    inherit_trace(&mut payload.headers, envelope.headers);
    Ok(Request {
        app: app.as_str().into(),
        kind: Kind::App,
        topic: topic.clone(),
        due,
        is_delayed: matches!(when, When::After(_)),
        priority,
        idempotency_key: spec.idempotency_key.map(Into::into),
        on_conflict,
        request_hash,
        request_id: spec.request_id.map(Into::into),
        payload,
        expires: expire_after.map(|wait| due.after(wait.duration())),
    })
}

/// Checks a long wait. If its due time can be read, it is part of the failure, so that its record is not lost.
pub(super) fn check_long_wait(
    wait: v1::LongWait,
    format: Format,
    rules: &Rules,
    now: Timestamp,
) -> Result<Request, Rejected> {
    let due = match wait.due {
        Some(due) => read_timestamp(Field("due"), &due)?,
        None => return Err(Field("due").malformed(format, "is missing").into()),
    };
    let Some(pipeline) = rules.pipeline(&wait.pipeline) else {
        let shown = bounded_text(&wait.pipeline, 60);
        let problem = format!("is `{shown}`, which cannot be the name of a pipeline");
        return Err(Field("pipeline").rejected(format, &problem).into());
    };
    let payload = Payload {
        value: wait.value,
        key: wait.key,
        headers: from_headers(&wait.headers),
    };
    if due > now.after(rules.max_ahead.duration()) {
        return Err(Rejected {
            failure: too_far_ahead(Field("due"), format, due, rules),
            wait: Some(Box::new(RejectedWait { pipeline, payload })),
        });
    }
    // No check of the size: the topology ensures that the state topic accepts records of the size of the pipeline's source.
    let request_hash = Identity {
        app: &wait.pipeline,
        kind: Kind::LongWait,
        when: When::At(due),
        priority: Priority::Normal,
        payload: &payload,
        expire_after: None,
    }
    .hash();
    Ok(Request {
        app: pipeline.name.clone(),
        kind: Kind::LongWait,
        topic: pipeline.return_topic(),
        due,
        is_delayed: false,
        priority: Priority::Normal,
        idempotency_key: None,
        on_conflict: ConflictPolicy::Reject,
        request_hash,
        request_id: None,
        payload,
        expires: None,
    })
}

/// Checks what an operator wants done with a long wait.
pub(super) fn check_wait_change(act: v1::ActOnLongWait, format: Format) -> Result<WaitChange, Failure> {
    Ok(WaitChange {
        job: read_id(Field("id"), format, &act.id)?,
        action: match act.action() {
            v1::LongWaitAction::Retry => WaitAction::Retry,
            v1::LongWaitAction::Dead => WaitAction::Dead,
            v1::LongWaitAction::Unspecified => {
                let problem = format!("is {}; expected 1 (retry) or 2 (dead)", act.action);
                return Err(Field("action").malformed(format, &problem));
            }
        },
        by: act.by,
        reason: act.reason,
    })
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
        let hint = hint(name, known);
        Field("appName").rejected(
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
pub(super) fn check_job_ref(job: &JobRef, format: Format, rules: &Rules) -> Result<(), Failure> {
    match job {
        JobRef::Id(_) => Ok(()),
        JobRef::Key { app, key } => {
            application(app, format, rules)?;
            check_name("idempotencyKey", format, Some(key))
        }
    }
}

pub(super) fn due(
    when: When,
    format: Format,
    rules: &Rules,
    envelope: &Envelope<'_>,
) -> Result<Timestamp, Failure> {
    let (due, field) = match when {
        When::At(time) => (time, Field("scheduledTime")),
        When::After(delay) => (envelope.requested.after(delay.duration()), Field("delay")),
    };
    if due > envelope.now.after(rules.max_ahead.duration()) {
        return Err(too_far_ahead(field, format, due, rules));
    }
    Ok(due)
}

fn too_far_ahead(field: Field<'_>, format: Format, due: Timestamp, rules: &Rules) -> Failure {
    let problem = format!("is too far ahead ({due}); the maximum is {}", rules.max_ahead);
    field.rejected(format, &problem)
}

fn check_name(field: &str, format: Format, name: Option<&str>) -> Result<(), Failure> {
    let field = Field(field);
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
            Err(Field("expireAfter").rejected(format, &problem))
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
            return Err(Field("headers").malformed(format, "contains a header without a name"));
        }
        if is_refused_header(name) {
            let name = bounded_text(name, 60);
            let problem = format!("contains `{name}`, which is reserved; use another name");
            return Err(Field("headers").malformed(format, &problem));
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
        return Err(Field("jobData").rejected(format, &problem));
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
