//! The executor with a decider and a lane that the test plays.

mod removals;

use std::sync::mpsc::sync_channel;

use bytes::Bytes;
use prometheus_client::registry::Registry;
use redeliver_core::{Failure, Headers, HumanDuration, ManualClock, Output};
use redeliver_kafka::Delivered;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::Config;
use redeliver_store::State as _;

use super::super::job::Wanted;
use super::super::job::tests::{item, job};
use super::super::jobs::tests::record;
use super::super::jobs::{job_key, plan_key};
use super::super::step::Tried;
use super::super::{job, jobs};
use super::*;
use crate::ledger;

const TOPIC: &str = "redrives";
/// How long jobs wait for what comes back.
const OBSERVE: HumanDuration = HumanDuration::from_secs(3_600);

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
        redrive.observe = Some(redeliver_proto::convert::to_duration(OBSERVE));
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
            let Request::Try { job, entry, take, .. } = request else {
                panic!("{request:?}");
            };
            id.clone_from(&job.spec().id);
            Answer::Step(Box::new(done(*job, &entry, take.items.end)))
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
        is_observation: false,
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
fn denied_ledger_is_named() {
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
fn refused_step_leaves_the_batch() {
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
fn failed_job_does_not_delay_others() {
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
fn job_ends_after_its_observation() {
    let mut world = World::new();
    let state = |world: &World| {
        let entry = world.progress("1");
        job::state(&entry.job().unwrap(), &entry.progress())
    };
    for id in ["1", "2"] {
        assert_eq!(world.step(), id);
        world.commit();
    }
    assert_eq!(state(&world), v1::RedriveState::Running);
    world.clock.advance(OBSERVE.duration());
    world.finish();
    world.answer(|request| {
        assert!(matches!(request, Request::FindGone { .. }));
        Answer::Gone(Vec::new())
    });
    // The index does not have all of it yet. The other job has its turn meanwhile.
    for id in ["1", "2"] {
        world.answer(|request| {
            assert!(matches!(request, Request::Observe { job, .. } if job.spec().id == id));
            Answer::NotKnown
        });
    }
    assert!(world.request().is_none());
    assert_eq!(state(&world), v1::RedriveState::Running);
    world.clock.advance(OBSERVE_AGAIN);
    world.finish();
    world.answer(|request| {
        let Request::Observe { job, entry } = request else {
            panic!("{request:?}");
        };
        let mut step = done(*job, &entry, 10);
        (step.returned, step.is_observation) = (Some(4), true);
        Answer::Step(Box::new(step))
    });
    world.commit();
    let progress = world.progress("1").progress();
    assert_eq!((progress.returned, &*progress.problem), (4, ""));
    assert_eq!(state(&world), v1::RedriveState::PartiallySucceeded);
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
fn denied_topic_is_retried_later() {
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
fn positions_survive_a_repeated_transaction() {
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
fn next_step_is_read_ahead() {
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
fn aborted_step_becomes_outdated() {
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
fn items_with_denied_destination_are_skipped() {
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
fn unwritten_step_ends_with_cancelled_job() {
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

#[test]
fn step_of_changed_job_is_dropped() {
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
fn completions_are_repeated_after_abort() {
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
