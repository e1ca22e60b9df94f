//! The enricher binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, Start, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_with;

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
    if let Some(code) = args.service.run_command() {
        return code;
    }
    main_with(
        "enricher",
        &args.service.common,
        Vec::new(),
        redeliver_enricher::check,
        |start, own| {
            let until_idle = args.one_shot.until_idle;
            redeliver_enricher::run(Start { until_idle, ..start }, own)
        },
    )
}
