//! Commands whose copies overtake a backlog in the ingest topic.

use std::time::Duration;

use redeliver_core::headers::{self, Origin};
use redeliver_core::{JobId, Output, Timestamp};
use redeliver_kafka::transaction::Transactions;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{eventually, unique};

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
    let due = in_millis(15_000);
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
        ("moved", Request::reschedule(moved, When::At(in_millis(20_000)))),
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

/// A request for a job with a key, and a command that cancels it. The command was not written.
fn job_and_cancellation(env: &SchedulerEnv, due: Timestamp) -> (Sent, Sent) {
    let job = JobSpec::new("mail", "pinned").at(due).idempotency_key("k");
    let job = env.send(vec![Request::protobuf(job)]).remove(0);
    let cancel = v1::CancelJob {
        app: "mail".to_owned(),
        idempotency_key: "k".to_owned(),
        ..v1::CancelJob::default()
    };
    let cancel = v1::JobCommand {
        command: Some(v1::job_command::Command::Cancel(cancel)),
        ..v1::JobCommand::default()
    };
    let cancel = Sent {
        value: Some(cancel.encode_to_vec().into()),
        ..job.clone()
    };
    (job, cancel)
}

/// Writes a command in a transaction and aborts it.
fn abort(env: &SchedulerEnv, command: &Sent) {
    let id = unique("aborted");
    let mut transactions = Transactions::new(env.kafka.transactional_producer(&id), &id, DEADLINE);
    eventually("a producer", DEADLINE, || {
        let recovered = transactions.recover(Duration::from_secs(5));
        recovered.map_err(|error| error.to_string())
    });
    let output = Output {
        topic: command.position.topic.clone(),
        partition: Some(command.position.partition),
        key: command.key.clone(),
        value: command.value.clone(),
        headers: command.headers.clone(),
    };
    // The transaction fails because there is no group, and only after the record was delivered.
    let error = transactions.write(&[output], &Default::default(), None);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("adding offsets"), "{error}");
}

#[test]
fn the_pin_of_an_aborted_command_ends_at_the_end_of_the_ingest_topic() {
    let env = environment();
    let mut scheduler = env.start("a");
    let due = in_millis(15_000);
    let (job, cancel) = job_and_cancellation(&env, due);
    env.watch().until_known(1);
    scheduler.kill_9();
    assert!(now() < due, "the scheduler took too long");
    let bulk = (0..BACKLOG).map(|n| Request::protobuf(JobSpec::new("crawl", n.to_string())));
    let mut sent = vec![job];
    sent.extend(env.send(bulk.collect()));
    let last = sent.last().unwrap().clone();
    abort(&env, &cancel);
    env.write(&[copy(&env, &cancel, last.position.offset + 1)]);
    eventually("the job is due", DEADLINE, || match now() {
        at if at >= due => Ok(()),
        at => Err(at.to_string()),
    });
    scheduler.start_again();
    let mut watch = env.watch();
    watch.settle(&mut sent);
    let record = last_of(&watch, id(&sent[0]));
    assert_eq!(record.state(), v1::JobState::Dispatched);
    // It was due when the scheduler started. The last commands of the backlog may still wait for their transaction when the end is reached.
    let accepted = last_of(&watch, id(&sent[BACKLOG / 2])).accepted_ms;
    let ended = record.ended_ms.unwrap();
    assert!(
        ended >= accepted,
        "due {due}, ended {ended}, the middle of the backlog was accepted at {accepted}"
    );
}

#[test]
fn a_copy_of_an_offset_that_does_not_exist_pins_nothing() {
    let env = environment();
    let mut scheduler = env.start("a");
    let (job, cancel) = job_and_cancellation(&env, in_millis(5_000));
    env.write(&[copy(&env, &cancel, cancel.position.offset + 1)]);
    let copies =
        |outcome: &str| format!("redeliver_scheduler_urgent_commands_total{{outcome=\"{outcome}\"}}");
    // Before the last jobs of this test get that offset.
    eventually("the copy is read", DEADLINE, || {
        match scheduler.metric(&copies("invalid")) {
            1 => Ok(()),
            count => Err(count),
        }
    });
    let mut sent = vec![job];
    let mut watch = env.watch();
    watch.settle(&mut sent);
    let record = last_of(&watch, id(&sent[0]));
    assert_eq!(record.state(), v1::JobState::Dispatched);
    assert_eq!(scheduler.metric(&copies("invalid")), 1);
    assert_eq!(scheduler.metric(&copies("pins")), 0);
}
