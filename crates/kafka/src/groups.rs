//! Consumer groups as a whole: which exist, and their committed offsets with the metadata, as text that is not interpreted.
//!
//! Offsets can be copied to a group that has no members. Kafka refuses a commit from outside of a group that has any.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionListElem};
use redeliver_kafka_ffi::KafkaClient;
pub use redeliver_kafka_ffi::{GroupList, ListedGroup};

use crate::client::KafkaSettings;
use crate::reader::{CALL, ReadError, TopicPartition, admin, client, kafka, partition_count};
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
    /// An offset that was committed with this metadata, which is empty for most programs.
    #[must_use]
    pub fn new(offset: i64, metadata: impl Into<String>) -> Self {
        let metadata = metadata.into();
        Self { offset, metadata }
    }

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
    let consumer = client(settings, "read_committed")?;
    redeliver_kafka_ffi::list_groups(consumer.client(), timeout).map_err(admin("listing consumer groups"))
}

/// The number of members of each group that has any. Blocks.
///
/// # Errors
/// If the client cannot be created or a broker does not answer within `timeout`.
pub fn members(settings: &KafkaSettings, timeout: Duration) -> Result<BTreeMap<String, usize>, ReadError> {
    let consumer = client(settings, "read_committed")?;
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
    offsets_with(settings, group, topics, "read_committed")
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
    offsets_with(settings, group, topics, "read_uncommitted")
}

fn offsets_with(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
    isolation: &str,
) -> Result<GroupOffsets, ReadError> {
    let mut offsets = GroupOffsets::new();
    for element in committed_offsets(settings, group, topics, isolation)?.elements() {
        if let Offset::Offset(offset) = element.offset() {
            let partition = (element.topic().to_owned(), element.partition());
            let Some(metadata) = metadata(&element) else {
                let (topic, partition) = partition;
                return Err(ReadError::Metadata { topic, partition });
            };
            offsets.insert(partition, CommittedOffset { offset, metadata });
        }
    }
    Ok(offsets)
}

/// The committed positions of a group; `None` where it has committed nothing. With the isolation `read_uncommitted`, does not wait for the end of a transaction
/// that commits others.
pub(crate) fn positions(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
    isolation: &str,
) -> Result<BTreeMap<TopicPartition, Option<Committed>>, ReadError> {
    Ok(positions_in(&committed_offsets(
        settings, group, topics, isolation,
    )?))
}

/// The positions in a list of committed offsets.
pub(crate) fn positions_in(list: &TopicPartitionList) -> BTreeMap<TopicPartition, Option<Committed>> {
    let position = |element: &TopicPartitionListElem<'_>| match element.offset() {
        Offset::Offset(offset) => Some(committed(offset, &any_metadata(element))),
        _ => None,
    };
    let elements = list.elements();
    let positions = elements
        .iter()
        .map(|element| ((element.topic().into(), element.partition()), position(element)));
    positions.collect()
}

/// Decodes a committed position. Metadata of other programs is ignored, with a log line.
pub(crate) fn committed(offset: i64, metadata: &str) -> Committed {
    Committed::decode(offset, metadata).unwrap_or_else(|error| {
        tracing::error!(
            offset, %error,
            "cannot decode the metadata of a committed offset; completed records after it may be processed again"
        );
        Committed::at(offset)
    })
}

/// A consumer that reads and writes the committed offsets of a group without joining it. With the isolation `read_committed`,
/// it waits for open transactions that commit offsets of the group.
pub(crate) fn group_consumer(
    settings: &KafkaSettings,
    group: &str,
    isolation: &str,
) -> Result<KafkaClient<BaseConsumer>, ReadError> {
    let mut config = settings.reader(isolation);
    config.set("group.id", group);
    config.create().map_err(kafka("creating a consumer"))
}

fn committed_offsets(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
    isolation: &str,
) -> Result<TopicPartitionList, ReadError> {
    let consumer = group_consumer(settings, group, isolation)?;
    let mut list = TopicPartitionList::new();
    for topic in topics {
        list.add_partition_range(topic, 0, partition_count(&consumer, topic)? - 1);
    }
    request_committed(&consumer, &list)
}

/// The committed offsets of these partitions, once no open transaction commits others.
pub(crate) fn request_committed(
    consumer: &BaseConsumer,
    list: &TopicPartitionList,
) -> Result<TopicPartitionList, ReadError> {
    let deadline = Instant::now() + 3 * CALL;
    loop {
        // While a transaction that commits an offset is open, the request for it fails.
        let committed = consumer.committed_offsets(list.clone(), CALL);
        let stable = committed.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(TopicPartitionListElem::error)?;
            Ok(list)
        });
        match stable {
            Ok(list) => return Ok(list),
            Err(error) if Instant::now() > deadline => {
                return Err(kafka("requesting committed offsets")(error));
            }
            Err(error) => tracing::debug!(%error, "cannot read committed offsets; retrying"),
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
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

/// The metadata of a committed position, or a text that is none.
pub(crate) fn any_metadata(element: &TopicPartitionListElem<'_>) -> String {
    metadata(element).unwrap_or_else(|| "not UTF-8".to_owned())
}

/// The metadata of a committed position; `None` if it is not UTF-8.
fn metadata(element: &TopicPartitionListElem<'_>) -> Option<String> {
    // The client library panics on it.
    catch_unwind(AssertUnwindSafe(|| element.metadata().to_owned())).ok()
}

#[cfg(test)]
mod tests {
    use super::CommittedOffset;

    #[test]
    fn commit_of_lane_is_recognised() {
        let is_of_lane = |metadata: &str| CommittedOffset::new(7, metadata).is_of_lane();
        assert!(is_of_lane("r1:AQE"));
        assert!(!is_of_lane("") && !is_of_lane("2026-01-01") && !is_of_lane("r1:?"));
    }
}
