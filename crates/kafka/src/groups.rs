//! Consumer groups as a whole: which exist, and their committed offsets with the metadata, as text that is not interpreted.
//!
//! Offsets can be copied to a group that has no members. Kafka refuses a commit from outside of a group that has any.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionListElem};
use redeliver_kafka_ffi::KafkaClient;
pub use redeliver_kafka_ffi::{GroupList, ListedGroup};

use crate::client::KafkaSettings;
use crate::reader::{ReadError, committed_offsets, group_consumer, kafka};
use crate::tracker::Committed;

/// The committed offset of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedOffset {
    /// The offset.
    pub offset: i64,
    /// The metadata of the commit.
    pub metadata: String,
}

impl CommittedOffset {
    /// Whether a lane has committed it. A commit of another program has other metadata or none.
    #[must_use]
    pub fn is_of_lane(&self) -> bool {
        !self.metadata.is_empty() && Committed::decode(self.offset, &self.metadata).is_ok()
    }
}

/// The committed offsets of a group by topic and partition. Partitions without one are left out.
pub type GroupOffsets = BTreeMap<(String, i32), CommittedOffset>;

/// Lists the consumer groups of the cluster. Blocks.
///
/// # Errors
/// If the client cannot be created or no broker answers within `timeout`.
pub fn list(settings: &KafkaSettings, timeout: Duration) -> Result<GroupList, ReadError> {
    let consumer: KafkaClient<BaseConsumer> = settings
        .reader("read_committed")
        .create()
        .map_err(kafka("creating a client"))?;
    redeliver_kafka_ffi::list_groups(consumer.client(), timeout)
        .map_err(|code| kafka("listing consumer groups")(KafkaError::AdminOp(code)))
}

/// The number of members of each group that has any. Blocks.
///
/// # Errors
/// If the client cannot be created or a broker does not answer within `timeout`.
pub fn members(settings: &KafkaSettings, timeout: Duration) -> Result<BTreeMap<String, usize>, ReadError> {
    let consumer: KafkaClient<BaseConsumer> = settings
        .reader("read_committed")
        .create()
        .map_err(kafka("creating a client"))?;
    let groups = consumer
        .fetch_group_list(None, timeout)
        .map_err(kafka("describing consumer groups"))?;
    let counted = groups
        .groups()
        .iter()
        .map(|group| (group.name().to_owned(), group.members().len()));
    Ok(counted.filter(|(_, members)| *members > 0).collect())
}

/// The committed offsets of a group in these topics. Does not join the group. Blocks.
///
/// # Errors
/// If the broker does not answer, a topic is missing, or the metadata of an offset is not text.
pub fn offsets(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
) -> Result<GroupOffsets, ReadError> {
    let consumer = group_consumer(settings, group, "read_committed")?;
    read(&consumer, topics)
}

/// As [`offsets`], without waiting for open transactions. Enough to know what a group has read.
///
/// # Errors
/// As [`offsets`].
pub fn previous_offsets(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
) -> Result<GroupOffsets, ReadError> {
    let consumer = group_consumer(settings, group, "read_uncommitted")?;
    read(&consumer, topics)
}

fn read(consumer: &BaseConsumer, topics: &[Arc<str>]) -> Result<GroupOffsets, ReadError> {
    let list = committed_offsets(consumer, topics)?;
    let mut offsets = GroupOffsets::new();
    for element in list.elements() {
        if let Offset::Offset(offset) = element.offset() {
            let metadata = metadata(&element)?;
            let partition = (element.topic().to_owned(), element.partition());
            offsets.insert(partition, CommittedOffset { offset, metadata });
        }
    }
    Ok(offsets)
}

/// Commits these offsets for a group that has no members. Blocks.
///
/// # Errors
/// If the group has members, or the broker does not answer or refuses the commit.
pub fn commit(settings: &KafkaSettings, group: &str, offsets: &GroupOffsets) -> Result<(), ReadError> {
    let failed = kafka("committing offsets");
    let mut list = TopicPartitionList::with_capacity(offsets.len());
    for ((topic, partition), committed) in offsets {
        let mut element = list.add_partition(topic, *partition);
        element
            .set_offset(Offset::Offset(committed.offset))
            .map_err(&failed)?;
        element.set_metadata(&committed.metadata);
    }
    let consumer = group_consumer(settings, group, "read_committed")?;
    consumer.commit(&list, CommitMode::Sync).map_err(&failed)
}

/// The client library panics on metadata that is not UTF-8.
fn metadata(element: &TopicPartitionListElem<'_>) -> Result<String, ReadError> {
    let read = || element.metadata().to_owned();
    catch_unwind(AssertUnwindSafe(read)).map_err(|_| ReadError::Metadata {
        topic: element.topic().to_owned(),
        partition: element.partition(),
    })
}

#[cfg(test)]
mod tests {
    use super::CommittedOffset;

    #[test]
    fn commit_of_lane_is_recognised() {
        let is_of_lane = |metadata: &str| {
            let metadata = metadata.to_owned();
            CommittedOffset { offset: 7, metadata }.is_of_lane()
        };
        assert!(is_of_lane("r1:AQE"));
        assert!(!is_of_lane("") && !is_of_lane("2026-01-01") && !is_of_lane("r1:?"));
    }
}
