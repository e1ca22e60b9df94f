//! Quotas of applications, which outlive the scheduler and Redis.

use redeliver_testkit::{LocalRedis, ServiceProcess};

use crate::env::{SchedulerEnv, id};
use crate::index::own_redis::Raw;
use crate::oracle::{Intent, JobSpec, Sent, When};
use crate::requests::{Request, in_millis};

const LIMITED: &str = "mail";
const OTHER: &str = "sms";
/// Per partition.
const QUOTA: usize = 3;

fn until_refused(scheduler: &mut ServiceProcess, jobs: u64) {
    until_counted(scheduler, "over_quota", jobs);
}

fn until_counted(scheduler: &mut ServiceProcess, outcome: &str, commands: u64) {
    let metric = format!("redeliver_scheduler_commands_total{{outcome=\"{outcome}\"}}");
    scheduler.until_metric(&metric, |count| count == commands);
}

#[test]
fn quota_survives_kill_and_lost_redis() {
    let redis = LocalRedis::start().unwrap();
    let setting = format!("scheduler.apps.{LIMITED}.max_waiting");
    let builder = SchedulerEnv::builder("quota").partitions(2).redis(redis.url());
    let env = SchedulerEnv::new(builder.set(&setting, &(2 * QUOTA).to_string()));
    let mut scheduler = env.start("a");
    let far = in_millis(3_600_000);
    let job = |app: &str, partition, n: usize| {
        Request::protobuf(JobSpec::new(app, format!("{app} {n}")).at(far)).partition(partition)
    };
    let must_be_refused = |sent: Vec<Sent>| {
        let intent = Intent::Refused {
            code: "scheduler.quota-exceeded".to_owned(),
            says: format!("{setting} ({})", 2 * QUOTA),
        };
        let refused = sent.into_iter().map(move |sent| Sent {
            intent: intent.clone(),
            ..sent
        });
        refused.collect::<Vec<_>>()
    };

    let mut waiting = env.send((0..QUOTA).map(|n| job(LIMITED, 0, n)).collect());
    let mut refused = must_be_refused(env.send(vec![job(LIMITED, 0, 10), job(LIMITED, 0, 11)]));
    until_refused(&mut scheduler, 2);
    // In another partition, and of an application without a quota.
    waiting.extend(env.send(vec![job(LIMITED, 1, 20), job(OTHER, 0, 21)]));

    scheduler.kill_9();
    env.block_on(async { Raw::connect(&redis.url()).await.call(&["FLUSHALL"]).await });
    scheduler.start_again();
    scheduler.until_ready();
    refused.extend(must_be_refused(env.send(vec![job(LIMITED, 0, 30)])));
    until_refused(&mut scheduler, 1);

    let cancelled = env.send(vec![Request::cancel(id(&waiting[0]))]);
    // Unlike a request without a key, the cancellation needs a lookup in the index, so a request after it can be decided before.
    until_counted(&mut scheduler, "cancelled", 1);
    waiting.extend(env.send(vec![job(LIMITED, 0, 40)]));
    refused.extend(must_be_refused(env.send(vec![job(LIMITED, 0, 41)])));
    until_refused(&mut scheduler, 2);

    let soon = When::At(in_millis(500));
    let moved = waiting[1..]
        .iter()
        .map(|sent| Request::reschedule(id(sent), soon));
    let moved = env.send(moved.collect());
    env.settle([waiting, refused, cancelled, moved].concat());
}
