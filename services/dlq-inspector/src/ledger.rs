//! What was done with dead letters: the ledger topic, compacted, keyed by the id of the dead letter.
//!
//! The dead letters themselves are never touched. The index joins both; whoever redrives or discards writes
//! here.

use redeliver_core::{Record, Timestamp};
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::{Message as _, v1};

use crate::id::LetterId;
use crate::letter::{ContentHash, HASH_BYTES};

/// The ledger topic.
pub const TOPIC: &str = "redeliver.dlq.ledger";

/// What was done with a dead letter. The numbers stand in the index and on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// It waits for somebody.
    #[default]
    Open = 1,
    /// It was sent to its pipeline again.
    Redriven = 2,
    /// It was given up.
    Discarded = 3,
}

impl State {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Open, Self::Redriven, Self::Discarded];

    /// As it is written in filters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "OPEN",
            Self::Redriven => "REDRIVEN",
            Self::Discarded => "DISCARDED",
        }
    }

    /// From its number.
    #[must_use]
    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as i64 == number)
    }
}

/// A state with who set it and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The state.
    pub state: State,
    /// When it was set.
    pub time: Option<Timestamp>,
    /// Who set it.
    pub by: String,
    /// Why.
    pub note: String,
    /// The content of the record that is meant; `None`: whichever stands there.
    pub content: Option<ContentHash>,
}

/// What one record of the ledger says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Of which dead letter.
    pub id: LetterId,
    /// Its state; `None` sets it back to open.
    pub entry: Option<Entry>,
}

/// A record in the ledger that cannot be understood. It changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEntry {
    /// The key names no dead letter.
    #[error("its key is not topic/partition/offset")]
    Key,
    /// The value is no `redeliver.v1.LedgerEntry`.
    #[error("its value is not a redeliver.v1.LedgerEntry")]
    Value,
    /// The state is none that is known.
    #[error("its state is not OPEN, REDRIVEN or DISCARDED")]
    State,
    /// The hash has a wrong length.
    #[error("its content_hash does not have {HASH_BYTES} bytes")]
    Hash,
}

impl Update {
    /// Reads a record of the ledger.
    ///
    /// # Errors
    /// When it cannot be understood.
    pub fn read(record: &Record) -> Result<Self, InvalidEntry> {
        let key = record
            .key
            .as_deref()
            .and_then(|key| std::str::from_utf8(key).ok());
        let id = key.and_then(|key| key.parse().ok()).ok_or(InvalidEntry::Key)?;
        let Some(value) = &record.value else {
            return Ok(Self { id, entry: None });
        };
        let entry = v1::LedgerEntry::decode(value.clone()).map_err(|_| InvalidEntry::Value)?;
        let state = State::from_number(entry.state.into()).ok_or(InvalidEntry::State)?;
        let content = match &*entry.content_hash {
            [] => None,
            bytes => Some(ContentHash::try_from(bytes).map_err(|_| InvalidEntry::Hash)?),
        };
        let entry = Entry {
            state,
            time: entry.time.as_ref().and_then(from_timestamp),
            by: entry.by,
            note: entry.note,
            content,
        };
        Ok(Self {
            id,
            entry: Some(entry),
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Position};
    use redeliver_proto::convert::to_timestamp;

    use super::*;

    fn record(key: &str, value: Option<Vec<u8>>) -> Record {
        Record {
            position: Position {
                topic: TOPIC.into(),
                partition: 0,
                offset: 0,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value: value.map(Bytes::from),
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    #[test]
    fn an_entry_says_what_was_done_by_whom_and_why() {
        let written = v1::LedgerEntry {
            state: v1::DeadLetterState::Discarded.into(),
            time: Some(to_timestamp(Timestamp::from_millis(5))),
            by: "ann".into(),
            note: "test data".into(),
            content_hash: vec![7; HASH_BYTES].into(),
        };
        let update = Update::read(&record("t-dlq/1/2", Some(written.encode_to_vec()))).unwrap();
        assert_eq!(update.id.to_string(), "t-dlq/1/2");
        let expected = Entry {
            state: State::Discarded,
            time: Some(Timestamp::from_millis(5)),
            by: "ann".into(),
            note: "test data".into(),
            content: Some([7; HASH_BYTES]),
        };
        assert_eq!(update.entry, Some(expected));
        assert_eq!(Update::read(&record("t-dlq/1/2", None)).unwrap().entry, None);
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
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
    fn the_numbers_are_those_of_the_schema() {
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
