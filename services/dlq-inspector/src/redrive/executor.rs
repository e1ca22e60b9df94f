//! The processor of the lane whose owner executes the jobs.
//!
//! The lane reads the topic of jobs, and writes steps: transactions with everything that a step does and the position of the group, which only the
//! owner of the partition can commit. One step is decided at a time, after the one before it was committed. While it is written, the decider reads the records of
//! the step that is probably the next one. The jobs take turns: a step that cannot be decided or written is tried again later, while others go on.

use std::collections::{BTreeSet, HashMap};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Output, Record, TRACE_TARGET, Timestamp};
use redeliver_kafka::{AssignmentId, FollowUp, Processor, Refused, TransactionBatch};
use redeliver_runtime::telemetry::{self, MAX_LINKS, OpenTelemetrySpanExt as _, TraceContextExt as _};
use redeliver_runtime::trace_context::span_context;
use redeliver_service::audit::AuditLog;
use tracing::{Span, info_span};

use super::decider::{Answer, Request};
use super::job::{self, Job, Outcome, Progress};
use super::jobs::{JobEntry, Jobs};
use super::pace::{self, Memory, Next, Take};
use super::removal::{self, Removals};
use super::step::{Step, Written};
use crate::metrics::Metrics;

/// The number of records of the topic that are accepted before they are completed.
const CAPACITY: usize = 1_000;
/// The time before the next attempt to read the jobs after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// The time between two looks whether the index shows what has come back.
const OBSERVE_AGAIN: Duration = Duration::from_secs(1);
/// After this many failures in a row, a job says that its steps cannot be written.
const SHOWN_FAILURES: u32 = 2;
/// The problem of a job whose steps cannot be written for a reason that is not known.
const UNWRITTEN: &str = "its steps cannot be written; see the log of the redrive leader";
/// How long a job does not try to write to a topic to which it may not write.
const DENIED: Duration = Duration::from_secs(30);

/// The processor.
pub(crate) struct Executor {
    topic: Arc<str>,
    audit: AuditLog,
    metrics: Metrics,
    clock: Arc<dyn Clock>,
    requests: SyncSender<(u64, Request)>,
    answers: Receiver<(u64, Answer)>,
    /// The assignment of the partition, once its position is known: no transaction of a previous owner can be committed any more.
    owner: Option<AssignmentId>,
    /// The number of the last request, and whether it has no answer yet.
    number: u64,
    is_asked: bool,
    jobs: Option<Jobs>,
    /// The end of what `jobs` were loaded from.
    loaded_to: i64,
    completed: Vec<(AssignmentId, i64)>,
    ready: Option<Step>,
    writing: Option<Writing>,
    /// Entries of the ledger that are no longer needed.
    removals: Removals,
    /// Whether the last request is about them.
    is_asked_for_gone: bool,
    memory: HashMap<String, Memory>,
    /// The job of the last request: the others have their turn first.
    last: String,
    /// The job whose last step could not be written.
    unwritten: Option<String>,
    /// The topics to which a job may not write, and until when to believe that. Each failed attempt replaces a client.
    denied: HashMap<String, (Vec<Arc<str>>, Timestamp)>,
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
    outcomes: ReportedOutcomes,
    span: Span,
}

impl Writing {
    /// The index of the item whose record was refused; `None` if it is one of those that each step writes.
    fn tried(&self, refused: &Refused) -> Option<usize> {
        let index = refused.index.checked_sub(self.first)?;
        self.written.tried.get(index).copied()
    }

    /// Why a step cannot be written: the first record that is none of an item, and was refused.
    fn reason(&self, refused: &[Refused]) -> Option<String> {
        let refused = refused.iter().find(|refused| self.tried(refused).is_none());
        refused.map(|refused| refused.failure.message.clone())
    }
}

/// The span of writing these records, with links to their traces, which they continue at their destinations. Disabled without records.
fn redrive_span(id: &str, records: &[Output]) -> Span {
    if records.is_empty() {
        return Span::none();
    }
    let span = info_span!(
        target: TRACE_TARGET,
        parent: None,
        "redrive",
        otel.kind = "producer",
        "messaging.system" = "kafka",
        "messaging.batch.message_count" = i64::try_from(records.len()).unwrap_or(i64::MAX),
        "redeliver.redrive" = id,
    );
    if !span.is_disabled() {
        // Unless the transaction is committed.
        telemetry::fail(&span, "");
        let traces = records.iter().filter_map(|record| span_context(&record.headers));
        for trace in traces.take(MAX_LINKS) {
            span.add_link(trace.span().span_context().clone());
        }
    }
    span
}

/// The outcomes of a step, as the last attempt to write it has reported them: the values of chunks.
type ReportedOutcomes = Arc<Mutex<Vec<(u32, Bytes)>>>;

impl Executor {
    pub(crate) fn new(
        topic: Arc<str>,
        audit: AuditLog,
        metrics: Metrics,
        clock: Arc<dyn Clock>,
        remove_after: Option<Duration>,
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
            completed: Vec::new(),
            ready: None,
            writing: None,
            removals: Removals::new(remove_after),
            is_asked_for_gone: false,
            memory: HashMap::new(),
            last: String::new(),
            unwritten: None,
            denied: HashMap::new(),
            look_at: None,
            retry_at: None,
            log: LogThrottle::default(),
            is_stopping: false,
        }
    }

    fn forget(&mut self) {
        // The answer to a request in progress is about a previous assignment.
        self.number += 1;
        self.is_asked = false;
        self.owner = None;
        self.jobs = None;
        self.completed.clear();
        self.ready = None;
        self.writing = None;
        self.removals.forget();
        self.memory.clear();
        self.unwritten = None;
        self.denied.clear();
        self.look_at = None;
        self.retry_at = None;
    }

    fn ask(&mut self, request: Request) {
        self.is_asked_for_gone = matches!(request, Request::FindGone { .. });
        self.number += 1;
        // Full: answers to previous requests are on their way.
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
                Answer::Loaded(jobs, end) => {
                    tracing::info!("became redrive leader");
                    self.jobs = Some(jobs);
                    self.loaded_to = end;
                    self.log = LogThrottle::default();
                }
                Answer::NotKnown => {
                    let memory = self.memory.entry(self.last.clone()).or_default();
                    memory.not_before = Some(now.after(OBSERVE_AGAIN));
                }
                Answer::Step(step) => self.ready = (!self.is_stopping).then_some(*step),
                Answer::Gone(removed) => {
                    self.removals.found(removed, now);
                    if self.is_stopping {
                        self.removals.drop_ready();
                    }
                }
                Answer::Failed(reason) if self.is_asked_for_gone => {
                    self.cannot_remove(&reason);
                    self.removals.failed(now);
                }
                Answer::Failed(reason) => {
                    if self.log.should_log() {
                        tracing::warn!(reason, id = self.last, "redrive cannot continue; retrying");
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
        let entry = self.jobs.as_ref().and_then(|jobs| jobs.get(&step.job.spec().id));
        let job = entry.and_then(|entry| entry.job());
        job.is_some_and(|job| job.record.revision == step.job.record.revision)
    }

    /// Gives up items whose records are at these positions in the batch, and replaces its outputs. Returns false, and does nothing, if one of them is no
    /// record at a destination.
    fn give_up(&mut self, refused: &[Refused], outcome: Outcome, batch: &mut TransactionBatch) -> bool {
        let Some(mut writing) = self.writing.take() else {
            return false;
        };
        let tried: Option<Vec<usize>> = refused.iter().map(|refused| writing.tried(refused)).collect();
        let Some(tried) = tried else {
            self.writing = Some(writing);
            return false;
        };
        writing.step.give_up(&tried, outcome);
        batch.outputs.truncate(writing.first);
        self.put(writing.step, batch);
        true
    }

    /// Writes a step as the end of a batch.
    fn put(&mut self, step: Step, batch: &mut TransactionBatch) {
        let mut written = step.written(&self.topic, &self.audit);
        let span = redrive_span(&step.job.spec().id, &written.outputs[..written.tried.len()]);
        let first = batch.outputs.len();
        let records = first..first + written.tried.len();
        batch.outputs.append(&mut written.outputs);
        let outcomes = ReportedOutcomes::default();
        if !step.tried.is_empty() {
            let (report, reported) = (written.report.clone(), outcomes.clone());
            batch.follow_up = Some(FollowUp::new(move |delivered| {
                let chunks = report.chunks(delivered.get(records.clone()).unwrap_or_default());
                let outputs = report.outputs(&chunks);
                *reported.lock().unwrap_or_else(PoisonError::into_inner) = chunks;
                outputs
            }));
        }
        self.writing = Some(Writing {
            step,
            written,
            first,
            outcomes,
            span,
        });
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

    fn has_something_to_write(&self) -> bool {
        self.ready.is_some() || self.removals.is_ready()
    }

    /// Takes a removal of ledger entries that is not possible out of the batch. Returns whether there was one.
    fn take_back_removal(
        &mut self,
        refused: &[Refused],
        batch: &mut TransactionBatch,
        now: Timestamp,
    ) -> bool {
        let was_removal = self.removals.take_back(&mut batch.outputs, now);
        if was_removal {
            self.cannot_remove(refused.first().map_or("", |refused| &*refused.failure.message));
        }
        was_removal
    }

    fn cannot_remove(&mut self, reason: &str) {
        if self.log.should_log() {
            tracing::warn!(
                reason,
                "cannot remove ledger entries of deleted dead letters; retrying"
            );
        }
    }

    /// Asks for what comes next.
    fn look(&mut self, now: Timestamp) {
        self.look_at = None;
        if self.is_asked || self.has_something_to_write() || self.owner.is_none() || self.is_stopping {
            return;
        }
        let Some(jobs) = &self.jobs else {
            self.look_at = self.retry_at.filter(|retry| *retry > now);
            if self.look_at.is_none() {
                self.ask(Request::Load);
            }
            return;
        };
        let (turn, look_at) = next_turn(jobs, &self.memory, &self.last, None, now);
        if self.removals.is_due(turn.is_some(), now) {
            self.ask(Request::FindGone {
                limit: removal::LIMIT,
            });
            return;
        }
        self.look_at = look_at;
        let Some(Turn { id, job, entry, take }) = turn else {
            self.look_at = look_at.into_iter().chain(self.removals.look_at()).min();
            return;
        };
        let request = match take {
            None => Request::Observe { job, entry },
            Some(take) => Request::Try {
                again: self.unwritten.take_if(|unwritten| *unwritten == id).is_some(),
                denied: self.denied_topics(&id, now),
                job,
                entry,
                take,
            },
        };
        self.last = id;
        self.ask(request);
    }

    /// Lets the decider read the records of the next step, while this one is written.
    fn read_ahead(&mut self, now: Timestamp) {
        let (Some(jobs), Some(Writing { step, written, .. })) = (&self.jobs, &self.writing) else {
            return;
        };
        let id = &step.job.spec().id;
        // A step that says why nothing can be done does not make it possible.
        if !step.problem.is_empty() {
            return;
        }
        let mut memory = self.memory.get(id).copied().unwrap_or_default();
        memory.succeeded();
        memory.not_before = pace::not_before(&step.job, count(step), now);
        let after = After {
            id,
            progress: &written.progress,
            memory,
        };
        let (turn, _) = next_turn(jobs, &self.memory, &self.last, Some(&after), now);
        if let Some(Turn {
            id,
            job,
            entry,
            take: Some(Take { items, .. }),
        }) = turn
        {
            // It would take as long as the attempt itself.
            if self.memory.get(&id).is_some_and(|memory| memory.failures > 0) {
                return;
            }
            let denied = self.denied_topics(&id, now);
            let request = Request::ReadAhead {
                job,
                entry,
                items,
                denied,
            };
            // It has no answer. Full: the decider is busy with previous requests.
            let _ = self.requests.try_send((self.number, request));
        }
    }

    /// The topics to which a job may not write.
    fn denied_topics(&mut self, id: &str, now: Timestamp) -> Vec<Arc<str>> {
        self.denied.retain(|_, (_, until)| *until > now);
        let denied = self.denied.get(id);
        denied.map(|(topics, _)| topics.clone()).unwrap_or_default()
    }
}

/// The number of items of a step.
fn count(step: &Step) -> u32 {
    u32::try_from(step.tried.len()).unwrap_or(u32::MAX)
}

/// What is done next.
struct Turn {
    id: String,
    job: Box<Job>,
    entry: Arc<JobEntry>,
    /// What to try; `None`: count what has come back.
    take: Option<Take>,
}

/// What will be true of a job once its step is committed.
struct After<'s> {
    id: &'s str,
    progress: &'s Progress,
    memory: Memory,
}

/// What to do next, for the job after the last one; or when to look again.
fn next_turn(
    jobs: &Jobs,
    memory: &HashMap<String, Memory>,
    last: &str,
    after: Option<&After<'_>>,
    now: Timestamp,
) -> (Option<Turn>, Option<Timestamp>) {
    let mut look_at: Option<Timestamp> = None;
    let (before, behind): (Vec<_>, Vec<_>) = jobs.iter().partition(|(id, ..)| *id <= last);
    for (id, entry, job) in behind.into_iter().chain(before) {
        if !entry.is_progress_known() {
            continue;
        }
        let (progress, memory) = match after {
            Some(after) if after.id == id => (after.progress.clone(), after.memory),
            _ => (entry.progress(), memory.get(id).copied().unwrap_or_default()),
        };
        let take = match pace::next(&job, &progress, memory, now) {
            Next::Take(take) => Some(take),
            Next::Observe => None,
            Next::Wait(until) => {
                look_at = Some(look_at.map_or(until, |known| known.min(until)));
                continue;
            }
            Next::Nothing => continue,
        };
        let turn = Turn {
            id: id.to_owned(),
            job: Box::new(job),
            entry: Arc::<JobEntry>::clone(entry),
            take,
        };
        return (Some(turn), None);
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
        // Until the jobs are loaded, it is unknown which records follow them.
        let loaded = self.jobs.as_ref();
        loaded.map_or(0, |_| CAPACITY.saturating_sub(self.completed.len()))
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        let Some(jobs) = self.jobs.as_mut().filter(|_| self.owner == Some(assignment)) else {
            return;
        };
        self.completed.push((assignment, record.position.offset));
        // Earlier ones were read already, maybe followed by newer ones. The group may have committed nothing yet.
        if record.position.offset >= self.loaded_to {
            jobs.apply_of_callers(&record);
        }
    }

    fn finish(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        self.take_answers(now);
        self.look(now);
        let count = self.completed.len().min(limit);
        batch.completed.extend(self.completed.drain(..count));
        let Some(owner) = self.owner else {
            return;
        };
        // One of them: there is one request at a time.
        if self.removals.is_ready() {
            batch.owners.push(owner);
            self.removals.write(&mut batch.outputs, now);
            return;
        }
        let Some(step) = self.ready.take() else {
            return;
        };
        // The job was paused or cancelled, for example.
        if !self.is_wanted(&step) {
            self.look_at = Some(now);
            return;
        }
        batch.owners.push(owner);
        self.put(step, batch);
        self.read_ahead(now);
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        if self.take_back_removal(refused, batch, now) {
            return true;
        }
        if self.log.should_log() {
            let reason = refused.first().map(|refused| &*refused.failure.message);
            tracing::warn!(
                reason,
                records = refused.len(),
                "topic refused records of a redrive"
            );
        }
        if self.give_up(refused, Outcome::Failed, batch) {
            return true;
        }
        // One of the topics that each step writes to, such as the ledger. The rest of the batch is written without the step: if the batch were dropped, the
        // lane would read the topic of jobs again, and the decider the whole ledger, for each attempt.
        if let Some(writing) = self.writing.take() {
            batch.outputs.truncate(writing.first);
            batch.follow_up = None;
            let reason = writing.reason(refused);
            self.give_back(&writing, reason.as_deref(), now);
        }
        true
    }

    fn denied(&mut self, denied: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        if self.take_back_removal(denied, batch, now) {
            return true;
        }
        if self.log.should_log() {
            let reason = denied.first().map(|denied| &*denied.failure.message);
            tracing::warn!(
                reason,
                records = denied.len(),
                "destination denied; records not redriven"
            );
        }
        let Some(writing) = &self.writing else {
            return false;
        };
        let destinations: BTreeSet<Arc<str>> = denied
            .iter()
            .filter(|denied| writing.tried(denied).is_some())
            .filter_map(|denied| batch.outputs.get(denied.index))
            .map(|output| output.topic.clone())
            .collect();
        if !destinations.is_empty() {
            let id = writing.step.job.spec().id.clone();
            let (known, until) = self.denied.entry(id).or_insert_with(|| (Vec::new(), now));
            known.extend(destinations);
            known.sort();
            known.dedup();
            *until = now.after(DENIED);
        }
        if self.give_up(denied, Outcome::DestinationDenied, batch) {
            return true;
        }
        // One of the topics that each step writes to. The lane gives the step back.
        if let Some(writing) = self.writing.take() {
            let reason = writing.reason(denied);
            self.give_back(&writing, reason.as_deref(), now);
        }
        false
    }

    fn take_back(&mut self, batch: &mut TransactionBatch) -> bool {
        self.completed.splice(0..0, batch.completed.drain(..));
        let now = self.clock.now();
        self.removals.take_back(&mut batch.outputs, now);
        // What is decided later is about the jobs as they are then: one that was cancelled meanwhile does nothing.
        if let Some(writing) = self.writing.take() {
            let memory = self.memory.get(&writing.step.job.spec().id);
            let is_repeated = memory.is_some_and(|memory| memory.failures >= SHOWN_FAILURES);
            self.give_back(&writing, is_repeated.then_some(UNWRITTEN), now);
        }
        self.look_at = Some(now);
        true
    }

    fn is_outdated(&self, _batch: &TransactionBatch) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|writing| !self.is_wanted(&writing.step))
            || self.removals.is_outdated(self.clock.now())
    }

    fn committed(&mut self, now: Timestamp) {
        self.look_at = Some(now);
        self.metrics.add_removed_entries(self.removals.committed());
        let Some(Writing {
            step,
            written,
            outcomes,
            span,
            ..
        }) = self.writing.take()
        else {
            return;
        };
        telemetry::succeed(&span);
        let id = &step.job.spec().id;
        if let Some(jobs) = &mut self.jobs {
            let outcomes = std::mem::take(&mut *outcomes.lock().unwrap_or_else(PoisonError::into_inner));
            jobs.apply_own(id, &written.progress, outcomes);
        }
        if !step.problem.is_empty() {
            return;
        }
        let taken = count(&step);
        let memory = self.memory.entry(id.clone()).or_default();
        memory.succeeded();
        memory.not_before = pace::not_before(&step.job, taken, now);
        if let Some(reason) = &step.auto_pause {
            tracing::warn!(id, reason, "redrive auto-paused");
        }
        let (before, after) = (&step.before, &written.progress);
        for (outcome, count) in [
            ("done", after.done - before.done),
            ("failed", after.failed - before.failed),
            ("skipped", after.skipped - before.skipped),
        ] {
            self.metrics.add_redriven(step.job.kind, outcome, count);
        }
        if job::has_ended(job::state(&step.job, after)) {
            tracing::info!(
                id,
                done = after.done,
                failed = after.failed,
                skipped = after.skipped,
                returned = after.returned,
                "redrive ended"
            );
        }
    }

    fn aborted(&mut self) {
        self.ready = None;
        self.writing = None;
        self.removals.failed(self.clock.now());
    }

    fn next_due(&self) -> Option<Timestamp> {
        if self.has_something_to_write() {
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
        self.removals.drop_ready();
    }

    fn starting(&mut self) {
        self.is_stopping = false;
    }
}

#[cfg(test)]
mod tests;
