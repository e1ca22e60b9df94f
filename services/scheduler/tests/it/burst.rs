//! Many jobs that are due at one instant.

use std::time::{Duration, Instant};

use redeliver_core::Timestamp;
use redeliver_testkit::{ChaosPermit, eventually};

use crate::env::{DEADLINE, SchedulerEnv};
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
