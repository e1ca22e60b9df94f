//! The processor of the lane whose owner executes the jobs.
//!
//! The lane reads the topic of jobs, and writes steps: transactions with everything that a step does and the position of the group, which only the
//! owner of the partition can commit. One step is decided at a time, after the one before it was committed. While it is written, the source reads the records of
//! the step that is probably the next one. The jobs take turns: a step that cannot be decided or written is tried again later, while others go on.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Record, Timestamp};
use redeliver_kafka::{AssignmentId, FollowUp, Processor, Refused, TransactionBatch};
use redeliver_service::audit::AuditLog;

use super::job::{Job, Outcome, Progress, Skip};
use super::jobs::{Entry, Jobs};
use super::pace::{self, Memory, Next};
use super::removal::{self, Removals};
use super::source::{Answer, Request};
use super::step::{Step, Written};
use crate::metrics::Metrics;

/// The number of records of the topic that are accepted before they are completed.
const CAPACITY: usize = 1_000;
/// The time before the next attempt to read the jobs after a failure.
const RETRY: Duration = Duration::from_secs(2);
/// After this many failures in a row, a job says that its steps cannot be written.
const SHOWN_FAILURES: u32 = 2;
/// The problem of a job whose steps cannot be written for a reason that is not known.
const UNWRITTEN: &str =
    "its steps cannot be written; the log of the inspector that executes redrives says why";
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
    /// Entries of the ledger that nobody needs any more.
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
            early: Vec::new(),
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
        // The answer to a request in progress is about a former assignment.
        self.number += 1;
        self.is_asked = false;
        self.owner = None;
        self.jobs = None;
        self.early.clear();
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

    /// Writes a step with a batch, to which nothing else is added after it.
    fn put(&mut self, step: Step, batch: &mut TransactionBatch) {
        let mut written = step.written(&self.topic, &self.audit);
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
            Some(items) => Request::Try {
                again: self.unwritten.take_if(|unwritten| *unwritten == id).is_some(),
                denied: self.denied_topics(&id, now),
                job,
                entry,
                items,
            },
        };
        self.last = id;
        self.ask(request);
    }

    /// Lets the source read the records of the next step, while this one is written.
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
            take: Some(items),
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
            // It has no answer. Full: the source is busy with former requests.
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
    entry: Arc<Entry>,
    /// The items to try; `None`: count what has come back.
    take: Option<Range<u32>>,
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
            Next::Take(to) => Some(progress.next..to),
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
            entry: Arc::<Entry>::clone(entry),
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
        // Somebody has paused or cancelled the job, for example.
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
                "a topic refuses records of a redrive"
            );
        }
        if self.give_up(refused, Outcome::Failed, batch) {
            return true;
        }
        // One of the topics that each step writes to, such as the ledger. The rest of the batch is written without the step: if the batch were dropped, the
        // lane would read the topic of jobs again, and the source the whole ledger, for each attempt.
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
            tracing::warn!(reason, records = denied.len(), "records are not redriven");
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
        if self.give_up(denied, Outcome::Skipped(Skip::DestinationDenied), batch) {
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
            ..
        }) = self.writing.take()
        else {
            return;
        };
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
mod tests {
    use std::sync::mpsc::sync_channel;

    use bytes::Bytes;
    use prometheus_client::registry::Registry;
    use redeliver_core::{Failure, Headers, ManualClock, Output};
    use redeliver_kafka::Delivered;
    use redeliver_proto::Message as _;
    use redeliver_runtime::Config;
    use redeliver_service::followed::Contents as _;

    use super::super::job::Wanted;
    use super::super::job::tests::{item, job};
    use super::super::jobs::tests::record;
    use super::super::jobs::{job_key, plan_key};
    use super::super::ledger_states::Removed;
    use super::super::step::Tried;
    use super::super::{job, jobs};
    use super::*;
    use crate::ledger;

    const TOPIC: &str = "redrives";

    /// An executor that has read the jobs `1` and `2`, both running.
    struct World {
        executor: Executor,
        clock: Arc<ManualClock>,
        requests: Receiver<(u64, Request)>,
        answers: SyncSender<(u64, Answer)>,
        batch: TransactionBatch,
    }

    fn job_record(id: &str, wanted: Wanted, revision: u64) -> Record {
        let mut written = job(10, wanted).record;
        written.revision = revision;
        if let Some(redrive) = &mut written.redrive {
            redrive.id = id.to_owned();
        }
        record(&job_key(id), Some(written.encode_to_vec().into()))
    }

    fn owner() -> AssignmentId {
        AssignmentId::for_tests(0, 1)
    }

    impl World {
        fn new() -> Self {
            let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_000_000)));
            let (request_sender, requests) = sync_channel(8);
            let (answers, answer_receiver) = sync_channel(8);
            let executor = Executor::new(
                TOPIC.into(),
                AuditLog::new(&Config::default(), "dlq-inspector"),
                Metrics::register(&mut Registry::default()),
                clock.clone(),
                Some(Duration::from_secs(36_000)),
                request_sender,
                answer_receiver,
            );
            let mut world = Self {
                executor,
                clock,
                requests,
                answers,
                batch: TransactionBatch::default(),
            };
            world.executor.starts_at(owner(), 0);
            world.finish();
            let mut jobs = Jobs::default();
            for id in ["1", "2"] {
                jobs.apply(&job_record(id, Wanted::Running, 2));
                let planned: Vec<_> = (0..10).map(|offset| item("a-dlq", offset)).collect();
                let chunk = job::chunks(&planned).remove(0).encode_to_vec();
                jobs.apply(&record(&plan_key(id, 0), Some(chunk.into())));
            }
            world.answer(|request| {
                assert!(matches!(request, Request::Load));
                Answer::Loaded(jobs, 0)
            });
            world
        }

        /// The lane asks for what is finished.
        fn finish(&mut self) {
            self.batch = TransactionBatch::default();
            self.executor.finish(self.clock.now(), 1_000, &mut self.batch);
        }

        /// The next request that has an answer.
        fn request(&self) -> Option<(u64, Request)> {
            let mut requests = self.requests.try_iter();
            requests.find(|(_, request)| !matches!(request, Request::ReadAhead { .. }))
        }

        fn answer(&mut self, answer: impl FnOnce(Request) -> Answer) {
            let (number, request) = self.request().expect("a request");
            self.answers.try_send((number, answer(request))).unwrap();
            self.finish();
        }

        /// Answers with a step that does everything up to the wanted item, and returns the id of its job.
        fn step(&mut self) -> String {
            let mut id = String::new();
            self.answer(|request| {
                let Request::Try {
                    job, entry, items, ..
                } = request
                else {
                    panic!("{request:?}");
                };
                id.clone_from(&job.spec().id);
                Answer::Step(Box::new(done(*job, &entry, items.end)))
            });
            id
        }

        /// The lane commits: each record is written at the offset that is its index in the batch.
        fn commit(&mut self) {
            self.follow_up();
            self.executor.committed(self.clock.now());
            self.finish();
        }

        /// What is written in the transaction after the outputs of the batch.
        fn follow_up(&self) -> Vec<Output> {
            let delivered: Vec<Delivered> = (0..)
                .take(self.batch.outputs.len())
                .map(|index| Some((0, index)))
                .collect();
            let follow_up = self.batch.follow_up.as_ref();
            follow_up.map_or_else(Vec::new, |follow_up| follow_up.outputs(&delivered))
        }

        fn topics(&self) -> Vec<&str> {
            self.batch.outputs.iter().map(|output| &*output.topic).collect()
        }

        fn progress(&self, id: &str) -> jobs::Entry {
            let jobs = self.executor.jobs.as_ref().unwrap();
            (**jobs.get(id).unwrap()).clone()
        }
    }

    fn done(job: Job, entry: &Entry, to: u32) -> Step {
        let items = entry.items(0).unwrap();
        let before = entry.progress();
        let tried = items[before.next as usize..to as usize].iter().map(|item| Tried {
            item: item.clone(),
            outcome: Outcome::Done,
            output: Some(Output {
                topic: "docs".into(),
                partition: None,
                key: None,
                value: Some(Bytes::from_static(b"v")),
                headers: Headers::new(),
            }),
        });
        Step {
            outcomes: entry.outcomes(0),
            tried: tried.collect(),
            before,
            job,
            returned: None,
            brake: None,
            problem: String::new(),
            now: Timestamp::from_millis(1_000_000),
        }
    }

    fn denied(index: usize) -> Refused {
        refused_by("docs", index)
    }

    fn refused_by(topic: &str, index: usize) -> Refused {
        Refused {
            index,
            failure: Failure::permanent("output.denied", format!("may not write to topic `{topic}`")),
        }
    }

    #[test]
    fn a_job_says_which_topic_it_needs_although_others_are_denied_too() {
        let mut world = World::new();
        world.step();
        let all = [refused_by("docs", 0), refused_by("the ledger", 10)];
        let now = world.clock.now();
        assert!(!world.executor.denied(&all, &mut world.batch, now));
        let mut batch = std::mem::take(&mut world.batch);
        assert!(world.executor.take_back(&mut batch));
        world.finish();
        world.commit();
        let problem = world.progress("1").progress().problem;
        assert!(problem.contains("the ledger"), "{problem}");
        // The next attempt does without the other topic.
        assert_eq!(world.step(), "2");
        world.commit();
        world.clock.advance(Duration::from_secs(2));
        world.finish();
        assert_eq!(denied_topics(&mut world), ("1".to_owned(), vec!["docs".into()]));
    }

    #[test]
    fn a_step_that_the_ledger_refuses_is_taken_out_of_the_batch_and_nothing_is_read_again() {
        let mut world = World::new();
        let now = world.clock.now();
        world
            .executor
            .accept(owner(), job_record("3", Wanted::Planned, 1), now);
        world.step();
        assert_eq!(world.batch.completed.len(), 1);
        let refused = [refused_by("the ledger", 10)];
        assert!(world.executor.refused(&refused, &mut world.batch, now));
        assert_eq!(world.topics(), Vec::<&str>::new());
        assert!(world.batch.follow_up.is_none() && world.batch.completed.len() == 1);
        world.commit();
        assert_eq!(world.topics(), [TOPIC], "the problem");
        world.commit();
        assert!(world.progress("1").progress().problem.contains("the ledger"));
        assert_eq!(world.step(), "2");
    }

    #[test]
    fn a_job_that_fails_tells_why_and_does_not_delay_others() {
        let mut world = World::new();
        world.answer(|request| {
            assert!(matches!(request, Request::Try { job, .. } if job.spec().id == "1"));
            Answer::Failed("no plan".to_owned())
        });
        assert_eq!(world.topics(), [TOPIC], "the problem");
        world.commit();
        assert_eq!(world.progress("1").progress().problem, "no plan");
        assert_eq!(world.step(), "2");
        world.commit();
        assert_eq!(world.progress("2").progress().done, 10);
        // Nothing else is to be done before the next attempt, after which the problem is gone.
        assert!(world.request().is_none());
        let retry = world.executor.next_due().unwrap();
        assert_eq!(retry, world.clock.now().after(Duration::from_secs(2)));
        world.clock.set(retry);
        world.finish();
        assert_eq!(world.step(), "1");
        world.commit();
        let progress = world.progress("1").progress();
        // A step after a failure is half as large.
        assert_eq!((progress.done, &*progress.problem), (5, ""));
    }

    #[test]
    fn jobs_take_turns() {
        let mut world = World::new();
        let mut turns = Vec::new();
        for _ in 0..2 {
            // A step with fewer items than were asked for, as with large records.
            world.answer(|request| {
                let Request::Try { job, entry, .. } = request else {
                    panic!("{request:?}");
                };
                turns.push(job.spec().id.clone());
                Answer::Step(Box::new(done(*job, &entry, 1)))
            });
            world.commit();
        }
        turns.push(world.step());
        assert_eq!(turns, ["1", "2", "1"]);
    }

    /// The job and the denied topics of the next request, which is answered with one item.
    fn denied_topics(world: &mut World) -> (String, Vec<Arc<str>>) {
        let mut asked = (String::new(), Vec::new());
        world.answer(|request| {
            let Request::Try {
                job, entry, denied, ..
            } = request
            else {
                panic!("{request:?}");
            };
            let next = entry.progress().next;
            asked = (job.spec().id.clone(), denied);
            Answer::Step(Box::new(done(*job, &entry, next + 1)))
        });
        asked
    }

    #[test]
    fn a_job_does_not_try_a_denied_topic_for_a_while_and_others_do() {
        let mut world = World::new();
        assert_eq!(denied_topics(&mut world), ("1".to_owned(), Vec::new()));
        let now = world.clock.now();
        assert!(world.executor.denied(&[denied(0)], &mut world.batch, now));
        world.commit();
        assert_eq!(denied_topics(&mut world), ("2".to_owned(), Vec::new()));
        world.commit();
        assert_eq!(denied_topics(&mut world), ("1".to_owned(), vec!["docs".into()]));
        world.clock.advance(Duration::from_secs(30));
        world.commit();
        assert_eq!(denied_topics(&mut world), ("2".to_owned(), Vec::new()));
        world.commit();
        assert_eq!(denied_topics(&mut world), ("1".to_owned(), Vec::new()));
    }

    #[test]
    fn the_positions_of_records_are_kept_also_of_a_repeated_transaction() {
        let mut world = World::new();
        world.step();
        // An attempt that is aborted, and another one.
        let aborted = world.batch.follow_up.clone().unwrap();
        assert_eq!(aborted.outputs(&[Some((7, 700)); 10]).len(), 1);
        world.commit();
        let outcomes = world.progress("1").outcomes(0);
        let written = |index| outcomes.written(index).map(|position| position.to_string());
        assert_eq!(
            (written(0), written(9)),
            (Some("docs/0/0".to_owned()), Some("docs/0/9".to_owned()))
        );
    }

    #[test]
    fn while_a_step_is_written_the_records_of_the_next_one_are_read() {
        let mut world = World::new();
        let ahead = |world: &World| {
            let ahead = world.requests.try_iter().find_map(|(_, request)| match request {
                Request::ReadAhead { job, items, .. } => Some((job.spec().id.clone(), items)),
                _ => None,
            });
            ahead.map(|(id, items)| (id, items.start, items.end))
        };
        let step = |world: &mut World, to| {
            world.answer(|request| {
                let Request::Try { job, entry, .. } = request else {
                    panic!("{request:?}");
                };
                Answer::Step(Box::new(done(*job, &entry, to)))
            });
        };
        step(&mut world, 3);
        assert_eq!(ahead(&world), Some(("2".to_owned(), 0, 10)));
        world.commit();
        step(&mut world, 10);
        assert_eq!(ahead(&world), Some(("1".to_owned(), 3, 10)));
        world.commit();
        // Nothing will be left.
        step(&mut world, 10);
        assert_eq!(ahead(&world), None);
    }

    #[test]
    fn a_step_that_was_aborted_is_outdated_once_its_job_has_changed() {
        let mut world = World::new();
        world.step();
        assert!(!world.executor.is_outdated(&world.batch));
        let now = world.clock.now();
        world
            .executor
            .accept(owner(), job_record("1", Wanted::Cancelled, 3), now);
        assert!(world.executor.is_outdated(&world.batch));
    }

    #[test]
    fn items_whose_destination_is_denied_are_given_up() {
        let mut world = World::new();
        world.step();
        let all: Vec<Refused> = (0..10).map(denied).collect();
        let now = world.clock.now();
        assert!(world.executor.denied(&all, &mut world.batch, now));
        // The progress and, after it, the outcomes; neither ledger entries nor an audit entry.
        assert_eq!(world.topics(), [TOPIC]);
        assert_eq!(world.follow_up().len(), 1);
        world.commit();
        let entry = world.progress("1");
        assert_eq!((entry.progress().done, entry.progress().skipped), (0, 10));
        assert_eq!(
            entry.outcomes(0).numbers(),
            [Outcome::Skipped(Skip::DestinationDenied).number(); 10]
        );
        assert_eq!(world.step(), "2");
    }

    #[test]
    fn a_step_that_could_not_be_written_is_not_written_once_its_job_is_cancelled() {
        for is_denied in [true, false] {
            let mut world = World::new();
            world.step();
            let now = world.clock.now();
            if is_denied {
                // The first ledger entry.
                assert!(!world.executor.denied(&[denied(10)], &mut world.batch, now));
            }
            let mut batch = std::mem::take(&mut world.batch);
            assert!(world.executor.take_back(&mut batch));
            world
                .executor
                .accept(owner(), job_record("1", Wanted::Cancelled, 3), now);
            world.finish();
            // The reason is about a job that has changed: nobody needs it.
            assert_eq!(world.topics(), Vec::<&str>::new());
            world.finish();
            assert_eq!(world.step(), "2");
            world.commit();
            world.clock.advance(Duration::from_secs(59));
            world.finish();
            assert!(world.request().is_none());
            assert_eq!(world.progress("1").progress().done, 0);
        }
    }

    /// An entry of the ledger whose dead letter is gone.
    fn gone(offset: i64) -> Removed {
        Removed {
            id: item("a-dlq", offset).id,
            partition: 1,
        }
    }

    #[test]
    fn entries_of_deleted_dead_letters_are_removed_when_no_job_goes_on() {
        let mut world = World::new();
        for _ in 0..2 {
            world.step();
            world.commit();
        }
        let found = |request| {
            assert!(matches!(request, Request::FindGone { limit } if limit == removal::LIMIT));
            Answer::Gone(vec![gone(3), gone(4)])
        };
        for is_written in [false, true] {
            world.clock.advance(Duration::from_secs(60));
            world.finish();
            world.answer(found);
            assert_eq!(world.topics(), [ledger::TOPIC; 2]);
            assert!(world.batch.outputs.iter().all(|output| output.value.is_none()));
            assert_eq!(world.batch.owners, [owner()]);
            if is_written {
                world.commit();
            } else {
                let mut batch = std::mem::take(&mut world.batch);
                world.executor.take_back(&mut batch);
                assert!(batch.outputs.is_empty());
                world.finish();
            }
            assert_eq!(world.topics(), Vec::<&str>::new());
            assert!(world.request().is_none());
        }
    }

    #[test]
    fn a_removal_that_the_ledger_refuses_is_tried_again_later_and_stops_no_job() {
        for is_denied in [true, false] {
            let mut world = World::new();
            world.clock.advance(Duration::from_secs(70));
            world.step();
            world.commit();
            // It has waited for ten seconds: it goes before the job that has a turn.
            world.answer(|request| {
                assert!(matches!(request, Request::FindGone { .. }), "{request:?}");
                Answer::Gone(vec![gone(3)])
            });
            assert_eq!(world.topics(), [ledger::TOPIC]);
            let now = world.clock.now();
            let mut batch = std::mem::take(&mut world.batch);
            let is_handled = if is_denied {
                world.executor.denied(&[denied(0)], &mut batch, now)
            } else {
                world.executor.refused(&[denied(0)], &mut batch, now)
            };
            assert!(is_handled && batch.outputs.is_empty());
            assert!(!world.executor.is_outdated(&batch));
            world.executor.committed(now);
            world.finish();
            assert_eq!(world.step(), "2");
        }
    }

    #[test]
    fn a_removal_that_could_not_be_found_or_comes_while_the_lane_stops_is_not_written() {
        let mut world = World::new();
        for _ in 0..2 {
            world.step();
            world.commit();
        }
        for is_stopping in [false, true] {
            world.clock.advance(Duration::from_secs(60));
            world.finish();
            if is_stopping {
                world.executor.stopping();
                world.answer(|_| Answer::Gone(vec![gone(3)]));
            } else {
                world.answer(|_| Answer::Failed("test".to_owned()));
            }
            assert_eq!(world.topics(), Vec::<&str>::new());
            assert!(world.request().is_none());
        }
    }

    #[test]
    fn a_step_is_dropped_if_its_job_has_changed_before_it_is_written() {
        let mut world = World::new();
        let now = world.clock.now();
        world
            .executor
            .accept(owner(), job_record("1", Wanted::Paused, 3), now);
        world.step();
        assert_eq!(world.topics(), Vec::<&str>::new());
        world.finish();
        assert_eq!(world.step(), "2");
    }

    #[test]
    fn completed_records_of_the_topic_are_completed_again_after_an_abort() {
        let mut world = World::new();
        let now = world.clock.now();
        world
            .executor
            .accept(owner(), job_record("3", Wanted::Planned, 1), now);
        world.finish();
        assert_eq!(world.batch.completed, [(owner(), 0)]);
        let mut batch = std::mem::take(&mut world.batch);
        assert!(world.executor.take_back(&mut batch));
        world.finish();
        assert_eq!(world.batch.completed, [(owner(), 0)]);
    }
}
