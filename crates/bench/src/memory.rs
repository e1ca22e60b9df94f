//! `bench memory`: the memory of a retry-tier process before, while and after a million records wait.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use redeliver_core::{Clock, Jitter, Pipeline, RetryPolicy, Span, SystemClock};

use crate::figures::Figures;
use crate::kafka::Broker;
use crate::relay::waiting;

const PARTITIONS: i32 = 4;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn rss_mib(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    }
}

pub(crate) async fn run(broker: &Broker, count: usize, figures: &mut Figures) -> anyhow::Result<()> {
    // Long enough to fill the tier and look at the process while all of it waits.
    let tier = Span::from_secs(90);
    let name = broker.name("memory");
    let policy = RetryPolicy::listed(vec![tier], None, Jitter::None)?;
    let pipeline = Pipeline {
        policy,
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(&name)
    };
    broker.create_for(&pipeline, PARTITIONS).await?;
    let file = std::env::temp_dir().join(format!("{name}.yaml"));
    std::fs::write(
        &file,
        format!(
            "instance: {name}
kafka: {{ brokers: '{}' }}
pipelines: {{ {name}: {{ output: '{name}-out', retry: {{ tiers: [{tier}] }} }} }}
admin: {{ listen: 127.0.0.1:0 }}
",
            broker.address
        ),
    )?;
    let binary = std::env::current_exe()?
        .parent()
        .map(PathBuf::from)
        .context("directory")?
        .join("retry-tier");
    let process = Command::new(&binary)
        .arg("--config")
        .arg(&file)
        .stderr(Stdio::null())
        .spawn();
    let process = Running(process.with_context(|| format!("starting {}", binary.display()))?);
    let due_topic = broker.watch(&pipeline.due_topic(), PARTITIONS)?;
    // A first record that is due shows that the process is at work.
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
        let rss = settled(&process)?;
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
        format!("{:.1} MiB", settled(&process)?),
    );
    drop(process);
    std::fs::remove_file(&file)?;
    broker.delete_of(&pipeline).await
}

/// The memory once it has not grown for two seconds: the prefetch is full.
fn settled(process: &Running) -> anyhow::Result<f64> {
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
