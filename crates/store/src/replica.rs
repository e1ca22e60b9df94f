//! The copy of a topic in the memory of each process.
//!
//! The topic is small and changes rarely, so it is asked for its end twice a second. Every error is then an error of a request,
//! and it is certain how old the state is. After an error, and when the topic was created again, it is read again; the previous state applies
//! until that is complete. Reading again, and each change, continue where the topic was last read to its end, unless it was created again.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_core::Record;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::reader::{ReadError, ReadTo, TopicReader};
use redeliver_kafka::{KafkaSettings, TopicId, TopicState, TopicWatch};
use redeliver_runtime::health::Part;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::table::{Document, DocumentProblem, Table};

/// The time between two looks at the end of the topic.
const POLL: Duration = Duration::from_millis(500);
/// How long a read of the topic may make no progress.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// After so many looks in a row that do not find the topic, it does not exist. A broker that has just started may not know it yet.
const CONFIRMING_LOOKS: u32 = 5;
/// The number of intervals between two looks at a topic that does not exist.
const MISSING_POLLS: u32 = 10;
/// How many problems readiness names.
const NAMED: usize = 3;
/// A read continues where one ended that is not longer ago: until then, Kafka keeps tombstones.
const CONTINUES_WITHIN: Duration = Duration::from_secs(3_600);
/// How long a caller waits until its own process has applied a change.
const APPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// What a process knows of a topic: its table, and what else its user needs.
pub trait State: Clone + Default + PartialEq + Send + Sync + 'static {
    /// What the table contains.
    type Document: Document;

    /// What the topic is called, such as `control topic`.
    const TOPIC: &'static str;
    /// The prefix of the names of its metrics, and the part of readiness.
    const NAME: &'static str;
    /// Whether a topic that certainly does not exist is as an empty one, for a process that has not read it before. Otherwise, the
    /// process waits for the topic.
    const IS_OPTIONAL: bool;

    /// The documents.
    fn table(&self) -> &Table<Self::Document>;

    /// Applies a record that is newer than all before.
    fn apply(&mut self, record: &Record);

    /// What is not, or not completely, used as it was written, by the key of the record.
    fn problems(&self) -> BTreeMap<String, DocumentProblem<Self::Document>> {
        self.table().document_problems()
    }

    /// Logs documents that are new or [lost](Table::lost).
    fn log_changes(&self, topic: &str, before: &Self);
}

/// The state of a topic in this process. Cheap to clone.
#[derive(Debug)]
pub struct Replica<S> {
    state: watch::Receiver<Option<Arc<S>>>,
    progress: Progress<S>,
    /// Makes the follower look at once.
    wake: SyncSender<()>,
}

impl<S> Clone for Replica<S> {
    fn clone(&self) -> Self {
        Self {
            state: self.state.clone(),
            progress: self.progress.clone(),
            wake: self.wake.clone(),
        }
    }
}

/// How the reads of a topic ended. Cheap to clone.
#[derive(Debug)]
struct Progress<S>(Arc<Mutex<Reads<S>>>);

#[derive(Debug)]
struct Reads<S> {
    /// When the topic was last read to its end.
    succeeded: Option<Instant>,
    /// Why the reads since then have failed.
    error: Option<Arc<str>>,
    /// Where a read can continue; `None` until the first one, and while the id of the topic is unknown.
    known: Option<Known<S>>,
}

/// A state, and up to where the topic was read for it.
#[derive(Debug)]
struct Known<S> {
    state: Arc<S>,
    to: ReadTo,
}

impl<S> Clone for Progress<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S> Default for Progress<S> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Reads {
            succeeded: None,
            error: None,
            known: None,
        })))
    }
}

impl<S: State> Progress<S> {
    fn lock(&self) -> MutexGuard<'_, Reads<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The topic was read to its end.
    fn succeeded(&self, at: Instant, known: Option<Known<S>>) {
        *self.lock() = Reads {
            succeeded: Some(at),
            error: None,
            known,
        };
    }

    fn failed(&self, error: &str) {
        self.lock().error = Some(error.into());
    }

    /// Why the topic was not read to its end since a time; `None` if it was.
    fn problem(&self, since: Option<Instant>) -> Option<Arc<str>> {
        let reads = self.lock();
        let is_recent = |at| since.is_none_or(|since| at >= since);
        if reads.succeeded.is_some_and(is_recent) {
            return None;
        }
        let unknown = || "it was not read to its end in time".into();
        Some(reads.error.clone().unwrap_or_else(unknown))
    }

    /// A state from which a read can continue now, and from where.
    fn known(&self) -> Option<(Arc<S>, ReadTo)> {
        let reads = self.lock();
        reads.succeeded.filter(|at| at.elapsed() < CONTINUES_WITHIN)?;
        let known = reads.known.as_ref()?;
        Some((known.state.clone(), known.to))
    }
}

/// A reader that continues after the state with which it is returned: that of the last read, or none if it begins at the beginning.
pub(crate) fn read_after<S: State>(
    known: Option<&(Arc<S>, ReadTo)>,
    kafka: &KafkaSettings,
    topic: &Arc<str>,
) -> Result<(TopicReader, S), ReadError> {
    let (reader, continues) = TopicReader::continuing(kafka, topic, 0, known.map(|(_, to)| *to))?;
    let state = known.filter(|_| continues).map(|(state, _)| S::clone(state));
    Ok((reader, state.unwrap_or_default()))
}

impl<S: State> Replica<S> {
    fn new() -> (Self, watch::Sender<Option<Arc<S>>>, Receiver<()>) {
        let (sender, state) = watch::channel(None);
        let (wake, woken) = sync_channel(1);
        let replica = Self {
            state,
            progress: Progress::default(),
            wake,
        };
        (replica, sender, woken)
    }

    /// A replica of no topic, for tests: it has the state that the returned sender is given.
    #[must_use]
    pub fn fixed(state: Option<S>) -> (Self, watch::Sender<Option<Arc<S>>>) {
        let (replica, sender, _) = Self::new();
        sender.send_replace(state.map(Arc::new));
        // It never gets old.
        replica
            .progress
            .succeeded(Instant::now() + CONTINUES_WITHIN, None);
        (replica, sender)
    }

    /// What applies now; `None` until the topic was read to its end. Does not block. The same [`Arc`] is returned until something
    /// changes.
    #[must_use]
    pub fn state(&self) -> Option<Arc<S>> {
        self.state.borrow().clone()
    }

    /// Completes with each change of what applies. Fails at the end of the process.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Option<Arc<S>>> {
        self.state.clone()
    }

    pub(crate) fn known(&self) -> Option<(Arc<S>, ReadTo)> {
        self.progress.known()
    }

    /// A reader of the topic that continues after the state with which it is returned: that of the last read to the end, or none if it begins at the
    /// beginning.
    ///
    /// # Errors
    /// If the broker does not answer or the topic does not exist.
    pub fn reader(&self, kafka: &KafkaSettings, topic: &Arc<str>) -> Result<(TopicReader, S), ReadError> {
        read_after(self.known().as_ref(), kafka, topic)
    }

    /// Why [`Replica::state`] may be older than this; `None` if the topic was read to its end since.
    #[must_use]
    pub fn problem(&self, max_age: Duration) -> Option<Arc<str>> {
        self.progress.problem(Instant::now().checked_sub(max_age))
    }

    /// Whether [`Replica::state`] contains everything that was committed before this time. If not, has the topic read at once. Does not block.
    #[must_use]
    pub fn is_read_since(&self, time: Instant) -> bool {
        let is_read = self.progress.problem(Some(time)).is_none();
        if !is_read {
            // Full: the follower is about to look.
            let _ = self.wake.try_send(());
        }
        is_read
    }

    /// Waits until the topic was read to its end. The result is false if the process shuts down before that.
    pub async fn wait_known(&self, stop: &CancellationToken) -> bool {
        let mut state = self.state.clone();
        tokio::select! {
            read = state.wait_for(Option::is_some) => read.is_ok(),
            () = stop.cancelled() => false,
        }
    }

    /// Waits until this process has applied its own change, so that what it says next agrees with it. Gives up after a while: the change
    /// is in the topic in any case.
    pub async fn wait_applied(&self, is_applied: impl Fn(&S) -> bool) {
        // Full: the follower is about to look.
        let _ = self.wake.try_send(());
        let mut state = self.state.clone();
        let is_applied = |state: &Option<Arc<S>>| state.as_ref().is_some_and(|state| is_applied(state));
        // Fails only at the end of the process.
        drop(tokio::time::timeout(APPLY_TIMEOUT, state.wait_for(is_applied)).await);
    }
}

/// The metrics of a replica.
#[derive(Clone, Debug, Default)]
struct ReplicaMetrics {
    readable: Gauge,
    values: Gauge,
    problems: Gauge,
    unreadable: Gauge,
}

impl ReplicaMetrics {
    fn register<S: State>(registry: &mut Registry) -> Self {
        let (metrics, topic) = (Self::default(), S::TOPIC);
        for (name, help, gauge) in [
            (
                "readable",
                format!("1 if the {topic} was readable at the last attempt; at 0, its last contents apply"),
                &metrics.readable,
            ),
            ("values", format!("Known values of the {topic}"), &metrics.values),
            (
                "problems",
                format!("Unknown or unreadable values of the {topic}, even if only in part"),
                &metrics.problems,
            ),
            (
                "unreadable",
                format!("Completely unreadable values of the {topic}"),
                &metrics.unreadable,
            ),
        ] {
            registry.register(format!("{}_{name}", S::NAME), help, gauge.clone());
        }
        metrics
    }
}

/// A topic to follow.
pub struct Topic {
    /// How to connect to Kafka.
    pub kafka: KafkaSettings,
    /// Its name.
    pub name: Arc<str>,
    /// The topics that the process writes for what this one wants. Readiness names one that cannot be written.
    pub written: Vec<Arc<str>>,
    /// Whether the process does without it.
    pub may_be_missing: bool,
    /// The topics that exist.
    pub watch: TopicWatch,
    /// Its part of readiness: not ready before the topic was read to its end, or is known not to exist if it is
    /// [optional](State::IS_OPTIONAL).
    pub part: Part,
    /// When to end.
    pub stop: CancellationToken,
}

/// Follows a topic, on a thread of its own.
pub struct Follower<S> {
    topic: Topic,
    metrics: ReplicaMetrics,
    state: watch::Sender<Option<Arc<S>>>,
    progress: Progress<S>,
    /// When to look at once.
    woken: Receiver<()>,
}

/// A reader that has read a topic to its end.
struct Session {
    reader: TopicReader,
    /// The topic; `None` if the broker has no ids.
    id: Option<TopicId>,
}

impl<S: State> Follower<S> {
    /// A follower of a topic, which works once it [runs](Follower::run), and the replica that it keeps.
    #[must_use]
    pub fn new(topic: Topic, registry: &mut Registry) -> (Self, Replica<S>) {
        // Before the thread runs, so that the process is never ready without this part.
        topic.part.not_ready(format!("reading the {}", S::TOPIC));
        let (replica, state, woken) = Replica::new();
        let follower = Self {
            topic,
            metrics: ReplicaMetrics::register::<S>(registry),
            state,
            progress: replica.progress.clone(),
            woken,
        };
        (follower, replica)
    }

    /// Follows the topic until it is stopped. Blocks.
    pub fn run(self) {
        let (mut session, mut log) = (None, LogThrottle::default());
        let mut missed = 0;
        while !self.topic.stop.is_cancelled() {
            match self.read(&mut session) {
                Ok(()) => {
                    self.metrics.readable.set(1);
                    self.set_ready();
                    log = LogThrottle::default();
                    missed = 0;
                }
                Err(error) => {
                    // After an error, the topic may be another one.
                    session = None;
                    missed = match error {
                        ReadError::Missing(_) | ReadError::Denied(_) => missed + 1,
                        _ => 0,
                    };
                    if S::IS_OPTIONAL && missed >= CONFIRMING_LOOKS && self.state.borrow().is_none() {
                        self.publish(S::default());
                    }
                    self.report(&error, &mut log);
                }
            }
            for _ in 0..polls(missed, self.topic.may_be_missing) {
                // Without replicas, the topic is no longer needed.
                match self.woken.recv_timeout(POLL) {
                    Err(RecvTimeoutError::Timeout) if !self.topic.stop.is_cancelled() => {}
                    Ok(()) | Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    /// Reads the topic to its end.
    fn read(&self, session: &mut Option<Session>) -> Result<(), ReadError> {
        // The end is looked up later, so that nothing older is missing.
        let began = Instant::now();
        let topic = &self.topic.name;
        if let Some(known) = session {
            let now = match self.topic.watch.state(topic) {
                TopicState::Exists { id, .. } => id,
                TopicState::Unknown | TopicState::Missing { .. } => None,
            };
            let is_other = known.id.zip(now).is_some_and(|(known, now)| known != now);
            let (_, end) = known.reader.topics().watermarks(topic, 0)?;
            let position = known.reader.position(topic, 0).unwrap_or(0);
            if is_other || end < position {
                *session = None;
            } else if end == position {
                self.succeeded(known, began);
                return Ok(());
            }
        }
        let (session, mut state) = match session {
            Some(session) => (session, S::clone(&self.current())),
            None => {
                let known = self.progress.known();
                let (mut reader, state) = read_after(known.as_ref(), &self.topic.kafka, topic)?;
                // A reader that continues expects the id with which it does. Without an id that the broker would tell, each change would read
                // the whole topic: the next look asks again.
                let id = match reader.expected_id(topic) {
                    Some(id) => Some(id),
                    None => reader.topics().id(topic)?,
                };
                reader.expect_id(topic, id);
                (session.insert(Session { reader, id }), state)
            }
        };
        let stop = || self.topic.stop.is_cancelled();
        let apply = |record: Record| State::apply(&mut state, &record);
        session.reader.read_to_end_in_parts(READ_TIMEOUT, stop, apply)?;
        self.publish(state);
        self.succeeded(session, began);
        Ok(())
    }

    /// The state applies that was read to the end of the topic.
    fn succeeded(&self, session: &Session, at: Instant) {
        let offset = session.reader.position(&self.topic.name, 0);
        let known = session.id.zip(offset).map(|(topic, offset)| Known {
            state: self.current(),
            to: ReadTo { topic, offset },
        });
        self.progress.succeeded(at, known);
    }

    fn current(&self) -> Arc<S> {
        self.state.borrow().clone().unwrap_or_default()
    }

    /// Makes a state apply, if it differs from what applies.
    fn publish(&self, state: S) {
        if self.state.borrow().as_deref() == Some(&state) {
            return;
        }
        let (before, problems) = (self.current(), state.problems());
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.values.set(gauge(state.table().count()));
        self.metrics.problems.set(gauge(problems.len()));
        let damaged = problems.values().filter(|problem| problem.is_damaged());
        self.metrics.unreadable.set(gauge(damaged.count()));
        let topic = &*self.topic.name;
        state.log_changes(topic, &before);
        let reported = before.problems();
        for (key, problem) in problems {
            if reported.get(&key) == Some(&problem) {
                continue;
            }
            if problem.is_damaged() {
                tracing::error!(topic, key, %problem, "unreadable value in the {}", S::TOPIC);
            } else {
                tracing::warn!(topic, key, %problem, "value in the {} only partially supported", S::TOPIC);
            }
        }
        self.state.send_replace(Some(Arc::new(state)));
    }

    fn set_ready(&self) {
        let presences = self.topic.written.iter();
        let mut presences = presences.map(|topic| (topic, self.topic.watch.presence(topic)));
        if let Some((topic, presence)) = presences.find(|(_, presence)| presence.is_unavailable()) {
            let note = format!(
                "what is wanted in the {} waits: topic `{topic}` {presence}",
                S::TOPIC
            );
            return self.topic.part.ready_but(note);
        }
        let problems = self.current().problems();
        if problems.is_empty() {
            return self.topic.part.ready();
        }
        let named = problems.iter().take(NAMED);
        let named: Vec<String> = named.map(|(key, problem)| format!("`{key}` {problem}")).collect();
        let others = match problems.len().saturating_sub(NAMED) {
            0 => String::new(),
            others => format!("; and {others} more"),
        };
        let note = format!("in the {}, {}{others}", S::TOPIC, named.join("; "));
        self.topic.part.ready_but(note);
    }

    fn report(&self, error: &ReadError, log: &mut LogThrottle) {
        let (reason, part) = (error_chain(error), &self.topic.part);
        self.progress.failed(&reason);
        self.metrics.readable.set(0);
        let applies = self.state.borrow().is_some();
        if log.should_log() {
            let topic = &*self.topic.name;
            tracing::warn!(topic, reason, applies, "cannot read the {}; retrying", S::TOPIC);
        }
        if applies {
            part.ready_but(format!(
                "the {} cannot be read, so what it contained last applies: {reason}",
                S::TOPIC
            ));
        } else {
            part.not_ready(format!("cannot read the {}: {reason}", S::TOPIC));
        }
    }
}

/// The number of intervals until the next look, after so many looks in a row that did not find the topic. Each of them makes a new client. A topic
/// that the process needs is looked for as often as before, because the process waits for it, or must notice as soon as it exists again.
const fn polls(missed: u32, may_be_missing: bool) -> u32 {
    if may_be_missing && missed > CONFIRMING_LOOKS {
        MISSING_POLLS
    } else {
        1
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::table::tests::Note;

    #[derive(Clone, Debug, Default, PartialEq)]
    pub(crate) struct Notes(Table<Note>);

    impl State for Notes {
        type Document = Note;

        const TOPIC: &'static str = "topic of notes";
        const NAME: &'static str = "notes";
        const IS_OPTIONAL: bool = false;

        fn table(&self) -> &Table<Note> {
            &self.0
        }

        fn apply(&mut self, record: &Record) {
            self.0.apply_record(record);
        }

        fn log_changes(&self, _topic: &str, _before: &Self) {}
    }

    #[test]
    fn missing_optional_topics_are_polled_less() {
        for may_be_missing in [false, true] {
            assert_eq!(polls(0, may_be_missing), 1);
            assert_eq!(polls(CONFIRMING_LOOKS, may_be_missing), 1);
        }
        assert_eq!(polls(CONFIRMING_LOOKS + 1, true), MISSING_POLLS);
        assert_eq!(polls(CONFIRMING_LOOKS + 1, false), 1);
    }

    #[test]
    fn state_is_old_after_failed_reads() {
        let (progress, began) = (Progress::<Notes>::default(), Instant::now());
        let problem = |since| progress.problem(since).as_deref().map(str::to_owned);
        let later = began + Duration::from_secs(1);
        let in_time = Some("it was not read to its end in time".to_owned());
        assert_eq!(problem(None), in_time);
        progress.failed("missing");
        assert_eq!(problem(Some(began)), Some("missing".to_owned()));
        progress.succeeded(began, None);
        assert_eq!((problem(Some(began)), problem(Some(later))), (None, in_time));
        progress.failed("unavailable");
        assert_eq!(
            (problem(Some(began)), problem(Some(later))),
            (None, Some("unavailable".to_owned()))
        );
    }
}
