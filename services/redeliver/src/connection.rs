//! Connections to services: address and token from flags, the environment or the configuration.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use redeliver_client::{ClientError, Endpoint};
use redeliver_core::HumanDuration;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_runtime::config::{ApiConfig, ConfigError, Secret};
use redeliver_runtime::listen::reachable;
use redeliver_service::login::LoginError;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Timeout of a request
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    timeout: HumanDuration,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CredentialArgs {
    /// File with the bearer token; overrides REDELIVER_TOKEN_FILE (default: from the configuration)
    #[arg(long, value_name = "FILE", env = "REDELIVER_TOKEN_FILE", hide_env = true)]
    token_file: Option<PathBuf>,
    /// Additional CA certificates (PEM) for https; overrides REDELIVER_CA_FILE
    #[arg(long, value_name = "FILE", env = "REDELIVER_CA_FILE", hide_env = true)]
    ca_file: Option<PathBuf>,
    /// Client certificate (PEM) for https; overrides REDELIVER_CERT_FILE
    #[arg(
        long,
        value_name = "FILE",
        env = "REDELIVER_CERT_FILE",
        hide_env = true,
        requires = "key_file"
    )]
    cert_file: Option<PathBuf>,
    /// Private key of the client certificate (PEM); overrides REDELIVER_KEY_FILE
    #[arg(
        long,
        value_name = "FILE",
        env = "REDELIVER_KEY_FILE",
        hide_env = true,
        requires = "cert_file"
    )]
    key_file: Option<PathBuf>,
}

pub(crate) struct Service {
    name: &'static str,
    /// The section of the configuration.
    section: &'static str,
    /// The flag with its address.
    flag: &'static str,
    api: ApiConfig,
}

impl ConnectionArgs {
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout.duration()
    }

    /// The endpoint at `server`, or else at the configured listen address.
    pub(crate) fn endpoint(&self, server: Option<&str>, service: &Service) -> Result<Endpoint, CliError> {
        self.credentials.endpoint(server, service, self.timeout())
    }
}

impl CredentialArgs {
    /// The endpoint at `server`, or else at the configured listen address, with this timeout of a request.
    pub(crate) fn endpoint(
        &self,
        server: Option<&str>,
        service: &Service,
        timeout: Duration,
    ) -> Result<Endpoint, CliError> {
        let configured = || {
            let scheme = if service.api.tls.is_enabled() {
                "https"
            } else {
                "http"
            };
            format!("{scheme}://{}", reachable(service.api.listen))
        };
        let url = server.map_or_else(configured, str::to_owned);
        let mut endpoint = Endpoint::new(url).timeout(timeout);
        let token = match &self.token_file {
            Some(path) => Some(Secret::from_file(path).map_err(CliError::TokenFile)?),
            None => service.api.token(service.section)?,
        };
        if let Some(token) = token {
            endpoint = endpoint.token(token.expose());
        }
        if let Some(path) = &self.ca_file {
            endpoint = endpoint.ca_file(path);
        }
        if let (Some(certificate), Some(key)) = (&self.cert_file, &self.key_file) {
            endpoint = endpoint.client_certificate(certificate, key);
        }
        Ok(endpoint)
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("--token-file: {0}")]
    TokenFile(String),
    /// Invalid flags.
    #[error("{0}")]
    Usage(String),
    #[error("cannot connect to the {service} at {url}; set its address with {flag} or {section}.listen")]
    Unreachable {
        service: &'static str,
        url: String,
        section: &'static str,
        flag: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(transparent)]
    Topology(#[from] redeliver_kafka::topology::TopologyError),
    #[error(transparent)]
    Login(#[from] LoginError),
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Not found, or not possible.
    #[error("{0}")]
    Failed(String),
    #[error("cannot read topic `{topic}` from Kafka at {brokers}")]
    Read {
        topic: String,
        brokers: String,
        source: Box<redeliver_kafka::reader::ReadError>,
    },
    #[error("cannot read from Kafka at {brokers}")]
    Kafka {
        brokers: String,
        source: Box<redeliver_kafka::reader::ReadError>,
    },
    #[error("{0}")]
    Io(&'static str, #[source] std::io::Error),
}

impl Service {
    /// For a command in which another flag has the address.
    pub(crate) fn with_flag(self, flag: &'static str) -> Self {
        Self { flag, ..self }
    }

    /// Adds the service to an error.
    pub(crate) fn failure(&self, error: ClientError) -> CliError {
        match error {
            ClientError::Unreachable { url, source, .. } => CliError::Unreachable {
                service: self.name,
                url,
                section: self.section,
                flag: self.flag,
                source,
            },
            error => CliError::Client(error),
        }
    }
}

impl CliError {
    pub(crate) fn failed(what: impl fmt::Display) -> Self {
        Self::Failed(what.to_string())
    }
}

/// Runs a command and returns its exit status. Errors and their causes are printed to stderr.
pub(crate) fn conclude(run: impl Future<Output = Result<ExitCode, CliError>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    runtime.block_on(run).unwrap_or_else(|error| {
        // `report` returns the status for configuration errors.
        if let CliError::Config(error) = &error {
            return report(error);
        }
        let _ = report(&error);
        ExitCode::from(match &error {
            CliError::TokenFile(_)
            | CliError::Usage(_)
            | CliError::Client(
                ClientError::Endpoint { .. } | ClientError::Token(_) | ClientError::Invalid(_),
            ) => EXIT_USAGE,
            _ => EXIT_FAILURE,
        })
    })
}

pub(crate) fn inspector(config: &Config) -> Service {
    Service {
        name: "inspector",
        section: "dlq_inspector",
        flag: "--server",
        api: config.dlq_inspector.api(),
    }
}

pub(crate) fn scheduler(config: &Config) -> Service {
    Service {
        name: "scheduler",
        section: "scheduler",
        flag: "--server",
        api: config.scheduler.api(),
    }
}
