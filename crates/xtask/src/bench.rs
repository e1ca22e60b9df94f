//! `cargo xtask bench`: benchmarks in the profile `dist`, on a separate Kafka and Redis.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::target::target_directory;
use redeliver_testkit::{LocalKafka, LocalRedis, languages};

use crate::packages;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// relay, worker, transactions, memory, scheduler, dlq, console, waiting, outcomes, breaker, isolation or lake, followed by its flags, such as `--count 100000`
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "BENCH"
    )]
    bench: Vec<String>,
}

fn build(packages: &[&str]) -> Result<()> {
    let build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--profile", "dist"])
        .args(packages.iter().flat_map(|package| ["--package", package]))
        .status()
        .context("running cargo")?;
    ensure!(build.success(), "building the benchmarks: {build}");
    Ok(())
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    packages::ensure_installed(packages::SERVERS)?;
    build(&[
        "redeliver-bench",
        "redeliver-enricher",
        "redeliver-retry-tier",
        "redeliver-scheduler",
        "redeliver-dlq-inspector",
        "redeliver-console",
    ])?;
    let is_of = |name: &str| arguments.bench.first().is_some_and(|bench| bench == name);
    if is_of("lake") {
        // Apart from the others, as everywhere.
        build(&["redeliver-lake"])?;
    }
    // Only benchmarks use these servers, so that other load does not affect the figures.
    let kafka = LocalKafka::start_for_benchmarks().context("starting Kafka")?;
    let redis = LocalRedis::start().context("starting Redis")?;
    // Not `cargo run`: for a single package, Cargo would select other features and compile the dependencies again.
    let mut bench = Command::new(target_directory()?.join("dist/redeliver-bench"));
    let requirements = [
        ("scheduler", "crates/bench/peers/requirements.txt"),
        ("lake", "services/lake/tests/it/readers/requirements.txt"),
    ];
    if let Some((_, requirements)) = requirements.into_iter().find(|(name, _)| is_of(name)) {
        packages::ensure_installed(packages::PYTHON)?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        bench.env("BENCH_PYTHON", languages::python(&root.join(requirements))?);
    }
    let status = bench
        .args(&arguments.bench)
        .env("KAFKA_BROKERS", kafka.brokers())
        .env("REDIS_URL", redis.url())
        .status()
        .context("running the benchmarks")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
