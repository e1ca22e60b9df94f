//! How late the jobs of an application are while something fails, or while another application is in trouble.

use std::time::Duration;

use anyhow::Context as _;
use redeliver_core::{Clock, SystemClock};
use redeliver_testkit::LocalRedisCluster;

use super::PARTITIONS;
use super::arrivals::{Arrivals, lateness};
use super::env::{BULK, SchedulerEnv, TIMEOUT, TRICKLE, live, wait_accepted, wait_indexed};
use super::trickle::Trickle;
use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::redis::Redis;

/// Jobs of the other application that wait for an hour.
const WAITING: usize = 100_000;
/// The time before the fault, and that from its end to the end of the measurement.
const AROUND: Duration = Duration::from_secs(4);
/// How long a fault lasts that does not end by itself.
const LASTS: Duration = Duration::from_secs(6);

#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    EmptiedRedis,
    FullRedis,
    SilentRedis,
    DeletedTopic,
    RollingRestart,
    Kill,
    KilledPrimary,
    MovedSlots,
}

impl Fault {
    const ALL: [Self; 9] = [
        Self::None,
        Self::EmptiedRedis,
        Self::FullRedis,
        Self::SilentRedis,
        Self::DeletedTopic,
        Self::RollingRestart,
        Self::Kill,
        Self::KilledPrimary,
        Self::MovedSlots,
    ];

    fn description(self) -> &'static str {
        match self {
            Self::None => "nothing fails",
            Self::EmptiedRedis => "FLUSHALL with 100,000 waiting jobs",
            Self::FullRedis => "Redis at maxmemory for 6 s",
            Self::SilentRedis => "Redis does not answer for 6 s",
            Self::DeletedTopic => {
                "the topic of the other application is deleted, and created again after 6 s"
            }
            Self::RollingRestart => "both schedulers are restarted one after the other",
            Self::Kill => "one of two schedulers is killed and started again",
            Self::KilledPrimary => "each primary of a Redis Cluster is killed, and its replica takes over",
            Self::MovedSlots => "the hash slots of all shards move to other nodes of a Redis Cluster",
        }
    }
}

pub(super) async fn run(broker: &Broker, redis: &mut Redis, figures: &mut Figures) -> anyhow::Result<()> {
    for fault in Fault::ALL {
        let millis = measure(broker, redis, fault).await?;
        let distribution = Distribution::of(millis);
        println!("{}: {distribution}", fault.description());
        figures.add(
            format!(
                "lateness of 100/s of another application: {}",
                fault.description()
            ),
            distribution,
        );
    }
    Ok(())
}

async fn measure(broker: &Broker, redis: &mut Redis, fault: Fault) -> anyhow::Result<Vec<f64>> {
    let name = format!("fault-{fault:?}");
    let mut cluster = match fault {
        Fault::KilledPrimary | Fault::MovedSlots => Some(LocalRedisCluster::start_with_replicas()?),
        _ => None,
    };
    let env = match &cluster {
        Some(cluster) => SchedulerEnv::on(broker, &cluster.url(), &name).await?,
        None => SchedulerEnv::build(broker, redis, &name).await?,
    };
    let mut processes = vec![env.start("a", true)?];
    until_live(&processes)?;
    let due = SystemClock.now().after(Duration::from_secs(3_600));
    env.schedule(WAITING, |_| due)?;
    wait_accepted(&processes[0], WAITING)?;
    wait_indexed(&processes[0])?;
    if matches!(fault, Fault::RollingRestart | Fault::Kill) {
        processes.push(env.start("b", true)?);
        until_live(&processes)?;
    }
    let others = Arrivals::at(broker, &env.app_topic(TRICKLE))?;
    let ahead = Duration::from_secs(1);
    let of_other = match fault {
        // A full Redis accepts no jobs: those that are due meanwhile wait already.
        Fault::FullRedis => AROUND + LASTS,
        _ => ahead,
    };
    let mut trickle = Some(Trickle::start(&env, TRICKLE, 100.0, of_other, &[0, 1, 2, 3]));
    let load = Trickle::start(&env, BULK, 400.0, ahead, &[0, 1, 2, 3]);
    std::thread::sleep(AROUND);
    let mut sent = 0;
    match fault {
        Fault::None => {}
        Fault::EmptiedRedis => redis.empty()?,
        Fault::FullRedis => {
            std::thread::sleep(of_other);
            sent = stop(trickle.take())?;
            redis.limit_memory(Some(64 << 10))?;
            std::thread::sleep(LASTS);
            redis.limit_memory(None)?;
        }
        Fault::SilentRedis => {
            redis.pause(LASTS)?;
            std::thread::sleep(LASTS);
        }
        Fault::DeletedTopic => {
            broker.delete(&[&env.app_topic(BULK)]).await?;
            std::thread::sleep(LASTS);
            broker.create(&[&env.app_topic(BULK)], PARTITIONS).await?;
        }
        Fault::RollingRestart => {
            for instance in ["a", "b"] {
                let process = processes.remove(0);
                process.stop()?;
                processes.push(env.start(instance, true)?);
                until_live(&processes)?;
            }
        }
        Fault::Kill => {
            let process = processes.remove(1);
            process.kill()?;
            processes.push(env.start("b", true)?);
            until_live(&processes)?;
        }
        Fault::KilledPrimary => {
            let cluster = cluster.as_mut().context("a cluster")?;
            for primary in 0..cluster.masters().len() {
                cluster.fail_over(primary)?;
            }
        }
        Fault::MovedSlots => {
            let cluster = cluster.as_ref().context("a cluster")?;
            for shard in 0..PARTITIONS {
                cluster.move_slot_of(&env.key(shard), || ())?;
            }
        }
    }
    std::thread::sleep(AROUND);
    load.stop()?;
    sent += stop(trickle)?;
    let millis = lateness(&others.all(sent)?);
    for process in processes {
        process.stop()?;
    }
    env.tear_down().await?;
    Ok(millis)
}

fn stop(trickle: Option<Trickle>) -> anyhow::Result<usize> {
    trickle.map_or(Ok(0), Trickle::stop)
}

/// Waits until each process has live shards, and each shard is live.
fn until_live(processes: &[Running]) -> anyhow::Result<()> {
    wait_until("all shards are live", TIMEOUT, || {
        let shards: Vec<f64> = processes.iter().map(live).collect();
        Ok(shards.iter().all(|live| *live > 0.0) && shards.iter().sum::<f64>() >= f64::from(PARTITIONS))
    })
}
