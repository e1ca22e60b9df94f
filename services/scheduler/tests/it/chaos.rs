//! Kill tests: schedulers under load while they are killed, frozen, doubled and ended, while Redis is emptied,
//! restarted and put back to an older copy, and while a broker goes. After each the oracle must find every
//! request's outcome exactly once, at its place, not early and not altered, and every answer true; and each test
//! counts what it did, since a run that killed nothing proves nothing.
//!
//! | module | idea |
//! |---|---|
//! | [`load`] | requests of all kinds that keep coming until the chaos is over |
//!
//! Random choices follow a seed, which is printed; `REDELIVER_CHAOS_SEED` sets it.

mod load;

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fred::prelude::Value;
use redeliver_testkit::local_kafka::kafka_tool;
use redeliver_testkit::{LocalKafka, LocalRedis, ServiceProcess, eventually};

use crate::env::{PATIENCE, SchedulerEnv, Setup};
use crate::index::own_redis::Raw;
use load::{Load, under_load};

/// The shortest session timeout that the configuration allows.
const SESSION: Duration = Duration::from_secs(6);
const PARTITIONS: u32 = 4;

/// Little is held in memory, so that what the index says counts.
fn setup(name: &str) -> Setup {
    Setup::new(&format!("chaos-{name}"))
        .partitions(PARTITIONS)
        .set("kafka.session_timeout", &format!("{}s", SESSION.as_secs()))
        .set("scheduler.window", "500ms")
}

/// The seed of this run, printed.
fn random(test: &str) -> fastrand::Rng {
    let seed = std::env::var("REDELIVER_CHAOS_SEED").ok();
    let seed = seed.map_or_else(
        || fastrand::u64(..1_000_000_000),
        |text| text.parse().expect("REDELIVER_CHAOS_SEED is a number"),
    );
    println!("{test}: REDELIVER_CHAOS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Lets a random moment come.
fn let_pass(random: &mut fastrand::Rng, most_millis: u64) {
    thread::sleep(Duration::from_millis(random.u64(..most_millis)));
}

/// Leave to run a test: only two do at a time, since processes that get no processor look like dead ones.
pub(crate) struct Turn;

static RUNNING: Mutex<u32> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

impl Turn {
    pub(crate) fn wait() -> Self {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = ENDED
            .wait_while(running, |running| *running >= 2)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_one();
    }
}

fn call(redis: &LocalRedis, env: &SchedulerEnv, command: &[&str]) -> Value {
    env.block_on(async { Raw::connect(&redis.url()).await.call(command).await })
}

#[test]
fn nothing_is_lost_or_doubled_by_kills_at_random_moments() {
    const KILLS: u32 = 24;
    let _turn = Turn::wait();
    let mut random = random("kills");
    let env = setup("kills").create();
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, 300, |load, random| {
        for kill in 0..KILLS {
            // Three of four times it is at work, else it may just be starting.
            if kill % 2 == 0 || random.bool() {
                member.until_ready();
                load.until_more_ended(20);
                let_pass(random, 300);
            } else {
                let_pass(random, 1_500);
            }
            member.kill_9();
            member.start_again();
        }
        member.until_ready();
        load.until_more_ended(100);
    });
    done.settle();
    println!("{member}");
    assert_eq!(member.kills(), KILLS);
    assert!(member.kills_at_work() * 2 >= KILLS, "{member}");
    // That is what the stable name is for: without it each restart waits for the dead member's session.
    assert!(member.median_until_ready() < SESSION / 2, "{member}");
}

/// At each of these points a process dies: at the first time that it passes there, and at later ones, some of
/// them in the middle of bringing the index up to date or of many turns.
#[test]
fn nothing_is_lost_or_doubled_by_death_at_any_step_of_a_transaction() {
    const POINTS: [&str; 8] = [
        "begin", "produce", "offsets", "commit", "index", "claim", "replay", "clear",
    ];
    const TIMES: [u32; 3] = [1, 4, 30];
    // These are passed once per partition when a process starts.
    const OF_THE_START: [&str; 3] = ["claim", "replay", "clear"];
    let _turn = Turn::wait();
    let mut random = random("points");
    let redis = LocalRedis::start().unwrap();
    let env = setup("points").redis(redis.url()).create();
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, 200, |load, _| {
        member.kill_9();
        for time in TIMES {
            for point in POINTS {
                if OF_THE_START.contains(&point) && time > PARTITIONS {
                    continue;
                }
                if point == "clear" {
                    // Else there is no need to begin anew.
                    call(&redis, &env, &["FLUSHALL"]);
                }
                member.start_again_with(&[("REDELIVER_FAULT", &format!("{point}:{time}"))]);
                member.until_crashed();
                let said = format!("dying here, as the environment asks name=\"{point}\" count={time}");
                assert!(member.output().contains(&said), "{}", member.output());
            }
        }
        member.start_again();
        member.until_ready();
        load.until_more_ended(100);
    });
    done.settle();
    println!("{member}");
    assert_eq!(member.crashes(), 21);
}

/// Waits until both own some partitions, all of them together, none of them twice.
#[track_caller]
fn until_shared(pair: &mut [ServiceProcess<'_>; 2]) {
    eventually("both schedulers own partitions", PATIENCE, || {
        let owned = pair.each_mut().map(ServiceProcess::owned);
        if owned.iter().all(|owned| *owned > 0) && owned.iter().sum::<u64>() == u64::from(PARTITIONS) {
            Ok(())
        } else {
            Err(format!("{owned:?} of {PARTITIONS}"))
        }
    });
}

/// Of two schedulers one is frozen for longer than its session, while the other takes over.
fn frozen_schedulers_come_back(name: &str, static_membership: &str) {
    let _turn = Turn::wait();
    let mut random = random(name);
    let env = setup(name)
        .set("kafka.static_membership", static_membership)
        .create();
    let mut pair = ["a", "b"].map(|instance| env.start(instance));
    let done = under_load(&env, &mut random, 150, |load, random| {
        for round in 0..2 {
            until_shared(&mut pair);
            let_pass(random, 500);
            pair[round % 2].freeze();
            pair[(round + 1) % 2].until_owning(u64::from(PARTITIONS));
            load.until_more_ended(100);
            pair[round % 2].thaw();
        }
        until_shared(&mut pair);
        load.until_more_ended(50);
    });
    done.settle();
    for member in &pair {
        println!("{member}");
        assert_eq!(member.freezes(), 1);
    }
}

#[test]
fn a_frozen_scheduler_that_comes_back_writes_nothing_of_what_another_has_taken_over() {
    frozen_schedulers_come_back("frozen", "true");
}

#[test]
fn a_frozen_scheduler_without_static_membership_writes_nothing_of_what_another_has_taken_over() {
    frozen_schedulers_come_back("frozen-dynamic", "false");
}

#[test]
fn of_two_schedulers_one_leaves_and_another_is_killed() {
    let _turn = Turn::wait();
    let mut random = random("leave");
    // Nobody waits for the one that left, so it must say goodbye.
    let env = setup("leave").set("kafka.static_membership", "false").create();
    let mut pair = ["a", "b"].map(|instance| env.start(instance));
    let done = under_load(&env, &mut random, 200, |load, random| {
        until_shared(&mut pair);
        let_pass(random, 500);
        pair[0].end_in_order();
        pair[1].until_owning(u64::from(PARTITIONS));
        load.until_more_ended(50);
        pair[0].start_again();
        pair[0].until_ready();
        until_shared(&mut pair);
        let_pass(random, 500);
        pair[1].kill_9();
        pair[0].until_owning(u64::from(PARTITIONS));
        load.until_more_ended(100);
    });
    done.settle();
    assert_eq!((pair[0].ends(), pair[1].kills()), (1, 1));
}

fn some_time_later(load: &Load<'_>, random: &mut fastrand::Rng) {
    load.until_more_ended(40);
    let_pass(random, 300);
}

#[test]
fn nothing_is_lost_or_doubled_when_redis_is_emptied() {
    let _turn = Turn::wait();
    let mut random = random("flushed");
    let redis = LocalRedis::start().unwrap();
    let env = setup("flushed").redis(redis.url()).create();
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, 300, |load, random| {
        for round in 0..8 {
            some_time_later(load, random);
            call(&redis, &env, &["FLUSHALL"]);
            match round {
                // In the middle of bringing it up to date again.
                2 | 5 => {
                    let_pass(random, 20);
                    call(&redis, &env, &["FLUSHALL"]);
                }
                3 | 6 => {
                    let_pass(random, 20);
                    member.kill_9();
                    member.start_again();
                    member.until_ready();
                }
                _ => drop(call(&redis, &env, &["SCRIPT", "FLUSH"])),
            }
        }
        // Only parts of it.
        for shard in 0..PARTITIONS {
            for part in ["meta", "due", "ended", "buckets", "job:"] {
                some_time_later(load, random);
                let keys = format!("{}:{{{shard}}}:{part}*", env.name);
                let keys = call(&redis, &env, &["KEYS", &keys]).into_array();
                let keys: Vec<_> = keys.into_iter().filter_map(Value::into_string).collect();
                if let Some(key) = random.choice(&keys) {
                    call(&redis, &env, &["DEL", key]);
                }
            }
        }
        some_time_later(load, random);
    });
    done.settle();
    assert_eq!(member.kills(), 2);
}

#[test]
fn nothing_is_lost_or_doubled_when_redis_restarts_or_goes_back_to_an_older_copy() {
    let _turn = Turn::wait();
    let mut random = random("dump");
    let mut redis = LocalRedis::start().unwrap();
    let env = setup("dump").redis(redis.url()).create();
    let mut member = env.start("a");
    let done = under_load(&env, &mut random, 300, |load, random| {
        // As long as there is no copy, each new server begins with nothing.
        some_time_later(load, random);
        redis.restart().unwrap();
        some_time_later(load, random);
        redis.kill_9();
        redis.start_again().unwrap();
        for round in 0..6 {
            some_time_later(load, random);
            // From then on there is a copy, with which each new server begins.
            call(&redis, &env, &["SAVE"]);
            if round % 2 == 1 {
                some_time_later(load, random);
            }
            if round % 3 == 2 {
                member.kill_9();
            }
            if round % 2 == 0 {
                redis.stop().unwrap();
                let_pass(random, 400);
            } else {
                redis.kill_9();
            }
            redis.start_again().unwrap();
            if round % 3 == 2 {
                member.start_again();
                member.until_ready();
            }
        }
        some_time_later(load, random);
    });
    done.settle();
    assert_eq!(member.kills(), 2);
}

#[test]
fn a_scheduler_waits_for_a_redis_that_does_not_answer_and_dispatches_what_it_holds() {
    let _turn = Turn::wait();
    let mut random = random("frozen-redis");
    let mut redis = LocalRedis::start().unwrap();
    let env = setup("frozen-redis")
        .redis(redis.url())
        .set("scheduler.window", "10s")
        .create();
    let member = env.start("a");
    let done = under_load(&env, &mut random, 150, |load, random| {
        for round in 0..3 {
            load.until_more_ended(100);
            let_pass(random, 300);
            if round == 1 {
                redis.stop().unwrap();
            } else {
                redis.process().stop();
            }
            // All of these are in memory.
            load.until_more_ended(100);
            if round == 1 {
                redis.start_again().unwrap();
            } else {
                redis.process().cont();
            }
        }
        load.until_more_ended(100);
    });
    done.settle();
    assert!(member.is_in_its_first_life(), "{member}");
}

#[test]
#[ignore = "long"]
fn schedulers_go_on_when_one_of_two_brokers_restarts_or_is_killed() {
    let _turn = Turn::wait();
    let mut random = random("brokers");
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let env = setup("brokers")
        .brokers(format!("{},{}", first.brokers(), second.brokers()))
        .set("kafka.topics.replication", "2")
        .set("kafka.transaction_timeout", "5s")
        .create();
    let member = env.start("a");
    let done = under_load(&env, &mut random, 150, |load, random| {
        for is_killed in [false, true] {
            eventually("the second broker leads its part", PATIENCE, || {
                let described = describe(&first);
                if described.contains("Leader: 2") {
                    Ok(())
                } else {
                    Err(described)
                }
            });
            load.until_more_ended(150);
            let_pass(random, 1_000);
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
    assert!(member.is_in_its_first_life(), "{member}");
}

/// Where the partitions of all topics are led, as Kafka's own tool says.
fn describe(kafka: &LocalKafka) -> String {
    let mut tool = kafka_tool("org.apache.kafka.tools.TopicCommand").unwrap();
    tool.args(["--bootstrap-server", &kafka.brokers(), "--describe"]);
    String::from_utf8(tool.output().unwrap().stdout).unwrap()
}
