//! Jobs and statistics as JSON, with the field names of requests.
//!
//! Types of answers are not those of requests, which reject unknown fields, accept null and short forms, and require less. The OpenAPI document
//! describes both exactly. What has the same form in both are words and the data, see [`crate::request`].

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_types::Timestamp;
use redeliver_core::job::JobState;
use redeliver_proto::convert::{self, from_state};
use redeliver_proto::v1;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::request::PriorityName;

/// A job. Bytes that are not UTF-8 are encoded in Base64, in a field of another name.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JobView {
    id: String,
    app_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    scheduled_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    accepted_at: Option<String>,
    #[serde(skip_serializing_if = "is_zero")]
    revision: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    idempotency_key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    request_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    topic: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    /// Only in lists: a failed record of the pipeline `appName` that waits longer than its longest tier.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    long_wait: bool,
    /// The id of the occurrence for which a recurring schedule has created the job.
    #[serde(skip_serializing_if = "String::is_empty")]
    occurrence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<HeaderView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    job_data: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job_data_base64: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HeaderView {
    name: String,
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde calls it with a reference"
)]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl From<v1::Job> for JobView {
    fn from(job: v1::Job) -> Self {
        let (state, priority) = (from_state(job.state()), PriorityName::of(job.priority()));
        let (key, key_base64) = job.key.map_or((None, None), |key| text(&key));
        let (job_data, job_data_base64) = data(&job.data);
        Self {
            id: job.id,
            app_name: job.app,
            state: state.map(JobState::as_str),
            priority,
            scheduled_time: time(job.scheduled_time),
            accepted_at: time(job.accepted_at),
            revision: job.revision,
            idempotency_key: job.idempotency_key,
            request_id: job.request_id,
            topic: job.topic,
            ended_at: time(job.ended_at),
            expires_at: time(job.expires_at),
            long_wait: job.long_wait,
            occurrence: job.occurrence,
            key,
            key_base64,
            headers: job.headers.into_iter().map(HeaderView::from).collect(),
            job_data,
            job_data_base64,
        }
    }
}

impl From<v1::Header> for HeaderView {
    fn from(header: v1::Header) -> Self {
        let (value, value_base64) = header.value.map_or((None, None), |value| text(&value));
        Self {
            name: header.name,
            value,
            value_base64,
        }
    }
}

pub(super) fn time(time: Option<Timestamp>) -> Option<String> {
    Some(convert::time(time)?.to_string())
}

/// The bytes as text, or else in Base64.
pub(super) fn text(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(STANDARD.encode(bytes))),
    }
}

/// The data as JSON, byte for byte, or else in Base64. The data of ended jobs is not kept.
fn data(bytes: &[u8]) -> (Option<Box<RawValue>>, Option<String>) {
    if bytes.is_empty() {
        return (None, None);
    }
    match serde_json::from_slice::<Box<RawValue>>(bytes) {
        Ok(json) => (Some(json), None),
        Err(_) => (None, Some(STANDARD.encode(bytes))),
    }
}

/// Statistics of scheduled jobs.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatsView {
    scheduled: u64,
    due: u64,
    #[schema(format = DateTime)]
    next_due: Option<String>,
    per_minute: Vec<u64>,
    later: u64,
}

impl From<v1::Stats> for StatsView {
    fn from(stats: v1::Stats) -> Self {
        Self {
            scheduled: stats.scheduled,
            due: stats.due,
            next_due: time(stats.next_due),
            per_minute: stats.per_minute,
            later: stats.later,
        }
    }
}

/// An application, as the configuration and the controls say.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ApplicationView {
    name: String,
    topic: String,
    /// Its jobs are accepted, and none is dispatched. Missing without the scope `control:read` for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused: Option<bool>,
    /// How many of its jobs are dispatched per second at most, by all schedulers together. Missing if there is no limit, or without the scope `control:read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_per_second: Option<f64>,
    /// How many of its jobs may wait at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_waiting: Option<u64>,
    /// The number of its jobs that are due and not dispatched yet.
    due: u64,
    /// The earliest due time of its jobs; missing if none is scheduled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    next_due: Option<String>,
    /// Why its topic cannot be written, so that its due jobs wait, such as `does not exist`, as this scheduler knows. Missing if it can, or if that is not known yet.
    #[serde(skip_serializing_if = "String::is_empty")]
    topic_problem: String,
}

impl From<v1::Application> for ApplicationView {
    fn from(app: v1::Application) -> Self {
        Self {
            name: app.name,
            topic: app.topic,
            paused: app.paused,
            rate_per_second: app.rate_per_second,
            max_waiting: app.max_waiting,
            due: app.due,
            next_due: time(app.next_due),
            topic_problem: app.topic_problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::*;

    #[expect(clippy::disallowed_types, reason = "what the view itself has made")]
    fn to_json(job: v1::Job) -> serde_json::Value {
        serde_json::to_value(JobView::from(job)).unwrap()
    }

    #[test]
    fn job_uses_field_names_of_requests() {
        let job = v1::Job {
            id: "x".to_owned(),
            app: "sms".to_owned(),
            state: v1::JobState::Scheduled.into(),
            priority: v1::Priority::High.into(),
            scheduled_time: Some(prost_types::Timestamp {
                seconds: 1_763_722_800,
                nanos: 5_000_000,
            }),
            accepted_at: Some(prost_types::Timestamp::default()),
            revision: 1,
            idempotency_key: "k".to_owned(),
            request_id: "r".to_owned(),
            data: Bytes::from_static(b"{ \"n\": 1.50 }"),
            key: Some(Bytes::from_static(b"\xff")),
            headers: vec![v1::Header {
                name: "h".to_owned(),
                value: None,
            }],
            topic: "t".to_owned(),
            ended_at: Some(prost_types::Timestamp::default()),
            expires_at: Some(prost_types::Timestamp::default()),
            occurrence: "o".to_owned(),
            long_wait: true,
        };
        let text = serde_json::to_string(&JobView::from(job.clone())).unwrap();
        assert!(text.contains(r#""jobData":{ "n": 1.50 }"#), "{text}");
        let mut value = to_json(job);
        value.as_object_mut().unwrap().remove("jobData");
        assert_eq!(
            value,
            json!({
                "id": "x", "appName": "sms", "state": "scheduled", "priority": "high",
                "scheduledTime": "2025-11-21T11:00:00.005Z", "acceptedAt": "1970-01-01T00:00:00.000Z", "revision": 1,
                "idempotencyKey": "k", "requestId": "r", "keyBase64": "/w==", "headers": [{"name": "h", "value": null}],
                "topic": "t", "endedAt": "1970-01-01T00:00:00.000Z", "expiresAt": "1970-01-01T00:00:00.000Z",
                "occurrence": "o", "longWait": true,
            })
        );
    }

    #[test]
    fn other_data_is_base64() {
        let job = v1::Job {
            data: Bytes::from_static(b"\x00\x01"),
            ..v1::Job::default()
        };
        assert_eq!(
            to_json(job),
            json!({"id": "", "appName": "", "jobDataBase64": "AAE="})
        );
    }
}
