//! `cargo xtask bench`: measurements on a Kafka of their own, in a release build.

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::LocalKafka;

use crate::packages;

/// What to measure; see `redeliver-bench --help` for its flags.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// relay, worker or memory, and flags such as `--count 100000`
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "BENCH"
    )]
    bench: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    packages::ensure_installed(packages::SERVERS)?;
    let cargo = || Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let build = cargo()
        .args([
            "build",
            "--release",
            "--package",
            "redeliver-bench",
            "--package",
            "redeliver-retry-tier",
        ])
        .status()
        .context("running cargo")?;
    ensure!(build.success(), "building the benchmarks: {build}");
    // Nothing else runs on it, so that figures are of us and the broker alone.
    let kafka = LocalKafka::start().context("starting a Kafka to measure on")?;
    let measured = cargo()
        .args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "redeliver-bench",
            "--",
        ])
        .args(&arguments.bench)
        .env("KAFKA_BROKERS", kafka.brokers())
        .status()
        .context("running the benchmarks")?;
    Ok(if measured.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
