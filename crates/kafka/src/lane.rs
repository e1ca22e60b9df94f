//! The loop of every service: consume, process, write results and offsets in one transaction.
//!
//! A lane is one OS thread that owns one consumer and two transactional producers, used in turn. Each partition has
//! its own queue, so that one partition that must wait never stops another, and one [`OffsetTracker`], so that
//! records may finish in any order. Every call of Kafka's client that can block happens on this thread.
//!
//! The loop, each step a function: serve events (which may change the assignment), admit records, let the
//! processor finish some, write them, wait. A setback leads through `Session::recover`: resolve the
//! transaction, forget everything in hand, read again from the committed offsets.

mod events;
mod membership;
mod patience;
mod topics;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock, SystemClock};
use redeliver_kafka_ffi::TopicId;
use tokio_util::sync::CancellationToken;

use crate::client::KafkaSettings;
use crate::convert;
use crate::processor::{AssignmentId, Processor, TransactionBatch, Waker};
use crate::reader;
use crate::remedy::{RecoveryAction, remedy};
use crate::topic_watch::TopicWatch;
use crate::tracker::{Admission, CommitPosition, Committed, OffsetTracker, TopicFingerprint};
use crate::transaction::{Alternating, TransactionError};
use events::{Event, Events, Unread};
use membership::{Examination, Membership, subscribe};
use patience::{Backoff, LogThrottle, Setbacks};

/// What a lane reads and how much at once.
#[derive(Clone, Debug)]
pub struct LaneSpec {
    /// Unique within the instance, such as `enricher-0`; part of the transactional id.
    pub name: String,
    /// The consumer group.
    pub group: String,
    /// The topics it subscribes to.
    pub topics: Vec<Arc<str>>,
    /// About how many records one transaction holds at most.
    pub batch: usize,
    /// How long a stopping lane may finish what it has in hand.
    pub grace: Duration,
    /// A topic that it writes, of which the processor is told how far it was written.
    pub changelog: Option<Arc<str>>,
    /// What it does when one of its topics was deleted and created again.
    pub if_recreated: IfRecreated,
}

/// What a lane does when a topic that it reads was deleted and created again under its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IfRecreated {
    /// It reads the new topic from its beginning. What it had in hand of the old one is dropped.
    #[default]
    ReadFromBeginning,
    /// It stops reading and says so until the process is restarted: offsets of the topic have a meaning beyond it.
    Halt,
}

/// What a lane tells about itself. All methods are called on the lane's thread.
pub trait LaneObserver: Send + Sync {
    /// The lane works.
    fn ready(&self) {}
    /// The lane waits for something, in words.
    fn waiting(&self, _reason: &str) {}
    /// A transaction with that many results and done records was committed in that time.
    fn committed(&self, _outputs: usize, _completed: usize, _took: Duration) {}
    /// A transaction failed; its records are read again.
    fn setback(&self, _remedy: RecoveryAction) {}
    /// Partitions the lane owns now.
    fn assigned(&self, _partitions: usize) {}
    /// The lowest record of a partition holds back a window in which nearly all is done.
    fn blocked(&self, _topic: &str, _partition: i32, _offset: i64) {}
    /// How many records of an owned partition are not done, those included that were not read yet; nothing once
    /// the partition is not owned any more.
    fn lag(&self, _topic: &str, _partition: i32, _records: Option<u64>) {}
    /// A partition's topic was deleted and created again; that many records of the old one were in hand and are dropped.
    fn recreated(&self, _topic: &str, _partition: i32, _in_hand: usize) {}
    /// That many records of a partition were deleted before they were read, by retention for example.
    fn deleted_unread(&self, _topic: &str, _partition: i32, _records: u64) {}
}

/// Why a lane cannot go on. Everything that may pass by itself is waited out instead.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The client cannot be made from its configuration.
    #[error("kafka: the configuration of lane `{lane}` is not usable")]
    Misconfigured {
        /// The lane.
        lane: String,
        /// What the client says.
        source: KafkaError,
    },
    /// Another process keeps taking over.
    #[error(
        "instance: another process runs lane `{lane}` under the same name `{instance}`; give each process its own `instance`"
    )]
    InstanceInUse {
        /// The lane.
        lane: String,
        /// The configured instance.
        instance: String,
    },
}

/// The longest a lane waits without looking around.
const ROUND: Duration = Duration::from_millis(100);
/// How often the broker is asked for a sign of life after its connection broke.
const PROBE: Duration = Duration::from_secs(1);
/// How long one call to the broker may take before events are served again.
const CALL: Duration = Duration::from_secs(1);
/// How long the committed offsets are asked for before new clients are made.
const STUCK: Duration = Duration::from_secs(12);
/// Fencings within [`FENCE_WINDOW`] after which two processes must share one instance.
const FENCE_LIMIT: usize = 5;
const FENCE_WINDOW: Duration = Duration::from_secs(60);
/// However many setbacks there were, a turn may have so many records.
const SMALLEST_TURN: usize = 16;

/// A lane, ready to run.
pub struct Lane<P> {
    settings: KafkaSettings,
    spec: LaneSpec,
    clock: Arc<dyn Clock>,
    observer: Arc<dyn LaneObserver>,
    waker: Waker,
    stop: CancellationToken,
    watch: TopicWatch,
    processor: P,
    /// Of the ids that were given out. It outlives sessions, and so do results of work that an earlier one began.
    generation: u32,
    /// The group does not give us what we subscribed to, so the next session leaves it first.
    must_leave: bool,
    /// How often in a row the lane joined anew because its place in the group was not sound.
    joined_anew: u32,
    /// Partitions of topics that were created again while the lane owned them, until it commits a position of the new one
    /// or owns them no more. A commit of theirs that names no topic is one of the old topic.
    recreated: BTreeSet<(Arc<str>, i32)>,
}

/// What a lane works with, beside its processor.
#[derive(Clone)]
pub struct LaneContext {
    /// How Kafka is reached.
    pub settings: KafkaSettings,
    /// Where the time comes from.
    pub clock: Arc<dyn Clock>,
    /// Who is told about the lane.
    pub observer: Arc<dyn LaneObserver>,
    /// Wakes the lane.
    pub waker: Waker,
    /// Ends the lane.
    pub stop: CancellationToken,
    /// Which topics exist.
    pub watch: TopicWatch,
}

impl LaneContext {
    /// The system's time, and a waker that nobody else holds.
    #[must_use]
    pub fn new(
        settings: KafkaSettings,
        observer: Arc<dyn LaneObserver>,
        watch: TopicWatch,
        stop: CancellationToken,
    ) -> Self {
        Self {
            settings,
            clock: Arc::new(SystemClock),
            observer,
            waker: Waker::new(),
            stop,
            watch,
        }
    }
}

impl<P: Processor> Lane<P> {
    /// Puts a lane together; [`Lane::run`] runs it on the calling thread.
    pub fn new(context: LaneContext, spec: LaneSpec, processor: P) -> Self {
        let LaneContext {
            settings,
            clock,
            observer,
            waker,
            stop,
            watch,
        } = context;
        Self {
            settings,
            spec,
            clock,
            observer,
            waker,
            stop,
            watch,
            processor,
            generation: 0,
            must_leave: false,
            joined_anew: 0,
            recreated: BTreeSet::new(),
        }
    }

    /// Runs until the token is cancelled. Blocks the calling thread, which must not serve async tasks.
    ///
    /// # Errors
    /// When waiting cannot help: see [`LaneError`]. An unreachable broker is waited for.
    pub fn run(mut self) -> Result<(), LaneError> {
        self.waker.attach_current_thread();
        self.watch.watch(self.spec.topics.iter().cloned(), &self.waker);
        let id = format!("redeliver-{}-{}", self.settings.instance, self.spec.name);
        let mut transactions =
            Alternating::new(&self.settings, &id, self.spec.changelog.as_ref(), &self.watch);
        let mut fences = Fences::default();
        let mut backoff = Backoff::new();
        while !self.stop.is_cancelled() {
            let error = match Session::open(&mut self, &mut transactions, &mut fences) {
                Ok(mut session) => match session.run() {
                    Ok(()) => return Ok(()),
                    Err(error) => {
                        if session.has_committed {
                            backoff = Backoff::new();
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            match error {
                Ended::Broken(error) => {
                    // The new producer's initialisation resolves whatever the old one left open.
                    transactions.discard();
                    tracing::warn!(lane = self.spec.name, error = %error_chain(&error), "lane starts again");
                    self.observer.waiting("reconnecting");
                    backoff.wait(&self.stop);
                }
                Ended::StartOver(reason) => {
                    transactions.discard();
                    tracing::info!(lane = self.spec.name, reason, "lane starts again");
                    self.observer.waiting(&reason);
                }
                Ended::Halted(reason) => {
                    transactions.discard();
                    self.halt(&reason);
                }
                Ended::Unusable(error) => return Err(error),
                Ended::Stopped => return Ok(()),
            }
        }
        Ok(())
    }

    /// Reads nothing any more and says why, until the lane is told to stop.
    fn halt(&self, reason: &str) {
        self.observer.waiting(reason);
        let mut said = LogThrottle::default();
        while !self.stop.is_cancelled() {
            if said.is_time() {
                tracing::error!(lane = self.spec.name, reason, "lane has halted");
            }
            thread::park_timeout(ROUND);
        }
    }

    fn new_id(&mut self, slot: usize) -> AssignmentId {
        self.generation += 1;
        AssignmentId {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            generation: self.generation,
        }
    }

    fn misconfigured(&self, source: KafkaError) -> Ended {
        Ended::Unusable(LaneError::Misconfigured {
            lane: self.spec.name.clone(),
            source,
        })
    }
}

/// Why a session with Kafka ended.
enum Ended {
    /// Its consumer is not usable any more; a new session is.
    Broken(KafkaError),
    /// A new session is needed, for a reason that is no error.
    StartOver(String),
    /// The lane must not go on before somebody has looked at it.
    Halted(String),
    /// No session will do.
    Unusable(LaneError),
    /// The lane was told to stop.
    Stopped,
}

/// What is in hand while one consumer lives.
struct Session<'a, P: Processor> {
    lane: &'a mut Lane<P>,
    transactions: &'a mut Alternating,
    fences: &'a mut Fences,
    consumer: Arc<BaseConsumer<Events>>,
    membership: Membership,
    examination: Examination,
    /// Under which ids the client reads topics.
    client_ids: BTreeMap<String, TopicId>,
    /// These, or the assigned topics, have changed since they were compared.
    must_compare_ids: bool,
    /// Records were admitted of which the processor has not been told that it has them all.
    has_admitted: bool,
    /// How many changes of topics were looked at.
    seen_changes: Option<usize>,
    /// How many partitions each topic of the lane had then; 0 for one that did not exist, nothing before the first look.
    seen_partitions: Vec<i32>,
    slots: Vec<Option<Assigned>>,
    /// Partitions that were given to us and whose committed offsets are not known yet.
    arriving: Vec<(String, i32)>,
    turn: TransactionBatch,
    touched: Vec<u32>,
    next_slot: usize,
    ready: bool,
    suspect_since: Option<Instant>,
    must_rewind: bool,
    failed_seeks: u32,
    /// Since when the committed offsets have been asked for in vain.
    stuck_since: Option<Instant>,
    stopping_since: Option<Instant>,
    has_committed: bool,
    /// How many records a turn has at most: fewer than the batch after a setback, since a turn that takes longer than
    /// its transaction may would fail for ever.
    turn_limit: usize,
    setbacks: Setbacks,
    said_refused: LogThrottle,
}

struct Assigned {
    id: AssignmentId,
    topic: Arc<str>,
    partition: i32,
    /// The topic it is of; `None` when the broker does not say.
    topic_id: Option<TopicId>,
    /// Whether the position is certainly one of that topic: its commit says so, or a record was read.
    is_confirmed: bool,
    queue: PartitionQueue<Events>,
    tracker: OffsetTracker,
    touched: bool,
    owns_turn: bool,
}

impl<'a, P: Processor> Session<'a, P> {
    /// Resolves what an earlier process of this transactional id left open, then joins the group.
    fn open(
        lane: &'a mut Lane<P>,
        transactions: &'a mut Alternating,
        fences: &'a mut Fences,
    ) -> Result<Self, Ended> {
        let mut backoff = Backoff::new();
        let mut said = LogThrottle::default();
        while let Err(setback) = transactions.recover(CALL) {
            match setback.remedy {
                RecoveryAction::Misconfigured => return Err(lane.misconfigured(setback.into_source())),
                RecoveryAction::Fenced => fences.count(lane)?,
                RecoveryAction::Retry | RecoveryAction::Abort | RecoveryAction::Rebuild => {}
            }
            lane.observer
                .waiting(&format!("kafka is not ready: {}", error_chain(&setback)));
            if said.is_time() {
                tracing::warn!(
                    lane = lane.spec.name, brokers = lane.settings.brokers, error = %error_chain(&setback),
                    "kafka is not ready; trying again"
                );
            }
            backoff.wait(&lane.stop);
            if lane.stop.is_cancelled() {
                return Err(Ended::Stopped);
            }
        }
        let turn_limit = lane.spec.batch.max(1);
        let config: ClientConfig = lane.settings.consumer(&lane.spec.group, &lane.spec.name);
        let events = Events::new(lane.waker.clone());
        let mut consumer: BaseConsumer<Events> = config
            .create_with_context(events)
            .map_err(|error| lane.misconfigured(error))?;
        let waker = lane.waker.clone();
        consumer.set_nonempty_callback(move || waker.wake());
        let mut arriving = Vec::new();
        let mut membership = Membership::Joining;
        let mut examination = Examination::due_now();
        if lane.settings.takes_all_partitions {
            arriving = all_partitions(&consumer, &lane.spec.topics).map_err(Ended::Broken)?;
            membership = Membership::Joined;
            examination = Examination::none();
        } else {
            lane.observer.waiting("joining the consumer group");
            if let Some(instance) = lane.settings.group_instance_id(&lane.spec.name) {
                let spec = &lane.spec;
                let forced = std::mem::take(&mut lane.must_leave);
                if forced || membership::must_leave(&consumer, &spec.group, &instance, &spec.topics) {
                    membership = Membership::Rejoining;
                    consumer.context().decline(true);
                }
            }
            subscribe(&consumer, &lane.spec.topics)?;
        }
        Ok(Self {
            lane,
            transactions,
            fences,
            consumer: Arc::new(consumer),
            membership,
            examination,
            client_ids: BTreeMap::new(),
            must_compare_ids: false,
            has_admitted: false,
            seen_changes: None,
            seen_partitions: Vec::new(),
            slots: Vec::new(),
            arriving,
            turn: TransactionBatch::default(),
            touched: Vec::new(),
            next_slot: 0,
            ready: false,
            suspect_since: None,
            must_rewind: false,
            failed_seeks: 0,
            stuck_since: None,
            stopping_since: None,
            has_committed: false,
            turn_limit,
            setbacks: Setbacks::new(),
            said_refused: LogThrottle::default(),
        })
    }

    fn run(&mut self) -> Result<(), Ended> {
        let result = loop {
            match self.round() {
                Ok(Next::Continue) => {}
                Ok(Next::Stop) => break Ok(()),
                Err(ended) => break Err(ended),
            }
        };
        self.forget_all();
        self.consumer.context().decline(true);
        result
    }

    fn round(&mut self) -> Result<Next, Ended> {
        self.serve_events()?;
        if self.lane.stop.is_cancelled() && self.is_finished_stopping() {
            return Ok(Next::Stop);
        }
        if self.stuck_since.is_some_and(|since| since.elapsed() > STUCK) {
            // Seen after restarts of the broker: a client that never finds its coordinator again.
            return Err(Ended::Broken(KafkaError::OffsetFetch(
                RDKafkaErrorCode::OperationTimedOut,
            )));
        }
        if self.setbacks.is_paused() {
            thread::park_timeout(ROUND);
            return Ok(Next::Continue);
        }
        if !self.transactions.is_ready() || self.must_rewind {
            self.recover()?;
            return Ok(Next::Continue);
        }
        self.settle_arrivals()?;
        self.look_at_topics()?;
        self.look_at_group()?;
        let admitted = self.admit()?;
        if admitted > 0 {
            // The client tells of a topic's new id before it hands out records of that topic. So once this is served,
            // what was admitted is known to be of the topic that was assigned.
            self.serve_events()?;
        }
        if self.must_rewind || !self.are_topics_the_same()? {
            return Ok(Next::Continue);
        }
        if std::mem::take(&mut self.has_admitted) {
            self.lane.processor.accepted_all();
        }
        let now = self.lane.clock.now();
        self.lane.processor.finish(now, self.turn_limit, &mut self.turn);
        if !self.turn.completed.is_empty() || !self.turn.owners.is_empty() || !self.touched.is_empty() {
            self.write()?;
        } else if admitted == 0 {
            self.wait();
        }
        Ok(Next::Continue)
    }

    /// Serves everything but records: rebalances, errors.
    fn serve_events(&mut self) -> Result<(), Ended> {
        let consumer = self.consumer.clone();
        loop {
            let served = consumer.context().served();
            match consumer.poll(Duration::ZERO) {
                // Partitions have queues of their own before they are fetched. A message that still came
                // here must not be lost.
                Some(Ok(message)) => {
                    tracing::warn!(
                        topic = message.topic(),
                        partition = message.partition(),
                        offset = message.offset(),
                        "record outside of its partition's queue; reading again from the committed offset"
                    );
                    self.must_rewind = true;
                }
                Some(Err(error)) => self.consumer_error(error)?,
                // `poll` also answers nothing when it has served an event; all of them must be served
                // before anything is written, above all a revocation.
                None if consumer.context().served() == served => break,
                None => {}
            }
        }
        for event in consumer.context().take() {
            match event {
                Event::Assigned(partitions) => self.assigned(partitions)?,
                Event::Revoked(partitions) => {
                    if self.membership == Membership::Leaving {
                        self.join()?;
                    }
                    self.examination = Examination::due_now();
                    self.arriving.retain(|partition| !partitions.contains(partition));
                    for (topic, partition) in &partitions {
                        self.forget(topic, *partition);
                    }
                }
                Event::Identified(topic, id) => {
                    self.client_ids.insert(topic, id);
                    self.must_compare_ids = true;
                }
                Event::Unreachable => {
                    self.suspect_since.get_or_insert_with(Instant::now);
                }
                Event::Unread(partitions) => self.tell_lag(&partitions),
            }
        }
        self.update_readiness();
        Ok(())
    }

    fn tell_lag(&self, unread: &[Unread]) {
        for assigned in self.slots.iter().flatten() {
            let same =
                |unread: &&Unread| unread.partition == assigned.partition && *unread.topic == *assigned.topic;
            if let Some(unread) = unread.iter().find(same) {
                let lag = unread.records + assigned.tracker.in_flight() as u64;
                self.lane
                    .observer
                    .lag(&assigned.topic, assigned.partition, Some(lag));
            }
        }
    }

    fn consumer_error(&mut self, error: KafkaError) -> Result<(), Ended> {
        if remedy(&error) == RecoveryAction::Fenced {
            self.fences.count(self.lane)?;
            return Err(Ended::Broken(error));
        }
        if matches!(error, KafkaError::MessageConsumptionFatal(_)) {
            return Err(Ended::Broken(error));
        }
        self.suspect_since.get_or_insert_with(Instant::now);
        self.waiting(&error.to_string());
        Ok(())
    }

    fn waiting(&mut self, reason: &str) {
        self.ready = false;
        self.lane.observer.waiting(reason);
    }

    /// Ready as soon as every partition of the lane's topics has an owner in the group; not while the broker gives no sign of life.
    fn update_readiness(&mut self) {
        if let Some(since) = self.suspect_since {
            if since.elapsed() < PROBE && self.ready {
                return;
            }
            let topic = self.lane.spec.topics.first().cloned();
            match self.consumer.fetch_metadata(topic.as_deref(), CALL / 4) {
                Ok(_) => self.suspect_since = None,
                Err(error) => {
                    self.suspect_since = Some(Instant::now());
                    self.waiting(&format!("kafka does not answer: {error}"));
                }
            }
            return;
        }
        if self.ready {
            return;
        }
        let joined = self.lane.settings.takes_all_partitions
            || !matches!(self.consumer.rebalance_protocol(), RebalanceProtocol::None);
        let is_good = self.transactions.is_ready()
            && !self.setbacks.repeat()
            && self.membership == Membership::Joined
            && self.examination.is_over();
        if joined && is_good && self.arriving.is_empty() {
            self.ready = true;
            self.lane.observer.ready();
            tracing::info!(
                lane = self.lane.spec.name,
                group = self.lane.spec.group,
                "lane is ready"
            );
        }
    }

    /// Starts reading partitions that were assigned, from their committed offsets.
    fn settle_arrivals(&mut self) -> Result<(), Ended> {
        if self.arriving.is_empty() {
            return Ok(());
        }
        let arriving = self.arriving.clone();
        let Some(ids) = self.topic_ids(&arriving) else {
            return Ok(());
        };
        let Some(committed) = self.committed(&arriving) else {
            return Ok(());
        };
        let mut list = TopicPartitionList::new();
        let mut arrived = Vec::new();
        for (topic, partition, mut position) in committed {
            let id = ids.get(&topic).copied().flatten();
            let is_unnamed = position
                .as_ref()
                .is_some_and(|committed| committed.topic.is_none());
            if position
                .as_ref()
                .is_some_and(|committed| self.is_foreign((&topic, partition), committed, id))
            {
                let ended = self.ended_by_recreation(&topic);
                if let Ended::Halted(_) = ended {
                    return Err(ended);
                }
                tracing::warn!(
                    topic,
                    partition,
                    committed = position.map(|committed| committed.offset),
                    "the committed offset is of a topic that was deleted since; reading the new one from its beginning"
                );
                position = None;
            }
            let offset = start_offset(position.as_ref());
            list.add_partition_offset(&topic, partition, offset)
                .map_err(Ended::Broken)?;
            arrived.push((topic, partition, id, position, is_unnamed));
        }
        // The queues are split before the assignment starts fetching, so that no record takes another way.
        for (topic, partition, id, position, is_unnamed) in arrived {
            let slot = self.take(&topic, partition, id, position)?;
            if is_unnamed && id.is_some() {
                self.commit_soon(slot);
            }
        }
        let started = if self.lane.settings.takes_all_partitions {
            self.consumer.assign(&list)
        } else {
            self.consumer.incremental_assign(&list)
        };
        started.map_err(Ended::Broken)?;
        self.arriving.clear();
        self.must_compare_ids = true;
        // What has just arrived is compared with what the watch knows by now.
        self.seen_changes = None;
        self.lane.observer.assigned(self.slots.iter().flatten().count());
        Ok(())
    }

    /// The committed positions of partitions, or nothing while the broker cannot say.
    fn committed(&mut self, partitions: &[(String, i32)]) -> Option<Vec<(String, i32, Option<Committed>)>> {
        let mut list = TopicPartitionList::new();
        for (topic, partition) in partitions {
            list.add_partition(topic, *partition);
        }
        let list = match self.consumer.committed_offsets(list, CALL) {
            Ok(list) => list,
            Err(error) => {
                self.waiting(&format!("committed offsets are not known yet: {error}"));
                self.stuck_since.get_or_insert_with(Instant::now);
                thread::park_timeout(ROUND);
                return None;
            }
        };
        let mut positions = Vec::with_capacity(partitions.len());
        for element in list.elements() {
            if let Err(error) = element.error() {
                self.waiting(&format!("a committed offset is not known yet: {error}"));
                self.stuck_since.get_or_insert_with(Instant::now);
                thread::park_timeout(ROUND);
                return None;
            }
            let position = match element.offset() {
                Offset::Offset(offset) => Some(reader::committed(offset, || element.metadata().to_owned())),
                _ => None,
            };
            positions.push((element.topic().to_owned(), element.partition(), position));
        }
        self.stuck_since = None;
        Some(positions)
    }

    fn take(
        &mut self,
        topic: &str,
        partition: i32,
        topic_id: Option<TopicId>,
        position: Option<Committed>,
    ) -> Result<usize, Ended> {
        self.forget(topic, partition);
        let topic = self.shared_name(topic);
        let mut queue = self
            .consumer
            .split_partition_queue(&topic, partition)
            .ok_or(Ended::Broken(KafkaError::Canceled))?;
        let waker = self.lane.waker.clone();
        queue.set_nonempty_callback(move || waker.wake());
        let fingerprint = topic_id.map(TopicFingerprint::of);
        let position = position.unwrap_or_else(Committed::start);
        let is_confirmed = position.topic.is_some();
        let tracker = OffsetTracker::new(position, fingerprint);
        let slot = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let id = self.lane.new_id(slot);
        self.lane.processor.assigned(id, &topic, partition);
        self.slots[slot] = Some(Assigned {
            id,
            topic,
            partition,
            topic_id,
            is_confirmed,
            queue,
            tracker,
            touched: false,
            owns_turn: false,
        });
        Ok(slot)
    }

    /// Lets the next transaction commit a partition's position, whether or not it has changed.
    fn commit_soon(&mut self, slot: usize) {
        if let Some(assigned) = &mut self.slots[slot] {
            assigned.owns_turn = true;
            if !std::mem::replace(&mut assigned.touched, true) {
                self.touched.push(u32::try_from(slot).unwrap_or(u32::MAX));
            }
        }
    }

    fn shared_name(&self, topic: &str) -> Arc<str> {
        let known = self.lane.spec.topics.iter().find(|known| &***known == topic);
        known.cloned().unwrap_or_else(|| topic.into())
    }

    fn forget(&mut self, topic: &str, partition: i32) {
        for slot in &mut self.slots {
            if slot
                .as_ref()
                .is_some_and(|a| &*a.topic == topic && a.partition == partition)
                && let Some(assigned) = slot.take()
            {
                self.lane.processor.revoked(assigned.id);
                self.lane.observer.lag(topic, partition, None);
                // Its next owner may commit positions of the new topic.
                self.lane.recreated.remove(&(assigned.topic, partition));
            }
        }
        self.touched.retain(|slot| self.slots[*slot as usize].is_some());
        self.lane.observer.assigned(self.slots.iter().flatten().count());
    }

    fn forget_all(&mut self) {
        for assigned in self.slots.iter_mut().filter_map(Option::take) {
            self.lane.processor.revoked(assigned.id);
            self.lane.observer.lag(&assigned.topic, assigned.partition, None);
        }
        self.touched.clear();
        self.turn.clear();
    }

    /// Reads as many records as are welcome, partition by partition.
    fn admit(&mut self) -> Result<usize, Ended> {
        if self.stopping_since.is_some() {
            return Ok(0);
        }
        let mut out_of_range = Vec::new();
        let now = self.lane.clock.now();
        let mut admitted = 0;
        let count = self.slots.len();
        for step in 0..count {
            let slot = (self.next_slot + step) % count;
            let Some(assigned) = &mut self.slots[slot] else {
                continue;
            };
            for _ in 0..self.lane.spec.batch {
                // Asked for each record, since the room may be one in bytes.
                if self.lane.processor.capacity(assigned.id) == 0 {
                    break;
                }
                if !assigned.tracker.may_admit() {
                    if let Some(offset) = assigned.tracker.blocked_by() {
                        self.lane
                            .observer
                            .blocked(&assigned.topic, assigned.partition, offset);
                    }
                    break;
                }
                let message = match assigned.queue.poll(Duration::ZERO) {
                    Some(Ok(message)) => message,
                    Some(Err(error))
                        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::AutoOffsetReset) =>
                    {
                        out_of_range.push(slot);
                        break;
                    }
                    Some(Err(error)) => {
                        tracing::debug!(topic = &*assigned.topic, partition = assigned.partition, %error, "consumer error");
                        self.suspect_since.get_or_insert_with(Instant::now);
                        break;
                    }
                    None => break,
                };
                assigned.is_confirmed = true;
                match assigned.tracker.observe(message.offset()) {
                    Admission::New => {
                        let record = convert::record(&message, &assigned.topic);
                        self.lane.processor.accept(assigned.id, record, now);
                        admitted += 1;
                    }
                    Admission::AlreadyDone => {
                        if !assigned.touched {
                            assigned.touched = true;
                            self.touched.push(u32::try_from(slot).unwrap_or(u32::MAX));
                        }
                    }
                    Admission::Stale => {}
                }
            }
        }
        self.next_slot = self.next_slot.wrapping_add(1);
        self.has_admitted |= admitted > 0;
        for slot in out_of_range {
            self.out_of_range(slot)?;
        }
        Ok(admitted)
    }

    /// One transaction: what the processor finished, and the positions that follow from it.
    fn write(&mut self) -> Result<(), Ended> {
        let began = Instant::now();
        for (id, offset) in &self.turn.completed {
            let assigned = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut);
            let Some(assigned) = assigned.filter(|assigned| assigned.id == *id) else {
                return self.reject_turn(*id, *offset);
            };
            if !assigned.tracker.complete(*offset) {
                return self.reject_turn(*id, *offset);
            }
            if !assigned.touched {
                assigned.touched = true;
                self.touched.push(id.slot);
            }
        }
        let completed = self.turn.completed.len();
        for id in &self.turn.owners {
            let assigned = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut);
            let Some(assigned) = assigned.filter(|assigned| assigned.id == *id) else {
                return self.reject_turn(*id, -1);
            };
            assigned.owns_turn = true;
            if !assigned.touched {
                assigned.touched = true;
                self.touched.push(id.slot);
            }
        }
        let mut offsets = TopicPartitionList::with_capacity(self.touched.len());
        let mut positions: Vec<(u32, CommitPosition)> = Vec::with_capacity(self.touched.len());
        for slot in self.touched.drain(..) {
            let Some(assigned) = &mut self.slots[slot as usize] else {
                continue;
            };
            assigned.touched = false;
            let position = if std::mem::take(&mut assigned.owns_turn) {
                Some(assigned.tracker.position_or_beginning())
            } else {
                assigned.tracker.commit_position()
            };
            if let Some(position) = position {
                let mut element = offsets.add_partition(&assigned.topic, assigned.partition);
                element
                    .set_offset(Offset::Offset(position.offset))
                    .map_err(Ended::Broken)?;
                if !position.metadata.is_empty() {
                    element.set_metadata(&position.metadata);
                }
                positions.push((slot, position));
            }
        }
        if positions.is_empty() && self.turn.outputs.is_empty() {
            self.turn.clear();
            return Ok(());
        }
        while let Err(setback) = self.commit(&offsets) {
            if !self.replace_refused(&setback) {
                return self.set_back(&setback);
            }
        }
        for (slot, position) in positions {
            if let Some(assigned) = &mut self.slots[slot as usize] {
                assigned.tracker.mark_committed(&position);
                if !self.lane.recreated.is_empty() {
                    let partition = (assigned.topic.clone(), assigned.partition);
                    self.lane.recreated.remove(&partition);
                }
            }
        }
        let took = began.elapsed();
        self.has_committed = true;
        self.setbacks.end();
        if took < self.lane.settings.transaction_timeout / 8 {
            self.turn_limit = (2 * self.turn_limit).min(self.lane.spec.batch);
        }
        self.lane
            .observer
            .committed(self.turn.outputs.len(), completed, took);
        self.turn.clear();
        for (partition, end) in self.transactions.changelog_ends() {
            self.lane.processor.changelog_written(partition, end);
        }
        self.lane.processor.committed(self.lane.clock.now());
        Ok(())
    }

    /// The processor hands over what it does not have: a result of another assignment, or a second one of a record.
    /// Its outputs must not be written, so nothing of the turn is; all is read again.
    fn reject_turn(&mut self, id: AssignmentId, offset: i64) -> Result<(), Ended> {
        tracing::error!(
            lane = self.lane.spec.name,
            assignment = ?id, offset,
            "a result belongs to no record in hand; the transaction is dropped and its records are read again"
        );
        self.give_up_turn();
        self.lane.observer.setback(RecoveryAction::Abort);
        Ok(())
    }

    fn give_up_turn(&mut self) {
        self.turn.clear();
        self.lane.processor.aborted();
        self.must_rewind = true;
    }

    fn commit(&mut self, offsets: &TopicPartitionList) -> Result<(), TransactionError> {
        let consumer = &self.consumer;
        let group = || consumer.group_metadata();
        self.transactions.write(&self.turn.outputs, offsets, group)
    }

    /// Lets the processor put something else in the place of what a topic does not take. The turn is still in hand
    /// and nothing of it was written, so nothing has to be read again.
    fn replace_refused(&mut self, setback: &TransactionError) -> bool {
        let Some(first) = setback.refused.first() else {
            return false;
        };
        if self.said_refused.is_time() {
            tracing::warn!(
                lane = self.lane.spec.name,
                records = setback.refused.len(),
                reason = first.failure.message,
                "records that their topic does not take become dead letters"
            );
        }
        self.lane.observer.setback(setback.remedy);
        let now = self.lane.clock.now();
        self.lane.processor.refused(&setback.refused, &mut self.turn, now)
    }

    fn set_back(&mut self, setback: &TransactionError) -> Result<(), Ended> {
        let reason = error_chain(setback);
        if self.setbacks.add() {
            tracing::warn!(
                lane = self.lane.spec.name,
                error = reason,
                in_a_row = self.setbacks.count,
                "transaction failed; reading again from the committed offsets"
            );
        } else {
            tracing::debug!(
                lane = self.lane.spec.name,
                error = reason,
                "transaction failed again"
            );
        }
        if self.setbacks.repeat() {
            self.waiting(&reason);
        }
        self.lane.observer.setback(setback.remedy);
        self.turn_limit = (self.turn_limit / 2).max(SMALLEST_TURN.min(self.lane.spec.batch));
        self.give_up_turn();
        if setback.remedy == RecoveryAction::Fenced {
            self.fences.count(self.lane)?;
        }
        Ok(())
    }

    /// After a setback: a usable producer first, which resolves the transaction, then the committed
    /// offsets, which say what became of it.
    fn recover(&mut self) -> Result<(), Ended> {
        if let Err(setback) = self.transactions.recover(CALL) {
            self.waiting(&format!("the producer is not ready: {}", error_chain(&setback)));
            if setback.remedy == RecoveryAction::Fenced {
                self.fences.count(self.lane)?;
            }
            thread::park_timeout(ROUND);
            return Ok(());
        }
        let owned: Vec<(String, i32)> = self
            .slots
            .iter()
            .flatten()
            .map(|a| (a.topic.to_string(), a.partition))
            .collect();
        self.touched.clear();
        if !owned.is_empty() {
            let Some(committed) = self.committed(&owned) else {
                return Ok(());
            };
            let of_another = committed.iter().find(|(topic, partition, position)| {
                let is_it = |a: &&Assigned| *a.topic == **topic && a.partition == *partition;
                let assigned = self.slots.iter().flatten().find(is_it);
                let id = assigned.and_then(|assigned| assigned.topic_id);
                position
                    .as_ref()
                    .is_some_and(|committed| self.is_foreign((topic, *partition), committed, id))
            });
            if let Some((topic, ..)) = of_another {
                let topic = topic.clone();
                return Err(self.recreated(&topic));
            }
            if !self.seek(&committed)? {
                return Ok(());
            }
            for (topic, partition, position) in committed {
                self.start_again(&topic, partition, position);
            }
        }
        self.must_rewind = false;
        tracing::debug!(
            lane = self.lane.spec.name,
            partitions = owned.len(),
            "reading again from the committed offsets"
        );
        Ok(())
    }

    /// Moves partitions to their committed offsets. A seek leaves the assignment alone, so it cannot be
    /// taken for the answer to a rebalance that is under way, and throws away what was fetched before.
    fn seek(&mut self, committed: &[(String, i32, Option<Committed>)]) -> Result<bool, Ended> {
        let mut list = TopicPartitionList::new();
        for (topic, partition, position) in committed {
            list.add_partition_offset(topic, *partition, start_offset(position.as_ref()))
                .map_err(Ended::Broken)?;
        }
        let sought = self.consumer.seek_partitions(list, 5 * CALL);
        let result = sought.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(rdkafka::topic_partition_list::TopicPartitionListElem::error)
        });
        // A partition that was assigned a moment ago may not have started; it is sought again.
        if let Err(error) = result {
            self.failed_seeks += 1;
            self.waiting(&format!("going back to the committed offsets: {error}"));
            if self.failed_seeks > 50 {
                return Err(Ended::Broken(error));
            }
            thread::park_timeout(ROUND);
            return Ok(false);
        }
        self.failed_seeks = 0;
        Ok(true)
    }

    /// A partition begins anew at a position, under a new id; what was in hand of it is forgotten.
    fn start_again(&mut self, topic: &str, partition: i32, position: Option<Committed>) {
        let is_it = |slot: &Option<Assigned>| {
            let assigned = slot.as_ref();
            assigned.is_some_and(|assigned| &*assigned.topic == topic && assigned.partition == partition)
        };
        let Some(slot) = self.slots.iter().position(is_it) else {
            return;
        };
        let id = self.lane.new_id(slot);
        if let Some(assigned) = &mut self.slots[slot] {
            self.lane.processor.revoked(assigned.id);
            self.lane.processor.assigned(id, &assigned.topic, partition);
            assigned.id = id;
            assigned.touched = false;
            assigned.owns_turn = false;
            let fingerprint = assigned.topic_id.map(TopicFingerprint::of);
            let position = position.unwrap_or_else(Committed::start);
            // What was read under the same id stays confirmed.
            assigned.is_confirmed |= position.topic.is_some();
            assigned.tracker = OffsetTracker::new(position, fingerprint);
        }
    }

    /// Waits until something may have happened: a record, an event, finished work, a due time.
    fn wait(&self) {
        let now = self.lane.clock.now();
        let mut wait = ROUND;
        if let Some(due) = self.lane.processor.next_due() {
            if due <= now {
                return;
            }
            wait = wait.min(self.lane.clock.until(due));
        }
        thread::park_timeout(wait);
    }

    /// On the first call the processor is told; true once nothing is under way or the grace is over.
    fn is_finished_stopping(&mut self) -> bool {
        if self.stopping_since.is_none() {
            self.lane.processor.stopping();
        }
        let since = *self.stopping_since.get_or_insert_with(Instant::now);
        if !self.lane.processor.is_busy() {
            return true;
        }
        let over = since.elapsed() >= self.lane.spec.grace;
        if over {
            tracing::warn!(
                lane = self.lane.spec.name,
                "the grace period is over with records in hand; they are handled again after a restart"
            );
        }
        over
    }
}

enum Next {
    Continue,
    Stop,
}

fn all_partitions(
    consumer: &BaseConsumer<Events>,
    topics: &[Arc<str>],
) -> Result<Vec<(String, i32)>, KafkaError> {
    let metadata = consumer.fetch_metadata(None, 5 * CALL)?;
    let known = metadata
        .topics()
        .iter()
        .filter(|known| topics.iter().any(|topic| **topic == *known.name()));
    let partitions = known.flat_map(|topic| {
        topic
            .partitions()
            .iter()
            .map(|p| (topic.name().to_owned(), p.id()))
    });
    Ok(partitions.collect())
}

fn start_offset(position: Option<&Committed>) -> Offset {
    position.map_or(Offset::Beginning, |position| Offset::Offset(position.offset))
}

/// Counts how often another process took over.
#[derive(Default)]
struct Fences(Vec<Instant>);

impl Fences {
    fn count<P>(&mut self, lane: &Lane<P>) -> Result<(), Ended> {
        let now = Instant::now();
        self.0.retain(|then| now.duration_since(*then) < FENCE_WINDOW);
        self.0.push(now);
        if self.0.len() < FENCE_LIMIT {
            return Ok(());
        }
        Err(Ended::Unusable(LaneError::InstanceInUse {
            lane: lane.spec.name.clone(),
            instance: lane.settings.instance.clone(),
        }))
    }
}
