//! The ledger: a compacted topic with the states of dead letters, keyed by their ids.
//!
//! Dead letters themselves are never changed. A tool that redrives or discards a dead letter writes an entry here, and
//! the index joins it with the dead letter.

use redeliver_core::{Position, Record, Timestamp};
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::{Message as _, v1};

use crate::id::parse_id;
use crate::letter::{ContentHash, HASH_BYTES};

/// The name of the ledger topic.
pub const TOPIC: &str = "redeliver.dlq.ledger";

/// The state of a dead letter. The index and the protocol store these numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing yet.
    #[default]
    Open = 1,
    /// It was sent back to its pipeline.
    Redriven = 2,
    /// It was discarded.
    Discarded = 3,
}

impl State {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Open, Self::Redriven, Self::Discarded];

    /// The name in filters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "OPEN",
            Self::Redriven => "REDRIVEN",
            Self::Discarded => "DISCARDED",
        }
    }

    /// The state with this number.
    #[must_use]
    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as i64 == number)
    }
}

/// The state of a dead letter, and who set it, when and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerEntry {
    /// The state.
    pub state: State,
    /// When it was set; `None` if unknown.
    pub time: Option<Timestamp>,
    /// Who set it.
    pub by: String,
    /// Why.
    pub reason: String,
    /// The hash of the record that the entry applies to; `None` for any record that is not certainly younger.
    pub content: Option<ContentHash>,
}

/// By how much the timestamp of a record may be ahead of the time at which it was written: Kafka refuses more, unless a topic allows it.
const MAX_AHEAD: i64 = 3_600_000;

/// Whether an entry with this hash, written at this time, applies to the dead letter with this content and timestamp at its position.
///
/// An entry with a hash applies to the record with that hash. One without a hash applies unless the dead letter is certainly younger: then it is about an earlier
/// record at this position, before the topic was deleted and created again. What is unknown does not make it so, because a dead letter must not be redriven twice.
pub(crate) fn applies(
    (hash, written): (Option<&ContentHash>, Option<Timestamp>),
    (content, dead_at): (&ContentHash, Option<Timestamp>),
) -> bool {
    let is_younger = |(dead_at, written): (Timestamp, Timestamp)| {
        dead_at.as_millis() > written.as_millis().saturating_add(MAX_AHEAD)
    };
    hash.map_or(!dead_at.zip(written).is_some_and(is_younger), |hash| {
        hash == content
    })
}

/// A record of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// The dead letter.
    pub id: Position,
    /// Its new entry; `None` sets it back to open.
    pub entry: Option<LedgerEntry>,
    /// Which of two entries counts.
    pub version: Version,
}

/// Decides which of two records of the ledger about the same dead letter counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// The partition of the ledger.
    pub partition: i32,
    /// The offset of the record.
    pub offset: i64,
    /// The timestamp of the record.
    pub time: Option<Timestamp>,
    /// Whether it closes the dead letter.
    pub closes: bool,
}

impl Version {
    /// That of a record after which a dead letter is in this state.
    #[must_use]
    pub fn of(record: &Record, state: State) -> Self {
        Self {
            partition: record.position.partition,
            offset: record.position.offset,
            time: record.timestamp,
            closes: state != State::Open,
        }
    }

    /// Whether this record was written after another one, or is the same. Once the ledger has got more partitions, records about one dead letter can be in two
    /// of them, which are read in any order. Of two in the same millisecond, one that closes the dead letter counts: it must not be redriven twice.
    #[must_use]
    pub fn is_after(&self, other: &Self) -> bool {
        if self.partition == other.partition {
            return self.offset >= other.offset;
        }
        (self.time, self.closes) >= (other.time, other.closes)
    }
}

/// Why a record of the ledger is invalid. Such a record is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEntry {
    /// The key is not the id of a dead letter.
    #[error("key is not topic/partition/offset")]
    Key,
    /// The value is not a `redeliver.v1.LedgerEntry`.
    #[error("value is not a redeliver.v1.LedgerEntry")]
    Value,
    /// The state is unknown.
    #[error("state is not OPEN, REDRIVEN or DISCARDED")]
    State,
    /// The hash has the wrong length.
    #[error("content_hash does not have {HASH_BYTES} bytes")]
    Hash,
}

impl Update {
    /// Parses a record of the ledger.
    ///
    /// # Errors
    /// If its key or value is invalid.
    pub fn read(record: &Record) -> Result<Self, InvalidEntry> {
        let (id, entry) = decode(record)?;
        let entry = entry.map(LedgerEntry::read).transpose()?;
        let state = entry.as_ref().map_or(State::Open, |entry| entry.state);
        Ok(Self {
            id,
            entry,
            version: Version::of(record, state),
        })
    }
}

impl LedgerEntry {
    /// Checks a value of the ledger.
    ///
    /// # Errors
    /// If its state or its hash is invalid.
    pub(crate) fn read(entry: v1::LedgerEntry) -> Result<Self, InvalidEntry> {
        let state = State::from_number(entry.state.into()).ok_or(InvalidEntry::State)?;
        let content = match &*entry.content_hash {
            [] => None,
            bytes => Some(ContentHash::try_from(bytes).map_err(|_| InvalidEntry::Hash)?),
        };
        Ok(Self {
            state,
            time: entry.time.as_ref().and_then(from_timestamp),
            by: entry.by,
            reason: entry.reason,
            content,
        })
    }
}

/// The dead letter that a record of the ledger is about, and its value, which is not checked yet; `None` for a null value.
///
/// # Errors
/// If the key is invalid, or the value is not of the ledger.
pub(crate) fn decode(record: &Record) -> Result<(Position, Option<v1::LedgerEntry>), InvalidEntry> {
    let id = key(record).ok_or(InvalidEntry::Key)?;
    let value = record.value.clone().map(v1::LedgerEntry::decode).transpose();
    Ok((id, value.map_err(|_| InvalidEntry::Value)?))
}

fn key(record: &Record) -> Option<Position> {
    parse_id(std::str::from_utf8(record.key.as_deref()?).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_proto::convert::to_timestamp;
    use redeliver_testkit::record_at;

    use super::*;

    fn record(key: &str, value: Option<Vec<u8>>) -> Record {
        Record {
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value: value.map(Bytes::from),
            ..record_at(TOPIC, 0, 0)
        }
    }

    #[test]
    fn entry_has_all_fields() {
        let written = v1::LedgerEntry {
            state: v1::DeadLetterState::Discarded.into(),
            time: Some(to_timestamp(Timestamp::from_millis(5))),
            by: "ann".into(),
            reason: "test data".into(),
            content_hash: vec![7; HASH_BYTES].into(),
            ..v1::LedgerEntry::default()
        };
        let update = Update::read(&record("t-dlq/1/2", Some(written.encode_to_vec()))).unwrap();
        assert_eq!(update.id.to_string(), "t-dlq/1/2");
        let expected = LedgerEntry {
            state: State::Discarded,
            time: Some(Timestamp::from_millis(5)),
            by: "ann".into(),
            reason: "test data".into(),
            content: Some([7; HASH_BYTES]),
        };
        assert_eq!(update.entry, Some(expected));
        assert_eq!(Update::read(&record("t-dlq/1/2", None)).unwrap().entry, None);
    }

    #[test]
    fn newest_entry_counts_across_partitions() {
        let version = |partition, offset, millis, closes| Version {
            partition,
            offset,
            time: Some(Timestamp::from_millis(millis)),
            closes,
        };
        // In a partition, the offset decides, and otherwise the time.
        assert!(version(0, 5, 1, false).is_after(&version(0, 4, 9, true)));
        assert!(version(1, 0, 9, false).is_after(&version(0, 4, 8, true)));
        assert!(!version(1, 0, 7, true).is_after(&version(0, 4, 8, false)));
        // At the same time, it is closed.
        assert!(version(1, 0, 8, true).is_after(&version(0, 4, 8, false)));
        assert!(!version(0, 4, 8, false).is_after(&version(1, 0, 8, true)));
        // One without a time is older.
        let unknown = Version {
            time: None,
            ..version(1, 9, 0, true)
        };
        assert!(version(0, 4, 8, false).is_after(&unknown));
    }

    #[test]
    fn invalid_entry_is_refused_with_field() {
        let with =
            |key: &str, entry: v1::LedgerEntry| Update::read(&record(key, Some(entry.encode_to_vec())));
        let open = v1::LedgerEntry {
            state: 1,
            ..v1::LedgerEntry::default()
        };
        assert!(with("t/1/2", open.clone()).is_ok());
        assert_eq!(with("t-1-2", open.clone()), Err(InvalidEntry::Key));
        assert_eq!(
            with("t/1/2", v1::LedgerEntry::default()),
            Err(InvalidEntry::State)
        );
        let short = v1::LedgerEntry {
            content_hash: vec![1].into(),
            ..open
        };
        assert_eq!(with("t/1/2", short), Err(InvalidEntry::Hash));
        assert_eq!(
            Update::read(&record("t/1/2", Some(vec![0xff]))),
            Err(InvalidEntry::Value)
        );
    }

    #[test]
    fn states_and_dialects_match_the_schema() {
        for state in State::ALL {
            let number = i32::try_from(state as i64).unwrap();
            let wire = v1::DeadLetterState::try_from(number).unwrap();
            assert_eq!(wire.as_str_name(), format!("DEAD_LETTER_STATE_{}", state.name()));
        }
        for dialect in crate::dialect::Dialect::KNOWN {
            let wire = v1::HeaderDialect::try_from(dialect as i32).unwrap();
            assert_eq!(wire.as_str_name(), format!("HEADER_DIALECT_{}", dialect.name()));
        }
    }
}
