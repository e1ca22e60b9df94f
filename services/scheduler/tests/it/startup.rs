//! Redis at startup: a policy that may evict keys is refused, and an unavailable Redis is waited for.

use redeliver_testkit::{LocalRedis, ServiceProcess, eventually};

use crate::env::{DEADLINE, SchedulerEnv};
use crate::index::own_redis::Raw;
use crate::oracle::JobSpec;
use crate::requests::Request;

#[test]
fn a_redis_that_may_evict_keys_is_refused_with_the_right_setting() {
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("evicts").redis(redis.url()));
    env.block_on(async {
        let raw = Raw::connect(&redis.url()).await;
        raw.call(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
        raw.call(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"])
            .await;
    });
    let mut scheduler = env.spawn("a");
    let status = scheduler.wait(DEADLINE);
    assert_eq!(status.code(), Some(1), "{}", scheduler.output());
    let output = scheduler.output();
    let said = output.lines().last().unwrap_or_default();
    for words in ["allkeys-lru", "maxmemory-policy noeviction"] {
        assert!(said.contains(words), "{output}");
    }
    // It starts once the policy is changed.
    env.block_on(async {
        let raw = Raw::connect(&redis.url()).await;
        raw.call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
            .await;
    });
    scheduler.start_again();
    scheduler.until_ready();
}

#[test]
fn a_scheduler_waits_for_redis_and_readiness_names_the_reason() {
    let mut redis = LocalRedis::start().unwrap();
    redis.stop().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("patient").redis(redis.url()));
    let mut scheduler = env.spawn("a");
    scheduler.until_not_ready("index not up to date");
    let until_redis_is = |scheduler: &mut ServiceProcess, up: u64| {
        eventually("the metric is updated", DEADLINE, || {
            let value = scheduler.metric("redeliver_scheduler_redis_up");
            if value == up { Ok(()) } else { Err(value) }
        });
    };
    until_redis_is(&mut scheduler, 0);
    let request = |n: u32| {
        let spec = JobSpec::new("mail", n.to_string()).idempotency_key(format!("{n}"));
        Request::protobuf(spec).answer_to(n.to_string())
    };
    // Requests that arrive meanwhile are decided later.
    let sent = env.send((0..20).map(request).collect());
    redis.start_again().unwrap();
    scheduler.until_ready();
    until_redis_is(&mut scheduler, 1);
    assert!(scheduler.has_never_ended());
    env.settle(sent);
    // A Redis that stops while the scheduler runs is waited for too.
    redis.stop().unwrap();
    let again = env.send(vec![request(20)]);
    scheduler.until_not_ready("index unavailable");
    until_redis_is(&mut scheduler, 0);
    redis.start_again().unwrap();
    scheduler.until_ready();
    let mut watch = env.watch();
    watch.until_jobs_ended(20 + again.len());
    assert!(scheduler.has_never_ended());
}

#[test]
fn a_redis_that_is_reconfigured_to_evict_keys_is_not_used_until_it_is_fixed() {
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("evicts-later").redis(redis.url()));
    let mut scheduler = env.start("a");
    let set_policy = |policy: &str| {
        env.block_on(async {
            let raw = Raw::connect(&redis.url()).await;
            raw.call(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
            raw.call(&["CONFIG", "SET", "maxmemory-policy", policy]).await;
        });
    };
    set_policy("allkeys-lru");
    scheduler.until_not_ready("allkeys-lru");
    let sent = env.send(vec![Request::protobuf(JobSpec::new("mail", "1"))]);
    set_policy("noeviction");
    scheduler.until_ready();
    assert!(scheduler.has_never_ended());
    env.settle(sent);
}
