//! The command line of Redeliver.

mod audit;
mod connection;
mod dev;
mod dlq;
mod jobs;
mod output;
mod topics;

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use redeliver_runtime::{metrics, panics};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Delivers each Kafka record at its right moment: failed ones again after a growing delay, hopeless ones
/// into a dead-letter topic, each exactly once.
#[derive(Parser)]
#[command(name = "redeliver", version = metrics::version())]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run everything in this process on a broker in memory, with a demonstration (the default)
    Dev(dev::DevArgs),
    /// Create or check the topics of the configured pipelines
    Topics(topics::TopicsArgs),
    /// Prove that nothing is lost, doubled, early or altered: in = out + waiting + dead
    Audit(audit::AuditArgs),
    /// Schedule, look up and cancel jobs
    Jobs(jobs::JobsArgs),
    /// List, show and watch dead letters
    Dlq(dlq::DlqArgs),
}

fn main() -> ExitCode {
    panics::log_places();
    match Args::parse()
        .command
        .unwrap_or_else(|| Command::Dev(dev::DevArgs::default()))
    {
        Command::Dev(args) => dev::main(args),
        Command::Topics(args) => topics::main(&args),
        Command::Audit(args) => audit::main(&args),
        Command::Jobs(args) => jobs::main(&args),
        Command::Dlq(args) => dlq::main(&args),
    }
}

/// Prints a line. Whoever reads it, such as `head`, may stop reading early.
fn say(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
