//! The one-shot mode: a scheduler dispatches what is due, and ends with status 0.

use redeliver_testkit::{LocalRedis, ServiceProcess};

use crate::env::{APPS, DEADLINE, SchedulerEnv};
use crate::index::own_redis::Raw;
use crate::oracle::JobSpec;
use crate::requests::Request;

const IDLE: &str = "idle; shutting down";
const HOUR: u64 = 3_600_000;

fn spawn(env: &SchedulerEnv, instance: &str, flags: &[&str]) -> ServiceProcess {
    env.test.spawn("scheduler", instance, flags)
}

#[track_caller]
fn until_ended(scheduler: &mut ServiceProcess) {
    let status = scheduler.wait(DEADLINE);
    assert_eq!(status.code(), Some(0), "{}", scheduler.output());
    assert!(scheduler.output().contains(IDLE), "{}", scheduler.output());
}

/// Jobs of all applications, due after these times.
fn jobs(delays: impl IntoIterator<Item = u64>) -> Vec<Request> {
    let jobs = delays.into_iter().zip(APPS.iter().cycle());
    let job = |(delay, app): (u64, &&str)| Request::json(JobSpec::new(app, delay.to_string()).after(delay));
    jobs.map(job).collect()
}

#[test]
fn later_jobs_are_left() {
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("idle-later").redis(redis.url()));
    env.create_topics();
    let mut watch = env.watch();
    // Without a job, and without an index.
    until_ended(&mut spawn(&env, "a", &["--until-idle"]));
    env.send(jobs([0; 30]));
    env.send(jobs([HOUR; 6]));
    until_ended(&mut spawn(&env, "a", &["--until-idle"]));
    assert_eq!(watch.look_at_state(), 30);

    // With a duration, until what is due within it is dispatched. The index is rebuilt first.
    env.send(jobs([4_000; 3]));
    env.block_on(async { Raw::connect(&redis.url()).await.call(&["FLUSHALL"]).await });
    until_ended(&mut spawn(&env, "a", &["--until-idle=1m"]));
    assert_eq!(watch.look_at_state(), 33);

    // What is paused is left, too.
    env.send(jobs([0; 3]));
    let pause = format!("scheduler.apps.{}.paused=true", APPS[0]);
    until_ended(&mut spawn(&env, "a", &["--until-idle", "--set", &pause]));
    assert_eq!(watch.look_at_state(), 35);

    let mut patient = spawn(&env, "a", &["--until-idle=2h"]);
    patient.wait_for_output("not idle yet reason=jobs of `", DEADLINE);
    patient.shut_down();
    assert!(!patient.output().contains(IDLE), "{}", patient.output());
}

#[test]
fn periodic_runs_dispatch_each_job_once() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("idle-periodic"));
    env.create_topics();
    let mut sent = Vec::new();
    // The last run also dispatches what the others have left.
    for flag in ["--until-idle", "--until-idle", "--until-idle=1m"] {
        sent.extend(env.send(jobs((0..40).map(|number| number * 100))));
        // Several processes of a group.
        let mut schedulers = ["a", "b"].map(|instance| spawn(&env, instance, &[flag]));
        schedulers.iter_mut().for_each(until_ended);
    }
    assert_eq!(env.watch().look_at_state(), sent.len());
    let _scheduler = env.start("a");
    env.settle(sent);
}
