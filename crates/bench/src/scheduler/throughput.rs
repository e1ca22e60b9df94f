//! How fast jobs are accepted.

use std::time::{Duration, Instant};

use redeliver_core::{Clock, SystemClock};

use super::env::{BULK, PATIENCE, SchedulerEnv, Wanted, accepted, partition, wait_accepted, wait_indexed};
use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;
use crate::process::wait_until;
use crate::redis::Redis;

/// Jobs per second.
pub(super) struct Accepted {
    /// From the first request on, while the producer shares the machine.
    pub(super) live: f64,
    /// Until Redis shows them.
    indexed: f64,
    /// Of requests that were there before.
    backlog: f64,
    /// Of such with idempotency keys, which are looked up.
    keyed: f64,
    /// Processor time per job of the backlog, microseconds.
    micros: f64,
}

pub(super) async fn accept(
    broker: &Broker,
    redis: &mut Redis,
    count: usize,
    round: usize,
) -> anyhow::Result<Accepted> {
    let env = SchedulerEnv::build(broker, redis, &format!("accept-{round}")).await?;
    let later = SystemClock.now().after(Duration::from_secs(6 * 3600));
    let process = env.start_and_wait("live")?;
    let began = Instant::now();
    env.schedule(count, |_| later)?;
    wait_accepted(&process, count)?;
    let live = rate(count, began.elapsed());
    wait_indexed(&process)?;
    let indexed = rate(count, began.elapsed());
    process.stop()?;

    env.schedule(count, |_| later)?;
    let (backlog, micros) = drain(&env, count)?;

    env.broker.fill(count, |number| {
        let wanted = Wanted {
            number,
            due: later,
            partition: partition(number),
        };
        env.request_with_key(BULK, wanted, Some(format!("order-{number}")))
    })?;
    let (keyed, _) = drain(&env, count)?;
    env.tear_down().await?;
    println!(
        "round {round}: accepted {live:.0}/s live, {indexed:.0}/s until indexed, {backlog:.0}/s of a backlog with {micros:.1} us \
         of processor time each, {keyed:.0}/s with keys"
    );
    Ok(Accepted {
        live,
        indexed,
        backlog,
        keyed,
        micros,
    })
}

/// Starts a scheduler on a backlog and gives its rate, and the processor time per job in microseconds.
fn drain(env: &SchedulerEnv, count: usize) -> anyhow::Result<(f64, f64)> {
    let process = env.start("backlog", false)?;
    process.wait_until_ready()?;
    wait_until("the first job is accepted", PATIENCE, || {
        Ok(accepted(&process)? > 0.0)
    })?;
    let (began, cpu, before) = (Instant::now(), process.cpu_time(), accepted(&process)?);
    wait_accepted(&process, count)?;
    let took = began.elapsed();
    let jobs = (count as f64 - before).max(1.0);
    wait_indexed(&process)?;
    let micros = (process.cpu_time() - cpu).as_secs_f64() * 1e6 / jobs;
    process.stop()?;
    Ok((jobs / took.as_secs_f64(), micros))
}

pub(super) fn report(rounds: &[Accepted], figures: &mut Figures) {
    if rounds.is_empty() {
        return;
    }
    let mut add = |name: &str, of: fn(&Accepted) -> f64| {
        let values: Vec<f64> = rounds.iter().map(of).collect();
        let best = values.iter().copied().fold(0.0, f64::max);
        let text = format!(
            "best {}, median {}",
            per_second(best),
            per_second(median(&values))
        );
        figures.add(name, text);
    };
    add("accepted, from the first request on", |round| round.live);
    add("the same, until Redis shows them", |round| round.indexed);
    add("accepted, of a backlog", |round| round.backlog);
    add("accepted, of a backlog with idempotency keys", |round| {
        round.keyed
    });
    let micros: Vec<f64> = rounds.iter().map(|round| round.micros).collect();
    figures.add(
        "processor time of the scheduler per accepted job, median",
        format!("{:.1} us", median(&micros)),
    );
}
