//! The common part of every `main`: flags, configuration, telemetry, errors and exit codes.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use redeliver_core::HumanDuration;
use redeliver_core::terminal::multiline;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, LogFormat, NoSections, OwnSections, ProgramConfig, Sources};
use crate::error_chain::{causes, error_chain};
use crate::listen::Listener;
use crate::metrics::{SharedRegistry, build_info, empty_registry};
use crate::telemetry::{Identity, TelemetryError};
use crate::tls::ServerTls;
use crate::{health_check, shutdown, telemetry};

/// The exit code if the command line or the configuration is invalid. The process has not done anything then.
pub const EXIT_USAGE: u8 = 2;
/// The exit code if a process failed while it was running.
pub const EXIT_FAILURE: u8 = 1;

/// The command line of a service without other commands or positional arguments. Use with `#[command(flatten)]`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServiceArgs {
    /// The flags.
    #[command(flatten)]
    pub common: CommonArgs,
    /// What to do instead of running the service.
    #[command(subcommand)]
    pub command: Option<ServiceCommand>,
}

/// The flag of services that can run as batch jobs. Use with `#[command(flatten)]`, and pass its value on in [`Start::until_idle`].
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct UntilIdleArgs {
    /// Exit with status 0 when nothing is left to do now or, with DURATION such as 5m, within it
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true)]
    pub until_idle: Option<Option<HumanDuration>>,
}

/// What the binary of a service does instead of running the service.
#[derive(Clone, Copy, Debug, clap::Subcommand)]
pub enum ServiceCommand {
    /// Print whether the process with this configuration is ready; exit with status 1 if it is not
    Health,
}

/// The heading of flags that say where the configuration is.
const CONFIGURATION: &str = "Configuration options";

/// The flags of every service, and of commands that read the configuration. Use with `#[command(flatten)]`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CommonArgs {
    /// Configuration file; overrides REDELIVER_CONFIG
    #[arg(long, value_name = "FILE", global = true, help_heading = CONFIGURATION)]
    pub config: Option<PathBuf>,
    /// Override a setting, such as kafka.brokers=kafka:9092; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_and_value, global = true, help_heading = CONFIGURATION)]
    pub set: Vec<(String, String)>,
    /// Print the effective configuration without secrets and exit
    #[arg(long, global = true, help_heading = CONFIGURATION)]
    pub print_config: bool,
    /// Validate the configuration and exit
    #[arg(long, global = true, help_heading = CONFIGURATION)]
    pub check: bool,
}

impl ServiceArgs {
    /// Runs the command, if there is one, and returns its exit code. `health` prints the readiness report of the process that runs with
    /// this configuration; its exit code is 0 if the process is ready, and [`EXIT_FAILURE`] if it is not, or does not answer.
    #[must_use]
    pub fn run_command(&self) -> Option<ExitCode> {
        let ServiceCommand::Health = self.command?;
        let config = match self.common.load::<NoSections>() {
            Ok(config) => config,
            Err(error) => {
                let _ = report(&error);
                // Container engines reserve status 2 of a health check.
                return Some(ExitCode::from(EXIT_FAILURE));
            }
        };
        Some(match health_check::check(&config.admin) {
            Ok((status, body)) => {
                let _ = writeln!(std::io::stdout(), "{}", body.trim_end());
                ExitCode::from(if status.is_success() { 0 } else { EXIT_FAILURE })
            }
            Err(error) => report(&error),
        })
    }
}

impl CommonArgs {
    /// Loads the effective configuration.
    ///
    /// # Errors
    /// See [`ProgramConfig::load`].
    pub fn load<S: OwnSections>(&self) -> Result<ProgramConfig<S>, ConfigError> {
        ProgramConfig::load(&Sources::of_process(self.config.clone(), self.set.clone()))
    }

    /// Loads the effective configuration, and handles `--print-config` and `--check`. An invalid configuration can be printed if only
    /// `check` fails.
    ///
    /// # Errors
    /// The exit code if the process must exit. Problems have been reported.
    pub fn configure<S: OwnSections>(
        &self,
        check: impl FnOnce(&ProgramConfig<S>) -> Result<(), ConfigError>,
    ) -> Result<ProgramConfig<S>, ExitCode> {
        let config = self.load().map_err(|error| report(&error))?;
        let text = if self.print_config {
            config.to_yaml()
        } else if let Err(error) = check(&config) {
            return Err(report(&error));
        } else if self.check {
            "the configuration is valid\n".to_owned()
        } else {
            return Ok(config);
        };
        // A closed pipe, such as that of `head`, is not an error.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Err(ExitCode::SUCCESS)
    }
}

/// What a service needs to run.
#[derive(Debug)]
pub struct Start {
    /// The validated configuration, without the sections of the program itself.
    pub config: Arc<Config>,
    /// The effective configuration as JSON, without secrets.
    pub effective: Arc<str>,
    /// Cancelled by the first signal.
    pub shutdown: CancellationToken,
    /// The listener of the admin port, which nothing serves yet.
    pub admin: Listener,
    /// The metrics of the process. They outlive the service, so that its totals can be read after it has ended.
    pub registry: SharedRegistry,
    /// One-shot mode: the process ends when nothing is left to process, nor due within this time if there is one. See [`UntilIdleArgs`].
    /// Its consumers are not static members.
    pub until_idle: Option<Option<HumanDuration>>,
}

impl Start {
    /// What a service needs to run, with no metrics yet, for a program without sections of its own.
    #[must_use]
    pub fn new(config: Arc<Config>, shutdown: CancellationToken, admin: Listener) -> Self {
        let shown = ProgramConfig {
            shared: (*config).clone(),
            own: NoSections {},
        };
        Self {
            effective: shown.to_json().into(),
            config,
            shutdown,
            admin,
            registry: Arc::new(Mutex::new(empty_registry())),
            until_idle: None,
        }
    }
}

/// Runs a service and returns its exit code.
///
/// `S` has the sections that only this service reads.
/// `check` validates what only the service can check, such as files. It also runs for `--check`, after the certificates of
/// the admin port have been checked.
///
/// Errors are reported once, with their causes: on stderr, or in the log if its format is JSON. The exit code
/// is 0 on success, [`EXIT_USAGE`] if the configuration is invalid (even if `run` returns a [`ConfigError`]),
/// and [`EXIT_FAILURE`] otherwise.
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
    let configured = args.configure(|config: &ProgramConfig<S>| {
        ServerTls::of_admin(&config.admin.tls)?;
        check(config)
    });
    let config = match configured {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    let code = runtime.block_on(with_telemetry(service, config, run));
    // Do not wait for tasks that are still running after the grace period.
    runtime.shutdown_background();
    code.unwrap_or_else(|error| report(&*error))
}

/// Returns an error only if the log is not set up yet. Other errors are reported here.
async fn with_telemetry<S, F, E>(
    service: &str,
    config: ProgramConfig<S>,
    run: impl FnOnce(Start, S) -> F,
) -> anyhow::Result<ExitCode>
where
    S: OwnSections,
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    // Handlers must exist before "started" is logged: a signal may follow it immediately.
    let shutdown = CancellationToken::new();
    shutdown::on_signals(shutdown.clone())?;
    let identity = Identity {
        service,
        instance: &config.instance,
    };
    let format = config.telemetry.log;
    let telemetry = telemetry::init(&config.telemetry, identity)?;
    let result = start(service, config, shutdown, run).await;
    telemetry.shutdown().await;
    let Err(error) = result else {
        tracing::info!(service, "stopped");
        return Ok(ExitCode::SUCCESS);
    };
    Ok(match format {
        LogFormat::Text => {
            tracing::error!(service, "stopped with an error");
            report(&*error)
        }
        LogFormat::Json => {
            tracing::error!(service, error = error_chain(&*error), "stopped with an error");
            ExitCode::from(exit_code(&*error))
        }
    })
}

async fn start<S, F, E>(
    service: &str,
    config: ProgramConfig<S>,
    shutdown: CancellationToken,
    run: impl FnOnce(Start, S) -> F,
) -> anyhow::Result<()>
where
    S: OwnSections,
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    let mut admin = Listener::bind("admin.listen", config.admin.listen)?;
    if let Some(tls) = ServerTls::of_admin(&config.admin.tls)? {
        admin = admin.with_tls(tls);
    }
    let build = build_info();
    tracing::info!(
        service,
        version = build.version,
        commit = build.commit,
        instance = config.instance,
        admin = %admin.local_addr()?,
        "started"
    );
    let start = Start {
        effective: config.to_json().into(),
        ..Start::new(Arc::new(config.shared), shutdown, admin)
    };
    run(start, config.own).await.map_err(Into::into)
}

/// Prints an error with its causes to stderr and returns its exit code.
pub fn report(error: &(dyn Error + 'static)) -> ExitCode {
    eprint!("{}", with_causes(error));
    ExitCode::from(exit_code(error))
}

fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = format!("error: {error}\n");
    for cause in causes(error).skip(1) {
        text += &format!("caused by: {cause}\n");
    }
    multiline(&text)
}

fn exit_code(error: &(dyn Error + 'static)) -> u8 {
    let is_usage = |error: &(dyn Error + 'static)| {
        error.is::<ConfigError>() || matches!(error.downcast_ref(), Some(TelemetryError::Level { .. }))
    };
    if causes(error).any(is_usage) {
        EXIT_USAGE
    } else {
        EXIT_FAILURE
    }
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("write KEY=VALUE, such as kafka.brokers=kafka:9092")?;
    Ok((key.trim().to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::tasks::TaskError;

    #[derive(clap::Parser)]
    struct Args {
        #[command(flatten)]
        common: CommonArgs,
    }

    #[test]
    fn flags_are_parsed() {
        use clap::Parser;
        let args =
            Args::try_parse_from(["x", "--set", "a.b=c=d", "--set", "e=", "--config", "f.yaml"]).unwrap();
        let set = [("a.b", "c=d"), ("e", "")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(args.common.set, set);
        assert_eq!(args.common.config, Some("f.yaml".into()));
        assert!(Args::try_parse_from(["x", "--set", "a.b"]).is_err());
    }

    #[test]
    fn error_prints_its_causes() {
        let source = Box::new(io::Error::other("connection refused"));
        let error = TaskError::Failed {
            name: "lane-0".to_owned(),
            source,
        };
        assert_eq!(
            with_causes(&error),
            "error: lane-0 failed\ncaused by: connection refused\n"
        );
        assert_eq!(exit_code(&error), EXIT_FAILURE);
    }

    #[test]
    fn invalid_configuration_has_usage_code() {
        let invalid = Config::from_yaml("kafka: { lanes: 0 }").unwrap_err();
        assert_eq!(exit_code(&invalid), EXIT_USAGE);
        let error = TaskError::Failed {
            name: "enricher".to_owned(),
            source: Box::new(invalid),
        };
        assert_eq!(exit_code(&error), EXIT_USAGE);
        let invalid = Config::from_yaml("kafka: { lanes: 0 }").unwrap_err();
        assert_eq!(exit_code(&*anyhow::Error::from(invalid)), EXIT_USAGE);
    }
}
