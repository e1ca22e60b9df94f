//! Many jobs: due at one instant, and waiting while the index is gone.

use std::time::{Duration, Instant};

use redeliver_core::JobId;
use redeliver_core::headers::{DISPATCHED_AT, JOB_ID, SCHEDULED_TIME};
use redeliver_core::{Record, Timestamp};
use redeliver_testkit::{LocalRedis, eventually};

use crate::chaos::Turn;
use crate::env::{PATIENCE, SchedulerEnv, Setup};
use crate::index::own_redis::Raw;
use crate::oracle::{Asked, Wanted};
use crate::requests::{Request, in_millis, now};

/// Jobs that are due at one instant. Unoptimised, 200,000 would take a minute to be accepted alone.
const BURST: usize = if cfg!(debug_assertions) { 50_000 } else { 200_000 };
/// How many are written at once.
const CHUNK: usize = 10_000;

fn ask_all(env: &SchedulerEnv, count: usize, request: impl Fn(usize) -> Request) -> Vec<Asked> {
    let mut asked = Vec::with_capacity(count);
    while asked.len() < count {
        let rest = asked.len()..count.min(asked.len() + CHUNK);
        asked.extend(env.ask(rest.map(&request).collect()));
    }
    asked
}

fn header<T: std::str::FromStr>(record: &Record, name: &str) -> T {
    let value = record.headers.last(name).unwrap();
    let parsed = std::str::from_utf8(value).unwrap().parse();
    parsed.unwrap_or_else(|_| panic!("{name} of {record:?}"))
}

/// The shard of the job that a record is.
fn shard(record: &Record) -> i32 {
    header::<JobId>(record, JOB_ID).shard()
}

#[test]
fn jobs_that_are_due_at_one_instant_leave_once_while_others_stay_on_time() {
    const TRICKLE: u64 = 20;
    let _turn = Turn::wait();
    let env = Setup::new("burst").create();
    let _scheduler = env.start("a");
    let began = Instant::now();
    // Late enough for all of them to be accepted before.
    let due = in_millis(15_000);
    let mut asked = ask_all(&env, BURST, |n| {
        Request::protobuf(Wanted::new("crawl", format!("job {n} of the burst")).at(due))
    });
    let accepted = began.elapsed();
    assert!(
        now() < due,
        "asking took {accepted:?}, which is too long for this test"
    );
    // The others are due before, during and after it.
    let trickle = (0..400).map(|n| {
        let due = Timestamp::from_millis(due.as_millis() - 2_000).after(Duration::from_millis(TRICKLE * n));
        Request::protobuf(Wanted::new("mail", format!("{n}")).at(due))
    });
    asked.extend(env.ask(trickle.collect()));
    let mut watch = env.watch();
    let verdict = watch.settle(&mut asked);
    assert_eq!(verdict.dispatched, BURST + 400 + 4, "{verdict}");
    let slowest = verdict.lateness("crawl", 1.0);
    println!(
        "{BURST} jobs asked for in {accepted:.1?}, due at one instant, left within {slowest} ms: {} a second; \
         meanwhile the others were late by {} ms at the median, {} ms at p99, {} ms at most",
        BURST as u64 * 1000 / u64::try_from(slowest).unwrap().max(1),
        verdict.lateness("mail", 0.5),
        verdict.lateness("mail", 0.99),
        verdict.lateness("mail", 1.0),
    );
    // The others take turns with the burst; they do not stand in its queue.
    assert!(4 * verdict.lateness("mail", 0.99) < slowest, "{verdict}");
    assert!(verdict.lateness("mail", 1.0) < slowest, "{verdict}");
}

/// How many jobs the index of a shard says to be waiting.
fn waiting_in(env: &SchedulerEnv, raw: &Raw, shard: i32) -> i64 {
    let key = format!("{}:{{{shard}}}:due", env.name);
    env.block_on(raw.call(&["ZCARD", &key])).as_i64().unwrap_or(0)
}

#[test]
fn an_emptied_index_is_rebuilt_while_jobs_go_on_leaving() {
    const WAITING: usize = 20_000;
    let _turn = Turn::wait();
    let redis = LocalRedis::start().unwrap();
    let env = Setup::new("rebuild")
        .redis(redis.url())
        .set("scheduler.window", "1s")
        .create();
    let raw = env.block_on(Raw::connect(&redis.url()));
    let mut scheduler = env.start("a");
    // All but a few wait in one shard, for long.
    let due = in_millis(3_600_000);
    let mut asked = ask_all(&env, WAITING, |n| {
        let mut value = format!("job {n} ").into_bytes();
        value.resize(2_000, b'x');
        Request::protobuf(Wanted::new("crawl", value).at(due)).partition(0)
    });
    let until_rebuilt = || {
        eventually("the index shows all that wait", PATIENCE, || {
            match waiting_in(&env, &raw, 0) {
                count if count >= i64::try_from(WAITING).unwrap() => Ok(()),
                count => Err(count),
            }
        });
        now()
    };
    until_rebuilt();

    // Emptied under way: whatever is in memory leaves meanwhile, in all shards.
    let trickle = |from: u64| {
        (0..400).map(move |n: u64| {
            let shard = i32::try_from(n % 4).unwrap();
            let wanted = Wanted::new("mail", format!("{n}")).after(from + 10 * n);
            Request::protobuf(wanted).partition(shard)
        })
    };
    asked.extend(env.ask(trickle(500).collect()));
    eventually("some leave", PATIENCE, || {
        match now() >= asked.last().unwrap().at.after(Duration::from_millis(1_000)) {
            true => Ok(()),
            false => Err(now()),
        }
    });
    let emptied = now();
    env.block_on(raw.call(&["FLUSHALL"]));
    eventually("it is empty", PATIENCE, || match waiting_in(&env, &raw, 0) {
        count if count < i64::try_from(WAITING).unwrap() => Ok(()),
        count => Err(count),
    });
    let rebuilt = until_rebuilt();
    let mut watch = env.watch();
    watch.until_so_many_ended(400);
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
    // All but those that were due just before the end.
    assert!(
        left > 0 && 10 * left >= 9 * due_meanwhile.len(),
        "{left} of {} left between {emptied} and {rebuilt}",
        due_meanwhile.len()
    );

    // Emptied while nobody is there: a shard acts only when it knows everything, the others do not wait for it.
    scheduler.kill_9();
    let killed = now();
    env.block_on(raw.call(&["FLUSHALL"]));
    let overdue = env.ask(trickle(0).collect());
    asked.extend(overdue);
    scheduler.start_again();
    scheduler.until_ready();
    watch.until_so_many_ended(800);
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
    // Which of them is first depends on the machine; that each acts at all is what must be.
    println!("the shard with {WAITING} jobs began at {slow}, the others at {others}");

    // All of them come to their end.
    let ids: Vec<JobId> = asked.iter().take(WAITING).map(crate::env::id).collect();
    let soon = crate::oracle::When::At(in_millis(3_000));
    asked.extend(ask_all(&env, WAITING, |n| Request::reschedule(ids[n], soon)));
    let verdict = watch.settle(&mut asked);
    assert_eq!(verdict.dispatched, WAITING + 800 + 4, "{verdict}");
    assert_eq!(verdict.rescheduled, WAITING, "{verdict}");
}
