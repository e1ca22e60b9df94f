//! What a scheduler needs of Redis before it begins, and how it says so.

use redeliver_testkit::LocalRedis;

use crate::env::{PATIENCE, Setup};
use crate::index::own_redis::Raw;
use crate::oracle::Wanted;
use crate::requests::Request;

#[test]
fn a_redis_that_may_evict_is_refused_with_the_setting_that_helps() {
    let redis = LocalRedis::start().unwrap();
    let env = Setup::new("evicts").redis(redis.url()).create();
    env.block_on(async {
        let raw = Raw::connect(&redis.url()).await;
        raw.call(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
        raw.call(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"])
            .await;
    });
    let mut scheduler = env.spawn("a");
    let status = scheduler.life().wait(PATIENCE);
    assert_eq!(status.code(), Some(1), "{}", scheduler.output());
    let output = scheduler.output();
    let said = output.lines().last().unwrap_or_default();
    for words in ["allkeys-lru", "maxmemory-policy noeviction"] {
        assert!(said.contains(words), "{output}");
    }
    // With the policy changed all is well.
    env.block_on(async {
        let raw = Raw::connect(&redis.url()).await;
        raw.call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
            .await;
    });
    scheduler.start_again();
    scheduler.until_ready();
}

#[test]
fn a_redis_that_is_not_there_yet_is_waited_for_and_readiness_says_so() {
    let mut redis = LocalRedis::start().unwrap();
    redis.stop().unwrap();
    let env = Setup::new("patient").redis(redis.url()).create();
    let mut scheduler = env.spawn("a");
    scheduler.until_not_ready("the index is not up to date yet");
    let request = |n: u32| {
        let wanted = Wanted::new("mail", n.to_string()).idempotency_key(format!("{n}"));
        Request::protobuf(wanted).answer_to(n.to_string())
    };
    // What is asked meanwhile is decided later.
    let asked = env.ask((0..20).map(request).collect());
    redis.start_again().unwrap();
    scheduler.until_ready();
    assert!(scheduler.is_in_its_first_life());
    env.settle(asked);
    // One that goes while the scheduler runs is waited for too.
    redis.stop().unwrap();
    let again = env.ask(vec![request(20)]);
    scheduler.until_not_ready("the index does not answer");
    redis.start_again().unwrap();
    scheduler.until_ready();
    let mut watch = env.watch();
    watch.until_so_many_ended(20 + again.len());
    assert!(scheduler.is_in_its_first_life());
}

#[test]
fn a_redis_that_may_evict_from_now_on_is_not_used_until_it_may_no_more() {
    let redis = LocalRedis::start().unwrap();
    let env = Setup::new("evicts-later").redis(redis.url()).create();
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
    let asked = env.ask(vec![Request::protobuf(Wanted::new("mail", "1"))]);
    set_policy("noeviction");
    scheduler.until_ready();
    assert!(scheduler.is_in_its_first_life());
    env.settle(asked);
}
