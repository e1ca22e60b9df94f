//! Many jobs that are due at one instant, or that wait while the index is rebuilt.

use std::time::{Duration, Instant};

use redeliver_core::JobId;
use redeliver_core::headers::{DISPATCHED_AT, JOB_ID, SCHEDULED_TIME};
use redeliver_core::{Record, Timestamp};
use redeliver_testkit::{ChaosPermit, LocalRedis, eventually};

use crate::env::{DEADLINE, SchedulerEnv, header};
use crate::index::own_redis::Raw;
use crate::oracle::{JobSpec, Report, Sent};
use crate::requests::{Request, in_millis, now};

/// Jobs that are due at one instant. A debug build would need a minute just to accept 200,000.
const BURST: usize = if cfg!(debug_assertions) { 8_000 } else { 200_000 };
/// How many requests are written at a time.
const CHUNK: usize = 10_000;
/// Jobs of another application that are due meanwhile.
const TRICKLE: usize = 400;

fn send_all(env: &SchedulerEnv, count: usize, request: impl Fn(usize) -> Request) -> Vec<Sent> {
    let mut sent = Vec::with_capacity(count);
    while sent.len() < count {
        let rest = sent.len()..count.min(sent.len() + CHUNK);
        sent.extend(env.send(rest.map(&request).collect()));
    }
    sent
}

/// 50 jobs a second of an application that has no others.
fn trickle(from: Timestamp) -> Vec<Request> {
    const INTERVAL: Duration = Duration::from_millis(20);
    let jobs = (0..TRICKLE).map(|n| {
        let due = from.after(INTERVAL * u32::try_from(n).unwrap());
        Request::protobuf(JobSpec::new("mail", format!("{n}")).at(due))
    });
    jobs.collect()
}

/// Applications take turns, so the jobs of [`trickle`] do not queue behind those of the other application. `cargo xtask bench
/// scheduler` measures how late they are.
#[track_caller]
fn assert_others_are_on_time(report: &Report) {
    let slowest = report.lateness("crawl", 1.0);
    println!(
        "the last of {BURST} jobs was {slowest} ms late: {} a second; meanwhile the others were late by {} ms at the median, {} ms at \
         p99, {} ms at most",
        BURST as u64 * 1000 / u64::try_from(slowest).unwrap().max(1),
        report.lateness("mail", 0.5),
        report.lateness("mail", 0.99),
        report.lateness("mail", 1.0),
    );
    assert!(report.lateness("mail", 0.99) < slowest, "{report}");
}

/// The shard of a dispatched job.
fn shard(record: &Record) -> i32 {
    header::<JobId>(record, JOB_ID).shard()
}

#[test]
fn burst_delays_no_others() {
    let _permit = ChaosPermit::acquire();
    // The burst is several times as large as the windows of all shards.
    let env = SchedulerEnv::new(
        SchedulerEnv::builder("burst")
            .partitions(4)
            .set("scheduler.window_bytes", "1100000"),
    );
    let _scheduler = env.start("a");
    let began = Instant::now();
    // Late enough for all jobs to be accepted first.
    let due = in_millis(10_000);
    let mut sent = send_all(&env, BURST, |n| {
        Request::protobuf(JobSpec::new("crawl", format!("job {n} of the burst")).at(due))
    });
    let accepted = began.elapsed();
    assert!(
        now() < due,
        "sending the requests took {accepted:?}, which is too long for this test"
    );
    // The other jobs are due before, during and after the burst.
    sent.extend(env.send(trickle(Timestamp::from_millis(due.as_millis() - 2_000))));
    let mut watch = env.watch();
    let report = watch.settle(&mut sent);
    assert_eq!(report.dispatched, BURST + TRICKLE + 4, "{report}");
    assert_others_are_on_time(&report);
}

#[test]
fn backlog_delays_no_known_jobs() {
    let _permit = ChaosPermit::acquire();
    let env = SchedulerEnv::new(SchedulerEnv::builder("backlog").partitions(4));
    let _scheduler = env.start("a");
    let due = in_millis(6_000);
    let mut sent = env.send(trickle(due));
    let mut watch = env.watch();
    watch.until_known(TRICKLE);
    assert!(now() < due, "accepting the jobs took too long for this test");
    eventually("the first one is due", DEADLINE, || match now() {
        at if at >= due => Ok(()),
        at => Err(at),
    });
    // They are due at once, and are written faster than the scheduler accepts them.
    sent.extend(send_all(&env, BURST, |n| {
        Request::protobuf(JobSpec::new("crawl", format!("job {n} of the backlog")))
    }));
    let report = watch.settle(&mut sent);
    assert_eq!(report.dispatched, BURST + TRICKLE + 4, "{report}");
    assert_others_are_on_time(&report);
}

/// How many jobs wait in the index of a shard.
fn waiting_in(env: &SchedulerEnv, raw: &Raw, shard: i32) -> u64 {
    env.block_on(raw.scheduled(env.test.name(), shard))
}

#[test]
#[ignore = "long"]
fn rebuild_delays_no_jobs() {
    const WAITING: usize = 20_000;
    let _permit = ChaosPermit::acquire();
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(
        SchedulerEnv::builder("rebuild")
            .partitions(4)
            .redis(redis.url())
            .set("scheduler.window", "1s"),
    );
    let raw = env.block_on(Raw::connect(&redis.url()));
    let mut scheduler = env.start("a");
    // Most jobs wait in one shard for a long time.
    let due = in_millis(3_600_000);
    let mut sent = send_all(&env, WAITING, |n| {
        let mut value = format!("job {n} ").into_bytes();
        value.resize(2_000, b'x');
        Request::protobuf(JobSpec::new("crawl", value).at(due)).partition(0)
    });
    let until_rebuilt = || {
        eventually(
            "the index contains all waiting jobs",
            DEADLINE,
            || match waiting_in(&env, &raw, 0) {
                count if count >= WAITING as u64 => Ok(()),
                count => Err(count),
            },
        );
        now()
    };
    until_rebuilt();

    // Emptied while running: meanwhile all shards dispatch the jobs in memory.
    let trickle = |from: u64| {
        (0..400).map(move |n: u64| {
            let shard = i32::try_from(n % 4).unwrap();
            let spec = JobSpec::new("mail", format!("{n}")).after(from + 10 * n);
            Request::protobuf(spec).partition(shard)
        })
    };
    sent.extend(env.send(trickle(500).collect()));
    eventually("some jobs are due", DEADLINE, || {
        match now() >= sent.last().unwrap().at.after(Duration::from_millis(1_000)) {
            true => Ok(()),
            false => Err(now()),
        }
    });
    let emptied = now();
    env.block_on(raw.call(&["FLUSHALL"]));
    eventually("it is empty", DEADLINE, || match waiting_in(&env, &raw, 0) {
        count if count < WAITING as u64 => Ok(()),
        count => Err(count),
    });
    let rebuilt = until_rebuilt();
    let mut watch = env.watch();
    watch.until_jobs_ended(400);
    watch.look();
    let dispatched_at = |record: &Record| header::<Timestamp>(record, DISPATCHED_AT);
    let others = watch.seen.apps.iter().filter(|record| shard(record) != 0);
    let due_meanwhile: Vec<Timestamp> = others
        .filter(|record| (emptied..rebuilt).contains(&header(record, SCHEDULED_TIME)))
        .map(dispatched_at)
        .collect();
    let left = due_meanwhile.iter().filter(|at| **at < rebuilt).count();
    println!(
        "{WAITING} jobs were in the index again after {:?}; of {} jobs that were due meanwhile in the other shards \
         {left} left meanwhile",
        rebuilt.since(emptied),
        due_meanwhile.len(),
    );
    // Those that were due just before the end left after it, and so did some of a shard that noticed the loss later.
    assert!(
        left > 0 && 2 * left >= due_meanwhile.len(),
        "{left} of {} left between {emptied} and {rebuilt}",
        due_meanwhile.len()
    );

    // Emptied while no scheduler runs: a shard acts only after its index is complete, and the others do not wait for it.
    scheduler.kill_9();
    let killed = now();
    env.block_on(raw.call(&["FLUSHALL"]));
    let overdue = env.send(trickle(0).collect());
    sent.extend(overdue);
    scheduler.start_again();
    scheduler.until_ready();
    watch.until_jobs_ended(800);
    watch.look();
    let first = |in_first: bool| {
        let left = watch
            .seen
            .apps
            .iter()
            .filter(|record| (shard(record) == 0) == in_first);
        left.map(dispatched_at).filter(|at| *at > killed).min()
    };
    let (slow, others) = (first(true).unwrap(), first(false).unwrap());
    // Which shard is first depends on the machine, but each of them must act.
    println!("the shard with {WAITING} jobs began at {slow}, the others at {others}");

    // All jobs must end.
    let ids: Vec<JobId> = sent.iter().take(WAITING).map(crate::env::id).collect();
    let soon = crate::oracle::When::At(in_millis(3_000));
    sent.extend(send_all(&env, WAITING, |n| Request::reschedule(ids[n], soon)));
    let report = watch.settle(&mut sent);
    assert_eq!(report.dispatched, WAITING + 800 + 4, "{report}");
    assert_eq!(report.rescheduled, WAITING, "{report}");
}
