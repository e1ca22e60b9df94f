//! Keeps track of which topics exist while a process runs.
//!
//! A producer that writes to a deleted topic waits until its transaction times out. A consumer whose topic was deleted and
//! created again continues at the old offset. The client reports neither. So one thread per process requests the
//! descriptions of all watched topics every [`INTERVAL`], by name and without creating any. Others read the latest result
//! without waiting.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::MetadataBroker;
use redeliver_core::pipeline::is_topic_name;
use redeliver_kafka_ffi::{
    GroupDescription, KafkaClient, TopicDescription, TopicId, describe_group, describe_topics,
};

use crate::client::{ClientLog, ClientSettings, KafkaSettings};
use crate::credentials::Renewal;
use crate::processor::Waker;

/// Interval of the requests.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of a request for topics.
const CALL: Duration = Duration::from_secs(5);
/// Timeout of a request to a group's coordinator. It is short because requests for topics wait for it.
const GROUP_CALL: Duration = Duration::from_secs(1);
/// How many consecutive responses without a topic confirm that it is missing. A single one does not: a broker that has just
/// started, or has not heard of a new topic yet, answers that it does not know the topic.
const CONFIRMING_RESPONSES: usize = 2;

/// What is known about a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopicState {
    /// Not requested yet, or Kafka has not answered.
    Unknown,
    /// Certainly missing, or not visible to this client.
    Missing {
        /// The time of the first response without the topic.
        since: Instant,
    },
    /// Exists.
    Exists {
        /// The topic's id; `None` if the broker does not support topic ids (before Kafka 2.8).
        id: Option<TopicId>,
        /// The number of partitions.
        partitions: i32,
    },
}

impl TopicState {
    /// Whether it is certain that the topic does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }
}

/// A handle of the watch. Its thread ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct TopicWatch(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    topics: Mutex<BTreeMap<Arc<str>, WatchedTopic>>,
    /// Notified after every response.
    updated: Condvar,
    /// The number of missing topics.
    missing: AtomicUsize,
    /// The number of changes of any topic's state.
    changes: AtomicUsize,
    /// Throttles the errors of each topic.
    log: ClientLog,
    groups: Mutex<Vec<GroupRequest>>,
    /// Whether the thread should send its requests now.
    wake: (Mutex<bool>, Condvar),
}

#[derive(Debug)]
struct WatchedTopic {
    state: TopicState,
    /// When the last request was sent whose response contained the topic.
    last_seen: Option<Instant>,
    /// Consecutive responses without the topic.
    missed: usize,
    missed_since: Option<Instant>,
    wakers: Vec<Waker>,
}

impl Default for WatchedTopic {
    fn default() -> Self {
        Self {
            state: TopicState::Unknown,
            last_seen: None,
            missed: 0,
            missed_since: None,
            wakers: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct GroupRequest {
    group: String,
    result: Arc<Mutex<Option<GroupResult>>>,
    waker: Waker,
}

type GroupResult = Result<GroupDescription, RDKafkaErrorCode>;

/// A request for the description of a group.
#[derive(Debug)]
pub(crate) struct PendingGroup(Arc<Mutex<Option<GroupResult>>>);

impl PendingGroup {
    /// The result, once there is one.
    pub(crate) fn take(&self) -> Option<GroupResult> {
        lock(&self.0).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TopicWatch {
    /// Starts the thread. Kafka need not be reachable yet.
    ///
    /// # Errors
    /// If the client cannot be created from the settings, or the thread cannot be started.
    pub fn start(settings: &KafkaSettings) -> io::Result<Self> {
        let renewal = Renewal::new(settings, "topic-watch");
        let settings = settings.client();
        let client = create_client(&settings).map_err(io::Error::other)?;
        let shared = Arc::new(Shared::default());
        let weak = Arc::downgrade(&shared);
        thread::Builder::new()
            .name("topic-watch".to_owned())
            .spawn(move || watch(client, &settings, &renewal, &weak))?;
        Ok(Self(shared))
    }

    /// Watches these topics. `waker` is woken when the state of one of them changes.
    pub fn watch(&self, topics: impl IntoIterator<Item = Arc<str>>, waker: &Waker) {
        let mut known = lock(&self.0.topics);
        for topic in topics {
            known.entry(topic).or_default().wakers.push(waker.clone());
        }
        drop(known);
        self.0.wake();
    }

    /// The state of a topic. A topic that is not watched yet is watched from now on, and unknown until the next response.
    #[must_use]
    pub fn state(&self, topic: &str) -> TopicState {
        // The broker answers a request that contains an invalid name with an error, also for all other topics.
        if !is_topic_name(topic) {
            return TopicState::Unknown;
        }
        let mut topics = lock(&self.0.topics);
        if let Some(known) = topics.get(topic) {
            return known.state;
        }
        topics.insert(topic.into(), WatchedTopic::default());
        drop(topics);
        self.0.wake();
        TopicState::Unknown
    }

    /// The number of changes of any watched topic's state. Takes no lock.
    pub(crate) fn changes(&self) -> usize {
        self.0.changes.load(Ordering::Acquire)
    }

    /// Whether any watched topic is missing. Takes no lock, so it can be called for every record.
    #[must_use]
    pub fn any_missing(&self) -> bool {
        self.0.missing.load(Ordering::Relaxed) > 0
    }

    /// How long the topic has been missing; `None` if it may exist. Takes no lock unless a watched topic is missing, so it
    /// can be called for every record.
    #[must_use]
    pub fn missing_for(&self, topic: &str) -> Option<Duration> {
        if !self.any_missing() {
            return None;
        }
        match self.state(topic) {
            TopicState::Missing { since } => Some(since.elapsed()),
            TopicState::Unknown | TopicState::Exists { .. } => None,
        }
    }

    /// Sends a request now, without waiting for the response.
    pub(crate) fn refresh(&self) {
        self.0.wake();
    }

    /// Sends a request now that includes these topics, which are watched from now on. Does not wait for the response.
    pub(crate) fn refresh_including<'a>(&self, topics: impl IntoIterator<Item = &'a Arc<str>>) {
        let mut known = lock(&self.0.topics);
        for topic in topics {
            if !known.contains_key(topic) && is_topic_name(topic) {
                known.insert(topic.clone(), WatchedTopic::default());
            }
        }
        drop(known);
        self.0.wake();
    }

    /// Sends a request now and waits until it is certain whether the topic exists, or until `timeout`.
    pub(crate) fn confirm(&self, topic: &str, timeout: Duration) -> TopicState {
        let began = Instant::now();
        if self.state(topic) == TopicState::Unknown && !is_topic_name(topic) {
            return TopicState::Unknown;
        }
        self.0.wake();
        // A response to a request that was sent before this call may be outdated.
        let is_uncertain = |topics: &mut BTreeMap<Arc<str>, WatchedTopic>| {
            let known = topics.get(topic);
            known.is_some_and(|known| {
                !known.state.is_missing() && known.last_seen.is_none_or(|sent| sent < began)
            })
        };
        let topics = lock(&self.0.topics);
        let waited = self.0.updated.wait_timeout_while(topics, timeout, is_uncertain);
        let (topics, _) = waited.unwrap_or_else(PoisonError::into_inner);
        topics.get(topic).map_or(TopicState::Unknown, |known| known.state)
    }

    /// Requests the members of a group from its coordinator. `waker` is woken when there is a result.
    pub(crate) fn describe_group(&self, group: &str, waker: &Waker) -> PendingGroup {
        let result = Arc::default();
        lock(&self.0.groups).push(GroupRequest {
            group: group.to_owned(),
            result: Arc::clone(&result),
            waker: waker.clone(),
        });
        self.0.wake();
        PendingGroup(result)
    }
}

impl Shared {
    fn wake(&self) {
        *lock(&self.wake.0) = true;
        self.wake.1.notify_one();
    }

    /// Waits for the interval or a call of [`Shared::wake`].
    fn wait(&self) {
        let is_awake = lock(&self.wake.0);
        let (mut is_awake, _) = self
            .wake
            .1
            .wait_timeout_while(is_awake, INTERVAL, |is_awake| !*is_awake)
            .unwrap_or_else(PoisonError::into_inner);
        *is_awake = false;
    }

    fn update(&self, sent: Instant, names: &[Arc<str>], found: &Found) {
        let mut topics = lock(&self.topics);
        for name in names {
            let Some(topic) = topics.get_mut(name) else {
                continue;
            };
            let before = topic.state;
            match found.get(&**name) {
                Some(Ok(found)) => topic.update(Some(found), sent),
                None => topic.update(None, sent),
                // An error says nothing about whether the topic exists, so its state stays.
                Some(Err(error)) => {
                    if self.log.should_log(name) {
                        tracing::warn!(topic = &**name, %error, "cannot find out whether the topic exists");
                    }
                }
            }
            if topic.state != before {
                self.changes.fetch_add(1, Ordering::Release);
                topic.wakers.iter().for_each(Waker::wake);
            }
        }
        let missing = topics.values().filter(|topic| topic.state.is_missing());
        self.missing.store(missing.count(), Ordering::Relaxed);
        self.updated.notify_all();
    }
}

impl WatchedTopic {
    fn update(&mut self, found: Option<&TopicDescription>, sent: Instant) {
        if let Some(found) = found {
            self.last_seen = Some(sent);
            self.missed = 0;
            self.missed_since = None;
            self.state = TopicState::Exists {
                id: found.id,
                partitions: found.partitions,
            };
            return;
        }
        self.missed += 1;
        let since = *self.missed_since.get_or_insert(sent);
        if self.missed >= CONFIRMING_RESPONSES {
            self.state = TopicState::Missing { since };
        }
    }
}

type Found = BTreeMap<String, Result<TopicDescription, RDKafkaErrorCode>>;

/// The last known coordinators of groups.
#[derive(Debug, Default)]
struct Coordinators(BTreeMap<String, i32>);

impl Coordinators {
    /// Sends the request to the last known coordinator, and if that fails, to all brokers. `topic` is any topic, for a
    /// metadata request that returns the brokers.
    fn describe(
        &mut self,
        client: &BaseConsumer<WatchContext>,
        group: &str,
        topic: Option<&str>,
    ) -> GroupResult {
        let describe = |broker| describe_group(client.client(), broker, group, GROUP_CALL);
        let known = self.0.remove(group);
        if let Some(known) = known
            && let Ok(description) = describe(known)
        {
            self.0.insert(group.to_owned(), known);
            return Ok(description);
        }
        let metadata = client.fetch_metadata(topic, GROUP_CALL);
        let metadata =
            metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail))?;
        let mut last_error = RDKafkaErrorCode::CoordinatorNotAvailable;
        let brokers = metadata.brokers().iter().map(MetadataBroker::id);
        for broker in brokers.filter(|broker| known != Some(*broker)) {
            match describe(broker) {
                Ok(description) => {
                    self.0.insert(group.to_owned(), broker);
                    return Ok(description);
                }
                Err(RDKafkaErrorCode::NotCoordinator) => {}
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }
}

fn create_client(settings: &ClientSettings) -> Result<WatchClient, KafkaError> {
    settings.create_with_context(WatchContext::default())
}

/// Runs until the last handle is dropped.
fn watch(mut client: WatchClient, settings: &ClientSettings, renewal: &Renewal, shared: &Weak<Shared>) {
    let mut coordinators = Coordinators::default();
    while let Some(shared) = shared.upgrade() {
        if renewal.is_due() {
            renewal.begin();
            match create_client(settings) {
                Ok(new) => {
                    client = new;
                    renewal.end();
                }
                Err(error) => {
                    renewal.failed();
                    tracing::warn!(
                        %error,
                        "cannot create the kafka client that watches topics; trying again later"
                    );
                }
            }
        }
        let names: Vec<Arc<str>> = lock(&shared.topics).keys().cloned().collect();
        let borrowed: Vec<&str> = names.iter().map(|name| &**name).collect();
        let sent = Instant::now();
        match describe_topics(client.client(), &borrowed, CALL) {
            Ok(found) => shared.update(sent, &names, &found),
            // An outage deletes no topic, so all states stay.
            Err(error) => tracing::debug!(%error, "request for topics failed"),
        }
        // Topics are requested again after each group: they must not wait for several groups whose broker is down.
        let group = lock(&shared.groups).first().map(|request| request.group.clone());
        if let Some(group) = group {
            let described = coordinators.describe(&client, &group, borrowed.first().copied());
            let is_same = |request: &mut GroupRequest| request.group == group;
            for GroupRequest { result, waker, .. } in lock(&shared.groups).extract_if(.., is_same) {
                *lock(&result) = Some(described.clone());
                waker.wake();
            }
            continue;
        }
        let is_confirming = lock(&shared.topics)
            .values()
            .any(|topic| (1..CONFIRMING_RESPONSES).contains(&topic.missed));
        if is_confirming {
            thread::park_timeout(INTERVAL / 8);
        } else {
            shared.wait();
        }
    }
}

type WatchClient = KafkaClient<BaseConsumer<WatchContext>>;

#[derive(Debug, Default)]
struct WatchContext(ClientLog);

impl ClientContext for WatchContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.0.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "client error");
    }
}

impl ConsumerContext for WatchContext {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_consecutive_responses_without_a_topic_confirm_that_it_is_missing() {
        let mut topic = WatchedTopic::default();
        let now = Instant::now();
        let found = TopicDescription {
            id: Some(TopicId::from_bits(1)),
            partitions: 3,
        };
        topic.update(Some(&found), now);
        let exists = TopicState::Exists {
            id: found.id,
            partitions: 3,
        };
        assert_eq!(topic.state, exists);
        topic.update(None, now);
        assert_eq!(topic.state, exists);
        topic.update(None, now + INTERVAL);
        assert_eq!(topic.state, TopicState::Missing { since: now });
        topic.update(Some(&found), now);
        assert_eq!(topic.state, exists);
    }
}
