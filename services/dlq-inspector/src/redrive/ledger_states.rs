//! What the executor knows of the ledger: the state of each dead letter with an entry.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_core::{Position, Timestamp};

use super::job::Item;
use crate::ledger::{self, State, Update, Version};
use crate::letter::ContentHash;

/// The states of all dead letters with an entry.
#[derive(Debug, Default)]
pub(crate) struct LedgerStates {
    topics: HashMap<Arc<str>, u32>,
    /// By the number of the topic, the partition and the offset.
    entries: BTreeMap<(u32, i32, i64), KnownEntry>,
}

/// The newest entry of a dead letter.
#[derive(Clone, Copy, Debug)]
struct KnownEntry {
    /// `None`: a record without a value, which opens the dead letter.
    state: Option<State>,
    content: Option<ContentHash>,
    version: Version,
}

/// An entry to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Removed {
    /// The dead letter.
    pub(crate) id: Position,
    /// The partition of the ledger that has the entry. Since it was written, the ledger may have got more partitions.
    pub(crate) partition: i32,
}

impl LedgerStates {
    pub(crate) fn apply(&mut self, update: Update) {
        let count = u32::try_from(self.topics.len()).unwrap_or(u32::MAX);
        let topic = *self.topics.entry(update.id.topic).or_insert(count);
        let key = (topic, update.id.partition, update.id.offset);
        let entry = KnownEntry {
            state: update.entry.as_ref().map(|entry| entry.state),
            content: update.entry.and_then(|entry| entry.content),
            version: update.version,
        };
        let is_older = |known: &KnownEntry| !entry.version.is_after(&known.version);
        if !self.entries.get(&key).is_some_and(is_older) {
            self.entries.insert(key, entry);
        }
    }

    fn get(&self, id: &Position) -> Option<&KnownEntry> {
        let topic = self.topics.get(&id.topic)?;
        self.entries.get(&(*topic, id.partition, id.offset))
    }

    /// The state of a dead letter with this timestamp, if it is known. An entry of another record at its position does not count.
    pub(crate) fn state(&self, item: &Item, dead_at: Option<Timestamp>) -> State {
        let applies = |known: &&KnownEntry| {
            let entry = (known.content.as_ref(), known.version.time);
            ledger::applies(entry, (&item.content, dead_at))
        };
        let known = self.get(&item.id).filter(applies);
        known.and_then(|known| known.state).unwrap_or_default()
    }

    /// Whether the state of a dead letter depends on its timestamp.
    pub(crate) fn needs_time(&self, id: &Position) -> bool {
        let lacks_hash = |known: &KnownEntry| known.state.is_some() && known.content.is_none();
        self.get(id).is_some_and(lacks_hash)
    }

    /// At most `limit` entries to remove: those of dead letters below an offset of their partition, as `below` tells, that were written by a time. An entry that
    /// is younger can be about a record of a topic that was created again, which `below` does not know yet. Forgets what has no value there.
    pub(crate) fn removable(
        &mut self,
        below: impl Fn(&str, i32) -> i64,
        written_by: Timestamp,
        limit: usize,
    ) -> Vec<Removed> {
        let mut removable = Vec::new();
        let topics: Vec<(Arc<str>, u32)> = self.topics.iter().map(|(name, id)| (name.clone(), *id)).collect();
        for (name, topic) in topics {
            let mut from = (topic, i32::MIN, i64::MIN);
            while let Some((&(_, partition, _), _)) =
                self.entries.range(from..=(topic, i32::MAX, i64::MAX)).next()
            {
                self.of_partition(
                    (&name, topic, partition),
                    below(&name, partition),
                    written_by,
                    limit,
                    &mut removable,
                );
                if removable.len() >= limit {
                    return removable;
                }
                let Some(next) = partition.checked_add(1) else {
                    break;
                };
                from = (topic, next, i64::MIN);
            }
        }
        removable
    }

    fn of_partition(
        &mut self,
        (name, topic, partition): (&str, u32, i32),
        below: i64,
        written_by: Timestamp,
        limit: usize,
        removable: &mut Vec<Removed>,
    ) {
        let mut without_value = Vec::new();
        let gone = (topic, partition, i64::MIN)..(topic, partition, below);
        for (key, entry) in self.entries.range(gone) {
            if removable.len() >= limit {
                break;
            }
            if entry.version.time.is_none_or(|time| time > written_by) {
                continue;
            }
            if entry.state.is_none() {
                without_value.push(*key);
                continue;
            }
            removable.push(Removed {
                id: Position {
                    topic: name.into(),
                    partition,
                    offset: key.2,
                },
                partition: entry.version.partition,
            });
        }
        for key in without_value {
            self.entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::item;
    use super::*;
    use crate::ledger::LedgerEntry;

    fn update(offset: i64, state: Option<State>, content: Option<ContentHash>, version: Version) -> Update {
        Update {
            id: item("a-dlq", offset).id,
            entry: state.map(|state| LedgerEntry {
                state,
                content,
                ..LedgerEntry::default()
            }),
            version: Version {
                closes: state.is_some_and(|state| state != State::Open),
                ..version
            },
        }
    }

    fn at(partition: i32, offset: i64, millis: i64) -> Version {
        Version {
            partition,
            offset,
            time: Some(Timestamp::from_millis(millis)),
            closes: false,
        }
    }

    #[test]
    fn newest_entry_of_same_record_counts() {
        let mut states = LedgerStates::default();
        let planned = item("a-dlq", 1);
        let mut end = 0;
        let mut apply = |offset, state: Option<State>, content| {
            end += 1;
            states.apply(update(offset, state, content, at(0, end, 0)));
            states.state(&planned, None)
        };
        assert_eq!(apply(2, Some(State::Redriven), None), State::Open);
        assert_eq!(apply(1, Some(State::Discarded), None), State::Discarded);
        assert_eq!(apply(1, Some(State::Redriven), Some([9; 16])), State::Open);
        assert_eq!(
            apply(1, Some(State::Redriven), Some(planned.content)),
            State::Redriven
        );
        assert_eq!(apply(1, None, None), State::Open);
    }

    /// The offsets and partitions of the ledger of what is removable, below offset 10 of `a-dlq`, written by 1,000.
    fn removable(states: &mut LedgerStates, limit: usize) -> Vec<(String, i32)> {
        let below = |topic: &str, partition| if (topic, partition) == ("a-dlq", 0) { 10 } else { 0 };
        let removable = states.removable(below, Timestamp::from_millis(1_000), limit);
        let removable = removable.into_iter();
        removable
            .map(|removed| (removed.id.to_string(), removed.partition))
            .collect()
    }

    #[test]
    fn old_entries_are_removable() {
        let mut states = LedgerStates::default();
        let redriven = Some(State::Redriven);
        let id = item("a-dlq", 0).id;
        assert_eq!((&*id.topic, id.partition), ("a-dlq", 0));
        states.apply(update(0, redriven, None, at(0, 0, 1)));
        states.apply(update(9, redriven, None, at(2, 0, 1_000)));
        states.apply(update(8, Some(State::Discarded), None, at(0, 1, 1)));
        states.apply(update(7, Some(State::Open), None, at(0, 2, 1)));
        // Too young, of an unknown age, not gone, in another partition, and in another topic.
        states.apply(update(6, redriven, None, at(0, 3, 1_001)));
        states.apply(update(
            5,
            redriven,
            None,
            Version {
                time: None,
                ..at(0, 4, 0)
            },
        ));
        states.apply(update(10, redriven, None, at(0, 5, 1)));
        for (offset, of) in [(6, ("a-dlq", 1)), (7, ("b-dlq", 0))] {
            let mut other = update(1, redriven, None, at(0, offset, 1));
            (other.id.topic, other.id.partition) = (of.0.into(), of.1);
            states.apply(other);
        }
        let all = [
            ("a-dlq/0/0", 0),
            ("a-dlq/0/7", 0),
            ("a-dlq/0/8", 0),
            ("a-dlq/0/9", 2),
        ];
        let all = all.map(|(id, partition)| (id.to_owned(), partition));
        assert_eq!(removable(&mut states, 100), all);
        assert_eq!(removable(&mut states, 3), all[..3]);
        assert_eq!(states.entries.len(), 9);
    }

    #[test]
    fn old_tombstones_are_forgotten() {
        let mut states = LedgerStates::default();
        states.apply(update(1, Some(State::Redriven), None, at(0, 1, 1)));
        states.apply(update(1, None, None, at(0, 2, 1_001)));
        assert!(removable(&mut states, 100).is_empty());
        assert_eq!(states.entries.len(), 1);
        states.apply(update(1, None, None, at(0, 3, 1_000)));
        // The dead letter is restored, and is not gone.
        states.apply(update(10, None, None, at(0, 4, 1)));
        assert!(removable(&mut states, 100).is_empty());
        assert_eq!(states.entries.len(), 1);
    }
}
