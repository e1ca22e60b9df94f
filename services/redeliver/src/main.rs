//! The command line of Redeliver.

mod acls;
mod audit;
mod config;
mod connection;
mod controls;
mod dev;
mod dlq;
#[cfg(test)]
mod documented;
mod jobs;
mod obstacles;
mod output;
mod pages;
mod progress;
mod record;
mod render;
mod schedules;
mod status;
mod times;
mod tokens;
mod topics;
mod trace;
mod upcoming;
mod waiting;

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use redeliver_runtime::{metrics, panics};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Schedule jobs, retry failed records and manage dead letters on Kafka
#[derive(Parser)]
#[command(name = "redeliver", version = metrics::version())]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run all services in one process on an embedded broker, with demonstration data (default)
    Dev(dev::DevArgs),
    /// Show waiting, overdue and dead records on one screen, and what holds them up
    Status(status::StatusArgs),
    /// Show what becomes due soon: jobs, schedules and retries
    #[command(
        after_help = "Examples:\n  redeliver upcoming --for 1h\n\nExit status: 1 if the scheduler or the inspector cannot be asked"
    )]
    Upcoming(upcoming::UpcomingArgs),
    /// Create, check or print the topics of the configuration
    Topics(topics::TopicsArgs),
    /// Print the Kafka permissions that the configuration needs
    Acls(acls::AclsArgs),
    /// Verify that each record is exactly once in the output, dead or waiting
    #[command(
        after_help = "Examples:\n  redeliver audit --pipeline orders\n  redeliver audit -o json\n\nExit status: 1 if a record is lost, doubled, early, altered or unknown"
    )]
    Audit(audit::AuditArgs),
    /// Schedule, list, reschedule and cancel jobs
    Jobs(jobs::JobsArgs),
    /// Create, preview, list and change recurring schedules
    Schedules(schedules::SchedulesArgs),
    /// Pause an application, a pipeline or a tier
    #[command(
        after_help = "Examples:\n  redeliver pause app/sms --reason 'the provider is down'\n  redeliver pause pipeline/orders --reason maintenance\n  redeliver pause tier/orders/30s --reason 'the endpoint is overloaded'"
    )]
    Pause(controls::PauseArgs),
    /// Resume an application, a pipeline or a tier
    #[command(
        after_help = "Examples:\n  redeliver resume app/sms\n  redeliver resume pipeline/orders --as-configured"
    )]
    Resume(controls::ResumeArgs),
    /// Limit the jobs, attempts or releases per second of an application, a pipeline or a tier
    #[command(
        after_help = "Examples:\n  redeliver rate app/sms 5 --reason 'the provider is slow'\n  redeliver rate pipeline/orders configured --reason 'INC-17 is over'"
    )]
    Rate(controls::RateArgs),
    /// Release the waiting records of a tier before they are due
    #[command(
        after_help = "Examples:\n  redeliver release tier/orders/1h --reason 'the endpoint is repaired'\n  redeliver release tier/1h --reason 'the network works again'\n  redeliver release tier/orders/scheduler --reason 'INC-17 is over'"
    )]
    Release(controls::ReleaseArgs),
    /// List pauses, rates and releases
    Controls(controls::ControlsArgs),
    /// List, show, watch, export, redrive and discard dead letters
    Dlq(dlq::DlqArgs),
    /// List and count records that wait for their next attempt
    Waiting(waiting::WaitingArgs),
    /// Show the history of a record, or find records by key, header or JSON field
    #[command(
        after_help = "Examples:\n  redeliver trace orders/3/8812\n  redeliver trace --key customer-17 --pipeline orders\n  redeliver trace --field /order/id=4711 --since 3d -o json"
    )]
    Trace(trace::TraceArgs),
    /// Create tokens for the APIs
    Tokens(tokens::TokensArgs),
}

fn main() -> ExitCode {
    panics::log_locations();
    match Args::parse()
        .command
        .unwrap_or_else(|| Command::Dev(dev::DevArgs::default()))
    {
        Command::Dev(args) => dev::main(args),
        Command::Status(args) => status::main(&args),
        Command::Topics(args) => topics::main(&args),
        Command::Acls(args) => acls::main(&args),
        Command::Audit(args) => audit::main(&args),
        Command::Upcoming(args) => upcoming::main(&args),
        Command::Jobs(args) => jobs::main(&args),
        Command::Schedules(args) => schedules::main(&args),
        Command::Pause(args) => controls::pause(&args),
        Command::Resume(args) => controls::resume(&args),
        Command::Rate(args) => controls::set_rate(&args),
        Command::Release(args) => controls::release(&args),
        Command::Controls(args) => controls::list(&args),
        Command::Dlq(args) => dlq::main(&args),
        Command::Waiting(args) => waiting::main(&args),
        Command::Trace(args) => trace::main(&args),
        Command::Tokens(args) => tokens::main(&args),
    }
}

/// Prints a line. Errors are ignored, because a reader such as `head` may close the pipe.
fn say(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
