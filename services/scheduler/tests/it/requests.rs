//! Requests as users write them, each with its meaning, so that the oracle does not depend on the scheduler.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::job::Priority;
use redeliver_core::{Clock as _, Headers, HumanDuration, JobId, SystemClock, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::convert::{to_duration, to_headers, to_priority, to_timestamp};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};

use crate::oracle::{Intent, JobSpec, When};

/// A record for the ingest topic.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) intent: Intent,
    /// `None` is the partition that a correct client chooses.
    pub(crate) partition: Option<i32>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) answer_to: Option<String>,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Raw(Option<Bytes>),
    Command(Box<Command>),
}

impl JobSpec {
    /// A job of normal priority that is due now, with this value.
    pub(crate) fn new(app: &str, value: impl Into<Bytes>) -> Self {
        Self {
            app: app.to_owned(),
            when: When::After(Duration::ZERO),
            priority: Priority::Normal,
            idempotency_key: None,
            request_id: None,
            key: None,
            value: value.into(),
            headers: Headers::new(),
            expire_after: None,
            replaces: false,
        }
    }

    pub(crate) fn at(self, time: Timestamp) -> Self {
        let when = When::At(time);
        Self { when, ..self }
    }

    pub(crate) fn after(self, millis: u64) -> Self {
        let when = When::After(Duration::from_millis(millis));
        Self { when, ..self }
    }

    pub(crate) fn priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }

    pub(crate) fn idempotency_key(self, key: impl Into<String>) -> Self {
        let idempotency_key = Some(key.into());
        Self {
            idempotency_key,
            ..self
        }
    }

    pub(crate) fn key(self, key: impl Into<Bytes>) -> Self {
        let key = Some(key.into());
        Self { key, ..self }
    }

    pub(crate) fn header(mut self, name: &str, value: Option<&[u8]>) -> Self {
        self.headers.push(name, value);
        self
    }

    /// Replaces a waiting job with the same key.
    pub(crate) fn replaces(self) -> Self {
        let replaces = true;
        Self { replaces, ..self }
    }

    pub(crate) fn expire_after(self, millis: u64) -> Self {
        let expire_after = Some(Duration::from_millis(millis));
        Self { expire_after, ..self }
    }
}

impl Request {
    /// A job as JSON. Its value must be JSON; times are written with `Z`, headers as a list.
    pub(crate) fn json(spec: JobSpec) -> Self {
        let text = json(&spec, &time_field(spec.when, "scheduledTime"));
        Self::written(spec, text)
    }

    /// A job as JSON that the test wrote itself.
    pub(crate) fn written(spec: JobSpec, text: impl Into<Bytes>) -> Self {
        Self::new(Intent::Job(Box::new(spec)), Body::Raw(Some(text.into())))
    }

    /// A job as protobuf.
    pub(crate) fn protobuf(spec: JobSpec) -> Self {
        let message = v1::JobSpec {
            app: spec.app.clone(),
            when: Some(match spec.when {
                When::At(time) => v1::job_spec::When::ScheduledTime(to_timestamp(time)),
                When::After(delay) => v1::job_spec::When::Delay(to_duration(span(delay))),
            }),
            priority: to_priority(spec.priority).into(),
            idempotency_key: spec.idempotency_key.clone(),
            data: spec.value.clone(),
            key: spec.key.clone(),
            headers: to_headers(&spec.headers),
            expire_after: spec.expire_after.map(|after| to_duration(span(after))),
            request_id: spec.request_id.clone(),
            on_conflict: match spec.replaces {
                true => v1::ConflictPolicy::Replace.into(),
                false => v1::ConflictPolicy::Unspecified.into(),
            },
        };
        Self::command(Intent::Job(Box::new(spec)), Command::Schedule(message))
    }

    /// A value that must be rejected for this reason.
    pub(crate) fn refused(value: Option<&[u8]>, code: &str, says: &str) -> Self {
        let intent = Intent::Refused {
            code: format!("request.{code}"),
            says: says.to_owned(),
        };
        Self::new(intent, Body::Raw(value.map(Bytes::copy_from_slice)))
    }

    /// A message that must be rejected for this reason.
    pub(crate) fn refused_command(command: Command, code: &str, says: &str) -> Self {
        let intent = Intent::Refused {
            code: format!("request.{code}"),
            says: says.to_owned(),
        };
        Self::command(intent, command)
    }

    pub(crate) fn cancel(id: JobId) -> Self {
        let command = v1::CancelJob {
            id: id.to_string(),
            ..v1::CancelJob::default()
        };
        Self::command(Intent::Cancel(id), Command::Cancel(command))
    }

    pub(crate) fn cancel_json(id: JobId) -> Self {
        let text = format!(r#"{{"cancel":"{id}"}}"#);
        Self::new(Intent::Cancel(id), Body::Raw(Some(text.into())))
    }

    pub(crate) fn reschedule(id: JobId, when: When) -> Self {
        let command = v1::RescheduleJob {
            id: id.to_string(),
            when: Some(match when {
                When::At(time) => v1::reschedule_job::When::ScheduledTime(to_timestamp(time)),
                When::After(delay) => v1::reschedule_job::When::Delay(to_duration(span(delay))),
            }),
            ..v1::RescheduleJob::default()
        };
        Self::command(Intent::Reschedule(id, when), Command::Reschedule(command))
    }

    pub(crate) fn reschedule_json(id: JobId, when: When) -> Self {
        let text = format!(r#"{{"reschedule":"{id}",{}}}"#, time_field(when, "scheduledTime"));
        Self::new(Intent::Reschedule(id, when), Body::Raw(Some(text.into())))
    }

    /// The key of the record. It becomes the job's key if the job has none.
    pub(crate) fn record_key(mut self, key: impl Into<Bytes>) -> Self {
        let key = key.into();
        if let Intent::Job(spec) = &mut self.intent {
            spec.key.get_or_insert_with(|| key.clone());
        }
        self.key = Some(key);
        self
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push_text(name, value);
        self
    }

    pub(crate) fn partition(self, partition: i32) -> Self {
        let partition = Some(partition);
        Self { partition, ..self }
    }

    /// Requests an answer with this name.
    pub(crate) fn answer_to(self, name: impl Into<String>) -> Self {
        assert!(
            matches!(self.body, Body::Command(_)),
            "JSON cannot request an answer"
        );
        let answer_to = Some(name.into());
        Self { answer_to, ..self }
    }

    pub(crate) fn value(&self) -> Option<Bytes> {
        match &self.body {
            Body::Raw(value) => value.clone(),
            Body::Command(command) => {
                let command = v1::JobCommand {
                    command: Some((**command).clone()),
                    answer_to: self.answer_to.clone().unwrap_or_default(),
                };
                Some(command.encode_to_vec().into())
            }
        }
    }

    /// The partition to write to.
    pub(crate) fn home(&self, partitions: i32) -> Option<i32> {
        self.partition.or_else(|| match &self.intent {
            Intent::Job(spec) => {
                let key = spec.idempotency_key.as_deref()?;
                Some(shard_of(&spec.app, key, partitions))
            }
            Intent::Cancel(id) | Intent::Reschedule(id, _) => {
                Some(id.shard()).filter(|shard| *shard < partitions)
            }
            Intent::Refused { .. } => None,
        })
    }

    fn command(intent: Intent, command: Command) -> Self {
        Self::new(intent, Body::Command(Box::new(command))).header("content-type", CONTENT_TYPE)
    }

    fn new(intent: Intent, body: Body) -> Self {
        Self {
            intent,
            partition: None,
            key: None,
            headers: Headers::new(),
            answer_to: None,
            body,
        }
    }
}

/// The JSON of a job, with `time` as its time field.
pub(crate) fn json(spec: &JobSpec, time: &str) -> String {
    let quoted = |text: &str| serde_json::to_string(text).unwrap();
    let text = |bytes: &[u8]| quoted(std::str::from_utf8(bytes).expect("JSON holds text"));
    let mut json = format!("{{\"appName\":{},{time}", quoted(&spec.app));
    if spec.priority != Priority::Normal {
        write!(json, ",\"priority\":{}", quoted(spec.priority.as_str())).unwrap();
    }
    for (name, value) in [
        ("idempotencyKey", &spec.idempotency_key),
        ("requestId", &spec.request_id),
    ] {
        if let Some(value) = value {
            write!(json, ",\"{name}\":{}", quoted(value)).unwrap();
        }
    }
    if spec.replaces {
        json.push_str(",\"onConflict\":\"replace\"");
    }
    if let Some(after) = spec.expire_after {
        write!(json, ",\"expireAfter\":\"{}ms\"", after.as_millis()).unwrap();
    }
    if let Some(key) = &spec.key {
        write!(json, ",\"key\":{}", text(key)).unwrap();
    }
    if !spec.headers.is_empty() {
        let items = spec.headers.iter().map(|(name, value)| {
            let value = value.map_or_else(|| "null".to_owned(), text);
            format!("{{\"name\":{},\"value\":{value}}}", quoted(name))
        });
        let items: Vec<String> = items.collect();
        write!(json, ",\"headers\":[{}]", items.join(", ")).unwrap();
    }
    let data = std::str::from_utf8(&spec.value).expect("JSON holds JSON");
    // Formatted as a pretty printer would.
    write!(json, ",\n  \"jobData\" : {data}\n}}").unwrap();
    json
}

fn time_field(when: When, name: &str) -> String {
    match when {
        When::At(time) => format!("\"{name}\":\"{time}\""),
        When::After(delay) => format!("\"delay\":\"{}ms\"", delay.as_millis()),
    }
}

fn span(duration: Duration) -> HumanDuration {
    HumanDuration::from_millis(u64::try_from(duration.as_millis()).unwrap())
}

/// How far before the last one of `count` requests the one is that is repeated. As likely 0 as 1 or 2 to 3, and so on, so that keys are repeated at once,
/// in the same turn, after some turns, and after their jobs have ended.
pub(crate) fn distance(random: &mut fastrand::Rng, count: usize) -> usize {
    let most = 1 << random.u32(..=count.ilog2());
    random.usize(most / 2..most)
}

/// Letters and digits.
pub(crate) fn noise(random: &mut fastrand::Rng, length: usize) -> String {
    std::iter::repeat_with(|| random.alphanumeric())
        .take(length)
        .collect()
}

pub(crate) fn now() -> Timestamp {
    SystemClock.now()
}

/// This many milliseconds from now.
pub(crate) fn in_millis(millis: u64) -> Timestamp {
    now().after(Duration::from_millis(millis))
}
