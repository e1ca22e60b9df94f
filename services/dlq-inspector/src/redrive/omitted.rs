//! Dead letters without their payload: because their topic refused it, or because a share group does not copy it. The record is still at its origin, as long as that
//! topic retains it. No IO.
//!
//! In the first case, the dead letter has a hash of the omitted parts, so that no other record is taken for it, whatever its
//! headers say. In the other one, there is none: what can be found out is whether the record is still the one of that offset.

use std::time::Duration;

use redeliver_core::content::payload_hash;
use redeliver_core::headers::{PAYLOAD_OMITTED, PAYLOAD_OMITTED_HASH, is_reserved};
use redeliver_core::kept::is_of_user;
use redeliver_core::{Headers, Record, mutant};
use redeliver_kafka::TopicId;
use redeliver_kafka::lookup::Found;

use super::job::Outcome;

/// A dead letter with what was read at its origin, or why it is skipped.
pub type Restored = Result<Record, Outcome>;

/// How much newer than a dead letter the record at its origin may be: the clocks of producers and brokers differ.
const CLOCKS_DIFFER: Duration = Duration::from_secs(60);

/// The dead letter with its omitted parts, from the record at its origin; `None` if that is another record.
#[must_use]
pub fn restored(letter: &Record, original: &Record) -> Option<Record> {
    let expected = letter.headers.last(PAYLOAD_OMITTED_HASH)?;
    let found = payload_hash(original.key.as_deref(), original.value.as_deref());
    if expected != found.as_bytes() {
        return None;
    }
    let is_marker = |name: &str| [PAYLOAD_OMITTED, PAYLOAD_OMITTED_HASH].contains(&name);
    let mut headers = letter.headers.filtered(|name| !is_marker(name));
    let has_headers = letter.headers.last(PAYLOAD_OMITTED) == Some(b"value");
    if !has_headers {
        if original.unreadable_headers > 0 {
            return None;
        }
        headers = joined(&headers, &original.headers);
    }
    Some(Record {
        key: original.key.clone(),
        value: original.value.clone(),
        headers,
        ..letter.clone()
    })
}

/// A dead letter of a share group, which has not copied the record, with what is at its origin. The headers are those of the record: the broker copies none.
///
/// # Errors
/// If it is certain that this is not the record. Offsets of a topic are not used again; with [`of_same_topic`], what is left is a topic that was created again
/// before the dead letter was indexed, and got records with old timestamps.
pub fn uncopied(letter: &Record, found: &Found) -> Restored {
    let original = match found {
        Found::Record(stored) => &stored.record,
        Found::Compacted => return Err(Outcome::OriginCompacted),
        Found::Deleted | Found::Unknown => return Err(Outcome::OriginTruncated),
    };
    let times = original.timestamp.zip(letter.timestamp);
    if times.is_some_and(|(original, letter)| original > letter.after(CLOCKS_DIFFER)) {
        return Err(Outcome::OriginRecreated);
    }
    Ok(Record {
        key: original.key.clone(),
        value: original.value.clone(),
        headers: original.headers.filtered(|name| !is_reserved(name)),
        unreadable_headers: original.unreadable_headers,
        ..letter.clone()
    })
}

/// What was read of a topic, given its id when its dead letters were indexed, and the one that it has after the record was read; `None`: it does not exist any more.
///
/// # Errors
/// As [`uncopied`], or if it is another topic.
pub fn of_same_topic(restored: Restored, indexed: TopicId, current: Option<TopicId>) -> Restored {
    match restored {
        // Nothing is known of a topic that may not be read.
        Err(Outcome::PayloadOmitted) => restored,
        _ if current == Some(indexed) || mutant!("redrive-ignores-the-origin-id") => restored,
        _ => Err(Outcome::OriginRecreated),
    }
}

/// The headers that a dead letter has kept, after the user headers of its record. The headers of redrives in the record are not about the last redrive.
fn joined(reserved: &Headers, of_record: &Headers) -> Headers {
    let mut all = of_record.filtered(is_of_user);
    for (name, value) in reserved.iter() {
        all.push(name, value);
    }
    all
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use redeliver_core::headers;
    use redeliver_core::route::{reject, strip_payload};
    use redeliver_core::{Failure, Pipeline, Position, Timestamp};
    use redeliver_kafka::lookup::StoredRecord;
    use redeliver_testkit::record_at;

    use super::*;

    fn original() -> Record {
        let headers: Headers = [
            ("tenant", Some(&b"a\xff"[..])),
            ("tenant", None),
            ("redrive-count", Some(b"2")),
        ]
        .into_iter()
        .collect();
        Record {
            timestamp: Some(Timestamp::from_millis(5)),
            key: Some(Bytes::from_static(b"k\0")),
            value: Some(Bytes::from_static(b"v\xff")),
            headers,
            ..record_at("docs", 1, 9)
        }
    }

    /// The dead letter of a record, from which the payload was removed this often.
    fn stripped(record: &Record, times: usize) -> Record {
        let failure = Failure::permanent("x", "y");
        let mut letter = reject(
            &Pipeline::new("docs"),
            record,
            &failure,
            Timestamp::from_millis(6),
        );
        for _ in 0..times {
            assert!(strip_payload(&mut letter));
        }
        Record {
            position: Position {
                topic: "docs-dlq".into(),
                partition: 0,
                offset: 3,
            },
            key: letter.key,
            value: letter.value,
            headers: letter.headers,
            ..record.clone()
        }
    }

    #[test]
    fn payload_is_restored_byte_for_byte() {
        let whole = stripped(&original(), 0);
        let restored_value = restored(&stripped(&original(), 1), &original()).unwrap();
        assert_eq!(
            (&restored_value.key, &restored_value.value),
            (&whole.key, &whole.value)
        );
        assert_eq!(restored_value.headers, whole.headers);
        assert_eq!(&*restored_value.position.topic, "docs-dlq");

        let all = restored(&stripped(&original(), 2), &original()).unwrap();
        assert_eq!((&all.key, &all.value), (&whole.key, &whole.value));
        let user = all.headers.filtered(|name| !headers::is_reserved(name));
        let expected: Headers = [
            ("tenant", Some(&b"a\xff"[..])),
            ("tenant", None),
            ("redrive-count", Some(b"2")),
        ]
        .into_iter()
        .collect();
        assert_eq!(user, expected);
        assert_eq!(all.headers.last(headers::ORIGINAL_OFFSET), Some(&b"9"[..]));
        // A record with a key and headers only.
        let tombstone = Record {
            value: None,
            ..original()
        };
        let found = restored(&stripped(&tombstone, 1), &tombstone).unwrap();
        assert_eq!((found.key, found.value), (original().key, None));
    }

    /// What is at the origin of a dead letter from this time, if the record there has these headers and this timestamp.
    fn at_origin(headers: &[(&str, Option<&[u8]>)], millis: i64) -> (Record, Restored) {
        let letter = Record {
            timestamp: Some(Timestamp::from_millis(1_000)),
            headers: [("__dlq.errors.topic", Some(&b"docs"[..]))].into_iter().collect(),
            ..record_at("dlq.docs", 0, 3)
        };
        let original = Record {
            headers: headers.iter().copied().collect(),
            timestamp: Some(Timestamp::from_millis(millis)),
            ..original()
        };
        let stored = StoredRecord {
            record: original.clone(),
            timestamp_type: None,
        };
        (original, uncopied(&letter, &Found::Record(stored)))
    }

    #[test]
    fn another_record_is_not_the_uncopied() {
        let (letter, _) = at_origin(&[], 0);
        for (found, expected) in [
            (Found::Deleted, Outcome::OriginTruncated),
            (Found::Unknown, Outcome::OriginTruncated),
            (Found::Compacted, Outcome::OriginCompacted),
        ] {
            assert_eq!(uncopied(&letter, &found).unwrap_err(), expected);
        }
        let recreated = Outcome::OriginRecreated;
        assert!(at_origin(&[], 61_000).1.is_ok());
        assert_eq!(at_origin(&[], 61_001).1.unwrap_err(), recreated);

        let id = TopicId::from_bits;
        let found = |restored, current| of_same_topic(restored, id(1), current).map(drop);
        let (restored, denied) = (|| at_origin(&[], 0).1, Outcome::PayloadOmitted);
        assert_eq!(found(restored(), Some(id(1))), Ok(()));
        for other in [Some(id(2)), None] {
            assert_eq!(found(restored(), other), Err(recreated));
            assert_eq!(found(Err(Outcome::OriginCompacted), other), Err(recreated));
            assert_eq!(found(Err(denied), other), Err(denied));
        }
    }

    proptest! {
        #[test]
        fn uncopied_record_is_whole(
            names in proptest::collection::vec(proptest::sample::select(vec!["a", "redrive-count", "error-code", "__dlq.errors.topic", "kafka_dlt-original-topic"]), 0..6),
            millis in 0_i64..61_000,
        ) {
            let headers: Vec<(&str, Option<&[u8]>)> = names.iter().map(|name| (*name, Some(&b"9\xff"[..]))).collect();
            let (original, restored) = at_origin(&headers, millis);
            let restored = restored.unwrap();
            prop_assert_eq!((&restored.key, &restored.value), (&original.key, &original.value));
            prop_assert_eq!(&*restored.position.topic, "dlq.docs");
            // Also the headers of other frameworks: the record came with them.
            prop_assert_eq!(restored.headers, original.headers.filtered(|name| name != "error-code"));
        }
    }

    #[test]
    fn another_record_is_not_the_original() {
        let letter = stripped(&original(), 1);
        for other in [
            Record {
                value: Some(Bytes::from_static(b"w")),
                ..original()
            },
            Record {
                value: None,
                ..original()
            },
            Record {
                key: None,
                ..original()
            },
        ] {
            assert!(restored(&letter, &other).is_none());
        }
        // Another program has left the payload out.
        let foreign = Record {
            headers: letter.headers.filtered(|name| name != PAYLOAD_OMITTED_HASH),
            ..letter
        };
        assert!(restored(&foreign, &original()).is_none());
    }
}
