//! Two installations that share a Redis.

use redeliver_testkit::LocalRedis;

use crate::env::{DEADLINE, SchedulerEnv};
use crate::index::own_redis::{Raw, key};
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

const PARTITIONS: u32 = 2;

/// An installation with its own prefix of ids, and with this prefix of keys in Redis.
fn installation(name: &str, redis: &LocalRedis, prefix: &str) -> SchedulerEnv {
    let builder = SchedulerEnv::builder(name)
        .redis(redis.url())
        .partitions(PARTITIONS)
        // A short window, so that jobs come from the index.
        .set("scheduler.window", "500ms");
    let builder = builder.set("kafka.id_prefix", "{name}-");
    SchedulerEnv::new(builder.set("redis.prefix", prefix))
}

#[test]
fn default_installations_share_a_redis() {
    let redis = LocalRedis::start().unwrap();
    let [production, staging] = ["production", "staging"].map(|name| installation(name, &redis, "null"));
    let schedulers = [production.start("a"), staging.start("a")];
    let due = in_millis(5_000);
    let send = |env: &SchedulerEnv| {
        let job = |n: usize| Request::protobuf(JobSpec::new("mail", n.to_string()).at(due));
        env.send((0..50).map(job).collect())
    };
    let sent = [send(&production), send(&staging)];
    for (env, sent) in [&production, &staging].into_iter().zip(sent) {
        let report = env.settle(sent);
        assert_eq!(report.dispatched, 52, "{report}");
    }
    for scheduler in &schedulers {
        let output = scheduler.output();
        assert!(
            !output.contains("rebuilding") && !output.contains("replaying"),
            "{output}"
        );
    }
}

#[test]
fn foreign_prefix_stops_the_start() {
    let redis = LocalRedis::start().unwrap();
    let [production, staging] = ["production", "staging"].map(|name| installation(name, &redis, "shared"));
    let _scheduler = production.start("a");
    let sent = production.send(vec![Request::protobuf(JobSpec::new("mail", "1").after(1_000))]);
    let mut other = staging.spawn("a");
    let status = other.wait(DEADLINE);
    let output = other.output();
    assert_eq!(status.code(), Some(1), "{output}");
    let said = output.lines().last().unwrap_or_default();
    let state = production.topics.state.as_ref();
    assert!(said.contains("redis.prefix") && said.contains(state), "{output}");
    production.settle(sent);
}

#[test]
fn taken_prefix_mixes_no_jobs() {
    let redis = LocalRedis::start().unwrap();
    let [production, staging] = ["production", "staging"].map(|name| installation(name, &redis, "shared"));
    // As after 30 s in which no scheduler has used the index.
    let forget_user = || {
        production.block_on(async {
            let raw = Raw::connect(&redis.url()).await;
            for shard in 0..PARTITIONS {
                raw.call(&["HDEL", &key("shared", shard, "meta"), "seen"]).await;
            }
        });
    };
    let due = in_millis(5_000);
    let send = |env: &SchedulerEnv, keys: std::ops::Range<usize>| {
        let job = |key: usize| {
            JobSpec::new("mail", key.to_string())
                .at(due)
                .idempotency_key(key.to_string())
        };
        env.send(keys.map(job).map(Request::protobuf).collect())
    };
    let mut first = production.start("a");
    let mut of_production = send(&production, 0..50);
    production.watch().until_known(50);
    first.freeze();
    forget_user();
    let mut second = staging.start("a");
    let of_staging = send(&staging, 25..100);
    staging.watch().until_known(75);
    // The other installation has these keys, too.
    of_production.extend(send(&production, 50..100));
    first.thaw();
    first.until_not_ready("redis.prefix");
    let report = staging.settle(of_staging);
    assert_eq!(report.dispatched, 77, "{report}");
    second.shut_down();
    forget_user();
    let report = production.settle(of_production);
    assert_eq!(report.dispatched, 102, "{report}");
}
