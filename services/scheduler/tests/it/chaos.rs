//! Chaos tests: schedulers under load while they are killed, frozen, duplicated and shut down, while Redis is full, emptied,
//! restarted and restored from an older copy, while a topic of an application is deleted, and while a broker fails. After each test, the oracle must find the outcome
//! of every request exactly once, not early and unchanged, and every answer true. Each test counts what it did, since a
//! run that killed nothing proves nothing.
//!
//! Random choices follow a seed, which is printed; `REDELIVER_CHAOS_SEED` sets it.

mod load;

use std::time::Duration;

use fred::prelude::Value;
use redeliver_testkit::{
    ChaosPermit, EnvBuilder, LocalKafka, LocalRedis, LocalRedisCluster, chaos_random, chaos_with_permit,
    sleep_up_to, until_in_sync, until_second_broker_leads, until_shared,
};

use crate::env::{APPS, SchedulerEnv};
use crate::index::own_redis::{self, Raw};
use load::{Load, Volume, under_load, under_watched_load};

/// The shortest session timeout that the configuration allows.
const SESSION: Duration = Duration::from_secs(6);
const PARTITIONS: u32 = 4;

/// A short window, so that most jobs come from the index.
fn setup(name: &str) -> EnvBuilder {
    SchedulerEnv::builder(&format!("chaos-{name}"))
        .partitions(PARTITIONS)
        .set("kafka.session_timeout", &format!("{}s", SESSION.as_secs()))
        .set("scheduler.window", "500ms")
}

fn call(redis: &LocalRedis, env: &SchedulerEnv, command: &[&str]) -> Value {
    env.block_on(async { Raw::connect(&redis.url()).await.call(command).await })
}

#[test]
fn kills_lose_and_duplicate_nothing() {
    kill_at_random_moments(setup("kills"), 4, 300.into());
}

#[test]
fn large_jobs_survive_kills() {
    // With a single shard, what has gathered after a kill is more than the index gets at once.
    kill_at_random_moments(setup("large-kills").partitions(1), 4, Volume::LARGE);
}

#[test]
#[ignore = "long"]
fn many_kills_lose_and_duplicate_nothing() {
    kill_at_random_moments(setup("kills"), 24, 300.into());
}

fn kill_at_random_moments(setup: EnvBuilder, kills: u32, volume: Volume) {
    let (_permit, mut random) = chaos_with_permit("kills");
    // Much longer than a restart takes, on any machine.
    let session = Duration::from_secs(60);
    let setup = setup.set("kafka.session_timeout", &format!("{}s", session.as_secs()));
    let env = SchedulerEnv::new(setup);
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, volume, |load, random| {
        for kill in 0..kills {
            // Three out of four kills hit a scheduler that is working, the others one that may be starting.
            if kill % 2 == 0 || random.bool() {
                member.until_ready();
                load.until_more_ended(20);
                sleep_up_to(random, Duration::from_millis(300));
            } else {
                sleep_up_to(random, Duration::from_millis(1_500));
            }
            member.kill_9();
            member.start_again();
        }
        member.until_ready();
        load.until_more_ended(100);
    });
    done.settle();
    println!("{member}");
    assert_eq!(member.kills(), kills);
    assert!(member.kills_when_ready() * 2 >= kills, "{member}");
    // Static membership exists for this: without it, each restart would wait for the session of the dead member.
    assert!(member.median_restart() < session / 2, "{member}");
}

#[test]
#[ignore = "long"]
fn evicting_index_loses_and_duplicates_nothing() {
    let (_permit, mut random) = chaos_with_permit("evicted");
    let redis = LocalRedis::start().unwrap();
    let builder = setup("evicted").redis(redis.url());
    let mut env = SchedulerEnv::new(builder.set("scheduler.max_ended", "100"));
    env.topics.max_ended = Some(100);
    let mut member = env.start("a");
    let has_evicted = |shard: u32| {
        let key = own_redis::key(env.test.name(), shard, "evicted");
        call(&redis, &env, &["EXISTS", &key]).as_i64() == Some(1)
    };
    let done = under_load(&env, &mut random, 400, |load, _| {
        for is_emptied in [false, true, false, true] {
            member.until_ready();
            load.until_more_ended(1_000);
            if is_emptied {
                call(&redis, &env, &["FLUSHALL"]);
            }
            member.kill_9();
            member.start_again();
        }
        member.until_ready();
        // Jobs that have just ended are not evicted, so this takes a minute.
        while !(0..PARTITIONS).all(has_evicted) {
            load.until_more_ended(100);
        }
        load.until_more_ended(1_000);
    });
    done.settle();
}

/// A scheduler crashes at each fault point: when it is first reached, or later, for example while the index is rebuilt.
#[test]
fn crashes_at_fault_points_lose_nothing() {
    let mut random = chaos_random("points");
    let faults = FAULT_POINTS.map(|point| (point, TIMES[random.usize(..TIMES.len())]));
    crash_at(setup("points"), 200.into(), &mut random, &faults);
}

#[test]
#[ignore = "long"]
fn large_jobs_survive_crashes() {
    let mut random = chaos_random("large-points");
    let faults: Vec<_> = TIMES
        .into_iter()
        .flat_map(|time| FAULT_POINTS.map(|point| (point, time)))
        .filter(|(point, time)| !OF_THE_START.contains(point) || *time == 1)
        .collect();
    crash_at(
        setup("large-points").partitions(1),
        Volume::LARGE,
        &mut random,
        &faults,
    );
}

const FAULT_POINTS: [&str; 8] = [
    "begin", "produce", "offsets", "commit", "index", "claim", "replay", "clear",
];
const TIMES: [u32; 2] = [1, 12];
/// A process reaches these once per partition, when it starts.
const OF_THE_START: [&str; 3] = ["claim", "replay", "clear"];

/// A scheduler crashes when it reaches each of these points for so many times.
fn crash_at(setup: EnvBuilder, volume: Volume, random: &mut fastrand::Rng, faults: &[(&str, u32)]) {
    let _permit = ChaosPermit::acquire();
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(setup.redis(redis.url()));
    let mut member = env.start("a");
    let done = under_load(&env, random, volume, |load, _| {
        member.kill_9();
        for (point, time) in faults {
            let time = if OF_THE_START.contains(point) { 1 } else { *time };
            if *point == "clear" {
                // The index is cleared only if it has to be rebuilt.
                call(&redis, &env, &["FLUSHALL"]);
            }
            member.start_again_with(&[("REDELIVER_FAULT", &format!("{point}:{time}"))]);
            member.until_crashed();
            let logged = format!("fault injected: aborting name=\"{point}\" count={time}");
            assert!(member.output().contains(&logged), "{}", member.output());
        }
        member.start_again();
        member.until_ready();
        load.until_more_ended(100);
    });
    done.settle();
    println!("{member}");
    assert_eq!(usize::try_from(member.crashes()).unwrap(), faults.len());
}

/// One of two schedulers is frozen for longer than its session, and the other one takes over.
fn frozen_schedulers_resume(name: &str, static_membership: &str) {
    let (_permit, mut random) = chaos_with_permit(name);
    let env = SchedulerEnv::new(setup(name).set("kafka.static_membership", static_membership));
    let mut pair = ["a", "b"].map(|instance| env.start(instance));
    let done = under_load(&env, &mut random, 150, |load, random| {
        for round in 0..2 {
            until_shared(&mut pair, PARTITIONS.into());
            sleep_up_to(random, Duration::from_millis(500));
            pair[round % 2].freeze();
            pair[(round + 1) % 2].until_owning(PARTITIONS.into());
            load.until_more_ended(100);
            pair[round % 2].thaw();
        }
        until_shared(&mut pair, PARTITIONS.into());
        load.until_more_ended(50);
    });
    done.settle();
    for member in &pair {
        println!("{member}");
        assert_eq!(member.freezes(), 1);
    }
}

#[test]
#[ignore = "long"]
fn frozen_scheduler_is_fenced() {
    frozen_schedulers_resume("frozen", "true");
    frozen_schedulers_resume("frozen-dynamic", "false");
}

#[test]
#[ignore = "long"]
fn other_scheduler_takes_over() {
    let (_permit, mut random) = chaos_with_permit("leave");
    // Without static membership, a member that shuts down must leave the group itself.
    let env = SchedulerEnv::new(setup("leave").set("kafka.static_membership", "false"));
    let mut pair = ["a", "b"].map(|instance| env.start(instance));
    let done = under_load(&env, &mut random, 200, |load, random| {
        until_shared(&mut pair, PARTITIONS.into());
        sleep_up_to(random, Duration::from_millis(500));
        pair[0].shut_down();
        pair[1].until_owning(PARTITIONS.into());
        load.until_more_ended(50);
        pair[0].start_again();
        pair[0].until_ready();
        until_shared(&mut pair, PARTITIONS.into());
        sleep_up_to(random, Duration::from_millis(500));
        pair[1].kill_9();
        pair[0].until_owning(PARTITIONS.into());
        load.until_more_ended(100);
    });
    done.settle();
    assert_eq!((pair[0].shutdowns(), pair[1].kills()), (1, 1));
}

fn until_progress(load: &Load<'_>, random: &mut fastrand::Rng) {
    load.until_more_ended(40);
    sleep_up_to(random, Duration::from_millis(300));
}

#[test]
fn emptied_redis_loses_and_duplicates_nothing() {
    empty_redis(setup("flushed"), 300.into());
}

#[test]
#[ignore = "long"]
fn large_jobs_survive_emptied_redis() {
    empty_redis(setup("large-flushed"), Volume::LARGE);
}

fn empty_redis(setup: EnvBuilder, volume: Volume) {
    let (_permit, mut random) = chaos_with_permit("flushed");
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(setup.redis(redis.url()));
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, volume, |load, random| {
        for round in 0..4 {
            until_progress(load, random);
            call(&redis, &env, &["FLUSHALL"]);
            match round {
                // While the index is being rebuilt.
                1 => {
                    sleep_up_to(random, Duration::from_millis(20));
                    call(&redis, &env, &["FLUSHALL"]);
                }
                2 => {
                    sleep_up_to(random, Duration::from_millis(20));
                    member.kill_and_restart();
                }
                _ => drop(call(&redis, &env, &["SCRIPT", "FLUSH"])),
            }
        }
        // Delete single keys only.
        for part in ["meta", "flows", "sizes", "due:", "ended", "buckets", "job:"] {
            until_progress(load, random);
            let shard = random.u32(..PARTITIONS);
            let keys = own_redis::key(env.test.name(), shard, &format!("{part}*"));
            let keys = call(&redis, &env, &["KEYS", &keys]).into_array();
            let keys: Vec<_> = keys.into_iter().filter_map(Value::into_string).collect();
            if let Some(key) = random.choice(&keys) {
                call(&redis, &env, &["DEL", key]);
            }
        }
        until_progress(load, random);
    });
    done.settle();
    assert_eq!(member.kills(), 1);
}

#[test]
#[ignore = "long"]
fn restored_redis_loses_and_duplicates_nothing() {
    let (_permit, mut random) = chaos_with_permit("dump");
    let mut redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(setup("dump").redis(redis.url()));
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, 300, |load, random| {
        // Without a copy, each new server starts empty.
        until_progress(load, random);
        redis.restart().unwrap();
        until_progress(load, random);
        redis.kill_9();
        redis.start_again().unwrap();
        for round in 0..6 {
            until_progress(load, random);
            // From now on, each new server starts with a copy.
            call(&redis, &env, &["SAVE"]);
            if round % 2 == 1 {
                until_progress(load, random);
            }
            if round % 3 == 2 {
                member.kill_9();
            }
            if round % 2 == 0 {
                redis.stop().unwrap();
                sleep_up_to(random, Duration::from_millis(400));
            } else {
                redis.kill_9();
            }
            redis.start_again().unwrap();
            if round % 3 == 2 {
                member.start_again();
                member.until_ready();
            }
        }
        until_progress(load, random);
    });
    done.settle();
    assert_eq!(member.kills(), 2);
}

/// Both have default settings, apart from what tells them apart on one Kafka.
#[test]
#[ignore = "long"]
fn two_installations_share_a_redis() {
    let (_permit, mut random) = chaos_with_permit("two");
    let mut redis = LocalRedis::start().unwrap();
    let [production, staging] = ["production", "staging"].map(|name| {
        let setup = setup(name).redis(redis.url());
        let setup = setup.set("kafka.id_prefix", "{name}-");
        SchedulerEnv::new(setup.set("redis.prefix", "null"))
    });
    let mut members = [production.start("a"), staging.start("a")];
    let done = under_load(&production, &mut random, 150, |load, random| {
        let done = under_load(&staging, random, Volume::LARGE, |other, random| {
            for round in 0..6 {
                until_progress(load, random);
                until_progress(other, random);
                match round % 3 {
                    0 => drop(call(&redis, &production, &["FLUSHALL"])),
                    1 => {
                        redis.kill_9();
                        redis.start_again().unwrap();
                    }
                    _ => {
                        let member = &mut members[round / 3];
                        member.kill_and_restart();
                    }
                }
            }
            until_progress(load, random);
            load.until_more_ended(100);
        });
        done.settle();
    });
    done.settle();
    for member in &members {
        assert_eq!(member.kills(), 1);
    }
}

#[test]
#[ignore = "long"]
fn full_redis_loses_and_duplicates_nothing() {
    const WINDOW: Duration = Duration::from_millis(500);
    let (_permit, mut random) = chaos_with_permit("full");
    let redis = LocalRedis::start().unwrap();
    let mut env = SchedulerEnv::new(setup("full").redis(redis.url()));
    env.topics.window_when_full = Some(WINDOW);
    let mut member = env.start("a");
    let set_limit = |limit: &str| drop(call(&redis, &env, &["CONFIG", "SET", "maxmemory", limit]));
    let done = under_load(&env, &mut random, 300, |load, random| {
        for round in 0..6 {
            until_progress(load, random);
            // Below what the server uses without any data: it refuses each write.
            set_limit("100kb");
            load.until_more_ended(300);
            match round {
                1 | 4 => {
                    member.kill_and_restart();
                    load.until_more_ended(100);
                }
                // An index that is lost can be rebuilt only with memory.
                2 => drop(call(&redis, &env, &["FLUSHALL"])),
                _ => {}
            }
            set_limit("0");
            // The index takes jobs again that are not due within the window.
            member.until_readyz("no job is rejected", |status, body| {
                status == 200 && !body.contains("rejecting")
            });
            load.until_more_ended(300);
        }
    });
    let report = done.settle();
    assert!(report.without_room > 100, "{report}");
    assert_eq!(member.kills(), 2);
}

#[test]
#[ignore = "long"]
fn recreated_topic_loses_nothing_else() {
    const GONE: &str = APPS[2];
    let (_permit, mut random) = chaos_with_permit("deleted-topic");
    let env = SchedulerEnv::new(setup("deleted-topic"));
    let mut member = env.start("a");
    let watch = env.watch_deleting(GONE);
    let done = under_watched_load(watch, &mut random, 200, |load, random| {
        for round in 0..4 {
            until_progress(load, random);
            load.watch().delete_topic(GONE);
            // Those of the other applications.
            load.until_more_ended(200);
            member.until_metric("redeliver_scheduler_unavailable_topic_jobs", |waiting| {
                waiting > 0
            });
            load.watch().deletion_is_noticed();
            let is_restarted = round % 2 == 1;
            if is_restarted {
                member.kill_9();
            }
            load.watch().create_topic(GONE);
            if is_restarted {
                member.start_again();
                member.until_ready();
            }
            load.until_more_ended(300);
        }
    });
    let report = done.settle();
    assert!(report.lateness[GONE].len() > 100, "{report}");
    assert_eq!(member.kills(), 2);
}

#[test]
#[ignore = "long"]
fn redis_cluster_failover_loses_nothing() {
    let (_permit, mut random) = chaos_with_permit("failover");
    let mut cluster = LocalRedisCluster::start_with_replicas().unwrap();
    let env = SchedulerEnv::new(setup("failover").redis(cluster.url()));
    let member = env.start("a");
    let done = under_load(&env, &mut random, 150, |load, random| {
        for round in 0..6 {
            until_progress(load, random);
            cluster.fail_over(round % 3).unwrap();
            load.until_more_ended(100);
        }
        for shard in 0..PARTITIONS {
            until_progress(load, random);
            let key = own_redis::key(env.test.name(), shard, "meta");
            let between = || sleep_up_to(random, Duration::from_millis(50));
            cluster.move_slot_of(&key, between).unwrap();
            load.until_more_ended(100);
        }
    });
    done.settle();
    assert!(member.has_never_ended(), "{member}");
}

#[test]
fn jobs_in_memory_survive_frozen_redis() {
    let (_permit, mut random) = chaos_with_permit("frozen-redis");
    let mut redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(
        setup("frozen-redis")
            .redis(redis.url())
            .set("scheduler.window", "10s"),
    );
    let member = env.start("a");
    let done = under_load(&env, &mut random, 150, |load, random| {
        for is_stopped in [false, true] {
            load.until_more_ended(100);
            sleep_up_to(random, Duration::from_millis(300));
            if is_stopped {
                redis.stop().unwrap();
            } else {
                redis.process().stop();
            }
            // All of these jobs are in memory.
            load.until_more_ended(100);
            if is_stopped {
                redis.start_again().unwrap();
            } else {
                redis.process().cont();
            }
        }
        load.until_more_ended(100);
    });
    done.settle();
    assert!(member.has_never_ended(), "{member}");
}

#[test]
#[ignore = "long"]
fn schedulers_survive_broker_restarts() {
    let (_permit, mut random) = chaos_with_permit("brokers");
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let env = SchedulerEnv::new(
        setup("brokers")
            .brokers(format!("{},{}", first.brokers(), second.brokers()))
            .set("kafka.topics.replication", "2")
            .set("kafka.transaction_timeout", "5s"),
    );
    let member = env.start("a");
    let done = under_load(&env, &mut random, 150, |load, random| {
        for is_killed in [false, true] {
            until_second_broker_leads(&first);
            load.until_more_ended(150);
            sleep_up_to(random, Duration::from_millis(1_000));
            if is_killed {
                second.kill_9();
            } else {
                second.stop().unwrap();
            }
            load.until_more_ended(150);
            second.start_again().unwrap();
        }
        load.until_more_ended(150);
    });
    done.settle();
    assert!(member.has_never_ended(), "{member}");
}

#[test]
#[ignore = "long"]
fn broker_kills_lose_and_duplicate_nothing() {
    const REPLICAS: usize = 3;
    let (_permit, mut random) = chaos_with_permit("three-brokers");
    let mut brokers = LocalKafka::start_three().unwrap();
    let env = SchedulerEnv::new(
        setup("three-brokers")
            .brokers(brokers.each_ref().map(LocalKafka::brokers).join(","))
            .set("kafka.topics.replication", &REPLICAS.to_string())
            .set("kafka.transaction_timeout", "5s"),
    );
    let member = env.start("a");
    let done = under_load(&env, &mut random, 100, |load, random| {
        for (id, broker) in (1..).zip(&mut brokers) {
            until_in_sync(broker, REPLICAS, id);
            load.until_more_ended(100);
            sleep_up_to(random, Duration::from_millis(1_000));
            broker.kill_9();
            // They end only if the other two brokers do their work.
            load.until_more_ended(150);
            broker.start_again().unwrap();
        }
        until_in_sync(&brokers[0], REPLICAS, 3);
        load.until_more_ended(150);
    });
    done.settle();
    assert!(member.has_never_ended(), "{member}");
}
