//! Lateness of jobs at a read_committed consumer, at several rates.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_core::{Clock, SystemClock};

use super::Options;
use super::arrivals::{Arrivals, lateness};
use super::burst::lead;
use super::env::{BULK, SchedulerEnv, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::redis::Redis;

/// The rates per second that the loads of a measurement are derived from.
#[derive(Clone, Copy)]
pub(super) struct Sustained {
    /// Dispatches alone.
    pub(super) dispatch: f64,
    /// Jobs that are scheduled and dispatched at the same time.
    pub(super) both: f64,
}

/// When the jobs of a measurement are scheduled.
#[derive(Clone, Copy)]
enum Scheduled {
    LongBefore,
    OneSecondBefore,
}

impl fmt::Display for Scheduled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LongBefore => "long before",
            Self::OneSecondBefore => "1 s before",
        })
    }
}

pub(super) async fn run(
    broker: &Broker,
    redis: &mut Redis,
    options: &Options,
    sustained: Sustained,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let Sustained { dispatch, both } = sustained;
    let half_of = |rate: f64| format!(" (half of {rate:.0}/s; goal p50 8, p99 30 ms)");
    let slow = " (goal p99 15 ms)".to_owned();
    let loads = [
        (Scheduled::LongBefore, 500.0, slow.clone()),
        (Scheduled::LongBefore, 5_000.0, String::new()),
        (Scheduled::LongBefore, dispatch / 2.0, half_of(dispatch)),
        (Scheduled::OneSecondBefore, 500.0, slow),
        (Scheduled::OneSecondBefore, both / 2.0, half_of(both)),
    ];
    let mut distributions = vec![Vec::new(); loads.len()];
    for round in 0..options.rounds {
        for ((scheduled, rate, _), distributions) in loads.iter().zip(&mut distributions) {
            let seconds = options.seconds;
            let millis = match scheduled {
                Scheduled::LongBefore => scheduled_before(broker, redis, *rate, seconds, round).await?,
                Scheduled::OneSecondBefore => {
                    scheduled_meanwhile(broker, redis, *rate, seconds, round).await?
                }
            };
            let distribution = Distribution::of(millis);
            println!("round {round}: scheduled {scheduled}, {rate:.0}/s: {distribution}");
            distributions.push(distribution);
        }
    }
    for ((scheduled, rate, note), distributions) in loads.iter().zip(&distributions) {
        figures.add(
            format!(
                "lateness of jobs scheduled {scheduled}, {rate:.0}/s{note}, medians of {}",
                options.rounds
            ),
            Distribution::median(distributions),
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
    round: usize,
) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, &format!("late-{rate:.0}-{round}")).await?;
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
    round: usize,
) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, &format!("live-{rate:.0}-{round}")).await?;
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
