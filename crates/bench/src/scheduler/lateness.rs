//! Lateness of jobs at a read_committed consumer, at several rates.

use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_core::{Clock, SystemClock};

use super::arrivals::{Arrivals, lateness};
use super::burst::lead;
use super::env::{BULK, SchedulerEnv, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Figures, distribution};
use crate::kafka::Broker;
use crate::redis::Redis;

/// `dispatch` is the sustained rate of dispatches alone, and `both` that of jobs that are scheduled and dispatched at the
/// same time.
pub(super) async fn run(
    broker: &Broker,
    redis: &mut Redis,
    seconds: u64,
    dispatch: f64,
    both: f64,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    for (rate, note) in [
        (500.0, String::new()),
        (5_000.0, String::new()),
        (
            dispatch / 2.0,
            format!(" (half of {dispatch:.0}/s; goal p50 8, p99 20 ms)"),
        ),
    ] {
        let lateness = scheduled_before(broker, redis, rate, seconds).await?;
        figures.add(
            format!("lateness of jobs scheduled long before, {rate:.0}/s{note}"),
            distribution(lateness),
        );
    }
    for (rate, note) in [
        (500.0, String::new()),
        (
            both / 2.0,
            format!(" (half of {both:.0}/s; goal p50 8, p99 20 ms)"),
        ),
    ] {
        let lateness = scheduled_meanwhile(broker, redis, rate, seconds).await?;
        figures.add(
            format!("lateness of jobs scheduled 1 s before, {rate:.0}/s{note}"),
            distribution(lateness),
        );
    }
    Ok(())
}

/// Schedules all jobs before the first one is due, so that only their dispatch from the index is measured.
async fn scheduled_before(
    broker: &Broker,
    redis: &mut Redis,
    rate: f64,
    seconds: u64,
) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, &format!("late-{rate:.0}")).await?;
    let process = env.start_and_wait("a")?;
    let count = (rate * seconds as f64) as usize;
    let first = SystemClock.now().after(lead(count));
    env.schedule(count, |number| {
        first.after(Duration::from_secs_f64(number as f64 / rate))
    })?;
    wait_accepted(&process, count)?;
    wait_indexed(&process)?;
    let arrivals = Arrivals::at(broker, &env.app_topic(BULK))?;
    ensure!(
        SystemClock.until(first) > Duration::from_secs(1),
        "jobs were accepted too late, after the first due time"
    );
    let lateness = lateness(&arrivals.all(count)?);
    process.stop()?;
    env.tear_down().await?;
    Ok(lateness)
}

/// Schedules and dispatches jobs at the same time.
async fn scheduled_meanwhile(
    broker: &Broker,
    redis: &mut Redis,
    rate: f64,
    seconds: u64,
) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, &format!("live-{rate:.0}")).await?;
    let process = env.start_and_wait("a")?;
    let arrivals = Arrivals::at(broker, &env.app_topic(BULK))?;
    let trickle = Trickle::start(&env, BULK, rate, Duration::from_secs(1), &[0, 1, 2, 3]);
    let started = Instant::now();
    std::thread::sleep(Duration::from_secs(seconds));
    let sent = trickle.stop()?;
    println!("sent {:.0}/s", sent as f64 / started.elapsed().as_secs_f64());
    let lateness = lateness(&arrivals.all(sent)?);
    process.stop()?;
    env.tear_down().await?;
    Ok(lateness)
}
