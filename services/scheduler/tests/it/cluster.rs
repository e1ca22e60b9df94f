//! A scheduler whose index is in a Redis Cluster.

use redeliver_testkit::LocalRedisCluster;

use crate::env::{SchedulerEnv, id};
use crate::index::own_redis::Raw;
use crate::oracle::{JobSpec, When};
use crate::requests::{Request, in_millis};

#[test]
fn jobs_are_dispatched_once() {
    const JOBS: usize = 120;
    let cluster = LocalRedisCluster::start().unwrap();
    let builder = SchedulerEnv::builder("cluster").partitions(12);
    let env = SchedulerEnv::new(builder.redis(cluster.url()));
    let mut scheduler = env.start("a");
    // Half of them are due after the crash, some are repeated, and some are cancelled or get a new due time.
    let due = in_millis(4_000);
    let job = |n: usize| {
        let spec = JobSpec::new("mail", n.to_string());
        match n % 4 {
            0 => Request::protobuf(spec),
            1 => Request::protobuf(spec.at(due)),
            2 => Request::json(spec.at(due).idempotency_key(format!("key {n}"))),
            _ => Request::protobuf(spec.after(3_600_000)),
        }
    };
    let mut sent = env.send((0..JOBS).map(job).collect());
    env.watch().until_known(JOBS);
    let far: Vec<_> = sent.iter().skip(3).step_by(4).map(id).collect();
    let changes = far.iter().enumerate().map(|(n, id)| match n % 2 {
        0 => Request::cancel(*id),
        _ => Request::reschedule(*id, When::At(due)),
    });
    let changes = env.send(changes.collect());
    sent.extend(changes);
    scheduler.kill_9();
    scheduler.start_again();
    sent.extend(env.send((0..JOBS).filter(|n| n % 4 == 2).map(job).collect()));
    env.settle(sent);
    // Each node has some of the partitions.
    for master in cluster.masters() {
        let keys = env.block_on(async { Raw::connect(&master.url()).await.call(&["DBSIZE"]).await });
        assert!(keys.as_u64().unwrap() > 0, "{}", master.url());
    }
}
