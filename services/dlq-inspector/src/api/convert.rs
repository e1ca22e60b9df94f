//! Converts indexed dead letters to messages.

use bytes::Bytes;
use redeliver_core::TimestampType;
use redeliver_kafka::lookup::StoredRecord;
use redeliver_proto::convert::{time_of_record, to_headers};
use redeliver_proto::{Message as _, v1};

use super::value::ShownValue;
use crate::access::Viewer;
use crate::dialect::{Facts, Field};
use crate::header_list;
use crate::index::IndexedLetter;
use crate::letter::{MAX_KEY, content_hash};
use crate::masking::{Fact, Mask, MaskedHeaders};

/// Values in messages are truncated to this many bytes.
pub(super) const VALUE_LIMIT: usize = 1 << 20;
/// Keys in messages are truncated to this many bytes.
const KEY_LIMIT: usize = 1 << 20;
/// Headers in messages end before they exceed this many bytes together with the key. With a value, its decoded form and the rest, which is
/// bounded by the index, a dead letter stays below 4 MiB, the limit of gRPC clients.
const KEY_AND_HEADERS_LIMIT: usize = 3 << 19;

/// The BASIC view: without value and headers, and with the key as it is indexed. `are_states_known`: see [`Completeness::are_states_known`].
///
/// [`Completeness::are_states_known`]: crate::completeness::Completeness::are_states_known
pub(super) fn basic(viewer: &Viewer, letter: &IndexedLetter, are_states_known: bool) -> v1::DeadLetter {
    let headers = header_list::iter(&letter.headers);
    shown(
        viewer,
        &letter.id.topic,
        headers,
        whole_basic(letter, are_states_known),
    )
}

/// The FULL view: with key and headers of the record, and with the value up to [`VALUE_LIMIT`]. `value`: what the caller sees of it; `None` for a null value.
pub(super) fn full(
    viewer: &Viewer,
    letter: &IndexedLetter,
    stored: &StoredRecord,
    value: Option<ShownValue>,
    are_states_known: bool,
) -> v1::DeadLetter {
    let mut whole = whole_full(letter, stored, are_states_known);
    set_value(&mut whole, value);
    shown(viewer, &letter.id.topic, stored.record.headers.iter(), whole)
}

/// The contents of a record that is no dead letter yet, as the FULL view. `topic`: the dead-letter topic of its pipeline, whose rules apply.
pub(super) fn contents(
    viewer: &Viewer,
    topic: &str,
    stored: &StoredRecord,
    value: Option<ShownValue>,
) -> v1::DeadLetter {
    let record = &stored.record;
    let facts = Facts::read(&record.headers);
    let mut whole = v1::DeadLetter {
        id: record.position.to_string(),
        position: Some((&record.position).into()),
        dead_at: record.timestamp.and_then(time_of_record),
        key: record.key.clone(),
        value_size: record.value.as_ref().map(|value| value.len() as u64),
        headers: to_headers(&record.headers),
        content_hash: Bytes::copy_from_slice(&content_hash(record)),
        unreadable_headers: u32::try_from(record.unreadable_headers).unwrap_or(u32::MAX),
        ..v1::DeadLetter::default()
    };
    set_facts(facts, &mut whole);
    set_value(&mut whole, value);
    shown(viewer, topic, record.headers.iter(), whole)
}

fn set_value(whole: &mut v1::DeadLetter, value: Option<ShownValue>) {
    match value {
        Some(ShownValue::Shown(value, paths)) => {
            whole.value_truncated = value.len() > VALUE_LIMIT;
            // A slice would keep the whole value in memory.
            whole.value = Some(if whole.value_truncated {
                Bytes::copy_from_slice(&value[..VALUE_LIMIT])
            } else {
                value
            });
            if !paths.is_empty() {
                add(whole, "value");
                whole.masked.get_or_insert_default().paths = paths;
            }
        }
        Some(ShownValue::Withheld) => add(whole, "value"),
        None => {}
    }
}

/// What a caller sees of a dead letter of a topic with these headers. All messages with dead letters pass here.
fn shown<'h>(
    viewer: &Viewer,
    topic: &str,
    headers: impl Iterator<Item = (&'h str, Option<&'h [u8]>)>,
    mut whole: v1::DeadLetter,
) -> v1::DeadLetter {
    mask(&viewer.mask(topic), headers, &mut whole);
    truncate(&mut whole);
    if viewer.sees_payloads(topic) {
        return whole;
    }
    without_payload(whole)
}

/// Truncates key and headers, so that one dead letter does not make a page or a watch unreadable.
fn truncate(whole: &mut v1::DeadLetter) {
    let key = whole.key.as_deref().unwrap_or_default();
    let mut left = KEY_AND_HEADERS_LIMIT - key.len().min(KEY_LIMIT);
    if key.len() > KEY_LIMIT {
        whole.key = Some(Bytes::copy_from_slice(&key[..KEY_LIMIT]));
        whole.key_truncated = true;
    }
    let fits = |header: &&v1::Header| {
        // Tag and length of the header in the message.
        let size = header.encoded_len() + 5;
        let fits = size <= left;
        left = left.saturating_sub(size);
        fits
    };
    let kept = whole.headers.iter().take_while(fits).count();
    if kept == whole.headers.len() {
        return;
    }
    whole.headers.truncate(kept);
    whole.headers_truncated = true;
    if let Some(masked) = &mut whole.masked {
        let is_kept = |name: &String| whole.headers.iter().any(|header| header.name == *name);
        masked.headers.retain(is_kept);
    }
}

/// Masks everything but the value.
fn mask<'h>(
    mask: &Mask<'_>,
    headers: impl Iterator<Item = (&'h str, Option<&'h [u8]>)>,
    whole: &mut v1::DeadLetter,
) {
    if mask.is_empty() {
        return;
    }
    // A hash could be compared with that of a guess.
    whole.content_hash = Bytes::new();
    add(whole, "content_hash");
    if mask.has_key() {
        whole.key = None;
        add(whole, "key");
    }
    if mask.has_fields() {
        whole.value_size = None;
        add(whole, "value_size");
    }
    let MaskedHeaders { headers, masked } = mask.headers(headers);
    if !masked.is_empty() && !whole.headers.is_empty() {
        whole.headers = to_headers(&headers);
        whole.masked.get_or_insert_default().headers = masked;
        add(whole, "headers");
    }
    // Even if nothing is masked: a fact can be from a header that is not in the index, and that would be.
    mask_facts(mask, Facts::read(&headers), whole);
}

/// Replaces fields that come from headers by those of the masked headers.
fn mask_facts(mask: &Mask<'_>, facts: Facts, whole: &mut v1::DeadLetter) {
    // Only in the FULL view.
    if !whole.error_response.is_empty() && whole.error_response != facts.error_response {
        add(whole, "error_response");
        whole.error_response.clone_from(&facts.error_response);
    }
    // Masked in part.
    for (field, is_masked) in [
        ("error_code", whole.error_code != facts.error_code),
        ("error_message", whole.error_message != facts.error_message),
    ] {
        if is_masked {
            add(whole, field);
        }
    }
    for (field, fact) in [
        ("pipeline", Field::Pipeline),
        ("error_class", Field::ErrorClass),
        ("error_code", Field::ErrorCode),
        ("error_message", Field::ErrorMessage),
        ("failed_at", Field::FailedAt),
        ("retry_count", Field::RetryCount),
        ("origin", Field::OriginTopic),
        ("origin", Field::OriginPartition),
        ("origin", Field::OriginOffset),
        ("origin_timestamp", Field::OriginTimestamp),
    ] {
        if mask.hides(Fact::Of(fact)) {
            add(whole, field);
        }
    }
    for (field, fact) in [("trace_id", Fact::TraceId), ("job_id", Fact::JobId)] {
        if mask.hides(fact) {
            add(whole, field);
        }
    }
    set_facts(facts, whole);
}

fn set_facts(facts: Facts, whole: &mut v1::DeadLetter) {
    whole.pipeline = facts.pipeline;
    whole.error_class = facts.error_class;
    whole.error_code = facts.error_code;
    whole.error_message = facts.error_message;
    whole.failed_at = facts.failed_at.and_then(time_of_record);
    whole.retry_count = facts.retry_count;
    whole.origin = facts.origin.map(|origin| v1::Position {
        topic: origin.topic,
        partition: origin.partition.unwrap_or(-1),
        offset: origin.offset.unwrap_or(-1),
    });
    whole.origin_timestamp = facts.origin_timestamp.and_then(time_of_record);
    whole.trace_id = facts.trace_id.unwrap_or_default();
    whole.job_id = facts.job_id.unwrap_or_default();
}

/// Says that a field is masked.
pub(super) fn add(whole: &mut v1::DeadLetter, field: &str) {
    let fields = &mut whole.masked.get_or_insert_default().fields;
    if !fields.iter().any(|masked| masked == field) {
        fields.push(field.to_owned());
    }
}

/// Without key, value, headers, the response of the endpoint, and the hash of the content: a guess could be compared with it.
fn without_payload(whole: v1::DeadLetter) -> v1::DeadLetter {
    let masked = whole.masked.map(|masked| {
        let is_payload = |field: &String| {
            let payload = [
                "key",
                "value",
                "headers",
                "decoded",
                "content_hash",
                "error_response",
            ];
            payload.contains(&field.as_str())
        };
        let fields = masked.fields.into_iter().filter(|field| !is_payload(field));
        v1::Masked {
            fields: fields.collect(),
            headers: Vec::new(),
            paths: Vec::new(),
        }
    });
    v1::DeadLetter {
        key: None,
        key_truncated: false,
        value: None,
        value_truncated: false,
        headers: Vec::new(),
        headers_truncated: false,
        decoded: None,
        error_response: String::new(),
        unreadable_headers: 0,
        content_hash: Bytes::new(),
        payload_withheld: v1::PayloadWithheld::NoPermission.into(),
        masked: masked.filter(|masked| !masked.fields.is_empty()),
        ..whole
    }
}

fn whole_basic(letter: &IndexedLetter, are_states_known: bool) -> v1::DeadLetter {
    let (key, key_truncated) = match &letter.key {
        Some(key) if key.len() > MAX_KEY => (Some(key.slice(..MAX_KEY)), true),
        key => (key.clone(), false),
    };
    let mut whole = v1::DeadLetter {
        id: letter.id.to_string(),
        position: Some((&letter.id).into()),
        dead_at: time_of_record(letter.dead_at),
        state: if are_states_known { letter.state as i32 } else { 0 },
        dialect: letter.facts.dialect as i32,
        key,
        key_truncated,
        value_size: letter.value_size,
        group: letter.group.to_string(),
        state_time: letter.entry.time.and_then(time_of_record),
        state_by: letter.entry.by.clone(),
        state_reason: letter.entry.reason.clone(),
        content_hash: Bytes::copy_from_slice(&letter.content),
        ..v1::DeadLetter::default()
    };
    set_facts(letter.facts.clone(), &mut whole);
    whole
}

/// With headers, and without the value.
fn whole_full(letter: &IndexedLetter, stored: &StoredRecord, are_states_known: bool) -> v1::DeadLetter {
    let timestamp_type = match stored.timestamp_type {
        None => v1::TimestampType::None,
        Some(TimestampType::CreateTime) => v1::TimestampType::CreateTime,
        Some(TimestampType::LogAppendTime) => v1::TimestampType::LogAppendTime,
    };
    v1::DeadLetter {
        timestamp_type: timestamp_type.into(),
        key: stored.record.key.clone(),
        key_truncated: false,
        headers: to_headers(&stored.record.headers),
        error_response: Facts::read(&stored.record.headers).error_response,
        unreadable_headers: u32::try_from(stored.record.unreadable_headers).unwrap_or(u32::MAX),
        ..whole_basic(letter, are_states_known)
    }
}

#[cfg(test)]
mod tests {
    use prost_reflect::{DescriptorPool, DynamicMessage};
    use redeliver_core::{Headers, Record, Timestamp};
    use redeliver_proto::convert::from_timestamp;
    use redeliver_testkit::record_at;

    use super::*;
    use crate::index::{self, Change, Index};
    use crate::letter::Letter;
    use crate::masking::Masking;

    /// A message must be one that clients with default limits can read, and have a form in JSON.
    fn assert_readable(message: &v1::DeadLetter) {
        let bytes = message.encode_to_vec();
        assert!(bytes.len() < 3 << 20, "{} bytes", bytes.len());
        let pool = DescriptorPool::decode(redeliver_proto::DESCRIPTORS).unwrap();
        let descriptor = pool.get_message_by_name("redeliver.v1.DeadLetter").unwrap();
        let dynamic = DynamicMessage::decode(descriptor, &*bytes).unwrap();
        serde_json::to_string(&dynamic).unwrap();
        for time in [
            message.dead_at,
            message.failed_at,
            message.origin_timestamp,
            message.state_time,
        ] {
            assert!(
                time.is_none_or(|time| from_timestamp(&time).is_some()),
                "{time:?}"
            );
        }
    }

    /// A dead letter as the index has it.
    fn indexed(record: &Record) -> IndexedLetter {
        let directory = tempfile::tempdir().unwrap();
        let mut index = Index::open(directory.path(), &[]).unwrap();
        let changes = [Change::Letters(vec![Letter::read(record)])];
        index.writer.write(&changes, Timestamp::from_millis(1)).unwrap();
        let id = record.position.clone();
        let found = index.pool.read_blocking(|connection| index::get(connection, &id));
        found.unwrap().unwrap()
    }

    #[test]
    fn extreme_dead_letters_stay_readable() {
        let large = vec![0xff; 5 << 20];
        let many: Vec<(&str, Option<&[u8]>)> = vec![("h", None); 1 << 20];
        for millis in [
            i64::MIN,
            -1,
            0,
            253_402_300_800_000,
            1_790_000_000_000_000,
            i64::MAX,
        ] {
            let binary = millis.to_be_bytes();
            let text = millis.to_string();
            let headers: [(&str, Option<&[u8]>); 8] = [
                ("kafka_dlt-original-topic", Some(b"o")),
                ("kafka_dlt-original-partition", Some(&binary)),
                ("kafka_dlt-original-offset", Some(&binary)),
                ("kafka_dlt-original-timestamp", Some(&binary)),
                ("retry_topic-attempts", Some(&binary)),
                ("kafka_dlt-exception-message", Some(&large[..1 << 10])),
                ("error-timestamp", Some(text.as_bytes())),
                ("retry-count", Some(text.as_bytes())),
            ];
            for (more, key) in [
                (&[][..], None),
                (
                    &[("stack", Some(&large[..])), ("tenant", Some(b"a"))],
                    Some(&large),
                ),
                (&many, Some(&large)),
            ] {
                // Opening an index takes longer than the rest.
                if !more.is_empty() && millis != i64::MAX {
                    continue;
                }
                let record = Record {
                    timestamp: Some(Timestamp::from_millis(millis)),
                    key: key.map(|key| Bytes::copy_from_slice(key)),
                    headers: headers.into_iter().chain(more.iter().copied()).collect(),
                    unreadable_headers: usize::MAX,
                    ..record_at("a-dlq", i32::MAX, i64::MAX - 1)
                };
                let letter = indexed(&record);
                let stored = StoredRecord {
                    record,
                    timestamp_type: Some(TimestampType::CreateTime),
                };
                let mut whole = whole_full(&letter, &stored, true);
                truncate(&mut whole);
                assert_readable(&whole);
                assert_eq!(whole.headers_truncated, !more.is_empty());
                assert_eq!(whole.key_truncated, key.is_some());
                assert!(whole.headers.len() >= headers.len());
                let mut basic = whole_basic(&letter, false);
                truncate(&mut basic);
                assert_readable(&basic);
            }
        }
    }

    #[test]
    fn unindexed_headers_stay_masked() {
        let message = format!("no mail to bob@example.org {}", "x".repeat(66_000));
        let headers = [
            ("kafka_dlt-original-topic", &b"o"[..]),
            ("kafka_dlt-exception-message", message.as_bytes()),
        ];
        let record = Record {
            headers: headers
                .iter()
                .map(|(name, value)| (*name, Some(*value)))
                .collect(),
            ..record_at("a-dlq", 0, 1)
        };
        let letter = indexed(&record);
        for rule in [
            r#"{ "topics": ["*"], "messages": ["\\S+@\\S+"] }"#,
            r#"{ "topics": ["*"], "headers": ["kafka_dlt-exception-message"] }"#,
        ] {
            let masking = Masking::new(&[serde_json::from_str(rule).unwrap()]);
            let mut whole = whole_basic(&letter, true);
            assert!(whole.error_message.contains("bob@"), "{whole:?}");
            mask(
                &masking.of("a-dlq"),
                header_list::iter(&letter.headers),
                &mut whole,
            );
            assert!(!whole.error_message.contains("bob@"), "{whole:?}");
            assert!(whole.masked.unwrap().fields.contains(&"error_message".to_owned()));
        }
    }

    #[test]
    fn response_is_payload() {
        let headers = [
            ("error-class", &b"permanent"[..]),
            ("error-response", br#"{"error":"no mail to bob@example.org"}"#),
        ];
        let record = Record {
            headers: headers
                .map(|(name, value)| (name, Some(value)))
                .into_iter()
                .collect(),
            ..record_at("a-dlq", 0, 1)
        };
        let letter = indexed(&record);
        assert_eq!(whole_basic(&letter, true).error_response, "");
        let stored = StoredRecord {
            record,
            timestamp_type: None,
        };
        let whole = whole_full(&letter, &stored, true);
        assert_eq!(whole.error_response.as_bytes(), headers[1].1);
        assert_eq!(without_payload(whole.clone()).error_response, "");
        for (rule, expected) in [
            (
                r#"{ "topics": ["*"], "messages": ["[a-z]+@[a-z.]+"] }"#,
                r#"{"error":"no mail to <masked>"}"#,
            ),
            (
                r#"{ "topics": ["*"], "headers": ["error-response"] }"#,
                "<masked>",
            ),
            // It can repeat the record.
            (r#"{ "topics": ["*"], "key": true }"#, "<masked>"),
        ] {
            let masking = Masking::new(&[serde_json::from_str(rule).unwrap()]);
            let mut masked = whole.clone();
            mask(&masking.of("a-dlq"), stored.record.headers.iter(), &mut masked);
            assert_eq!(masked.error_response, expected);
            let fields = masked.masked.unwrap().fields;
            assert!(fields.contains(&"error_response".to_owned()), "{fields:?}");
        }
    }

    #[test]
    fn unreadable_headers_are_counted() {
        let record = Record {
            headers: [("tenant", Some(&b"x"[..]))].into_iter().collect::<Headers>(),
            unreadable_headers: 2,
            ..record_at("a-dlq", 0, 1)
        };
        let letter = indexed(&record);
        let stored = StoredRecord {
            record,
            timestamp_type: None,
        };
        let whole = whole_full(&letter, &stored, true);
        // Not the same as a timestamp that is unknown.
        assert_eq!(whole.timestamp_type(), v1::TimestampType::None);
        assert_eq!((whole.headers.len(), whole.unreadable_headers), (1, 2));
        assert_eq!(whole.state(), v1::DeadLetterState::Open);
        assert_eq!(
            whole_basic(&letter, false).state(),
            v1::DeadLetterState::Unspecified
        );
        let metadata = without_payload(whole.clone());
        assert_eq!(metadata.payload_withheld(), v1::PayloadWithheld::NoPermission);
        assert!(metadata.headers.is_empty() && metadata.content_hash.is_empty());
        assert_eq!((metadata.id, metadata.state), (whole.id, whole.state));
    }
}
