//! Keeps track of which topics exist and can be written while a process runs.
//!
//! A transaction that writes to a topic that was deleted, has no leader or may not be written stops all others of its lane. A
//! consumer whose topic was deleted and created again continues at the old offset. The client reports neither in time. So one
//! thread per process requests the descriptions of all watched topics every [`INTERVAL`], by name and without creating any.
//! Others read the latest result without waiting, [`TopicWatch::presence`] tells whether to write to a topic, and transactions
//! report what they learn.
//!
//! Kafka accepts no record for a partition with fewer than `min.insync.replicas` replicas in sync, and does not answer records that it has accepted
//! shortly before. So the thread also requests this setting of topics that lack replicas, each time, because it may change. Without the permission to
//! read it, only transactions show that such a topic cannot be written.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};
use std::{fmt, io};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::MetadataBroker;
use redeliver_core::pipeline::is_topic_name;
use redeliver_kafka_ffi::{
    GroupDescription, KafkaClient, TopicDescription, TopicId, describe_group, min_in_sync_replicas,
};

use crate::client::{ClientLog, ClientSettings, KafkaSettings};
use crate::credentials::Renewal;
use crate::describe::describe_topics;
use crate::processor::Waker;
use crate::recovery::error_code;

/// Interval of the requests.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// The least interval, however many lanes wait for a topic.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout of a request for topics.
const CALL: Duration = Duration::from_secs(5);
/// Timeout of a request for metadata or a setting, or to a group's coordinator. It is short because requests for topics wait for it.
const GROUP_CALL: Duration = Duration::from_secs(1);
/// How long a topic may not be written after the broker has denied it, unless the broker tells the permissions for topics.
const DENIED: Duration = Duration::from_secs(30);
/// How long it may not be written then although the broker says that it may: brokers learn of permissions at different times.
const DENIED_DESPITE: Duration = Duration::from_secs(5);
/// A topic that became unwritable in this time is requested more often: most elections of a leader end within it.
const SETTLING: Duration = Duration::from_secs(5);
/// How long a topic may accept no record while others do, at first. See [`TopicWatch::patience`].
const PATIENCE: Duration = Duration::from_secs(1);
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

/// Whether records can be written to a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The topic exists, and nothing is known that prevents writes.
    Exists,
    /// Not requested yet, or Kafka has not answered.
    Unknown,
    /// The topic does not exist.
    Missing {
        /// For how long this process has observed it.
        lasting: Duration,
    },
    /// The topic exists, or existed a moment ago, and cannot be written.
    Unwritable {
        /// Why.
        reason: Unwritable,
        /// For how long this process has observed it.
        lasting: Duration,
    },
}

impl Presence {
    /// Whether a transaction that writes to the topic would fail or stop.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Unwritable { .. })
    }

    /// Whether it is certain that the topic does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// For how long the topic has been unavailable; 0 if it is not.
    #[must_use]
    pub fn lasting(&self) -> Duration {
        match self {
            Self::Missing { lasting } | Self::Unwritable { lasting, .. } => *lasting,
            Self::Exists | Self::Unknown => Duration::ZERO,
        }
    }
}

/// The predicate of a sentence whose subject is the topic.
impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exists => "exists",
            Self::Unknown => "is not known yet",
            Self::Missing { .. } => "does not exist",
            Self::Unwritable { reason, .. } => match reason {
                Unwritable::Denied => "may not be written by this process",
                Unwritable::NoLeader => "has a partition without a leader",
                Unwritable::TooFewReplicas => "has a partition with too few replicas in sync",
                Unwritable::Stalled => "does not accept records",
            },
        })
    }
}

/// Why a topic cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwritable {
    /// This process lacks the permission.
    Denied,
    /// One of its partitions has no leader. Which partition a record goes to is decided when it is written, so all records wait.
    NoLeader,
    /// One of its partitions has fewer replicas in sync than `min.insync.replicas`.
    TooFewReplicas,
    /// A transaction was given up because the topic did not accept its records: a leader does not answer, for example. This ends when the broker has resolved that transaction, for which it has to write to each partition.
    Stalled,
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
    blocked: Option<Blocked>,
    /// The number of unresolved transactions that this topic has stalled, and since when there is the last one.
    stalls: usize,
    stalled_since: Instant,
    /// See [`TopicDescription::fewest_in_sync`].
    fewest_in_sync: Option<usize>,
    /// `min.insync.replicas`, as far as it is known.
    min_in_sync: Option<usize>,
    patience: Duration,
    wakers: Vec<Waker>,
}

/// Why a topic cannot be written, apart from stalled transactions.
#[derive(Clone, Copy, Debug)]
struct Blocked {
    reason: Unwritable,
    since: Instant,
    /// When that was observed last.
    observed: Instant,
    /// Until when it is assumed; `None` until a response says otherwise.
    until: Option<Instant>,
}

impl Default for WatchedTopic {
    fn default() -> Self {
        Self {
            state: TopicState::Unknown,
            last_seen: None,
            missed: 0,
            missed_since: None,
            blocked: None,
            stalls: 0,
            stalled_since: Instant::now(),
            fewest_in_sync: None,
            min_in_sync: None,
            patience: PATIENCE,
            wakers: Vec::new(),
        }
    }
}

/// A topic that has stalled a transaction. It counts as unwritable until this is dropped.
#[derive(Debug)]
pub(crate) struct Stall {
    watch: TopicWatch,
    topic: Arc<str>,
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.watch
            .change(&self.topic, |topic| topic.stalls = topic.stalls.saturating_sub(1));
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
        self.known(topic, |known| known.state)
            .unwrap_or(TopicState::Unknown)
    }

    fn known<T>(&self, topic: &str, read: impl FnOnce(&WatchedTopic) -> T) -> Option<T> {
        let mut topics = lock(&self.0.topics);
        if let Some(known) = topics.get(topic) {
            return Some(read(known));
        }
        // The broker answers a request that contains an invalid name with an error, also for all other topics.
        if is_topic_name(topic) {
            topics.insert(topic.into(), WatchedTopic::default());
            drop(topics);
            self.0.wake();
        }
        None
    }

    /// The number of changes of any watched topic's state. Takes no lock.
    pub(crate) fn changes(&self) -> usize {
        self.0.changes.load(Ordering::Acquire)
    }

    /// Whether records can be written to a topic. A topic that is not watched yet is watched from now on, and unknown until the
    /// next response.
    #[must_use]
    pub fn presence(&self, topic: &str) -> Presence {
        self.known(topic, |known| known.presence(Instant::now()))
            .unwrap_or(Presence::Unknown)
    }

    /// Whether any watched topic is unavailable, or lacks replicas in sync.
    pub(crate) fn is_any_impaired(&self) -> bool {
        let now = Instant::now();
        let topics = lock(&self.0.topics);
        let is_impaired =
            |topic: &WatchedTopic| topic.fewest_in_sync.is_some() || topic.presence(now).is_unavailable();
        topics.values().any(is_impaired)
    }

    /// As if a response to a request that was sent at this time had described the topic so.
    #[cfg(test)]
    pub(crate) fn observe(&self, topic: &Arc<str>, found: Option<&TopicDescription>, sent: Instant) {
        self.change(topic, |topic| topic.update(found, sent));
    }

    /// The broker has denied this process to write to the topic.
    pub(crate) fn denied(&self, topic: &Arc<str>) {
        let now = Instant::now();
        self.change(topic, |topic| {
            topic.block(Unwritable::Denied, now, Some(now + DENIED));
        });
        self.0.wake();
    }

    /// The topic has stalled a transaction. The topic is unwritable until the result is dropped.
    pub(crate) fn stalled(&self, topic: &Arc<str>) -> Stall {
        let now = Instant::now();
        self.change(topic, |topic| {
            // Lanes that the topic stalls at the same time count once.
            if topic.stalls == 0 {
                topic.patience = topic.patience.saturating_mul(2);
            }
            topic.stalls += 1;
            topic.stalled_since = now;
        });
        Stall {
            watch: self.clone(),
            topic: topic.clone(),
        }
    }

    /// How long a transaction waits for a topic that accepts no record while others do. Each stall doubles it: otherwise, a topic that is slow, but
    /// works, would never be written.
    pub(crate) fn patience(&self, topic: &str) -> Duration {
        self.known(topic, |known| known.patience).unwrap_or(PATIENCE)
    }

    /// A transaction with records for these topics was committed, and took so long.
    pub(crate) fn committed(&self, took: Duration, is_included: impl Fn(&str) -> bool) {
        for (name, topic) in lock(&self.0.topics).iter_mut() {
            if topic.patience > PATIENCE && is_included(name) {
                topic.patience = topic.patience.min(PATIENCE.max(took.saturating_mul(2)));
            }
        }
    }

    fn change(&self, topic: &Arc<str>, change: impl FnOnce(&mut WatchedTopic)) {
        let mut topics = lock(&self.0.topics);
        let known = topics.entry(topic.clone()).or_default();
        change(known);
        known.wakers.iter().for_each(Waker::wake);
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

    /// Requests `min.insync.replicas` of these topics.
    fn update_min_in_sync<'n>(
        &self,
        client: &WatchClient,
        names: impl Iterator<Item = &'n Arc<str>>,
        sent: Instant,
    ) {
        let names: Vec<&str> = names.map(|name| &**name).collect();
        let known = match min_in_sync_replicas(client.client(), &names, GROUP_CALL) {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!(%error, "request for min.insync.replicas failed");
                return;
            }
        };
        let mut topics = lock(&self.topics);
        for name in names {
            if let Some(topic) = topics.get_mut(name) {
                let before = topic.is_writable();
                topic.update_min_in_sync(known.get(name).copied(), sent);
                if topic.is_writable() != before {
                    topic.wakers.iter().for_each(Waker::wake);
                }
            }
        }
    }

    fn update(&self, sent: Instant, names: &[Arc<str>], found: &Found) {
        let mut topics = lock(&self.topics);
        for name in names {
            let Some(topic) = topics.get_mut(name) else {
                continue;
            };
            let before = (topic.state, topic.is_writable());
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
            if topic.state != before.0 {
                self.changes.fetch_add(1, Ordering::Release);
            }
            if (topic.state, topic.is_writable()) != before {
                topic.wakers.iter().for_each(Waker::wake);
            }
        }
        self.updated.notify_all();
    }
}

impl WatchedTopic {
    fn presence(&self, now: Instant) -> Presence {
        let unwritable = |reason, since| Presence::Unwritable {
            reason,
            lasting: now.saturating_duration_since(since),
        };
        let is_now = |blocked: &Blocked| blocked.until.is_none_or(|until| now < until);
        match (self.state, self.blocked.filter(is_now)) {
            (TopicState::Missing { since }, _) => Presence::Missing {
                lasting: now.saturating_duration_since(since),
            },
            (_, Some(Blocked { reason, since, .. })) => unwritable(reason, since),
            _ if self.stalls > 0 => unwritable(Unwritable::Stalled, self.stalled_since),
            (TopicState::Unknown, None) => Presence::Unknown,
            (TopicState::Exists { .. }, None) => Presence::Exists,
        }
    }

    fn is_writable(&self) -> bool {
        self.blocked.is_none() && self.stalls == 0
    }

    /// The topic became unwritable a moment ago.
    fn is_settling(&self, now: Instant) -> bool {
        self.blocked
            .is_some_and(|blocked| now.saturating_duration_since(blocked.since) < SETTLING)
    }

    fn block(&mut self, reason: Unwritable, observed: Instant, until: Option<Instant>) {
        let before = self.blocked.filter(|before| before.reason == reason);
        self.blocked = Some(Blocked {
            reason,
            since: before.map_or(observed, |before| before.since),
            observed,
            until,
        });
    }

    fn has_too_few_replicas(&self) -> bool {
        let (in_sync, min) = (self.fewest_in_sync, self.min_in_sync);
        in_sync.zip(min).is_some_and(|(in_sync, min)| in_sync < min)
    }

    /// `min`: `None` if this process may not read it.
    fn update_min_in_sync(&mut self, min: Option<usize>, sent: Instant) {
        self.min_in_sync = min;
        if self.has_too_few_replicas() && self.blocked.is_none() {
            self.block(Unwritable::TooFewReplicas, sent, None);
        }
    }

    fn update(&mut self, found: Option<&TopicDescription>, sent: Instant) {
        if let Some(found) = found {
            self.last_seen = Some(sent);
            self.missed = 0;
            self.missed_since = None;
            let exists = TopicState::Exists {
                id: found.id,
                partitions: found.partitions,
            };
            if exists != self.state || found.fewest_in_sync.is_none() {
                // The setting may be another one when replicas are lacking again.
                self.min_in_sync = None;
            }
            self.state = exists;
            self.fewest_in_sync = found.fewest_in_sync;
            if found.may_write == Some(false) {
                self.block(Unwritable::Denied, sent, None);
            } else if !found.has_leaders {
                self.block(Unwritable::NoLeader, sent, None);
            } else if self.has_too_few_replicas() {
                self.block(Unwritable::TooFewReplicas, sent, None);
            } else if self.blocked.is_some_and(|blocked| {
                let is_over_after = match blocked.until {
                    // A response has shown it.
                    None => blocked.observed,
                    Some(until) if found.may_write.is_none() => until,
                    Some(_) => blocked.observed + DENIED_DESPITE,
                };
                is_over_after < sent
            }) {
                self.blocked = None;
            }
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
        let metadata = metadata.map_err(|error| error_code(&error).unwrap_or(RDKafkaErrorCode::Fail))?;
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
                        "cannot create the Kafka client that watches topics; retrying"
                    );
                }
            }
        }
        // A request with an invalid name would fail as a whole. Transactions may have reported one.
        let names: Vec<Arc<str>> = lock(&shared.topics)
            .keys()
            .filter(|name| is_topic_name(name))
            .cloned()
            .collect();
        let borrowed: Vec<&str> = names.iter().map(|name| &**name).collect();
        let sent = Instant::now();
        match describe_topics(client.client(), &borrowed, CALL) {
            Ok(found) => {
                shared.update(sent, &names, &found);
                let lacks_replicas = |name: &&Arc<str>| matches!(found.get(&***name), Some(Ok(found)) if found.fewest_in_sync.is_some());
                shared.update_min_in_sync(&client, names.iter().filter(lacks_replicas), sent);
            }
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
        let is_confirming = lock(&shared.topics).values().any(|topic| {
            (1..CONFIRMING_RESPONSES).contains(&topic.missed) || topic.is_settling(Instant::now())
        });
        if is_confirming {
            thread::park_timeout(INTERVAL / 8);
        } else {
            shared.wait();
            thread::park_timeout(MIN_INTERVAL.saturating_sub(sent.elapsed()));
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

    fn found() -> TopicDescription {
        TopicDescription {
            id: Some(TopicId::from_bits(1)),
            partitions: 1,
            has_leaders: true,
            fewest_in_sync: None,
            may_write: Some(true),
        }
    }

    #[test]
    fn denied_topic_is_unwritable_until_permitted() {
        let (mut topic, now) = (WatchedTopic::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        let reason = |topic: &WatchedTopic, seconds| match topic.presence(after(seconds)) {
            Presence::Unwritable { reason, .. } => Some(reason),
            _ => None,
        };
        topic.update(Some(&found()), after(0));
        assert_eq!(reason(&topic, 0), None);
        topic.block(Unwritable::Denied, after(2), Some(after(2) + DENIED));
        // The response to an earlier request.
        topic.update(Some(&found()), after(1));
        assert_eq!(reason(&topic, 2), Some(Unwritable::Denied));
        // Another broker denies it.
        topic.update(Some(&found()), after(3));
        assert_eq!(reason(&topic, 3), Some(Unwritable::Denied));
        topic.update(Some(&found()), after(8));
        assert_eq!(reason(&topic, 8), None);
        // A broker that does not tell permissions.
        topic.block(Unwritable::Denied, after(9), Some(after(9) + DENIED));
        let silent = TopicDescription {
            may_write: None,
            ..found()
        };
        topic.update(Some(&silent), after(15));
        assert_eq!(reason(&topic, 15), Some(Unwritable::Denied));
        assert_eq!(reason(&topic, 40), None);
        let refused = TopicDescription {
            may_write: Some(false),
            ..found()
        };
        topic.update(Some(&refused), after(41));
        assert_eq!(reason(&topic, 400), Some(Unwritable::Denied));
        let leaderless = TopicDescription {
            has_leaders: false,
            ..found()
        };
        topic.update(Some(&leaderless), after(401));
        assert_eq!(reason(&topic, 401), Some(Unwritable::NoLeader));
        topic.update(Some(&found()), after(402));
        assert_eq!(topic.presence(after(402)), Presence::Exists);
        // The broker has told permissions once, and does not any more.
        topic.update(Some(&refused), after(403));
        topic.update(Some(&silent), after(404));
        assert_eq!(topic.presence(after(404)), Presence::Exists);
    }

    #[test]
    fn topic_without_replicas_is_impaired() {
        // No broker listens there.
        let watch = TopicWatch::start(&KafkaSettings::new("127.0.0.1:1", "test")).unwrap();
        let topic: Arc<str> = "topic".into();
        for fewest_in_sync in [None, Some(1), None] {
            let found = TopicDescription {
                fewest_in_sync,
                ..found()
            };
            watch.observe(&topic, Some(&found), Instant::now());
            assert_eq!(watch.is_any_impaired(), fewest_in_sync.is_some());
            assert_eq!(watch.presence(&topic), Presence::Exists);
        }
    }

    #[test]
    fn too_few_replicas_make_topic_unwritable() {
        let (mut topic, now) = (WatchedTopic::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        let lacking = |in_sync| TopicDescription {
            fewest_in_sync: Some(in_sync),
            ..found()
        };
        let is_writable = |topic: &WatchedTopic, seconds| !topic.presence(after(seconds)).is_unavailable();
        topic.update(Some(&lacking(2)), after(0));
        topic.update_min_in_sync(Some(2), after(0));
        assert!(is_writable(&topic, 0));
        topic.update(Some(&lacking(1)), after(1));
        let presence = Presence::Unwritable {
            reason: Unwritable::TooFewReplicas,
            lasting: Duration::from_secs(1),
        };
        assert_eq!(topic.presence(after(2)), presence);
        // It may be written with one replica from now on.
        topic.update_min_in_sync(Some(1), after(2));
        topic.update(Some(&lacking(1)), after(3));
        assert!(is_writable(&topic, 3));
        topic.update_min_in_sync(Some(2), after(3));
        assert!(!is_writable(&topic, 3));
        // The setting may not be read any more.
        topic.update_min_in_sync(None, after(4));
        topic.update(Some(&lacking(1)), after(5));
        assert!(is_writable(&topic, 5));
        topic.update_min_in_sync(Some(2), after(5));
        topic.update(Some(&found()), after(6));
        assert_eq!(topic.presence(after(6)), Presence::Exists);
    }

    #[test]
    fn stalled_topic_is_unwritable_until_resolved() {
        // No broker listens there.
        let watch = TopicWatch::start(&KafkaSettings::new("127.0.0.1:1", "test")).unwrap();
        let topic: Arc<str> = "docs".into();
        let stalls = [(); 2].map(|()| watch.stalled(&topic));
        for stall in stalls {
            let presence = watch.presence(&topic);
            assert!(
                presence.is_unavailable() && !presence.is_missing(),
                "{presence:?}"
            );
            drop(stall);
        }
        assert_eq!(watch.presence(&topic), Presence::Unknown);
    }

    #[test]
    fn slow_topic_gets_more_time() {
        // No broker listens there.
        let watch = TopicWatch::start(&KafkaSettings::new("127.0.0.1:1", "test")).unwrap();
        let [slow, other]: [Arc<str>; 2] = ["slow".into(), "other".into()];
        assert_eq!(watch.patience(&slow), PATIENCE);
        drop(watch.stalled(&slow));
        drop([watch.stalled(&slow), watch.stalled(&slow)]);
        assert_eq!(watch.patience(&slow), 4 * PATIENCE);
        // It is as slow as before, or was not included.
        watch.committed(3 * PATIENCE, |topic| topic == "slow");
        watch.committed(Duration::ZERO, |topic| topic == "other");
        assert_eq!(watch.patience(&slow), 4 * PATIENCE);
        assert_eq!(watch.patience(&other), PATIENCE);
        watch.committed(Duration::ZERO, |topic| topic == "slow");
        assert_eq!(watch.patience(&slow), PATIENCE);
    }

    #[test]
    fn two_responses_confirm_missing_topic() {
        let mut topic = WatchedTopic::default();
        let now = Instant::now();
        let found = TopicDescription {
            partitions: 3,
            ..found()
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
