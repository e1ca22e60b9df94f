//! The common design of a scheduler: a sorted set in Redis, and a loop in Python that polls it every second; see
//! `peers/polling_scheduler.py`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use redeliver_core::{Clock, SystemClock, Timestamp};

use super::arrivals::{Arrivals, lateness, max_lateness};
use super::{DATA, PARTITIONS};
use crate::figures::{Distribution, Figures, median, per_second};
use crate::kafka::Broker;
use crate::redis::Redis;

/// Number of jobs for slow variants.
const FEW: usize = 20_000;

pub(super) struct Polling {
    broker: Broker,
    python: PathBuf,
    redis: String,
}

/// A variant of the polling scheduler.
#[derive(Clone, Copy)]
struct Variant {
    client: &'static str,
    at_once: usize,
    name: &'static str,
    is_slow: bool,
}

const VARIANTS: [Variant; 3] = [
    Variant {
        client: "confluent-kafka",
        at_once: 1,
        name: "confluent-kafka, a ZREM for each job",
        is_slow: false,
    },
    Variant {
        client: "confluent-kafka",
        at_once: 1_000,
        name: "confluent-kafka, a ZREM for each 1,000 jobs",
        is_slow: false,
    },
    Variant {
        client: "kafka-python",
        at_once: 1,
        name: "kafka-python, a ZREM for each job",
        is_slow: true,
    },
];

/// Jobs per second.
pub(super) struct Polled {
    scheduled: f64,
    dispatched: [f64; VARIANTS.len()],
}

/// A process that is killed when it is dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Polling {
    pub(super) fn new(broker: &Broker, python: &std::path::Path, redis: &str) -> anyhow::Result<Self> {
        ensure!(python.exists(), "no Python interpreter at {}", python.display());
        Ok(Self {
            broker: broker.clone(),
            python: python.to_owned(),
            redis: redis.to_owned(),
        })
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.python);
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/polling_scheduler.py"))
            .arg(subcommand)
            .args(["--brokers", &self.broker.address, "--redis", &self.redis])
            .args(["--key", "polling", "--size", &DATA.to_string()]);
        command
    }

    pub(super) fn versions(&self) -> anyhow::Result<String> {
        let output = self.command("versions").stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "the polling scheduler does not start");
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    /// Adds jobs to Redis, and returns the rate. Due times are `step` milliseconds apart.
    fn schedule(&self, count: usize, at_once: usize, due: Timestamp, step: f64) -> anyhow::Result<f64> {
        let output = self
            .command("schedule")
            .args(["--count", &count.to_string(), "--at-once", &at_once.to_string()])
            .args([
                "--first-due",
                &due.as_millis().to_string(),
                "--step",
                &step.to_string(),
            ])
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "scheduling failed");
        let report: BTreeMap<String, f64> = serde_json::from_slice(&output.stdout)?;
        Ok(count as f64 / report.get("seconds").context("seconds")?)
    }

    fn work(&self, topic: &str, count: usize, variant: Variant) -> anyhow::Result<Worker> {
        let child = self
            .command("work")
            .args(["--topic", topic, "--count", &count.to_string()])
            .args([
                "--client",
                variant.client,
                "--at-once",
                &variant.at_once.to_string(),
            ])
            .spawn()
            .context("starting the polling scheduler")?;
        Ok(Worker(child))
    }

    /// All jobs are due at the same instant, for each variant.
    pub(super) async fn burst(
        &self,
        redis: &mut Redis,
        count: usize,
        round: usize,
    ) -> anyhow::Result<Polled> {
        redis.empty()?;
        let later = SystemClock.now().after(Duration::from_secs(3600));
        let scheduled = self.schedule(FEW.min(count), 1, later, 0.0)?;
        let mut dispatched = [0.0; VARIANTS.len()];
        for (number, variant) in VARIANTS.into_iter().enumerate() {
            redis.empty()?;
            let count = if variant.is_slow { FEW.min(count) } else { count };
            let topic = self.broker.name(&format!("polling-{round}-{number}"));
            self.broker.create(&[&topic], PARTITIONS).await?;
            let lead = Duration::from_secs(4) + Duration::from_micros(20 * count as u64);
            let due = SystemClock.now().after(lead);
            self.schedule(count, 1_000, due, 0.0)?;
            ensure!(
                SystemClock.until(due) > Duration::from_secs(2),
                "scheduling took too long for a burst"
            );
            let arrivals = Arrivals::at(&self.broker, &topic)?;
            let worker = self.work(&topic, count, variant)?;
            let arrivals = arrivals.all(count)?;
            // The first arrival shows when the worker polled. The time until then does not count towards its rate.
            let first = arrivals
                .iter()
                .map(|arrival| arrival.lateness)
                .fold(f64::MAX, f64::min);
            dispatched[number] = count as f64 / ((max_lateness(&arrivals) - first) / 1000.0);
            drop(worker);
            self.broker.delete(&[&topic]).await?;
            println!(
                "round {round}: {:.0}/s by polling with {}",
                dispatched[number], variant.name
            );
        }
        Ok(Polled {
            scheduled,
            dispatched,
        })
    }

    pub(super) async fn lateness(
        &self,
        redis: &mut Redis,
        seconds: u64,
        figures: &mut Figures,
    ) -> anyhow::Result<()> {
        for rate in [200.0, 2_000.0] {
            redis.empty()?;
            let topic = self.broker.name(&format!("polling-late-{rate:.0}"));
            self.broker.create(&[&topic], PARTITIONS).await?;
            let count = (rate * seconds as f64) as usize;
            let due = SystemClock.now().after(Duration::from_secs(5));
            self.schedule(count, 1_000, due, 1000.0 / rate)?;
            let arrivals = Arrivals::at(&self.broker, &topic)?;
            let worker = self.work(&topic, count, VARIANTS[1])?;
            figures.add(
                format!("polling every second: lateness at {rate:.0}/s"),
                Distribution::of(lateness(&arrivals.all(count)?)),
            );
            drop(worker);
            self.broker.delete(&[&topic]).await?;
        }
        Ok(())
    }

    pub(super) fn waiting(
        &self,
        redis: &mut Redis,
        count: usize,
        figures: &mut Figures,
    ) -> anyhow::Result<()> {
        redis.empty()?;
        let memory = redis.used_memory()?;
        let later = SystemClock.now().after(Duration::from_secs(3600));
        self.schedule(count, 1_000, later, 50.0)?;
        let per_job = (redis.used_memory()? - memory) / count as f64;
        figures.add(
            format!("polling: Redis per waiting job, {count} of {DATA} bytes"),
            format!("{per_job:.0} bytes"),
        );
        redis.empty()
    }
}

pub(super) fn report(rounds: &[Polled], figures: &mut Figures) {
    if rounds.is_empty() {
        return;
    }
    let mut add = |name: String, values: Vec<f64>| {
        let best = values.iter().copied().fold(0.0, f64::max);
        let text = format!(
            "best {}, median {}",
            per_second(best),
            per_second(median(&values))
        );
        figures.add(name, text);
    };
    add(
        "polling: scheduled by one caller".to_owned(),
        rounds.iter().map(|round| round.scheduled).collect(),
    );
    for (number, variant) in VARIANTS.iter().enumerate() {
        add(
            format!(
                "polling: dispatched, all due at the same instant, {}",
                variant.name
            ),
            rounds.iter().map(|round| round.dispatched[number]).collect(),
        );
    }
}
