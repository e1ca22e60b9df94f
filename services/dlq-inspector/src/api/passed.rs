//! What a watch has passed, in a form that means the same in every index: the next offset of each partition. Every index has the dead letters
//! of a partition in the order of their offsets.
//!
//! A topic is named by a hash of its name and its id, so that nothing of a topic that was created again counts as passed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_kafka::TopicId;
use sha2::{Digest as _, Sha256};

/// With more partitions, tokens would be larger than most dead letters.
const MAX_PARTITIONS: usize = 500;

/// Identifies a topic.
pub(super) type TopicKey = [u8; 8];

/// The next offset of each partition of which something was passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Passed(BTreeMap<(TopicKey, u32), u64>);

/// The topics of an index.
#[derive(Clone, Debug, Default)]
pub(super) struct TopicKeys(HashMap<Arc<str>, TopicId>);

impl TopicKeys {
    pub(super) fn new(ids: Vec<(Arc<str>, TopicId)>) -> Self {
        Self(ids.into_iter().collect())
    }

    /// Brokers before Kafka 2.8 have no ids.
    pub(super) fn of(&self, topic: &str) -> TopicKey {
        let id = self.0.get(topic).map_or(0, |id| id.bits());
        let mut hash = Sha256::new_with_prefix(id.to_be_bytes());
        hash.update(topic.as_bytes());
        let mut key = TopicKey::default();
        key.copy_from_slice(&hash.finalize()[..8]);
        key
    }
}

impl Passed {
    /// Everything before an offset of a partition.
    pub(super) fn pass(&mut self, topic: TopicKey, partition: i32, next: i64) {
        let (Ok(partition), Ok(next)) = (u32::try_from(partition), u64::try_from(next)) else {
            return;
        };
        if next > 0 {
            self.0.insert((topic, partition), next);
        }
    }

    /// Whether the watch has passed this offset.
    pub(super) fn has(&self, topic: TopicKey, partition: i32, offset: i64) -> bool {
        let (Ok(partition), Ok(offset)) = (u32::try_from(partition), u64::try_from(offset)) else {
            return false;
        };
        self.0.get(&(topic, partition)).is_some_and(|next| offset < *next)
    }

    /// For a token; `None` if there are too many partitions. Each topic is followed by the number of its partitions, and these by their
    /// numbers and offsets.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        if self.0.len() > MAX_PARTITIONS {
            return None;
        }
        let mut topics: BTreeMap<TopicKey, Vec<(u32, u64)>> = BTreeMap::new();
        for ((topic, partition), next) in &self.0 {
            topics.entry(*topic).or_default().push((*partition, *next));
        }
        let mut bytes = Vec::new();
        for (topic, partitions) in topics {
            bytes.extend(topic);
            push_number(&mut bytes, partitions.len() as u64);
            for (partition, next) in partitions {
                push_number(&mut bytes, partition.into());
                push_number(&mut bytes, next);
            }
        }
        Some(bytes)
    }

    /// `None` if these are not the bytes of [`Passed::encode`].
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut passed = Self::default();
        while let Some((topic, rest)) = bytes.split_first_chunk() {
            bytes = rest;
            for _ in 0..take_number(&mut bytes)? {
                let partition = u32::try_from(take_number(&mut bytes)?).ok()?;
                let next = take_number(&mut bytes)?;
                passed.0.insert((*topic, partition), next);
                if passed.0.len() > MAX_PARTITIONS {
                    return None;
                }
            }
        }
        bytes.is_empty().then_some(passed)
    }
}

/// In groups of seven bits, the lowest first.
fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_passed_is_known_by_topic_id_partition_and_offset() {
        let keys = |id: u128| TopicKeys::new(vec![("a".into(), TopicId::from_bits(id))]);
        let mut passed = Passed::default();
        passed.pass(keys(1).of("a"), 3, 7);
        assert!(passed.has(keys(1).of("a"), 3, 6));
        assert!(!passed.has(keys(1).of("a"), 3, 7));
        assert!(!passed.has(keys(1).of("a"), 2, 6));
        assert!(!passed.has(keys(1).of("b"), 3, 6));
        // The topic was created again.
        assert!(!passed.has(keys(2).of("a"), 3, 6));
    }

    #[test]
    fn a_token_names_a_limited_number_of_partitions() {
        let mut passed = Passed::default();
        for partition in 0..MAX_PARTITIONS {
            passed.pass([1; 8], i32::try_from(partition).unwrap(), 1);
        }
        assert!(passed.encode().is_some_and(|bytes| bytes.len() < 2_000));
        passed.pass([2; 8], 0, 1);
        assert_eq!(passed.encode(), None);
    }

    proptest! {
        #[test]
        fn what_is_encoded_can_be_decoded(
            partitions in proptest::collection::btree_map((any::<[u8; 8]>(), any::<u32>()), any::<u64>(), 0..20),
        ) {
            let passed = Passed(partitions);
            prop_assert_eq!(Passed::decode(&passed.encode().unwrap()), Some(passed));
        }

        #[test]
        fn other_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Some(passed) = Passed::decode(&bytes) {
                let again = Passed::decode(&passed.encode().unwrap());
                prop_assert_eq!(again, Some(passed));
            }
        }
    }
}
