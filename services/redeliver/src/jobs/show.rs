//! A job as text and as JSON.

use redeliver_client::{Job, Timestamp};
use serde_json::{Map, json};

use crate::output::{Json, block, fields, header_lines, headers_json, insert_bytes, line};

/// Limit of the data in text output, in bytes.
const SHOWN: usize = 16 * 1024;

pub(super) fn as_text(job: &Job) -> String {
    let is_waiting = job.ended_at.is_none();
    let mut text = fields(&[
        ("id", Some(job.id.to_string())),
        ("app", Some(job.app.clone())),
        ("state", Some(job.state.to_string())),
        ("due", Some(job.scheduled_time.to_string())),
        ("priority", Some(job.priority.to_string())),
        ("accepted at", Some(job.accepted_at.to_string())),
        ("ended at", job.ended_at.map(|time| time.to_string())),
        ("expires at", job.expires_at.map(|time| time.to_string())),
        ("revision", Some(job.revision.to_string())),
        ("idempotency key", job.idempotency_key.clone()),
        ("request id", Some(job.request_id.clone())),
        ("occurrence", job.occurrence.clone()),
        ("topic", job.topic.clone()),
        ("key", job.key.as_ref().map(|key| line(key, 1024))),
    ]);
    if !job.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&job.headers);
    }
    // The scheduler does not keep the data of a job that has ended.
    if is_waiting {
        text += &format!("\ndata, {} bytes\n", job.data.len());
        text += &block(&job.data, SHOWN);
    }
    text
}

pub(super) fn as_json(job: &Job) -> Json {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let mut object = Map::new();
    let mut put = |name: &str, value: Json| object.insert(name.to_owned(), value);
    put("id", json!(job.id.to_string()));
    put("app", json!(job.app));
    put("state", json!(job.state.as_str()));
    put("priority", json!(job.priority.as_str()));
    put("scheduled_time", json!(job.scheduled_time.to_string()));
    put("accepted_at", json!(job.accepted_at.to_string()));
    put("ended_at", json!(time(job.ended_at)));
    put("expires_at", json!(time(job.expires_at)));
    put("revision", json!(job.revision));
    put("idempotency_key", json!(job.idempotency_key));
    put("request_id", json!(job.request_id));
    put("occurrence", json!(job.occurrence));
    put("topic", json!(job.topic));
    if job.ended_at.is_none() {
        insert_bytes(&mut object, "key", job.key.as_deref());
        insert_bytes(&mut object, "data", Some(&job.data));
        object.insert("headers".to_owned(), headers_json(&job.headers));
    }
    Json::Object(object)
}

#[cfg(test)]
mod tests {
    use redeliver_client::{JobId, JobState, Priority};

    use super::*;

    fn job() -> Job {
        Job {
            id: JobId::new(Timestamp::from_millis(1_763_722_800_123), 3, 4),
            app: "sms".to_owned(),
            state: JobState::Scheduled,
            priority: Priority::High,
            scheduled_time: Timestamp::from_millis(1_763_722_900_000),
            accepted_at: Timestamp::from_millis(1_763_722_800_124),
            revision: 1,
            idempotency_key: Some("sms-1".to_owned()),
            request_id: "01KAJQ6Z2B0003000000000A7X".to_owned(),
            data: bytes::Bytes::from_static(b"{\"a\":1}"),
            key: None,
            headers: [("a", Some(&b"b"[..]))].into_iter().collect(),
            topic: Some("sms-jobs".to_owned()),
            ended_at: None,
            expires_at: None,
            occurrence: None,
            is_long_wait: false,
        }
    }

    #[test]
    fn job_shows_its_record() {
        let expected = format!(
            "\
id               {}
app              sms
state            scheduled
due              2025-11-21T11:01:40.000Z
priority         high
accepted at      2025-11-21T11:00:00.124Z
revision         1
idempotency key  sms-1
request id       01KAJQ6Z2B0003000000000A7X
topic            sms-jobs

headers
  a: b

data, 7 bytes
{{\"a\":1}}",
            job().id
        );
        assert_eq!(as_text(&job()), expected);
        let value = as_json(&job());
        assert_eq!(
            (&value["data"], &value["key"]),
            (&json!("{\"a\":1}"), &Json::Null)
        );
    }
}
