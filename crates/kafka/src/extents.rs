//! Where the partitions of topics begin and end, as far as their leaders answer.
//!
//! The number of requests follows from the number of brokers, not from the number of partitions: the offsets of all partitions of a
//! leader are requested at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::metadata::MetadataTopic;
use rdkafka::types::RDKafkaRespErr;
use redeliver_core::pipeline::is_topic_name;

use crate::reader::{At, CALL, ReadError, TopicPartition, kafka, request};
use crate::recovery::is_timeout;

/// Timeout of a request to the leader of partitions. It is short because the leaders are asked one after the other.
pub(crate) const LEADER_CALL: Duration = Duration::from_secs(3);
/// The first pause before leaders are asked again, which doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The bounds of a partition's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first offset.
    pub low: i64,
    /// The last stable offset: the end, exclusive, for a read_committed consumer.
    pub end: i64,
}

/// Topics of a cluster.
pub(crate) struct Listed {
    /// The leader of each partition, by partition number; negative if there is none.
    pub(crate) leaders: BTreeMap<Arc<str>, Vec<i32>>,
    /// Topics that Kafka does not describe, and why.
    pub(crate) refusals: BTreeMap<Arc<str>, String>,
}

impl Listed {
    /// The topics whose names match `filter`.
    pub(crate) fn request(consumer: &BaseConsumer, filter: impl Fn(&str) -> bool) -> Result<Self, ReadError> {
        let metadata = consumer
            .fetch_metadata(None, CALL)
            .map_err(kafka("requesting the list of topics"))?;
        let unknown = Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
        let found = metadata
            .topics()
            .iter()
            .filter(|topic| topic.error() != unknown && filter(topic.name()));
        let (mut leaders, mut refusals) = (BTreeMap::new(), BTreeMap::new());
        for topic in found {
            let name = Arc::from(topic.name());
            if let Some(error) = topic.error() {
                refusals.insert(name, RDKafkaErrorCode::from(error).to_string());
                continue;
            }
            let mut of_topic = vec![-1; topic.partitions().len()];
            for partition in topic.partitions() {
                let index = usize::try_from(partition.id()).unwrap_or(usize::MAX);
                if let Some(leader) = of_topic.get_mut(index) {
                    *leader = partition.leader();
                }
            }
            leaders.insert(name, of_topic);
        }
        Ok(Self { leaders, refusals })
    }

    /// The bounds of all partitions whose leaders answer.
    pub(crate) fn extents(&self, consumer: &BaseConsumer) -> BTreeMap<TopicPartition, Extent> {
        let mut by_leader: BTreeMap<i32, Vec<TopicPartition>> = BTreeMap::new();
        for (topic, leaders) in &self.leaders {
            for (partition, leader) in (0..).zip(leaders) {
                if *leader >= 0 {
                    let partitions = by_leader.entry(*leader).or_default();
                    partitions.push((topic.clone(), partition));
                }
            }
        }
        let mut extents = BTreeMap::new();
        for (leader, partitions) in by_leader {
            match bounds(consumer, &partitions) {
                Ok(found) => extents.extend(found),
                // The client library returns the error of one partition for all of them.
                Err(error) if partitions.len() > 1 && !is_timeout(&error) => {
                    let each = partitions.iter().map(std::slice::from_ref);
                    extents.extend(each.filter_map(|one| bounds(consumer, one).ok()).flatten());
                }
                Err(error) => {
                    tracing::debug!(leader, %error, "cannot read the bounds of the partitions of a leader");
                }
            }
        }
        extents
    }
}

/// Why Kafka does not describe a topic that it does not list; `None` if the topic does not exist.
pub(crate) fn refusal(consumer: &BaseConsumer, topic: &str) -> Result<Option<String>, ReadError> {
    // The client and the broker do not look for a topic with an invalid name.
    if !is_topic_name(topic) {
        return Ok(None);
    }
    let metadata = consumer
        .fetch_metadata(Some(topic), CALL)
        .map_err(kafka("requesting a topic"))?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    Ok(match found.map(MetadataTopic::error) {
        None | Some(Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART)) => None,
        Some(Some(error)) => Some(RDKafkaErrorCode::from(error).to_string()),
        // A broker that is starting may have left it out of the list.
        Some(None) => Some("the list of topics did not contain it".to_owned()),
    })
}

/// The bounds of partitions, `None` where no leader answers within `patience`: most changes of leaders end soon. Leaves out topics that do not exist.
pub(crate) fn extents(
    consumer: &BaseConsumer,
    partitions: impl Iterator<Item = TopicPartition>,
    patience: Duration,
) -> Result<BTreeMap<TopicPartition, Option<Extent>>, ReadError> {
    let mut extents: BTreeMap<TopicPartition, Option<Extent>> = partitions.map(|key| (key, None)).collect();
    let deadline = Instant::now() + patience;
    let mut pause = FIRST_PAUSE;
    loop {
        let unknown = extents.iter().filter(|(_, extent)| extent.is_none());
        let topics: BTreeSet<Arc<str>> = unknown.map(|((topic, _), _)| topic.clone()).collect();
        let listed = Listed::request(consumer, |topic| topics.contains(topic))?;
        for topic in topics {
            let is_listed = listed.leaders.contains_key(&topic) || listed.refusals.contains_key(&topic);
            if !is_listed && refusal(consumer, &topic)?.is_none() {
                extents.retain(|(of, _), _| *of != topic);
            }
        }
        for (partition, extent) in listed.extents(consumer) {
            if let Some(unknown) = extents.get_mut(&partition) {
                *unknown = Some(extent);
            }
        }
        if extents.values().all(Option::is_some) || Instant::now() >= deadline {
            return Ok(extents);
        }
        std::thread::park_timeout(pause);
        pause *= 2;
    }
}

/// The bounds of partitions that have the same leader.
fn bounds(
    consumer: &BaseConsumer,
    partitions: &[TopicPartition],
) -> KafkaResult<BTreeMap<TopicPartition, Extent>> {
    // The first offsets are requested first, so that none is beyond the end.
    let lows = request(consumer, partitions, At::Beginning, LEADER_CALL)?.offsets;
    let ends = request(consumer, partitions, At::End, LEADER_CALL)?.offsets;
    let known = lows.into_iter().filter_map(|(key, low)| {
        let end = *ends.get(&key)?;
        Some((key, Extent { low, end }))
    });
    Ok(known.collect())
}
