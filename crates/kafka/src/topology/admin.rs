//! Reads the topics of a cluster and creates missing ones.
//!
//! Metadata requests always list all topics: a request for a single topic may create it on brokers that create topics
//! automatically.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::admin::{
    AdminClient, AdminOptions, NewTopic, OwnedResourceSpecifier, ResourceSpecifier, TopicReplication,
};
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::MetadataBroker;
use rdkafka::types::RDKafkaRespErr;
use redeliver_core::HumanDuration;
use redeliver_core::error_chain::error_chain;
use redeliver_kafka_ffi::KafkaClient;

use super::needed::{creation_config, largest_source};
use super::offsets::{OFFSETS_RETENTION, examine_offsets};
use super::{ActualTopic, Finding, Role, Severity, TopicSpec, TopologySpec, examine_all};
use crate::client::{ClientLog, ClientSettings};
use crate::probe::{Probed, probe};
use crate::recovery::{error_code, is_unsupported};

/// Why topics could not be checked or created.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The client cannot be created from its settings.
    #[error("creating an admin client")]
    Client(#[source] KafkaError),
    /// Kafka did not answer in time, or the connection was refused.
    #[error("requesting the topics of Kafka at `{brokers}`{refusal}")]
    Unreachable {
        /// The configured addresses.
        brokers: String,
        /// Why the broker or the client refused the connection, after a colon; may be empty.
        refusal: Box<str>,
        /// The error of the client.
        source: KafkaError,
    },
    /// Kafka refused to create a topic.
    #[error(
        "creating topic `{topic}` with {partitions} partitions and replication factor {replication}{hint}"
    )]
    Refused {
        /// The topic.
        topic: Arc<str>,
        /// The requested number of partitions.
        partitions: i32,
        /// The requested replication factor.
        replication: i32,
        /// Advice, after a semicolon; may be empty.
        hint: &'static str,
        /// The cause.
        source: RDKafkaErrorCode,
    },
    /// A new topic did not become available in time.
    #[error("waiting for the leaders of topic `{topic}`: {state} after {waited:?}")]
    NotLed {
        /// The topic.
        topic: Arc<str>,
        /// The last observed state.
        state: String,
        /// The time spent waiting.
        waited: Duration,
    },
}

/// The result of [`apply`] for a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The topic.
    pub topic: Arc<str>,
    /// Whether this call created it.
    pub created: bool,
    /// The findings. Existing topics are not changed.
    pub findings: Vec<Finding>,
}

/// Compares the topics with their specification. Changes nothing.
///
/// # Errors
/// If the settings are invalid, or Kafka does not answer within the timeout or refuses the connection.
pub async fn check(
    config: &ClientSettings,
    spec: &TopologySpec,
    timeout: Duration,
) -> Result<Vec<Finding>, TopologyError> {
    Admin::new(config, timeout)?.findings(spec).await
}

/// Creates missing topics and waits until the leaders of all their partitions answer: an idempotent producer that writes to
/// a topic too early can lose its first batches. Does not change existing topics.
///
/// # Errors
/// If the settings are invalid, or Kafka does not answer within the timeout, refuses to create a topic, or elects no leaders
/// for it. Topics created before that remain, and the next call continues from there.
pub async fn apply(
    config: &ClientSettings,
    spec: &TopologySpec,
    timeout: Duration,
) -> Result<Vec<Applied>, TopologyError> {
    let admin = Admin::new(config, timeout)?;
    // A managed topic must accept the records of its sources, so their limits have to be known when it is created.
    let mut created = Vec::new();
    for topics in spec.stages() {
        created.extend(admin.create_missing(spec, &topics).await?);
    }
    let findings = admin.findings(spec).await?;
    Ok(spec
        .topics
        .iter()
        .map(|topic| Applied {
            topic: topic.name.clone(),
            created: created.contains(&topic.name),
            findings: findings
                .iter()
                .filter(|finding| finding.topic == topic.name)
                .cloned()
                .collect(),
        })
        .collect())
}

/// The names of all topics.
///
/// # Errors
/// If the settings are invalid, or Kafka does not answer within the timeout or refuses the connection.
pub async fn names(config: &ClientSettings, timeout: Duration) -> Result<BTreeSet<String>, TopologyError> {
    let listed = Admin::new(config, timeout)?.list().await?;
    Ok(listed.into_keys().collect())
}

/// How long a compacted topic keeps tombstones (`delete.retention.ms`); `None` if this client may not describe the configuration
/// of the topic, or if Kafka does not answer within the timeout.
///
/// # Errors
/// If the settings are invalid.
pub async fn tombstone_retention(
    config: &ClientSettings,
    topic: &str,
    timeout: Duration,
) -> Result<Option<Duration>, TopologyError> {
    let admin = Admin::new(config, timeout)?;
    let mut existing = ExistingTopics {
        topics: [(topic.to_owned(), ActualTopic::default())].into(),
        unreadable: BTreeMap::new(),
    };
    admin.describe(&mut existing).await;
    let kept = existing
        .topics
        .get(topic)
        .and_then(ActualTopic::tombstone_retention);
    Ok(kept.map(HumanDuration::duration))
}

const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Timeout of one request.
const REQUEST: Duration = Duration::from_secs(10);
/// Timeout of the first request, so that a refused connection is soon reported.
const FIRST_REQUEST: Duration = Duration::from_secs(2);
/// Timeout of finding out why a connection was refused.
const REFUSAL: Duration = Duration::from_secs(1);
/// Maximum number of requests for configurations, if a broker does not know a listed topic yet.
const DESCRIBE_ATTEMPTS: usize = 10;

struct Admin {
    config: ClientSettings,
    client: Arc<KafkaClient<AdminClient<Context>>>,
    brokers: String,
    began: Instant,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct Context(ClientLog);

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.0.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "client error");
    }
}

/// Why the connection is refused, after a colon, or an empty text. Blocks.
fn refusal(config: &ClientSettings) -> Box<str> {
    match probe(config, REFUSAL) {
        Ok(Probed::Refused(reason)) => format!(": {reason}").into(),
        Ok(Probed::Connected | Probed::Unanswered(_)) => Box::default(),
        Err(error) => {
            tracing::debug!(%error, "cannot find out why kafka is unavailable");
            Box::default()
        }
    }
}

/// Why a topic could not be checked, and what to do about it.
fn unreadable(reason: RDKafkaErrorCode) -> (String, &'static str) {
    if is_unsupported(reason) {
        let problem = "could not be checked because this broker does not tell the configuration of topics";
        return (problem.to_owned(), "compare it with `redeliver topics render`");
    }
    (
        format!("could not be checked because its configuration is not readable: {reason}"),
        "allow this client to describe the configuration of topics",
    )
}

/// A topic in a list of all topics.
struct ListedTopic {
    partitions: i32,
    has_leaders: bool,
}

/// The existing topics of a specification.
struct ExistingTopics {
    topics: BTreeMap<String, ActualTopic>,
    /// Topics whose configuration could not be read.
    unreadable: BTreeMap<String, RDKafkaErrorCode>,
}

impl Admin {
    fn new(config: &ClientSettings, timeout: Duration) -> Result<Self, TopologyError> {
        Ok(Self {
            client: Arc::new(
                config
                    .create_with_context(Context::default())
                    .map_err(TopologyError::Client)?,
            ),
            config: config.clone(),
            brokers: config.get("bootstrap.servers").unwrap_or_default().to_owned(),
            began: Instant::now(),
            timeout,
        })
    }

    async fn findings(&self, spec: &TopologySpec) -> Result<Vec<Finding>, TopologyError> {
        let existing = self.read_existing(spec).await?;
        let mut findings = examine_all(spec, &existing.topics);
        if spec.has_groups()
            && let Some(minutes) = self.offsets_retention().await
        {
            findings.extend(examine_offsets(spec, &existing.topics, minutes));
        }
        for topic in spec.topics.iter().filter(|topic| topic.is_managed()) {
            if let Some(reason) = existing.unreadable.get(&*topic.name) {
                let (problem, remedy) = unreadable(*reason);
                findings.push(topic.finding(Severity::Warning, problem, remedy.to_owned()));
            }
        }
        Ok(findings)
    }

    /// `offsets.retention.minutes` of a broker; all brokers of a cluster should have the same. `None` if it
    /// cannot be read: that needs a permission on the whole cluster, which is needed only here.
    async fn offsets_retention(&self) -> Option<u64> {
        let brokers = self.blocking(|client, left| {
            let metadata = client.inner().fetch_metadata(None, left.min(REQUEST))?;
            Ok(metadata.brokers().iter().map(MetadataBroker::id).min())
        });
        let result = match brokers.await {
            Ok(Some(broker)) => {
                let resource = ResourceSpecifier::Broker(broker);
                self.client.describe_configs([&resource], &self.options()).await
            }
            Ok(None) => return None,
            Err(error) => Err(error),
        };
        let unreadable = match result {
            Ok(results) => match results.into_iter().next()? {
                Ok(resource) => {
                    let mut entries = resource.entries.into_iter();
                    let entry = entries.find(|entry| entry.name == OFFSETS_RETENTION)?;
                    return entry.value?.trim().parse().ok();
                }
                Err(code) => KafkaError::AdminOp(code),
            },
            Err(error) => error,
        };
        tracing::debug!(error = %unreadable, "cannot read {OFFSETS_RETENTION} of the brokers");
        None
    }

    /// Creates those of `topics` that are missing.
    async fn create_missing(
        &self,
        spec: &TopologySpec,
        topics: &[&TopicSpec],
    ) -> Result<Vec<Arc<str>>, TopologyError> {
        let listed = self.list().await?;
        let missing: Vec<_> = topics
            .iter()
            .copied()
            .filter(|topic| !listed.contains_key(&*topic.name))
            .collect();
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let actual = if missing.iter().any(|topic| topic.is_managed()) {
            self.read_existing(spec).await?.topics
        } else {
            BTreeMap::new()
        };
        let mut new_topics: Vec<_> = missing
            .iter()
            .map(|topic| MissingTopic::of(topic, &actual))
            .collect();
        let mut created = Vec::new();
        while !new_topics.is_empty() {
            let results = self.create(&new_topics).await;
            let mut again = Vec::new();
            for new in new_topics {
                let code = match results.get(&*new.spec.name) {
                    Some(Ok(())) => {
                        created.push(new.spec.name.clone());
                        continue;
                    }
                    // Another process was faster, or the response to an earlier request was lost.
                    Some(Err(RDKafkaErrorCode::TopicAlreadyExists)) => continue,
                    Some(Err(code)) => *code,
                    None => RDKafkaErrorCode::OperationTimedOut,
                };
                if is_transient(code) && !self.left().is_zero() {
                    again.push(new);
                } else if new.spec.role == Role::Status {
                    let error = new.refused(code);
                    tracing::warn!(error = %error_chain(&error), "cannot create a topic that services can do without");
                } else {
                    return Err(new.refused(code));
                }
            }
            new_topics = again;
            if !new_topics.is_empty() {
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
        for topic in missing {
            let is_needed = topic.role != Role::Status;
            if is_needed || created.contains(&topic.name) {
                let led = self.wait_for_leaders(topic).await;
                led.or_else(|error| if is_needed { Err(error) } else { Ok(()) })?;
            }
        }
        Ok(created)
    }

    /// Sends one request to create topics and returns the result for each topic in the response.
    async fn create(&self, topics: &[MissingTopic<'_>]) -> BTreeMap<String, Result<(), RDKafkaErrorCode>> {
        let requests: Vec<_> = topics
            .iter()
            .map(|topic| {
                let replication = TopicReplication::Fixed(topic.spec.replication);
                let new = NewTopic::new(&topic.spec.name, topic.partitions, replication);
                let config = topic.config.iter();
                config.fold(new, |new, (name, value)| new.set(name, value))
            })
            .collect();
        match self.client.create_topics(&requests, &self.options()).await {
            Ok(results) => results
                .into_iter()
                .map(|result| match result {
                    Ok(name) => (name, Ok(())),
                    Err((name, code)) => (name, Err(code)),
                })
                .collect(),
            Err(error) => {
                let code = error_code(&error).unwrap_or(RDKafkaErrorCode::Fail);
                topics
                    .iter()
                    .map(|topic| (topic.spec.name.to_string(), Err(code)))
                    .collect()
            }
        }
    }

    /// Waits until every partition is listed with a leader and the leaders answer.
    async fn wait_for_leaders(&self, spec: &TopicSpec) -> Result<(), TopologyError> {
        loop {
            let state = match self.list().await?.get(&*spec.name) {
                None => "not listed yet".to_owned(),
                Some(listed) if !listed.has_leaders => "partitions without leaders".to_owned(),
                Some(listed) => match self.probe_leaders(&spec.name, listed.partitions).await {
                    Ok(()) => return Ok(()),
                    Err(error) => error.to_string(),
                },
            };
            if self.left().is_zero() {
                return Err(TopologyError::NotLed {
                    topic: spec.name.clone(),
                    state,
                    waited: self.began.elapsed(),
                });
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Sends a request to the leader of each partition.
    async fn probe_leaders(&self, topic: &Arc<str>, partitions: i32) -> Result<(), KafkaError> {
        let topic = topic.clone();
        self.blocking(move |client, left| {
            (0..partitions).try_for_each(|partition| {
                client
                    .inner()
                    .fetch_watermarks(&topic, partition, left.min(REQUEST))
                    .map(drop)
            })
        })
        .await
    }

    /// Reads the existing topics of the specification with their configuration.
    async fn read_existing(&self, spec: &TopologySpec) -> Result<ExistingTopics, TopologyError> {
        let listed = self.list().await?;
        let mut existing = ExistingTopics {
            topics: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        };
        for topic in &spec.topics {
            if let Some(listed) = listed.get(&*topic.name) {
                let actual = ActualTopic {
                    partitions: listed.partitions,
                    config: BTreeMap::new(),
                };
                existing.topics.insert(topic.name.to_string(), actual);
            }
        }
        for attempt in 1.. {
            self.describe(&mut existing).await;
            let may_succeed_later = existing.unreadable.values().any(|code| is_transient(*code));
            if !may_succeed_later || attempt == DESCRIBE_ATTEMPTS || self.left().is_zero() {
                break;
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        Ok(existing)
    }

    /// Reads the configurations that have not been read yet.
    async fn describe(&self, existing: &mut ExistingTopics) {
        let ExistingTopics { topics, unreadable } = existing;
        let names: Vec<_> = topics
            .iter()
            .filter(|(_, topic)| topic.config.is_empty())
            .map(|(name, _)| name.clone())
            .collect();
        unreadable.clear();
        if names.is_empty() {
            return;
        }
        let resources: Vec<_> = names.iter().map(|name| ResourceSpecifier::Topic(name)).collect();
        let mut reason = RDKafkaErrorCode::Unknown;
        match self.client.describe_configs(&resources, &self.options()).await {
            Ok(results) => {
                for result in results {
                    match result {
                        Ok(resource) => {
                            let OwnedResourceSpecifier::Topic(name) = resource.specifier else {
                                continue;
                            };
                            let Some(topic) = topics.get_mut(&name) else {
                                continue;
                            };
                            topic.config = resource
                                .entries
                                .into_iter()
                                .filter_map(|entry| Some((entry.name, entry.value?)))
                                .collect();
                        }
                        // The client library does not tell which topic the error belongs to.
                        Err(code) => reason = code,
                    }
                }
            }
            Err(error) => reason = error_code(&error).unwrap_or(RDKafkaErrorCode::Fail),
        }
        for name in names {
            if topics.get(&name).is_some_and(|topic| topic.config.is_empty()) {
                unreadable.insert(name, reason);
            }
        }
    }

    /// Lists all topics. Retries until the timeout, unless the connection is refused: wrong credentials or certificates
    /// rarely become right within seconds.
    async fn list(&self) -> Result<BTreeMap<String, ListedTopic>, TopologyError> {
        let mut timeout = FIRST_REQUEST;
        loop {
            let result = self
                .blocking(move |client, left| {
                    let metadata = client.inner().fetch_metadata(None, left.min(timeout))?;
                    let exists =
                        |error| error != Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
                    Ok(metadata
                        .topics()
                        .iter()
                        .filter(|topic| exists(topic.error()))
                        .map(|topic| {
                            let partitions = topic.partitions();
                            let has_leaders = topic.error().is_none()
                                && !partitions.is_empty()
                                && partitions.iter().all(|p| p.leader() >= 0 && p.error().is_none());
                            let listed = ListedTopic {
                                partitions: i32::try_from(partitions.len()).unwrap_or(i32::MAX),
                                has_leaders,
                            };
                            (topic.name().to_owned(), listed)
                        })
                        .collect())
                })
                .await;
            match result {
                Ok(listed) => return Ok(listed),
                Err(source) => {
                    let config = self.config.clone();
                    let refusal = tokio::task::spawn_blocking(move || refusal(&config)).await;
                    let refusal = refusal.unwrap_or_default();
                    if !refusal.is_empty() || self.left().is_zero() {
                        return Err(TopologyError::Unreachable {
                            brokers: self.brokers.clone(),
                            refusal,
                            source,
                        });
                    }
                    timeout = REQUEST;
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    /// Runs a blocking call on a thread for blocking calls.
    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&AdminClient<Context>, Duration) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T, KafkaError> {
        let client = self.client.clone();
        // Send the request even if no time is left: its error tells the cause.
        let left = self.left().max(RETRY_DELAY);
        match tokio::task::spawn_blocking(move || call(&client, left)).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(KafkaError::Canceled),
        }
    }

    fn options(&self) -> AdminOptions {
        let left = self.left().clamp(RETRY_DELAY, REQUEST);
        AdminOptions::new()
            .request_timeout(Some(left))
            .operation_timeout(Some(left))
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

/// Whether the same request may succeed a moment later.
fn is_transient(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::AllBrokersDown
            | Code::BrokerNotAvailable
            | Code::BrokerTransportFailure
            | Code::CoordinatorNotAvailable
            | Code::LeaderNotAvailable
            | Code::NetworkException
            | Code::NotController
            | Code::NotEnoughReplicas
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::Resolve
            | Code::ThrottlingQuotaExceeded
            | Code::UnknownTopicOrPartition
    )
}

/// A topic to create.
pub(super) struct MissingTopic<'s> {
    spec: &'s TopicSpec,
    pub(super) partitions: i32,
    pub(super) config: Vec<(&'static str, String)>,
}

impl<'s> MissingTopic<'s> {
    /// Derives its partitions and its size limit from other topics, where the specification says so.
    pub(super) fn of(spec: &'s TopicSpec, actual: &BTreeMap<String, ActualTopic>) -> Self {
        let model = spec.partitions_as.as_deref().and_then(|name| actual.get(name));
        let limit = largest_source(spec, actual).map(|(_, limit)| limit);
        Self {
            spec,
            partitions: model.map_or(spec.partitions, |model| model.partitions),
            config: creation_config(spec, limit),
        }
    }

    fn refused(&self, code: RDKafkaErrorCode) -> TopologyError {
        let hint = match code {
            RDKafkaErrorCode::InvalidReplicationFactor => {
                "; the replication factor cannot be higher than the number of brokers"
            }
            RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::ClusterAuthorizationFailed => {
                "; this client is not authorised to create topics: create it yourself"
            }
            RDKafkaErrorCode::PolicyViolation => {
                "; the cluster's policy does not allow it: create it yourself"
            }
            _ => "",
        };
        TopologyError::Refused {
            topic: self.spec.name.clone(),
            partitions: self.partitions,
            replication: self.spec.replication,
            hint,
            source: code,
        }
    }
}
