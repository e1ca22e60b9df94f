//! What services share: a process that runs lanes, checks its topics before it reads anything, and serves its metrics
//! and readiness.
//!
//! A service passes two functions to [`main_of`]. One checks the configuration. The other creates a [`Host`], checks
//! the service's topics ([`Host::ensure_topics`]), adds its lanes and tasks, and awaits [`Host::run`].
//!
//! | module | contents |
//! |---|---|
//! | [`host`] | the process; its lanes, and their settings from the configuration |
//! | [`topics`] | the topics that a process needs |
//! | [`groups`] | the consumer groups of the configuration |
//! | [`control`] | what operators have paused or limited at run time |
//! | `replica` | replicas of small topics in the process |
//! | `record_writer` | writing outside of transactions |
//! | [`audit`] | who has changed or seen what |
//! | [`grpc`] | what servers of gRPC have in common |
//! | [`identity`] | who calls an API, and what the caller may do |
//! | `idle` | the one-shot mode: the process ends when nothing is left to do |
//! | [`queues`] | the topics that services read, with what waits in them |
//! | [`leftovers`] | retry topics that the configuration no longer needs |
//! | [`limit_metrics`] | counts what the limits of an API have refused |
//! | [`memory_budget`] | memory that the requests of all callers share |
//! | [`login`] | tokens with which Kafka clients log in |
//! | `credentials` | certificates and passwords in files with which Kafka clients authenticate |
//! | [`metrics`] | metrics and readiness of lanes, and labels that services share |
//! | [`edit`] | edits of records |
//! | [`waiting_actions`] | actions on single records that wait in tiers |
//! | [`due`] | what is due: the metrics by which services are scaled |
//! | `clock` | the guarded clock of the process |
//! | `huge_pages` | large pages of memory, which services do not use |
//! | [`status`] | what workers say about their circuit breakers |
//! | `totals` | what a process has done, in one log line at its end |

pub mod audit;
mod clock;
pub mod control;
pub(crate) mod credentials;
pub mod due;
pub mod edit;
pub mod groups;
pub mod grpc;
pub mod host;
mod huge_pages;
pub mod identity;
pub mod idle;
pub mod installation;
mod kafka_settings;
pub mod leftovers;
pub mod limit_metrics;
pub mod login;
pub mod memory_budget;
pub mod metrics;
pub mod queues;
mod record_writer;
mod replica;
mod request_span;
pub mod status;
pub mod topics;
mod totals;
pub mod waiting_actions;

use std::process::ExitCode;
use std::time::Instant;

use redeliver_runtime::ProgramConfig;
use redeliver_runtime::cli::{self, CommonArgs, ServiceArgs, Start, UntilIdleArgs};
use redeliver_runtime::config::{ConfigError, OwnSections};

pub use host::{Host, LaneStarter, NewLane};

/// Runs a service from its command line to its exit code, as [`cli::main_with`] does. The properties of the Kafka
/// client are checked before `check` is called. When `run` has ended, also with an error, one line of the log says what the
/// process has done.
pub fn main_with<S, F, E>(
    service: &str,
    args: &CommonArgs,
    check: impl FnOnce(&ProgramConfig<S>) -> Result<(), ConfigError>,
    run: impl FnOnce(Start, S) -> F,
) -> ExitCode
where
    S: OwnSections,
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    let check = |config: &ProgramConfig<S>| {
        host::check_kafka(config)?;
        check(config)
    };
    // Before the heap grows.
    let small_pages = huge_pages::disable();
    let run = |start: Start, own: S| {
        if let Err(error) = small_pages {
            tracing::debug!(%error, "cannot disable transparent huge pages");
        }
        let (began, registry) = (Instant::now(), start.registry.clone());
        let running = run(start, own);
        async move {
            let result = running.await;
            totals::log(service, began.elapsed(), &registry);
            result
        }
    };
    cli::main_with(service, args, check, run)
}

/// As [`main_with`], for a binary without other commands and positional arguments. Services that cannot run as batch jobs have the default of
/// `one_shot`.
pub fn main_of<S, F, E>(
    service: &str,
    args: &ServiceArgs,
    one_shot: UntilIdleArgs,
    check: impl FnOnce(&ProgramConfig<S>) -> Result<(), ConfigError>,
    run: impl FnOnce(Start, S) -> F,
) -> ExitCode
where
    S: OwnSections,
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    if let Some(code) = args.run_command() {
        return code;
    }
    let UntilIdleArgs { until_idle } = one_shot;
    main_with(service, &args.common, check, |start, own| {
        run(Start { until_idle, ..start }, own)
    })
}
