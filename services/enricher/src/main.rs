//! The enricher binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::CommonArgs;
use redeliver_runtime::metrics;
use redeliver_service::main_with;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sends each record of a Kafka topic to an HTTP endpoint and writes a result, a retry or a dead letter,
/// exactly once.
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    main_with(
        "enricher",
        &args.common,
        Vec::new(),
        redeliver_enricher::check,
        redeliver_enricher::run,
    )
}
