//! How far a watch has come: the next offset of each partition. It means the same in every index, because each has the dead letters of a partition in
//! the order of their offsets.

use std::collections::{BTreeMap, BTreeSet};

use redeliver_proto::Message as _;
use sha2::{Digest as _, Sha256};

use crate::index::{ReadPosition, Unread};

/// A token names at most this many partitions, so that it is not larger than most dead letters.
const MAX_PARTITIONS: usize = 500;

/// The next offsets, by a hash of the name of the topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress(BTreeMap<u64, Topic>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Topic {
    /// A part of its id; 0 while it has none. Brokers before Kafka 2.8 have no ids.
    id: u64,
    /// By partition.
    next: BTreeMap<i32, i64>,
}

/// [`Progress`] in a token.
#[derive(Clone, PartialEq, prost::Message)]
struct Encoded {
    #[prost(message, repeated, tag = "1")]
    topics: Vec<EncodedTopic>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct EncodedTopic {
    #[prost(fixed64, tag = "1")]
    name: u64,
    #[prost(fixed64, tag = "2")]
    id: u64,
    #[prost(int32, repeated, tag = "3")]
    partitions: Vec<i32>,
    /// Of each of `partitions`.
    #[prost(int64, repeated, tag = "4")]
    next: Vec<i64>,
}

impl Progress {
    /// What the index contains that is not passed. A topic that was created again begins at its start.
    pub(super) fn unread(&mut self, positions: Vec<ReadPosition>) -> Vec<Unread> {
        // Topics that the index does not have any more take no room in a token from those that it has.
        let count: usize = self.0.values().map(|topic| topic.next.len()).sum();
        if count > MAX_PARTITIONS {
            let known: BTreeSet<u64> = positions.iter().map(|position| key(&position.topic)).collect();
            self.0.retain(|name, _| known.contains(name));
        }
        let mut unread = Vec::new();
        for position in positions {
            let id = position.id.map_or(0, |id| (id.bits() >> 64) as u64);
            let topic = self.0.entry(key(&position.topic)).or_default();
            if topic.id != id && topic.id != 0 {
                topic.next.clear();
            }
            topic.id = id;
            let next = topic.next.entry(position.partition).or_default();
            // This index is behind the one of the token. Without an id, the topic may have been created again.
            if id == 0 && *next > position.next {
                *next = 0;
            }
            if *next < position.next {
                unread.push(Unread {
                    topic: position.topic,
                    partition: position.partition,
                    next: *next,
                    end: position.next,
                });
            }
        }
        unread
    }

    /// Passes everything before an offset.
    pub(super) fn pass(&mut self, topic: &str, partition: i32, next: i64) {
        let topic = self.0.entry(key(topic)).or_default();
        topic.next.insert(partition, next);
    }

    /// For a token. If there are too many partitions, those with the lowest offsets are left out, and begin at their start.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut partitions: Vec<(i64, u64, i32)> = Vec::new();
        for (name, topic) in &self.0 {
            let passed = topic.next.iter().filter(|(_, next)| **next > 0);
            partitions.extend(passed.map(|(partition, next)| (*next, *name, *partition)));
        }
        if partitions.len() > MAX_PARTITIONS {
            partitions.sort_unstable_by(|one, other| other.cmp(one));
            partitions.truncate(MAX_PARTITIONS);
        }
        let mut topics = BTreeMap::new();
        for (next, name, partition) in partitions {
            let topic = topics.entry(name).or_insert_with(|| EncodedTopic {
                name,
                id: self.0.get(&name).map_or(0, |topic| topic.id),
                ..EncodedTopic::default()
            });
            topic.partitions.push(partition);
            topic.next.push(next);
        }
        let topics = topics.into_values().collect();
        Encoded { topics }.encode_to_vec()
    }

    /// `None` if these are not the bytes of [`Progress::encode`].
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (mut progress, mut count) = (Self::default(), 0);
        for topic in Encoded::decode(bytes).ok()?.topics {
            count += topic.partitions.len();
            let is_valid = !topic.partitions.is_empty()
                && topic.partitions.len() == topic.next.len()
                && topic.partitions.iter().all(|partition| *partition >= 0)
                && topic.next.iter().all(|next| *next > 0);
            if !is_valid || count > MAX_PARTITIONS {
                return None;
            }
            let next = topic.partitions.into_iter().zip(topic.next).collect();
            let EncodedTopic { name, id, .. } = topic;
            progress.0.insert(name, Topic { id, next });
        }
        Some(progress)
    }
}

fn key(topic: &str) -> u64 {
    let hash = Sha256::digest(topic);
    hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::TopicId;

    use super::*;

    fn position(id: Option<u128>, partition: i32, next: i64) -> ReadPosition {
        ReadPosition {
            topic: "t-dlq".into(),
            id: id.map(|id| TopicId::from_bits(id << 64)),
            partition,
            next,
        }
    }

    /// What is unread of a partition of which the index has this.
    fn unread(progress: &mut Progress, id: Option<u128>, partition: i32, next: i64) -> Option<[i64; 2]> {
        let unread = progress.unread(vec![position(id, partition, next)]);
        assert!(unread.len() <= 1);
        unread.first().map(|unread| [unread.next, unread.end])
    }

    /// Of a watch that has passed 7 dead letters of partition 0, and none of partition 1.
    fn passed(id: Option<u128>) -> Progress {
        let mut progress = Progress::default();
        progress.unread(vec![position(id, 0, 9), position(id, 1, 9)]);
        progress.pass("t-dlq", 0, 7);
        Progress::decode(&progress.encode()).unwrap()
    }

    #[test]
    fn watches_go_on_at_next_offsets() {
        for id in [Some(1), None] {
            let mut progress = passed(id);
            assert_eq!(unread(&mut progress, id, 0, 9), Some([7, 9]));
            assert_eq!(unread(&mut progress, id, 0, 7), None);
            assert_eq!(unread(&mut progress, id, 1, 9), Some([0, 9]));
        }
        // An index that is behind the one of the token.
        let mut progress = passed(Some(1));
        assert_eq!(unread(&mut progress, Some(1), 0, 5), None);
        assert_eq!(unread(&mut progress, Some(1), 0, 8), Some([7, 8]));
    }

    #[test]
    fn added_partitions_begin_at_their_start() {
        assert_eq!(unread(&mut passed(Some(1)), Some(1), 2, 3), Some([0, 3]));
    }

    #[test]
    fn recreated_topics_begin_at_their_start() {
        assert_eq!(unread(&mut passed(Some(1)), Some(2), 0, 20), Some([0, 20]));
        // While it is read again, it has no id yet.
        let mut progress = passed(Some(1));
        assert_eq!(unread(&mut progress, None, 0, 20), Some([0, 20]));
        progress.pass("t-dlq", 0, 20);
        assert_eq!(unread(&mut progress, Some(2), 0, 21), Some([20, 21]));
        // Without ids, it has fewer dead letters.
        assert_eq!(unread(&mut passed(None), None, 0, 3), Some([0, 3]));
    }

    #[test]
    fn only_encoded_progress_is_accepted() {
        let encoded = |partitions: Vec<i32>, next: Vec<i64>| {
            let topic = EncodedTopic {
                name: 1,
                id: 1,
                partitions,
                next,
            };
            let topics = vec![topic];
            Encoded { topics }.encode_to_vec()
        };
        assert!(Progress::decode(&encoded(vec![0, 1], vec![7, 8])).is_some());
        for (partitions, next) in [
            (vec![], vec![]),
            (vec![0], vec![]),
            (vec![-1], vec![7]),
            (vec![0], vec![0]),
            ((0..501).collect(), vec![7; 501]),
        ] {
            assert_eq!(Progress::decode(&encoded(partitions, next)), None);
        }
    }

    #[test]
    fn deleted_topics_take_no_room() {
        let mut progress = Progress::default();
        for partition in 0..300 {
            progress.pass("deleted-dlq", partition, 1_000);
            progress.pass("t-dlq", partition, 7);
        }
        let positions = || (0..300).map(|partition| position(None, partition, 7)).collect();
        assert_eq!(progress.unread(positions()).len(), 0);
        let mut resumed = Progress::decode(&progress.encode()).unwrap();
        assert_eq!(resumed.unread(positions()).len(), 0);
    }

    #[test]
    fn large_tokens_leave_out_low_offsets() {
        let mut progress = Progress::default();
        for partition in 0..600 {
            progress.pass("t-dlq", partition, i64::from(partition));
        }
        let bytes = progress.encode();
        assert!(bytes.len() < 3_000, "{}", bytes.len());
        let mut resumed = Progress::decode(&bytes).unwrap();
        assert_eq!(unread(&mut resumed, None, 599, 600), Some([599, 600]));
        assert_eq!(unread(&mut resumed, None, 100, 600), Some([100, 600]));
        // It is sent again, because it is unknown whether it arrived.
        assert_eq!(unread(&mut resumed, None, 99, 600), Some([0, 600]));
    }
}
