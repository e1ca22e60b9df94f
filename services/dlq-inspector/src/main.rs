//! The `dlq-inspector` binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::ServiceArgs;
use redeliver_runtime::metrics;
use redeliver_service::main_with;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Index the dead letters of all pipelines, answer queries about them, and redrive them
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    service: ServiceArgs,
}

fn main() -> ExitCode {
    redeliver_kafka_ffi::allocator::purge_at_once();
    let args = Args::parse();
    if let Some(code) = args.service.run_command() {
        return code;
    }
    main_with(
        "dlq-inspector",
        &args.service.common,
        Vec::new(),
        redeliver_dlq_inspector::check,
        redeliver_dlq_inspector::run,
    )
}
