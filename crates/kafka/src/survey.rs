//! Lists the topics of a cluster with their ids, the offsets of their partitions, and their retention.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, ConfigEntry, OwnedResourceSpecifier, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use redeliver_core::pipeline::{TopicRole, parse_retry_topic};
use redeliver_core::{HumanDuration, Pipeline};
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use crate::client::KafkaSettings;
use crate::credentials::Replaceable;
use crate::describe::{describe_topics, topic_ids};
pub use crate::extents::Extent;
use crate::extents::{LEADER_CALL, Listed, refusal};
use crate::reader::{CALL, ReadError, admin, kafka};
use crate::recovery::{error_code, is_unsupported};

/// Time after which topic ids are requested again, if a request failed.
const IDS_PAUSE: Duration = Duration::from_secs(60);

/// A topic and its partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedTopic {
    /// The name of the topic.
    pub name: Arc<str>,
    /// The topic's id; `None` if it is unknown, as with brokers that do not support topic ids (before Kafka 2.8).
    pub id: Option<TopicId>,
    /// The bounds of each partition, by partition number; `None` if it has no leader, or its leader did not answer.
    pub partitions: Vec<Option<Extent>>,
    /// Why Kafka does not describe the topic to this client. Then it is unknown whether it exists.
    pub refusal: Option<String>,
}

/// How a topic deletes its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Records that are older may be deleted; `None` if they are not deleted because of their age.
    pub age: Option<HumanDuration>,
    /// Whether the oldest records are deleted while a partition exceeds a size.
    pub by_size: bool,
}

/// A client that lists topics. Cheap to clone.
#[derive(Clone)]
pub struct Surveyor(Arc<Replaceable<Clients>>);

struct Clients {
    consumer: KafkaClient<BaseConsumer>,
    admin: KafkaClient<AdminClient<DefaultClientContext>>,
    /// When to ask for topic ids again, after a request failed: a broker that does not support it may let it time out.
    ids_from: Mutex<Option<Instant>>,
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
                ids_from: Mutex::default(),
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
        self.topics_and(filter, &BTreeSet::new())
    }

    /// As [`Surveyor::topics`], and those of the `named` topics that Kafka refuses to describe: a list of all topics leaves out
    /// topics that this client may not see, as if they did not exist. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn topics_and(
        &self,
        filter: impl Fn(&str) -> bool,
        named: &BTreeSet<Arc<str>>,
    ) -> Result<Vec<SurveyedTopic>, ReadError> {
        let clients = self.0.get();
        let mut listed = Listed::request(&clients.consumer, filter)?;
        let ids = clients.ids(listed.leaders.keys());
        for name in named.iter().filter(|name| !listed.leaders.contains_key(*name)) {
            if !listed.refusals.contains_key(name)
                && let Some(refusal) = refusal(&clients.consumer, name)?
            {
                listed.refusals.insert(name.clone(), refusal);
            }
        }
        let extents = listed.extents(&clients.consumer);
        let refused = listed.refusals.into_iter().map(|(name, refusal)| SurveyedTopic {
            name,
            id: None,
            partitions: Vec::new(),
            refusal: Some(refusal),
        });
        let mut topics: Vec<SurveyedTopic> = refused.collect();
        topics.extend(listed.leaders.into_iter().map(|(name, leaders)| {
            let partitions = (0..).zip(&leaders).map(|(partition, _)| {
                let key = (name.clone(), partition);
                extents.get(&key).copied()
            });
            SurveyedTopic {
                partitions: partitions.collect(),
                id: ids.get(&*name).copied(),
                name,
                refusal: None,
            }
        }));
        topics.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(topics)
    }

    /// The topics of each of these pipelines with their roles: those that it has now, and the retry topics that exist since its settings
    /// were changed, in which records may wait. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn roles(&self, pipelines: &[Pipeline]) -> Result<Vec<HashMap<Arc<str>, TopicRole>>, ReadError> {
        let role_in = |pipeline: &Pipeline, topic: &str| match parse_retry_topic(topic)? {
            (named, tier) if *named == *pipeline.name => Some(tier.map_or(TopicRole::Due, TopicRole::Tier)),
            _ => None,
        };
        let clients = self.0.get();
        let existing = Listed::request(&clients.consumer, |topic| {
            let mut pipelines = pipelines.iter();
            pipelines.any(|pipeline| role_in(pipeline, topic).is_some())
        })?;
        let of_pipeline = |pipeline: &Pipeline| {
            let left = existing
                .leaders
                .keys()
                .filter_map(|topic| Some((topic.clone(), role_in(pipeline, topic)?)));
            let source = [(pipeline.source.clone(), TopicRole::Source)];
            left.chain(source).chain(pipeline.topics()).collect()
        };
        Ok(pipelines.iter().map(of_pipeline).collect())
    }

    /// The retention of these topics. Leaves out topics whose configuration cannot be read: all, if the broker does not support the request.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub async fn retention(&self, topics: &[Arc<str>]) -> Result<BTreeMap<String, Retention>, ReadError> {
        let mut known = BTreeMap::new();
        for (name, entries) in self.settings(topics).await? {
            let settings = ["cleanup.policy", "retention.ms", "retention.bytes"];
            if let Some(retention) = retention(settings.map(|name| setting(&entries, name))) {
                known.insert(name, retention);
            }
        }
        Ok(known)
    }

    /// One of these topics in which the latest record of a key can replace the earlier ones, or in which that is unknown. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn may_compact(&self, topics: Vec<Arc<str>>) -> Result<Option<Arc<str>>, ReadError> {
        // It only waits for a thread of the client.
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().build() else {
            return Ok(topics.into_iter().next());
        };
        let settings = runtime.block_on(self.settings(&topics))?;
        let settings: BTreeMap<String, _> = settings.into_iter().collect();
        let keeps_all = |topic: &Arc<str>| {
            let entries = settings.get(&**topic);
            let policy = entries.and_then(|entries| setting(entries, "cleanup.policy"));
            policy.is_some_and(|policy| !policy.split(',').any(|word| word.trim() == "compact"))
        };
        Ok(topics.into_iter().find(|topic| !keeps_all(topic)))
    }

    /// The size of the largest batch of records that each of these topics accepts, in bytes. Without topics that do not exist or whose configuration the
    /// client may not see: without any, if the broker does not support the request.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub async fn max_message_bytes(&self, topics: &[Arc<str>]) -> Result<BTreeMap<String, u64>, ReadError> {
        let limit = |entries: &[ConfigEntry]| setting(entries, "max.message.bytes")?.parse().ok();
        let all = self.settings(topics).await?.into_iter();
        Ok(all
            .filter_map(|(name, entries)| Some((name, limit(&entries)?)))
            .collect())
    }

    /// Whether this client may write to topics (Write), as far as the broker tells. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn writable(&self, topics: &[&str]) -> Result<BTreeMap<String, bool>, ReadError> {
        let clients = self.0.get();
        let described = describe_topics(clients.consumer.client(), topics, CALL)
            .map_err(admin("requesting the permissions for topics"))?;
        let known = described.into_iter();
        Ok(known
            .filter_map(|(name, found)| Some((name, found.ok()?.may_write?)))
            .collect())
    }

    /// The ids of these topics; `None` for one that Kafka does not describe to this client. Without those that do not exist. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer, or not about one of them.
    pub fn ids(&self, topics: &[&str]) -> Result<BTreeMap<String, Option<TopicId>>, ReadError> {
        let clients = self.0.get();
        let failed = admin("requesting the ids of topics");
        let ids = topic_ids(clients.consumer.client(), topics, CALL).map_err(&failed)?;
        let known = |(topic, id): (String, Result<TopicId, _>)| match id.map_err(&failed) {
            Ok(id) => Ok((topic, Some(id))),
            Err(error) if error.is_denied() => Ok((topic, None)),
            Err(error) => Err(error),
        };
        ids.into_iter().map(known).collect()
    }

    async fn settings(&self, topics: &[Arc<str>]) -> Result<Vec<(String, Vec<ConfigEntry>)>, ReadError> {
        if topics.is_empty() {
            return Ok(Vec::new());
        }
        let resources: Vec<_> = topics
            .iter()
            .map(|topic| ResourceSpecifier::Topic(topic))
            .collect();
        let options = AdminOptions::new()
            .request_timeout(Some(CALL))
            .operation_timeout(Some(CALL));
        let clients = self.0.get();
        let results = clients.admin.describe_configs(&resources, &options).await;
        let results = match results {
            Err(error) if error_code(&error).is_some_and(is_unsupported) => return Ok(Vec::new()),
            results => results.map_err(kafka("requesting the configuration of topics"))?,
        };
        let mut known = Vec::new();
        for result in results {
            // An error means that access is denied or the topic was deleted.
            let Ok(resource) = result else { continue };
            if let OwnedResourceSpecifier::Topic(name) = resource.specifier {
                known.push((name, resource.entries));
            }
        }
        Ok(known)
    }
}

fn setting<'e>(entries: &'e [ConfigEntry], name: &str) -> Option<&'e str> {
    let entry = entries.iter().find(|entry| entry.name == name)?;
    entry.value.as_deref()
}

impl Clients {
    /// The ids of topics, as far as the broker tells them.
    fn ids<'a>(&self, topics: impl Iterator<Item = &'a Arc<str>>) -> BTreeMap<String, TopicId> {
        let mut ids_from = self.ids_from.lock().unwrap_or_else(PoisonError::into_inner);
        if ids_from.is_some_and(|from| Instant::now() < from) {
            return BTreeMap::new();
        }
        let names: Vec<&str> = topics.map(|name| &**name).collect();
        match topic_ids(self.consumer.client(), &names, LEADER_CALL) {
            Ok(ids) => {
                let ids = ids.into_iter();
                ids.filter_map(|(name, id)| Some((name, id.ok()?))).collect()
            }
            Err(error) => {
                tracing::debug!(%error, "cannot read the ids of topics");
                *ids_from = Some(Instant::now() + IDS_PAUSE);
                BTreeMap::new()
            }
        }
    }
}

/// The retention from the values of `cleanup.policy`, `retention.ms` and `retention.bytes`.
fn retention([policy, millis, bytes]: [Option<&str>; 3]) -> Option<Retention> {
    let deletes = policy?.split(',').any(|word| word.trim() == "delete");
    let millis: i64 = millis?.trim().parse().ok()?;
    let bytes: i64 = bytes?.trim().parse().ok()?;
    // Negative values, usually -1, mean unlimited.
    Some(Retention {
        age: u64::try_from(millis)
            .ok()
            .filter(|_| deletes)
            .map(HumanDuration::from_millis),
        by_size: deletes && bytes >= 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deletion_limits_retention() {
        let week = Some(HumanDuration::from_secs(7 * 86_400));
        let known = |age, by_size| Some(Retention { age, by_size });
        for (policy, millis, bytes, expected) in [
            (Some("delete"), Some("604800000"), Some("-1"), known(week, false)),
            (Some("delete"), Some("604800000"), Some("1000"), known(week, true)),
            (
                Some("compact,delete"),
                Some("604800000"),
                Some("-1"),
                known(week, false),
            ),
            (
                Some("compact"),
                Some("604800000"),
                Some("1000"),
                known(None, false),
            ),
            (Some("delete"), Some("-1"), Some("-1"), known(None, false)),
            (Some("delete"), Some("-1"), Some("0"), known(None, true)),
            (Some("delete"), None, Some("-1"), None),
            (Some("delete"), Some("1"), None, None),
            (None, Some("1"), Some("1"), None),
        ] {
            assert_eq!(
                retention([policy, millis, bytes]),
                expected,
                "{policy:?} {millis:?} {bytes:?}"
            );
        }
    }
}
