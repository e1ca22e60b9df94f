//! The thread that follows the topics.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use bytes::Bytes;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::follow::{Event, Follower};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{KafkaSettings, TopicId, Waker};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use super::contents::Contents;
use super::topics::{Actions, Arrival, Indexed, Topics};
use super::{Message, Survey, Work};
use crate::index::Change;
use crate::ledger::{self, Update};
use crate::letter::Letter;
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// Maximum number of records in a batch of changes.
const BATCH: usize = 2_000;
/// A batch ends once its keys and headers exceed this many bytes. Their size is up to the producers.
const BATCH_BYTES: usize = 4 << 20;
/// Maximum wait for a record, after which the loop checks for surveys and for shutdown.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);
/// How often the id of a source is requested until it is believed that it does not exist: what the index contains of that cannot be corrected later.
const SOURCE_REQUESTS: u32 = 3;
/// How long records are gathered at least after the ids of their topics were requested, so that a trickle of records costs few requests.
const IDS_INTERVAL: Duration = Duration::from_millis(50);

/// The thread that reads topics.
pub(crate) struct Reader {
    pub(crate) settings: KafkaSettings,
    pub(crate) surveys: Receiver<Survey>,
    pub(crate) writer: SyncSender<Work>,
    pub(crate) contents: Contents,
    /// See [`DlqInspectorConfig::share_group_sources`](crate::DlqInspectorConfig::share_group_sources).
    pub(crate) sources: BTreeMap<String, Vec<String>>,
    pub(crate) waker: Waker,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

/// Why a round ended early.
enum Stop {
    /// The writer has stopped and has reported why. The reader stops as well.
    WriterGone,
    Failed(ReadError),
}

impl From<ReadError> for Stop {
    fn from(error: ReadError) -> Self {
        Self::Failed(error)
    }
}

impl Reader {
    /// Follows the topics from the positions of the index, until `stop` is cancelled.
    pub(crate) fn run(self, indexed: Indexed) -> Result<(), ReadError> {
        let follower = Follower::new(&self.settings, self.waker.clone())?;
        let mut reader_loop = ReaderLoop {
            // The positions are those of this build, even if it was found damaged meanwhile.
            build: SharedState::FIRST_BUILD,
            reader: self,
            follower,
            topics: Topics::new(indexed),
            last_batch: 0,
            surveyed_rounds: 0,
            source_ids: BTreeMap::new(),
            next_ids: Instant::now(),
            log_throttle: LogThrottle::default(),
        };
        while !reader_loop.reader.stop.is_cancelled() {
            match reader_loop.round() {
                Ok(()) => {}
                Err(Stop::WriterGone) => break,
                Err(Stop::Failed(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// See [`Follower::topic_ids`].
type AskedIds = BTreeMap<String, Result<TopicId, ReadError>>;

struct ReaderLoop {
    reader: Reader,
    /// The build of the index that the topics are read for, see [`SharedState::build`].
    build: u64,
    follower: Follower,
    topics: Topics,
    /// The number of the last batch that was sent to the writer.
    last_batch: u64,
    /// The rounds of the follower at the last survey.
    surveyed_rounds: u64,
    /// The ids of sources that were sent to the writer; `None` if one does not exist.
    source_ids: BTreeMap<String, Option<TopicId>>,
    /// Until then, what is read is gathered.
    next_ids: Instant,
    log_throttle: LogThrottle,
}

/// The records of one round.
#[derive(Default)]
struct Batch {
    letters: Vec<Letter>,
    bytes: usize,
    ledger: Vec<Update>,
    positions: BTreeMap<(Arc<str>, i32), i64>,
    recreated: BTreeSet<Arc<str>>,
    refused: Vec<(Arc<str>, String)>,
}

impl ReaderLoop {
    fn round(&mut self) -> Result<(), Stop> {
        if self.reader.shared.build() != self.build {
            self.start_over()?;
        }
        while let Ok(survey) = self.reader.surveys.try_recv() {
            let rounds = self.follower.rounds();
            let had_turn = rounds > self.surveyed_rounds;
            self.surveyed_rounds = rounds;
            let actions = self.topics.survey(&survey, self.last_batch + 1, had_turn);
            self.execute(actions)?;
            self.report_lag(&survey);
        }
        let mut batch = Batch::default();
        loop {
            let wait = match batch.positions.is_empty() {
                true => POLL_TIMEOUT,
                false => self.next_ids.saturating_duration_since(Instant::now()),
            };
            let (topics, contents) = (&mut self.topics, &self.reader.contents);
            self.follower.poll(wait, |event| {
                batch.add(topics, contents, event);
                batch.is_full()
            })?;
            let is_due = Instant::now() >= self.next_ids || batch.positions.is_empty();
            if is_due || batch.is_full().is_break() || self.reader.stop.is_cancelled() {
                break;
            }
        }
        self.log_refused(&batch.refused);
        // The client may have noticed nothing if a topic was created again, and a survey would notice it after the batch is written.
        let Some(asked) = self.current_ids(&batch) else {
            return Ok(());
        };
        let known = asked.iter();
        let known = known.filter_map(|(topic, id)| Some((topic.clone(), *id.as_ref().ok()?)));
        let ids: BTreeMap<String, TopicId> = known.collect();
        batch.leave_out(self.topics.with_other_id(&ids));
        let recreated = std::mem::take(&mut batch.recreated);
        // The batch may contain records of the old topic. They go first, so that the removal of the topic covers them.
        let mut changes = self.sources_of(&batch, &asked);
        changes.extend(batch.into_changes());
        self.send_changes(changes)?;
        for topic in recreated {
            let id = ids.get(&*topic).copied();
            let actions = self.topics.recreated(&topic, id, self.last_batch + 1);
            self.execute(actions)?;
        }
        // Sent after the changes of this round: the writer publishes it once it has applied them.
        self.send_completeness()
    }

    /// The current ids of the topics of a batch, of those that had one, and of their sources. Without them, nothing is written: asks until a broker answers. `None`
    /// if the process is shutting down; then the batch is read again after the start.
    fn current_ids(&mut self, batch: &Batch) -> Option<AskedIds> {
        let topics = batch.positions.keys().map(|(topic, _)| topic);
        let topics: BTreeSet<&str> = topics.chain(&batch.recreated).map(|topic| &**topic).collect();
        let sources = topics.iter().filter_map(|topic| self.reader.sources.get(*topic));
        let sources: BTreeSet<&str> = sources.flatten().map(String::as_str).collect();
        let known = topics.into_iter().filter(|topic| self.topics.has_id(topic));
        let topics: BTreeSet<&str> = known.chain(sources.iter().copied()).collect();
        let topics: Vec<&str> = topics.into_iter().collect();
        let mut answers = 0;
        while !self.reader.stop.is_cancelled() {
            match self.follower.topic_ids(&topics) {
                Ok(ids) => {
                    answers += 1;
                    // A broker may not know a topic a moment after its creation.
                    let is_doubtful = |source: &&str| match ids.get(*source) {
                        Some(id) => id.as_ref().is_err_and(|error| !error.is_denied()),
                        None => self.source_ids.get(*source) != Some(&None),
                    };
                    if answers >= SOURCE_REQUESTS || !sources.iter().any(is_doubtful) {
                        self.next_ids = Instant::now() + IDS_INTERVAL;
                        return Some(ids);
                    }
                }
                Err(error) if self.log_throttle.should_log() => {
                    tracing::warn!(
                        error = error_chain(&error),
                        "cannot read the ids of dead-letter topics; retrying"
                    );
                }
                Err(_) => {}
            }
            std::thread::park_timeout(POLL_TIMEOUT);
        }
        None
    }

    /// What is new of the ids of the topics that have the payloads of a batch.
    fn sources_of(&mut self, batch: &Batch, ids: &AskedIds) -> Vec<Change> {
        let topics = batch.letters.iter().map(|letter| &*letter.position.topic);
        let topics: BTreeSet<&str> = topics.collect();
        let sources = topics
            .into_iter()
            .filter_map(|topic| self.reader.sources.get(topic));
        let mut changes = Vec::new();
        for topic in sources.flatten() {
            let id = match ids.get(topic) {
                Some(Ok(id)) => Some(*id),
                // Kafka does not tell it, or not whether it exists.
                Some(Err(_)) => continue,
                None => None,
            };
            if self.source_ids.insert(topic.clone(), id) != Some(id) {
                let topic = topic.clone();
                changes.push(Change::Source { topic, id });
            }
        }
        changes
    }

    /// The index was damaged, and is empty now.
    fn start_over(&mut self) -> Result<(), ReadError> {
        self.build = self.reader.shared.build();
        self.topics = Topics::default();
        self.follower = Follower::new(&self.reader.settings, self.reader.waker.clone())?;
        self.surveyed_rounds = 0;
        self.source_ids.clear();
        Ok(())
    }

    fn execute(&mut self, actions: Actions) -> Result<(), Stop> {
        // Before a topic is removed from the index, so that no answer looks complete without it.
        self.send_completeness()?;
        for topic in &actions.unfollow {
            self.follower.remove(topic)?;
            self.reader.metrics.forget(topic);
        }
        self.follower.add(&actions.follow)?;
        if actions.recreate_consumer {
            tracing::info!("consumer stalled; recreating it");
            self.follower.renew()?;
        }
        self.send_changes(actions.changes)
    }

    /// Blocks while the writer's queue is full.
    fn send_changes(&mut self, changes: Vec<Change>) -> Result<(), Stop> {
        if changes.is_empty() {
            return Ok(());
        }
        self.last_batch += 1;
        self.send(Message::Changes {
            batch: self.last_batch,
            changes,
        })
    }

    fn send_completeness(&mut self) -> Result<(), Stop> {
        match self.topics.completeness() {
            Some(completeness) => self.send(Message::Completeness(completeness)),
            None => Ok(()),
        }
    }

    fn send(&self, message: Message) -> Result<(), Stop> {
        let work = Work {
            build: self.build,
            message,
        };
        self.reader.writer.send(work).map_err(|_| Stop::WriterGone)
    }

    fn report_lag(&self, survey: &Survey) {
        let mut total = 0;
        let mut topics = self.reader.shared.topics();
        for found in &survey.topics {
            let lag = self.topics.lag(found);
            total += lag;
            if let Some(topic) = topics.get_mut(&*found.name) {
                topic.lag = lag;
                self.reader.metrics.set_lag(&found.name, lag);
            }
        }
        drop(topics);
        if !*self.reader.shared.caught_up.borrow() {
            self.reader
                .part
                .not_ready(format!("reading dead letters; {total} left"));
        }
    }

    fn log_refused(&mut self, refused: &[(Arc<str>, String)]) {
        let Some((topic, error)) = refused.first() else {
            return;
        };
        if self.log_throttle.should_log() {
            tracing::warn!(topic = &**topic, error, "cannot read dead-letter topic");
        }
    }
}

impl Batch {
    fn is_full(&self) -> ControlFlow<()> {
        if self.letters.len() + self.ledger.len() >= BATCH || self.bytes >= BATCH_BYTES {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    fn add(&mut self, topics: &mut Topics, contents: &Contents, event: Event) {
        match event {
            Event::Record(record) => {
                let position = &record.position;
                // Records of the new topic that follow in this batch are read again, after the topic is forgotten.
                if self.recreated.contains(&position.topic) {
                    return;
                }
                match topics.arrived(&position.topic, position.partition, position.offset) {
                    Arrival::Backwards => {
                        self.recreated.insert(position.topic.clone());
                        return;
                    }
                    Arrival::Stale => return,
                    Arrival::Next => {}
                }
                let key = (position.topic.clone(), position.partition);
                self.positions.insert(key, position.offset + 1);
                if &*position.topic == ledger::TOPIC {
                    match Update::read(&record) {
                        // Also those of dead letters below the low watermark, which the next trim removes: their topic may just
                        // have been created again.
                        Ok(update) => self.ledger.push(update),
                        Err(error) => {
                            tracing::warn!(record = %record.position, %error, "ignoring invalid ledger entry");
                        }
                    }
                } else if !topics.is_removed(&position.topic, position.partition, position.offset) {
                    // A record that was read before retention removed it would stay in the index, after its trim.
                    let letter = contents.read(&record);
                    self.bytes += letter.headers.len() + letter.key.as_ref().map_or(0, Bytes::len);
                    self.letters.push(letter);
                }
            }
            Event::End {
                topic,
                partition,
                offset,
            } => topics.reached_end(&topic, partition, offset),
            Event::Refused {
                topic,
                partition,
                error,
                ..
            } => {
                let error = error.to_string();
                topics.refused(&topic, partition, &error);
                self.refused.push((topic, error));
            }
        }
    }

    /// Drops records of topics that were created again: these are read from the beginning.
    fn leave_out(&mut self, recreated: Vec<Arc<str>>) {
        for topic in recreated {
            self.letters.retain(|letter| letter.position.topic != topic);
            self.positions.retain(|(of, _), _| *of != topic);
            if &*topic == ledger::TOPIC {
                self.ledger.clear();
            }
            self.recreated.insert(topic);
        }
    }

    fn into_changes(self) -> Vec<Change> {
        let mut changes = Vec::new();
        if !self.letters.is_empty() {
            changes.push(Change::Letters(self.letters));
        }
        if !self.ledger.is_empty() {
            changes.push(Change::Ledger(self.ledger));
        }
        let positions = self.positions.into_iter();
        changes.extend(positions.map(|((topic, partition), next)| Change::Position {
            topic,
            partition,
            next,
        }));
        changes
    }
}
