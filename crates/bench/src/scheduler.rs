//! `bench scheduler`: the rates at which jobs are accepted and dispatched, their lateness, the cost of waiting jobs, and
//! recovery from a killed process and from an emptied Redis; next to a scheduler that polls Redis, in the same run and on
//! the same servers.

pub(crate) mod arrivals;
mod backlog;
mod burst;
pub(crate) mod env;
mod faults;
mod lateness;
mod polling;
mod recurring;
mod takeover;
mod throughput;
mod trickle;
mod waiting;

use std::path::PathBuf;

use clap::ValueEnum;

use crate::figures::{Figures, median};
use crate::kafka::Broker;
use crate::redis::Redis;
use crate::scheduler::polling::Polling;

/// Partitions of every topic, and thus the number of shards.
pub(crate) const PARTITIONS: i32 = 4;
/// Size of a job's data in bytes.
const DATA: usize = 200;

/// Options of the benchmark.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Jobs per measurement
    #[arg(long, default_value_t = 200_000)]
    count: usize,
    /// Number of rounds of throughput measurements, which alternate with the polling scheduler, and of lateness measurements
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Waiting jobs when Redis is emptied
    #[arg(long, default_value_t = 1_000_000)]
    waiting: usize,
    /// Recurring schedules that are due at each full minute
    #[arg(long, default_value_t = 100_000)]
    schedules: usize,
    /// Applications of these schedules
    #[arg(long, default_value_t = 1_000)]
    apps: usize,
    /// Duration of each lateness measurement in seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Measure only these parts, separated by commas
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// URL of the Redis to use; all its data is deleted
    #[arg(long, env = "REDIS_URL")]
    redis: String,
    /// Python interpreter with the packages of `peers/requirements.txt`; without it, the polling scheduler is not measured
    #[arg(long, env = "BENCH_PYTHON")]
    python: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Accept,
    Backlog,
    Burst,
    Lateness,
    Waiting,
    Takeover,
    Faults,
    Recurring,
    Polling,
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let mut redis = Redis::connect(&options.redis)?;
    let is_selected = |part| options.only.is_empty() || options.only.contains(&part);
    let polling = match &options.python {
        Some(python) if is_selected(Part::Polling) => Some(Polling::new(broker, python, &options.redis)?),
        _ => None,
    };
    figures.add("Redis", redis.version()?);
    if let Some(polling) = &polling {
        figures.add("polling scheduler", polling.versions()?);
    }

    let (mut accepted, mut dispatched, mut polled) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.rounds {
        if is_selected(Part::Accept) {
            accepted.push(throughput::accept(broker, &mut redis, options.count, round).await?);
        }
        if is_selected(Part::Burst) {
            dispatched.push(burst::dispatch(broker, &mut redis, options.count, round).await?);
        }
        if let Some(polling) = &polling {
            polled.push(polling.burst(&mut redis, options.count, round).await?);
        }
    }
    throughput::report(&accepted, figures);
    burst::report(&dispatched, figures);
    polling::report(&polled, figures);

    if is_selected(Part::Backlog) {
        backlog::run(broker, &mut redis, options.count, figures).await?;
    }
    if is_selected(Part::Lateness) {
        let rate = |rates: Vec<f64>, default| {
            if rates.is_empty() { default } else { median(&rates) }
        };
        let accept = rate(accepted.iter().map(|round| round.live).collect(), 20_000.0);
        let dispatch = rate(dispatched.iter().map(|round| round.rate).collect(), 20_000.0);
        // The sustainable rate if each job is both accepted and dispatched during the measurement.
        let both = 1.0 / (1.0 / accept + 1.0 / dispatch);
        let sustained = lateness::Sustained { dispatch, both };
        lateness::run(broker, &mut redis, options, sustained, figures).await?;
    }
    if let Some(polling) = &polling {
        polling.lateness(&mut redis, options.seconds, figures).await?;
    }
    if is_selected(Part::Waiting) {
        waiting::run(broker, &mut redis, options.waiting, figures).await?;
        if let Some(polling) = &polling {
            polling.waiting(&mut redis, options.waiting, figures)?;
        }
    }
    if is_selected(Part::Takeover) {
        takeover::run(broker, &mut redis, figures).await?;
    }
    if is_selected(Part::Faults) {
        faults::run(broker, &mut redis, figures).await?;
    }
    if is_selected(Part::Recurring) {
        recurring::run(broker, &mut redis, options.schedules, options.apps, figures).await?;
    }
    Ok(())
}
