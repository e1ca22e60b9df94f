//! `bench memory`: the memory of a retry-tier process before, while and after a million records wait in it.

use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_core::{Clock, HumanDuration, Jitter, Pipeline, RetryPolicy, SystemClock};

use crate::figures::Figures;
use crate::kafka::Broker;
use crate::process::Running;
use crate::records::waiting;

const PARTITIONS: i32 = 4;

pub(crate) async fn run(broker: &Broker, count: usize, figures: &mut Figures) -> anyhow::Result<()> {
    // Long enough to fill the tier and measure the process before the first record is due.
    let tier = HumanDuration::from_secs(90);
    let name = broker.name("memory");
    let policy = RetryPolicy::listed(vec![tier], None, Jitter::None)?;
    let pipeline = Pipeline {
        policy,
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(&name)
    };
    broker.create_for(&pipeline, PARTITIONS).await?;
    let process = Running::start(
        "retry-tier",
        &name,
        &format!(
            "instance: {name}
kafka: {{ brokers: '{}', topics: {{ create: true }} }}
pipelines: {{ {name}: {{ output: '{name}-out', retry: {{ tiers: [{tier}] }} }} }}
",
            broker.address
        ),
    )?;
    let due_topic = broker.watch(&pipeline.due_topic(), PARTITIONS)?;
    // The release of a first record shows that the process is running.
    broker.fill(1, |index| waiting(&pipeline, tier, index, SystemClock.now()))?;
    due_topic.time_until(1, Duration::from_secs(60))?;
    figures.add(
        "resident memory, nothing waiting",
        format!("{:.1} MiB", process.rss_mib()?),
    );
    let due = SystemClock.now().after(tier.duration());
    let mut filled = 0;
    for step in [10_000, 100_000, count] {
        broker.fill(step - filled, |index| waiting(&pipeline, tier, index, due))?;
        filled = step;
        let rss = settled_memory(&process)?;
        ensure!(
            SystemClock.now() < due,
            "filling took longer than the tier's delay"
        );
        figures.add(
            format!("resident memory, {step} waiting"),
            format!("{rss:.1} MiB"),
        );
    }
    due_topic.time_until(i64::try_from(count)?, Duration::from_secs(300))?;
    figures.add(
        "resident memory, after all were released",
        format!("{:.1} MiB", settled_memory(&process)?),
    );
    drop(process);
    broker.delete_of(&pipeline).await
}

/// The memory once it has not grown for two seconds. Then, the prefetch queues are full.
fn settled_memory(process: &Running) -> anyhow::Result<f64> {
    let mut most = process.rss_mib()?;
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_secs(2) {
        std::thread::park_timeout(Duration::from_millis(100));
        let rss = process.rss_mib()?;
        if rss > most + 0.5 {
            most = rss;
            since = Instant::now();
        }
    }
    process.rss_mib()
}
