//! The scheduler binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, Start, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_with;

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
    if let Some(code) = args.service.run_command() {
        return code;
    }
    main_with(
        "scheduler",
        &args.service.common,
        Vec::new(),
        redeliver_scheduler::check,
        |start, own| {
            let until_idle = args.one_shot.until_idle;
            redeliver_scheduler::run(Start { until_idle, ..start }, own)
        },
    )
}
