//! Carries out the steps of a lane with its consumer and, through the writer and the positions thread, everything that blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_core::error_chain::error_chain;
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use super::assignments::Partition;
use super::events::{Event, Events, PartitionLag};
use super::membership::{self, GroupCheck, Membership, subscribe};
use super::positions::Positions;
use super::state::{LaneState, Start, Step};
use super::writer::Writer;
use super::{CALL, Ended, LaneClient, ROUND, TRANSACTIONS};
use crate::convert;
use crate::processor::{AssignmentId, Processor};
use crate::recovery::{RecoveryAction, error_code, recovery_action};
use crate::tracker::Committed;

/// Interval of metadata requests that check whether the broker is reachable again.
const PROBE: Duration = Duration::from_secs(1);

/// The clients of one session. Fields are dropped in this order: nothing may use the consumer while it closes.
pub(super) struct Driver<'a> {
    pub(super) lane: &'a mut LaneClient,
    writer: &'a Writer,
    positions: Positions,
    /// The offsets of the transaction that is being written, with the embedded broker.
    offsets: Option<TopicPartitionList>,
    /// The queue of each slot.
    queues: Vec<Option<PartitionQueue<Events>>>,
    pub(super) consumer: KafkaClient<Arc<BaseConsumer<Events>>>,
    pub(super) membership: Membership,
    pub(super) group_check: GroupCheck,
    /// The ids under which the client fetches topics, as far as its log has reported them.
    pub(super) client_ids: BTreeMap<String, TopicId>,
    /// `client_ids` or the assigned topics have changed since they were last compared.
    pub(super) must_compare_ids: bool,
    /// The value of [`TopicWatch::changes`](crate::topic_watch::TopicWatch::changes) when topics were last checked.
    pub(super) seen_changes: Option<usize>,
    /// The number of partitions of each topic of the lane at that time, 0 for a missing one; empty before the first check.
    pub(super) seen_partitions: Vec<i32>,
    /// Since when the broker may be unreachable.
    suspect_since: Option<Instant>,
    /// Partitions whose log does not have the next offset.
    out_of_range: Vec<(usize, AssignmentId)>,
}

impl<'a> Driver<'a> {
    /// Creates the consumer and joins the group. The producers must be initialised.
    pub(super) fn open<P: Processor>(
        lane: &'a mut LaneClient,
        writer: &'a Writer,
        state: &mut LaneState<P>,
    ) -> Result<Self, Ended> {
        let config = lane.settings.consumer(&lane.spec.group, &lane.spec.name);
        let events = Events::new(lane.waker.clone());
        let waker = lane.waker.clone();
        let consumer = config
            .create_shared(events, |consumer| {
                consumer.set_nonempty_callback(move || waker.wake());
            })
            .map_err(|error| lane.misconfigured(error.into()))?;
        let mut membership = Membership::Joining;
        let mut group_check = GroupCheck::due_now();
        if lane.settings.is_embedded {
            state.assigned(all_partitions(&consumer, &lane.spec.topics)?);
            consumer.context().capture_member(&consumer);
            membership = Membership::Joined;
            group_check = GroupCheck::not_needed();
        } else {
            state.waiting("joining the consumer group");
            if let Some(instance) = lane.settings.group_instance_id(&lane.spec.name) {
                let spec = &lane.spec;
                let forced = std::mem::take(&mut lane.must_leave);
                if forced || membership::must_leave(&consumer, &spec.group, &instance, &spec.topics) {
                    membership = Membership::Rejoining;
                }
            }
            subscribe(&consumer, &lane.spec.topics)?;
        }
        let (watch, waker) = (lane.watch.clone(), lane.waker.clone());
        let positions = Positions::start(consumer.clone(), watch, waker, lane.settings.is_embedded)
            .map_err(|error| Ended::Broken(format!("cannot start a thread: {error}")))?;
        Ok(Self {
            lane,
            writer,
            out_of_range: Vec::new(),
            positions,
            offsets: None,
            queues: Vec::new(),
            consumer,
            membership,
            group_check,
            client_ids: BTreeMap::new(),
            must_compare_ids: false,
            seen_changes: None,
            seen_partitions: Vec::new(),
            suspect_since: None,
        })
    }

    /// Carries out a step. Returns false after [`Step::Stop`].
    pub(super) fn execute<P: Processor>(
        &mut self,
        step: Step,
        state: &mut LaneState<P>,
    ) -> Result<bool, Ended> {
        match step {
            Step::Poll => self.poll(state)?,
            Step::InitProducers => self.init_producers(state)?,
            Step::LookUp(lookup) => self.positions.look_up(lookup),
            Step::Start(starts) => self.start(starts, state)?,
            Step::Check => {
                self.check_topics(state)?;
                self.check_group(state)?;
                self.writer.transactions().look_after_unready();
            }
            Step::Admit => {
                self.admit(state);
                if !state.is_writing() {
                    for (slot, id) in std::mem::take(&mut self.out_of_range) {
                        // Otherwise the partition was revoked, or is started again from its committed position.
                        if state.assignments.reading(slot).is_some_and(|(now, _)| now == id) {
                            self.out_of_range(slot, state)?;
                        }
                    }
                }
            }
            Step::Verify => self.verify_topic_ids(state)?,
            Step::Write => self.write(state)?,
            Step::Await => {
                if !self.end_transaction(state)? {
                    thread::park_timeout(ROUND);
                }
            }
            Step::Park(wait) => thread::park_timeout(wait),
            Step::Stop => {
                if state.is_writing() {
                    // It may have ended in the last moment.
                    self.end_transaction(state)?;
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Serves everything except records: rebalances, errors, statistics, answers to lookups.
    fn poll<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
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
                    state.read_again();
                }
                Some(Err(error)) => self.consumer_error(&error, state)?,
                // `poll` also returns `None` after it has served an event. All events must be served before anything is
                // written: after a revocation, the new owner may already process the same records.
                None if consumer.context().served() == served => break,
                None => {}
            }
        }
        for event in consumer.context().take() {
            match event {
                Event::Assigned(partitions) => self.assigned(partitions, state)?,
                Event::Revoked(partitions) => {
                    if self.membership == Membership::Leaving {
                        self.join()?;
                    }
                    self.group_check = GroupCheck::due_now();
                    state.revoked(&partitions);
                    self.drop_queues(state);
                }
                Event::MemberReplaced => {
                    tracing::warn!(
                        lane = self.lane.spec.name,
                        "the coordinator had removed this member from the group; reading again from the committed offsets"
                    );
                    state.read_again();
                }
                Event::TopicIdChanged(topic, id) => {
                    self.client_ids.insert(topic, id);
                    self.must_compare_ids = true;
                }
                Event::Unreachable => {
                    self.suspect_since.get_or_insert_with(Instant::now);
                }
                Event::Lag(partitions) => report_lag(partitions, state),
            }
        }
        while let Some(found) = self
            .positions
            .take()
            .map_err(|_| self.lane.thread_ended("lookups of positions"))?
        {
            state.found(Instant::now(), found)?;
        }
        self.update_readiness(state);
        Ok(())
    }

    fn drop_queues<P: Processor>(&mut self, state: &LaneState<P>) {
        for (slot, queue) in self.queues.iter_mut().enumerate() {
            if state
                .assignments
                .get(slot)
                .is_none_or(|assigned| !assigned.is_fetched)
            {
                *queue = None;
            }
        }
    }

    fn consumer_error<P: Processor>(
        &mut self,
        error: &KafkaError,
        state: &mut LaneState<P>,
    ) -> Result<(), Ended> {
        if recovery_action(error) == RecoveryAction::Fenced {
            state.fenced(Instant::now())?;
            return Err(Ended::Broken(error.to_string()));
        }
        // Of a partition whose queue was dropped a moment ago.
        if matches!(error, KafkaError::PartitionEOF(_)) {
            return Ok(());
        }
        if matches!(error, KafkaError::MessageConsumptionFatal(_)) {
            return Err(Ended::Broken(error.to_string()));
        }
        self.suspect_since.get_or_insert_with(Instant::now);
        state.waiting(&error.to_string());
        Ok(())
    }

    /// The lane is ready once every partition of its topics has an owner in the group, and not ready while the broker is
    /// unreachable.
    fn update_readiness<P: Processor>(&mut self, state: &mut LaneState<P>) {
        if let Some(since) = self.suspect_since {
            if since.elapsed() < PROBE && state.is_ready() {
                return;
            }
            let topic = self.lane.spec.topics.first().cloned();
            match self.consumer.fetch_metadata(topic.as_deref(), CALL / 4) {
                Ok(_) => self.suspect_since = None,
                Err(error) => {
                    self.suspect_since = Some(Instant::now());
                    state.waiting(&format!("Kafka unavailable: {error}"));
                }
            }
            return;
        }
        if state.is_ready() {
            return;
        }
        let has_joined = self.lane.settings.is_embedded
            || !matches!(self.consumer.rebalance_protocol(), RebalanceProtocol::None);
        let is_member = self.membership == Membership::Joined && self.group_check.has_passed();
        if has_joined && is_member && state.is_healthy(Instant::now()) {
            state.ready();
            self.lane.renewal.end();
        }
    }

    /// Initialises the producers. A producer whose transaction has an unknown outcome must be initialised before the
    /// committed positions are read: only then do they show the outcome.
    fn init_producers<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
        let recovered = self.writer.transactions().recover(CALL);
        match recovered {
            Ok(()) => state.producers_ready(),
            Err(error) => {
                state.waiting(&format!("Kafka not ready: {}", error_chain(&error)));
                if error.action == RecoveryAction::Fenced {
                    state.fenced(Instant::now())?;
                }
                thread::park_timeout(ROUND);
            }
        }
        Ok(())
    }

    /// Makes the client fetch partitions. A partition that is fetched already is moved by a seek, which discards what was
    /// fetched before.
    ///
    /// If a rebalance was reported since the last poll, the client takes a change of the assignment for the answer to it,
    /// and may join the next generation before the lane has served the event. That is safe: offsets are committed under the
    /// captured generation, and the broker refuses an outdated one.
    fn start<P: Processor>(&mut self, starts: Vec<Start>, state: &mut LaneState<P>) -> Result<(), Ended> {
        let (fetched, new): (Vec<Start>, Vec<Start>) = starts.into_iter().partition(|start| start.is_fetched);
        if !fetched.is_empty() {
            match self.consumer.seek_partitions(list_of(&fetched)?, 5 * CALL) {
                Ok(results) => {
                    let has_failed = |start: &Start| {
                        let result = results.find_partition(&start.topic, start.partition);
                        result.is_none_or(|result| result.error().is_err())
                    };
                    // The client may have stopped fetching a partition, or not begun yet.
                    for start in fetched.iter().filter(|start| has_failed(start)) {
                        self.read_from(
                            &start.topic,
                            start.partition,
                            start_offset(start.position.as_ref()),
                        )?;
                    }
                    state.started(fetched);
                }
                Err(error) => state.start_failed(Instant::now(), &error.to_string())?,
            }
        }
        if new.is_empty() {
            return Ok(());
        }
        // The queues are split before the assignment starts fetching: a record fetched earlier would arrive in the main
        // queue instead.
        for start in &new {
            let mut queue = self
                .consumer
                .split_partition_queue(&start.topic, start.partition)
                .ok_or_else(|| Ended::Broken("cannot split the queue of a partition".to_owned()))?;
            let waker = self.lane.waker.clone();
            queue.set_nonempty_callback(move || waker.wake());
            if self.queues.len() <= start.slot {
                self.queues.resize_with(start.slot + 1, || None);
            }
            self.queues[start.slot] = Some(queue);
        }
        let list = list_of(&new)?;
        let started = if self.lane.settings.is_embedded {
            self.consumer.assign(&list)
        } else {
            self.consumer.incremental_assign(&list)
        };
        started?;
        state.started(new);
        self.must_compare_ids = true;
        // Compare the new assignments with the current state of the watch, which may have changed before they existed.
        self.seen_changes = None;
        Ok(())
    }

    /// Passes records to the processor, partition by partition, as many as it has capacity for.
    fn admit<P: Processor>(&mut self, state: &mut LaneState<P>) {
        // After a step of the clock, a time lock must not be taken for one that is too far ahead.
        let (_, now) = state.clock().possible();
        for slot in state.assignments.admission_order() {
            let Some(Some(queue)) = self.queues.get(slot) else {
                continue;
            };
            for _ in 0..self.lane.spec.batch {
                if !state.may_admit(slot) {
                    break;
                }
                match queue.poll(Duration::ZERO) {
                    Some(Ok(message)) => {
                        state.observe(slot, message.offset(), now, |topic| {
                            convert::record(&message, topic)
                        });
                    }
                    Some(Err(error)) if error_code(&error) == Some(RDKafkaErrorCode::AutoOffsetReset) => {
                        let reading = state.assignments.reading(slot);
                        self.out_of_range.extend(reading.map(|(id, _)| (slot, id)));
                        break;
                    }
                    Some(Err(KafkaError::PartitionEOF(_))) => {
                        // An end without an offset says nothing.
                        if let Some(offset) = self.consumer.context().take_end() {
                            state.reached_end(slot, offset);
                        }
                    }
                    Some(Err(error)) => {
                        tracing::debug!(lane = self.lane.spec.name, slot, %error, "consumer error");
                        self.suspect_since.get_or_insert_with(Instant::now);
                        break;
                    }
                    None => break,
                }
            }
        }
    }

    /// Begins one transaction: the outputs of the batch, and the positions that result from its completed records.
    fn write<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
        let mut offsets = TopicPartitionList::with_capacity(state.commits().len());
        for commit in state.commits() {
            let mut element = offsets.add_partition(&commit.topic, commit.partition);
            element.set_offset(Offset::Offset(commit.position.offset))?;
            if !commit.position.metadata.is_empty() {
                element.set_metadata(&commit.position.metadata);
            }
        }
        let member = self.consumer.context().member();
        let follow_up = state.follow_up();
        let outputs = state.take_outputs();
        self.offsets = self.lane.settings.is_embedded.then(|| offsets.clone());
        self.writer
            .begin(outputs, follow_up, offsets, member)
            .map_err(|_| self.lane.thread_ended(TRANSACTIONS))
    }

    /// Reports the result of the transaction that is being written. Returns false if it has not ended yet.
    fn end_transaction<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<bool, Ended> {
        let written = self.writer.take();
        let Some(written) = written.map_err(|_| self.lane.thread_ended(TRANSACTIONS))? else {
            return Ok(false);
        };
        // The embedded broker ignores those of the transaction.
        if let Some(offsets) = self.offsets.take().filter(|_| written.result.is_ok()) {
            self.consumer.commit(&offsets, CommitMode::Async)?;
        }
        state.put_outputs(written.outputs);
        state.written(Instant::now(), written.result, written.changelog_ends)?;
        Ok(true)
    }
}

fn report_lag<P: Processor>(partitions: Vec<PartitionLag>, state: &LaneState<P>) {
    for lag in partitions {
        let slot = state.assignments.find(&lag.topic, lag.partition);
        let assigned = slot.and_then(|slot| state.assignments.get(slot));
        if let Some(assigned) = assigned.filter(|assigned| assigned.tracker().is_some()) {
            let records = lag.unread + assigned.in_flight() as u64;
            state
                .observer()
                .lag(&assigned.topic, assigned.partition, Some(records));
        }
    }
}

fn list_of(starts: &[Start]) -> Result<TopicPartitionList, Ended> {
    let mut list = TopicPartitionList::new();
    for start in starts {
        let offset = start_offset(start.position.as_ref());
        list.add_partition_offset(&start.topic, start.partition, offset)?;
    }
    Ok(list)
}

fn start_offset(position: Option<&Committed>) -> Offset {
    position.map_or(Offset::Beginning, |position| Offset::Offset(position.offset))
}

fn all_partitions(
    consumer: &BaseConsumer<Events>,
    topics: &[Arc<str>],
) -> Result<Vec<Partition>, KafkaError> {
    let metadata = consumer.fetch_metadata(None, 5 * CALL)?;
    let mut partitions = Vec::new();
    for found in metadata.topics() {
        if let Some(topic) = topics.iter().find(|topic| ***topic == *found.name()) {
            partitions.extend(
                found
                    .partitions()
                    .iter()
                    .map(|partition| (topic.clone(), partition.id())),
            );
        }
    }
    Ok(partitions)
}
