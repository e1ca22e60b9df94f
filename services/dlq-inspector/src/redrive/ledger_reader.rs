//! Reads the ledger to its end.

use std::sync::Arc;
use std::time::Duration;

use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{KafkaSettings, TopicId};

use super::ledger_states::LedgerStates;
use crate::ledger::{self, Update};

/// How long reading it from its beginning may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long reading what is new may take.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// The reader, and what it has read. All calls block.
#[derive(Default)]
pub(super) struct LedgerReader {
    states: LedgerStates,
    /// Has read the ledger to its end; `None` before that.
    reader: Option<TopicReader>,
    partitions: LedgerPartitions,
}

impl LedgerReader {
    /// What was read last.
    pub(super) fn states(&self) -> &LedgerStates {
        &self.states
    }

    /// Whether the states are those of the ledger: not after reading it again has failed.
    pub(super) fn is_loaded(&self) -> bool {
        self.reader.is_some()
    }

    /// Reads all of it.
    pub(super) fn load(&mut self, kafka: &KafkaSettings) -> Result<(), ReadError> {
        // The memory of what was read is needed again.
        (self.states, self.reader) = (LedgerStates::default(), None);
        let topic: Arc<str> = ledger::TOPIC.into();
        let mut reader = TopicReader::new(kafka, std::slice::from_ref(&topic))?;
        let id = reader.topics().known_id(ledger::TOPIC);
        reader.expect_partitions(&topic, self.partitions.expected(id));
        reader.expect_id(ledger::TOPIC, id);
        let mut states = LedgerStates::default();
        read(&mut reader, &mut states, LOAD_TIMEOUT)?;
        self.partitions.loaded(id, reader.partitions(ledger::TOPIC));
        (self.states, self.reader) = (states, Some(reader));
        Ok(())
    }

    /// Reads what it has got since, or all of it if it was created again: what the previous topic had says nothing about what this one has.
    pub(super) fn read_on(&mut self, kafka: &KafkaSettings) -> Result<&mut LedgerStates, ReadError> {
        match &mut self.reader {
            Some(reader) if !is_other(reader) => {
                // The last step may have written to a new partition.
                reader.follow_partitions()?;
                self.partitions.followed(reader.partitions(ledger::TOPIC));
                read(reader, &mut self.states, READ_TIMEOUT)?;
            }
            _ => self.load(kafka)?,
        }
        Ok(&mut self.states)
    }
}

/// Whether the ledger is or may be another topic than the one that was read. An id that was unknown can be that of another one.
fn is_other(reader: &TopicReader) -> bool {
    let known = reader.expected_id(ledger::TOPIC);
    let id = reader.topics().known_id(ledger::TOPIC);
    let is_other = id.is_some() && id != known;
    if is_other && known.is_some() {
        tracing::warn!("the ledger was deleted and created again; reading it from the beginning");
    }
    is_other
}

fn read(reader: &mut TopicReader, states: &mut LedgerStates, timeout: Duration) -> Result<(), ReadError> {
    reader.read_to_end(timeout, |record| {
        // An invalid entry is ignored, as the index does.
        if let Ok(update) = Update::read(&record) {
            states.apply(update);
        }
    })
}

/// How many partitions of the ledger the process knows. None goes away, but a broker with old metadata may know fewer.
#[derive(Debug, Default)]
struct LedgerPartitions {
    count: i32,
    /// The topic that has them; `None` if its id is unknown.
    topic: Option<TopicId>,
}

impl LedgerPartitions {
    /// The number of partitions that this topic has at least. Only one that was created again can have fewer than before.
    fn expected(&self, topic: Option<TopicId>) -> i32 {
        let ids = self.topic.zip(topic);
        if ids.is_some_and(|(known, topic)| known != topic) {
            0
        } else {
            self.count
        }
    }

    /// Takes note of the partitions of the topic that was read.
    fn loaded(&mut self, topic: Option<TopicId>, count: i32) {
        *self = Self {
            count: count.max(self.expected(topic)),
            topic: topic.or(self.topic),
        };
    }

    /// Takes note of the partitions of the same topic.
    fn followed(&mut self, count: i32) {
        self.count = self.count.max(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_partitions_are_kept() {
        let [first, again] = [1, 2].map(|bits| Some(TopicId::from_bits(bits)));
        let mut known = LedgerPartitions::default();
        known.loaded(first, 2);
        known.followed(3);
        // Loading it fails, several times.
        for _ in 0..2 {
            assert_eq!(known.expected(first), 3);
            assert_eq!(known.expected(None), 3);
        }
        assert_eq!(known.expected(again), 0);
        known.loaded(None, 3);
        assert_eq!((known.expected(first), known.expected(again)), (3, 0));
        known.loaded(again, 1);
        assert_eq!((known.expected(again), known.expected(first)), (1, 0));
    }
}
