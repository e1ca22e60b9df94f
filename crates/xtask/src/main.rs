//! Developer tasks, run as `cargo xtask VERB` from anywhere in the workspace. One module per verb.

mod bench;
mod compose;
mod interrupt;
mod packages;
mod services;
mod summary;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer tasks of Redeliver
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Start, stop or show the Kafka and the Redis that tests use
    #[command(subcommand)]
    Services(services::Verb),
    /// Services up, every binary built, every test run, services down, one summary line
    Test(test::Arguments),
    /// Measure on a Kafka of its own, beside baselines in the same run
    Bench(bench::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().verb {
        Verb::Services(verb) => services::run(&verb),
        Verb::Test(arguments) => test::run(&arguments),
        Verb::Bench(arguments) => bench::run(&arguments),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
