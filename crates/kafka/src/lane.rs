//! The loop of every service: consume, process, write results and offsets in one transaction.
//!
//! A lane is one OS thread that owns one consumer and two transactional producers, used alternately. Each partition has
//! its own queue, so that a partition that must wait does not block the others, and its own [`OffsetTracker`], so that
//! records can complete in any order. Every blocking call of the Kafka client happens on this thread.
//!
//! Each step of the loop is a function: serve events (which may change the assignment), admit records, let the
//! processor finish some, write them in one transaction, wait. After a failed transaction, `Session::recover` resolves the
//! transaction, drops everything in flight, and reads again from the committed offsets.

mod backoff;
mod events;
mod membership;
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
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, SystemClock};
use redeliver_kafka_ffi::TopicId;
use tokio_util::sync::CancellationToken;

use crate::client::KafkaSettings;
use crate::convert;
use crate::processor::{AssignmentId, Processor, TransactionBatch, Waker};
use crate::reader;
use crate::recovery::{RecoveryAction, recovery_action};
use crate::topic_watch::TopicWatch;
use crate::tracker::{Admission, CommitPosition, Committed, OffsetTracker, TopicFingerprint};
use crate::transaction::{Alternating, TransactionError};
use backoff::{FailedTransactions, sleep_unless_stopped};
use events::{Event, Events, PartitionLag};
use membership::{GroupCheck, Membership, subscribe};

/// What a lane reads, and the limits of one transaction.
#[derive(Clone, Debug)]
pub struct LaneSpec {
    /// Unique within the instance, such as `enricher-0`; part of the transactional id.
    pub name: String,
    /// The consumer group.
    pub group: String,
    /// The topics to subscribe to.
    pub topics: Vec<Arc<str>>,
    /// The approximate maximum number of records in one transaction.
    pub batch: usize,
    /// How long a stopping lane may take to finish the records in flight.
    pub grace: Duration,
    /// An output topic whose written end offsets are reported to [`Processor::changelog_written`].
    pub changelog: Option<Arc<str>>,
    /// What to do when one of the topics is deleted and created again.
    pub if_recreated: IfRecreated,
}

/// What a lane does when a topic that it reads is deleted and created again under the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IfRecreated {
    /// Reads the new topic from its beginning and drops the records of the old one that are in flight.
    #[default]
    ReadFromBeginning,
    /// Stops reading until the process is restarted, because other data refers to the topic's offsets.
    Halt,
}

/// Receives the state and the counts of a lane. All methods are called on the lane's thread.
pub trait LaneObserver: Send + Sync {
    /// The lane is ready.
    fn ready(&self) {}
    /// The lane is not ready, for this reason.
    fn waiting(&self, _reason: &str) {}
    /// A transaction with this many outputs and completed records was committed; it took this long.
    fn committed(&self, _outputs: usize, _completed: usize, _took: Duration) {}
    /// A transaction failed, and this is how the lane recovers.
    fn transaction_failed(&self, _action: RecoveryAction) {}
    /// The number of partitions that the lane owns now.
    fn assigned(&self, _partitions: usize) {}
    /// The partition admits no more records until the record at this offset completes; nearly all after it are complete.
    fn blocked(&self, _topic: &str, _partition: i32, _offset: i64) {}
    /// The number of incomplete records of an owned partition, unread ones included; `None` when the lane no longer
    /// owns the partition.
    fn lag(&self, _topic: &str, _partition: i32, _records: Option<u64>) {}
    /// The topic of a partition was deleted and created again; this many records of the old one were in flight and are
    /// dropped.
    fn recreated(&self, _topic: &str, _partition: i32, _in_flight: usize) {}
    /// This many offsets of a partition were deleted before they were read, for example by retention.
    fn deleted_unread(&self, _topic: &str, _partition: i32, _records: u64) {}
}

/// Why a lane cannot continue. Everything transient is retried instead.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The Kafka client cannot be created from the configuration.
    #[error("kafka: cannot create the client of lane `{lane}`")]
    Misconfigured {
        /// The name of the lane.
        lane: String,
        /// The error of the client.
        source: KafkaError,
    },
    /// Other processes repeatedly fenced the lane.
    #[error(
        "instance: another process runs lane `{lane}` under the same name `{instance}`; give each process its own `instance`"
    )]
    InstanceInUse {
        /// The name of the lane.
        lane: String,
        /// The configured instance.
        instance: String,
    },
}

/// The longest wait of a lane between two rounds of its loop.
const ROUND: Duration = Duration::from_millis(100);
/// Interval of metadata requests that check whether the broker is reachable again.
const PROBE: Duration = Duration::from_secs(1);
/// Timeout of one call to the broker. Events, such as rebalances, are not served meanwhile.
const CALL: Duration = Duration::from_secs(1);
/// How long requests for committed offsets may fail before the clients are recreated.
const STUCK: Duration = Duration::from_secs(12);
/// This many fencings within [`FENCE_WINDOW`] mean that two processes use the same instance name.
const FENCE_LIMIT: usize = 5;
const FENCE_WINDOW: Duration = Duration::from_secs(60);
/// Minimum batch size after repeated aborts.
const MIN_BATCH: usize = 16;

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
    /// The last generation in an [`AssignmentId`]. It is never reset, because results of an earlier session may still
    /// arrive and must not match a record of the current one.
    generation: u32,
    /// The group did not assign what the lane subscribed to, so the next session leaves the group before it joins.
    must_leave: bool,
    /// Consecutive sessions that ended because the group's assignment was not valid.
    rejoins: u32,
    /// Partitions whose topic was created again while the lane owned them, until the lane commits a position of the new
    /// topic or loses the partition. Until then, a commit without a topic fingerprint is treated as one of the old topic.
    recreated: BTreeSet<(Arc<str>, i32)>,
}

/// The dependencies of a lane, except its processor.
#[derive(Clone)]
pub struct LaneContext {
    /// Settings of the Kafka clients.
    pub settings: KafkaSettings,
    /// The clock that due times refer to.
    pub clock: Arc<dyn Clock>,
    /// Receives the state and the counts of the lane.
    pub observer: Arc<dyn LaneObserver>,
    /// Wakes the lane.
    pub waker: Waker,
    /// Shuts the lane down gracefully.
    pub stop: CancellationToken,
    /// Tells which topics exist.
    pub watch: TopicWatch,
}

impl LaneContext {
    /// A context with the system clock and a new waker.
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
    /// Creates a lane. [`Lane::run`] runs it on the calling thread.
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
            rejoins: 0,
            recreated: BTreeSet::new(),
        }
    }

    /// Runs until the token is cancelled. Blocks the calling thread, which must not serve async tasks.
    ///
    /// # Errors
    /// Permanent errors only, see [`LaneError`]. An unreachable broker is retried.
    pub fn run(mut self) -> Result<(), LaneError> {
        self.waker.attach_current_thread();
        self.watch.watch(self.spec.topics.iter().cloned(), &self.waker);
        let id = format!("redeliver-{}-{}", self.settings.instance, self.spec.name);
        let mut transactions =
            Alternating::new(&self.settings, &id, self.spec.changelog.as_ref(), &self.watch);
        let mut fences = Fences::default();
        let mut backoff = backoff::new();
        while !self.stop.is_cancelled() {
            let error = match Session::open(&mut self, &mut transactions, &mut fences) {
                Ok(mut session) => match session.run() {
                    Ok(()) => return Ok(()),
                    Err(error) => {
                        if session.has_committed {
                            backoff.reset();
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            match error {
                Ended::Broken(error) => {
                    // The old producer may have left a transaction open. Initialising a new one with the same
                    // transactional id resolves it.
                    transactions.discard();
                    tracing::warn!(lane = self.spec.name, error = %error_chain(&error), "lane failed; restarting it");
                    self.observer.waiting("reconnecting");
                    sleep_unless_stopped(backoff.next_delay(), &self.stop);
                }
                Ended::Restart(reason) => {
                    transactions.discard();
                    tracing::info!(lane = self.spec.name, reason, "restarting lane");
                    self.observer.waiting(&reason);
                }
                Ended::Halted(reason) => {
                    transactions.discard();
                    self.halt(&reason);
                }
                Ended::Fatal(error) => return Err(error),
                Ended::Stopped => return Ok(()),
            }
        }
        Ok(())
    }

    /// Reads nothing and repeats the reason in the log until shutdown.
    fn halt(&self, reason: &str) {
        self.observer.waiting(reason);
        let mut log_throttle = LogThrottle::default();
        while !self.stop.is_cancelled() {
            if log_throttle.should_log() {
                tracing::error!(lane = self.spec.name, reason, "lane halted");
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
        Ended::Fatal(LaneError::Misconfigured {
            lane: self.spec.name.clone(),
            source,
        })
    }
}

/// Why a session ended.
enum Ended {
    /// The consumer failed; a new session may succeed.
    Broken(KafkaError),
    /// The lane needs a new session, for a reason that is not an error.
    Restart(String),
    /// An operator has to act before the lane may continue.
    Halted(String),
    /// Retrying cannot help.
    Fatal(LaneError),
    /// The lane was told to stop.
    Stopped,
}

/// The state of a lane during the life of one consumer.
struct Session<'a, P: Processor> {
    lane: &'a mut Lane<P>,
    transactions: &'a mut Alternating,
    fences: &'a mut Fences,
    consumer: Arc<BaseConsumer<Events>>,
    membership: Membership,
    group_check: GroupCheck,
    /// The ids under which the client fetches topics, as far as its log has reported them.
    client_ids: BTreeMap<String, TopicId>,
    /// `client_ids` or the assigned topics have changed since they were last compared.
    must_compare_ids: bool,
    /// Records were admitted since the last call of [`Processor::accepted_all`].
    has_admitted: bool,
    /// The value of [`TopicWatch::changes`] when topics were last checked.
    seen_changes: Option<usize>,
    /// The number of partitions of each topic of the lane at that time, 0 for a missing one; empty before the first check.
    seen_partitions: Vec<i32>,
    slots: Vec<Option<Assigned>>,
    /// Assigned partitions whose committed offsets have not been read yet.
    pending: Vec<(String, i32)>,
    batch: TransactionBatch,
    /// The slots whose position may have to be committed with the next transaction.
    touched: Vec<u32>,
    next_slot: usize,
    ready: bool,
    /// Since when the broker may be unreachable.
    suspect_since: Option<Instant>,
    must_rewind: bool,
    failed_seeks: u32,
    /// Since when requests for committed offsets or topic ids have failed.
    stuck_since: Option<Instant>,
    stopping_since: Option<Instant>,
    has_committed: bool,
    /// The current maximum batch size. It is halved after each failed transaction, because a batch that takes longer to
    /// write than the transaction timeout would fail forever.
    batch_limit: usize,
    failures: FailedTransactions,
    refused_log_throttle: LogThrottle,
}

struct Assigned {
    id: AssignmentId,
    topic: Arc<str>,
    partition: i32,
    /// `None` if the topic was missing when it was assigned, or the broker does not support topic ids.
    topic_id: Option<TopicId>,
    /// Whether the position certainly belongs to that topic: the commit has its fingerprint, or a record was read.
    is_confirmed: bool,
    queue: PartitionQueue<Events>,
    tracker: OffsetTracker,
    touched: bool,
    /// The next transaction commits the position even if it has not changed.
    must_commit: bool,
}

impl<'a, P: Processor> Session<'a, P> {
    /// Resolves transactions that an earlier process with this transactional id left open, then joins the group.
    fn open(
        lane: &'a mut Lane<P>,
        transactions: &'a mut Alternating,
        fences: &'a mut Fences,
    ) -> Result<Self, Ended> {
        let mut backoff = backoff::new();
        let mut log_throttle = LogThrottle::default();
        // Before joining the group: while a transaction of the previous process is open, the coordinator does not answer
        // with the offsets that it may still commit.
        while let Err(error) = transactions.recover(CALL) {
            match error.action {
                RecoveryAction::Misconfigured => return Err(lane.misconfigured(error.into_source())),
                RecoveryAction::Fenced => fences.count(lane)?,
                RecoveryAction::Retry | RecoveryAction::Abort | RecoveryAction::Rebuild => {}
            }
            lane.observer
                .waiting(&format!("Kafka not ready: {}", error_chain(&error)));
            if log_throttle.should_log() {
                tracing::warn!(
                    lane = lane.spec.name, brokers = lane.settings.brokers, error = %error_chain(&error),
                    "Kafka not ready; retrying"
                );
            }
            sleep_unless_stopped(backoff.next_delay(), &lane.stop);
            if lane.stop.is_cancelled() {
                return Err(Ended::Stopped);
            }
        }
        let batch_limit = lane.spec.batch.max(1);
        let config: ClientConfig = lane.settings.consumer(&lane.spec.group, &lane.spec.name);
        let events = Events::new(lane.waker.clone());
        let mut consumer: BaseConsumer<Events> = config
            .create_with_context(events)
            .map_err(|error| lane.misconfigured(error))?;
        let waker = lane.waker.clone();
        consumer.set_nonempty_callback(move || waker.wake());
        let mut pending = Vec::new();
        let mut membership = Membership::Joining;
        let mut group_check = GroupCheck::due_now();
        if lane.settings.takes_all_partitions {
            pending = all_partitions(&consumer, &lane.spec.topics).map_err(Ended::Broken)?;
            membership = Membership::Joined;
            group_check = GroupCheck::not_needed();
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
            group_check,
            client_ids: BTreeMap::new(),
            must_compare_ids: false,
            has_admitted: false,
            seen_changes: None,
            seen_partitions: Vec::new(),
            slots: Vec::new(),
            pending,
            batch: TransactionBatch::default(),
            touched: Vec::new(),
            next_slot: 0,
            ready: false,
            suspect_since: None,
            must_rewind: false,
            failed_seeks: 0,
            stuck_since: None,
            stopping_since: None,
            has_committed: false,
            batch_limit,
            failures: FailedTransactions::new(),
            refused_log_throttle: LogThrottle::default(),
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
        // The consumer still polls while it closes. It must not accept an assignment that the lane will not read.
        self.consumer.context().decline(true);
        result
    }

    fn round(&mut self) -> Result<Next, Ended> {
        self.serve_events()?;
        if self.lane.stop.is_cancelled() && self.is_finished_stopping() {
            return Ok(Next::Stop);
        }
        if self.stuck_since.is_some_and(|since| since.elapsed() > STUCK) {
            // After restarts of the broker, some clients never find their coordinator again. Only a new client does.
            return Err(Ended::Broken(KafkaError::OffsetFetch(
                RDKafkaErrorCode::OperationTimedOut,
            )));
        }
        // The pause comes after events are served: a rebalance must not wait for the backoff.
        if self.failures.is_backing_off() {
            thread::park_timeout(ROUND);
            return Ok(Next::Continue);
        }
        if !self.transactions.is_ready() || self.must_rewind {
            self.recover()?;
            return Ok(Next::Continue);
        }
        self.start_pending()?;
        self.check_topics()?;
        self.check_group()?;
        let admitted = self.admit()?;
        if admitted > 0 {
            // The client reports the new id of a topic before it returns records of the new topic. So once these events
            // are served, the ids tell whether the admitted records belong to the topic that was assigned.
            self.serve_events()?;
        }
        // Nothing is processed before that is certain: an offset of another topic must not be committed.
        if self.must_rewind || !self.verify_topic_ids()? {
            return Ok(Next::Continue);
        }
        if std::mem::take(&mut self.has_admitted) {
            self.lane.processor.accepted_all();
        }
        let now = self.lane.clock.now();
        self.lane.processor.finish(now, self.batch_limit, &mut self.batch);
        if !self.batch.completed.is_empty() || !self.batch.owners.is_empty() || !self.touched.is_empty() {
            self.write()?;
        } else if admitted == 0 {
            self.wait();
        }
        Ok(Next::Continue)
    }

    /// Serves everything except records: rebalances, errors, statistics.
    fn serve_events(&mut self) -> Result<(), Ended> {
        let consumer = self.consumer.clone();
        loop {
            let served = consumer.context().served();
            match consumer.poll(Duration::ZERO) {
                // Each partition has its own queue before it is fetched, so no record should arrive here. If one
                // does, reading again from the committed offset makes sure that it is not lost.
                Some(Ok(message)) => {
                    tracing::warn!(
                        topic = message.topic(),
                        partition = message.partition(),
                        offset = message.offset(),
                        "record bypassed the queue of its partition; reading again from the committed offset"
                    );
                    self.must_rewind = true;
                }
                Some(Err(error)) => self.consumer_error(error)?,
                // `poll` also returns `None` after it has served an event. All events must be served before anything is
                // written: after a revocation, the new owner may already process the same records.
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
                    self.group_check = GroupCheck::due_now();
                    self.pending.retain(|partition| !partitions.contains(partition));
                    for (topic, partition) in &partitions {
                        self.forget(topic, *partition);
                    }
                }
                Event::TopicIdChanged(topic, id) => {
                    self.client_ids.insert(topic, id);
                    self.must_compare_ids = true;
                }
                Event::Unreachable => {
                    self.suspect_since.get_or_insert_with(Instant::now);
                }
                Event::Lag(partitions) => self.report_lag(&partitions),
            }
        }
        self.update_readiness();
        Ok(())
    }

    fn report_lag(&self, partitions: &[PartitionLag]) {
        for assigned in self.slots.iter().flatten() {
            let is_same =
                |lag: &&PartitionLag| lag.partition == assigned.partition && *lag.topic == *assigned.topic;
            if let Some(partition) = partitions.iter().find(is_same) {
                let lag = partition.unread + assigned.tracker.in_flight() as u64;
                self.lane
                    .observer
                    .lag(&assigned.topic, assigned.partition, Some(lag));
            }
        }
    }

    fn consumer_error(&mut self, error: KafkaError) -> Result<(), Ended> {
        if recovery_action(&error) == RecoveryAction::Fenced {
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

    /// The lane is ready once every partition of its topics has an owner in the group, and not ready while the broker is
    /// unreachable.
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
                    self.waiting(&format!("Kafka unavailable: {error}"));
                }
            }
            return;
        }
        if self.ready {
            return;
        }
        let joined = self.lane.settings.takes_all_partitions
            || !matches!(self.consumer.rebalance_protocol(), RebalanceProtocol::None);
        let is_healthy = self.transactions.is_ready()
            && !self.failures.are_repeated()
            && self.membership == Membership::Joined
            && self.group_check.has_passed();
        if joined && is_healthy && self.pending.is_empty() {
            self.ready = true;
            self.lane.observer.ready();
            tracing::info!(
                lane = self.lane.spec.name,
                group = self.lane.spec.group,
                "lane is ready"
            );
        }
    }

    /// Starts reading newly assigned partitions from their committed offsets.
    fn start_pending(&mut self) -> Result<(), Ended> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let pending = self.pending.clone();
        // The ids are read before the offsets. If the topic is created again in between, an old offset meets the old id, and
        // the next check of the topics detects the change. In the other order, an old offset without a fingerprint would be
        // attributed to the new topic.
        let Some(ids) = self.topic_ids(&pending) else {
            return Ok(());
        };
        let Some(committed) = self.committed_positions(&pending) else {
            return Ok(());
        };
        let mut list = TopicPartitionList::new();
        let mut starting = Vec::new();
        for (topic, partition, mut position) in committed {
            let id = ids.get(&topic).copied().flatten();
            let lacks_fingerprint = position
                .as_ref()
                .is_some_and(|committed| committed.topic.is_none());
            if position
                .as_ref()
                .is_some_and(|committed| self.is_of_deleted_topic((&topic, partition), committed, id))
            {
                let ended = self.ended_by_recreation(&topic);
                if let Ended::Halted(_) = ended {
                    return Err(ended);
                }
                tracing::warn!(
                    topic,
                    partition,
                    committed = position.map(|committed| committed.offset),
                    "committed offset belongs to a deleted topic; reading the new topic from its beginning"
                );
                position = None;
            }
            let offset = start_offset(position.as_ref());
            list.add_partition_offset(&topic, partition, offset)
                .map_err(Ended::Broken)?;
            starting.push((topic, partition, id, position, lacks_fingerprint));
        }
        // The queues are split before the assignment starts fetching: a record fetched earlier would arrive in the main
        // queue instead.
        for (topic, partition, id, position, lacks_fingerprint) in starting {
            let slot = self.add_assignment(&topic, partition, id, position)?;
            // Add the fingerprint with the next transaction, so that the topic can be recognised from then on.
            if lacks_fingerprint && id.is_some() {
                self.commit_soon(slot);
            }
        }
        let started = if self.lane.settings.takes_all_partitions {
            self.consumer.assign(&list)
        } else {
            self.consumer.incremental_assign(&list)
        };
        started.map_err(Ended::Broken)?;
        self.pending.clear();
        self.must_compare_ids = true;
        // Compare the new assignments with the current state of the watch, which may have changed before they existed.
        self.seen_changes = None;
        self.lane.observer.assigned(self.slots.iter().flatten().count());
        Ok(())
    }

    /// The committed positions of partitions; `None` while they cannot be read. The client requests stable offsets
    /// (`require_stable`), so an offset is returned only when no open transaction may still change it.
    fn committed_positions(
        &mut self,
        partitions: &[(String, i32)],
    ) -> Option<Vec<(String, i32, Option<Committed>)>> {
        let mut list = TopicPartitionList::new();
        for (topic, partition) in partitions {
            list.add_partition(topic, *partition);
        }
        let list = match self.consumer.committed_offsets(list, CALL) {
            Ok(list) => list,
            Err(error) => {
                self.waiting(&format!("cannot read committed offsets: {error}"));
                self.stuck_since.get_or_insert_with(Instant::now);
                thread::park_timeout(ROUND);
                return None;
            }
        };
        let mut positions = Vec::with_capacity(partitions.len());
        for element in list.elements() {
            if let Err(error) = element.error() {
                self.waiting(&format!(
                    "cannot read the committed offset of {}/{}: {error}",
                    element.topic(),
                    element.partition()
                ));
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

    fn add_assignment(
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
            must_commit: false,
        });
        Ok(slot)
    }

    /// Makes the next transaction commit the position of a partition, even if it has not changed.
    fn commit_soon(&mut self, slot: usize) {
        if let Some(assigned) = &mut self.slots[slot] {
            assigned.must_commit = true;
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
                // From here on the next owner may commit positions of the new topic, also without a fingerprint.
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
        self.batch.clear();
    }

    /// Passes records to the processor, partition by partition, as many as it has capacity for.
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
                // Checked for each record, since the processor's limit may be in bytes.
                if self.lane.processor.capacity(assigned.id) == 0 {
                    break;
                }
                // Beyond this limit, the completed set might not fit into the metadata of the commit, and the records in it
                // would be processed again after a restart.
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
                // A record was read at the position, so the position belongs to the assigned topic.
                assigned.is_confirmed = true;
                match assigned.tracker.observe(message.offset()) {
                    Admission::New => {
                        let record = convert::record(&message, &assigned.topic);
                        self.lane.processor.accept(assigned.id, record, now);
                        admitted += 1;
                    }
                    // The position may advance without any work, and that is worth a commit.
                    Admission::AlreadyCompleted => {
                        if !assigned.touched {
                            assigned.touched = true;
                            self.touched.push(u32::try_from(slot).unwrap_or(u32::MAX));
                        }
                    }
                    Admission::Stale => {}
                }
            }
        }
        // The next round begins with another partition, so that a busy one does not use up the capacity every time.
        self.next_slot = self.next_slot.wrapping_add(1);
        self.has_admitted |= admitted > 0;
        for slot in out_of_range {
            self.out_of_range(slot)?;
        }
        Ok(admitted)
    }

    /// Writes one transaction: the outputs of the batch, and the positions that result from its completed records.
    fn write(&mut self) -> Result<(), Ended> {
        let began = Instant::now();
        // All results are checked before anything is written. A result of an earlier assignment belongs to records that were
        // read again, by this lane or another one, so writing it would duplicate its outputs.
        for (id, offset) in &self.batch.completed {
            let assigned = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut);
            let Some(assigned) = assigned.filter(|assigned| assigned.id == *id) else {
                return self.reject_batch(*id, *offset);
            };
            if !assigned.tracker.complete(*offset) {
                return self.reject_batch(*id, *offset);
            }
            if !assigned.touched {
                assigned.touched = true;
                self.touched.push(id.slot);
            }
        }
        let completed = self.batch.completed.len();
        for id in &self.batch.owners {
            let assigned = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut);
            let Some(assigned) = assigned.filter(|assigned| assigned.id == *id) else {
                return self.reject_batch(*id, -1);
            };
            assigned.must_commit = true;
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
            // Without offsets the broker would not check the group's generation, and a lane that has lost the partition
            // could still write.
            let position = if std::mem::take(&mut assigned.must_commit) {
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
        if positions.is_empty() && self.batch.outputs.is_empty() {
            self.batch.clear();
            return Ok(());
        }
        while let Err(error) = self.commit(&offsets) {
            if !self.replace_refused(&error) {
                return self.abandon_batch(&error);
            }
        }
        // Committed: only from here on may the trackers and the processor rely on the new positions.
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
        self.failures.reset();
        if took < self.lane.settings.transaction_timeout / 8 {
            self.batch_limit = (2 * self.batch_limit).min(self.lane.spec.batch);
        }
        self.lane
            .observer
            .committed(self.batch.outputs.len(), completed, took);
        self.batch.clear();
        for (partition, end) in self.transactions.changelog_ends() {
            self.lane.processor.changelog_written(partition, end);
        }
        self.lane.processor.committed(self.lane.clock.now());
        Ok(())
    }

    /// Drops a batch with a result that matches no record in flight: it belongs to another assignment, or its record is
    /// already complete. Outputs do not say which record they belong to, so the whole batch is dropped.
    fn reject_batch(&mut self, id: AssignmentId, offset: i64) -> Result<(), Ended> {
        tracing::error!(
            lane = self.lane.spec.name,
            assignment = ?id, offset,
            "result matches no record in flight; dropping the batch and reading its records again"
        );
        self.drop_batch();
        self.lane.observer.transaction_failed(RecoveryAction::Abort);
        Ok(())
    }

    fn drop_batch(&mut self) {
        self.batch.clear();
        self.lane.processor.aborted();
        self.must_rewind = true;
    }

    fn commit(&mut self, offsets: &TopicPartitionList) -> Result<(), TransactionError> {
        let consumer = &self.consumer;
        let group = || consumer.group_metadata();
        self.transactions.write(&self.batch.outputs, offsets, group)
    }

    /// Lets the processor replace the outputs that their topic refused. The transaction was aborted, but the batch is
    /// complete in memory and the positions are the same, so nothing has to be read again.
    fn replace_refused(&mut self, error: &TransactionError) -> bool {
        let Some(first) = error.refused.first() else {
            return false;
        };
        if self.refused_log_throttle.should_log() {
            tracing::warn!(
                lane = self.lane.spec.name,
                records = error.refused.len(),
                reason = first.failure.message,
                "topic refused records"
            );
        }
        self.lane.observer.transaction_failed(error.action);
        let now = self.lane.clock.now();
        self.lane.processor.refused(&error.refused, &mut self.batch, now)
    }

    /// Gives up the batch after a failed transaction. Its records are read again.
    fn abandon_batch(&mut self, error: &TransactionError) -> Result<(), Ended> {
        let reason = error_chain(error);
        if self.failures.record() {
            tracing::warn!(
                lane = self.lane.spec.name,
                error = reason,
                in_a_row = self.failures.count,
                "transaction failed; reading again from the committed offsets"
            );
        } else {
            tracing::debug!(
                lane = self.lane.spec.name,
                error = reason,
                "transaction failed again"
            );
        }
        if self.failures.are_repeated() {
            self.waiting(&reason);
        }
        self.lane.observer.transaction_failed(error.action);
        self.batch_limit = (self.batch_limit / 2).max(MIN_BATCH.min(self.lane.spec.batch));
        self.drop_batch();
        if error.action == RecoveryAction::Fenced {
            self.fences.count(self.lane)?;
        }
        Ok(())
    }

    /// Recovers from a failed transaction. The order matters: a producer whose transaction has an unknown outcome must
    /// be initialised again, which resolves it. Only then do the committed offsets show the outcome.
    fn recover(&mut self) -> Result<(), Ended> {
        if let Err(error) = self.transactions.recover(CALL) {
            self.waiting(&format!("Kafka not ready: {}", error_chain(&error)));
            if error.action == RecoveryAction::Fenced {
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
            let Some(committed) = self.committed_positions(&owned) else {
                return Ok(());
            };
            let of_deleted_topic = committed.iter().find(|(topic, partition, position)| {
                let is_same = |a: &&Assigned| *a.topic == **topic && a.partition == *partition;
                let assigned = self.slots.iter().flatten().find(is_same);
                let id = assigned.and_then(|assigned| assigned.topic_id);
                position
                    .as_ref()
                    .is_some_and(|committed| self.is_of_deleted_topic((topic, *partition), committed, id))
            });
            if let Some((topic, ..)) = of_deleted_topic {
                let topic = topic.clone();
                return Err(self.recreated(&topic));
            }
            if !self.seek(&committed)? {
                return Ok(());
            }
            for (topic, partition, position) in committed {
                self.reset_assignment(&topic, partition, position);
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

    /// Moves partitions to their committed offsets and discards what was fetched before. A new assignment would do the
    /// same, but the client would take it for the answer to a rebalance in progress.
    fn seek(&mut self, committed: &[(String, i32, Option<Committed>)]) -> Result<bool, Ended> {
        let mut list = TopicPartitionList::new();
        for (topic, partition, position) in committed {
            list.add_partition_offset(topic, *partition, start_offset(position.as_ref()))
                .map_err(Ended::Broken)?;
        }
        let seek = self.consumer.seek_partitions(list, 5 * CALL);
        let result = seek.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(rdkafka::topic_partition_list::TopicPartitionListElem::error)
        });
        // A partition that was assigned a moment ago may not have started fetching. The next round tries again.
        if let Err(error) = result {
            self.failed_seeks += 1;
            self.waiting(&format!("cannot seek to the committed offsets: {error}"));
            if self.failed_seeks > 50 {
                return Err(Ended::Broken(error));
            }
            thread::park_timeout(ROUND);
            return Ok(false);
        }
        self.failed_seeks = 0;
        Ok(true)
    }

    /// Restarts a partition at a position and drops its records in flight.
    fn reset_assignment(&mut self, topic: &str, partition: i32, position: Option<Committed>) {
        let is_same = |slot: &Option<Assigned>| {
            let assigned = slot.as_ref();
            assigned.is_some_and(|assigned| &*assigned.topic == topic && assigned.partition == partition)
        };
        let Some(slot) = self.slots.iter().position(is_same) else {
            return;
        };
        // Under the old id, the late result of a handler would match the record that is read again.
        let id = self.lane.new_id(slot);
        if let Some(assigned) = &mut self.slots[slot] {
            self.lane.processor.revoked(assigned.id);
            self.lane.processor.assigned(id, &assigned.topic, partition);
            assigned.id = id;
            assigned.touched = false;
            assigned.must_commit = false;
            let fingerprint = assigned.topic_id.map(TopicFingerprint::of);
            let position = position.unwrap_or_else(Committed::start);
            // The topic id is the same, so what was confirmed by a record that was read stays confirmed.
            assigned.is_confirmed |= position.topic.is_some();
            assigned.tracker = OffsetTracker::new(position, fingerprint);
        }
    }

    /// Waits for a record, an event, finished work, or a due time.
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

    /// Whether all work is finished or the grace period is over. The first call tells the processor to stop.
    fn is_finished_stopping(&mut self) -> bool {
        if self.stopping_since.is_none() {
            self.lane.processor.stopping();
        }
        let since = *self.stopping_since.get_or_insert_with(Instant::now);
        if !self.lane.processor.is_busy() {
            return true;
        }
        let is_over = since.elapsed() >= self.lane.spec.grace;
        if is_over {
            tracing::warn!(
                lane = self.lane.spec.name,
                "grace period over with records in flight; they will be processed again after a restart"
            );
        }
        is_over
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

/// Counts how often another process fenced the lane.
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
        Err(Ended::Fatal(LaneError::InstanceInUse {
            lane: lane.spec.name.clone(),
            instance: lane.settings.instance.clone(),
        }))
    }
}
