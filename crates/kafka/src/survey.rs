//! Looking over the topics of a cluster: which there are, what they hold, how long they keep it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, OwnedResourceSpecifier, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::types::RDKafkaRespErr;
use redeliver_core::Span;

use crate::client::KafkaSettings;
use crate::reader::{ReadError, client, kafka};

/// How long one answer of the broker may take.
const CALL: Duration = Duration::from_secs(10);

/// What a partition holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first offset that is still there.
    pub low: i64,
    /// The offset behind the last that a read_committed consumer can see now.
    pub end: i64,
}

/// A topic with its partitions. `None` where a partition has no leader that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedTopic {
    /// Its name.
    pub name: Arc<str>,
    /// What each partition holds, by its number.
    pub partitions: Vec<Option<Extent>>,
}

/// How long a topic keeps its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// No record is removed because of its age.
    Unlimited,
    /// Records may be removed when they are older.
    For(Span),
}

/// Looks over topics. Cheap to clone.
#[derive(Clone)]
pub struct Surveyor {
    consumer: Arc<BaseConsumer>,
    admin: Arc<AdminClient<DefaultClientContext>>,
}

impl Surveyor {
    /// Makes the clients. The broker is not asked yet.
    ///
    /// # Errors
    /// When a client cannot be made from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        let making = kafka("making a client");
        Ok(Self {
            consumer: Arc::new(client(settings, "read_committed").create().map_err(&making)?),
            admin: Arc::new(settings.client().create().map_err(&making)?),
        })
    }

    /// The topics that are `wanted`, by name. Blocks while the broker is asked.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn topics(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<SurveyedTopic>, ReadError> {
        let metadata = self
            .consumer
            .fetch_metadata(None, CALL)
            .map_err(kafka("asking for the topics"))?;
        let unknown = Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
        let found = metadata
            .topics()
            .iter()
            .filter(|topic| topic.error() != unknown && wanted(topic.name()));
        let mut topics: Vec<SurveyedTopic> = found
            .map(|topic| SurveyedTopic {
                name: topic.name().into(),
                partitions: (0..topic.partitions().len())
                    .map(|partition| self.extent(topic.name(), partition))
                    .collect(),
            })
            .collect();
        topics.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(topics)
    }

    fn extent(&self, topic: &str, partition: usize) -> Option<Extent> {
        let partition = i32::try_from(partition).ok()?;
        // A read_committed client is told the last stable offset instead of the high watermark.
        match self.consumer.fetch_watermarks(topic, partition, CALL) {
            Ok((low, end)) => Some(Extent { low, end }),
            Err(error) => {
                tracing::debug!(topic, partition, %error, "the extent of a partition is not known");
                None
            }
        }
    }

    /// How long these topics keep their records, as far as the broker tells.
    ///
    /// # Errors
    /// When the broker does not answer.
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
        let answers = self
            .admin
            .describe_configs(&resources, &options)
            .await
            .map_err(kafka("asking for the configuration of topics"))?;
        let mut known = BTreeMap::new();
        for answer in answers {
            // A topic that is not ours to describe, or gone by now.
            let Ok(resource) = answer else { continue };
            let OwnedResourceSpecifier::Topic(name) = resource.specifier else {
                continue;
            };
            let value = |wanted: &str| {
                let mut entries = resource.entries.iter();
                let entry = entries.find(|entry| entry.name == wanted)?;
                entry.value.as_deref()
            };
            if let Some(retention) = retention(value("cleanup.policy"), value("retention.ms")) {
                known.insert(name, retention);
            }
        }
        Ok(known)
    }
}

fn retention(policy: Option<&str>, millis: Option<&str>) -> Option<Retention> {
    let deletes = policy?.split(',').any(|word| word.trim() == "delete");
    let millis: i64 = millis?.trim().parse().ok()?;
    // Negative, usually -1, is unlimited.
    Some(match u64::try_from(millis) {
        Ok(millis) if deletes => Retention::For(Span::from_millis(millis)),
        _ => Retention::Unlimited,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_topic_that_deletes_by_age_has_a_limit() {
        let week = Retention::For(Span::from_secs(7 * 86_400));
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
