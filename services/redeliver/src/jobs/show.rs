//! A job as text and as JSON.

use redeliver_client::convert::time;
use redeliver_client::messages::{Job, JobOutcome};

use super::outcome;
use crate::obstacles::Obstacle;
use crate::output::{Json, block, fields, header_lines, object};

/// Limit of the data in text output, in bytes.
const SHOWN: usize = 16 * 1024;

fn has_ended(job: &Job) -> bool {
    time(job.ended_at).is_some()
}

pub(super) fn as_text(job: &Job, outcomes: &[JobOutcome], obstacles: &[Obstacle]) -> String {
    let outcome: Vec<String> = outcomes.iter().map(outcome::as_text).collect();
    let obstacles: Vec<String> = obstacles.iter().map(Obstacle::to_string).collect();
    let mut text = fields(&[
        ("id", &job.id),
        ("app", &job.app),
        ("state", &job.state().name()),
        ("due", &job.scheduled_time),
        ("priority", &job.priority().name()),
        ("accepted at", &job.accepted_at),
        ("ended at", &job.ended_at),
        ("expires at", &job.expires_at),
        ("revision", &job.revision),
        ("idempotency key", &job.idempotency_key),
        ("request id", &job.request_id),
        ("occurrence", &job.occurrence),
        ("topic", &job.topic),
        ("key", &job.key),
        ("outcome", &outcome.join("; ")),
        ("held up by", &obstacles.join("; ")),
    ]);
    if !job.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&job.headers);
    }
    // The scheduler does not keep the data of a job that has ended.
    if !has_ended(job) && outcomes.is_empty() {
        text += &format!("\ndata, {} bytes\n", job.data.len());
        text += &block(&job.data, SHOWN);
    }
    text
}

/// The record to dispatch.
const RECORD: [&str; 5] = ["key", "key_base64", "data", "data_base64", "headers"];

pub(super) fn as_json(job: &Job) -> Json {
    let mut object = object(job);
    object.retain(|name, _| name != "long_wait" && !(has_ended(job) && RECORD.contains(&&**name)));
    object.into()
}

#[cfg(test)]
mod tests {
    use redeliver_client::Timestamp;
    use redeliver_client::convert::to_timestamp;
    use redeliver_client::messages::{Header, JobState, Priority};
    use serde_json::json;

    use super::*;

    fn job() -> Job {
        let time = |millis| Some(to_timestamp(Timestamp::from_millis(millis)));
        Job {
            id: "01KAJQ6Z2B0003000000000A7X".to_owned(),
            app: "sms".to_owned(),
            state: JobState::Scheduled.into(),
            priority: Priority::High.into(),
            scheduled_time: time(1_763_722_900_000),
            accepted_at: time(1_763_722_800_124),
            revision: 1,
            idempotency_key: "sms-1".to_owned(),
            request_id: "01KAJQ6Z2B0003000000000A7X".to_owned(),
            data: bytes::Bytes::from_static(b"{\"a\":1}"),
            headers: vec![Header {
                name: "a".to_owned(),
                value: Some(bytes::Bytes::from_static(b"b")),
            }],
            topic: "sms-jobs".to_owned(),
            key: None,
            ended_at: None,
            expires_at: None,
            occurrence: String::new(),
            // Not shown: only lists set it.
            long_wait: false,
        }
    }

    #[test]
    fn a_waiting_job_shows_its_record() {
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
        assert_eq!(as_text(&job(), &[], &[]), expected);
        let value = as_json(&job());
        assert_eq!(
            (&value["data"], &value["key"]),
            (&json!("{\"a\":1}"), &Json::Null)
        );
    }

    #[test]
    fn an_ended_job_has_no_data() {
        let ended = Job {
            state: JobState::Dispatched.into(),
            ended_at: Some(to_timestamp(Timestamp::from_millis(1_763_722_900_003))),
            data: bytes::Bytes::new(),
            headers: Vec::new(),
            ..job()
        };
        let text = as_text(&ended, &[], &[]);
        assert!(
            text.contains("ended at         2025-11-21T11:01:40.003Z\n") && !text.contains("data"),
            "{text}"
        );
        assert!(as_json(&ended).get("data").is_none());
    }
}
