//! The command line of Redeliver.

mod acls;
mod audit;
mod connection;
mod controls;
mod dev;
mod dlq;
mod jobs;
mod output;
mod pages;
mod progress;
mod record;
mod render;
mod schedules;
mod status;
mod tokens;
mod topics;
mod trace;
mod waiting;

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use redeliver_runtime::{metrics, panics};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Delivers each Kafka record at the right moment: jobs when they are due, failed records after a growing delay, each
/// exactly once
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
    /// Show what waits, is due, late and dead, on one screen
    Status(status::StatusArgs),
    /// Create, check or print the topics that the configuration needs
    Topics(topics::TopicsArgs),
    /// Print the permissions that the configuration needs in Kafka
    Acls(acls::AclsArgs),
    /// Verify that every record is once in the output, in the dead letters or waiting
    Audit(audit::AuditArgs),
    /// Schedule, show and cancel jobs
    Jobs(jobs::JobsArgs),
    /// Create, preview, list and change recurring schedules
    Schedules(schedules::SchedulesArgs),
    /// Pause an application, a pipeline or a tier at run time: nothing is lost, and nothing goes on
    Pause(controls::PauseArgs),
    /// Resume what is paused, also an application that the configuration pauses
    Resume(controls::ResumeArgs),
    /// Limit how many jobs of an application are dispatched, attempts of a pipeline started, or records of a tier released, per second
    Rate(controls::RateArgs),
    /// Release what waits now in a tier or in the scheduler, before it is due
    Release(controls::ReleaseArgs),
    /// List what is paused, limited or changed, by whom and why
    Controls(controls::ControlsArgs),
    /// List, show, watch, export, redrive and discard dead letters
    Dlq(dlq::DlqArgs),
    /// List and count the failed records that wait for their next attempt
    Waiting(waiting::WaitingArgs),
    /// Show the life of one record: attempts, waits, death and redrive
    Trace(trace::TraceArgs),
    /// Create tokens for the APIs of the scheduler and the inspector
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
