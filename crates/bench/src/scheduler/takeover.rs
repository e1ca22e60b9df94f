//! How long jobs are delayed when their process is killed.

use std::time::{Duration, Instant};

use super::PARTITIONS;
use super::arrivals::{Arrival, Arrivals};
use super::env::{BULK, SchedulerEnv, TIMEOUT, live, partition};
use super::trickle::Trickle;
use crate::figures::Figures;
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::redis::Redis;

const RATE: f64 = 400.0;
/// A partition whose latest job exceeds this lateness in milliseconds was affected by the kill.
const AFFECTED: f64 = 1_000.0;

pub(super) async fn run(broker: &Broker, redis: &mut Redis, figures: &mut Figures) -> anyhow::Result<()> {
    let lateness = by_another(broker, redis).await?;
    add(
        figures,
        "takeover after SIGKILL by another process (goal 15 s)",
        &lateness,
    );
    let lateness = by_itself(broker, redis).await?;
    add(
        figures,
        "takeover after SIGKILL by a restart under the same instance, static membership (goal 3 s)",
        &lateness,
    );
    Ok(())
}

fn add(figures: &mut Figures, name: &str, latest: &[f64]) {
    let affected: Vec<f64> = latest.iter().copied().filter(|late| *late > AFFECTED).collect();
    let others = latest
        .iter()
        .copied()
        .filter(|late| *late <= AFFECTED)
        .fold(0.0, f64::max);
    let longest = affected.iter().copied().fold(0.0, f64::max);
    figures.add(
        name,
        format!(
            "the latest job of {} partitions {:.2} s, of the other {} {:.2} s",
            affected.len(),
            longest / 1000.0,
            latest.len() - affected.len(),
            others / 1000.0
        ),
    );
}

/// Two processes share the shards; one is killed.
async fn by_another(broker: &Broker, redis: &mut Redis) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, "another").await?;
    let processes = [env.start_and_wait("a")?, env.start("b", false)?];
    wait_until("both have shards", TIMEOUT, || {
        let shards: Vec<f64> = processes.iter().map(live).collect();
        Ok(shards.iter().all(|live| *live > 0.0) && shards.iter().sum::<f64>() >= f64::from(PARTITIONS))
    })?;
    let (trickle, arrivals) = start(&env)?;
    let [killed, survivor] = processes;
    killed.kill()?;
    let latest = finish(trickle, arrivals, &survivor)?;
    survivor.stop()?;
    env.tear_down().await?;
    Ok(latest)
}

/// One process is killed and started again.
async fn by_itself(broker: &Broker, redis: &mut Redis) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, "itself").await?;
    let process = env.start("a", true)?;
    wait_until("all shards are live", TIMEOUT, || {
        Ok(live(&process) >= f64::from(PARTITIONS))
    })?;
    let (trickle, arrivals) = start(&env)?;
    process.kill()?;
    let process = env.start("a", true)?;
    let latest = finish(trickle, arrivals, &process)?;
    process.stop()?;
    env.tear_down().await?;
    Ok(latest)
}

fn start(env: &SchedulerEnv) -> anyhow::Result<(Trickle, Arrivals)> {
    let arrivals = Arrivals::at(&env.broker, &env.app_topic(BULK))?;
    let trickle = Trickle::start(env, BULK, RATE, Duration::from_millis(500), &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_secs(3));
    Ok((trickle, arrivals))
}

/// The lateness of the latest job of each partition.
fn finish(trickle: Trickle, arrivals: Arrivals, survivor: &Running) -> anyhow::Result<Vec<f64>> {
    let started = Instant::now();
    wait_until("all shards are live again", TIMEOUT, || {
        Ok(live(survivor) >= f64::from(PARTITIONS))
    })?;
    println!(
        "all shards are live again after {:.2} s",
        started.elapsed().as_secs_f64()
    );
    std::thread::sleep(Duration::from_secs(2));
    let sent = trickle.stop()?;
    let mut latest = vec![0.0_f64; PARTITIONS as usize];
    for Arrival { number, lateness, .. } in arrivals.all(sent)? {
        let shard = partition(usize::try_from(number)?) as usize;
        latest[shard] = latest[shard].max(lateness);
    }
    Ok(latest)
}
