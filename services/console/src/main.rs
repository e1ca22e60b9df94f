//! The console binary.

use std::process::ExitCode;

use clap::Parser;
use redeliver_runtime::cli::{ServiceArgs, main_with};
use redeliver_runtime::metrics;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Show in a browser what fails, what waits and what is due
#[derive(Parser)]
#[command(version = metrics::version())]
struct Args {
    #[command(flatten)]
    service: ServiceArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(code) = args.service.run_command() {
        return code;
    }
    main_with(
        "console",
        &args.service.common,
        redeliver_console::check,
        redeliver_console::run,
    )
}
