//! Which topics exist, while a process runs.
//!
//! A producer that writes into a topic that is gone waits until its transaction times out, and a consumer whose topic was
//! deleted and created again reads on at offsets of the old one. Neither is told. So one thread per process asks the
//! cluster every [`INTERVAL`] about every topic that somebody asked for, by name and without creating any, and everybody
//! looks at what it found without waiting.

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
use redeliver_kafka_ffi::{GroupDescription, TopicDescription, TopicId, describe_group, describe_topics};

use crate::client::{ClientLog, KafkaSettings};
use crate::processor::Waker;

/// How often the cluster is asked.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// How long one answer may take.
const CALL: Duration = Duration::from_secs(5);
/// How long a group's coordinator may take: it is asked again, and topics must not wait for it.
const GROUP_CALL: Duration = Duration::from_secs(1);
/// For how long a topic has to be missing before it is said to be: a broker that just started, or has not heard of a new
/// topic yet, answers that it does not know it.
const CONFIRMED: usize = 2;

/// What is known of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopicState {
    /// Not asked yet, or Kafka did not answer.
    Unknown,
    /// It does not exist, or may not be seen.
    Missing {
        /// When that was first noticed.
        since: Instant,
    },
    /// It exists.
    Exists {
        /// Its id; `None` when the broker knows no ids (before Kafka 2.8).
        id: Option<TopicId>,
        /// How many partitions it has.
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

/// A handle; the thread ends with the last one.
#[derive(Clone, Debug)]
pub struct TopicWatch(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    topics: Mutex<BTreeMap<Arc<str>, Entry>>,
    /// Notified after every answer.
    learned: Condvar,
    /// How many of the topics are missing.
    missing: AtomicUsize,
    /// How often the state of any topic has changed.
    changes: AtomicUsize,
    /// Says of each topic that cannot be looked at, now and then.
    log: ClientLog,
    groups: Mutex<Vec<GroupQuestion>>,
    /// Somebody asked for something that is not known yet.
    asked: (Mutex<bool>, Condvar),
}

#[derive(Debug)]
struct Entry {
    state: TopicState,
    /// When the last question was asked whose answer knew it.
    seen: Option<Instant>,
    /// How many answers in a row did not know it.
    missed: usize,
    missed_since: Option<Instant>,
    wakers: Vec<Waker>,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            state: TopicState::Unknown,
            seen: None,
            missed: 0,
            missed_since: None,
            wakers: Vec::new(),
        }
    }
}

#[derive(Debug)]
struct GroupQuestion {
    group: String,
    answer: Arc<Mutex<Option<GroupAnswer>>>,
    waker: Waker,
}

type GroupAnswer = Result<GroupDescription, RDKafkaErrorCode>;

/// A question about a group that is being answered.
#[derive(Debug)]
pub(crate) struct PendingGroup(Arc<Mutex<Option<GroupAnswer>>>);

impl PendingGroup {
    /// The answer, once it is there.
    pub(crate) fn take(&self) -> Option<GroupAnswer> {
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
    /// When the client cannot be made of the settings, or the system has no thread.
    pub fn start(settings: &KafkaSettings) -> io::Result<Self> {
        let client = settings.client().create_with_context(Quiet::default());
        let client: BaseConsumer<Quiet> = client.map_err(io::Error::other)?;
        let shared = Arc::new(Shared::default());
        let weak = Arc::downgrade(&shared);
        thread::Builder::new()
            .name("topic-watch".to_owned())
            .spawn(move || watch(&client, &weak))?;
        Ok(Self(shared))
    }

    /// Begins to watch these topics. `waker` is woken whenever the state of one of them changes.
    pub fn watch(&self, topics: impl IntoIterator<Item = Arc<str>>, waker: &Waker) {
        let mut known = lock(&self.0.topics);
        for topic in topics {
            known.entry(topic).or_default().wakers.push(waker.clone());
        }
        drop(known);
        self.0.ask();
    }

    /// What is known of a topic. One that is not watched yet is from now on, and unknown until the next answer.
    #[must_use]
    pub fn state(&self, topic: &str) -> TopicState {
        // The broker answers a question about such a name with an error, which would hide what it knows of the others.
        if !is_topic_name(topic) {
            return TopicState::Unknown;
        }
        let mut topics = lock(&self.0.topics);
        if let Some(entry) = topics.get(topic) {
            return entry.state;
        }
        topics.insert(topic.into(), Entry::default());
        drop(topics);
        self.0.ask();
        TopicState::Unknown
    }

    /// How often the state of any watched topic has changed. Takes no lock.
    pub(crate) fn changes(&self) -> usize {
        self.0.changes.load(Ordering::Acquire)
    }

    /// Whether any watched topic is missing. Takes no lock, so it may be asked for every record.
    #[must_use]
    pub fn any_missing(&self) -> bool {
        self.0.missing.load(Ordering::Relaxed) > 0
    }

    /// For how long it has been known that the topic does not exist; nothing when it may exist. Takes no lock as long as
    /// no watched topic is missing, so it may be asked for every record.
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

    /// Asks the cluster now, without waiting for the answer.
    pub(crate) fn hurry(&self) {
        self.0.ask();
    }

    /// Asks the cluster now about these topics too, which are watched from now on, without waiting for the answer.
    pub(crate) fn hurry_about<'a>(&self, topics: impl IntoIterator<Item = &'a Arc<str>>) {
        let mut known = lock(&self.0.topics);
        for topic in topics {
            if !known.contains_key(topic) && is_topic_name(topic) {
                known.insert(topic.clone(), Entry::default());
            }
        }
        drop(known);
        self.0.ask();
    }

    /// Asks the cluster now and waits until it is certain whether the topic exists, at most for `patience`.
    pub(crate) fn confirm(&self, topic: &str, patience: Duration) -> TopicState {
        let asked = Instant::now();
        if self.state(topic) == TopicState::Unknown && !is_topic_name(topic) {
            return TopicState::Unknown;
        }
        self.0.ask();
        let is_open = |topics: &mut BTreeMap<Arc<str>, Entry>| {
            let entry = topics.get(topic);
            entry.is_some_and(|entry| !entry.state.is_missing() && entry.seen.is_none_or(|seen| seen < asked))
        };
        let topics = lock(&self.0.topics);
        let waited = self.0.learned.wait_timeout_while(topics, patience, is_open);
        let (topics, _) = waited.unwrap_or_else(PoisonError::into_inner);
        topics.get(topic).map_or(TopicState::Unknown, |entry| entry.state)
    }

    /// Asks a group's coordinator for its members, once. `waker` is woken when the answer is there.
    pub(crate) fn ask_group(&self, group: &str, waker: &Waker) -> PendingGroup {
        let answer = Arc::default();
        lock(&self.0.groups).push(GroupQuestion {
            group: group.to_owned(),
            answer: Arc::clone(&answer),
            waker: waker.clone(),
        });
        self.0.ask();
        PendingGroup(answer)
    }
}

impl Shared {
    fn ask(&self) {
        *lock(&self.asked.0) = true;
        self.asked.1.notify_one();
    }

    /// Waits for the next time to ask.
    fn wait(&self) {
        let asked = lock(&self.asked.0);
        let (mut asked, _) = self
            .asked
            .1
            .wait_timeout_while(asked, INTERVAL, |asked| !*asked)
            .unwrap_or_else(PoisonError::into_inner);
        *asked = false;
    }

    fn learn(&self, asked: Instant, names: &[Arc<str>], found: &Found) {
        let mut topics = lock(&self.topics);
        for name in names {
            let Some(entry) = topics.get_mut(name) else {
                continue;
            };
            let before = entry.state;
            match found.get(&**name) {
                Some(Ok(found)) => entry.learn(Some(found), asked),
                None => entry.learn(None, asked),
                // Nothing is learned of it; what was known stays known.
                Some(Err(error)) => {
                    if self.log.is_time(name) {
                        tracing::warn!(topic = &**name, %error, "whether the topic exists cannot be found out");
                    }
                }
            }
            if entry.state != before {
                self.changes.fetch_add(1, Ordering::Release);
                entry.wakers.iter().for_each(Waker::wake);
            }
        }
        let missing = topics.values().filter(|entry| entry.state.is_missing());
        self.missing.store(missing.count(), Ordering::Relaxed);
        self.learned.notify_all();
    }
}

impl Entry {
    fn learn(&mut self, found: Option<&TopicDescription>, asked: Instant) {
        if let Some(found) = found {
            self.seen = Some(asked);
            self.missed = 0;
            self.missed_since = None;
            self.state = TopicState::Exists {
                id: found.id,
                partitions: found.partitions,
            };
            return;
        }
        self.missed += 1;
        let since = *self.missed_since.get_or_insert(asked);
        if self.missed >= CONFIRMED {
            self.state = TopicState::Missing { since };
        }
    }
}

type Found = BTreeMap<String, Result<TopicDescription, RDKafkaErrorCode>>;

/// The brokers that coordinated groups when they were asked last.
#[derive(Debug, Default)]
struct Coordinators(BTreeMap<String, i32>);

impl Coordinators {
    /// Asks the broker that knew the group before, and if it does not any more, all of them. `topic`: any one, of which the
    /// cluster is asked in order to learn of its brokers.
    fn describe(&mut self, client: &BaseConsumer<Quiet>, group: &str, topic: Option<&str>) -> GroupAnswer {
        let ask = |broker| describe_group(client.client(), broker, group, GROUP_CALL);
        let known = self.0.remove(group);
        if let Some(known) = known
            && let Ok(answer) = ask(known)
        {
            self.0.insert(group.to_owned(), known);
            return Ok(answer);
        }
        let metadata = client.fetch_metadata(topic, GROUP_CALL);
        let metadata =
            metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail))?;
        let mut problem = RDKafkaErrorCode::CoordinatorNotAvailable;
        let brokers = metadata.brokers().iter().map(MetadataBroker::id);
        for broker in brokers.filter(|broker| known != Some(*broker)) {
            match ask(broker) {
                Ok(answer) => {
                    self.0.insert(group.to_owned(), broker);
                    return Ok(answer);
                }
                Err(RDKafkaErrorCode::NotCoordinator) => {}
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }
}

/// Runs until the last handle is gone.
fn watch(client: &BaseConsumer<Quiet>, shared: &Weak<Shared>) {
    let mut coordinators = Coordinators::default();
    while let Some(shared) = shared.upgrade() {
        let names: Vec<Arc<str>> = lock(&shared.topics).keys().cloned().collect();
        let borrowed: Vec<&str> = names.iter().map(|name| &**name).collect();
        let asked = Instant::now();
        match describe_topics(client.client(), &borrowed, CALL) {
            Ok(found) => shared.learn(asked, &names, &found),
            // What was known stays known: an outage deletes no topic.
            Err(error) => tracing::debug!(%error, "looking at topics"),
        }
        // One group, and then topics again, which must not wait for a broker that is down.
        let group = lock(&shared.groups)
            .first()
            .map(|question| question.group.clone());
        if let Some(group) = group {
            let found = coordinators.describe(client, &group, borrowed.first().copied());
            let answered = |question: &mut GroupQuestion| question.group == group;
            for GroupQuestion { answer, waker, .. } in lock(&shared.groups).extract_if(.., answered) {
                *lock(&answer) = Some(found.clone());
                waker.wake();
            }
            continue;
        }
        let is_confirming = lock(&shared.topics)
            .values()
            .any(|entry| (1..CONFIRMED).contains(&entry.missed));
        if is_confirming {
            thread::park_timeout(INTERVAL / 8);
        } else {
            shared.wait();
        }
    }
}

/// The context of a client that is only asked.
#[derive(Debug, Default)]
struct Quiet(ClientLog);

impl ClientContext for Quiet {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.0.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "kafka client");
    }
}

impl ConsumerContext for Quiet {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_answer_that_does_not_know_a_topic_is_no_proof_and_two_are() {
        let mut entry = Entry::default();
        let now = Instant::now();
        let found = TopicDescription {
            id: Some(TopicId::from_bits(1)),
            partitions: 3,
        };
        entry.learn(Some(&found), now);
        let exists = TopicState::Exists {
            id: found.id,
            partitions: 3,
        };
        assert_eq!(entry.state, exists);
        entry.learn(None, now);
        assert_eq!(entry.state, exists);
        entry.learn(None, now + INTERVAL);
        assert_eq!(entry.state, TopicState::Missing { since: now });
        entry.learn(Some(&found), now);
        assert_eq!(entry.state, exists);
    }
}
