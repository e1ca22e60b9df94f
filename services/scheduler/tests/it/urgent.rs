//! Commands whose copies overtake a backlog in the ingest topic.

use redeliver_core::headers::{self, Origin};
use redeliver_core::{JobId, Output};
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::eventually;

use crate::env::{DEADLINE, SchedulerEnv, Watch, answers, id};
use crate::oracle::{JobSpec, Sent, When};
use crate::requests::{Request, in_millis, now};

const BACKLOG: usize = 30_000;

/// The copy of a command, as `docs/protocol.md` describes it.
fn copy(env: &SchedulerEnv, sent: &Sent, offset: i64) -> Output {
    let origin = Origin {
        topic: sent.position.topic.clone(),
        partition: sent.position.partition,
        offset,
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

/// The last record of a job in the state topic.
fn last_of(watch: &Watch<'_>, job: JobId) -> v1::JobRecord {
    let name = job.to_string();
    let mut records = watch.seen.state.iter().rev();
    let last = records.find(|record| record.key.as_deref() == Some(name.as_bytes()));
    v1::JobRecord::decode(last.unwrap().value.clone().unwrap()).unwrap()
}

struct Backlog {
    sent: Vec<Sent>,
    cancelled: JobId,
    moved: JobId,
    overtaken: JobId,
}

/// Two jobs that are due, and a backlog with another one and with commands for all of them at its end, while no scheduler runs.
fn backlog(env: &SchedulerEnv, with_answers: bool) -> Backlog {
    let mut scheduler = env.start("a");
    let due = in_millis(6_000);
    let waits = |name: &'static str| Request::protobuf(JobSpec::new("mail", name).at(due));
    let mut sent = env.send(vec![waits("cancelled"), waits("moved")]);
    let (cancelled, moved) = (id(&sent[0]), id(&sent[1]));
    env.watch().until_known(2);
    scheduler.kill_9();
    assert!(now() < due, "the scheduler took too long");
    let bulk = (0..BACKLOG).map(|n| Request::protobuf(JobSpec::new("crawl", n.to_string())));
    sent.extend(env.send(bulk.collect()));
    // It would be due at once.
    let overtaken = JobSpec::new("mail", "overtaken").idempotency_key("k2");
    sent.extend(env.send(vec![Request::protobuf(overtaken)]));
    let overtaken = id(&sent[sent.len() - 1]);
    let commands = [
        ("cancelled", Request::cancel(cancelled)),
        ("moved", Request::reschedule(moved, When::At(in_millis(15_000)))),
        ("overtaken", Request::cancel_key("mail", "k2", overtaken)),
    ];
    let commands = commands.map(|(name, request)| match with_answers {
        true => request.answer_to(name),
        false => request,
    });
    let commands = env.send(commands.into());
    let copies: Vec<Output> = commands
        .iter()
        .map(|sent| copy(env, sent, sent.position.offset))
        .collect();
    env.write(&copies);
    sent.extend(commands);
    eventually("the jobs are due", DEADLINE, || match now() {
        at if at >= due => Ok(()),
        at => Err(at.to_string()),
    });
    Backlog {
        sent,
        cancelled,
        moved,
        overtaken,
    }
}

fn check(watch: &Watch<'_>, backlog: &Backlog) {
    let state = |job| last_of(watch, job).state();
    assert_eq!(state(backlog.cancelled), v1::JobState::Cancelled);
    assert_eq!(state(backlog.overtaken), v1::JobState::Cancelled);
    let moved = last_of(watch, backlog.moved);
    assert_eq!((moved.state(), moved.revision), (v1::JobState::Dispatched, 2));
}

fn environment() -> SchedulerEnv {
    let builder = SchedulerEnv::builder("urgent").partitions(1);
    SchedulerEnv::new(builder.set("scheduler.topics.urgent", "{name}-jobs-urgent"))
}

#[test]
fn jobs_that_are_due_wait_for_their_commands_at_the_end_of_a_backlog() {
    let env = environment();
    let mut backlog = backlog(&env, true);
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    watch.settle(&mut backlog.sent);
    check(&watch, &backlog);
    let answers = answers(&watch.seen);
    assert_eq!(answers["cancelled"], v1::Outcome::Cancelled);
    assert_eq!(answers["moved"], v1::Outcome::Rescheduled);
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
    check(&watch, &backlog);
}

#[test]
fn a_made_up_copy_delays_its_job_until_the_offset_that_it_names_is_read() {
    let env = environment();
    let mut scheduler = env.start("a");
    let pinned = JobSpec::new("mail", "pinned")
        .at(in_millis(1_000))
        .idempotency_key("k");
    let mut sent = env.send(vec![Request::protobuf(pinned)]);
    let cancel = v1::CancelJob {
        app: "mail".to_owned(),
        idempotency_key: "k".to_owned(),
        ..v1::CancelJob::default()
    };
    let cancel = v1::JobCommand {
        command: Some(v1::job_command::Command::Cancel(cancel)),
        ..v1::JobCommand::default()
    };
    let command = Sent {
        value: Some(cancel.encode_to_vec().into()),
        ..sent[0].clone()
    };
    // The offset of the second one of the requests that follow.
    env.write(&[copy(&env, &command, command.position.offset + 2)]);
    eventually("a pinned job that is due", DEADLINE, || {
        match scheduler.metric("redeliver_scheduler_pinned_jobs") {
            1 => Ok(()),
            other => Err(other.to_string()),
        }
    });
    let others = ["a", "b"].map(|key| Request::protobuf(JobSpec::new("crawl", key).idempotency_key(key)));
    sent.extend(env.send(others.into()));
    let mut watch = env.watch();
    watch.settle(&mut sent);
    let record = last_of(&watch, id(&sent[0]));
    assert_eq!(record.state(), v1::JobState::Dispatched);
    assert!(record.ended_ms.unwrap() >= sent[2].at.as_millis());
}
