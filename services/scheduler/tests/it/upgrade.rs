//! A state topic with records that this version does not understand, because a newer scheduler wrote them or they are
//! damaged. They are not skipped: their shard halts with the reason, and the others continue.

use bytes::Bytes;
use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_scheduler::index::FORMAT;
use redeliver_testkit::{ServiceProcess, eventually, redis_url};

use crate::env::{DEADLINE, SchedulerEnv, far, id};
use crate::index::own_redis::{Raw, key as index_key};
use crate::oracle::{JobSpec, Sent, When};
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

/// Makes waiting jobs due.
fn make_due(env: &SchedulerEnv, waiting: &[Sent]) {
    let now = When::At(in_millis(0));
    env.send(
        waiting
            .iter()
            .map(|sent| Request::reschedule(id(sent), now))
            .collect(),
    );
}

/// Jobs that are due, of which those of the first shard wait while it is halted.
fn due_jobs(env: &SchedulerEnv, name: &str) -> (Vec<Sent>, Vec<Sent>) {
    let jobs = |shard, count| {
        let jobs = (0..count).map(|n| job(&format!("{name} {shard}/{n}"), shard, in_millis(0)));
        env.send(jobs.collect())
    };
    (jobs(0, 5), jobs(1, 50))
}

fn until_one_shard_is_live(scheduler: &mut ServiceProcess) {
    scheduler.until_metric("redeliver_scheduler_live_shards", |live| live == 1);
}

#[test]
fn unreadable_records_halt_their_shard() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("unreadable-state").partitions(2));
    let mut scheduler = env.start("a");
    let waiting = env.send(
        (0..20)
            .map(|n| job(&format!("{n}"), 0, in_millis(3_600_000)))
            .collect(),
    );
    env.watch().until_known(20);
    let redis = Redis::of(&env);

    // A live shard reads the topic again because its index has lost its mark.
    let key = far(1_000_000, &env).id.to_string();
    env.write(&[state_record(&env, &key, Some("no job".into()))]);
    redis.call("HDEL", "meta", &["offset"]);
    scheduler.until_not_ready("is damaged or not from a scheduler");
    let (_, said) = scheduler.get("/readyz");
    assert!(said.contains(&format!("with the key `{key}`")), "{said}");
    let (mut due, others) = due_jobs(&env, "damaged");
    until_dispatched(&env, others.iter().map(id));
    until_one_shard_is_live(&mut scheduler);
    env.write(&[state_record(&env, &key, None)]);
    scheduler.until_ready();
    due.extend(others);
    until_dispatched(&env, due.iter().map(id));
    scheduler.shut_down();

    // A schedule of a newer scheduler, and after it a job, as an occurrence of the schedule would be.
    let behind = redeliver_scheduler::job::Job {
        app: "mail".into(),
        topic: env.topics.apps["mail"].clone(),
        due: in_millis(0),
        ..far(2_000_000, &env)
    };
    env.write(&[state_record(&env, "redrive:nightly", Some("0 3 * * *".into()))]);
    env.write(&[state_record(
        &env,
        &behind.id.to_string(),
        Some(codec::encode(&behind)),
    )]);
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
    let line = log.lines().rfind(|line| line.contains(NEWER)).unwrap();
    assert!(line.contains("ERROR") && line.contains(&position), "{line}");
    // The other shard works. This one does nothing and loses nothing.
    let (overdue, others) = due_jobs(&env, "newer");
    due.extend(others);
    until_dispatched(&env, due.iter().map(id));
    until_one_shard_is_live(&mut scheduler);
    let scheduled = env.block_on(redis.raw.scheduled(env.test.name(), 0));
    assert_eq!(scheduled, 20);
    assert_eq!(redis.call("HGET", "meta", &["offset"]), Some(shown));

    // The newer scheduler returns and removes its schedule.
    env.write(&[state_record(&env, "redrive:nightly", None)]);
    scheduler.until_ready();
    make_due(&env, &waiting);
    let all = waiting.iter().chain(&overdue).chain(&due).map(id);
    until_dispatched(&env, all.chain([behind.id]));
}

#[test]
fn other_format_rebuilds_index() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("other-format").partitions(2));
    let mut scheduler = env.start("a");
    let jobs = (0..20).map(|n| job(&format!("{n}"), 0, in_millis(3_600_000)));
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
    make_due(&env, &waiting);
    until_dispatched(&env, waiting.iter().map(id));
}
