//! A dead letter as it is indexed: everything but its value, which stays in Kafka, as does what a key or headers have beyond a limit.

use bytes::Bytes;
pub use redeliver_core::content::{ContentHash, HASH_BYTES};
use redeliver_core::headers::is_reserved;
use redeliver_core::{Headers, Position, Record, Timestamp, content, redrive};

use crate::dialect::{self, Facts};
use crate::fingerprint::GroupId;
use crate::header_list;
use crate::masking::Mask;

/// Longer keys are indexed in part, in bytes.
pub(crate) const MAX_KEY: usize = 64 << 10;
/// The maximum size of the headers that are indexed, in bytes. Those that say something about the failure, or about where the record belongs,
/// come first.
pub(crate) const MAX_HEADERS: usize = 64 << 10;
/// How much more memory than in their record headers take in a message.
const HEADER_OVERHEAD: usize = 4;

/// A record of a dead-letter topic.
#[derive(Clone, Debug)]
pub struct Letter {
    /// Its position in the dead-letter topic.
    pub position: Position,
    /// Its timestamp in the dead-letter topic.
    pub dead_at: Timestamp,
    /// What its headers say about the failure.
    pub facts: Facts,
    /// What they say without what `dlq_inspector.masking` masks, if that differs. Groups are made of it.
    pub masked_facts: Option<Facts>,
    /// The group of its failure.
    pub group: GroupId,
    /// The record's key, or its first bytes: one more than `MAX_KEY`.
    pub key: Option<Bytes>,
    /// The size of the value in bytes; `None` for a null value.
    pub value_size: Option<u64>,
    /// The memory that the whole record takes, about, in bytes.
    pub record_size: u64,
    /// The encoded headers that are indexed, see [`header_list`].
    pub headers: Vec<u8>,
    /// The configured fields of a JSON value, see [`crate::json_fields`]. [`Letter::read`] leaves them out.
    pub json_fields: Option<Vec<u8>>,
    /// The hash of the record.
    pub content: ContentHash,
}

impl Letter {
    /// Reads a record of a dead-letter topic. Every record is accepted, even with invalid headers.
    #[must_use]
    pub fn read(record: &Record) -> Self {
        Self::read_masked(record, &Mask::default())
    }

    /// Reads a record of a dead-letter topic with these masking rules. A group is made of what all callers see: its id is a hash, with which
    /// guesses could be compared, and its template is a part of the message.
    pub(crate) fn read_masked(record: &Record, mask: &Mask<'_>) -> Self {
        let facts = Facts::read(&record.headers);
        let masked_facts = mask.facts(record.headers.iter());
        Self {
            group: GroupId::of(&record.position.topic, masked_facts.as_ref().unwrap_or(&facts)),
            masked_facts,
            position: record.position.clone(),
            // Only records in message format 0 have no timestamp.
            dead_at: record.timestamp.unwrap_or(Timestamp::from_millis(0)),
            facts,
            key: record.key.as_ref().map(|key| match key.get(..=MAX_KEY) {
                // A slice would keep the whole record in memory.
                Some(beginning) => Bytes::copy_from_slice(beginning),
                None => key.clone(),
            }),
            value_size: record.value.as_ref().map(|value| value.len() as u64),
            record_size: record_size(record),
            headers: header_list::encode_some(&record.headers, MAX_HEADERS, rank),
            json_fields: None,
            content: content_hash(record),
        }
    }
}

fn record_size(record: &Record) -> u64 {
    let bytes = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len) as u64;
    bytes(&record.key) + bytes(&record.value) + headers_size(&record.headers)
}

/// The part of [`Letter::record_size`] for these headers.
pub(crate) fn headers_size(headers: &Headers) -> u64 {
    headers.byte_len().saturating_mul(HEADER_OVERHEAD) as u64
}

/// Those that decide what becomes of a dead letter come first, and of these, those that only Redeliver writes.
fn rank(header: &str) -> usize {
    if is_reserved(header) || redrive::is_of_redrives(header) {
        0
    } else if dialect::is_read(header) {
        1
    } else {
        2
    }
}

/// The hash of a record's content.
#[must_use]
pub fn content_hash(record: &Record) -> ContentHash {
    content::content_hash(
        record.timestamp,
        record.key.as_deref(),
        record.value.as_deref(),
        &record.headers,
    )
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::record_at;

    use super::*;
    use crate::masking::Masking;

    fn record(key: Option<&str>, value: Option<&str>, headers: &[(&str, Option<&[u8]>)]) -> Record {
        let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        Record {
            timestamp: Some(Timestamp::from_millis(1)),
            key: key.map(bytes),
            value: value.map(bytes),
            headers: headers.iter().copied().collect(),
            ..record_at("t-dlq", 0, 0)
        }
    }

    #[test]
    fn different_records_have_different_hashes() {
        let mut later = record(Some("a"), Some("b"), &[]);
        later.timestamp = Some(Timestamp::from_millis(2));
        let records = [
            record(Some("a"), Some("b"), &[]),
            later,
            record(Some("ab"), Some(""), &[]),
            record(Some("ab"), None, &[]),
            record(None, Some("ab"), &[]),
            record(Some("a"), Some("b"), &[("h", None)]),
            record(Some("a"), Some("b"), &[("h", Some(b""))]),
            record(Some("a"), Some("b"), &[("h", Some(b"")), ("h", Some(b""))]),
            record(Some("a"), Some("b"), &[("hh", Some(b""))]),
        ];
        let hashes: std::collections::HashSet<ContentHash> = records.iter().map(content_hash).collect();
        assert_eq!(hashes.len(), records.len());
        let mut moved = record(Some("a"), Some("b"), &[]);
        moved.position.offset = 9;
        assert_eq!(content_hash(&moved), content_hash(&records[0]));
    }

    #[test]
    fn group_ignores_masked_parts() {
        let rule = r#"{"topics":["t-dlq"],"messages":["[a-z]+@[a-z.]+"]}"#;
        let masking = Masking::new(&[serde_json::from_str(rule).unwrap()]);
        let letter = |message: &[u8]| {
            let headers = [
                ("error-class", Some(&b"permanent"[..])),
                ("error-message", Some(message)),
            ];
            Letter::read_masked(&record(None, None, &headers), &masking.of("t-dlq"))
        };
        let [bob, eve] = [&b"no mail to bob@example.com"[..], b"no mail to eve@example.org"].map(letter);
        assert_eq!(bob.group, eve.group);
        assert_eq!(bob.masked_facts.unwrap().error_message, "no mail to <masked>");
        // Callers who may see everything see and find the whole message.
        assert_eq!(bob.facts.error_message, "no mail to bob@example.com");
        assert_eq!(letter(b"refused").masked_facts, None);
    }

    #[test]
    fn large_record_is_indexed_in_part() {
        let (long, key) = ("x".repeat(1_000), "k".repeat(1 << 20));
        let names: Vec<String> = (0..1_000).map(|number| format!("h{number}")).collect();
        let mut headers: Vec<(&str, Option<&[u8]>)> = names
            .iter()
            .map(|name| (&**name, Some(long.as_bytes())))
            .collect();
        headers.push(("error-code", Some(b"last")));
        let large = record(Some(&key), Some("v"), &headers);
        let letter = Letter::read(&large);
        let indexed = header_list::decode(&letter.headers);
        assert!(letter.headers.len() <= MAX_HEADERS);
        assert_eq!(indexed.iter().next().unwrap().0, "h0");
        assert_eq!(Facts::read(&indexed), letter.facts);
        assert_eq!(letter.facts.error_code, "last");
        assert_eq!(letter.key.unwrap(), key.as_bytes()[..=MAX_KEY]);
        assert!(letter.record_size > 2 << 20);
        assert_eq!(letter.content, content_hash(&large));
    }

    #[test]
    fn a_null_value_has_no_size() {
        assert_eq!(Letter::read(&record(None, None, &[])).value_size, None);
        assert_eq!(Letter::read(&record(None, Some(""), &[])).value_size, Some(0));
        let letter = Letter::read(&record(None, None, &[("error-code", Some(b"x"))]));
        assert_eq!(letter.facts.error_code, "x");
        let headers: Headers = [("error-code", Some(&b"x"[..]))].into_iter().collect();
        assert_eq!(header_list::decode(&letter.headers), headers);
    }
}
