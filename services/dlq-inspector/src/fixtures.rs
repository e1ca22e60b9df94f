//! Records of unit tests.

use redeliver_core::{Headers, Position, Record};

/// A record at a position, without anything else.
pub(crate) fn record_at(topic: &str, partition: i32, offset: i64) -> Record {
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
