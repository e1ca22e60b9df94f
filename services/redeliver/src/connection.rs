//! Connections to services: address and token from flags, the environment or the configuration.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use axum::http::Uri;
use redeliver_client::messages::GetAccessRequest;
use redeliver_client::{AccessClient, ClientError, Connection, Endpoint};
use redeliver_core::HumanDuration;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::TopicClient;
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_runtime::config::{ApiConfig, ConfigError, Secret};
use redeliver_runtime::listen::reachable;
use redeliver_service::login::LoginError;

use crate::config::Config;
use crate::output::in_one_line;

/// The heading of flags that say how to reach a service.
pub(crate) const CONNECTION: &str = "Connection options";

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Timeout of a request
    #[arg(long, value_name = "DURATION", default_value = "30s", global = true, help_heading = CONNECTION)]
    timeout: HumanDuration,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CredentialArgs {
    /// File with the token; overrides REDELIVER_TOKEN_FILE (default: token_file of the service)
    #[arg(long, value_name = "FILE", env = "REDELIVER_TOKEN_FILE", hide_env = true, global = true, help_heading = CONNECTION)]
    token_file: Option<PathBuf>,
    /// Send the token without TLS, even to other machines; or REDELIVER_INSECURE=true
    #[arg(
        long,
        env = "REDELIVER_INSECURE",
        hide_env = true,
        global = true,
        help_heading = CONNECTION,
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    insecure: bool,
    /// Additional CA certificates (PEM) for https; overrides REDELIVER_CA_FILE
    #[arg(long, value_name = "FILE", env = "REDELIVER_CA_FILE", hide_env = true, global = true, help_heading = CONNECTION)]
    ca_file: Option<PathBuf>,
    /// Client certificate (PEM) for https; overrides REDELIVER_CERT_FILE
    #[arg(
        long,
        value_name = "FILE",
        env = "REDELIVER_CERT_FILE",
        hide_env = true,
        global = true,
        help_heading = CONNECTION,
        requires = "key_file"
    )]
    cert_file: Option<PathBuf>,
    /// Private key of the client certificate (PEM); overrides REDELIVER_KEY_FILE
    #[arg(
        long,
        value_name = "FILE",
        env = "REDELIVER_KEY_FILE",
        hide_env = true,
        global = true,
        help_heading = CONNECTION,
        requires = "cert_file"
    )]
    key_file: Option<PathBuf>,
}

/// The inspector and the scheduler, for commands that ask both.
#[derive(clap::Args)]
pub(crate) struct ServicesArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// URL of the inspector; overrides REDELIVER_DLQ (default: dlq_inspector.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_DLQ", hide_env = true, help_heading = CONNECTION)]
    inspector: Option<String>,
    /// URL of the scheduler; overrides REDELIVER_SCHEDULER (default: scheduler.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_SCHEDULER", hide_env = true, help_heading = CONNECTION)]
    pub(crate) scheduler: Option<String>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

impl ServicesArgs {
    pub(crate) fn timeout(&self) -> Duration {
        self.connection.timeout()
    }

    pub(crate) async fn inspector(&self, config: &Config) -> Result<Connection, CliError> {
        let service = inspector(config).with_flag("--inspector");
        self.connect(self.inspector.as_deref(), &service).await
    }

    pub(crate) async fn scheduler(&self, config: &Config) -> Result<Connection, CliError> {
        let service = scheduler(config).with_flag("--scheduler");
        self.connect(self.scheduler.as_deref(), &service).await
    }

    async fn connect(&self, server: Option<&str>, service: &Service) -> Result<Connection, CliError> {
        let endpoint = self.connection.endpoint(server, service)?;
        endpoint.connect().await.map_err(|error| service.failure(error))
    }
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
    /// The endpoint at `server`, or else at the configured listen address, with this timeout of a request. Only the latter gets the
    /// configured token.
    pub(crate) fn endpoint(
        &self,
        server: Option<&str>,
        service: &Service,
        timeout: Duration,
    ) -> Result<Endpoint, CliError> {
        let configured = service.configured_url();
        let mut endpoint = Endpoint::new(server.unwrap_or(&configured)).timeout(timeout);
        let token = match &self.token_file {
            Some(path) => Some(Secret::from_file(path).map_err(CliError::TokenFile)?),
            None if is_same_server(endpoint.url(), &configured) => service.api.token(service.section)?,
            None => {
                if service.api.token_file.is_some() {
                    eprintln!(
                        "{}.token_file is the token for {configured}, and is not sent to {}; --token-file names another",
                        service.section,
                        in_one_line(endpoint.url())
                    );
                }
                None
            }
        };
        if let Some(token) = token {
            endpoint = endpoint.token(token.expose());
        }
        if self.insecure {
            endpoint = endpoint.allow_plaintext_token();
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

    /// The address at which this machine reaches the configured service.
    fn configured_url(&self) -> String {
        let scheme = match self.api.tls.is_enabled() {
            true => "https",
            false => "http",
        };
        format!("{scheme}://{}", reachable(self.api.listen))
    }

    /// Adds the service to an error of a connection attempt.
    pub(crate) fn failure(&self, error: ClientError) -> CliError {
        match error {
            ClientError::Unreachable { url, source, .. } => CliError::Unreachable {
                service: self.name,
                url,
                section: self.section,
                flag: self.flag,
                source,
            },
            error @ ClientError::PlaintextToken { .. } => CliError::Usage(format!("{error}, or --insecure")),
            error => CliError::Client(error),
        }
    }
}

/// Connects to a service to change something, and says on stderr in which installation that is, if the service knows it: one that has just started may not.
pub(crate) async fn connect_to_change(
    endpoint: &Endpoint,
    service: &Service,
) -> Result<Connection, CliError> {
    let connected = endpoint.connect().await;
    let connection = connected.map_err(|error| service.failure(error))?;
    // If the caller is refused here, it is refused with the change as well.
    if let Ok(access) = AccessClient::new(&connection).get(GetAccessRequest {}).await {
        let cluster_id = match &*access.cluster_id {
            "" => "unknown",
            id => id,
        };
        say_installation(cluster_id, &access.id_prefix);
    }
    Ok(connection)
}

/// As [`connect_to_change`], for commands that change something in Kafka themselves.
pub(crate) fn say_cluster(kafka: &KafkaSettings) {
    let client = TopicClient::new(kafka).ok();
    let cluster_id = client.and_then(|client| client.cluster_id()).unwrap_or_default();
    say_installation(&cluster_id, &kafka.id_prefix);
}

fn say_installation(cluster_id: &str, id_prefix: &str) {
    if cluster_id.is_empty() {
        return;
    }
    let prefix = match id_prefix {
        "" => String::new(),
        prefix => format!(", id prefix {}", in_one_line(prefix)),
    };
    eprintln!("cluster {}{prefix}", in_one_line(cluster_id));
}

/// Whether two addresses have the same scheme, host and port.
fn is_same_server(url: &str, other: &str) -> bool {
    let server = |url: &str| {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?;
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        Some((scheme.to_owned(), uri.host()?.to_ascii_lowercase(), port))
    };
    server(url).is_some_and(|server_of_url| server(other) == Some(server_of_url))
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
        api: config.own.dlq_inspector.api(),
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
    use redeliver_testkit::scratch::Scratch;

    use super::*;

    #[test]
    fn configured_token_needs_configured_address() {
        let files = Scratch::new("configured-token").unwrap();
        let token = files.path().join("token");
        std::fs::write(&token, "s3cret").unwrap();
        let mut config = Config::default();
        config.shared.scheduler.token_file = Some(token.clone());
        let mut credentials = CredentialArgs {
            token_file: None,
            insecure: false,
            ca_file: None,
            cert_file: None,
            key_file: None,
        };
        let has_token = |credentials: &CredentialArgs, config: &Config, server: Option<&str>| {
            let endpoint = credentials.endpoint(server, &scheduler(config), Duration::from_secs(1));
            format!("{:?}", endpoint.unwrap()).contains("has_token: true")
        };
        config.shared.scheduler.listen = "0.0.0.0:80".parse().unwrap();
        for same in [
            None,
            Some("127.0.0.1"),
            Some("127.0.0.1:80"),
            Some("http://127.0.0.1:80/"),
        ] {
            assert!(has_token(&credentials, &config, same), "{same:?}");
        }
        let others = [
            "other:80",
            "127.0.0.1:50052",
            "127.0.0.2",
            "https://127.0.0.1:80",
            "http://127.0.0.1:80@other",
            "http://",
        ];
        for other in others {
            assert!(!has_token(&credentials, &config, Some(other)), "{other}");
        }
        credentials.token_file = Some(token);
        for any in others {
            assert!(has_token(&credentials, &config, Some(any)), "{any}");
        }
    }
}
