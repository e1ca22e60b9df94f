//! The processor of the lane whose owner executes the jobs.
//!
//! The lane reads the topic of jobs, and writes steps: transactions with everything that a step does and the position of the group, which only the
//! owner of the partition can commit. One step is decided at a time, after the one before it was committed. The jobs take turns: a step that cannot be
//! decided or written is tried again later, while others go on.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Duration;

use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Record, Timestamp};
use redeliver_kafka::{AssignmentId, Processor, Refused, TransactionBatch};
use redeliver_service::audit::AuditLog;

use super::job::{Outcome, Skip};
use super::jobs::{Entry, Jobs};
use super::pace::{self, Memory, Next};
use super::source::{Answer, Request};
use super::step::{Step, Written};
use crate::metrics::Metrics;

/// The number of records of the topic that are accepted before they are completed.
const CAPACITY: usize = 1_000;
/// The time before the next attempt to read the jobs after a failure.
const RETRY: Duration = Duration::from_secs(2);

/// The processor.
pub(crate) struct Executor {
    topic: Arc<str>,
    audit: AuditLog,
    metrics: Metrics,
    clock: Arc<dyn Clock>,
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
    /// The job of the last request: the others have their turn first.
    last: String,
    /// The job whose last step could not be written.
    unwritten: Option<String>,
    /// When to look again.
    look_at: Option<Timestamp>,
    /// When to read the jobs again after a failure.
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
        clock: Arc<dyn Clock>,
        requests: SyncSender<(u64, Request)>,
        answers: Receiver<(u64, Answer)>,
    ) -> Self {
        Self {
            topic,
            audit,
            metrics,
            clock,
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
            unwritten: None,
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
        self.unwritten = None;
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
                    if self.log.should_log() {
                        tracing::warn!(reason, id = self.last, "cannot execute redrives; retrying");
                    }
                    if self.jobs.is_some() {
                        let id = self.last.clone();
                        self.failed(&id, Some(&reason), now);
                    } else {
                        self.retry_at = Some(now.after(RETRY));
                    }
                }
            }
        }
    }

    /// Nothing was done for a job. Tries again later, and lets others know why.
    fn failed(&mut self, id: &str, reason: Option<&str>, now: Timestamp) {
        self.memory.entry(id.to_owned()).or_default().failed(now);
        let entry = self.jobs.as_ref().and_then(|jobs| jobs.get(id));
        let (Some(entry), Some(reason)) = (entry, reason) else {
            return;
        };
        if let Some(job) = entry.job().filter(|_| entry.is_progress_known()) {
            let step = Step::of_problem(job, entry.progress(), reason, now);
            let is_known = step.problem == step.before.problem;
            self.ready = (!is_known && !self.is_stopping).then_some(step);
        }
    }

    /// Whether a step is still what callers want.
    fn is_wanted(&self, step: &Step) -> bool {
        let entry = self
            .jobs
            .as_ref()
            .and_then(|jobs| jobs.get(&step.job.spec().id));
        let job = entry.and_then(|entry| entry.job());
        job.is_some_and(|job| job.record.revision == step.job.record.revision)
    }

    /// Gives up items whose records are at these positions in the batch, and replaces its outputs. Returns false if one of them is no
    /// record at a destination.
    fn give_up(&mut self, refused: &[Refused], outcome: Outcome, batch: &mut TransactionBatch) -> bool {
        let Some(writing) = &mut self.writing else {
            return false;
        };
        let tried_of = |refused: &Refused| {
            let index = refused.index.checked_sub(writing.first)?;
            writing.written.tried.get(index).copied()
        };
        let Some(tried) = refused.iter().map(tried_of).collect::<Option<Vec<usize>>>() else {
            return false;
        };
        writing.step.give_up(&tried, outcome);
        writing.written = writing.step.written(&self.topic, &self.audit);
        batch.outputs.truncate(writing.first);
        batch.outputs.append(&mut writing.written.outputs);
        true
    }

    /// A step was not written.
    fn give_back(&mut self, writing: &Writing, reason: Option<&str>, now: Timestamp) {
        let Step { job, problem, .. } = &writing.step;
        let id = job.spec().id.clone();
        // Where a problem cannot be written, another one cannot either.
        let reason = reason.filter(|_| problem.is_empty());
        self.failed(&id, reason, now);
        self.unwritten = Some(id);
    }

    /// Asks for what comes next.
    fn look(&mut self, now: Timestamp) {
        self.look_at = None;
        if self.is_asked || self.ready.is_some() || self.owner.is_none() || self.is_stopping {
            return;
        }
        let Some(jobs) = &self.jobs else {
            self.look_at = self.retry_at.filter(|retry| *retry > now);
            if self.look_at.is_none() {
                self.ask(Request::Load);
            }
            return;
        };
        let (request, look_at) = next_request(jobs, &self.memory, &self.last, now);
        self.look_at = look_at;
        if let Some((id, mut request)) = request {
            if let Request::Try { again, .. } = &mut request {
                *again = self.unwritten.take_if(|unwritten| *unwritten == id).is_some();
            }
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
                again: false,
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
        // Somebody has paused or cancelled the job, for example.
        if !self.is_wanted(&step) {
            self.look_at = Some(now);
            return;
        }
        let mut written = step.written(&self.topic, &self.audit);
        let first = batch.outputs.len();
        batch.outputs.append(&mut written.outputs);
        batch.owners.push(owner);
        self.writing = Some(Writing { step, written, first });
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        let is_replaced = self.give_up(refused, Outcome::Failed, batch);
        if is_replaced && self.log.should_log() {
            let reason = refused.first().map(|refused| &*refused.failure.message);
            tracing::warn!(reason, records = refused.len(), "a destination refuses records");
        }
        is_replaced
    }

    fn denied(&mut self, denied: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        let reason = denied.first().map(|denied| denied.failure.message.clone());
        if self.log.should_log() {
            tracing::warn!(reason, records = denied.len(), "records are not redriven");
        }
        let outcome = Outcome::Skipped(Skip::DestinationDenied);
        if self.give_up(denied, outcome, batch) {
            return true;
        }
        // One of the topics that each step writes to, such as the ledger. The lane gives the step back.
        if let Some(writing) = self.writing.take() {
            self.give_back(&writing, reason.as_deref(), now);
        }
        false
    }

    fn take_back(&mut self, batch: &mut TransactionBatch) -> bool {
        self.completed.splice(0..0, batch.completed.drain(..));
        let now = self.clock.now();
        // What is decided later is about the jobs as they are then: one that was cancelled meanwhile does nothing.
        if let Some(writing) = self.writing.take() {
            self.give_back(&writing, None, now);
        }
        self.look_at = Some(now);
        true
    }

    fn committed(&mut self, now: Timestamp) {
        self.look_at = Some(now);
        let Some(Writing { step, written, .. }) = self.writing.take() else {
            return;
        };
        let id = &step.job.spec().id;
        if !step.problem.is_empty() {
            if let Some(jobs) = &mut self.jobs {
                jobs.apply_own(id, &written.progress, None);
            }
            return;
        }
        if let Some(jobs) = &mut self.jobs {
            jobs.apply_own(id, &written.progress, written.outcomes);
        }
        let taken = u32::try_from(step.tried.len()).unwrap_or(u32::MAX);
        let memory = self.memory.entry(id.clone()).or_default();
        memory.succeeded();
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
