//! Requests for jobs.

use std::collections::BTreeMap;

use bytes::Bytes;
use jiff::tz::TimeZone;
use redeliver_core::Failure;
use redeliver_core::failure::bounded_text;
use redeliver_proto::v1;
use redeliver_proto::v1::job_command::Command;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    HeaderFields, SHOWN, as_word, invalid, invalid_json, parse, parse_duration, raw, read_data,
    read_duration, read_instant, word, words,
};
use crate::request::field::{Field, Format};
use crate::request::job::{ConflictPolicy, missing_app, reschedule};
use crate::request::when::When;

words! {
    /// A priority.
    Priority, Priority { High = "high", Normal = "normal", Low = "low" }
}

/// A job to schedule. Exactly one of `scheduledTime` and `delay` is required.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct JobRequest<'a> {
    /// The name of an application in the configuration of the scheduler.
    #[schema(value_type = String, min_length = 1)]
    app_name: Option<String>,
    /// The due time, such as `2026-11-22T08:00:00Z`.
    #[schema(format = DateTime)]
    scheduled_time: Option<String>,
    /// A delay from now on, such as `90s`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    delay: Option<String>,
    #[serde(default, deserialize_with = "priority")]
    priority: Option<Priority>,
    /// Requests of one application with the same key create one job.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
    /// What happens if the key is in use. `reject`, the default: the same request is a duplicate, another one a conflict (409).
    /// `replace`: the request takes the place of a job that waits, with a new due time and data; if the job has ended, it gets a
    /// new one. A request has no effect if it repeats the newest one of the key: same content, same `requestId`, and a
    /// `scheduledTime` or a `requestId`.
    #[serde(default, deserialize_with = "word")]
    on_conflict: Option<ConflictPolicy>,
    /// The value of the record to dispatch.
    #[serde(borrow, default, deserialize_with = "raw")]
    #[schema(value_type = serde_json::Value, required = true)]
    job_data: Option<&'a RawValue>,
    /// The key of the record to dispatch.
    key: Option<String>,
    /// The headers of the record to dispatch: an object, or an array of objects with `name` and `value`.
    #[schema(value_type = Option<serde_json::Value>)]
    headers: Option<HeaderFields<false>>,
    /// How long after its due time the job can still be dispatched, such as `5m`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    expire_after: Option<String>,
    /// An id that the client chooses; it is stored with the job.
    #[schema(min_length = 1, max_length = 512)]
    request_id: Option<String>,
    // Only in the ingest topic.
    #[schema(ignore)]
    cancel: Option<&'a RawValue>,
    #[schema(ignore)]
    reschedule: Option<&'a RawValue>,
    // Only of schedules.
    #[schema(ignore)]
    cron: Option<IgnoredAny>,
    #[schema(ignore)]
    time_zone: Option<IgnoredAny>,
}

/// A new due time. Exactly one of the two is required.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[serde(deny_unknown_fields)]
pub(crate) struct DueRequest {
    /// The due time, such as `2026-11-22T08:00:00Z`.
    #[schema(format = DateTime)]
    scheduled_time: Option<String>,
    /// A delay from now on, such as `90s`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    delay: Option<String>,
}

/// The fields of a [`DueRequest`].
const DUE: [&str; 2] = ["scheduledTime", "delay"];

impl DueRequest {
    fn read(&self, zone: &TimeZone) -> Result<When, Failure> {
        let problem = match (&self.scheduled_time, &self.delay) {
            (Some(text), None) => return read_instant(Field(DUE[0]), text, zone).map(When::At),
            (None, Some(text)) => return parse_duration(Field(DUE[1]), text).map(When::After),
            (Some(_), Some(_)) => "cannot be combined with `delay`; set one of the two",
            (None, None) => "is missing; set it, or set `delay`, for example to 90s",
        };
        Err(invalid(Field(DUE[0]), problem))
    }
}

/// Parses a request. Times without an offset are interpreted in `zone`.
///
/// # Errors
/// When the request is not JSON, or a field is unknown, missing, repeated, or invalid.
pub fn read(value: &Bytes, zone: &TimeZone) -> Result<Command, Failure> {
    let mut request: JobRequest<'_> = parse(value)?;
    for (field, given) in [("cron", request.cron), ("timeZone", request.time_zone)] {
        if given.is_some() {
            let problem = "is not supported in the request for a job; set `scheduledTime` or `delay`, or create a recurring \
                           schedule at /v1/schedules";
            return Err(Field(field).rejected(Format::Json, problem));
        }
    }
    if let Some(job) = request.cancel {
        only(value, &["cancel"], "cannot be combined with `cancel`")?;
        return Ok(Command::Cancel(read_job("cancel", job)?));
    }
    if let Some(job) = request.reschedule {
        let allowed = ["reschedule", DUE[0], DUE[1]];
        only(value, &allowed, "cannot be combined with `reschedule`")?;
        let job = read_job("reschedule", job)?;
        return Ok(Command::Reschedule(reschedule(job, request.due(zone)?)));
    }
    Ok(Command::Schedule(v1::JobSpec {
        data: read_data(request.job_data, value)?,
        when: Some(request.due(zone)?.into()),
        expire_after: read_duration(Field("expireAfter"), request.expire_after.as_ref())?,
        app: request.app_name.ok_or_else(|| missing_app(Format::Json))?,
        priority: request.priority.map_or(v1::Priority::Normal, Into::into).into(),
        idempotency_key: request.idempotency_key,
        key: request.key.map(Bytes::from),
        headers: request.headers.unwrap_or_default().0,
        request_id: request.request_id,
        on_conflict: v1::ConflictPolicy::from(request.on_conflict.unwrap_or_default()).into(),
    }))
}

/// Parses the body of a request to reschedule a job.
pub(crate) fn read_due(value: &[u8], zone: &TimeZone) -> Result<When, Failure> {
    let mut request: JobRequest<'_> = parse(value)?;
    let problem = "cannot be changed; set only `scheduledTime` or `delay`";
    only(value, &DUE, problem)?;
    request.due(zone)
}

impl JobRequest<'_> {
    fn due(&mut self, zone: &TimeZone) -> Result<When, Failure> {
        let (scheduled_time, delay) = (self.scheduled_time.take(), self.delay.take());
        let due = DueRequest {
            scheduled_time,
            delay,
        };
        due.read(zone)
    }
}

/// The job that a command names, by its id or by its application and idempotency key.
fn read_job(command: &str, value: &RawValue) -> Result<v1::CancelJob, Failure> {
    let mut named = v1::CancelJob::default();
    if value.get().starts_with('{') {
        let job: JobRequest<'_> = parse(value.get().as_bytes())?;
        let problem = format!("cannot be combined with `{command}`");
        only(value.get().as_bytes(), &["appName", "idempotencyKey"], &problem)?;
        named.app = job.app_name.unwrap_or_default();
        named.idempotency_key = job.idempotency_key.unwrap_or_default();
        return Ok(named);
    }
    named.id = serde_json::from_str(value.get()).map_err(|_| {
        let shown = bounded_text(value.get(), SHOWN);
        let right = "expected an id, or an object with `appName` and `idempotencyKey`";
        invalid(Field(command), &format!("is `{shown}`; {right}"))
    })?;
    Ok(named)
}

/// Rejects fields that a request of a kind does not have.
fn only(object: &[u8], allowed: &[&str], problem: &str) -> Result<(), Failure> {
    let given: BTreeMap<String, &RawValue> = serde_json::from_slice(object).map_err(invalid_json)?;
    let other = given
        .iter()
        .find(|(name, value)| value.get() != "null" && !allowed.contains(&name.as_str()));
    other.map_or(Ok(()), |(name, _)| Err(invalid(Field(name), problem)))
}

/// A priority, in any case.
pub(super) fn priority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Priority>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    as_word(text.map(|text| text.to_ascii_lowercase()))
}
