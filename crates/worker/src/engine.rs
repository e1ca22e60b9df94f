//! The worker's part of a lane: records go to the driver as they come, results come back in any order.
//!
//! The lane's thread and the driver (an async task) meet in two short lists, `Inbox` and `Outbox`,
//! which are bounded by the number of records in flight.

mod held;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::route::{self, Arrival, Disposition, Routing};
use redeliver_core::{Failure, Output, Pipeline, Record, Timestamp};
use redeliver_kafka::{AssignmentId, Processor, Refused, TransactionBatch, Waker};
use tokio::sync::Notify;

use crate::metrics::{MissingTopics, WorkerMetrics};
use held::{Held, Missing, missing_of};

/// How often it is said that records wait for a topic.
const SAY: Duration = Duration::from_secs(30);

/// A record on its way to the handler.
pub(crate) struct Job {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    pub(crate) record: Record,
    pub(crate) arrival: Arrival,
    /// False once the partition has moved: then nobody waits for this record any more.
    pub(crate) wanted: Arc<AtomicBool>,
    pub(crate) is_retry: bool,
    /// Bytes that it is counted with.
    pub(crate) size: usize,
}

/// A record that the driver is done with.
pub(crate) struct Done {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    /// Nothing when it was given back without an attempt: it is read again after a restart.
    pub(crate) routing: Option<Routing>,
    /// As it was handled, until it is known that its results can be written.
    pub(crate) handled: Option<(Record, Arrival)>,
    /// Bytes that it is counted with.
    pub(crate) size: usize,
}

impl Done {
    fn results_size(&self) -> usize {
        let outputs = self.routing.iter().flat_map(|routing| &routing.outputs);
        outputs.map(Output::size).sum()
    }
}

/// What the lane and the driver share.
#[derive(Default)]
pub(crate) struct Exchange {
    inbox: Mutex<Vec<Job>>,
    outbox: Mutex<Vec<Done>>,
    pub(crate) arrived: Notify,
    stopping: AtomicBool,
    waker: Waker,
}

impl Exchange {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            waker,
            ..Self::default()
        }
    }

    /// Takes everything that has arrived.
    pub(crate) fn take_jobs(&self) -> Vec<Job> {
        std::mem::take(&mut *lock(&self.inbox))
    }

    /// Whether no attempt must begin any more.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Gives results to the lane and wakes it.
    pub(crate) fn give(&self, done: &mut Vec<Done>) {
        if done.is_empty() {
            return;
        }
        lock(&self.outbox).append(done);
        self.waker.wake();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one lane has in hand at most, from reading to commit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub(crate) records: usize,
    /// Of records and of their results; one record more than fits may be held, and what is being handled grows by its
    /// results.
    pub(crate) bytes: usize,
}

/// For how long a topic has been missing; nothing for one that exists, or of which nothing is known.
pub(crate) type MissingFor = Box<dyn Fn(&str) -> Option<Duration> + Send>;

/// What an engine knows of topics that do not exist.
pub(crate) struct Topics {
    /// Those that the engine writes.
    pub(crate) written: Vec<Arc<str>>,
    /// For how long a topic has been missing; nothing when it may exist.
    pub(crate) missing_for: MissingFor,
    /// After so long a result that waits for a topic becomes a dead letter.
    pub(crate) timeout: Duration,
    /// How many records wait for each.
    pub(crate) gauges: MissingTopics,
}

/// A record of the turn that is being committed.
struct InTurn {
    disposition: Disposition,
    /// How many of the turn's outputs are its own.
    outputs: usize,
    handled: Option<(Record, Arrival)>,
}

/// The worker's [`Processor`].
pub(crate) struct Engine {
    pipeline: Arc<Pipeline>,
    exchange: Arc<Exchange>,
    metrics: Arc<WorkerMetrics>,
    gauge: Gauge,
    topics: Topics,
    limit: InFlight,
    in_flight: InFlight,
    assignments: HashMap<AssignmentId, Arc<AtomicBool>>,
    /// Records for the driver, handed over once per round.
    accepted: Vec<Job>,
    /// Handled records that did not fit into a turn yet, newest last.
    finished: Vec<Done>,
    /// Handled records with an output to a topic that does not exist.
    held: Held,
    /// When it was last said that records are held back.
    said: Option<Instant>,
    in_turn: Vec<InTurn>,
}

impl Engine {
    pub(crate) fn new(
        pipeline: Arc<Pipeline>,
        exchange: Arc<Exchange>,
        metrics: Arc<WorkerMetrics>,
        gauge: Gauge,
        topics: Topics,
        limit: InFlight,
    ) -> Self {
        Self {
            pipeline,
            exchange,
            metrics,
            gauge,
            topics,
            limit,
            in_flight: InFlight { records: 0, bytes: 0 },
            assignments: HashMap::new(),
            accepted: Vec::new(),
            finished: Vec::new(),
            held: Held::default(),
            said: None,
            in_turn: Vec::new(),
        }
    }

    fn show(&self) {
        self.gauge
            .set(i64::try_from(self.in_flight.records).unwrap_or(i64::MAX));
    }

    /// Takes what the driver is done with.
    fn collect(&mut self) {
        let from = self.finished.len();
        self.finished.append(&mut lock(&self.exchange.outbox));
        for done in &mut self.finished[from..] {
            let results = done.results_size();
            done.size += results;
            self.in_flight.bytes += results;
        }
    }

    /// Keeps records out of the turn whose topic does not exist, lets those go whose topic exists again, and gives up
    /// results whose topic has been missing for too long.
    fn hold_back(&mut self, now: Timestamp) {
        let topics = &self.topics;
        let missing = topics
            .written
            .iter()
            .filter_map(|topic| Some((topic.clone(), (topics.missing_for)(topic)?)));
        let missing: Vec<(Arc<str>, Duration)> = missing.collect();
        if missing.is_empty() && self.held.is_empty() {
            return;
        }
        let awaited = missing
            .iter()
            .filter(|(topic, missing_for)| !self.is_given_up(topic, *missing_for));
        let awaited: Vec<Arc<str>> = awaited.map(|(topic, _)| topic.clone()).collect();
        let released = self
            .held
            .release(|topic| !awaited.iter().any(|awaited| **awaited == *topic));
        self.finished.extend(released);
        for done in std::mem::take(&mut self.finished) {
            self.place(done, &missing, now);
        }
        self.topics.gauges.show(self.held.counts());
        self.say(&missing);
    }

    /// Whether results for a topic become dead letters. What waits in a tier, or is dead, has no other place to go.
    fn is_given_up(&self, topic: &str, missing_for: Duration) -> bool {
        missing_for >= self.topics.timeout && self.pipeline.has_output(topic)
    }

    /// A finished record is written in the next turn, held back, or becomes a dead letter.
    fn place(&mut self, mut done: Done, missing: &Missing, now: Timestamp) {
        // What nobody waits for any more only has to be counted.
        let is_wanted = self.assignments.contains_key(&done.assignment);
        while let Some((topic, missing_for)) = missing_of(&done, missing).filter(|_| is_wanted) {
            if !self.is_given_up(topic, *missing_for) || !self.give_up(&mut done, topic, *missing_for, now) {
                self.held.hold(topic.clone(), done);
                return;
            }
        }
        self.finished.push(done);
    }

    /// Puts a dead letter in the place of a record's results.
    fn give_up(&mut self, done: &mut Done, topic: &str, missing_for: Duration, now: Timestamp) -> bool {
        let Some((record, arrival)) = &done.handled else {
            return false;
        };
        let message = format!(
            "topic `{topic}` has not existed for {} seconds",
            missing_for.as_secs()
        );
        let failure = Failure::permanent(route::MISSING_OUTPUT, message);
        let before = done.results_size();
        done.routing = Some(route::undeliverable(
            &self.pipeline,
            record,
            arrival,
            &failure,
            now,
        ));
        let after = done.results_size();
        done.size = done.size - before + after;
        self.in_flight.bytes = self.in_flight.bytes - before + after;
        true
    }

    fn say(&mut self, missing: &Missing) {
        let is_time = self.said.is_none_or(|said| said.elapsed() >= SAY);
        if self.held.is_empty() || !is_time {
            return;
        }
        self.said = Some(Instant::now());
        for (topic, records) in self.held.counts() {
            let missing_for = missing.iter().find(|(missing, _)| missing == topic);
            tracing::warn!(
                pipeline = &*self.pipeline.name,
                topic = &**topic,
                records,
                missing_for = ?missing_for.map(|(_, missing_for)| missing_for),
                in_flight = self.in_flight.records,
                in_flight_limit = self.limit.records,
                "records wait for a topic that does not exist"
            );
        }
    }

    /// How many of the finished records go into a turn.
    fn share(&self, limit: usize) -> usize {
        let mut bytes = 0;
        let sizes = self.finished.iter().map(|done| done.size);
        let fitting = sizes.take(limit).take_while(|size| {
            bytes += size;
            bytes <= TransactionBatch::BYTES
        });
        fitting.count().max(limit.min(1)).min(self.finished.len())
    }

    /// What is written of a record of which an output was refused.
    fn instead(
        &self,
        in_turn: &mut InTurn,
        mut outputs: Vec<Output>,
        failure: &Failure,
        now: Timestamp,
    ) -> Option<Vec<Output>> {
        if matches!(in_turn.disposition, Disposition::Dead(_)) {
            return outputs.iter_mut().all(route::strip_payload).then_some(outputs);
        }
        let (record, arrival) = in_turn.handled.as_ref()?;
        let routing = route::undeliverable(&self.pipeline, record, arrival, failure, now);
        in_turn.disposition = routing.disposition;
        in_turn.outputs = routing.outputs.len();
        Some(routing.outputs)
    }
}

impl Processor for Engine {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {
        self.assignments
            .insert(assignment, Arc::new(AtomicBool::new(true)));
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        // Records of it that are with the driver stay counted until they come back.
        if let Some(wanted) = self.assignments.remove(&assignment) {
            wanted.store(false, Ordering::SeqCst);
        }
        self.finished.extend(self.held.take(assignment));
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        if self.in_flight.bytes >= self.limit.bytes {
            return 0;
        }
        self.limit.records.saturating_sub(self.in_flight.records)
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, now: Timestamp) {
        let Some(wanted) = self.assignments.get(&assignment) else {
            return;
        };
        let size = record.size();
        self.in_flight.records += 1;
        self.in_flight.bytes += size;
        let offset = record.position.offset;
        match Arrival::read_at(&self.pipeline, &record, now) {
            Ok(arrival) => self.accepted.push(Job {
                assignment,
                offset,
                is_retry: arrival.failed_attempts > 0 || record.position.topic != self.pipeline.source,
                record,
                arrival,
                wanted: wanted.clone(),
                size,
            }),
            Err(failure) => {
                let routing = route::reject(&self.pipeline, &record, &failure, now);
                self.finished.push(Done {
                    assignment,
                    offset,
                    routing: Some(routing),
                    handled: None,
                    size,
                });
            }
        }
    }

    fn accepted_all(&mut self) {
        lock(&self.exchange.inbox).append(&mut self.accepted);
        self.exchange.arrived.notify_one();
        self.show();
    }

    fn finish(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        self.collect();
        self.hold_back(now);
        self.in_turn.clear();
        let count = self.share(limit);
        for done in self.finished.drain(..count) {
            self.in_flight.records -= 1;
            self.in_flight.bytes -= done.size;
            let Some(routing) = done.routing else { continue };
            if self.assignments.contains_key(&done.assignment) {
                self.in_turn.push(InTurn {
                    disposition: routing.disposition,
                    outputs: routing.outputs.len(),
                    handled: done.handled,
                });
                turn.outputs.extend(routing.outputs);
                turn.completed.push((done.assignment, done.offset));
            }
        }
        if count > 0 {
            self.show();
        }
    }

    fn refused(&mut self, refused: &[Refused], turn: &mut TransactionBatch, now: Timestamp) -> bool {
        let mut outputs = std::mem::take(&mut turn.outputs).into_iter();
        let mut in_turn = std::mem::take(&mut self.in_turn);
        let mut refused = refused.iter().peekable();
        let mut end = 0;
        for of_record in &mut in_turn {
            end += of_record.outputs;
            let mut own: Vec<Output> = outputs.by_ref().take(of_record.outputs).collect();
            let first = refused.next_if(|refused| refused.index < end);
            while refused.next_if(|refused| refused.index < end).is_some() {}
            if let Some(Refused { failure, .. }) = first {
                match self.instead(of_record, own, failure, now) {
                    Some(instead) => own = instead,
                    None => return false,
                }
            }
            turn.outputs.extend(own);
        }
        self.in_turn = in_turn;
        true
    }

    fn committed(&mut self, _now: Timestamp) {
        for of_record in self.in_turn.drain(..) {
            self.metrics.count(of_record.disposition);
        }
    }

    fn aborted(&mut self) {
        self.in_turn.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        // What is held back is handled again after a restart.
        self.in_flight.records > self.held.len()
    }

    fn stopping(&mut self) {
        // Attempts under way are finished; those that wait for their turn would make the end long.
        self.exchange.stopping.store(true, Ordering::SeqCst);
        self.exchange.arrived.notify_one();
    }
}

#[cfg(test)]
mod tests;
