//! Many jobs that are due at one instant, and a trickle of another application meanwhile.

use std::time::Duration;

use anyhow::ensure;
use redeliver_core::{Clock, SystemClock};

use super::arrivals::{Arrivals, lateness, longest};
use super::env::{BULK, SchedulerEnv, TRICKLE, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Figures, median, per_second, spread};
use crate::kafka::Broker;
use crate::redis::Redis;

pub(super) struct Burst {
    /// Jobs per second from their due time to the arrival of the last one.
    pub(super) rate: f64,
    /// Processor time per job, microseconds.
    micros: f64,
    /// Lateness of the others.
    trickle: Vec<f64>,
}

/// How long it may take to accept so many.
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
    let bulk = Arrivals::at(broker, &env.of_app(BULK))?;
    let others = Arrivals::at(broker, &env.of_app(TRICKLE))?;
    let early = SystemClock.until(due);
    ensure!(
        early > Duration::from_secs(3),
        "accepting took too long for a burst"
    );
    std::thread::sleep(early - Duration::from_secs(3));
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
    let rate = count as f64 / (longest(&bulk) / 1000.0);
    println!(
        "round {round}: {rate:.0}/s of {count} jobs due at once, {micros:.1} us of processor time each; others: {}",
        spread(trickle.clone())
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
        "dispatched, all due at one instant",
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
        spread(best.trickle.clone()),
    );
}
