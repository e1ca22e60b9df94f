//! The decision about a dead letter, from its entry in the ledger.

use std::collections::HashMap;

use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::{Position, Record, Timestamp};

use crate::ledger::{self, LedgerEntry, State, Version};
use crate::letter::ContentHash;

/// The maximum length of names in answers, in bytes: those of callers may contain an issuer.
const MAX_NAME: usize = 1_100;

/// An entry of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) state: State,
    pub(crate) time: Option<Timestamp>,
    pub(crate) by: String,
    pub(crate) reason: String,
    /// The job that has written it; empty if it was none.
    pub(crate) redrive_id: String,
    /// The topic to which the record was written; empty if that is not known.
    pub(crate) destination: String,
    /// Its edited parts.
    pub(crate) edited: Vec<String>,
}

/// The newest entries of some dead letters.
#[derive(Debug)]
pub(crate) struct Decisions {
    /// The dead letters, with the hashes of their contents and their timestamps.
    wanted: HashMap<Position, (ContentHash, Option<Timestamp>)>,
    /// `None`: the newest entry opens the dead letter, or is about another record.
    found: HashMap<Position, (Version, Option<Decision>)>,
}

impl Decisions {
    pub(crate) fn of(wanted: HashMap<Position, (ContentHash, Option<Timestamp>)>) -> Self {
        Self {
            wanted,
            found: HashMap::new(),
        }
    }

    /// Applies a record of the ledger. One that is invalid is ignored, as in the index.
    pub(crate) fn apply(&mut self, record: &Record) {
        let Ok((id, value)) = ledger::decode(record) else {
            return;
        };
        let Some((content, dead_at)) = self.wanted.get(&id) else {
            return;
        };
        let (state, decision) = match value {
            None => (State::Open, None),
            Some(value) => {
                let names = [&value.redrive_id, &value.destination].map(|name| bounded_text(name, MAX_NAME));
                let edited = edited(&value.edited);
                let Ok(entry) = LedgerEntry::read(value) else {
                    return;
                };
                // An entry of another record at this position replaces the previous one, and says nothing about this record.
                let written = (entry.content.as_ref(), record.timestamp);
                let applies = ledger::applies(written, (content, *dead_at));
                (entry.state, applies.then(|| decision(&entry, names, edited)))
            }
        };
        let version = Version::of(record, state);
        let is_older = |(known, _): &(Version, _)| !version.is_after(known);
        if !self.found.get(&id).is_some_and(is_older) {
            self.found.insert(id, (version, decision));
        }
    }

    /// What was found.
    pub(crate) fn finish(self) -> HashMap<Position, Decision> {
        let found = self.found.into_iter();
        found
            .filter_map(|(id, (_, decision))| Some((id, decision?)))
            .collect()
    }
}

/// Only the parts that a redrive writes.
fn edited(names: &[String]) -> Vec<String> {
    let is_part = |part: &&str| names.iter().any(|name| name == part);
    let parts = ["value", "key", "headers"].iter().filter(|part| is_part(part));
    parts.map(|part| (*part).to_owned()).collect()
}

fn decision(entry: &LedgerEntry, [redrive_id, destination]: [String; 2], edited: Vec<String>) -> Decision {
    Decision {
        state: entry.state,
        time: entry.time,
        by: bounded_text(&entry.by, MAX_NAME),
        reason: bounded_text(&entry.reason, MESSAGE_LIMIT),
        redrive_id,
        destination,
        edited,
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::{Message as _, v1};
    use redeliver_testkit::record_at;

    use super::*;

    fn id(offset: i64) -> Position {
        Position {
            topic: "p-dlq".into(),
            partition: 0,
            offset,
        }
    }

    fn entry(offset: i64, state: State, content: &[u8]) -> Record {
        let value = v1::LedgerEntry {
            state: state as i32,
            by: "ann".to_owned(),
            reason: "n".repeat(10 * MESSAGE_LIMIT),
            redrive_id: "0123456789abcdef".to_owned(),
            destination: "p-retry-due".to_owned(),
            content_hash: content.to_vec().into(),
            ..v1::LedgerEntry::default()
        };
        record(offset, Some(value.encode_to_vec()))
    }

    fn record(offset: i64, value: Option<Vec<u8>>) -> Record {
        Record {
            key: Some(id(offset).to_string().into_bytes().into()),
            value: value.map(Into::into),
            ..record_at(ledger::TOPIC, 0, 0)
        }
    }

    #[test]
    fn newest_entry_of_same_record_counts() {
        let found = |records: &[Record]| {
            let mut decisions = Decisions::of(HashMap::from([(
                id(1),
                ([7; 16], Some(Timestamp::from_millis(3_602_000))),
            )]));
            for record in records {
                decisions.apply(record);
            }
            decisions.finish().remove(&id(1))
        };
        assert_eq!(found(&[entry(2, State::Redriven, &[])]), None);
        let decision = found(&[entry(1, State::Redriven, &[7; 16])]).unwrap();
        assert_eq!(
            (decision.state, &*decision.by, &*decision.destination),
            (State::Redriven, "ann", "p-retry-due")
        );
        assert!(decision.reason.len() <= MESSAGE_LIMIT);
        let discarded = entry(1, State::Discarded, &[]);
        assert_eq!(
            found(&[entry(1, State::Redriven, &[]), discarded.clone()]).map(|decision| decision.state),
            Some(State::Discarded)
        );
        for newer in [record(1, None), entry(1, State::Redriven, &[8; 16])] {
            assert_eq!(found(&[discarded.clone(), newer]), None);
        }
        // Once the ledger has got more partitions, they are read in any order.
        let at = |entry: &Record, partition, millis| {
            let mut entry = entry.clone();
            entry.position.partition = partition;
            entry.timestamp = Some(Timestamp::from_millis(millis));
            entry
        };
        let redriven = at(&entry(1, State::Redriven, &[]), 1, 2_000);
        for older in [at(&discarded, 0, 1_000), at(&record(1, None), 0, 1_000)] {
            let decision = found(&[redriven.clone(), older]);
            assert_eq!(decision.map(|decision| decision.state), Some(State::Redriven));
        }
        assert_eq!(
            found(&[at(&record(1, None), 1, 2_000), at(&discarded, 0, 1_000)]),
            None
        );
        // It is certainly older than the record.
        assert_eq!(found(&[at(&discarded, 0, 1_999)]), None);
        // Invalid.
        for ignored in [record(1, Some(vec![0xff])), entry(1, State::Redriven, &[7])] {
            assert!(found(&[discarded.clone(), ignored]).is_some());
        }
    }
}
