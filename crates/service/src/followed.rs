//! Small compacted topics with one partition: each process reads them to their end and follows them, and changes them one after the
//! other.
//!
//! Such a topic is small and changes rarely, so it is asked for its end twice a second. Every error is then an error of a request,
//! and it is certain how old the state is. After an error, and when the topic was created again, everything is read again. What
//! applied before applies until that is complete. Reading again, and each change, continue where the topic was last read to its end, so that they do not depend on its
//! size, unless the topic was created again.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex as BlockingMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_core::Record;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::exclusive::{Decide, ExclusiveError, ExclusiveWriter};
use redeliver_kafka::reader::{ReadError, ReadTo, TopicReader};
use redeliver_kafka::{KafkaSettings, TopicId, TopicState, TopicWatch};
use redeliver_runtime::health::{Health, Part};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;

use crate::host::Host;

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
/// A read continues where one ended that is not longer ago: until then, Kafka keeps what says that a value was removed.
const CONTINUES_WITHIN: Duration = Duration::from_secs(3_600);
/// How long a caller waits until its own process has read a change.
const READ_OWN_CHANGE: Duration = Duration::from_secs(2);
/// How long a change may take.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a process knows of a followed topic.
pub trait Contents: Clone + Default + PartialEq + Send + Sync + 'static {
    /// Why a value is not, or not completely, obeyed.
    type Problem: Clone + PartialEq + fmt::Display;

    /// What the topic is called, such as `control topic`.
    const TOPIC: &'static str;
    /// The beginning of the names of its metrics, and the part of readiness.
    const NAME: &'static str;
    /// Whether a topic that certainly does not exist is as an empty one, for a process that has not read it before. Otherwise, the
    /// process waits for the topic.
    const IS_OPTIONAL: bool;

    /// Takes note of a record, which is newer than all before.
    fn apply(&mut self, record: &Record);

    /// The number of values that can be read.
    fn count(&self) -> usize;

    /// What is not, or not completely, obeyed as it was written, by key.
    fn problems(&self) -> BTreeMap<String, Self::Problem>;

    /// Whether a value with this problem is completely unknown, which needs attention at once.
    fn is_unreadable(problem: &Self::Problem) -> bool;

    /// Logs the values that are new, and those that are gone although no change does that: the topic was deleted.
    fn log_changes(&self, topic: &str, before: &Self);
}

/// A topic that this process follows. Cheap to clone.
#[derive(Debug)]
pub struct Followed<C> {
    contents: watch::Receiver<Option<Arc<C>>>,
    latest: Latest<C>,
    reads: Reads,
    /// Makes the follower look at once.
    wake: SyncSender<()>,
}

/// What a topic contained when it was last read to its end; `None` until then, and while the id of the topic is unknown. Cheap to clone.
#[derive(Debug)]
struct Latest<C>(Arc<BlockingMutex<Option<Known<C>>>>);

#[derive(Debug)]
struct Known<C> {
    contents: Arc<C>,
    to: ReadTo,
    at: Instant,
}

impl<C> Clone for Known<C> {
    fn clone(&self) -> Self {
        Self {
            contents: self.contents.clone(),
            ..*self
        }
    }
}

impl<C> Clone for Latest<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C> Default for Latest<C> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<C: Contents> Latest<C> {
    fn lock(&self) -> MutexGuard<'_, Option<Known<C>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known at a time.
    fn known(&self, now: Instant) -> Option<Known<C>> {
        let is_recent = |known: &Known<C>| now.saturating_duration_since(known.at) < CONTINUES_WITHIN;
        self.lock().clone().filter(is_recent)
    }

    /// The topic was read up to here.
    fn set(&self, contents: &Arc<C>, to: ReadTo, at: Instant) {
        let contents = contents.clone();
        *self.lock() = Some(Known { contents, to, at });
    }

    /// A reader of the topic that continues after the contents with which it is returned.
    fn reader(&self, kafka: &KafkaSettings, topic: &Arc<str>) -> Result<(TopicReader, C), ReadError> {
        let (reader, contents) = read_after(self.known(Instant::now()).as_ref(), kafka, topic)?;
        Ok((reader, contents.unwrap_or_default()))
    }
}

/// A reader that continues after what is known, and the contents up to there; `None` if it begins at the beginning.
fn read_after<C: Contents>(
    known: Option<&Known<C>>,
    kafka: &KafkaSettings,
    topic: &Arc<str>,
) -> Result<(TopicReader, Option<C>), ReadError> {
    let (reader, continues) = TopicReader::continuing(kafka, topic, 0, known.map(|known| known.to))?;
    let contents = known.filter(|_| continues).map(|known| C::clone(&known.contents));
    Ok((reader, contents))
}

/// How the reads of a topic ended. Cheap to clone.
#[derive(Clone, Debug, Default)]
struct Reads(Arc<BlockingMutex<LastRead>>);

#[derive(Debug, Default)]
struct LastRead {
    /// When the topic was last read to its end.
    succeeded: Option<Instant>,
    /// Why the reads since then have failed.
    error: Option<Arc<str>>,
}

impl Reads {
    fn lock(&self) -> MutexGuard<'_, LastRead> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn succeeded(&self, at: Instant) {
        *self.lock() = LastRead {
            succeeded: Some(at),
            error: None,
        };
    }

    fn failed(&self, error: &str) {
        self.lock().error = Some(error.into());
    }

    /// Why the topic was not read to its end since a time; `None` if it was.
    fn problem(&self, since: Option<Instant>) -> Option<Arc<str>> {
        let last = self.lock();
        if last
            .succeeded
            .is_some_and(|at| since.is_none_or(|since| at >= since))
        {
            return None;
        }
        let unknown = || "it was not read to its end in time".into();
        Some(last.error.clone().unwrap_or_else(unknown))
    }
}

impl<C> Clone for Followed<C> {
    fn clone(&self) -> Self {
        Self {
            contents: self.contents.clone(),
            latest: self.latest.clone(),
            reads: self.reads.clone(),
            wake: self.wake.clone(),
        }
    }
}

impl<C: Contents> Followed<C> {
    /// What applies now; `None` until the topic was read to its end. Does not block. The same [`Arc`] is returned until something
    /// changes.
    #[must_use]
    pub fn contents(&self) -> Option<Arc<C>> {
        self.contents.borrow().clone()
    }

    /// Completes with each change of what applies. Fails at the end of the process.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Option<Arc<C>>> {
        self.contents.clone()
    }

    /// A topic that nobody follows, for tests: it has the contents that the returned sender is given.
    #[must_use]
    pub fn fixed(contents: Option<C>) -> (Self, watch::Sender<Option<Arc<C>>>) {
        let (sender, contents) = watch::channel(contents.map(Arc::new));
        let (wake, _) = sync_channel(1);
        let reads = Reads::default();
        reads.succeeded(Instant::now());
        let followed = Self {
            contents,
            latest: Latest::default(),
            reads,
            wake,
        };
        (followed, sender)
    }

    /// A reader of the topic that continues after the contents with which it is returned: those of the last read to the end, or none if it begins at the beginning.
    ///
    /// # Errors
    /// If the broker does not answer or the topic does not exist.
    pub fn reader(&self, kafka: &KafkaSettings, topic: &Arc<str>) -> Result<(TopicReader, C), ReadError> {
        self.latest.reader(kafka, topic)
    }

    /// Why [`Followed::contents`] may be older than this; `None` if the topic was read to its end since.
    #[must_use]
    pub fn problem(&self, max_age: Duration) -> Option<Arc<str>> {
        self.reads.problem(Instant::now().checked_sub(max_age))
    }

    /// Waits until the topic was read to its end. The result is false if the process shuts down before that.
    pub async fn until_known(&self, stop: &CancellationToken) -> bool {
        let mut contents = self.contents.clone();
        tokio::select! {
            read = contents.wait_for(Option::is_some) => read.is_ok(),
            () = stop.cancelled() => false,
        }
    }

    /// Waits until this process has read its own change, so that what it says next agrees with it. Gives up after a while: the change
    /// is in the topic in any case.
    pub async fn until_read(&self, has_read: impl Fn(&C) -> bool) {
        // Full: the follower is about to look.
        let _ = self.wake.try_send(());
        let mut contents = self.contents.clone();
        let has_read =
            |contents: &Option<Arc<C>>| contents.as_ref().is_some_and(|contents| has_read(contents));
        // Fails only at the end of the process.
        drop(tokio::time::timeout(READ_OWN_CHANGE, contents.wait_for(has_read)).await);
    }
}

/// The metrics of a followed topic.
#[derive(Clone, Debug, Default)]
struct FollowMetrics {
    readable: Gauge,
    values: Gauge,
    problems: Gauge,
    unreadable: Gauge,
}

impl FollowMetrics {
    fn register<C: Contents>(registry: &mut Registry) -> Self {
        let (metrics, name, topic) = (Self::default(), C::NAME, C::TOPIC);
        registry.register(
            format!("{name}_readable"),
            format!(
                "1 if the {topic} was read to its end at the last attempt; at 0, what it contained last applies"
            ),
            metrics.readable.clone(),
        );
        registry.register(
            format!("{name}_values"),
            format!("Values of the {topic} that this process knows"),
            metrics.values.clone(),
        );
        registry.register(
            format!("{name}_problems"),
            format!(
                "Values of the {topic} that this process does not know or cannot read, in part or completely"
            ),
            metrics.problems.clone(),
        );
        registry.register(
            format!("{name}_unreadable"),
            format!("Values of the {topic} that this process cannot read at all"),
            metrics.unreadable.clone(),
        );
        metrics
    }
}

impl Host {
    /// Follows a topic until the process shuts down. The process is not ready before the topic was read to its end, or is known not
    /// to exist if it is [optional](Contents::IS_OPTIONAL).
    ///
    /// # Errors
    /// When a thread or the watch of the topics cannot be started.
    pub fn follow<C: Contents>(&mut self, topic: &str) -> io::Result<Followed<C>> {
        let part = self.health.part(C::NAME);
        self.follow_in(topic, part, C::IS_OPTIONAL)
    }

    /// The same in a process that is ready without the topic.
    ///
    /// # Errors
    /// See [`Host::follow`].
    pub fn follow_aside<C: Contents>(&mut self, topic: &str) -> io::Result<Followed<C>> {
        self.follow_in(topic, Health::new().part(C::NAME), true)
    }

    fn follow_in<C: Contents>(
        &mut self,
        topic: &str,
        part: Part,
        may_be_missing: bool,
    ) -> io::Result<Followed<C>> {
        let (sender, contents) = watch::channel(None);
        let (wake, woken) = sync_channel(1);
        let (latest, reads) = (Latest::default(), Reads::default());
        let follow = Follow::<C> {
            kafka: self.kafka.clone(),
            topic: topic.into(),
            may_be_missing,
            watch: self.topic_watch()?,
            part,
            metrics: FollowMetrics::register::<C>(&mut self.registry()),
            contents: sender,
            latest: latest.clone(),
            reads: reads.clone(),
            woken,
            stop: self.tasks.shutdown().clone(),
        };
        // Before the thread runs, so that nobody sees a process without this part as ready.
        follow.part.not_ready(format!("reading the {}", C::TOPIC));
        self.tasks.spawn_thread(C::NAME, move || {
            follow.run();
            Ok::<(), io::Error>(())
        })?;
        Ok(Followed {
            contents,
            latest,
            reads,
            wake,
        })
    }
}

/// The follower, on a thread of its own.
struct Follow<C> {
    kafka: KafkaSettings,
    topic: Arc<str>,
    /// Whether the process does without the topic.
    may_be_missing: bool,
    watch: TopicWatch,
    part: Part,
    metrics: FollowMetrics,
    contents: watch::Sender<Option<Arc<C>>>,
    latest: Latest<C>,
    reads: Reads,
    /// When to look at once.
    woken: Receiver<()>,
    stop: CancellationToken,
}

/// What was read of one topic.
struct Session<C> {
    reader: TopicReader,
    /// The topic; `None` if it is not known yet.
    id: Option<TopicId>,
    contents: C,
}

impl<C: Contents> Follow<C> {
    /// Follows the topic until the process shuts down.
    fn run(self) {
        let (mut session, mut log) = (None, LogThrottle::default());
        let mut missed = 0;
        while !self.stop.is_cancelled() {
            // The end is looked up later, so that nothing older is missing.
            let began = Instant::now();
            match self.read(&mut session, began) {
                Ok(()) => {
                    self.reads.succeeded(began);
                    self.metrics.readable.set(1);
                    self.set_ready();
                    log = LogThrottle::default();
                    missed = 0;
                }
                Err(error) => {
                    // After an error, the topic may be another one.
                    session = None;
                    missed = if matches!(error, ReadError::Missing(_) | ReadError::Denied(_)) {
                        missed + 1
                    } else {
                        0
                    };
                    if C::IS_OPTIONAL && missed >= CONFIRMING_LOOKS && self.contents.borrow().is_none() {
                        self.publish(&C::default());
                    }
                    self.report(&error, &mut log);
                }
            }
            for _ in 0..polls(missed, self.may_be_missing) {
                if self.is_woken() || self.stop.is_cancelled() {
                    break;
                }
            }
        }
    }

    /// Waits for the next look. Returns whether somebody wants one at once.
    fn is_woken(&self) -> bool {
        match self.woken.recv_timeout(POLL) {
            Ok(()) => true,
            Err(RecvTimeoutError::Timeout) => false,
            // Nobody is interested in the topic any more, until the process shuts down.
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::park_timeout(POLL);
                false
            }
        }
    }

    /// Reads the topic to its end.
    fn read(&self, session: &mut Option<Session<C>>, began: Instant) -> Result<(), ReadError> {
        let id = match self.watch.state(&self.topic) {
            TopicState::Exists { id, .. } => id,
            TopicState::Unknown | TopicState::Missing { .. } => None,
        };
        if let Some(known) = session {
            let is_other = matches!((known.id, id), (Some(known), Some(now)) if known != now);
            let (_, end) = known.reader.topics().watermarks(&self.topic, 0)?;
            let position = known.reader.position(&self.topic, 0).unwrap_or(0);
            if is_other || end < position {
                *session = None;
            } else if end == position {
                self.note(known, began);
                return Ok(());
            }
        }
        let is_new = session.is_none();
        let known = match session {
            Some(known) => known,
            None => {
                let latest = self.latest.known(began);
                let (mut reader, contents) = read_after(latest.as_ref(), &self.kafka, &self.topic)?;
                let id = match (&contents, latest) {
                    (Some(_), Some(latest)) => Some(latest.to.topic),
                    // Without an id that the broker would tell, each change would read the whole topic: the next look asks again.
                    _ => reader.topics().id(&self.topic)?,
                };
                reader.expect_id(&self.topic, id);
                let contents = contents.unwrap_or_default();
                session.insert(Session { reader, id, contents })
            }
        };
        let Session { reader, contents, .. } = known;
        let mut has_changed = is_new;
        let stop = || self.stop.is_cancelled();
        reader.read_to_end_in_parts(READ_TIMEOUT, stop, |record| {
            contents.apply(&record);
            has_changed = true;
        })?;
        if has_changed {
            self.publish(contents);
        }
        self.note(known, began);
        Ok(())
    }

    /// The topic was read to its end. What applies is what was read.
    fn note(&self, session: &Session<C>, at: Instant) {
        let offset = session.reader.position(&self.topic, 0);
        if let (Some(topic), Some(offset), Some(contents)) = (session.id, offset, &*self.contents.borrow()) {
            self.latest.set(contents, ReadTo { topic, offset }, at);
        }
    }

    /// Makes a state apply, if it differs from what applies.
    fn publish(&self, contents: &C) {
        let before = self.contents.borrow().clone();
        if before.as_deref() == Some(contents) {
            return;
        }
        let problems = contents.problems();
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.values.set(gauge(contents.count()));
        self.metrics.problems.set(gauge(problems.len()));
        let unreadable = problems.values().filter(|problem| C::is_unreadable(problem));
        self.metrics.unreadable.set(gauge(unreadable.count()));
        let before = before.unwrap_or_default();
        contents.log_changes(&self.topic, &before);
        let reported = before.problems();
        for (key, problem) in problems {
            if reported.get(&key) == Some(&problem) {
                continue;
            }
            let topic = &*self.topic;
            if C::is_unreadable(&problem) {
                tracing::error!(topic, key, %problem, "a value of the {} cannot be read", C::TOPIC);
            } else {
                tracing::warn!(topic, key, %problem, "a value of the {} is not completely obeyed", C::TOPIC);
            }
        }
        self.contents.send_replace(Some(Arc::new(contents.clone())));
    }

    fn set_ready(&self) {
        let contents = self.contents.borrow().clone().unwrap_or_default();
        let problems = contents.problems();
        if problems.is_empty() {
            return self.part.ready();
        }
        let named = problems.iter().take(NAMED);
        let named: Vec<String> = named.map(|(key, problem)| format!("`{key}` {problem}")).collect();
        let others = match problems.len().saturating_sub(NAMED) {
            0 => String::new(),
            others => format!("; and {others} more"),
        };
        self.part
            .ready_but(format!("in the {}, {}{others}", C::TOPIC, named.join("; ")));
    }

    fn report(&self, error: &ReadError, log: &mut LogThrottle) {
        let reason = error_chain(error);
        self.reads.failed(&reason);
        self.metrics.readable.set(0);
        let applies = self.contents.borrow().is_some();
        if log.should_log() {
            tracing::warn!(
                topic = &*self.topic,
                reason,
                applies,
                "cannot read the {}; retrying",
                C::TOPIC
            );
        }
        if applies {
            let note = format!(
                "the {} cannot be read, so what it contained last applies: {reason}",
                C::TOPIC
            );
            self.part.ready_but(note);
        } else {
            self.part
                .not_ready(format!("cannot read the {}: {reason}", C::TOPIC));
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

/// Changes a followed topic. No change can overlap another one, see [`redeliver_kafka::exclusive`]. Cheap to clone.
#[derive(Clone)]
pub struct FollowedWriter<C> {
    writer: ExclusiveWriter,
    kafka: KafkaSettings,
    topic: Arc<str>,
    latest: Latest<C>,
    /// One change of this process at a time: several would fence each other.
    turn: Arc<Mutex<()>>,
}

impl<C: Contents> FollowedWriter<C> {
    /// A writer of a topic that is followed. All writers of the topic need the same `transactional_id`.
    #[must_use]
    pub fn new(kafka: &KafkaSettings, transactional_id: &str, topic: &str, followed: &Followed<C>) -> Self {
        let topic: Arc<str> = topic.into();
        Self {
            writer: ExclusiveWriter::new(kafka, transactional_id, topic.clone()),
            kafka: kafka.clone(),
            topic,
            latest: followed.latest.clone(),
            turn: Arc::default(),
        }
    }

    /// Makes one change. `begin` gets the topic, an id that is different for each change, by which a change recognises what it has
    /// written with an unknown outcome, and what the topic contained before the change. What was written since is read. When this returns, the change is durable.
    ///
    /// # Errors
    /// [`ExclusiveError`] says whether something may have been written.
    pub async fn write<D>(
        &self,
        begin: impl Fn(&Arc<str>, u128, C) -> D + Send + 'static,
    ) -> Result<D::Decision, ExclusiveError<D::Error>>
    where
        D: Decide,
        D::Decision: Send + 'static,
        D::Error: Send + 'static,
    {
        let turn = tokio::time::timeout(CHANGE_TIMEOUT, self.turn.clone().lock_owned()).await;
        let turn = turn.map_err(|elapsed| ExclusiveError::Unavailable {
            step: "waiting for other changes",
            source: elapsed.into(),
        })?;
        let Self {
            writer,
            kafka,
            topic,
            latest,
            ..
        } = self.clone();
        // The change goes on when its caller does not wait any longer.
        let changing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let id = fastrand::u128(..);
            // The same for all attempts, so that each reads what those before it have written.
            let known = latest.known(Instant::now());
            writer.write(CHANGE_TIMEOUT, || {
                let (reader, contents) = read_after(known.as_ref(), &kafka, &topic)?;
                Ok((reader, begin(&topic, id, contents.unwrap_or_default())))
            })
        });
        changing.await.unwrap_or_else(|error| Err(never_ran(error)))
    }
}

/// The id of a change as values of topics contain it.
#[must_use]
pub fn change_id(id: u128) -> Bytes {
    Bytes::copy_from_slice(&id.to_be_bytes())
}

/// The error of a change that did not come to its end. Once it runs, it ends, unless it panics.
fn never_ran<E>(error: JoinError) -> ExclusiveError<E> {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(cancelled) => ExclusiveError::Unavailable {
            step: "the process is shutting down",
            source: cancelled.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::embedded::EmbeddedBroker;

    use super::*;

    #[test]
    fn only_a_topic_that_may_be_missing_is_looked_for_less_often() {
        for may_be_missing in [false, true] {
            assert_eq!(polls(0, may_be_missing), 1);
            assert_eq!(polls(CONFIRMING_LOOKS, may_be_missing), 1);
        }
        assert_eq!(polls(CONFIRMING_LOOKS + 1, true), MISSING_POLLS);
        assert_eq!(polls(CONFIRMING_LOOKS + 1, false), 1);
    }

    #[derive(Clone, Default, PartialEq)]
    struct Nothing;

    impl Contents for Nothing {
        type Problem = String;
        const TOPIC: &'static str = "topic";
        const NAME: &'static str = "topic";
        const IS_OPTIONAL: bool = false;

        fn apply(&mut self, _record: &Record) {}

        fn count(&self) -> usize {
            0
        }

        fn problems(&self) -> BTreeMap<String, String> {
            BTreeMap::new()
        }

        fn is_unreadable(_problem: &String) -> bool {
            false
        }

        fn log_changes(&self, _topic: &str, _before: &Self) {}
    }

    #[test]
    fn no_session_opens_without_its_topic_id() {
        // It answers no request for ids.
        let broker = EmbeddedBroker::start(&[("t".to_owned(), 1)]).unwrap();
        let kafka = KafkaSettings::new(broker.brokers(), "test");
        let mut follow = Follow::<Nothing> {
            watch: TopicWatch::start(&kafka).unwrap(),
            kafka,
            topic: "t".into(),
            may_be_missing: false,
            part: Health::new().part("topic"),
            metrics: FollowMetrics::default(),
            contents: watch::channel(None).0,
            latest: Latest::default(),
            reads: Reads::default(),
            woken: sync_channel(1).1,
            stop: CancellationToken::new(),
        };
        let mut session = None;
        assert!(follow.read(&mut session, Instant::now()).is_err());
        assert!(session.is_none());
        // A broker that has no ids says so.
        follow.kafka.takes_all_partitions = true;
        follow.read(&mut session, Instant::now()).unwrap();
        assert!(session.is_some_and(|session| session.id.is_none()));
    }

    #[test]
    fn what_applies_is_old_if_the_last_reads_have_failed_or_hang() {
        let (reads, began) = (Reads::default(), Instant::now());
        let problem = |since| reads.problem(since).as_deref().map(str::to_owned);
        let later = began + Duration::from_secs(1);
        let in_time = Some("it was not read to its end in time".to_owned());
        assert_eq!(problem(None), in_time);
        reads.failed("missing");
        assert_eq!(problem(Some(began)), Some("missing".to_owned()));
        reads.succeeded(began);
        assert_eq!((problem(Some(began)), problem(Some(later))), (None, in_time));
        reads.failed("unavailable");
        assert_eq!(
            (problem(Some(began)), problem(Some(later))),
            (None, Some("unavailable".to_owned()))
        );
    }

    #[tokio::test]
    async fn a_change_that_never_ran_because_of_a_shutdown_has_written_nothing() {
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(std::future::pending::<()>());
        tasks.abort_all();
        let error = never_ran::<()>(tasks.join_next().await.unwrap().unwrap_err());
        assert!(matches!(error, ExclusiveError::Unavailable { .. }), "{error:?}");
    }
}
