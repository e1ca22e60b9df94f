//! Where the partitions of a topic end now.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use crate::client::KafkaSettings;
use crate::describe::describe_topics;
use crate::reader::{ReadError, bounds, kafka};

/// Where the partitions of a topic end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicEnds {
    /// The topic; `None` if the broker does not support topic ids (before Kafka 2.8).
    pub topic: Option<TopicId>,
    /// The end of each partition, including open transactions, by its number.
    pub ends: Vec<i64>,
}

/// Where the partitions of a topic end now: a record that was written before this call is before the end of its partition. The number of requests follows from
/// the number of brokers. Blocks for `timeout` at most, and a little longer for the last request.
///
/// # Errors
/// If the broker does not answer in time, the topic is missing, or it was created again meanwhile.
pub fn topic_ends(settings: &KafkaSettings, topic: &str, timeout: Duration) -> Result<TopicEnds, ReadError> {
    let deadline = Instant::now() + timeout;
    // With a read_committed client, open transactions would be behind the ends.
    let client: KafkaClient<BaseConsumer> = settings
        .reader("read_uncommitted")
        .create()
        .map_err(kafka("creating a client"))?;
    let missing = || ReadError::Missing(topic.to_owned());
    let failed = |code| kafka("requesting the id of a topic")(KafkaError::AdminOp(code));
    let describe = || -> Result<_, ReadError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut described = describe_topics(client.client(), &[topic], left).map_err(failed)?;
        described.remove(topic).ok_or_else(missing)?.map_err(failed)
    };
    let before = describe()?;
    let partitions: Vec<_> = (0..before.partitions)
        .map(|partition| (topic.to_owned(), partition))
        .collect();
    let found = bounds(
        &client,
        &partitions.iter().collect::<Vec<_>>(),
        Offset::End,
        deadline,
    )?;
    let ends = partitions.iter().map(|partition| found.get(partition).copied());
    let ends: Option<Vec<i64>> = ends.collect();
    let ends = ends.ok_or_else(|| {
        let unknown = KafkaError::OffsetFetch(RDKafkaErrorCode::OffsetNotAvailable);
        kafka("requesting the ends of partitions")(unknown)
    })?;
    if describe()?.id != before.id {
        return Err(missing());
    }
    Ok(TopicEnds {
        topic: before.id,
        ends,
    })
}
