//! The processor of the lane whose owner executes the jobs.
//!
//! The lane reads the topic of jobs, and writes steps: transactions with everything that a step does and the position of the group, which only the
//! owner of the partition can commit. One step is decided at a time, after the one before it was committed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use redeliver_core::wait::LogThrottle;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::{AssignmentId, Processor, Refused, TransactionBatch};
use redeliver_service::audit::AuditLog;

use super::jobs::{Entry, Jobs};
use super::pace::{self, Memory, Next};
use super::source::{Answer, Request};
use super::step::{Step, Written};
use crate::metrics::Metrics;

/// The number of records of the topic that are accepted before they are completed.
const CAPACITY: usize = 1_000;
/// The time before the next attempt after a failure.
const RETRY: Duration = Duration::from_secs(2);

/// The processor.
pub(crate) struct Executor {
    topic: Arc<str>,
    audit: AuditLog,
    metrics: Metrics,
    requests: SyncSender<(u64, Request)>,
    answers: Receiver<(u64, Answer)>,
    /// The assignment of the partition, once its position is known: no transaction of a former owner can be committed any more.
    owner: Option<AssignmentId>,
    /// The number of the last request, and whether it has no answer yet.
    number: u64,
    is_asked: bool,
    jobs: Option<Jobs>,
    /// The end of what `jobs` were loaded from.
    loaded_to: i64,
    /// Records that the lane has read before the jobs were loaded.
    early: Vec<Record>,
    completed: Vec<(AssignmentId, i64)>,
    ready: Option<Step>,
    writing: Option<Writing>,
    memory: HashMap<String, Memory>,
    /// The job of the last step: the others have their turn first.
    last: String,
    /// When to look again.
    look_at: Option<Timestamp>,
    /// When to ask again after a failure.
    retry_at: Option<Timestamp>,
    log: LogThrottle,
    is_stopping: bool,
}

/// A step that is being written.
struct Writing {
    step: Step,
    written: Written,
    /// The index of its first output in the batch.
    first: usize,
}

impl Executor {
    pub(crate) fn new(
        topic: Arc<str>,
        audit: AuditLog,
        metrics: Metrics,
        requests: SyncSender<(u64, Request)>,
        answers: Receiver<(u64, Answer)>,
    ) -> Self {
        Self {
            topic,
            audit,
            metrics,
            requests,
            answers,
            owner: None,
            number: 0,
            is_asked: false,
            jobs: None,
            loaded_to: 0,
            early: Vec::new(),
            completed: Vec::new(),
            ready: None,
            writing: None,
            memory: HashMap::new(),
            last: String::new(),
            look_at: None,
            retry_at: None,
            log: LogThrottle::default(),
            is_stopping: false,
        }
    }

    fn forget(&mut self) {
        // The answer to a request in progress is about a former assignment.
        self.number += 1;
        self.is_asked = false;
        self.owner = None;
        self.jobs = None;
        self.early.clear();
        self.completed.clear();
        self.ready = None;
        self.writing = None;
        self.memory.clear();
        self.look_at = None;
        self.retry_at = None;
    }

    fn ask(&mut self, request: Request) {
        self.number += 1;
        // Full: answers to former requests are on their way.
        self.is_asked = self.requests.try_send((self.number, request)).is_ok();
        if !self.is_asked {
            self.number -= 1;
        }
    }

    fn take_answers(&mut self, now: Timestamp) {
        while let Ok((number, answer)) = self.answers.try_recv() {
            if number != self.number || !self.is_asked {
                continue;
            }
            self.is_asked = false;
            match answer {
                Answer::Loaded(mut jobs, end) => {
                    for record in self.early.drain(..) {
                        if record.position.offset >= end {
                            jobs.apply_of_callers(&record);
                        }
                    }
                    tracing::info!("this inspector executes redrives now");
                    self.jobs = Some(jobs);
                    self.loaded_to = end;
                    self.log = LogThrottle::default();
                }
                Answer::Step(step) => self.ready = (!self.is_stopping).then_some(*step),
                Answer::Failed(reason) => {
                    self.retry_at = Some(now.after(RETRY));
                    if self.log.should_log() {
                        tracing::warn!(reason, "cannot execute redrives; retrying");
                    }
                }
            }
        }
    }

    /// Asks for what comes next.
    fn look(&mut self, now: Timestamp) {
        self.look_at = None;
        if self.is_asked || self.ready.is_some() || self.owner.is_none() || self.is_stopping {
            return;
        }
        if let Some(retry) = self.retry_at.filter(|retry| *retry > now) {
            self.look_at = Some(retry);
            return;
        }
        self.retry_at = None;
        let Some(jobs) = &self.jobs else {
            return self.ask(Request::Load);
        };
        let (request, look_at) = next_request(jobs, &self.memory, &self.last, now);
        self.look_at = look_at;
        if let Some((id, request)) = request {
            self.last = id;
            self.ask(request);
        }
    }
}

/// The next request, for the job after the last one; or when to look again.
fn next_request(
    jobs: &Jobs,
    memory: &HashMap<String, Memory>,
    last: &str,
    now: Timestamp,
) -> (Option<(String, Request)>, Option<Timestamp>) {
    let mut look_at: Option<Timestamp> = None;
    let (before, after): (Vec<_>, Vec<_>) = jobs.iter().partition(|(id, ..)| *id <= last);
    for (id, entry, job) in after.into_iter().chain(before) {
        if !entry.is_progress_known() {
            continue;
        }
        let memory = memory.get(id).copied().unwrap_or_default();
        let request = match pace::next(&job, &entry.progress(), memory, now) {
            Next::Take(to) => Request::Try {
                job: Box::new(job),
                entry: Arc::<Entry>::clone(entry),
                to,
            },
            Next::Observe => Request::Observe {
                job: Box::new(job),
                entry: Arc::<Entry>::clone(entry),
            },
            Next::Wait(until) => {
                look_at = Some(look_at.map_or(until, |known| known.min(until)));
                continue;
            }
            Next::Nothing => continue,
        };
        return (Some((id.to_owned(), request)), None);
    }
    (None, look_at)
}

impl Processor for Executor {
    fn assigned(&mut self, _assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {}

    fn starts_at(&mut self, assignment: AssignmentId, _offset: i64) {
        self.forget();
        self.owner = Some(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        if self.owner == Some(assignment) {
            self.forget();
        }
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        let held = if self.jobs.is_some() {
            self.completed.len()
        } else {
            self.early.len()
        };
        CAPACITY.saturating_sub(held)
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        if self.owner != Some(assignment) {
            return;
        }
        self.completed.push((assignment, record.position.offset));
        match &mut self.jobs {
            Some(jobs) if record.position.offset >= self.loaded_to => jobs.apply_of_callers(&record),
            // It was read already, maybe followed by newer ones. The group may have committed nothing yet.
            Some(_) => {}
            None => self.early.push(record),
        }
    }

    fn finish(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        self.take_answers(now);
        self.look(now);
        let count = self.completed.len().min(limit);
        batch.completed.extend(self.completed.drain(..count));
        let (Some(owner), Some(step)) = (self.owner, self.ready.take()) else {
            return;
        };
        let mut written = step.written(&self.topic, &self.audit);
        let first = batch.outputs.len();
        batch.outputs.append(&mut written.outputs);
        batch.owners.push(owner);
        self.writing = Some(Writing { step, written, first });
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        let Some(writing) = &mut self.writing else {
            return false;
        };
        let mut tried = Vec::with_capacity(refused.len());
        for refused in refused {
            let index = refused.index.checked_sub(writing.first);
            match index.and_then(|index| writing.written.tried.get(index)) {
                Some(index) => tried.push(*index),
                // Not a record at its destination.
                None => return false,
            }
            tracing::warn!(
                code = &*refused.failure.code,
                "a destination refuses a redriven record"
            );
        }
        writing.step.refuse(&tried);
        writing.written = writing.step.written(&self.topic, &self.audit);
        batch.outputs.truncate(writing.first);
        batch.outputs.append(&mut writing.written.outputs);
        true
    }

    fn committed(&mut self, now: Timestamp) {
        self.look_at = Some(now);
        let Some(Writing { step, written, .. }) = self.writing.take() else {
            return;
        };
        let id = &step.job.spec().id;
        if let Some(jobs) = &mut self.jobs {
            jobs.apply_own(id, &written.progress, written.outcomes);
        }
        let taken = u32::try_from(step.tried.len()).unwrap_or(u32::MAX);
        let memory = self.memory.entry(id.clone()).or_default();
        memory.not_before = pace::not_before(&step.job, taken, now);
        if taken == 0 {
            memory.observed = step.before.next;
        }
        if let Some(brake) = &step.brake {
            tracing::warn!(id, brake, "the brake has paused a redrive");
        }
        let (before, after) = (&step.before, &written.progress);
        for (outcome, count) in [
            ("done", after.done - before.done),
            ("failed", after.failed - before.failed),
            ("skipped", after.skipped - before.skipped),
        ] {
            self.metrics.add_redriven(step.job.kind, outcome, count);
        }
        if after.next >= step.job.spec().total {
            tracing::info!(
                id,
                done = after.done,
                failed = after.failed,
                skipped = after.skipped,
                "a redrive has ended"
            );
        }
    }

    fn aborted(&mut self) {
        self.ready = None;
        self.writing = None;
    }

    fn next_due(&self) -> Option<Timestamp> {
        if self.ready.is_some() {
            return Some(Timestamp::from_millis(0));
        }
        // The waker tells about answers.
        self.look_at.filter(|_| !self.is_asked)
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn stopping(&mut self) {
        self.is_stopping = true;
        self.ready = None;
    }

    fn starting(&mut self) {
        self.is_stopping = false;
    }
}
