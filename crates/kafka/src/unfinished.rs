//! What groups have not completed of topics: their committed positions, compared with what the partitions contain.
//!
//! A committed offset can be that of a deleted topic of the same name. A lane then reads the new topic from its beginning, so
//! all of its records count.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use redeliver_core::Position;
use redeliver_kafka_ffi::TopicId;

use crate::client::KafkaSettings;
use crate::describe::topic_ids;
use crate::extents::{Extent, extents};
use crate::groups;
use crate::reader::{CALL, ReadError, TopicPartition, admin};
use crate::tracker::{Committed, TopicFingerprint};

/// Maximum number of groups whose positions are requested at the same time.
const MAX_PARALLEL: usize = 16;

type Positions = BTreeMap<TopicPartition, Option<Committed>>;

/// The positions of groups, and the ids of their topics.
pub(crate) struct Groups {
    positions: Positions,
    ids: BTreeMap<String, TopicId>,
}

/// What a group has not completed in a partition: from the committed offset to the end, except for the completed set.
pub(crate) struct Unfinished {
    pub(crate) committed: Committed,
    /// The last stable offset.
    pub(crate) end: i64,
}

/// What groups have not completed of several topics.
pub(crate) struct Remaining {
    pub(crate) unfinished: Vec<(TopicPartition, Unfinished)>,
    /// Partitions whose leaders do not answer.
    pub(crate) unreachable: Vec<TopicPartition>,
}

impl Remaining {
    /// # Errors
    /// If a leader does not answer.
    pub(crate) fn check_leaders(&self) -> Result<(), ReadError> {
        match self.unreachable.first() {
            None => Ok(()),
            Some((topic, partition)) => Err(ReadError::NoLeader {
                topic: topic.to_string(),
                partition: *partition,
            }),
        }
    }
}

impl Groups {
    /// The positions of these pairs of a group and a topic. Leaves out topics that do not exist. With the isolation `read_committed`, waits for open
    /// transactions of the groups.
    pub(crate) fn read(
        settings: &KafkaSettings,
        consumer: &BaseConsumer,
        topics: &[(String, Arc<str>)],
        isolation: &str,
    ) -> Result<Self, ReadError> {
        let positions = positions_of(settings, topics, isolation)?;
        // Requested after the positions: a lane can commit for a new topic only after it was created.
        let names: Vec<&str> = topics.iter().map(|(_, topic)| &**topic).collect();
        let failed = admin("requesting the ids of topics");
        let ids = topic_ids(consumer.client(), &names, CALL).map_err(&failed)?;
        let ids = ids
            .into_iter()
            .map(|(topic, id)| Ok((topic, id.map_err(&failed)?)));
        Ok(Self {
            positions,
            ids: ids.collect::<Result<_, ReadError>>()?,
        })
    }

    /// What the groups have not completed of what the partitions contain now. Leaves out topics that are deleted meanwhile. Waits for leaders for at most
    /// `patience`.
    pub(crate) fn remaining(
        mut self,
        consumer: &BaseConsumer,
        patience: Duration,
    ) -> Result<Remaining, ReadError> {
        // For a read_committed client, the ends are the last stable offsets.
        let extents = extents(consumer, self.positions.keys().cloned(), patience)?;
        let (mut unfinished, mut unreachable) = (Vec::new(), Vec::new());
        for (key, extent) in extents {
            let Some(Extent { low, end }) = extent else {
                unreachable.push(key);
                continue;
            };
            let committed = self.positions.remove(&key).flatten();
            let committed = first_unread(committed, low..end, self.ids.get(&*key.0).copied());
            unfinished.push((key, Unfinished { committed, end }));
        }
        Ok(Remaining {
            unfinished,
            unreachable,
        })
    }
}

/// What groups have completed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct GroupPositions(HashMap<Arc<str>, HashMap<i32, Committed>>);

impl GroupPositions {
    /// The positions of these pairs of a group and a topic; each topic may occur once. Leaves out topics that do not exist.
    /// Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn read(settings: &KafkaSettings, topics: &[(String, Arc<str>)]) -> Result<Self, ReadError> {
        positions_of(settings, topics, "read_committed").map(Self::of)
    }

    pub(crate) fn of(all: Positions) -> Self {
        let mut positions: HashMap<Arc<str>, HashMap<i32, Committed>> = HashMap::new();
        for ((topic, partition), committed) in all {
            if let Some(committed) = committed {
                positions.entry(topic).or_default().insert(partition, committed);
            }
        }
        Self(positions)
    }

    /// Without those of deleted topics, given the ids of the topics that exist.
    #[must_use]
    pub fn of_topics(mut self, ids: &BTreeMap<String, TopicId>) -> Self {
        for (topic, partitions) in &mut self.0 {
            let topic = ids.get(&**topic).copied().map(TopicFingerprint::of);
            partitions.retain(|_, committed| !committed.is_of_another(topic));
        }
        self
    }

    /// The offset after the last one that the group has completed in a partition; `None` if it has committed nothing.
    #[must_use]
    pub fn completed_to(&self, topic: &str, partition: i32) -> Option<i64> {
        let committed = self.0.get(topic)?.get(&partition)?;
        let last = committed.completed.ranges().last();
        Some(last.map_or(committed.offset, |range| range.end))
    }

    /// The first offset that the group has not completed in a partition; `None` if it has committed nothing.
    #[must_use]
    pub fn first_unread(&self, topic: &str, partition: i32) -> Option<i64> {
        Some(self.0.get(topic)?.get(&partition)?.offset)
    }

    /// Whether a committed offset is before the one in other positions, or is gone: somebody has reset it.
    #[must_use]
    pub fn is_behind(&self, other: &Self) -> bool {
        other.0.iter().any(|(topic, partitions)| {
            let own = self.0.get(topic);
            partitions.iter().any(|(partition, committed)| {
                let own = own.and_then(|own| own.get(partition));
                own.is_none_or(|own| own.offset < committed.offset)
            })
        })
    }

    /// Whether the group has not completed the record at this position. Without a committed offset, it starts at the beginning.
    #[must_use]
    pub fn is_unread(&self, position: &Position) -> bool {
        let partitions = self.0.get(&position.topic);
        let committed = partitions.and_then(|partitions| partitions.get(&position.partition));
        committed.is_none_or(|committed| {
            position.offset >= committed.offset && !committed.completed.contains(position.offset)
        })
    }
}

/// Where a lane of the group continues in this log: `lane/topics.rs` decides the same.
fn first_unread(committed: Option<Committed>, log: Range<i64>, id: Option<TopicId>) -> Committed {
    let continues = |committed: &Committed| match (committed.topic, id) {
        // Beyond the end, the log was truncated. The lane continues at its end.
        (Some(topic), Some(id)) => topic == TopicFingerprint::of(id) && committed.offset >= log.start,
        _ => (log.start..=log.end).contains(&committed.offset),
    };
    committed
        .filter(continues)
        .unwrap_or_else(|| Committed::at(log.start))
}

/// The positions of pairs of a group and a topic. Each group needs its own client, which waits most of the time, so several run in parallel.
fn positions_of(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    isolation: &str,
) -> Result<Positions, ReadError> {
    let mut by_group: BTreeMap<&str, Vec<Arc<str>>> = BTreeMap::new();
    for (group, topic) in topics {
        by_group.entry(group).or_default().push(topic.clone());
    }
    let parallel = by_group.len().min(MAX_PARALLEL);
    let left = Mutex::new(by_group.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let request = || -> Result<Positions, ReadError> {
        let mut all = Positions::new();
        while let Some((group, mut topics)) = next() {
            all.extend(loop {
                match groups::positions(settings, group, &topics, isolation) {
                    Err(ReadError::Missing(deleted)) => topics.retain(|topic| **topic != *deleted),
                    found => break found?,
                }
            });
        }
        Ok(all)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..parallel).map(|_| scope.spawn(request)).collect();
        let mut all = Positions::new();
        for thread in threads {
            all.extend(thread.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_counts_only_for_its_topic() {
        let (id, other) = (TopicId::from_bits(1 << 100), TopicId::from_bits(2 << 100));
        let first = |offset, topic: Option<TopicId>, id| {
            let committed = Committed {
                topic: topic.map(TopicFingerprint::of),
                ..Committed::at(offset)
            };
            first_unread(Some(committed), 10..20, id).offset
        };
        for topic in [Some(id), None] {
            assert_eq!(first(15, topic, Some(id)), 15);
            assert_eq!(first(20, topic, Some(id)), 20);
            assert_eq!(first(5, topic, Some(id)), 10);
        }
        assert_eq!(first(15, Some(other), Some(id)), 10);
        assert_eq!(first(25, None, Some(id)), 10);
        assert_eq!(first(25, Some(id), None), 10);
        // Truncated.
        assert_eq!(first(25, Some(id), Some(id)), 25);
        assert_eq!(first_unread(None, 10..20, Some(id)).offset, 10);
    }
}
