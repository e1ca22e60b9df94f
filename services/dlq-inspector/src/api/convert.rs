//! From rows of the index to messages.

use bytes::Bytes;
use redeliver_proto::convert::{to_headers, to_timestamp};
use redeliver_proto::v1;

use crate::header_list;
use crate::index::Found;

/// How much of a value stands in a message.
pub(super) const VALUE_LIMIT: usize = 1 << 20;

/// Without value and headers.
pub(super) fn basic(found: &Found) -> v1::DeadLetter {
    let origin = (!found.origin_topic.is_empty()).then(|| v1::Position {
        topic: found.origin_topic.clone(),
        partition: found.origin_partition.unwrap_or(-1),
        offset: found.origin_offset.unwrap_or(-1),
    });
    v1::DeadLetter {
        id: found.id.to_string(),
        position: Some(v1::Position {
            topic: found.id.topic.clone(),
            partition: found.id.partition,
            offset: found.id.offset,
        }),
        dead_at: Some(to_timestamp(found.dead_at)),
        state: found.state as i32,
        dialect: found.dialect,
        pipeline: found.pipeline.clone(),
        error_class: found.error_class.clone(),
        error_code: found.error_code.clone(),
        error_message: found.error_message.clone(),
        failed_at: found.failed_at.map(to_timestamp),
        retry_count: found.retry_count,
        origin,
        origin_timestamp: found.origin_timestamp.map(to_timestamp),
        key: found.key.clone(),
        value_size: found.value_size,
        value: None,
        value_truncated: false,
        headers: Vec::new(),
        trace_id: found.trace_id.clone(),
        job_id: found.job_id.clone(),
        state_time: found.state_time.map(to_timestamp),
        state_by: found.state_by.clone(),
        state_note: found.state_note.clone(),
        content_hash: Bytes::copy_from_slice(&found.content),
    }
}

/// With headers, and with the value as far as it goes.
pub(super) fn full(found: &Found, value: Option<Bytes>) -> v1::DeadLetter {
    let value_truncated = value.as_ref().is_some_and(|value| value.len() > VALUE_LIMIT);
    v1::DeadLetter {
        headers: to_headers(&header_list::decode(&found.headers)),
        value: value.map(|value| value.slice(..value.len().min(VALUE_LIMIT))),
        value_truncated,
        ..basic(found)
    }
}
