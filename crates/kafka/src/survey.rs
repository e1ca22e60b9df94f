//! Lists the topics of a cluster with the offsets of their partitions and their retention.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, OwnedResourceSpecifier, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::types::RDKafkaRespErr;
use redeliver_core::HumanDuration;
use redeliver_kafka_ffi::KafkaClient;

use crate::client::KafkaSettings;
use crate::credentials::Replaceable;
use crate::reader::{ReadError, kafka};

/// Timeout of one request.
const CALL: Duration = Duration::from_secs(10);

/// The bounds of a partition's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first offset.
    pub low: i64,
    /// The last stable offset: the end, exclusive, for a read_committed consumer.
    pub end: i64,
}

/// A topic and its partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedTopic {
    /// The name of the topic.
    pub name: Arc<str>,
    /// The bounds of each partition, by partition number; `None` if its leader did not answer.
    pub partitions: Vec<Option<Extent>>,
}

/// How long a topic keeps its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// Records are not deleted because of their age.
    Unlimited,
    /// Older records may be deleted.
    For(HumanDuration),
}

/// A client that lists topics. Cheap to clone.
#[derive(Clone)]
pub struct Surveyor(Arc<Replaceable<Clients>>);

struct Clients {
    consumer: KafkaClient<BaseConsumer>,
    admin: KafkaClient<AdminClient<DefaultClientContext>>,
}

impl Surveyor {
    /// Creates the clients without connecting to the broker.
    ///
    /// # Errors
    /// If a client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        let (consumer, admin) = (settings.reader("read_committed"), settings.client());
        let create = move || {
            Ok(Clients {
                consumer: consumer.create()?,
                admin: admin.create()?,
            })
        };
        let clients = Replaceable::new(settings, "surveyor", create);
        clients.map(Self).map_err(kafka("creating a client"))
    }

    /// The topics whose names match `filter`, sorted by name. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn topics(&self, filter: impl Fn(&str) -> bool) -> Result<Vec<SurveyedTopic>, ReadError> {
        let clients = self.0.get();
        let metadata = clients
            .consumer
            .fetch_metadata(None, CALL)
            .map_err(kafka("requesting the list of topics"))?;
        let unknown = Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
        let found = metadata
            .topics()
            .iter()
            .filter(|topic| topic.error() != unknown && filter(topic.name()));
        let mut topics: Vec<SurveyedTopic> = found
            .map(|topic| SurveyedTopic {
                name: topic.name().into(),
                partitions: (0..topic.partitions().len())
                    .map(|partition| clients.extent(topic.name(), partition))
                    .collect(),
            })
            .collect();
        topics.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(topics)
    }

    /// The retention of these topics. Leaves out topics whose configuration cannot be read.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub async fn retention(&self, topics: &[Arc<str>]) -> Result<BTreeMap<String, Retention>, ReadError> {
        if topics.is_empty() {
            return Ok(BTreeMap::new());
        }
        let resources: Vec<_> = topics
            .iter()
            .map(|topic| ResourceSpecifier::Topic(topic))
            .collect();
        let options = AdminOptions::new()
            .request_timeout(Some(CALL))
            .operation_timeout(Some(CALL));
        let clients = self.0.get();
        let results = clients
            .admin
            .describe_configs(&resources, &options)
            .await
            .map_err(kafka("requesting the configuration of topics"))?;
        let mut known = BTreeMap::new();
        for result in results {
            // An error means that access is denied or the topic was deleted.
            let Ok(resource) = result else { continue };
            let OwnedResourceSpecifier::Topic(name) = resource.specifier else {
                continue;
            };
            let value = |name: &str| {
                let mut entries = resource.entries.iter();
                let entry = entries.find(|entry| entry.name == name)?;
                entry.value.as_deref()
            };
            if let Some(retention) = retention(value("cleanup.policy"), value("retention.ms")) {
                known.insert(name, retention);
            }
        }
        Ok(known)
    }
}

impl Clients {
    fn extent(&self, topic: &str, partition: usize) -> Option<Extent> {
        let partition = i32::try_from(partition).ok()?;
        // For a read_committed client, the broker returns the last stable offset instead of the high watermark.
        match self.consumer.fetch_watermarks(topic, partition, CALL) {
            Ok((low, end)) => Some(Extent { low, end }),
            Err(error) => {
                tracing::debug!(topic, partition, %error, "cannot read the bounds of a partition");
                None
            }
        }
    }
}

fn retention(policy: Option<&str>, millis: Option<&str>) -> Option<Retention> {
    let deletes = policy?.split(',').any(|word| word.trim() == "delete");
    let millis: i64 = millis?.trim().parse().ok()?;
    // Negative values, usually -1, mean unlimited.
    Some(match u64::try_from(millis) {
        Ok(millis) if deletes => Retention::For(HumanDuration::from_millis(millis)),
        _ => Retention::Unlimited,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_topic_that_deletes_by_age_has_limited_retention() {
        let week = Retention::For(HumanDuration::from_secs(7 * 86_400));
        for (policy, millis, expected) in [
            (Some("delete"), Some("604800000"), Some(week)),
            (Some("compact,delete"), Some("604800000"), Some(week)),
            (Some("compact"), Some("604800000"), Some(Retention::Unlimited)),
            (Some("delete"), Some("-1"), Some(Retention::Unlimited)),
            (Some("delete"), None, None),
            (None, Some("1"), None),
        ] {
            assert_eq!(retention(policy, millis), expected, "{policy:?} {millis:?}");
        }
    }
}
