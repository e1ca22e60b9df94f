//! Many jobs that are due at the same instant, and meanwhile a trickle of jobs of another application.

use std::time::Duration;

use anyhow::ensure;
use redeliver_core::{Clock, SystemClock};

use super::arrivals::{Arrivals, lateness, max_lateness};
use super::env::{BULK, SchedulerEnv, TRICKLE, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Distribution, Figures, median, per_second};
use crate::kafka::Broker;
use crate::redis::Redis;

pub(super) struct Burst {
    /// Jobs per second from their due time to the arrival of the last one.
    pub(super) rate: f64,
    /// Processor time per job in microseconds.
    micros: f64,
    /// Lateness of the other application's jobs.
    trickle: Vec<f64>,
}

/// Time to allow for the acceptance of `count` jobs.
pub(super) fn lead(count: usize) -> Duration {
    Duration::from_secs(12) + Duration::from_micros(100 * count as u64)
}

pub(super) async fn dispatch(
    broker: &Broker,
    redis: &mut Redis,
    count: usize,
    round: usize,
) -> anyhow::Result<Burst> {
    let env = SchedulerEnv::build(broker, redis, &format!("burst-{round}")).await?;
    let process = env.start_and_wait("a")?;
    let due = SystemClock.now().after(lead(count));
    env.schedule(count, |_| due)?;
    wait_accepted(&process, count)?;
    wait_indexed(&process)?;
    let bulk = Arrivals::at(broker, &env.app_topic(BULK))?;
    let others = Arrivals::at(broker, &env.app_topic(TRICKLE))?;
    let remaining = SystemClock.until(due);
    ensure!(
        remaining > Duration::from_secs(3),
        "accepting took too long for a burst"
    );
    std::thread::sleep(remaining - Duration::from_secs(3));
    let trickle = Trickle::start(&env, TRICKLE, 100.0, Duration::from_secs(1), &[0, 1, 2, 3]);
    std::thread::sleep(SystemClock.until(due));
    let cpu = process.cpu_time();
    let bulk = bulk.all(count)?;
    let micros = (process.cpu_time() - cpu).as_secs_f64() * 1e6 / count as f64;
    let sent = trickle.stop()?;
    let trickle = lateness(&others.all(sent)?);
    wait_indexed(&process)?;
    process.stop()?;
    env.tear_down().await?;
    let rate = count as f64 / (max_lateness(&bulk) / 1000.0);
    println!(
        "round {round}: {rate:.0}/s of {count} jobs due at once, {micros:.1} us of processor time each; others: {}",
        Distribution::of(trickle.clone())
    );
    Ok(Burst {
        rate,
        micros,
        trickle,
    })
}

pub(super) fn report(rounds: &[Burst], figures: &mut Figures) {
    let rates: Vec<f64> = rounds.iter().map(|round| round.rate).collect();
    let Some(best) = rounds.iter().max_by(|a, b| a.rate.total_cmp(&b.rate)) else {
        return;
    };
    figures.add(
        "dispatched, all due at the same instant",
        format!(
            "best {}, median {} (goal 40,000/s), each once and none early",
            per_second(best.rate),
            per_second(median(&rates))
        ),
    );
    let micros: Vec<f64> = rounds.iter().map(|round| round.micros).collect();
    figures.add(
        "processor time of the scheduler per dispatched job, median",
        format!("{:.1} us", median(&micros)),
    );
    figures.add(
        "lateness of 100/s of another application meanwhile, in the best round",
        Distribution::of(best.trickle.clone()),
    );
}
