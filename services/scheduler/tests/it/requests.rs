//! Requests as users write them, each with what it means: so the oracle need not ask the scheduler.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::job::Priority;
use redeliver_core::{Clock as _, Headers, JobId, Span, SystemClock, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::convert::{to_duration, to_headers, to_priority, to_timestamp};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};

use crate::oracle::{Wanted, When, Wish};

/// A record for the ingest topic, in the making.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) wish: Wish,
    /// `None`: where a careful client puts it.
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

impl Wanted {
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

    pub(crate) fn expire_after(self, millis: u64) -> Self {
        let expire_after = Some(Duration::from_millis(millis));
        Self { expire_after, ..self }
    }
}

impl Request {
    /// A job as JSON. Its value must be JSON; times are written with `Z`, headers as a list.
    pub(crate) fn json(wanted: Wanted) -> Self {
        let text = json(&wanted, &time_field(wanted.when, "scheduledTime"));
        Self::written(wanted, text)
    }

    /// A job as JSON, of which the test itself wrote the text.
    pub(crate) fn written(wanted: Wanted, text: impl Into<Bytes>) -> Self {
        Self::new(Wish::Job(Box::new(wanted)), Body::Raw(Some(text.into())))
    }

    /// A job as protobuf.
    pub(crate) fn protobuf(wanted: Wanted) -> Self {
        let spec = v1::JobSpec {
            app: wanted.app.clone(),
            when: Some(match wanted.when {
                When::At(time) => v1::job_spec::When::ScheduledTime(to_timestamp(time)),
                When::After(delay) => v1::job_spec::When::Delay(to_duration(span(delay))),
            }),
            priority: to_priority(wanted.priority).into(),
            idempotency_key: wanted.idempotency_key.clone().unwrap_or_default(),
            data: wanted.value.clone(),
            key: wanted.key.clone(),
            headers: to_headers(&wanted.headers),
            expire_after: wanted.expire_after.map(|after| to_duration(span(after))),
            request_id: wanted.request_id.clone().unwrap_or_default(),
        };
        Self::command(Wish::Job(Box::new(wanted)), Command::Schedule(spec))
    }

    /// Something that cannot be accepted, for this reason.
    pub(crate) fn refused(value: Option<&[u8]>, code: &str, says: &str) -> Self {
        let wish = Wish::Refused {
            code: format!("request.{code}"),
            says: says.to_owned(),
        };
        Self::new(wish, Body::Raw(value.map(Bytes::copy_from_slice)))
    }

    /// A message that cannot be accepted, for this reason.
    pub(crate) fn refused_command(command: Command, code: &str, says: &str) -> Self {
        let wish = Wish::Refused {
            code: format!("request.{code}"),
            says: says.to_owned(),
        };
        Self::command(wish, command)
    }

    pub(crate) fn cancel(id: JobId) -> Self {
        let command = v1::CancelJob { id: id.to_string() };
        Self::command(Wish::Cancel(id), Command::Cancel(command))
    }

    pub(crate) fn cancel_json(id: JobId) -> Self {
        let text = format!(r#"{{"cancel":"{id}"}}"#);
        Self::new(Wish::Cancel(id), Body::Raw(Some(text.into())))
    }

    pub(crate) fn reschedule(id: JobId, when: When) -> Self {
        let command = v1::RescheduleJob {
            id: id.to_string(),
            when: Some(match when {
                When::At(time) => v1::reschedule_job::When::ScheduledTime(to_timestamp(time)),
                When::After(delay) => v1::reschedule_job::When::Delay(to_duration(span(delay))),
            }),
        };
        Self::command(Wish::Reschedule(id, when), Command::Reschedule(command))
    }

    pub(crate) fn reschedule_json(id: JobId, when: When) -> Self {
        let text = format!(r#"{{"reschedule":"{id}",{}}}"#, time_field(when, "scheduledTime"));
        Self::new(Wish::Reschedule(id, when), Body::Raw(Some(text.into())))
    }

    /// The record's own key. It becomes the job's if that has none.
    pub(crate) fn record_key(mut self, key: impl Into<Bytes>) -> Self {
        let key = key.into();
        if let Wish::Job(wanted) = &mut self.wish {
            wanted.key.get_or_insert_with(|| key.clone());
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

    /// Somebody waits for the answer to this message, under this name.
    pub(crate) fn answer_to(self, name: impl Into<String>) -> Self {
        assert!(
            matches!(self.body, Body::Command(_)),
            "JSON cannot ask for an answer"
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

    /// Where it is to be written.
    pub(crate) fn home(&self, partitions: i32) -> Option<i32> {
        self.partition.or_else(|| match &self.wish {
            Wish::Job(wanted) => {
                let key = wanted.idempotency_key.as_deref()?;
                Some(shard_of(&wanted.app, key, partitions))
            }
            Wish::Cancel(id) | Wish::Reschedule(id, _) => {
                Some(id.shard()).filter(|shard| *shard < partitions)
            }
            Wish::Refused { .. } => None,
        })
    }

    fn command(wish: Wish, command: Command) -> Self {
        Self::new(wish, Body::Command(Box::new(command))).header("content-type", CONTENT_TYPE)
    }

    fn new(wish: Wish, body: Body) -> Self {
        Self {
            wish,
            partition: None,
            key: None,
            headers: Headers::new(),
            answer_to: None,
            body,
        }
    }
}

/// The JSON of a job, with its time as it is given.
pub(crate) fn json(wanted: &Wanted, time: &str) -> String {
    let quoted = |text: &str| serde_json::to_string(text).unwrap();
    let text = |bytes: &[u8]| quoted(std::str::from_utf8(bytes).expect("JSON holds text"));
    let mut json = format!("{{\"appName\":{},{time}", quoted(&wanted.app));
    if wanted.priority != Priority::Normal {
        write!(json, ",\"priority\":{}", quoted(wanted.priority.as_str())).unwrap();
    }
    for (name, value) in [
        ("idempotencyKey", &wanted.idempotency_key),
        ("requestId", &wanted.request_id),
    ] {
        if let Some(value) = value {
            write!(json, ",\"{name}\":{}", quoted(value)).unwrap();
        }
    }
    if let Some(after) = wanted.expire_after {
        write!(json, ",\"expireAfter\":\"{}ms\"", after.as_millis()).unwrap();
    }
    if let Some(key) = &wanted.key {
        write!(json, ",\"key\":{}", text(key)).unwrap();
    }
    if !wanted.headers.is_empty() {
        let items = wanted.headers.iter().map(|(name, value)| {
            let value = value.map_or_else(|| "null".to_owned(), text);
            format!("{{\"name\":{},\"value\":{value}}}", quoted(name))
        });
        let items: Vec<String> = items.collect();
        write!(json, ",\"headers\":[{}]", items.join(", ")).unwrap();
    }
    let data = std::str::from_utf8(&wanted.value).expect("JSON holds JSON");
    // As users of pretty printers write it.
    write!(json, ",\n  \"jobData\" : {data}\n}}").unwrap();
    json
}

fn time_field(when: When, name: &str) -> String {
    match when {
        When::At(time) => format!("\"{name}\":\"{time}\""),
        When::After(delay) => format!("\"delay\":\"{}ms\"", delay.as_millis()),
    }
}

fn span(duration: Duration) -> Span {
    Span::from_millis(u64::try_from(duration.as_millis()).unwrap())
}

/// The time now.
pub(crate) fn now() -> Timestamp {
    SystemClock.now()
}

/// The time now and so many milliseconds.
pub(crate) fn in_millis(millis: u64) -> Timestamp {
    now().after(Duration::from_millis(millis))
}
