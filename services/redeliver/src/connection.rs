//! Connections to services: address and token from flags, the environment or the configuration.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use redeliver_client::{ClientError, Endpoint};
use redeliver_core::HumanDuration;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_runtime::config::{ApiConfig, ConfigError, Secret};
use redeliver_service::login::LoginError;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// File with the bearer token; overrides REDELIVER_TOKEN_FILE (default: from the configuration)
    #[arg(long, value_name = "FILE", env = "REDELIVER_TOKEN_FILE", hide_env = true)]
    token_file: Option<PathBuf>,
    /// Additional CA certificates (PEM) for https
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Timeout of a request
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    timeout: HumanDuration,
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
        let url = server.map_or_else(
            || format!("http://{}", reachable(service.api.listen)),
            str::to_owned,
        );
        let mut endpoint = Endpoint::new(url).timeout(self.timeout.duration());
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
        Ok(endpoint)
    }
}

/// A service that listens on all addresses is reached on the loopback interface.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let loopback = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(loopback, listen.port())
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
            ClientError::Unreachable { url, source } => CliError::Unreachable {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_reached_by_loopback() {
        for (listen, expected) in [
            ("0.0.0.0:5", "127.0.0.1:5"),
            ("[::]:5", "[::1]:5"),
            ("10.1.2.3:5", "10.1.2.3:5"),
        ] {
            assert_eq!(reachable(listen.parse().unwrap()), expected.parse().unwrap());
        }
    }
}
