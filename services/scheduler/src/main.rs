//! The scheduler binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_of;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Accept jobs, and dispatch them to topics when they are due, exactly once and never early
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    service: ServiceArgs,
    #[command(flatten)]
    one_shot: UntilIdleArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    main_of(
        "scheduler",
        &args.service,
        args.one_shot,
        redeliver_scheduler::check,
        redeliver_scheduler::run,
    )
}
