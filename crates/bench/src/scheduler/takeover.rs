//! How long jobs wait for another process when theirs is killed.

use std::time::{Duration, Instant};

use super::PARTITIONS;
use super::arrivals::{Arrival, Arrivals};
use super::env::{BULK, PATIENCE, SchedulerEnv, partition};
use super::trickle::Trickle;
use crate::figures::Figures;
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::redis::Redis;

const RATE: f64 = 400.0;
/// Who is later than this has waited for another process.
const HELD_UP: f64 = 1_000.0;

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
    let held_up: Vec<f64> = latest.iter().copied().filter(|late| *late > HELD_UP).collect();
    let others = latest
        .iter()
        .copied()
        .filter(|late| *late <= HELD_UP)
        .fold(0.0, f64::max);
    let longest = held_up.iter().copied().fold(0.0, f64::max);
    figures.add(
        name,
        format!(
            "the latest job of {} partitions {:.2} s, of the other {} {:.2} s",
            held_up.len(),
            longest / 1000.0,
            latest.len() - held_up.len(),
            others / 1000.0
        ),
    );
}

/// Two processes share the work; one is killed.
async fn by_another(broker: &Broker, redis: &mut Redis) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, "another").await?;
    let processes = [env.start_and_wait("a")?, env.start("b", false)?];
    wait_until("both have shards", PATIENCE, || {
        let mut shards = Vec::new();
        for process in &processes {
            shards.push(live(process)?);
        }
        Ok(shards.iter().all(|live| *live > 0.0) && shards.iter().sum::<f64>() >= f64::from(PARTITIONS))
    })?;
    let (trickle, arrivals) = start(&env)?;
    let [killed, left] = processes;
    killed.kill()?;
    let latest = end(trickle, arrivals, &left)?;
    left.stop()?;
    env.tear_down().await?;
    Ok(latest)
}

/// One process is killed and started again.
async fn by_itself(broker: &Broker, redis: &mut Redis) -> anyhow::Result<Vec<f64>> {
    let env = SchedulerEnv::build(broker, redis, "itself").await?;
    let process = env.start("a", true)?;
    wait_until("all shards are live", PATIENCE, || {
        Ok(live(&process)? >= f64::from(PARTITIONS))
    })?;
    let (trickle, arrivals) = start(&env)?;
    process.kill()?;
    let process = env.start("a", true)?;
    let latest = end(trickle, arrivals, &process)?;
    process.stop()?;
    env.tear_down().await?;
    Ok(latest)
}

fn live(process: &Running) -> anyhow::Result<f64> {
    // Nobody answers while it starts.
    Ok(process.metric("redeliver_scheduler_live_shards").unwrap_or(0.0))
}

fn start(env: &SchedulerEnv) -> anyhow::Result<(Trickle, Arrivals)> {
    let arrivals = Arrivals::at(&env.broker, &env.of_app(BULK))?;
    let trickle = Trickle::start(env, BULK, RATE, Duration::from_millis(500), &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_secs(3));
    Ok((trickle, arrivals))
}

/// The lateness of the latest job of each partition.
fn end(trickle: Trickle, arrivals: Arrivals, left: &Running) -> anyhow::Result<Vec<f64>> {
    let began = Instant::now();
    wait_until("all shards are live again", PATIENCE, || {
        Ok(live(left)? >= f64::from(PARTITIONS))
    })?;
    println!(
        "all shards are live again after {:.2} s",
        began.elapsed().as_secs_f64()
    );
    std::thread::sleep(Duration::from_secs(2));
    let sent = trickle.stop()?;
    let mut latest = vec![0.0_f64; PARTITIONS as usize];
    for Arrival { number, lateness } in arrivals.all(sent)? {
        let shard = partition(usize::try_from(number)?) as usize;
        latest[shard] = latest[shard].max(lateness);
    }
    Ok(latest)
}
