//! Cancellations whose copies overtake a backlog in the ingest topic.

use redeliver_core::headers::{self, Origin};
use redeliver_core::{JobId, Output};
use redeliver_proto::{Message as _, v1};

use crate::env::{SchedulerEnv, Watch, answers, id};
use crate::oracle::{JobSpec, Sent};
use crate::requests::{Request, in_millis};

const BACKLOG: usize = 30_000;

/// The copy of a command, as `docs/protocol.md` describes it.
fn copy(env: &SchedulerEnv, sent: &Sent) -> Output {
    let origin = Origin {
        topic: sent.position.topic.clone(),
        partition: sent.position.partition,
        offset: sent.position.offset,
        timestamp: Some(sent.at),
    };
    let mut list = sent.headers.clone();
    headers::write_lineage(&mut list, "scheduler", &origin, 0);
    Output {
        topic: format!("{}-jobs-urgent", env.test.name()).into(),
        partition: Some(sent.position.partition),
        key: sent.key.clone(),
        value: sent.value.clone(),
        headers: list,
    }
}

/// The place in the state topic at which a job ended, and its state.
fn end_of(watch: &Watch<'_>, job: JobId) -> Option<(usize, v1::JobState)> {
    let name = job.to_string();
    let mut records = watch.seen.state.iter().enumerate();
    records.find_map(|(place, record)| {
        let is_its = record.key.as_deref() == Some(name.as_bytes());
        let state = v1::JobRecord::decode(record.value.clone().filter(|_| is_its)?).unwrap();
        state.ended_ms.is_some().then(|| (place, state.state()))
    })
}

struct Backlog {
    sent: Vec<Sent>,
    waiting: JobId,
    overtaken: JobId,
    last: JobId,
}

/// A job that waits, and then a backlog with another job and the cancellations of both at its end, while no scheduler runs.
fn backlog(env: &SchedulerEnv, with_answers: bool) -> Backlog {
    let mut scheduler = env.start("a");
    let waits = JobSpec::new("mail", "waits")
        .at(in_millis(3_600_000))
        .idempotency_key("k1");
    let mut sent = env.send(vec![Request::protobuf(waits)]);
    env.watch().until_known(1);
    scheduler.kill_9();
    let bulk = (0..BACKLOG).map(|n| Request::protobuf(JobSpec::new("crawl", n.to_string())));
    sent.extend(env.send(bulk.collect()));
    let last = id(&sent[sent.len() - 1]);
    // It would be due at once.
    let overtaken = JobSpec::new("mail", "overtaken").idempotency_key("k2");
    sent.extend(env.send(vec![Request::protobuf(overtaken)]));
    let (waiting, overtaken) = (id(&sent[0]), id(&sent[sent.len() - 1]));
    let cancellations = [
        ("waiting", Request::cancel(waiting)),
        ("overtaken", Request::cancel_key("mail", "k2", overtaken)),
    ];
    let cancellations = cancellations.map(|(name, request)| match with_answers {
        true => request.answer_to(name),
        false => request,
    });
    let cancellations = env.send(cancellations.into());
    let copies: Vec<Output> = cancellations.iter().map(|sent| copy(env, sent)).collect();
    env.write(&copies);
    sent.extend(cancellations);
    Backlog {
        sent,
        waiting,
        overtaken,
        last,
    }
}

fn environment() -> SchedulerEnv {
    let builder = SchedulerEnv::builder("urgent").partitions(1);
    SchedulerEnv::new(builder.set("scheduler.topics.urgent", "{name}-jobs-urgent"))
}

#[test]
fn cancellations_take_effect_before_a_backlog_is_worked_off() {
    let env = environment();
    let mut backlog = backlog(&env, true);
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    watch.settle(&mut backlog.sent);
    let (at, state) = end_of(&watch, backlog.waiting).unwrap();
    let (last, _) = end_of(&watch, backlog.last).unwrap();
    assert_eq!(state, v1::JobState::Cancelled);
    assert!(at < last, "cancelled at {at}, and the backlog ended at {last}");
    assert_eq!(
        end_of(&watch, backlog.overtaken).unwrap().1,
        v1::JobState::Cancelled
    );
    let answers = answers(&watch.seen);
    assert_eq!(answers["waiting"], v1::Outcome::Cancelled);
    assert_eq!(answers["overtaken"], v1::Outcome::Cancelled);
}

#[test]
fn a_scheduler_that_takes_over_reads_the_copies_again() {
    let env = environment();
    let mut backlog = backlog(&env, false);
    let mut scheduler = env.start("a");
    let mut watch = env.watch();
    watch.until_jobs_ended(BACKLOG / 10);
    scheduler.kill_9();
    scheduler.start_again();
    watch.settle(&mut backlog.sent);
    let (at, _) = end_of(&watch, backlog.waiting).unwrap();
    let (last, _) = end_of(&watch, backlog.last).unwrap();
    assert!(at < last, "cancelled at {at}, and the backlog ended at {last}");
    assert_eq!(
        end_of(&watch, backlog.overtaken).unwrap().1,
        v1::JobState::Cancelled
    );
}
