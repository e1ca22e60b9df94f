//! The enricher binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_of;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Call an HTTP endpoint for each record of a topic, and write a result, a retry or a dead letter, exactly once
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
        "enricher",
        &args.service,
        args.one_shot,
        redeliver_enricher::check,
        redeliver_enricher::run,
    )
}
