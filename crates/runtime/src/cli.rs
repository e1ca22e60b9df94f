//! The shape of every `main`: parse, load, telemetry, run, exit code.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config::{Config, ConfigError, LogFormat, Sources};
use crate::error_chain::{causes, error_chain};
use crate::listen::Listener;
use crate::metrics::build_info;
use crate::telemetry::{Identity, TelemetryError, Tracer};
use crate::{shutdown, telemetry};

/// The exit code when the command line or the configuration is wrong, and nothing was done.
pub const EXIT_USAGE: u8 = 2;
/// The exit code when a process failed while it ran.
pub const EXIT_FAILURE: u8 = 1;

/// The flags of every service: `#[command(flatten)]` them.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CommonArgs {
    /// The configuration file; also REDELIVER_CONFIG
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A setting over file and environment, such as kafka.brokers=kafka:9092; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_and_value)]
    pub set: Vec<(String, String)>,
    /// Print the effective configuration without secrets, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Check the configuration, and exit
    #[arg(long)]
    pub check: bool,
}

impl CommonArgs {
    /// The effective configuration.
    ///
    /// # Errors
    /// When it is wrong; see [`Config::load`].
    pub fn load(&self) -> Result<Config, ConfigError> {
        self.load_with(Vec::new())
    }

    /// What `--print-config` and `--check` ask for, printed; or what `check` finds wrong. With neither there is
    /// something else to do, and the configuration is fit for it.
    #[must_use]
    pub fn answer(
        &self,
        config: &Config,
        check: impl FnOnce(&Config) -> Result<(), ConfigError>,
    ) -> Option<ExitCode> {
        let text = if self.print_config {
            config.to_yaml()
        } else if let Err(error) = check(config) {
            return Some(report(&error));
        } else if self.check {
            "the configuration is valid\n".to_owned()
        } else {
            return None;
        };
        // Whoever reads this may stop reading early.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Some(ExitCode::SUCCESS)
    }

    /// The effective configuration with `overrides`: settings of flags of the service's own, such as `--tier 30s`,
    /// as dotted keys with values; they win over `--set`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_with(&self, overrides: Vec<(String, String)>) -> Result<Config, ConfigError> {
        let mut flags = self.set.clone();
        flags.extend(overrides);
        Config::load(&Sources::of_process(self.config.clone(), flags))
    }
}

/// What a service gets to run with.
#[derive(Debug)]
pub struct Start {
    /// The configuration, complete and checked.
    pub config: Arc<Config>,
    /// Cancelled by the first signal.
    pub shutdown: CancellationToken,
    /// Makes spans, if tracing is on.
    pub tracer: Tracer,
    /// The admin port, taken but not served yet.
    pub admin: Listener,
}

/// Runs a service from its flags to its exit code.
///
/// `overrides` are settings of flags of the service's own, such as `--tier 30s`, as dotted keys with values;
/// they win over `--set`. `check` finds what the service itself cannot follow in a configuration, before anything is
/// done; `--check` asks it too. Errors are told once, with their causes: on the terminal, or in the log when that
/// is read by machines. The exit code is 0, [`EXIT_USAGE`] when the configuration is wrong (also when `run` returns
/// a [`ConfigError`]), else [`EXIT_FAILURE`].
pub fn main_with<F, E>(
    service: &str,
    args: &CommonArgs,
    overrides: Vec<(String, String)>,
    check: impl FnOnce(&Config) -> Result<(), ConfigError>,
    run: impl FnOnce(Start) -> F,
) -> ExitCode
where
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    let config = match args.load_with(overrides) {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = args.answer(&config, check) {
        return code;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    let code = runtime.block_on(with_telemetry(service, config, run));
    // What has not ended within its grace period is not waited for any longer.
    runtime.shutdown_background();
    code.unwrap_or_else(|error| report(&*error))
}

/// Fails only before there is a log.
async fn with_telemetry<F, E>(
    service: &str,
    config: Config,
    run: impl FnOnce(Start) -> F,
) -> anyhow::Result<ExitCode>
where
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    // Before the start line: whoever has read it may send a signal.
    let shutdown = CancellationToken::new();
    shutdown::on_signals(shutdown.clone())?;
    let identity = Identity {
        service,
        instance: &config.instance,
    };
    let format = config.telemetry.log;
    let telemetry = telemetry::init(&config.telemetry, identity)?;
    let result = start(service, config, shutdown, telemetry.tracer(), run).await;
    telemetry.shutdown().await;
    let Err(error) = result else {
        tracing::info!(service, "stopped");
        return Ok(ExitCode::SUCCESS);
    };
    Ok(match format {
        LogFormat::Text => {
            tracing::error!(service, "stopped by an error");
            report(&*error)
        }
        LogFormat::Json => {
            tracing::error!(service, error = error_chain(&*error), "stopped by an error");
            ExitCode::from(exit_code(&*error))
        }
    })
}

async fn start<F, E>(
    service: &str,
    config: Config,
    shutdown: CancellationToken,
    tracer: Tracer,
    run: impl FnOnce(Start) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = Result<(), E>>,
    E: Into<anyhow::Error>,
{
    let admin = Listener::bind("admin.listen", config.admin.listen)?;
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
        config: Arc::new(config),
        shutdown,
        tracer,
        admin,
    };
    run(start).await.map_err(Into::into)
}

/// Prints an error with its causes and gives its exit code.
pub fn report(error: &(dyn Error + 'static)) -> ExitCode {
    eprint!("{}", described(error));
    ExitCode::from(exit_code(error))
}

fn described(error: &(dyn Error + 'static)) -> String {
    let mut text = format!("error: {error}\n");
    for cause in causes(error).skip(1) {
        text += &format!("caused by: {cause}\n");
    }
    text
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
    fn flags_are_read() {
        use clap::Parser;
        let args =
            Args::try_parse_from(["x", "--set", "a.b=c=d", "--set", "e=", "--config", "f.yaml"]).unwrap();
        let set = [("a.b", "c=d"), ("e", "")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(args.common.set, set);
        assert_eq!(args.common.config, Some("f.yaml".into()));
        assert!(Args::try_parse_from(["x", "--set", "a.b"]).is_err());
    }

    #[test]
    fn an_error_is_printed_with_its_causes() {
        let source = Box::new(io::Error::other("connection refused"));
        let error = TaskError::Failed {
            name: "lane-0".to_owned(),
            source,
        };
        assert_eq!(
            described(&error),
            "error: lane-0 failed\ncaused by: connection refused\n"
        );
        assert_eq!(exit_code(&error), EXIT_FAILURE);
    }

    #[test]
    fn a_wrong_configuration_has_an_exit_code_of_its_own_wherever_it_is_found() {
        let wrong = Config::from_yaml("kafka: { lanes: 0 }").unwrap_err();
        assert_eq!(exit_code(&wrong), EXIT_USAGE);
        let error = TaskError::Failed {
            name: "enricher".to_owned(),
            source: Box::new(wrong),
        };
        assert_eq!(exit_code(&error), EXIT_USAGE);
        let wrong = Config::from_yaml("kafka: { lanes: 0 }").unwrap_err();
        assert_eq!(exit_code(&*anyhow::Error::from(wrong)), EXIT_USAGE);
    }
}
