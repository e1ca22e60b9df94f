//! Dead letters whose payload was left out, because their topic refused it: the record is still where it entered the pipeline, as long as that topic
//! retains it. No IO.
//!
//! The dead letter has a hash of the omitted parts, so that no other record is taken for it, whatever its
//! headers say.

use bytes::Bytes;
use redeliver_core::content::payload_hash;
use redeliver_core::headers::{PAYLOAD_OMITTED, PAYLOAD_OMITTED_HASH};
use redeliver_core::kept::is_of_user;
use redeliver_core::{Headers, Record};

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

/// The headers that a dead letter has kept, after the user headers of its record. The headers of redrives in the record are not about the last redrive.
fn joined(reserved: &Headers, of_record: &Headers) -> Headers {
    let mut all = of_record.filtered(is_of_user);
    for (name, value) in reserved.iter() {
        all.push(name, value);
    }
    all
}

/// The size of what a record adds to a step, in bytes.
#[must_use]
pub fn size(record: &Record) -> usize {
    let of = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
    of(&record.key) + of(&record.value)
}

#[cfg(test)]
mod tests {
    use redeliver_core::headers;
    use redeliver_core::route::{reject, strip_payload};
    use redeliver_core::{Failure, Pipeline, Position, Timestamp};
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
