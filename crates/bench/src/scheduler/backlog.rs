//! Many requests of one application at once, while jobs of another one, which were accepted before, become due.

use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_core::{Clock, SystemClock};

use super::arrivals::Arrivals;
use super::env::{JobSpec, SchedulerEnv, TRICKLE, partition, wait_accepted, wait_indexed};
use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::redis::Redis;

/// Jobs of the other application, and the time between two of them.
const OTHERS: usize = 3_000;
const INTERVAL: Duration = Duration::from_millis(10);

pub(super) async fn run(
    broker: &Broker,
    redis: &mut Redis,
    count: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let env = SchedulerEnv::build(broker, redis, "backlog").await?;
    let process = env.start_and_wait("a")?;
    let begin = SystemClock.now().after(Duration::from_secs(10));
    env.broker.fill(OTHERS, |number| {
        let job = JobSpec {
            number,
            due: begin.after(INTERVAL.mul_f64(number as f64)),
            partition: partition(number),
        };
        env.request(TRICKLE, job)
    })?;
    wait_accepted(&process, OTHERS)?;
    wait_indexed(&process)?;
    let others = Arrivals::at(broker, &env.app_topic(TRICKLE))?;
    let remaining = SystemClock.until(begin);
    ensure!(!remaining.is_zero(), "accepting the jobs took too long");
    std::thread::sleep(remaining);
    let later = begin.after(Duration::from_secs(6 * 3600));
    let started = Instant::now();
    env.schedule(count, |_| later)?;
    wait_accepted(&process, OTHERS + count)?;
    let elapsed = started.elapsed();
    let arrivals = others.all(OTHERS)?;
    let meanwhile = arrivals
        .iter()
        .filter(|arrival| INTERVAL.mul_f64(arrival.number as f64) < elapsed)
        .map(|arrival| arrival.lateness);
    figures.add(
        format!(
            "lateness of 100/s of another application while {count} jobs are accepted, in {:.1} s",
            elapsed.as_secs_f64()
        ),
        Distribution::of(meanwhile.collect()),
    );
    process.stop()?;
    env.tear_down().await
}
