//! Converts records between the Kafka client's types and ours, byte-exact.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use rdkafka::Timestamp as KafkaTimestamp;
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use redeliver_core::{Headers, Position, Record, Timestamp};

/// Copies a message out of the client's buffers. `topic` is the shared name of the message's topic.
#[must_use]
pub fn record(message: &BorrowedMessage<'_>, topic: &Arc<str>) -> Record {
    let (headers, unreadable_headers) = message.headers().map_or((Headers::new(), 0), read_headers);
    Record {
        position: Position {
            topic: topic.clone(),
            partition: message.partition(),
            offset: message.offset(),
        },
        timestamp: timestamp(message.timestamp()),
        key: message.key().map(Bytes::copy_from_slice),
        value: message.payload().map(Bytes::copy_from_slice),
        headers,
        unreadable_headers,
    }
}

pub(crate) fn timestamp(timestamp: KafkaTimestamp) -> Option<Timestamp> {
    match timestamp {
        KafkaTimestamp::NotAvailable => None,
        KafkaTimestamp::CreateTime(millis) | KafkaTimestamp::LogAppendTime(millis) => {
            Some(Timestamp::from_millis(millis))
        }
    }
}

/// After this many unreadable names, the remaining headers of a record are skipped: each costs a panic, and a forged record
/// may have a hundred thousand.
const MAX_UNREADABLE: usize = 8;

/// The client library panics on header names that are not UTF-8. Such headers are counted, and the record is malformed.
fn read_headers(borrowed: &BorrowedHeaders) -> (Headers, usize) {
    let count = borrowed.count();
    let mut headers = Headers::with_capacity(count, 32 * count);
    let mut unreadable = 0;
    for index in 0..count {
        if unreadable == MAX_UNREADABLE {
            return (headers, unreadable + count - index);
        }
        match catch_unwind(AssertUnwindSafe(|| borrowed.get(index))) {
            Ok(header) => headers.push(header.key, header.value),
            Err(_) => unreadable += 1,
        }
    }
    (headers, unreadable)
}

/// Converts headers to the client library's type.
#[must_use]
pub fn native_headers(headers: &Headers) -> OwnedHeaders {
    headers.iter().fold(
        OwnedHeaders::new_with_capacity(headers.len()),
        |native, (key, value)| native.insert(Header { key, value }),
    )
}
