//! The copy of a command.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::{Headers, JobId, Output, Record, Timestamp};

use crate::request::{Command, JobRef, NAME, shard_of};
use crate::settings::Settings;
use crate::shard::{NamedBy, UrgentCopy};

/// The maximum size of a copy.
const MAX_COPY_BYTES: usize = 16 << 10;

/// Reads a copy. `None` if it does not name a record of the same partition of the ingest topic, is not a command that names a job of that
/// shard, or is too large for one.
pub(crate) fn read_copy(copy: &Record, settings: &Settings, now: Timestamp) -> Option<UrgentCopy> {
    let size = copy.value.as_ref().map_or(0, Bytes::len) + copy.headers.byte_len();
    if size > MAX_COPY_BYTES {
        return None;
    }
    let reserved = ReservedHeaders::read(copy).ok()?;
    let origin = reserved
        .is_retry_of(NAME)
        .then(|| reserved.origin().ok())
        .flatten()?;
    let partition = copy.position.partition;
    if origin.topic != settings.ingest || origin.partition != partition {
        return None;
    }
    let (Command::Cancel(job) | Command::Reschedule { job, .. }) =
        crate::request::read(copy, &settings.rules, now).command.ok()?
    else {
        return None;
    };
    let owner = match &job {
        JobRef::Id(id) => id.shard(),
        JobRef::Key { app, key } => shard_of(app, key, settings.partitions),
    };
    (owner == partition).then(|| UrgentCopy {
        names: NamedBy::of(&job),
        original: origin.offset,
    })
}

/// The copy of a protobuf command, without its trace context, which can be long. The id contains the position and the timestamp of the
/// original.
pub(crate) fn copy_of(original: &Output, topic: Arc<str>, id: JobId) -> Option<Output> {
    let mut list: Headers = headers::user_headers(&original.headers, None)
        .filtered(|name| name != headers::TRACEPARENT && name != headers::TRACESTATE);
    let origin = headers::Origin {
        topic: original.topic.clone(),
        partition: id.shard(),
        offset: i64::try_from(id.offset()).ok()?,
        timestamp: Some(id.requested_at()),
    };
    headers::write_lineage(&mut list, NAME, &origin, 0);
    Some(Output {
        topic,
        partition: Some(id.shard()),
        headers: list,
        ..original.clone()
    })
}

#[cfg(test)]
mod tests {
    use redeliver_core::Position;
    use redeliver_proto::{Message as _, v1};

    use super::*;
    use crate::request::{ParsedRequest, write_protobuf};
    use crate::shard::tests::settings;

    const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000);

    #[test]
    fn the_copies_of_the_api_can_be_read() {
        let id = JobId::new(NOW, 0, 41);
        let command = JobId::new(NOW, 0, 42);
        let mut headers = Headers::new();
        headers.push_text(headers::TRACESTATE, &"x".repeat(MAX_COPY_BYTES));
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let original = Output {
            topic: "ingest".into(),
            partition: Some(0),
            key: None,
            value: Some(write_protobuf(&ParsedRequest::Cancel(JobRef::Id(id)), "me")),
            headers,
        };
        let copy = copy_of(&original, "urgent".into(), command).unwrap();
        assert_eq!((&*copy.topic, copy.partition), ("urgent", Some(0)));
        let value = v1::JobCommand::decode(copy.value.clone().unwrap()).unwrap();
        assert_eq!(value.answer_to, "me");
        let record = Record {
            position: Position {
                topic: copy.topic,
                partition: 0,
                offset: 0,
            },
            timestamp: Some(NOW),
            key: copy.key,
            value: copy.value,
            headers: copy.headers,
            unreadable_headers: 0,
        };
        let expected = UrgentCopy {
            names: NamedBy::Id(id),
            original: 42,
        };
        assert_eq!(read_copy(&record, &settings(), NOW), Some(expected));
    }
}
