//! A state topic with records that this version does not understand: a newer scheduler wrote them, or they are damaged.
//! Nothing of it is skipped: their shard stands still and says why, and the others go on.

use bytes::Bytes;
use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_testkit::{eventually, redis_url};

use crate::env::{PATIENCE, SchedulerEnv, Setup, id};
use crate::index::own_redis::Raw;
use crate::oracle::{Asked, Wanted};
use crate::rebuild::far;
use crate::requests::{Request, in_millis};

const NEWER: &str = "a newer version of the scheduler is needed";

fn state_record(env: &SchedulerEnv, key: &str, value: Option<Bytes>) -> Output {
    Output {
        topic: env.topics.state.clone(),
        partition: Some(0),
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value,
        headers: Headers::new(),
    }
}

fn job(text: &str, shard: i32, due: Timestamp) -> Request {
    Request::protobuf(Wanted::new("mail", text.to_owned()).at(due)).partition(shard)
}

/// How often each job was dispatched.
fn dispatched(env: &SchedulerEnv) -> Vec<JobId> {
    let mut watch = env.watch();
    watch.look();
    let ids = watch.seen.apps.iter().map(|record| {
        let id = record.headers.last(redeliver_core::headers::JOB_ID).unwrap();
        std::str::from_utf8(id).unwrap().parse().unwrap()
    });
    let mut ids: Vec<JobId> = ids.collect();
    ids.sort_unstable();
    ids
}

#[track_caller]
fn until_dispatched(env: &SchedulerEnv, expected: impl IntoIterator<Item = JobId>) {
    let mut expected: Vec<JobId> = expected.into_iter().collect();
    expected.sort_unstable();
    eventually("the jobs are dispatched", PATIENCE, || match dispatched(env) {
        found if found.len() >= expected.len() => {
            assert_eq!(found, expected);
            Ok(())
        }
        found => Err(format!("{} of {}", found.len(), expected.len())),
    });
}

struct Redis<'a> {
    env: &'a SchedulerEnv,
    raw: Raw,
}

impl<'a> Redis<'a> {
    fn of(env: &'a SchedulerEnv) -> Self {
        let raw = env.block_on(Raw::connect(&redis_url()));
        Self { env, raw }
    }

    fn call(&self, command: &str, key: &str, rest: &[&str]) -> Option<i64> {
        let key = format!("{}:{{0}}:{key}", self.env.name);
        let mut words = vec![command, &key];
        words.extend(rest);
        self.env.block_on(self.raw.call(&words)).as_i64()
    }
}

/// What a newer scheduler left is found when the shard is taken over.
#[track_caller]
fn a_newer_scheduler_left(name: &str, its_index_has_a_format: bool) {
    let env = Setup::new(name).partitions(2).create();
    let mut scheduler = env.start("a");
    let waiting: Vec<Asked> = env.ask(
        (0..20)
            .map(|n| job(&format!("{n}"), 0, in_millis(20_000)))
            .collect(),
    );
    env.watch().until_so_many_are_known(20);
    scheduler.end_in_order();

    // A schedule, and behind it a job that its occurrences are made of.
    let behind = far(1_000_000, &env);
    let behind = redeliver_scheduler::job::Job {
        app: "mail".into(),
        topic: env.topics.apps["mail"].clone(),
        due: in_millis(0),
        ..behind
    };
    env.write(&[state_record(&env, "schedule:nightly", Some("0 3 * * *".into()))]);
    env.write(&[state_record(
        &env,
        &behind.id.to_string(),
        Some(codec::encode(&behind)),
    )]);
    let redis = Redis::of(&env);
    let shown = redis.call("HGET", "meta", &["offset"]).unwrap();
    if its_index_has_a_format {
        redis.call("HSET", "meta", &["format", "1"]);
    }

    scheduler.start_again();
    scheduler.until_not_ready(NEWER);
    let (_, said) = scheduler.get("/readyz").unwrap();
    let place = format!("{}-0@", env.topics.state);
    assert!(
        said.contains(&place) && said.contains("kind `schedule`"),
        "{said}"
    );
    let log = scheduler.output();
    let line = log.lines().find(|line| line.contains(NEWER)).unwrap();
    assert!(line.contains("ERROR") && line.contains(&place), "{line}");
    // The other shard works, and in this one nothing happens and nothing is lost.
    let overdue = env.ask(
        (0..5)
            .map(|n| job(&format!("overdue {n}"), 0, in_millis(0)))
            .collect(),
    );
    let others = env.ask(
        (0..50)
            .map(|n| job(&format!("other {n}"), 1, in_millis(0)))
            .collect(),
    );
    until_dispatched(&env, others.iter().map(id));
    assert_eq!(scheduler.metric("redeliver_scheduler_live_shards"), 1);
    assert_eq!(redis.call("ZCARD", "due", &[]), Some(20));
    assert_eq!(redis.call("HGET", "meta", &["offset"]), Some(shown));

    // The newer scheduler comes back and removes its schedule.
    env.write(&[state_record(&env, "schedule:nightly", None)]);
    scheduler.until_ready();
    let all = waiting.iter().chain(&overdue).chain(&others).map(id);
    until_dispatched(&env, all.chain([behind.id]));
}

#[test]
fn a_record_of_a_newer_scheduler_stops_its_shard_and_no_other() {
    a_newer_scheduler_left("newer", false);
}

#[test]
fn an_index_of_a_newer_scheduler_is_left_as_it_is_while_only_that_one_understands_the_topic() {
    a_newer_scheduler_left("newer-index", true);
}

#[test]
fn a_live_shard_whose_state_is_damaged_stands_still_until_it_is_repaired() {
    let env = Setup::new("damaged").partitions(2).create();
    let mut scheduler = env.start("a");
    let waiting = env.ask(
        (0..20)
            .map(|n| job(&format!("{n}"), 0, in_millis(20_000)))
            .collect(),
    );
    env.watch().until_so_many_are_known(20);
    let key = far(1_000_000, &env).id.to_string();
    env.write(&[state_record(&env, &key, Some("no job".into()))]);
    // It reads the topic again because the index has lost its mark.
    let redis = Redis::of(&env);
    redis.call("HDEL", "meta", &["offset"]);
    scheduler.until_not_ready("is damaged, or no scheduler wrote it");
    let (_, said) = scheduler.get("/readyz").unwrap();
    assert!(said.contains(&format!("under the key `{key}`")), "{said}");
    let overdue = env.ask(vec![job("overdue", 0, in_millis(0))]);
    let others = env.ask(
        (0..50)
            .map(|n| job(&format!("other {n}"), 1, in_millis(0)))
            .collect(),
    );
    until_dispatched(&env, others.iter().map(id));
    eventually("the shard is not live", PATIENCE, || {
        match scheduler.metric("redeliver_scheduler_live_shards") {
            1 => Ok(()),
            live => Err(live),
        }
    });
    env.write(&[state_record(&env, &key, None)]);
    scheduler.until_ready();
    until_dispatched(&env, waiting.iter().chain(&overdue).chain(&others).map(id));
}
