//! The retry-tier binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_of;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Release waiting records when they are due, exactly once and never early
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    service: ServiceArgs,
    /// Serve only this tier, such as 30s; can be repeated (default: retry_tier.tiers, or else all)
    #[arg(long, value_name = "DELAY")]
    tier: Vec<String>,
    #[command(flatten)]
    one_shot: UntilIdleArgs,
}

fn main() -> ExitCode {
    redeliver_kafka_ffi::allocator::purge_at_once();
    let mut args = Args::parse();
    if !args.tier.is_empty() {
        let tiers = ("retry_tier.tiers".to_owned(), args.tier.join(","));
        args.service.common.set.push(tiers);
    }
    main_of(
        "retry-tier",
        &args.service,
        args.one_shot,
        redeliver_retry_tier::check,
        redeliver_retry_tier::run,
    )
}
