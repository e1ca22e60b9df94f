//! The state topic is deleted and created again while a scheduler runs and has nothing to do.

use redeliver_core::headers;
use redeliver_testkit::kafka_request::delete_topic;

use crate::env::{SchedulerEnv, header, id};
use crate::oracle::JobSpec;
use crate::requests::Request;

fn jobs(name: &str, count: usize, delay_ms: u64) -> Vec<Request> {
    let job = |n| JobSpec::new("mail", format!("{name} {n}")).after(delay_ms);
    (0..count).map(job).map(Request::protobuf).collect()
}

#[test]
fn later_jobs_are_dispatched_exactly_once() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("lost-state").partitions(2));
    let mut scheduler = env.start("a");
    env.send(jobs("lost", 40, 3_600_000));
    env.watch().until_known(40);
    let state = &env.topics.state;
    delete_topic(&env.kafka.brokers, state);
    env.create_topics();
    // Before the scheduler has noticed it.
    let mut sent = env.send(jobs("at once", 5, 500));
    let problem =
        "was deleted and created again, and with the previous topic the jobs and schedules in it are lost";
    scheduler.until_not_ready(problem);
    assert!(scheduler.output().contains(problem), "{}", scheduler.output());
    sent.extend(env.send(jobs("meanwhile", 5, 500)));
    scheduler.restart();
    sent.extend(env.send(jobs("afterwards", 5, 500)));
    let mut watch = env.watch();
    watch.until_jobs_ended(sent.len());
    // A job that is dispatched a second time comes before these.
    sent.extend(env.send(jobs("last", 10, 1_000)));
    watch.until_jobs_ended(sent.len());
    watch.look();
    let dispatched = watch.seen.apps.iter();
    let mut dispatched: Vec<String> = dispatched.map(|record| header(record, headers::JOB_ID)).collect();
    let mut expected: Vec<String> = sent.iter().map(|sent| id(sent).to_string()).collect();
    dispatched.sort_unstable();
    expected.sort_unstable();
    assert_eq!(dispatched, expected);
}
