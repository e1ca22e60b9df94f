//! Asks about single partitions of a group again and again, on one connection.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use redeliver_kafka_ffi::KafkaClient;

use crate::client::KafkaSettings;
use crate::groups::{group_consumer, positions_in, request_committed};
use crate::reader::{CALL, ReadError, admin, kafka};
use crate::unfinished::GroupPositions;

/// The timeout of a request about members.
const MEMBERS: Duration = Duration::from_secs(4);

/// A client of one group, which it does not join. All calls block.
pub struct GroupClient {
    consumer: KafkaClient<BaseConsumer>,
    group: String,
}

impl GroupClient {
    /// Creates the client without connecting to the broker.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings, group: &str) -> Result<Self, ReadError> {
        // What an open transaction completes is not complete yet, so nothing waits for its end.
        Ok(Self {
            consumer: group_consumer(settings, group, "read_uncommitted")?,
            group: group.to_owned(),
        })
    }

    /// What the group has completed of a partition, unless it has done so of a deleted topic of the same name.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn positions(&self, topic: &Arc<str>, partition: i32) -> Result<GroupPositions, ReadError> {
        let mut list = TopicPartitionList::new();
        list.add_partition(topic, partition);
        let positions = GroupPositions::of(positions_in(&request_committed(&self.consumer, &list)?));
        // Requested after the positions: a lane can commit for a new topic only after it was created.
        let ids = crate::describe::topic_ids(self.consumer.client(), &[topic], CALL);
        let ids = ids.map_err(admin("requesting the ids of topics"))?.into_iter();
        Ok(positions.of_topics(&ids.filter_map(|(topic, id)| Some((topic, id.ok()?))).collect()))
    }

    /// Whether a process is a member of the group.
    ///
    /// # Errors
    /// If a broker does not answer.
    pub fn has_members(&self) -> Result<bool, ReadError> {
        let listed = self.consumer.fetch_group_list(Some(&self.group), MEMBERS);
        let listed = listed.map_err(kafka("describing a consumer group"))?;
        let mut groups = listed.groups().iter();
        Ok(groups.any(|group| group.name() == self.group && !group.members().is_empty()))
    }
}
