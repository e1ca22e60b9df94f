//! `bench scheduler`: how fast jobs are accepted and dispatched, how late they are, what waiting costs, how soon
//! jobs fire again after a kill or a wiped Redis; beside a scheduler that polls Redis, in the same run on the same
//! servers.

mod arrivals;
mod burst;
mod env;
mod lateness;
mod polling;
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

/// Partitions of every topic, and so shards.
const PARTITIONS: i32 = 4;
/// Bytes of a job's data.
const DATA: usize = 200;

/// What is to be measured, and how much of it.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Jobs per measurement
    #[arg(long, default_value_t = 200_000)]
    count: usize,
    /// How often throughput is measured; the polling scheduler in between
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Jobs that wait while Redis is emptied
    #[arg(long, default_value_t = 1_000_000)]
    waiting: usize,
    /// How many seconds each measurement of lateness lasts
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Only these
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// The Redis to measure on; it is emptied
    #[arg(long, env = "REDIS_URL")]
    redis: String,
    /// A Python with the packages of `peers/requirements.txt`
    #[arg(long, env = "BENCH_PYTHON")]
    python: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Accept,
    Burst,
    Lateness,
    Waiting,
    Takeover,
    Polling,
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let mut redis = Redis::connect(&options.redis)?;
    let is_wanted = |part| options.only.is_empty() || options.only.contains(&part);
    let polling = match &options.python {
        Some(python) if is_wanted(Part::Polling) => Some(Polling::new(broker, python, &options.redis)?),
        _ => None,
    };
    figures.add("Redis", redis.version()?);
    if let Some(polling) = &polling {
        figures.add("polling scheduler", polling.versions()?);
    }

    let (mut accepted, mut dispatched, mut polled) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.rounds {
        if is_wanted(Part::Accept) {
            accepted.push(throughput::accept(broker, &mut redis, options.count, round).await?);
        }
        if is_wanted(Part::Burst) {
            dispatched.push(burst::dispatch(broker, &mut redis, options.count, round).await?);
        }
        if let Some(polling) = &polling {
            polled.push(polling.burst(&mut redis, options.count, round).await?);
        }
    }
    throughput::report(&accepted, figures);
    burst::report(&dispatched, figures);
    polling::report(&polled, figures);

    if is_wanted(Part::Lateness) {
        let rate = |rates: Vec<f64>, otherwise| {
            if rates.is_empty() {
                otherwise
            } else {
                median(&rates)
            }
        };
        let accept = rate(accepted.iter().map(|round| round.live).collect(), 20_000.0);
        let dispatch = rate(dispatched.iter().map(|round| round.rate).collect(), 20_000.0);
        // Each job costs an acceptance and a dispatch.
        let both = 1.0 / (1.0 / accept + 1.0 / dispatch);
        lateness::run(broker, &mut redis, options.seconds, dispatch, both, figures).await?;
    }
    if let Some(polling) = &polling {
        polling.lateness(&mut redis, options.seconds, figures).await?;
    }
    if is_wanted(Part::Waiting) {
        waiting::run(broker, &mut redis, options.waiting, figures).await?;
        if let Some(polling) = &polling {
            polling.waiting(&mut redis, options.waiting, figures)?;
        }
    }
    if is_wanted(Part::Takeover) {
        takeover::run(broker, &mut redis, figures).await?;
    }
    Ok(())
}
