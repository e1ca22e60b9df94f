//! The lane's side of a worker: sends records to the driver as they arrive, and writes their results in any order.
//!
//! The lane's thread and the driver, which is an async task, share a [`LaneChannel`]. It needs no limit of its own,
//! because [`Engine::capacity`] limits the records in flight. The lanes of a source and its due topic share this limit
//! and the driver, see [`BudgetShare`].

mod waiting;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::route::{self, Arrival, Disposition, Routing};
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Failure, Output, Pipeline, Record, Timestamp, mutant};
use redeliver_kafka::{AssignmentId, Presence, Processor, Refused, TransactionBatch, Waker};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::budget::{BudgetShare, InFlight};
use crate::dead_letter::{DeadLetter, OnDead};
use crate::failure_log::FailureLog;
use crate::groups::{Group, Grouping, GroupsOf};
use crate::metrics::{UnavailableTopicGauges, WorkerMetrics};
use crate::rate_limit::OwnedPartitions;
use waiting::{UnavailableTopics, WaitingForTopic, unavailable_topic};

/// A time in which a record blocks its followers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) since: Instant,
    /// See [`View::changes`](crate::breaker::View). The time of an outage does not use up `key_blocking`.
    pub(crate) breaker_changes: u64,
}

/// A record on its way to the handler.
pub(crate) struct QueuedRecord {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    pub(crate) record: Record,
    pub(crate) arrival: Arrival,
    /// False after the partition was revoked.
    pub(crate) is_assigned: Arc<AtomicBool>,
    pub(crate) is_retry: bool,
    pub(crate) groups: GroupsOf,
    /// Since when its followers wait for it, because its attempts fail.
    pub(crate) blocks: Option<Blocks>,
    /// Bytes in flight on account of this record.
    pub(crate) size: usize,
}

impl QueuedRecord {
    pub(crate) fn is_assigned(&self) -> bool {
        self.is_assigned.load(Ordering::SeqCst)
    }

    /// Whether an attempt has failed before. A handler learns it with the next one.
    pub(crate) fn has_failed(&self) -> bool {
        self.arrival.failed_attempts > 0 || self.blocks.is_some()
    }

    pub(crate) fn into_unprocessed(self) -> FinishedRecord {
        FinishedRecord {
            assignment: self.assignment,
            offset: self.offset,
            routing: None,
            attempts: 0,
            original: None,
            ordered: self.groups.ordered,
            size: self.size,
        }
    }
}

/// A record that the driver has returned.
pub(crate) struct FinishedRecord {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    /// `None` if there was no attempt. Its offset is not committed, so it is read again after a restart.
    pub(crate) routing: Option<Routing>,
    /// The number of its attempts that count, including the last one; 0 if it was rejected without an attempt.
    pub(crate) attempts: u32,
    /// Kept until the results are written, for a dead letter in their place.
    pub(crate) original: Option<(Record, Arrival)>,
    /// The group in which results keep the order of their records.
    pub(crate) ordered: Option<Group>,
    /// Bytes in flight on account of this record and, once collected, its results.
    pub(crate) size: usize,
}

impl FinishedRecord {
    fn results_size(&self) -> usize {
        self.routing
            .as_ref()
            .map_or(0, |routing| size_of_all(&routing.outputs))
    }
}

fn size_of_all(outputs: &[Output]) -> usize {
    outputs.iter().map(Output::size).sum()
}

/// Passes records between the lane and its driver.
#[derive(Default)]
pub(crate) struct LaneChannel {
    queued: Mutex<Vec<QueuedRecord>>,
    finished: Mutex<Vec<FinishedRecord>>,
    /// Wakes the driver when there are queued records, a partition was revoked, or the lane is stopping. All lanes of a driver share it.
    changed: Arc<Notify>,
    stopping: AtomicBool,
    /// An operator has paused the pipeline.
    paused: AtomicBool,
    /// Set when a partition is revoked.
    revoked: AtomicBool,
    waker: Waker,
}

impl LaneChannel {
    /// A channel between the lane that `waker` wakes and the driver that `changed` wakes.
    pub(crate) fn new(waker: Waker, changed: Arc<Notify>) -> Self {
        Self {
            waker,
            changed,
            ..Self::default()
        }
    }

    pub(crate) fn take_queued(&self) -> Vec<QueuedRecord> {
        std::mem::take(&mut *lock(&self.queued))
    }

    /// Whether no attempt may start any more.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Pauses the lane and its driver, or lets them run. A paused lane accepts no record, and its driver starts no attempt. Records in
    /// hand stay: their attempts in progress end, and the others wait.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.paused.store(is_paused, Ordering::SeqCst);
        self.changed.notify_one();
        self.waker.wake();
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Whether partitions were revoked since the last call.
    pub(crate) fn take_revoked(&self) -> bool {
        self.revoked.swap(false, Ordering::SeqCst)
    }

    /// Moves finished records to the lane and wakes it.
    pub(crate) fn send_finished(&self, finished: &mut Vec<FinishedRecord>) {
        if finished.is_empty() {
            return;
        }
        lock(&self.finished).append(finished);
        self.waker.wake();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a topic can be written, see [`TopicWatch::presence`](redeliver_kafka::TopicWatch::presence).
pub(crate) type PresenceOf = Box<dyn Fn(&str) -> Presence + Send>;

/// The topics that an engine writes, and what to do while one of them is unavailable.
pub(crate) struct OutputTopics {
    pub(crate) written: Vec<Arc<str>>,
    pub(crate) presence: PresenceOf,
    /// A result whose topic has been missing for this long becomes a dead letter.
    pub(crate) timeout: Duration,
    pub(crate) gauges: UnavailableTopicGauges,
}

/// A record in the transaction that is being written.
struct InTransaction {
    disposition: Disposition,
    attempts: u32,
    /// How many of the transaction's outputs belong to this record.
    outputs: usize,
    original: Option<(Record, Arrival)>,
    ordered: Option<Group>,
    /// Bytes in flight on account of the record and its results, in case it is taken back.
    size: usize,
}

/// The groups in which a record waits, with the topic for which it waits.
type HeldGroups = HashMap<(AssignmentId, Group), Arc<str>>;

/// What all lanes of a pipeline share.
#[derive(Clone)]
pub(crate) struct EngineContext {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) grouping: Arc<Grouping>,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) failures: Arc<FailureLog>,
    pub(crate) on_dead: Option<OnDead>,
    pub(crate) partitions: OwnedPartitions,
}

/// The worker's [`Processor`].
pub(crate) struct Engine {
    context: EngineContext,
    channel: Arc<LaneChannel>,
    in_flight_gauge: Gauge,
    topics: OutputTopics,
    in_flight: BudgetShare,
    assignments: HashMap<AssignmentId, Arc<AtomicBool>>,
    /// Records for the driver, sent once per round of the lane.
    accepted: Vec<QueuedRecord>,
    /// Records for the next transactions, oldest first.
    finished: Vec<FinishedRecord>,
    waiting: WaitingForTopic,
    log_throttle: LogThrottle,
    /// In the order of the transaction's outputs.
    in_transaction: Vec<InTransaction>,
    /// The dead letters of the transaction, if someone wants to learn of them.
    letters: Vec<Output>,
}

impl Engine {
    pub(crate) fn new(
        context: EngineContext,
        channel: Arc<LaneChannel>,
        in_flight_gauge: Gauge,
        topics: OutputTopics,
        in_flight: BudgetShare,
    ) -> Self {
        Self {
            context,
            channel,
            in_flight_gauge,
            topics,
            in_flight,
            assignments: HashMap::new(),
            accepted: Vec::new(),
            finished: Vec::new(),
            waiting: WaitingForTopic::default(),
            log_throttle: LogThrottle::default(),
            in_transaction: Vec::new(),
            letters: Vec::new(),
        }
    }

    /// Keeps the dead letters of the transaction for [`OnDead`].
    fn keep_letters(&mut self, outputs: &[Output]) {
        self.letters.clear();
        if self.context.on_dead.is_none() {
            return;
        }
        let mut outputs = outputs.iter();
        for record in &self.in_transaction {
            let own = outputs.by_ref().take(record.outputs);
            match record.disposition {
                Disposition::Dead(_) => self.letters.extend(own.cloned()),
                _ => own.for_each(drop),
            }
        }
    }

    fn update_in_flight_gauge(&self) {
        self.in_flight_gauge
            .set(i64::try_from(self.in_flight.own().records).unwrap_or(i64::MAX));
    }

    /// Takes finished records from the driver.
    fn collect(&mut self) {
        let from = self.finished.len();
        self.finished.append(&mut lock(&self.channel.finished));
        for record in &mut self.finished[from..] {
            let results = record.results_size();
            record.size += results;
            self.in_flight.add(InFlight {
                records: 0,
                bytes: results,
            });
        }
    }

    /// Keeps records with an unavailable topic out of the next transaction, because such a transaction would block until it
    /// times out. Releases those whose topic is available again, and replaces results whose topic has been missing for too
    /// long by dead letters.
    ///
    /// With an order, the followers of a record that waits do so too: it may have results for topics that exist, which
    /// theirs must not overtake.
    fn hold_back(&mut self, now: Timestamp) {
        let topics = &self.topics;
        let written = topics.written.iter();
        let states = written.map(|topic| (topic.clone(), (topics.presence)(topic)));
        let unavailable: Vec<(Arc<str>, Presence)> =
            states.filter(|(_, presence)| presence.is_unavailable()).collect();
        if unavailable.is_empty() && self.waiting.is_empty() {
            return;
        }
        // All of them are looked at again, before those that have been collected since, so that they keep their order.
        let waiting = self.waiting.take_all();
        if !mutant!("engine-forgets-waiting-results") {
            self.finished.splice(0..0, waiting);
        }
        let mut held = HashMap::new();
        for record in std::mem::take(&mut self.finished) {
            self.place(record, &unavailable, &mut held, now);
        }
        self.topics.gauges.set(&self.waiting.counts());
        self.log_waiting(&unavailable);
    }

    /// Whether results for this topic become dead letters. Records for a topic that exists, a tier or the dead-letter topic
    /// wait without limit.
    fn has_timed_out(&self, topic: &str, presence: Presence) -> bool {
        presence.is_missing()
            && presence.lasting() >= self.topics.timeout
            && self.context.pipeline.has_output(topic)
    }

    /// Adds a record to the next transaction, or to the records that wait for a topic.
    fn place(
        &mut self,
        mut record: FinishedRecord,
        unavailable: &UnavailableTopics,
        held: &mut HeldGroups,
        now: Timestamp,
    ) {
        // A record of a revoked partition is not written, so its topics do not matter.
        if !self.assignments.contains_key(&record.assignment) {
            self.finished.push(record);
            return;
        }
        // A loop, because the dead-letter topic may be unavailable, too.
        while let Some((topic, presence)) = unavailable_topic(&record, unavailable) {
            if !self.has_timed_out(topic, *presence)
                || !self.replace_by_dead_letter(&mut record, topic, presence.lasting(), now)
            {
                if let Some(group) = record.ordered.clone() {
                    held.entry((record.assignment, group))
                        .or_insert_with(|| topic.clone());
                }
                self.waiting.push(topic.clone(), record);
                return;
            }
        }
        let leader = record.ordered.clone().map(|group| (record.assignment, group));
        match leader.and_then(|leader| held.get(&leader)) {
            Some(topic) if !mutant!("engine-lets-followers-overtake") => {
                self.waiting.push(topic.clone(), record);
            }
            _ => self.finished.push(record),
        }
    }

    /// Returns false if the original record is not known.
    fn replace_by_dead_letter(
        &mut self,
        finished: &mut FinishedRecord,
        topic: &str,
        missing_for: Duration,
        now: Timestamp,
    ) -> bool {
        let Some((record, arrival)) = &finished.original else {
            return false;
        };
        let message = format!(
            "topic `{topic}` has been missing for {} seconds",
            missing_for.as_secs()
        );
        let failure = Failure::permanent(route::MISSING_OUTPUT, message);
        let before = finished.results_size();
        finished.routing = Some(route::undeliverable(
            &self.context.pipeline,
            record,
            arrival,
            &failure,
            now,
        ));
        if let Some(routing) = &finished.routing {
            self.context
                .failures
                .failed(&arrival.origin, &failure, routing.disposition);
        }
        let after = finished.results_size();
        finished.size = finished.size - before + after;
        let results = |bytes| InFlight { records: 0, bytes };
        self.in_flight.remove(results(before));
        self.in_flight.add(results(after));
        true
    }

    fn log_waiting(&mut self, unavailable: &UnavailableTopics) {
        if self.waiting.is_empty() || !self.log_throttle.should_log() {
            return;
        }
        for (topic, records) in self.waiting.counts() {
            let found = unavailable.iter().find(|(name, _)| name == topic);
            let Some((_, presence)) = found else { continue };
            tracing::warn!(
                pipeline = &*self.context.pipeline.name,
                topic = &**topic,
                records,
                reason = %presence,
                lasting = ?presence.lasting(),
                in_flight = self.in_flight.own().records,
                in_flight_limit = self.in_flight.limit().records,
                "topic is unavailable; records wait for it"
            );
        }
    }

    /// How many of the finished records fit into a transaction. At least one, however large it is, unless `limit` is 0.
    fn batch_len(&self, limit: usize) -> usize {
        let mut bytes = 0;
        let sizes = self.finished.iter().map(|record| record.size);
        let fitting = sizes.take(limit).take_while(|size| {
            bytes += size;
            bytes <= TransactionBatch::BYTES
        });
        fitting.count().max(limit.min(1)).min(self.finished.len())
    }

    /// Replaces the outputs of a record, one of which was refused. `None` if nothing smaller can be written.
    fn replacement(
        &self,
        record: &mut InTransaction,
        mut outputs: Vec<Output>,
        failure: &Failure,
        now: Timestamp,
    ) -> Option<Vec<Output>> {
        // A refused dead letter keeps its reason and loses its payload.
        if matches!(record.disposition, Disposition::Dead(_)) {
            return outputs.iter_mut().all(route::strip_payload).then_some(outputs);
        }
        let (original, arrival) = record.original.as_ref()?;
        let routing = route::undeliverable(&self.context.pipeline, original, arrival, failure, now);
        record.disposition = routing.disposition;
        record.outputs = routing.outputs.len();
        let failures = &self.context.failures;
        failures.failed(&arrival.origin, failure, routing.disposition);
        Some(mutant!(
            "engine-drops-refused-results",
            routing.outputs,
            Vec::new()
        ))
    }
}

/// The topic may have been created again with fewer partitions, which is a reason why the transaction failed.
fn any_partition(output: Output) -> Output {
    Output {
        partition: None,
        ..output
    }
}

impl Processor for Engine {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {
        self.assignments
            .insert(assignment, Arc::new(AtomicBool::new(true)));
        self.context.partitions.assigned();
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        // Also the records of this round of the lane, so that the driver has all of them when it looks for revoked ones.
        self.accepted_all();
        // The driver returns queued records of the partition. Handlers that already run are not cancelled: their calls
        // may have had effects, and `finish` drops their results because the assignment is gone.
        if let Some(is_assigned) = self.assignments.remove(&assignment) {
            is_assigned.store(false, Ordering::SeqCst);
            self.context.partitions.revoked();
            self.channel.revoked.store(true, Ordering::SeqCst);
            self.channel.changed.notify_one();
        }
        // All of these records use memory until `finish` has dropped them, so they stay counted as in flight until
        // then.
        self.finished.extend(self.waiting.take(assignment));
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        if self.channel.is_paused() {
            return 0;
        }
        self.in_flight.capacity()
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, now: Timestamp) {
        let Some(is_assigned) = self.assignments.get(&assignment) else {
            return;
        };
        let size = record.size();
        self.in_flight.add(InFlight {
            records: 1,
            bytes: size,
        });
        let offset = record.position.offset;
        // Also checks a retry's time lock: a record that reached the due topic early, past the retry tier, is rejected.
        match Arrival::read_at(&self.context.pipeline, &record, now) {
            Ok(arrival) => self.accepted.push(QueuedRecord {
                assignment,
                offset,
                groups: self.context.grouping.of(&record),
                blocks: None,
                is_retry: arrival.failed_attempts > 0
                    || record.position.topic != self.context.pipeline.source,
                record,
                arrival,
                is_assigned: is_assigned.clone(),
                size,
            }),
            Err(failure) => {
                let letter = route::reject(&self.context.pipeline, &record, &failure, now);
                let routing = Routing::dead(letter, failure.class);
                let origin = Arrival::salvaged(&record).origin;
                self.context
                    .failures
                    .failed(&origin, &failure, routing.disposition);
                self.finished.push(FinishedRecord {
                    assignment,
                    offset,
                    routing: Some(routing),
                    attempts: 0,
                    original: None,
                    ordered: self.context.grouping.of(&record).ordered,
                    size,
                });
            }
        }
    }

    fn accepted_all(&mut self) {
        lock(&self.channel.queued).append(&mut self.accepted);
        self.channel.changed.notify_one();
        self.update_in_flight_gauge();
    }

    fn finish(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        self.collect();
        self.hold_back(now);
        self.in_transaction.clear();
        let count = self.batch_len(limit);
        for record in self.finished.drain(..count) {
            self.in_flight.remove(InFlight {
                records: 1,
                bytes: record.size,
            });
            let Some(routing) = record.routing else {
                if mutant!("engine-completes-unprocessed-records") {
                    batch.completed.push((record.assignment, record.offset));
                }
                continue;
            };
            let is_assigned = self.assignments.contains_key(&record.assignment);
            // The new owner of a revoked partition reads the record again, so a result here would be a duplicate.
            if is_assigned || mutant!("engine-accepts-stale-assignments") {
                self.in_transaction.push(InTransaction {
                    disposition: routing.disposition,
                    attempts: record.attempts,
                    outputs: routing.outputs.len(),
                    original: record.original,
                    ordered: record.ordered,
                    size: record.size,
                });
                let outputs = mutant!("engine-completes-before-its-outputs", routing.outputs, Vec::new());
                batch.outputs.extend(outputs);
                batch.completed.push((record.assignment, record.offset));
            }
        }
        if count > 0 {
            self.update_in_flight_gauge();
        }
        self.keep_letters(&batch.outputs);
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        let mut outputs = std::mem::take(&mut batch.outputs).into_iter();
        let mut in_transaction = std::mem::take(&mut self.in_transaction);
        let mut refused = refused.iter().peekable();
        let mut end = 0;
        for record in &mut in_transaction {
            end += record.outputs;
            let mut own: Vec<Output> = outputs.by_ref().take(record.outputs).collect();
            // If several outputs of a record are refused, the first gives the reason. The record's other results are
            // dropped as well: it has either all of its results or a dead letter.
            let first = refused.next_if(|refused| refused.index < end);
            while refused.next_if(|refused| refused.index < end).is_some() {}
            if let Some(Refused { failure, .. }) = first {
                let before = size_of_all(&own);
                match self.replacement(record, own, failure, now) {
                    Some(replacement) => own = replacement,
                    None => return false,
                }
                record.size = record.size - before + size_of_all(&own);
            }
            batch.outputs.extend(own);
        }
        self.in_transaction = in_transaction;
        self.keep_letters(&batch.outputs);
        true
    }

    fn take_back(&mut self, batch: &mut TransactionBatch) -> bool {
        let mut outputs = std::mem::take(&mut batch.outputs).into_iter();
        let completed = std::mem::take(&mut batch.completed);
        let records = self.in_transaction.drain(..).zip(completed);
        let records = records.map(|(record, (assignment, offset))| FinishedRecord {
            assignment,
            offset,
            routing: Some(Routing {
                outputs: outputs.by_ref().take(record.outputs).map(any_partition).collect(),
                disposition: record.disposition,
            }),
            attempts: record.attempts,
            original: record.original,
            ordered: record.ordered,
            size: record.size,
        });
        let records: Vec<FinishedRecord> = records.collect();
        self.in_flight.add(InFlight {
            records: records.len(),
            bytes: records.iter().map(|record| record.size).sum(),
        });
        self.finished.splice(0..0, records);
        self.update_in_flight_gauge();
        true
    }

    fn committed(&mut self, _now: Timestamp) {
        // Counted here, not in `finish`: an aborted transaction is processed again.
        for record in self.in_transaction.drain(..) {
            self.context.metrics.written(record.disposition, record.attempts);
        }
        let Some(on_dead) = &self.context.on_dead else {
            return;
        };
        for letter in self.letters.drain(..) {
            if let Some(letter) = DeadLetter::new(&self.context.pipeline, letter) {
                on_dead.call(letter);
            }
        }
    }

    fn aborted(&mut self) {
        self.in_transaction.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        // A stopping lane does not wait for unavailable topics. The records that wait for one are processed again after the
        // restart.
        self.in_flight.own().records > self.waiting.len()
    }

    fn stopping(&mut self) {
        // Attempts in progress finish. The driver returns queued records, which could exceed the grace period.
        self.channel.stopping.store(true, Ordering::SeqCst);
        self.channel.changed.notify_one();
    }

    fn starting(&mut self) {
        self.channel.stopping.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
pub(crate) mod tests;
