//! A million waiting jobs: their cost, and the rebuild of the index after Redis is emptied, while jobs of all partitions are
//! dispatched.

use std::time::{Duration, Instant};

use redeliver_core::{Clock, SystemClock};

use super::PARTITIONS;
use super::arrivals::{Arrivals, lateness};
use super::env::{BULK, JobSpec, SchedulerEnv, TRICKLE, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Distribution, Figures, per_second, rate};
use crate::kafka::Broker;
use crate::process::wait_until;
use crate::redis::Redis;

pub(super) async fn run(
    broker: &Broker,
    redis: &mut Redis,
    count: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let env = SchedulerEnv::build(broker, redis, "waiting").await?;
    let process = env.start_and_wait("a")?;
    let (memory, rss) = (redis.used_memory()?, process.rss_mib()?);
    figures.add(
        "resident memory of a scheduler, nothing waiting",
        format!("{rss:.0} MiB"),
    );
    let first = SystemClock.now().after(Duration::from_secs(6 * 3600));
    // The last partition has none of these jobs.
    env.broker.fill(count, |number| {
        let job = JobSpec {
            number,
            due: first.after(Duration::from_millis(50 * number as u64)),
            partition: i32::try_from(number % 3).unwrap_or(0),
        };
        env.request(BULK, job)
    })?;
    wait_accepted(&process, count)?;
    wait_indexed(&process)?;
    let per_job = (redis.used_memory()? - memory) / count as f64;
    figures.add(
        format!("Redis per waiting job, {count} of {} bytes of data", super::DATA),
        format!("{per_job:.0} bytes"),
    );
    figures.add(
        format!("resident memory of the scheduler, {count} waiting"),
        format!("{:.0} MiB", process.rss_mib()?),
    );
    // What remains without the buffers of the commands that were read.
    process.stop()?;
    let process = env.start_and_wait("a")?;
    figures.add(
        format!("resident memory of a restarted scheduler, {count} waiting"),
        format!("{:.0} MiB", process.rss_mib()?),
    );

    let affected = Arrivals::at(broker, &env.app_topic(BULK))?;
    let unaffected = Arrivals::at(broker, &env.app_topic(TRICKLE))?;
    let delay = Duration::from_secs(2);
    let trickles = [
        Trickle::start(&env, BULK, 100.0, delay, &[0, 1, 2]),
        Trickle::start(&env, TRICKLE, 100.0, delay, &[3]),
    ];
    std::thread::sleep(Duration::from_secs(5));
    redis.empty()?;
    let (started, cpu) = (Instant::now(), process.cpu_time());
    let mut most: f64 = 0.0;
    wait_until("the index is rebuilt", super::env::TIMEOUT, || {
        most = most.max(process.rss_mib()?);
        let mut found = 0;
        for shard in 0..PARTITIONS {
            found += redis.members(&env.due_set(shard))?;
        }
        Ok(found >= count as u64)
    })?;
    let elapsed = started.elapsed();
    let cpu = process.cpu_time() - cpu;
    figures.add(
        format!("index of {count} waiting jobs rebuilt after FLUSHALL"),
        format!(
            "{:.1} s ({}), {:.1} s of processor time, at most {most:.0} MiB resident",
            elapsed.as_secs_f64(),
            per_second(rate(count, elapsed)),
            cpu.as_secs_f64()
        ),
    );
    std::thread::sleep(Duration::from_secs(3));
    let sent = trickles.map(Trickle::stop);
    let [affected_sent, unaffected_sent] = sent;
    figures.add(
        "lateness meanwhile, 100/s in a partition without them",
        Distribution::of(lateness(&unaffected.all(unaffected_sent?)?)),
    );
    figures.add(
        "lateness meanwhile, 100/s in the partitions of the waiting jobs",
        Distribution::of(lateness(&affected.all(affected_sent?)?)),
    );
    process.stop()?;
    env.tear_down().await
}
