//! Developer tasks: `cargo xtask <COMMAND>`. Each command has its own module.

mod bench;
mod compose;
mod interrupt;
mod kube;
mod mutants;
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
    /// Start, stop or show the Kafka and the Redis that the tests use
    #[command(subcommand)]
    Services(services::Verb),
    /// Start or stop a Kubernetes API server with fake nodes, to try the Helm chart on
    #[command(subcommand)]
    Kube(kube::Verb),
    /// Start the services, run the tests, stop the services and print a summary line
    Test(test::Arguments),
    /// Check that the tests catch each planted defect
    Mutants(mutants::Arguments),
    /// Run benchmarks on a separate Kafka and Redis
    Bench(bench::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().verb {
        Verb::Services(verb) => services::run(&verb),
        Verb::Kube(verb) => kube::run(verb),
        Verb::Test(arguments) => test::run(&arguments),
        Verb::Mutants(arguments) => mutants::run(&arguments),
        Verb::Bench(arguments) => bench::run(&arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
