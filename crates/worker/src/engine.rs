//! The worker's part of a lane: records go to the driver as they come, results come back in any order.
//!
//! The lane's thread and the driver (an async task) meet in two short lists, [`Inbox`] and [`Outbox`],
//! which are bounded by the number of records in flight.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::route::{self, Arrival, Disposition, Routing};
use redeliver_core::{Pipeline, Record, Timestamp};
use redeliver_kafka::{AssignmentId, Processor, Turn, Waker};
use tokio::sync::Notify;

use crate::metrics::WorkerMetrics;

/// A record on its way to the handler.
pub(crate) struct Job {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    pub(crate) record: Record,
    pub(crate) arrival: Arrival,
    /// False once the partition has moved: then nobody waits for this record any more.
    pub(crate) wanted: Arc<AtomicBool>,
    pub(crate) is_retry: bool,
}

/// A record that the driver is done with.
pub(crate) struct Done {
    pub(crate) assignment: AssignmentId,
    pub(crate) offset: i64,
    /// Nothing when it was given back without an attempt: it is read again after a restart.
    pub(crate) routing: Option<Routing>,
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

/// The worker's [`Processor`].
pub(crate) struct Engine {
    pipeline: Arc<Pipeline>,
    exchange: Arc<Exchange>,
    metrics: Arc<WorkerMetrics>,
    gauge: Gauge,
    limit: usize,
    in_flight: usize,
    assignments: HashMap<AssignmentId, Arc<AtomicBool>>,
    /// Records for the driver, handed over once per round.
    accepted: Vec<Job>,
    /// Handled records that did not fit into a turn yet, newest last.
    finished: Vec<Done>,
    /// What became of the records of the turn that is being committed.
    in_turn: Vec<Disposition>,
}

impl Engine {
    pub(crate) fn new(
        pipeline: Arc<Pipeline>,
        exchange: Arc<Exchange>,
        metrics: Arc<WorkerMetrics>,
        gauge: Gauge,
        limit: usize,
    ) -> Self {
        Self {
            pipeline,
            exchange,
            metrics,
            gauge,
            limit,
            in_flight: 0,
            assignments: HashMap::new(),
            accepted: Vec::new(),
            finished: Vec::new(),
            in_turn: Vec::new(),
        }
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
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        self.limit.saturating_sub(self.in_flight)
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, now: Timestamp) {
        let Some(wanted) = self.assignments.get(&assignment) else {
            return;
        };
        self.in_flight += 1;
        let offset = record.position.offset;
        match Arrival::read_at(&self.pipeline, &record, now) {
            Ok(arrival) => self.accepted.push(Job {
                assignment,
                offset,
                is_retry: arrival.failed_attempts > 0 || record.position.topic != self.pipeline.source,
                record,
                arrival,
                wanted: wanted.clone(),
            }),
            Err(failure) => {
                let routing = route::reject(&self.pipeline, record, &failure, now);
                self.finished.push(Done {
                    assignment,
                    offset,
                    routing: Some(routing),
                });
            }
        }
    }

    fn accepted_all(&mut self) {
        lock(&self.exchange.inbox).append(&mut self.accepted);
        self.exchange.arrived.notify_one();
        self.gauge.set(i64::try_from(self.in_flight).unwrap_or(i64::MAX));
    }

    fn finish(&mut self, _now: Timestamp, limit: usize, turn: &mut Turn) {
        self.finished.append(&mut lock(&self.exchange.outbox));
        self.in_turn.clear();
        let count = self.finished.len().min(limit);
        for done in self.finished.drain(..count) {
            self.in_flight -= 1;
            let Some(routing) = done.routing else { continue };
            if self.assignments.contains_key(&done.assignment) {
                turn.outputs.extend(routing.outputs);
                turn.completed.push((done.assignment, done.offset));
                self.in_turn.push(routing.disposition);
            }
        }
        if count > 0 {
            self.gauge.set(i64::try_from(self.in_flight).unwrap_or(i64::MAX));
        }
    }

    fn committed(&mut self, _now: Timestamp) {
        for disposition in self.in_turn.drain(..) {
            self.metrics.count(disposition);
        }
    }

    fn aborted(&mut self) {
        self.in_turn.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    fn stopping(&mut self) {
        // Attempts under way are finished; those that wait for their turn would make the end long.
        self.exchange.stopping.store(true, Ordering::SeqCst);
        self.exchange.arrived.notify_one();
    }
}
