//! Converts records between the Kafka client's types and ours, byte-exact.

use std::sync::Arc;

use bytes::Bytes;
use rdkafka::Timestamp as KafkaTimestamp;
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use redeliver_core::{Headers, Position, Record, Timestamp, TimestampType};
use redeliver_kafka_ffi::raw_headers;

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

/// Who has set a timestamp; `None` if there is none.
pub(crate) fn timestamp_type(timestamp: KafkaTimestamp) -> Option<TimestampType> {
    match timestamp {
        KafkaTimestamp::NotAvailable => None,
        KafkaTimestamp::CreateTime(_) => Some(TimestampType::CreateTime),
        KafkaTimestamp::LogAppendTime(_) => Some(TimestampType::LogAppendTime),
    }
}

/// Headers whose names are not UTF-8 are counted, and the record is malformed.
fn read_headers(borrowed: &BorrowedHeaders) -> (Headers, usize) {
    let count = borrowed.count();
    let mut headers = Headers::with_capacity(count, 16 * count, 16 * count);
    let mut unreadable = 0;
    for header in raw_headers(borrowed) {
        match std::str::from_utf8(header.name) {
            Ok(name) => headers.push(name, header.value),
            Err(_) => unreadable += 1,
        }
    }
    (headers, unreadable)
}

/// Converts headers to the client library's type, which keeps NUL bytes in names.
#[must_use]
pub fn native_headers(headers: &Headers) -> OwnedHeaders {
    headers.iter().fold(
        OwnedHeaders::new_with_capacity(headers.len()),
        |native, (key, value)| native.insert(Header { key, value }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_a_round_trip() {
        let headers: Headers = [
            ("user\0name", Some(&b"1"[..])),
            ("\0", Some(b"")),
            ("", Some(b"\0")),
            ("twice", None),
            ("twice", Some(b"\xff")),
        ]
        .into_iter()
        .collect();
        let native = native_headers(&headers);
        assert_eq!(read_headers(native.as_borrowed()), (headers, 0));
    }
}
