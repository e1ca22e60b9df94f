//! A Redis that is full of distant jobs of one application: the jobs of others are still dispatched on time.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use redeliver_core::headers::{self, DISPATCHED_AT, JOB_ID, ReservedHeaders, SCHEDULED_TIME};
use redeliver_core::{JobId, Record, Timestamp};
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{ChaosPermit, LocalRedis, ServiceProcess, ensure, eventually, until_seen};

use crate::env::{DEADLINE, SchedulerEnv, header, id};
use crate::index::own_redis::Raw;
use crate::oracle::{Intent, JobSpec, Sent};
use crate::requests::{Request, in_millis, now};

/// The memory for distant jobs.
const ROOM: u64 = 8 << 20;
const JOBS: usize = 1_000;

fn number(raw: &str, name: &str) -> u64 {
    let value = raw
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap().trim().parse().unwrap()
}

struct Redis {
    local: LocalRedis,
    raw: Raw,
}

impl Redis {
    fn used(&self, env: &SchedulerEnv) -> u64 {
        let info = env.block_on(self.raw.call(&["INFO", "memory"]));
        number(&info.into_string().unwrap(), "used_memory")
    }

    fn set_limit(&self, env: &SchedulerEnv, bytes: u64) {
        let command = ["CONFIG", "SET", "maxmemory", &bytes.to_string()];
        env.block_on(self.raw.call(&command));
    }

    fn waiting(&self, env: &SchedulerEnv) -> u64 {
        let shards = 0..env.topics.partitions;
        let counts = shards.map(|shard| env.block_on(self.raw.scheduled(env.test.name(), shard)));
        counts.sum()
    }
}

/// 2,000 jobs of 1,000 bytes that wait for an hour.
fn flood(env: &SchedulerEnv) -> Vec<Sent> {
    let value = vec![b'x'; 1_000];
    let jobs = (0..2_000).map(|_| Request::protobuf(JobSpec::new("crawl", value.clone()).after(3_600_000)));
    env.send(jobs.collect())
}

fn commands(scheduler: &mut ServiceProcess, outcome: &str) -> u64 {
    scheduler.metric(&format!(
        "redeliver_scheduler_commands_total{{outcome=\"{outcome}\"}}"
    ))
}

/// Each of these jobs was dispatched once, and none early.
#[track_caller]
fn assert_dispatched_once(seen: &[Record], sent: &[Sent]) {
    let mut left: HashSet<JobId> = HashSet::new();
    for record in seen {
        let (due, at): (Timestamp, Timestamp) =
            (header(record, SCHEDULED_TIME), header(record, DISPATCHED_AT));
        assert!(at >= due, "{at} is before {due}");
        let id: JobId = header(record, JOB_ID);
        assert!(left.insert(id), "{id} was dispatched twice");
    }
    assert!(sent.iter().all(|sent| left.contains(&id(sent))));
}

#[test]
fn distant_jobs_delay_no_due_jobs() {
    let _permit = ChaosPermit::acquire();
    let local = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(
        SchedulerEnv::builder("full")
            .redis(local.url())
            .set("scheduler.window", "1s"),
    );
    let raw = env.block_on(Raw::connect(&local.url()));
    let redis = Redis { local, raw };
    let mut scheduler = env.start("a");
    // Far beyond the window, so that all of them are looked up in the full index.
    let due = in_millis(20_000);
    let jobs = (0..JOBS).map(|n| {
        let due = due.after(Duration::from_millis(n as u64));
        Request::protobuf(JobSpec::new("mail", format!("{n}")).at(due))
    });
    let sent = env.send(jobs.collect());
    until_seen("waiting jobs", || redis.waiting(&env), |n| *n >= JOBS as u64);
    let limit = redis.used(&env) + ROOM;
    redis.set_limit(&env, limit);

    // Distant jobs are sent until they are rejected, and after that.
    let mut far = Vec::new();
    eventually("distant jobs are rejected", DEADLINE, || {
        far.extend(flood(&env));
        let (count, used) = (commands(&mut scheduler, "no_room"), redis.used(&env));
        ensure(
            count > 0,
            format!("{} far jobs, {used} of {limit} bytes", far.len()),
        )
    });
    far.extend(flood(&env));
    assert!(now() < due, "filling Redis took too long for this test");
    let (status, body) = scheduler.get("/readyz");
    assert!(
        status == 200 && body.contains("rejecting jobs that are not due soon"),
        "{status} {body}"
    );
    // Even with no memory left.
    let used = redis.used(&env);
    redis.set_limit(&env, used - used / 10);
    far.extend(flood(&env));
    let soon = env.send(
        (0..100)
            .map(|n| Request::protobuf(JobSpec::new("sms", format!("{n}")).after(500)))
            .collect(),
    );
    // A waiting job is rescheduled, and another one is cancelled.
    let accepted = id(&far[0]);
    let commands_sent = env.send(vec![
        Request::cancel(id(&far[1])),
        Request::reschedule(accepted, crate::oracle::When::At(in_millis(1_000))),
    ]);
    assert_eq!(commands_sent.len(), 2);

    let mut watch = env.watch();
    let expected = JOBS + soon.len() + 1;
    watch.until_jobs_ended(expected + 1);
    watch.look();
    assert_eq!(watch.seen.apps.len(), expected);
    assert_dispatched_once(&watch.seen.apps, &sent);
    assert_dispatched_once(&watch.seen.apps, &soon);

    // A scheduler takes over the shards although Redis is full.
    scheduler.kill_and_restart();
    let overdue = env.send(vec![Request::protobuf(JobSpec::new("sms", "after the restart"))]);
    watch.until_jobs_ended(expected + 2);

    // With more memory, distant jobs are accepted again without a restart.
    redis.set_limit(&env, 10 * limit);
    let until_ready = |scheduler: &mut ServiceProcess| {
        scheduler.until_readyz("no job is rejected", |status, body| {
            status == 200 && !body.contains("rejecting")
        });
    };
    until_ready(&mut scheduler);
    let refused_before = commands(&mut scheduler, "no_room");
    let again = flood(&env);
    let accepted = || commands(&mut scheduler, "accepted");
    until_seen("distant jobs are accepted", accepted, |&accepted| {
        accepted >= again.len() as u64
    });
    assert_eq!(commands(&mut scheduler, "no_room"), refused_before);

    // Each distant job is either in the state topic and the index, or a dead letter with the reason.
    watch.look();
    let mut states: HashMap<String, v1::JobRecord> = HashMap::new();
    for record in &watch.seen.state {
        // Tombstones follow the ends of jobs that the full index did not contain.
        let Some(value) = &record.value else { continue };
        let id = String::from_utf8(record.key.clone().unwrap().to_vec()).unwrap();
        states.insert(id, v1::JobRecord::decode(value.clone()).unwrap());
    }
    for letter in &watch.seen.dlq {
        assert_eq!(
            letter.headers.last(headers::ERROR_CODE),
            Some(&b"scheduler.index-full"[..])
        );
    }
    let all_far = far.len() + again.len();
    let known = far
        .iter()
        .chain(&again)
        .filter(|sent| states.contains_key(&id(sent).to_string()));
    assert_eq!(known.count() + watch.seen.dlq.len(), all_far);
    assert!(!watch.seen.dlq.is_empty());
    let scheduled = states
        .values()
        .filter(|job| job.state() == v1::JobState::Scheduled)
        .count() as u64;
    until_seen("waiting jobs", || redis.waiting(&env), |n| *n == scheduled);
    assert_eq!(watch.seen.apps.len(), expected + overdue.len());
    drop(redis.local);
}

#[test]
fn due_jobs_never_grow_full_redis() {
    const ROUNDS: usize = 7;
    const COUNT: usize = 2_000;
    /// Before this round, jobs may still be indexed that were committed before their shard noticed that Redis is full.
    const NOTICED: usize = 3;
    /// For buffers. The jobs of the later rounds would take 8 MiB.
    const MARGIN: u64 = 5 << 20;
    let _permit = ChaosPermit::acquire();
    let local = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(
        SchedulerEnv::builder("growth-of-full")
            .redis(local.url())
            .set("scheduler.window", "1s"),
    );
    let raw = env.block_on(Raw::connect(&local.url()));
    let redis = Redis { local, raw };
    let mut scheduler = env.start("a");
    scheduler.until_ready();
    let limit = redis.used(&env) + ROOM / 2;
    redis.set_limit(&env, limit);
    let mut sent = Vec::new();
    eventually("distant jobs are rejected", DEADLINE, || {
        sent.extend(flood(&env));
        let count = commands(&mut scheduler, "no_room");
        ensure(count > 0, format!("{} jobs", sent.len()))
    });
    let (mut due, mut full) = (Vec::new(), limit);
    for round in 0..ROUNDS {
        let jobs = (0..COUNT).flat_map(|n| {
            let job = JobSpec::new("sms", format!("{round}/{n}"));
            let with_key = job.clone().idempotency_key(format!("{round}/{n}"));
            [job, with_key].map(Request::protobuf)
        });
        due.extend(env.send(jobs.collect()));
        let all = (sent.len() + due.len()) as u64;
        eventually("all jobs are decided", DEADLINE, || {
            let decided = ["accepted", "no_room"].map(|outcome| commands(&mut scheduler, outcome));
            let lag = scheduler.metric("redeliver_scheduler_index_lag");
            match (decided.iter().sum::<u64>(), lag) {
                (decided, 0) if decided >= all => Ok(()),
                other => Err(format!("{other:?} of {all}")),
            }
        });
        let used = redis.used(&env);
        println!("round {round}: {used} of {limit} bytes");
        if round < NOTICED {
            full = used;
        } else {
            assert!(
                used < full + MARGIN,
                "{used} bytes in round {round}, {full} before"
            );
        }
    }

    // Each job was either dispatched once or rejected once, and those without keys were dispatched.
    let mut watch = env.watch();
    watch.look();
    let mut ends: HashMap<JobId, usize> = HashMap::new();
    for record in &watch.seen.apps {
        *ends.entry(header(record, JOB_ID)).or_default() += 1;
    }
    let mut rejected: HashMap<(i32, i64), usize> = HashMap::new();
    for letter in &watch.seen.dlq {
        let origin = ReservedHeaders::read(letter).unwrap().origin().unwrap();
        *rejected.entry((origin.partition, origin.offset)).or_default() += 1;
    }
    for sent in &due {
        let has_key = matches!(&sent.intent, Intent::Job(spec) if spec.idempotency_key.is_some());
        let position = (sent.position.partition, sent.position.offset);
        let ends = ends.get(&id(sent)).copied().unwrap_or(0);
        let rejected = rejected.get(&position).copied().unwrap_or(0);
        assert_eq!(ends + rejected, 1, "{position:?}");
        assert!(has_key || ends == 1, "{position:?} was rejected");
    }
    drop(redis.local);
}
