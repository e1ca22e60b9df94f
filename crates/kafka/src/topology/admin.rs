//! Asking Kafka about topics, and creating them.
//!
//! Topics are always listed as a whole: asking for one by name may create it, where brokers create topics
//! automatically.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::admin::{
    AdminClient, AdminOptions, NewTopic, OwnedResourceSpecifier, ResourceSpecifier, TopicReplication,
};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer as _, ProducerContext};
use rdkafka::types::RDKafkaRespErr;

use super::needed::{creation_config, largest_source};
use super::{ActualTopic, Finding, Severity, TopicSpec, TopologySpec, examine_all};
use crate::client::ClientLog;

/// Why topics could not be looked at or created.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The client's settings are wrong.
    #[error("making a client that looks at topics")]
    Client(#[source] KafkaError),
    /// Kafka did not answer in time.
    #[error("asking kafka at `{brokers}` for its topics{refusal}")]
    Unreachable {
        /// The configured addresses.
        brokers: String,
        /// Why it or we refused the connection, with its punctuation, or nothing.
        refusal: Box<str>,
        /// What the client says.
        source: KafkaError,
    },
    /// Kafka refused to create a topic.
    #[error(
        "creating topic `{topic}` with {partitions} partitions and replication factor {replication}{hint}"
    )]
    Refused {
        /// The topic.
        topic: Arc<str>,
        /// Partitions asked for.
        partitions: i32,
        /// Replicas asked for.
        replication: i32,
        /// What may help, with its punctuation, or nothing.
        hint: &'static str,
        /// Why.
        source: RDKafkaErrorCode,
    },
    /// A new topic did not become usable in time.
    #[error("waiting for the leaders of topic `{topic}`: {state} after {waited:?}")]
    NotLed {
        /// The topic.
        topic: Arc<str>,
        /// What was seen last.
        state: String,
        /// For how long was waited.
        waited: Duration,
    },
}

/// What [`apply`] did for a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The topic.
    pub topic: Arc<str>,
    /// Whether it was created just now.
    pub created: bool,
    /// What is wrong with it; existing topics are not changed.
    pub findings: Vec<Finding>,
}

/// Compares the topics with what they should be. Changes nothing.
///
/// # Errors
/// When the settings are wrong or Kafka does not answer within the timeout.
pub async fn check(
    config: &ClientConfig,
    spec: &TopologySpec,
    timeout: Duration,
) -> Result<Vec<Finding>, TopologyError> {
    Admin::new(config, timeout)?.findings(spec).await
}

/// Creates the topics that are missing and waits until each of their partitions answers: a producer that
/// writes to a topic created a moment ago can lose its first batches. Does not change topics that exist.
///
/// # Errors
/// When the settings are wrong, Kafka does not answer within the timeout, refuses to create a topic, or
/// does not find leaders for it. What was created until then stays; the next call goes on from there.
pub async fn apply(
    config: &ClientConfig,
    spec: &TopologySpec,
    timeout: Duration,
) -> Result<Vec<Applied>, TopologyError> {
    let admin = Admin::new(config, timeout)?;
    // What a topic follows comes before it, so that the limits of a new source are known when ours are made.
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

/// The names of all topics there are.
///
/// # Errors
/// When the settings are wrong or Kafka does not answer within the timeout.
pub async fn names(config: &ClientConfig, timeout: Duration) -> Result<BTreeSet<String>, TopologyError> {
    let listed = Admin::new(config, timeout)?.list().await?;
    Ok(listed.into_keys().collect())
}

/// How long to wait before the same question is asked again.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest single request.
const REQUEST: Duration = Duration::from_secs(10);
/// How long it may take to find out why a connection was refused.
const REFUSAL: Duration = Duration::from_secs(1);
/// How often configurations are read again when a broker does not know a topic yet that was listed.
const DESCRIBE_ATTEMPTS: usize = 10;

struct Admin {
    config: ClientConfig,
    client: Arc<AdminClient<Context>>,
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
        tracing::debug!(%error, reason, "kafka client");
    }
}

/// Why a connection was refused last. Calls only say that no broker could be asked, and an admin client hears
/// nothing else.
#[derive(Debug, Default)]
struct Refusal(Mutex<Option<String>>);

impl ClientContext for Refusal {
    /// The client beside it has logged the same.
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, error: KafkaError, reason: &str) {
        if matches!(
            error.rdkafka_error_code(),
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL)
        ) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
        }
    }
}

impl ProducerContext for Refusal {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _opaque: ()) {}
}

impl Refusal {
    /// Asks Kafka with a client that is told of errors; with its punctuation, or nothing. Blocks.
    fn find(config: &ClientConfig) -> Box<str> {
        let client: BaseProducer<Self> = match config.create_with_context(Self::default()) {
            Ok(client) => client,
            Err(error) => {
                tracing::debug!(%error, "finding out why kafka does not answer");
                return Box::default();
            }
        };
        let end = Instant::now() + REFUSAL;
        loop {
            // What it answers shows in the events.
            drop(client.client().fetch_metadata(None, PAUSE));
            client.poll(PAUSE);
            let refusal = client.context().0.lock().unwrap_or_else(PoisonError::into_inner);
            match &*refusal {
                Some(reason) => return format!(": {reason}").into(),
                None if Instant::now() >= end => return Box::default(),
                None => {}
            }
        }
    }
}

/// A topic as it is listed.
struct Listed {
    partitions: i32,
    /// Whether every partition has a leader.
    led: bool,
}

/// What is known of the topics that exist.
struct Known {
    topics: BTreeMap<String, ActualTopic>,
    /// Those whose configuration could not be read, and why.
    unreadable: BTreeMap<String, RDKafkaErrorCode>,
}

impl Admin {
    fn new(config: &ClientConfig, timeout: Duration) -> Result<Self, TopologyError> {
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
        let known = self.look(spec).await?;
        let mut findings = examine_all(spec, &known.topics);
        for topic in spec.topics.iter().filter(|topic| topic.is_managed()) {
            if let Some(reason) = known.unreadable.get(&*topic.name) {
                findings.push(topic.finding(
                    Severity::Warning,
                    format!("could not be checked, its configuration is not readable: {reason}"),
                    "allow this client to describe the configuration of topics".to_owned(),
                ));
            }
        }
        Ok(findings)
    }

    /// Creates what is missing of these topics.
    async fn create_missing(
        &self,
        spec: &TopologySpec,
        wanted: &[&TopicSpec],
    ) -> Result<Vec<Arc<str>>, TopologyError> {
        let listed = self.list().await?;
        let missing: Vec<_> = wanted
            .iter()
            .copied()
            .filter(|topic| !listed.contains_key(&*topic.name))
            .collect();
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let actual = if missing.iter().any(|topic| topic.is_managed()) {
            self.look(spec).await?.topics
        } else {
            BTreeMap::new()
        };
        let mut to_make: Vec<_> = missing.iter().map(|topic| New::of(topic, &actual)).collect();
        let mut created = Vec::new();
        while !to_make.is_empty() {
            let results = self.create(&to_make).await;
            let mut again = Vec::new();
            for new in to_make {
                match results.get(&*new.spec.name) {
                    Some(Ok(())) => created.push(new.spec.name.clone()),
                    Some(Err(RDKafkaErrorCode::TopicAlreadyExists)) => {}
                    Some(Err(code)) if !may_pass(*code) => return Err(new.refused(*code)),
                    Some(Err(code)) if self.left().is_zero() => return Err(new.refused(*code)),
                    Some(Err(_)) => again.push(new),
                    None if self.left().is_zero() => {
                        return Err(new.refused(RDKafkaErrorCode::OperationTimedOut));
                    }
                    None => again.push(new),
                }
            }
            to_make = again;
            if !to_make.is_empty() {
                tokio::time::sleep(PAUSE).await;
            }
        }
        for topic in missing {
            self.wait_for_leaders(topic).await?;
        }
        Ok(created)
    }

    /// One request to create topics; what became of each, as far as there was an answer.
    async fn create(&self, topics: &[New<'_>]) -> BTreeMap<String, Result<(), RDKafkaErrorCode>> {
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
                let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail);
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
                Some(listed) if !listed.led => "partitions without leaders".to_owned(),
                Some(listed) => match self.ask_leaders(&spec.name, listed.partitions).await {
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
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn ask_leaders(&self, topic: &Arc<str>, partitions: i32) -> Result<(), KafkaError> {
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

    /// The specified topics that exist, with their configuration.
    async fn look(&self, spec: &TopologySpec) -> Result<Known, TopologyError> {
        let listed = self.list().await?;
        let mut known = Known {
            topics: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        };
        for topic in &spec.topics {
            if let Some(listed) = listed.get(&*topic.name) {
                let actual = ActualTopic {
                    partitions: listed.partitions,
                    config: BTreeMap::new(),
                };
                known.topics.insert(topic.name.to_string(), actual);
            }
        }
        for attempt in 1.. {
            self.describe(&mut known).await;
            let lagging = known.unreadable.values().any(|code| may_pass(*code));
            if !lagging || attempt == DESCRIBE_ATTEMPTS || self.left().is_zero() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(known)
    }

    /// Reads configurations that are not known yet.
    async fn describe(&self, known: &mut Known) {
        let Known { topics, unreadable } = known;
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
                        // The answer does not say of which topic it is the error.
                        Err(code) => reason = code,
                    }
                }
            }
            Err(error) => reason = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail),
        }
        for name in names {
            if topics.get(&name).is_some_and(|topic| topic.config.is_empty()) {
                unreadable.insert(name, reason);
            }
        }
    }

    /// All topics there are.
    async fn list(&self) -> Result<BTreeMap<String, Listed>, TopologyError> {
        loop {
            let result = self
                .blocking(|client, left| {
                    let metadata = client.inner().fetch_metadata(None, left.min(REQUEST))?;
                    let exists =
                        |error| error != Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
                    Ok(metadata
                        .topics()
                        .iter()
                        .filter(|topic| exists(topic.error()))
                        .map(|topic| {
                            let partitions = topic.partitions();
                            let led = topic.error().is_none()
                                && !partitions.is_empty()
                                && partitions.iter().all(|p| p.leader() >= 0 && p.error().is_none());
                            let partitions = i32::try_from(partitions.len()).unwrap_or(i32::MAX);
                            (topic.name().to_owned(), Listed { partitions, led })
                        })
                        .collect())
                })
                .await;
            match result {
                Ok(listed) => return Ok(listed),
                Err(source) if self.left().is_zero() => {
                    let config = self.config.clone();
                    let refusal = tokio::task::spawn_blocking(move || Refusal::find(&config)).await;
                    return Err(TopologyError::Unreachable {
                        brokers: self.brokers.clone(),
                        refusal: refusal.unwrap_or_default(),
                        source,
                    });
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Runs a call that blocks on a thread for such calls.
    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(&AdminClient<Context>, Duration) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T, KafkaError> {
        let client = self.client.clone();
        // Even with no time left a question is asked: its answer says what is wrong.
        let left = self.left().max(PAUSE);
        match tokio::task::spawn_blocking(move || call(&client, left)).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(KafkaError::Canceled),
        }
    }

    fn options(&self) -> AdminOptions {
        let left = self.left().clamp(PAUSE, REQUEST);
        AdminOptions::new()
            .request_timeout(Some(left))
            .operation_timeout(Some(left))
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

/// Whether the same request may succeed a moment later.
fn may_pass(code: RDKafkaErrorCode) -> bool {
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

/// A topic that is to be created.
struct New<'s> {
    spec: &'s TopicSpec,
    partitions: i32,
    config: Vec<(&'static str, String)>,
}

impl<'s> New<'s> {
    /// Shaped after the topics that it follows.
    fn of(spec: &'s TopicSpec, actual: &BTreeMap<String, ActualTopic>) -> Self {
        let model = spec.partitions_as.as_deref().and_then(|model| actual.get(model));
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
                "; this client may not create topics, create it yourself"
            }
            RDKafkaErrorCode::PolicyViolation => {
                "; the cluster's policy does not allow it, create it yourself"
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
