//! Benchmarks of Redeliver on a real broker, next to baselines in the same run. `cargo xtask bench` starts a broker for
//! each run.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures are rounded for display"
)]

mod bare;
mod breaker;
mod console;
mod dlq;
mod figures;
mod isolation;
mod kafka;
mod lake;
mod lane;
mod memory;
mod outcomes;
mod process;
mod records;
mod redis;
mod relay;
mod scheduler;
mod service;
mod transactions;
mod waiting;
mod worker;

use clap::{Parser, Subcommand};

use crate::figures::Figures;
use crate::kafka::Broker;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures Redeliver on a real broker.
#[derive(Parser)]
struct Args {
    /// Addresses of the broker
    #[arg(long, env = "KAFKA_BROKERS")]
    brokers: String,
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Relay throughput next to the bare loop; the whole retry path; lateness
    Relay {
        /// Records per measurement
        #[arg(long, default_value_t = 1_000_000)]
        count: usize,
        /// Number of rounds; each round measures everything once
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Measure only these parts, separated by commas
        #[arg(long, value_enum, value_delimiter = ',', default_values_t = relay::Part::ALL)]
        only: Vec<relay::Part>,
    },
    /// Wall time of a worker compared to the lower bound of work / concurrency, and to a bare HTTP client
    Worker {
        /// Number of rounds; each round measures everything once
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Ways to write consecutive transactions with the client library alone
    Transactions {
        /// Number of rounds; each round measures everything once
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Memory of a retry-tier process while records wait
    Memory {
        /// Waiting records
        #[arg(long, default_value_t = 1_000_000)]
        count: usize,
    },
    /// Acceptance, dispatch, lateness, index rebuild and takeover of the scheduler, next to a polling scheduler
    Scheduler(scheduler::Options),
    /// Indexing, memory, disk and queries of an inspector process
    Dlq(dlq::Options),
    /// Pages of a console process for many viewers, next to a static page
    Console(console::Options),
    /// Scans of waiting records by an inspector process, and actions on them while others are released
    Waiting(waiting::Options),
    /// Memory and calls of an inspector process that knows what became of jobs
    Outcomes(outcomes::Options),
    /// The circuit breaker of an enricher process while a part of the calls fails, and after an outage
    Breaker {
        /// Number of rounds; each round measures everything once
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Rows that a redeliver-lake process appends, next to loops that only write Parquet; its memory, lateness and files; a query
    Lake(lake::Options),
    /// Lateness of the records of others while a topic cannot be written, on a cluster of two brokers
    Isolation(isolation::Options),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    rustls::crypto::ring::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a provider of cryptography is installed already"))?;
    let args = Args::parse();
    let broker = Broker::new(args.brokers);
    let mut figures = Figures::default();
    match args.bench {
        Bench::Relay { count, rounds, only } => {
            relay::run(&broker, count, rounds, &only, &mut figures).await?;
        }
        Bench::Worker { rounds } => worker::run(&broker, rounds, &mut figures).await?,
        Bench::Transactions { rounds } => transactions::run(&broker, rounds, &mut figures).await?,
        Bench::Memory { count } => memory::run(&broker, count, &mut figures).await?,
        Bench::Dlq(options) => dlq::run(&broker, &options, &mut figures).await?,
        Bench::Console(options) => console::run(&broker, &options, &mut figures).await?,
        Bench::Waiting(options) => waiting::run(&broker, &options, &mut figures).await?,
        Bench::Outcomes(options) => outcomes::run(&broker, &options, &mut figures).await?,
        Bench::Breaker { rounds } => breaker::run(&broker, rounds, &mut figures)?,
        Bench::Lake(options) => lake::run(&broker, &options, &mut figures).await?,
        Bench::Isolation(options) => isolation::run(&options, &mut figures).await?,
        Bench::Scheduler(options) => scheduler::run(&broker, &options, &mut figures).await?,
    }
    println!("{}", figures.table());
    Ok(())
}
