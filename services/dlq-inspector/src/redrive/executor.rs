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
        self.memory.clear();
        self.unwritten = None;
        self.denied.clear();
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
        let entry = self.jobs.as_ref().and_then(|jobs| jobs.get(&step.job.spec().id));
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
            if let Request::Try { again, denied, .. } = &mut request {
                *again = self.unwritten.take_if(|unwritten| *unwritten == id).is_some();
                self.denied.retain(|_, (_, until)| *until > now);
                if let Some((topics, _)) = self.denied.get(&id) {
                    denied.clone_from(topics);
                }
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
                denied: Vec::new(),
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
        let mut topics: Vec<Arc<str>> = denied
            .iter()
            .filter_map(|denied| batch.outputs.get(denied.index))
            .map(|output| output.topic.clone())
            .collect();
        topics.sort();
        topics.dedup();
        let outcome = Outcome::Skipped(Skip::DestinationDenied);
        if self.give_up(denied, outcome, batch) {
            if let Some(writing) = &self.writing {
                let id = writing.step.job.spec().id.clone();
                let (known, until) = self.denied.entry(id).or_insert_with(|| (Vec::new(), now));
                known.extend(topics);
                *until = now.after(DENIED);
            }
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
            let memory = self.memory.get(&writing.step.job.spec().id);
            let is_repeated = memory.is_some_and(|memory| memory.failures >= SHOWN_FAILURES);
            self.give_back(&writing, is_repeated.then_some(UNWRITTEN), now);
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use bytes::Bytes;
    use prometheus_client::registry::Registry;
    use redeliver_core::{Failure, Headers, ManualClock, Output};
    use redeliver_proto::Message as _;
    use redeliver_runtime::Config;
    use redeliver_service::followed::Contents as _;

    use super::super::job::tests::{item, job};
    use super::super::job::{Job, Wanted};
    use super::super::jobs::tests::record;
    use super::super::jobs::{job_key, plan_key};
    use super::super::step::Tried;
    use super::super::{job, jobs};
    use super::*;

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

        fn answer(&mut self, answer: impl FnOnce(Request) -> Answer) {
            let (number, request) = self.requests.try_recv().expect("a request");
            self.answers.try_send((number, answer(request))).unwrap();
            self.finish();
        }

        /// Answers with a step that does everything up to the wanted item, and returns the id of its job.
        fn step(&mut self) -> String {
            let mut id = String::new();
            self.answer(|request| {
                let Request::Try { job, entry, to, .. } = request else {
                    panic!("{request:?}");
                };
                id.clone_from(&job.spec().id);
                Answer::Step(Box::new(done(*job, &entry, to)))
            });
            id
        }

        fn commit(&mut self) {
            self.executor.committed(self.clock.now());
            self.finish();
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
        Refused {
            index,
            failure: Failure::permanent("output.denied", "may not write to topic `docs`"),
        }
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
        assert!(world.requests.try_recv().is_err());
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
    fn items_whose_destination_is_denied_are_given_up() {
        let mut world = World::new();
        world.step();
        let all: Vec<Refused> = (0..10).map(denied).collect();
        let now = world.clock.now();
        assert!(world.executor.denied(&all, &mut world.batch, now));
        // The progress and the outcomes; neither ledger entries nor an audit entry.
        assert_eq!(world.topics(), [TOPIC; 2]);
        world.commit();
        let entry = world.progress("1");
        assert_eq!((entry.progress().done, entry.progress().skipped), (0, 10));
        assert_eq!(
            entry.outcomes(0),
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
            world.clock.advance(Duration::from_secs(60));
            world.finish();
            assert!(world.requests.try_recv().is_err());
            assert_eq!(world.progress("1").progress().done, 0);
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
