//! A state topic with records that this version does not understand, because a newer scheduler wrote them or they are
//! damaged. They are not skipped: their shard halts with the reason, and the others continue.

use bytes::Bytes;
use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_scheduler::index::FORMAT;
use redeliver_testkit::{eventually, redis_url};

use crate::env::{DEADLINE, SchedulerEnv, id};
use crate::index::own_redis::{Raw, key as index_key};
use crate::oracle::{JobSpec, Sent};
use crate::rebuild::far;
use crate::requests::{Request, in_millis};

const NEWER: &str = "requires a newer version of the scheduler";

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
    Request::protobuf(JobSpec::new("mail", text.to_owned()).at(due)).partition(shard)
}

/// The ids of all dispatched jobs, sorted.
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
    eventually("the jobs are dispatched", DEADLINE, || match dispatched(env) {
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
        let key = index_key(self.env.test.name(), 0, key);
        let mut words = vec![command, &key];
        words.extend(rest);
        self.env.block_on(self.raw.call(&words)).as_i64()
    }
}

#[test]
fn a_record_of_a_newer_scheduler_halts_only_its_shard() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("newer").partitions(2));
    let mut scheduler = env.start("a");
    let waiting: Vec<Sent> = env.send(
        (0..20)
            .map(|n| job(&format!("{n}"), 0, in_millis(20_000)))
            .collect(),
    );
    env.watch().until_known(20);
    scheduler.shut_down();

    // A schedule, and after it a job, as an occurrence of the schedule would be.
    let behind = far(1_000_000, &env);
    let behind = redeliver_scheduler::job::Job {
        app: "mail".into(),
        topic: env.topics.apps["mail"].clone(),
        due: in_millis(0),
        ..behind
    };
    env.write(&[state_record(&env, "redrive:nightly", Some("0 3 * * *".into()))]);
    env.write(&[state_record(
        &env,
        &behind.id.to_string(),
        Some(codec::encode(&behind)),
    )]);
    let redis = Redis::of(&env);
    let shown = redis.call("HGET", "meta", &["offset"]).unwrap();

    scheduler.start_again();
    scheduler.until_not_ready(NEWER);
    let (_, said) = scheduler.get("/readyz");
    let position = format!("{}/0/", env.topics.state);
    assert!(
        said.contains(&position) && said.contains("kind `redrive`"),
        "{said}"
    );
    let log = scheduler.output();
    let line = log.lines().find(|line| line.contains(NEWER)).unwrap();
    assert!(line.contains("ERROR") && line.contains(&position), "{line}");
    // The other shard works. This one does nothing and loses nothing.
    let overdue = env.send(
        (0..5)
            .map(|n| job(&format!("overdue {n}"), 0, in_millis(0)))
            .collect(),
    );
    let others = env.send(
        (0..50)
            .map(|n| job(&format!("other {n}"), 1, in_millis(0)))
            .collect(),
    );
    until_dispatched(&env, others.iter().map(id));
    assert_eq!(scheduler.metric("redeliver_scheduler_live_shards"), 1);
    let scheduled = env.block_on(redis.raw.scheduled(env.test.name(), 0));
    assert_eq!(scheduled, 20);
    assert_eq!(redis.call("HGET", "meta", &["offset"]), Some(shown));

    // The newer scheduler returns and removes its schedule.
    env.write(&[state_record(&env, "redrive:nightly", None)]);
    scheduler.until_ready();
    let all = waiting.iter().chain(&overdue).chain(&others).map(id);
    until_dispatched(&env, all.chain([behind.id]));
}

#[test]
fn a_live_shard_with_a_damaged_state_topic_halts_until_the_topic_is_repaired() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("damaged").partitions(2));
    let mut scheduler = env.start("a");
    let waiting = env.send(
        (0..20)
            .map(|n| job(&format!("{n}"), 0, in_millis(20_000)))
            .collect(),
    );
    env.watch().until_known(20);
    let key = far(1_000_000, &env).id.to_string();
    env.write(&[state_record(&env, &key, Some("no job".into()))]);
    // It reads the topic again because the index has lost its mark.
    let redis = Redis::of(&env);
    redis.call("HDEL", "meta", &["offset"]);
    scheduler.until_not_ready("is damaged or not from a scheduler");
    let (_, said) = scheduler.get("/readyz");
    assert!(said.contains(&format!("with the key `{key}`")), "{said}");
    let overdue = env.send(vec![job("overdue", 0, in_millis(0))]);
    let others = env.send(
        (0..50)
            .map(|n| job(&format!("other {n}"), 1, in_millis(0)))
            .collect(),
    );
    until_dispatched(&env, others.iter().map(id));
    eventually("the shard is not live", DEADLINE, || {
        match scheduler.metric("redeliver_scheduler_live_shards") {
            1 => Ok(()),
            live => Err(live),
        }
    });
    env.write(&[state_record(&env, &key, None)]);
    scheduler.until_ready();
    until_dispatched(&env, waiting.iter().chain(&overdue).chain(&others).map(id));
}

#[test]
fn an_index_of_another_format_is_rebuilt() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("other-format").partitions(2));
    let mut scheduler = env.start("a");
    let jobs = (0..20).map(|n| job(&format!("{n}"), 0, in_millis(20_000)));
    let waiting = env.send(jobs.collect());
    env.watch().until_known(20);
    let redis = Redis::of(&env);
    assert_eq!(redis.call("HGET", "meta", &["format"]), Some(FORMAT.into()));
    for other in [FORMAT - 1, FORMAT + 1] {
        scheduler.shut_down();
        redis.call("HSET", "meta", &["format", &other.to_string()]);
        scheduler.start_again();
        scheduler.until_ready();
        let log = scheduler.output();
        let line = log
            .lines()
            .rfind(|line| line.contains("index has the format of another version"));
        let names = format!("format={other}");
        assert!(line.is_some_and(|line| line.contains(&names)), "{log}");
        assert_eq!(redis.call("HGET", "meta", &["format"]), Some(FORMAT.into()));
    }
    until_dispatched(&env, waiting.iter().map(id));
}
