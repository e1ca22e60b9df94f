//! Long waits: a failed record waits with the scheduler, wrapped in a command of the ingest topic. The command contains
//! key, value and headers as they come back.

use prost::Message as _;
use redeliver_core::headers::{PIPELINE, TRACEPARENT, TRACESTATE};
use redeliver_core::{Headers, Output, Record, Timestamp};

use crate::convert::{from_headers, to_headers, to_timestamp};
use crate::{CONTENT_TYPE, v1};

const CONTENT_TYPE_HEADER: &str = "content-type";

/// Wraps a waiting record in a command for the scheduler.
#[must_use]
pub fn wrap(pipeline: &str, due: Timestamp, record: Output) -> Output {
    let mut headers = record
        .headers
        .filtered(|name| name == TRACEPARENT || name == TRACESTATE);
    headers.push_text(CONTENT_TYPE_HEADER, CONTENT_TYPE);
    let wait = v1::LongWait {
        pipeline: pipeline.to_owned(),
        due: Some(to_timestamp(due)),
        headers: to_headers(&record.headers),
        key: record.key,
        value: record.value,
    };
    let command = v1::JobCommand {
        command: Some(v1::job_command::Command::LongWait(wait)),
        answer_to: String::new(),
    };
    Output {
        topic: record.topic,
        partition: None,
        // Any shard can store the job. A second copy of the key could make the command too large.
        key: None,
        value: Some(command.encode_to_vec().into()),
        headers,
    }
}

/// The record of this pipeline in a command of the ingest topic, with the position of the command. `None` if the
/// command is not a long wait of this pipeline.
#[must_use]
pub fn unwrap(pipeline: &str, command: &Record) -> Option<Record> {
    let (of, record) = unwrap_any(command)?;
    (of == pipeline).then_some(record)
}

/// As [`unwrap`], of any pipeline, with its name.
#[must_use]
pub fn unwrap_any(command: &Record) -> Option<(String, Record)> {
    if command.headers.last(CONTENT_TYPE_HEADER) != Some(CONTENT_TYPE.as_bytes()) {
        return None;
    }
    let decoded = v1::JobCommand::decode(command.value.clone()?).ok()?;
    let Some(v1::job_command::Command::LongWait(wait)) = decoded.command else {
        return None;
    };
    let record = at_position_of(command, wait.key, wait.value, &wait.headers);
    Some((wait.pipeline, record))
}

/// The record of this pipeline in a job of the state topic, with the position of the job. `None` if the job is not a
/// scheduled long wait of this pipeline.
#[must_use]
pub fn unwrap_state(pipeline: &str, state: &Record) -> Option<Record> {
    let (of, record) = unwrap_any_state(state)?;
    (of == pipeline).then_some(record)
}

/// As [`unwrap_state`], of any pipeline, with its name.
#[must_use]
pub fn unwrap_any_state(state: &Record) -> Option<(String, Record)> {
    let job = v1::JobRecord::decode(state.value.clone()?).ok()?;
    if !job.long_wait || job.state() != v1::JobState::Scheduled {
        return None;
    }
    let record = at_position_of(state, job.key, job.data, &job.headers);
    let pipeline = record.headers.last(PIPELINE)?;
    let pipeline = std::str::from_utf8(pipeline).ok()?.to_owned();
    Some((pipeline, record))
}

fn at_position_of(
    container: &Record,
    key: Option<bytes::Bytes>,
    value: Option<bytes::Bytes>,
    headers: &[v1::Header],
) -> Record {
    let headers: Headers = from_headers(headers);
    Record {
        position: container.position.clone(),
        timestamp: container.timestamp,
        key,
        value,
        headers,
        unreadable_headers: 0,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use redeliver_core::Position;

    use super::*;

    const DUE: Timestamp = Timestamp::from_millis(1_763_722_800_123);

    /// The record that is read after this output was written.
    fn read(output: &Output) -> Record {
        Record {
            position: Position {
                topic: output.topic.clone(),
                partition: 3,
                offset: 4,
            },
            timestamp: None,
            key: output.key.clone(),
            value: output.value.clone(),
            headers: output.headers.clone(),
            unreadable_headers: 0,
        }
    }

    fn waiting(headers: Headers) -> Output {
        Output {
            topic: "ingest".into(),
            partition: None,
            key: Some(Bytes::from_static(b"key")),
            value: None,
            headers,
        }
    }

    #[test]
    fn command_contains_due_time_and_trace() {
        let parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let headers: Headers = [
            ("tenant", Some(&b"a"[..])),
            (TRACEPARENT, Some(&parent[..])),
            (TRACESTATE, Some(&b"x=y"[..])),
        ]
        .into_iter()
        .collect();
        let command = wrap("docs", DUE, waiting(headers));
        assert_eq!(
            (&*command.topic, &command.key, command.partition),
            ("ingest", &None, None)
        );
        let expected: Headers = [
            (TRACEPARENT, Some(&parent[..])),
            (TRACESTATE, Some(&b"x=y"[..])),
            ("content-type", Some(&b"application/x-protobuf"[..])),
        ]
        .into_iter()
        .collect();
        assert_eq!(command.headers, expected);
        let decoded = v1::JobCommand::decode(command.value.unwrap()).unwrap();
        let Some(v1::job_command::Command::LongWait(wait)) = decoded.command else {
            panic!("{decoded:?}")
        };
        assert_eq!((&*wait.pipeline, wait.due), ("docs", Some(to_timestamp(DUE))));
        assert_eq!(decoded.answer_to, "");
    }

    #[test]
    fn other_commands_are_not_unwrapped() {
        let mut command = read(&wrap("docs", DUE, waiting(Headers::new())));
        assert!(unwrap("docs", &command).is_some());
        assert!(unwrap("other", &command).is_none());
        command.headers = Headers::new();
        assert!(unwrap("docs", &command).is_none(), "a command in JSON");
        command.headers.push_text(CONTENT_TYPE_HEADER, CONTENT_TYPE);
        for value in [None, Some(Bytes::from_static(b"\xff"))] {
            command.value = value;
            assert!(unwrap("docs", &command).is_none());
        }
    }

    #[test]
    fn only_scheduled_waits_are_unwrapped() {
        let state = |long_wait, state: v1::JobState, pipeline: &str| {
            let job = v1::JobRecord {
                long_wait,
                state: state.into(),
                data: Some(Bytes::from_static(b"value")),
                headers: vec![v1::Header {
                    name: PIPELINE.to_owned(),
                    value: Some(Bytes::copy_from_slice(pipeline.as_bytes())),
                }],
                ..v1::JobRecord::default()
            };
            let mut record = read(&waiting(Headers::new()));
            record.value = Some(job.encode_to_vec().into());
            unwrap_state("docs", &record)
        };
        let unwrapped = state(true, v1::JobState::Scheduled, "docs").unwrap();
        assert_eq!(
            (unwrapped.key, unwrapped.value.as_deref()),
            (None, Some(&b"value"[..]))
        );
        assert!(state(false, v1::JobState::Scheduled, "docs").is_none());
        assert!(state(true, v1::JobState::Dispatched, "docs").is_none());
        assert!(state(true, v1::JobState::Scheduled, "other").is_none());
    }

    proptest! {
        #[test]
        fn content_is_not_changed(
            key in option::of(vec(any::<u8>(), 0..40)),
            value in option::of(vec(any::<u8>(), 0..200)),
            list in vec((".{0,20}", option::of(vec(any::<u8>(), 0..40))), 0..10),
        ) {
            let headers: Headers = list.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
            let record = Output {
                key: key.map(Bytes::from),
                value: value.map(Bytes::from),
                ..waiting(headers)
            };
            let unwrapped = unwrap("docs", &read(&wrap("docs", DUE, record.clone()))).unwrap();
            prop_assert_eq!((unwrapped.key, unwrapped.value, unwrapped.headers), (record.key, record.value, record.headers));
        }
    }
}
