//! The scheduler binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::CommonArgs;
use redeliver_runtime::metrics;
use redeliver_service::main_with;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Dispatches jobs to their application's Kafka topic when they are due, exactly once and never early.
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    main_with(
        "scheduler",
        &args.common,
        Vec::new(),
        redeliver_scheduler::check,
        redeliver_scheduler::run,
    )
}
