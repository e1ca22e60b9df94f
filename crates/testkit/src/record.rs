//! Records in memory, for tests without Kafka.

use bytes::Bytes;
use redeliver_core::{Headers, Position, Record};

/// A record at a position, without anything else.
#[must_use]
pub fn record_at(topic: &str, partition: i32, offset: i64) -> Record {
    Record {
        position: Position {
            topic: topic.into(),
            partition,
            offset,
        },
        timestamp: None,
        key: None,
        value: None,
        headers: Headers::new(),
        unreadable_headers: 0,
    }
}

/// A record of a compacted topic, with a key and a value.
#[must_use]
pub fn record(key: &str, value: Option<Bytes>) -> Record {
    Record {
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value,
        ..record_at("t", 0, 0)
    }
}
