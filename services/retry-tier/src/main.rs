//! The retry-tier binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, Start, UntilIdleArgs};
use redeliver_runtime::metrics;
use redeliver_service::main_with;

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
    let args = Args::parse();
    if let Some(code) = args.service.run_command() {
        return code;
    }
    let tiers = (!args.tier.is_empty()).then(|| ("retry_tier.tiers".to_owned(), args.tier.join(",")));
    main_with(
        "retry-tier",
        &args.service.common,
        tiers.into_iter().collect(),
        redeliver_retry_tier::check,
        |start, own| {
            let until_idle = args.one_shot.until_idle;
            redeliver_retry_tier::run(Start { until_idle, ..start }, own)
        },
    )
}
