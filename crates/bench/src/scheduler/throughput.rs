//! The rate at which jobs are accepted.

use std::time::{Duration, Instant};

use redeliver_core::{Clock, SystemClock};

use super::env::{BULK, JobSpec, SchedulerEnv, TIMEOUT, accepted, partition, wait_accepted, wait_indexed};
use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;
use crate::process::wait_until;
use crate::redis::Redis;

/// Jobs per second.
pub(super) struct Accepted {
    /// From the first request on, while the producer runs on the same machine.
    pub(super) live: f64,
    /// Until the index has applied them.
    indexed: f64,
    /// From a backlog of requests.
    backlog: f64,
    /// From a backlog of requests with idempotency keys, which must be looked up.
    keyed: f64,
    /// Processor time per job of the backlog, in microseconds.
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
    let started = Instant::now();
    env.schedule(count, |_| later)?;
    wait_accepted(&process, count)?;
    let live = rate(count, started.elapsed());
    wait_indexed(&process)?;
    let indexed = rate(count, started.elapsed());
    process.stop()?;

    env.schedule(count, |_| later)?;
    let (backlog, micros) = drain(&env, count)?;

    env.broker.fill(count, |number| {
        let job = JobSpec {
            number,
            due: later,
            partition: partition(number),
        };
        env.request_with_key(BULK, job, Some(format!("order-{number}")))
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

/// Starts a scheduler on a backlog, and returns its rate and the processor time per job in microseconds.
fn drain(env: &SchedulerEnv, count: usize) -> anyhow::Result<(f64, f64)> {
    let process = env.start("backlog", false)?;
    process.wait_until_ready()?;
    wait_until("the first job is accepted", TIMEOUT, || {
        Ok(accepted(&process)? > 0.0)
    })?;
    let (started, cpu, before) = (Instant::now(), process.cpu_time(), accepted(&process)?);
    wait_accepted(&process, count)?;
    let elapsed = started.elapsed();
    let jobs = (count as f64 - before).max(1.0);
    wait_indexed(&process)?;
    let micros = (process.cpu_time() - cpu).as_secs_f64() * 1e6 / jobs;
    process.stop()?;
    Ok((jobs / elapsed.as_secs_f64(), micros))
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
    add("the same, until the index has applied them", |round| {
        round.indexed
    });
    add("accepted from a backlog", |round| round.backlog);
    add("accepted from a backlog, with idempotency keys", |round| {
        round.keyed
    });
    let micros: Vec<f64> = rounds.iter().map(|round| round.micros).collect();
    figures.add(
        "processor time of the scheduler per accepted job, median",
        format!("{:.1} us", median(&micros)),
    );
}
