//! The inspector's binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{CommonArgs, main_with};
use redeliver_runtime::metrics;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Shows the dead letters of all pipelines over gRPC: list, read, count and watch them.
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    main_with(
        "dlq-inspector",
        &args.common,
        Vec::new(),
        redeliver_dlq_inspector::check,
        redeliver_dlq_inspector::run,
    )
}
