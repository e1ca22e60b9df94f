//! What brokers say about topics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::RDKafkaErrorCode;
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use super::error::{ReadError, admin, kafka};
use super::offsets::{At, CALL, offsets};
use crate::client::KafkaSettings;
use crate::describe::topic_ids;
use crate::partition_end::EndContext;

/// The step of errors.
const IDS: &str = "requesting the ids of topics";

/// The number of partitions of a topic. Blocks. For several topics, one [`TopicClient`] is faster.
///
/// # Errors
/// If the broker does not answer or the topic is missing.
pub fn partitions(settings: &KafkaSettings, topic: &str) -> Result<i32, ReadError> {
    TopicClient::new(settings)?.partitions(topic)
}

/// A client that asks about topics. All calls block.
pub struct TopicClient {
    pub(super) client: KafkaClient<BaseConsumer<EndContext>>,
    /// Whether the broker finds offsets by their times.
    pub(super) knows_times: bool,
}

impl TopicClient {
    /// Creates the client without connecting to the broker.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        let config = settings.reader("read_uncommitted");
        let client = config.create_with_context(EndContext::default());
        Ok(Self {
            client: client.map_err(kafka("creating a client"))?,
            knows_times: !settings.is_embedded,
        })
    }

    /// The number of partitions of a topic.
    ///
    /// # Errors
    /// If the broker does not answer or the topic is missing.
    pub fn partitions(&self, topic: &str) -> Result<i32, ReadError> {
        partition_count(&self.client, topic)
    }

    /// The first offset and the end of a partition, including open transactions.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn watermarks(&self, topic: &str, partition: i32) -> Result<(i64, i64), ReadError> {
        let watermarks = self.client.fetch_watermarks(topic, partition, CALL);
        watermarks.map_err(kafka("requesting the end of a partition"))
    }

    /// The ends of these partitions, including open transactions, with one request to each leader. A `read_committed` consumer has passed one when the
    /// transactions that were open before it have ended.
    ///
    /// # Errors
    /// If a leader does not answer, or a partition is missing.
    pub fn ends(&self, partitions: &[(Arc<str>, i32)]) -> Result<BTreeMap<(Arc<str>, i32), i64>, ReadError> {
        offsets(&self.client, partitions, At::End, Instant::now() + CALL)
    }

    /// The id of the cluster; `None` if no broker tells it in time.
    #[must_use]
    pub fn cluster_id(&self) -> Option<String> {
        self.client.client().fetch_cluster_id(CALL)
    }

    /// The id of a topic; `None` if the broker does not know the topic, or does not support ids (before Kafka 2.8).
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn id(&self, topic: &str) -> Result<Option<TopicId>, ReadError> {
        self.request_ids(&[topic])?
            .remove(topic)
            .transpose()
            .map_err(admin(IDS))
    }

    /// As [`TopicClient::id`]; `None` if there is none, or if the broker does not return it, which does not
    /// prevent reading.
    #[must_use]
    pub fn known_id(&self, topic: &str) -> Option<TopicId> {
        self.id(topic).unwrap_or_else(|error| {
            tracing::debug!(topic, %error, "cannot read the id of a topic");
            None
        })
    }

    /// The ids of topics, or why the broker does not tell one. Without topics that the broker does not know: a moment after their creation, some do not know
    /// them yet. Without any, if the broker does not support ids.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn ids(&self, topics: &[&str]) -> Result<BTreeMap<String, Result<TopicId, ReadError>>, ReadError> {
        let ids = self.request_ids(topics)?.into_iter();
        Ok(ids.map(|(topic, id)| (topic, id.map_err(admin(IDS)))).collect())
    }

    /// The ids of topics, as far as the broker tells them.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn known_ids(&self, topics: &[&str]) -> Result<BTreeMap<String, TopicId>, ReadError> {
        let known = self.request_ids(topics)?.into_iter();
        Ok(known.filter_map(|(topic, id)| Some((topic, id.ok()?))).collect())
    }

    fn request_ids(
        &self,
        topics: &[&str],
    ) -> Result<BTreeMap<String, Result<TopicId, RDKafkaErrorCode>>, ReadError> {
        topic_ids(self.client.client(), topics, CALL).map_err(admin(IDS))
    }
}

/// A client for requests that are made once.
pub(crate) fn client(
    settings: &KafkaSettings,
    isolation: &str,
) -> Result<KafkaClient<BaseConsumer>, ReadError> {
    let client = settings.reader(isolation).create();
    client.map_err(kafka("creating a client"))
}

pub(crate) fn partition_count<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
) -> Result<i32, ReadError> {
    let metadata = consumer
        .fetch_metadata(Some(topic), CALL)
        .map_err(kafka("requesting the partitions of a topic"))?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let denied = RDKafkaErrorCode::TopicAuthorizationFailed;
    match found {
        Some(found) if found.error().map(RDKafkaErrorCode::from) == Some(denied) => {
            Err(ReadError::Denied(topic.to_owned()))
        }
        Some(found) if !found.partitions().is_empty() => {
            Ok(i32::try_from(found.partitions().len()).unwrap_or(i32::MAX))
        }
        _ => Err(ReadError::Missing(topic.to_owned())),
    }
}
