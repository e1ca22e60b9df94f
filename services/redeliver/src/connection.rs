//! How commands reach a service: the address and the token, from flags, the environment or the configuration.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use redeliver_client::{ClientError, Endpoint};
use redeliver_core::Span;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_runtime::config::{ApiConfig, ConfigError, Secret};

/// Flags of commands that call a service, beside its address.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// The file that holds the bearer token; also REDELIVER_TOKEN_FILE. Default: the configuration's
    #[arg(long, value_name = "FILE", env = "REDELIVER_TOKEN_FILE", hide_env = true)]
    token_file: Option<PathBuf>,
    /// A PEM file of authorities that are trusted beside the machine's own, for https
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// How long an answer may take
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    timeout: Span,
}

/// A service as the configuration describes it.
pub(crate) struct Service {
    /// What it is called.
    name: &'static str,
    /// Its section of the configuration.
    section: &'static str,
    /// What the section says of its listener.
    api: ApiConfig,
}

impl ConnectionArgs {
    /// Where the service is: at `server` if it is given, else where the configuration lets it listen.
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

/// Whoever listens on all addresses is reached on the loopback interface.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let loopback = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(loopback, listen.port())
}

/// A command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file with the token.
    #[error("--token-file: {0}")]
    TokenFile(String),
    /// A flag, together with others or with what is there.
    #[error("{0}")]
    Usage(String),
    /// Nobody answers.
    #[error("no {service} answers at {url}; --server or {section}.listen says where it is")]
    Unreachable {
        /// Who should.
        service: &'static str,
        /// Where.
        url: String,
        /// Its section of the configuration.
        section: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The service.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// What was asked for is not there, or could not be done.
    #[error("{0}")]
    Failed(String),
    /// Kafka.
    #[error("reading topic `{topic}` of kafka at {brokers}")]
    Read {
        /// The topic.
        topic: String,
        /// The configured addresses.
        brokers: String,
        /// Why.
        source: Box<redeliver_kafka::reader::ReadError>,
    },
    /// The machine.
    #[error("{0}")]
    Io(&'static str, #[source] std::io::Error),
}

impl Service {
    /// A failed call of it, in words for people.
    pub(crate) fn failure(&self, error: ClientError) -> CliError {
        match error {
            ClientError::Unreachable { url, source } => CliError::Unreachable {
                service: self.name,
                url,
                section: self.section,
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

/// Runs a command to its exit code. Errors go to stderr with their causes.
pub(crate) fn conclude(run: impl Future<Output = Result<ExitCode, CliError>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    runtime.block_on(run).unwrap_or_else(|error| {
        // The configuration's own errors have a code of their own, see `report`.
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

/// The inspector of dead letters.
pub(crate) fn inspector(config: &Config) -> Service {
    Service {
        name: "inspector of dead letters",
        section: "dlq_inspector",
        api: config.dlq_inspector.api(),
    }
}

/// The scheduler.
pub(crate) fn scheduler(config: &Config) -> Service {
    Service {
        name: "scheduler",
        section: "scheduler",
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
