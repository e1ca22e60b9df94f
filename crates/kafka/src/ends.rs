//! Where the partitions of topics end now.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::Consumer as _;
use redeliver_kafka_ffi::TopicId;

use crate::client::KafkaSettings;
use crate::describe::describe_topics;
use crate::reader::{At, CALL, ReadError, TopicPartition, admin, client, kafka, offsets};

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
    let client = client(settings, "read_uncommitted")?;
    let missing = || ReadError::Missing(topic.to_owned());
    let failed = admin("requesting the id of a topic");
    let describe = || -> Result<_, ReadError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut described = describe_topics(client.client(), &[topic], left).map_err(&failed)?;
        described.remove(topic).ok_or_else(missing)?.map_err(&failed)
    };
    let before = describe()?;
    let partitions = partitions(&topic.into(), before.partitions);
    let ends = offsets(&client, &partitions, At::End, deadline)?;
    if describe()?.id != before.id {
        return Err(missing());
    }
    Ok(TopicEnds {
        topic: before.id,
        ends: ends.into_values().collect(),
    })
}

/// The ends of partitions, by topic and partition.
pub type Ends = BTreeMap<(Arc<str>, i32), i64>;

/// The ends of all partitions of these topics. Leaves out topics that do not exist. `None` while a
/// transaction is open in one of them, so that records may be added before its end. Blocks.
///
/// # Errors
/// If the broker does not answer.
pub fn settled_ends(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Option<Ends>, ReadError> {
    // The broker returns the last stable offset to the first one, and the high watermark to the second one.
    let (committed, uncommitted) = (
        client(settings, "read_committed")?,
        client(settings, "read_uncommitted")?,
    );
    let metadata = committed
        .fetch_metadata(None, CALL)
        .map_err(kafka("requesting the list of topics"))?;
    let count = |topic: &str| {
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        i32::try_from(found.map_or(0, |found| found.partitions().len())).unwrap_or(i32::MAX)
    };
    let partitions: Vec<TopicPartition> = topics
        .iter()
        .flat_map(|topic| partitions(topic, count(topic)))
        .collect();
    let deadline = Instant::now() + CALL;
    let stable = offsets(&committed, &partitions, At::End, deadline)?;
    let ends = offsets(&uncommitted, &partitions, At::End, deadline)?;
    Ok((stable == ends).then_some(ends))
}

fn partitions(topic: &Arc<str>, count: i32) -> Vec<TopicPartition> {
    (0..count).map(|partition| (topic.clone(), partition)).collect()
}
