//! The relay of a tier: releases waiting records to their return topic when they are due.
//!
//! Time passes between transactions, never inside one, and the lane keeps polling while records wait. The look-ahead
//! limits the records in memory per partition, so a million waiting records use disk space in Kafka, not memory here.
//!
//! Operators can pause a tier, limit its rate, and have it release what waits now before it is due, see [`TierControls`].
//!
//! After a step of the wall clock, nothing is released until the new time is confirmed. Dead letters of malformed records
//! are written meanwhile.
//!
//! What operators want done with single records is in `acts`.

mod acts;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::pipeline::ReturnTopics;
use redeliver_core::route;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Failure, HumanDuration, Output, Pipeline, Position, Record, Timestamp, mutant};
use redeliver_kafka::{AssignmentId, Presence, Processor, Refused, TopicId, TransactionBatch};
use redeliver_runtime::telemetry::{KeyValue, SpanKind, Wait, is_tracing, record_wait};
use redeliver_runtime::trace_context::span_context;
use redeliver_service::control::Control;
use redeliver_service::due;

use crate::controls::TierControls;
use crate::metrics::TierMetrics;
use crate::waiting::{EarlyRelease, Waiting, WaitingRecords};
use acts::{Acted, Acting, Acts};

pub(crate) use acts::ActionContext;

/// Limits of the waiting records in memory, per partition.
#[derive(Clone, Copy, Debug)]
pub struct LookAhead {
    /// Number of records.
    pub records: usize,
    /// Approximate number of bytes; may be exceeded by one record.
    pub bytes: usize,
}

/// A pipeline and the topics to which its records may return.
#[derive(Clone, Debug)]
pub(crate) struct ServedPipeline {
    pipeline: Arc<Pipeline>,
    returns: ReturnTopics,
}

impl ServedPipeline {
    pub(crate) fn new(pipeline: Arc<Pipeline>, has_due_topic: bool) -> Self {
        Self {
            returns: pipeline.returns(has_due_topic),
            pipeline,
        }
    }

    pub(crate) fn name(&self) -> Arc<str> {
        self.pipeline.name.clone()
    }

    /// The topic in which the pipeline's records wait for this tier.
    pub(crate) fn topic(&self, tier: HumanDuration) -> Arc<str> {
        self.pipeline.tier_topic(tier)
    }
}

/// A topic of the tier.
#[derive(Debug)]
struct TierTopic {
    name: Arc<str>,
    /// Its number among the topics of the relay, from 0.
    number: usize,
    served: ServedPipeline,
    metrics: TierMetrics,
    /// The topics of all tiers of the pipeline, to which misplaced records move.
    tier_topics: HashMap<HumanDuration, Arc<str>>,
}

/// Whether a topic can be written, see [`TopicWatch::presence`](redeliver_kafka::TopicWatch::presence).
pub(crate) type PresenceOf = Box<dyn Fn(&str) -> Presence + Send>;

/// The number of partitions of a topic; `None` if it is not known.
pub(crate) type PartitionsOf = Box<dyn Fn(&str) -> Option<u32> + Send>;

/// What a relay needs of its process.
pub(crate) struct RelayContext {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) control: Control,
    pub(crate) presence: PresenceOf,
    pub(crate) partitions: PartitionsOf,
    pub(crate) acting: ActionContext,
}

/// The relay's [`Processor`].
pub(crate) struct Relay {
    tier: HumanDuration,
    look_ahead: LookAhead,
    topics: HashMap<Arc<str>, Arc<TierTopic>>,
    partitions: HashMap<AssignmentId, Partition>,
    /// The order in which partitions release records.
    order: Vec<AssignmentId>,
    /// The index in `order` at which the next call starts, modulo its length.
    next: usize,
    clock: Arc<dyn Clock>,
    controls: TierControls,
    /// The clock was not certain at the last call of `finish`.
    is_held: bool,
    /// When the due records were last counted.
    last_count: Option<Timestamp>,
    presence: PresenceOf,
    partitions_of: PartitionsOf,
    log_throttle: LogThrottle,
    acting: Acting,
    /// In the order of the transaction's outputs; each record has exactly one.
    in_transaction: Vec<InTransaction>,
}

struct Partition {
    topic: Arc<TierTopic>,
    number: i32,
    /// The topic, once it is known.
    topic_id: Option<TopicId>,
    /// Which records do not wait until they are due.
    released: Option<EarlyRelease>,
    /// When its rate allows the next release.
    paced_until: Option<Timestamp>,
    waiting: WaitingRecords,
    /// Dead letters of malformed records, with the offsets of the records. They do not wait.
    rejected: VecDeque<(i64, Output)>,
    rejected_bytes: usize,
    /// The last search of a full look-ahead for misplaced records, if it found none.
    last_search: Option<Timestamp>,
    acts: Acts,
}

/// A record in the transaction that is being written.
struct InTransaction {
    topic: Arc<TierTopic>,
    assignment: AssignmentId,
    offset: i64,
    completion: Completion,
    /// What the record needs to wait again; `None` if it is replaced by a dead letter.
    waited: Option<Waited>,
    /// The record itself, if an operator wanted something else than its release.
    acted: Option<Acted>,
}

/// What is left of a waiting record besides the content of its output.
struct Waited {
    due: Timestamp,
    released: Option<Timestamp>,
    return_topic: Arc<str>,
    position: Position,
    timestamp: Option<Timestamp>,
}

impl Waited {
    fn of(waiting: &Waiting) -> Self {
        Self {
            due: waiting.due,
            released: waiting.released,
            return_topic: waiting.return_topic.clone(),
            position: waiting.record.position.clone(),
            timestamp: waiting.record.timestamp,
        }
    }

    /// The record, which waits again.
    fn again(self, output: Output) -> Waiting {
        Waiting {
            due: self.due,
            released: self.released,
            return_topic: self.return_topic,
            record: Record {
                position: self.position,
                timestamp: self.timestamp,
                key: output.key,
                value: output.value,
                headers: output.headers,
                unreadable_headers: 0,
            },
        }
    }
}

/// How a record in the transaction is completed.
#[derive(Clone, Copy)]
enum Completion {
    /// Released; with its due time.
    Released(Timestamp),
    /// Released before its due time, because an operator wants it.
    ReleasedEarly,
    /// Moved to the end of a tier.
    Moved,
    /// Replaced by a dead letter.
    Rejected,
    /// An operator wanted it.
    Acted,
}

/// A search reads the whole look-ahead, so it is not repeated in every round of the lane.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Counting due records reads all stragglers, so it is not repeated in every round either.
const COUNT_INTERVAL: Duration = Duration::from_millis(250);

/// Whether an interval has passed since `last`, which then becomes `now`. The clock may have been set back.
fn has_passed(last: &mut Option<Timestamp>, interval: Duration, now: Timestamp) -> bool {
    let has_passed = last.is_none_or(|last| now.since(last) >= interval || now < last);
    if has_passed {
        *last = Some(now);
    }
    has_passed
}

impl Relay {
    /// A relay of this tier's topics of these pipelines. A pipeline need not have the tier any more.
    pub(crate) fn new(
        tier: HumanDuration,
        pipelines: &[ServedPipeline],
        look_ahead: LookAhead,
        metrics: impl Fn(&str) -> TierMetrics,
        context: RelayContext,
    ) -> Self {
        let RelayContext {
            clock,
            control,
            presence,
            partitions,
            acting,
        } = context;
        let names = pipelines.iter().map(ServedPipeline::name).collect();
        let topics = pipelines.iter().enumerate().map(|(number, served)| {
            let pipeline = &served.pipeline;
            let tiers = pipeline.policy.tiers().iter();
            let name = served.topic(tier);
            let topic = TierTopic {
                name: name.clone(),
                number,
                served: served.clone(),
                metrics: metrics(&name),
                tier_topics: tiers.map(|tier| (*tier, pipeline.tier_topic(*tier))).collect(),
            };
            (name, Arc::new(topic))
        });
        Self {
            tier,
            look_ahead,
            topics: topics.collect(),
            partitions: HashMap::new(),
            order: Vec::new(),
            next: 0,
            clock,
            controls: TierControls::new(tier, control, names),
            is_held: false,
            last_count: None,
            presence,
            partitions_of: partitions,
            log_throttle: LogThrottle::default(),
            acting: Acting::new(acting),
            in_transaction: Vec::new(),
        }
    }

    /// The topics that the relay writes.
    pub(crate) fn written_topics(&self) -> Vec<Arc<str>> {
        let mut topics = Vec::new();
        for topic in self.topics.values() {
            topics.extend(topic.served.returns.topics().cloned());
            topics.push(topic.served.pipeline.dead_letter_topic());
            topics.extend(topic.tier_topics.values().cloned());
        }
        topics.extend(self.topics());
        let context = &self.acting.context;
        topics.extend([context.topic.clone(), context.audit.topic().clone()]);
        topics
    }

    /// The topics that the relay reads.
    pub(crate) fn topics(&self) -> Vec<Arc<str>> {
        self.topics.keys().cloned().collect()
    }

    /// Takes note of what operators want now.
    fn follow_controls(&mut self) {
        if !self.controls.refresh() {
            return;
        }
        for topic in self.topics.values() {
            let is_paused = self.controls.state(topic.number).is_paused;
            topic.metrics.paused.set(is_paused.into());
        }
        let now = self.clock.now();
        for partition in self.partitions.values_mut() {
            partition.paced_until = None;
            partition.release(&self.controls, now);
        }
    }

    /// Reports what waits. `released`: how many due records each topic has released since the last call, by the number of the
    /// topic.
    fn report_waiting(&mut self, now: Timestamp, released: &[usize]) {
        let has_to_count = has_passed(&mut self.last_count, COUNT_INTERVAL, now);
        let mut sums = vec![(None, 0); self.topics.len()];
        for partition in self.partitions.values() {
            let (waiting, held): &mut (Option<due::Waiting>, usize) = &mut sums[partition.topic.number];
            let of_partition = due::Waiting {
                earliest: partition.waiting.next().map(Waiting::ready_at),
                due: if has_to_count {
                    partition.waiting.count_ready(now)
                } else {
                    0
                },
            };
            *waiting = Some(waiting.unwrap_or_default().and(of_partition));
            *held += partition.waiting.len();
        }
        for topic in self.topics.values() {
            let (mut waiting, held) = sums[topic.number];
            let signal = &topic.metrics.due;
            if self.controls.state(topic.number).is_paused {
                // More processes would release nothing either.
                waiting = waiting.map(|_| due::Waiting::default());
            } else if let Some(waiting) = waiting.as_mut().filter(|_| !has_to_count) {
                let released = released.get(topic.number).copied().unwrap_or(0);
                waiting.due = signal
                    .get()
                    .map_or(0, |before| before.due.saturating_sub(released));
            }
            signal.set(waiting);
            topic.metrics.report_held(held);
        }
    }
}

impl Processor for Relay {
    fn assigned(&mut self, assignment: AssignmentId, topic: &Arc<str>, partition: i32) {
        // A lane is assigned only partitions of topics that it subscribes to.
        let Some(topic) = self.topics.get(topic).cloned() else {
            return;
        };
        self.partitions.insert(
            assignment,
            Partition {
                topic,
                number: partition,
                topic_id: None,
                released: None,
                paced_until: None,
                waiting: WaitingRecords::default(),
                rejected: VecDeque::new(),
                rejected_bytes: 0,
                last_search: None,
                acts: Acts::new(),
            },
        );
        self.order.push(assignment);
    }

    fn starts_at(&mut self, assignment: AssignmentId, offset: i64) {
        if let Some(partition) = self.partitions.get_mut(&assignment) {
            partition.acts.has_read_to(offset);
        }
    }

    fn completed_to(&mut self, assignment: AssignmentId, offset: i64) {
        if let Some(partition) = self.partitions.get_mut(&assignment) {
            partition.acts.may_be_completed_to(offset);
        }
    }

    fn reached_end(&mut self, assignment: AssignmentId, offset: i64) {
        if let Some(partition) = self.partitions.get_mut(&assignment) {
            partition.acts.has_read_to(offset);
        }
    }

    fn reads_topic(&mut self, assignment: AssignmentId, topic: Option<TopicId>) {
        let now = self.clock.now();
        if let Some(partition) = self.partitions.get_mut(&assignment) {
            partition.topic_id = topic;
            partition.release(&self.controls, now);
        }
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        // Nothing is lost: no offset of these records is committed, so the next owner of the partition reads them
        // again.
        if mutant!("relay-keeps-revoked-partitions") {
            return;
        }
        self.order.retain(|id| *id != assignment);
        let Some(Partition { topic, .. }) = self.partitions.remove(&assignment) else {
            return;
        };
        // No round follows if the session has ended.
        let others = self.partitions.values();
        let others = others.filter(|other| Arc::ptr_eq(&other.topic, &topic));
        let held: Vec<usize> = others.map(|other| other.waiting.len()).collect();
        topic.metrics.report_held(held.iter().sum());
        if held.is_empty() {
            topic.metrics.due.set(None);
        }
    }

    fn capacity(&self, assignment: AssignmentId) -> usize {
        let Some(partition) = self.partitions.get(&assignment) else {
            return 0;
        };
        if !partition.acts.are_known {
            return 0;
        }
        partition.capacity(self.look_ahead)
    }

    fn accept(&mut self, assignment: AssignmentId, mut record: Record, now: Timestamp) {
        let Some(partition) = self.partitions.get_mut(&assignment) else {
            return;
        };
        if partition.acts.skips(&record) {
            return;
        }
        let served = &partition.topic.served;
        // Read once, here: `finish` compares due times only.
        match read_time_lock(served, &mut record, now) {
            Ok((due, return_topic)) => {
                let mut waiting = Waiting {
                    due,
                    return_topic,
                    record,
                    released: None,
                };
                if let Some(release) = partition.released {
                    waiting.release(release);
                }
                partition.waiting.push(waiting);
            }
            Err(failure) => {
                let offset = record.position.offset;
                let letter = route::reject(&served.pipeline, &record, &failure, now);
                partition.rejected_bytes += letter.size();
                partition.rejected.push_back((offset, letter));
            }
        }
    }

    fn finish(&mut self, of_round: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        self.follow_controls();
        self.follow_actions();
        // Before records are taken out: they are not released until the transaction is committed.
        self.report_waiting(of_round, &[]);
        // Read again: the time of the round may be from before a step that another lane has seen since.
        let confirmed = self.clock.confirmed();
        let confirmed = mutant!(
            "relay-ignores-holds",
            confirmed,
            confirmed.or(Some(self.clock.possible().1))
        );
        self.is_held = confirmed.is_none();
        self.in_transaction.clear();
        self.acting.marks.clear();
        let mut bytes = confirmed.map_or(0, |now| self.act(now, limit, batch));
        let presence = &self.presence;
        let mut unavailable = None;
        let count = self.order.len();
        for step in 0..count {
            // Each call starts with another partition, so that none starves while transactions are full.
            let assignment = self.order[(self.next + step) % count];
            let Some(partition) = self.partitions.get_mut(&assignment) else {
                continue;
            };
            // All dead letters of a partition go to one topic, so one check is enough.
            let letter = partition.rejected.front();
            let may_reject = letter.is_some_and(|(_, letter)| !presence(&letter.topic).is_unavailable());
            while may_reject
                && batch.completed.len() < limit
                && bytes < TransactionBatch::BYTES
                && let Some((offset, letter)) = partition.rejected.pop_front()
            {
                let size = letter.size();
                bytes += size;
                partition.rejected_bytes -= size;
                batch.outputs.push(letter);
                batch.completed.push((assignment, offset));
                self.in_transaction.push(InTransaction {
                    topic: partition.topic.clone(),
                    assignment,
                    offset,
                    completion: Completion::Rejected,
                    waited: None,
                    acted: None,
                });
            }
            let topic_number = partition.topic.number;
            let is_paused = self.controls.state(topic_number).is_paused;
            if is_paused {
                continue;
            }
            let Some(now) = confirmed else { continue };
            let now = mutant!("relay-releases-early", now, now.after(Duration::from_millis(1)));
            let mut checked: Option<Arc<str>> = None;
            while batch.completed.len() < limit && bytes < TransactionBatch::BYTES {
                let Some(next) = partition.waiting.next().filter(|next| next.is_ready(now)) else {
                    break;
                };
                // A record for an unavailable topic stays, however late it becomes: writing it would block the transaction.
                // One check serves all records in a row with the same return topic.
                if checked
                    .as_ref()
                    .is_none_or(|checked| !Arc::ptr_eq(checked, &next.return_topic))
                {
                    let found = presence(&next.return_topic);
                    if found.is_unavailable() {
                        unavailable.get_or_insert_with(|| (next.return_topic.clone(), found));
                        break;
                    }
                    checked = Some(next.return_topic.clone());
                }
                let partitions = || (self.partitions_of)(&next.record.position.topic);
                let taken = self
                    .controls
                    .take(topic_number, partition.number, partitions, now);
                partition.paced_until = taken.err();
                if partition.paced_until.is_some() {
                    break;
                }
                let Some(mut waiting) = partition.waiting.pop_ready(now) else {
                    break;
                };
                let waited = Waited::of(&waiting);
                let completion = match waiting.released {
                    Some(at) if waiting.due > now => {
                        // Its reader refuses a time in the future, such as one of a server whose clock is fast.
                        headers::set_process_after(&mut waiting.record.headers, at.min(now));
                        Completion::ReleasedEarly
                    }
                    _ => Completion::Released(waiting.due),
                };
                self.in_transaction.push(InTransaction {
                    topic: partition.topic.clone(),
                    assignment,
                    offset: waiting.record.position.offset,
                    completion,
                    waited: Some(waited),
                    acted: None,
                });
                bytes += waiting.record.size();
                trace_wait(self.tier, &waiting, now);
                let offset = waiting.record.position.offset;
                let offset = mutant!("relay-completes-the-next-record", offset, offset + 1);
                batch.completed.push((assignment, offset));
                if mutant!("relay-forgets-completions") {
                    batch.completed.pop();
                }
                batch.outputs.push(forward(waiting.record, waiting.return_topic));
            }
            // Only a full look-ahead hides records that may be due sooner.
            let has_room = batch.completed.len() < limit && bytes < TransactionBatch::BYTES;
            if has_room && partition.capacity(self.look_ahead) == 0 && partition.may_search(now) {
                let misplaced = partition.take_misplaced(
                    self.tier,
                    now,
                    limit - batch.completed.len(),
                    TransactionBatch::BYTES - bytes,
                    presence,
                );
                // The records behind those that move may have to move as well.
                if !misplaced.is_empty() {
                    partition.last_search = None;
                }
                for (waiting, topic) in misplaced {
                    self.in_transaction.push(InTransaction {
                        topic: partition.topic.clone(),
                        assignment,
                        offset: waiting.record.position.offset,
                        completion: Completion::Moved,
                        waited: Some(Waited::of(&waiting)),
                        acted: None,
                    });
                    bytes += waiting.record.size();
                    batch.completed.push((assignment, waiting.record.position.offset));
                    batch.outputs.push(forward(waiting.record, topic));
                    if mutant!("relay-loses-moved-records") {
                        batch.outputs.pop();
                    }
                }
            }
        }
        self.complete_skipped(batch);
        self.next = self.next.wrapping_add(1);
        if let Some((topic, found)) = unavailable
            && self.log_throttle.should_log()
        {
            tracing::warn!(
                tier = %self.tier,
                topic = &*topic,
                reason = %found,
                "return topic is unavailable; due records wait for it"
            );
        }
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        let is_replaced = refused.iter().all(|Refused { index, failure }| {
            // Otherwise, an outcome of an action is refused.
            let Some(output) = batch.outputs.get_mut(*index) else {
                return false;
            };
            if matches!(self.in_transaction[*index].completion, Completion::Rejected) {
                return route::strip_payload(output);
            }
            if self.refuse_acted(*index, output, failure) {
                return true;
            }
            let written = &mut self.in_transaction[*index];
            let Some(partition) = self.partitions.get(&written.assignment) else {
                return false;
            };
            let pipeline = &partition.topic.served.pipeline;
            let read_at = Origin {
                topic: pipeline.tier_topic(self.tier),
                partition: partition.number,
                offset: written.offset,
                timestamp: None,
            };
            route::replace_refused(pipeline, output, read_at, failure, now);
            (written.completion, written.waited) = (Completion::Rejected, None);
            true
        });
        self.set_follow_up(batch, now);
        is_replaced
    }

    fn take_back(&mut self, batch: &mut TransactionBatch) -> bool {
        // What an operator wants by now decides about the records, not what applied when they were taken.
        let outputs = std::mem::take(&mut batch.outputs);
        batch.completed.clear();
        let records: Vec<_> = self.in_transaction.drain(..).zip(outputs).collect();
        for (written, output) in records.into_iter().rev() {
            if let Some(acted) = written.acted {
                self.take_back_acted(written.assignment, written.offset, acted);
                continue;
            }
            // The next owner of a revoked partition reads its records again.
            let Some(partition) = self.partitions.get_mut(&written.assignment) else {
                continue;
            };
            if matches!(
                written.completion,
                Completion::Released(_) | Completion::ReleasedEarly
            ) {
                self.controls.give_back(written.topic.number, partition.number);
            }
            if let Some(waited) = written.waited {
                if !mutant!("relay-loses-what-it-takes-back") {
                    partition.waiting.push(waited.again(output));
                }
            } else {
                partition.rejected_bytes += output.size();
                partition.rejected.push_front((written.offset, output));
            }
        }
        self.take_back_marks();
        true
    }

    fn aborted(&mut self) {
        self.forget_marks();
    }

    fn committed(&mut self, now: Timestamp) {
        // Counted here, not in `finish`: records of an aborted transaction are released again.
        let mut released = vec![0; self.topics.len()];
        for InTransaction {
            topic, completion, ..
        } in self.in_transaction.drain(..)
        {
            let metrics = &topic.metrics;
            match completion {
                Completion::Released(due) => {
                    metrics.lateness.observe(now.since(due).as_secs_f64());
                    metrics.released.inc();
                    released[topic.number] += 1;
                }
                Completion::ReleasedEarly => {
                    metrics.released_early.inc();
                    released[topic.number] += 1;
                }
                Completion::Moved => {
                    metrics.moved.inc();
                }
                Completion::Rejected => {
                    metrics.rejected.inc();
                }
                Completion::Acted => {
                    metrics.acted.inc();
                }
            }
        }
        self.acted();
        self.report_waiting(now, &released);
    }

    fn next_due(&self) -> Option<Timestamp> {
        if self.is_held {
            // The lane looks again after its longest wait. A due time in the past would make it spin.
            return None;
        }
        self.partitions
            .values()
            // The lane is woken when operators want something else, and when a topic becomes available. Until then, a due time in the
            // past would make it spin.
            .filter(|partition| !self.controls.state(partition.topic.number).is_paused)
            .filter_map(|partition| Some((partition.waiting.next()?, partition.paced_until)))
            .filter(|(next, _)| !(self.presence)(&next.return_topic).is_unavailable())
            .map(|(next, paced_until)| next.look_at().max(paced_until.unwrap_or(next.look_at())))
            .min()
    }

    fn is_busy(&self) -> bool {
        // A stopping lane need not wait: records in memory are still in Kafka, and no offset of them is committed.
        false
    }
}

impl Partition {
    /// How many more records the partition may hold in memory.
    fn capacity(&self, look_ahead: LookAhead) -> usize {
        if self.waiting.bytes() + self.rejected_bytes >= look_ahead.bytes {
            return 0;
        }
        let held = self.waiting.len() + self.rejected.len();
        look_ahead.records.saturating_sub(held)
    }

    /// Makes the records ready that an operator has released, also those that are read later. `now`: if it is not known when that was.
    fn release(&mut self, controls: &TierControls, now: Timestamp) {
        let release = controls.state(self.topic.number).release.as_ref();
        let release = release.map(|release| EarlyRelease {
            before: release.before(self.topic_id, self.number),
            at: release.at.unwrap_or(now),
        });
        let before = |release: Option<EarlyRelease>| release.map_or(0, |release| release.before);
        if let Some(more) = release.filter(|_| before(release) > before(self.released)) {
            self.waiting.release(more);
        }
        self.released = release;
    }

    fn may_search(&mut self, now: Timestamp) -> bool {
        has_passed(&mut self.last_search, SEARCH_INTERVAL, now)
    }

    /// Takes records out of a full look-ahead that can move to the end of the tier that fits their remaining wait, each
    /// with the topic of that tier. They would still be released in time there, and records behind them are read before
    /// they are late.
    ///
    /// A record that needs a longer tier moves at once. Any other moves only after it has waited in this tier for the
    /// tier's delay. So one that is in the right place never moves, and a long wait in a short tier is not written over and
    /// over. Records behind it are normally due that delay or more after they were written, so they are still read in time.
    /// Jitter makes some of them due sooner; these may be late, but not by more than their nominal delay.
    fn take_misplaced(
        &mut self,
        tier: HumanDuration,
        now: Timestamp,
        limit: usize,
        bytes: usize,
        presence: &PresenceOf,
    ) -> Vec<(Waiting, Arc<str>)> {
        let topic = self.topic.clone();
        let fitting = |waiting: &Waiting| {
            let remaining = HumanDuration::from(waiting.due.since(now));
            (remaining, topic.served.pipeline.tier_for(remaining))
        };
        let is_misplaced = |waiting: &Waiting| {
            // A copy would be behind the records of the release.
            if waiting.released.is_some() {
                return false;
            }
            let (remaining, fitting) = fitting(waiting);
            let may_move = fitting > tier || waiting.has_waited(tier, now);
            // A tier whose delay exceeds the remaining wait could release the record late.
            fitting <= remaining && may_move && !presence(&topic.tier_topics[&fitting]).is_unavailable()
        };
        let taken = self.waiting.take(limit, bytes, is_misplaced);
        let with_topic = |waiting: Waiting| {
            let (_, tier) = fitting(&waiting);
            (waiting, topic.tier_topics[&tier].clone())
        };
        taken.into_iter().map(with_topic).collect()
    }
}

/// Reads the due time and the return topic of a waiting record.
///
/// The record was written under the configuration of that time, which may have changed. So the time lock may be as long
/// as any configuration allows, and the record returns to the topic in its headers if that is the pipeline's due topic
/// or source. Any other return topic, from a previous configuration or a forged header, is replaced.
///
/// # Errors
/// A failure with the class `malformed` when the headers are invalid.
fn read_time_lock(
    served: &ServedPipeline,
    record: &mut Record,
    now: Timestamp,
) -> Result<(Timestamp, Arc<str>), Failure> {
    let reserved = ReservedHeaders::read(record)?;
    let named = reserved.return_topic()?;
    let return_topic = served.returns.topic(named).clone();
    let due = reserved.process_after(now, MAX_WAIT)?;
    if *named != *return_topic {
        // Workers of a pipeline with `return_to: due` recognise a retry in the source by this header.
        headers::set_return_topic(&mut record.headers, &return_topic);
    }
    Ok((due, return_topic))
}

/// Records the span of a wait, from the failure to the release. Its parent is the failed attempt.
fn trace_wait(tier: HumanDuration, waiting: &Waiting, now: Timestamp) {
    if !is_tracing() {
        return;
    }
    let record = &waiting.record;
    let Some(parent) = span_context(&record.headers) else {
        return;
    };
    let failed_at = record.headers.last(headers::ERROR_TIMESTAMP);
    record_wait(Wait {
        name: format!("wait {tier}"),
        kind: SpanKind::Internal,
        parent: Some(parent),
        start: failed_at.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok()),
        end: now,
        attributes: vec![
            KeyValue::new("messaging.system", "kafka"),
            KeyValue::new("messaging.destination.name", record.position.topic.to_string()),
            KeyValue::new("redeliver.due", waiting.due.to_string()),
        ],
    });
}

fn forward(record: Record, topic: Arc<str>) -> Output {
    Output {
        topic,
        partition: None,
        key: record.key,
        value: record.value,
        headers: record.headers,
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The lane of a leftover tier ends when its topic is deleted. Then nothing of the tier is paused any more.
        for topic in self.topics.values() {
            topic.metrics.paused.set(0);
        }
    }
}

#[cfg(test)]
mod tests;
