//! The `dlq-inspector` binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_of;

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
    main_of(
        "dlq-inspector",
        &args.service,
        UntilIdleArgs::default(),
        redeliver_dlq_inspector::check,
        redeliver_dlq_inspector::run,
    )
}
