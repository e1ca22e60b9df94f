//! Where the partitions of a topic end now.

use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use redeliver_kafka_ffi::{KafkaClient, TopicId, describe_topics};

use crate::client::KafkaSettings;
use crate::reader::{ReadError, kafka};

/// Timeout of one request.
const CALL: Duration = Duration::from_secs(5);

/// Where the partitions of a topic end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicEnds {
    /// The topic; `None` if the broker does not support topic ids (before Kafka 2.8).
    pub topic: Option<TopicId>,
    /// The end of each partition, including open transactions, by its number.
    pub ends: Vec<i64>,
}

/// Where the partitions of a topic end now: a record that was written before this call is before the end of its partition. Blocks.
///
/// # Errors
/// If the broker does not answer, the topic is missing, or it was created again meanwhile.
pub fn topic_ends(settings: &KafkaSettings, topic: &str) -> Result<TopicEnds, ReadError> {
    let client: KafkaClient<BaseConsumer> = settings
        .reader("read_uncommitted")
        .create()
        .map_err(kafka("creating a client"))?;
    let missing = || ReadError::Missing(topic.to_owned());
    let failed = |code| kafka("requesting the id of a topic")(KafkaError::AdminOp(code));
    let describe = || -> Result<_, ReadError> {
        let mut described = describe_topics(client.client(), &[topic], CALL).map_err(failed)?;
        described.remove(topic).ok_or_else(missing)?.map_err(failed)
    };
    let before = describe()?;
    let mut ends = Vec::new();
    for partition in 0..before.partitions {
        let watermarks = client.fetch_watermarks(topic, partition, CALL);
        let (_, end) = watermarks.map_err(kafka("requesting the end of a partition"))?;
        ends.push(end);
    }
    if describe()?.id != before.id {
        return Err(missing());
    }
    Ok(TopicEnds {
        topic: before.id,
        ends,
    })
}
