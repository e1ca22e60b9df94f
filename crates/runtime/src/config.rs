//! The configuration: one YAML file for all services, overridden by environment variables and flags.
//!
//! [`Config`] has the sections that programs share. A section that only one program reads is in the crate of that program, and belongs to its
//! [`OwnSections`]. Processes call [`ProgramConfig::load`]. It fills in defaults, checks ranges, and rejects contradictions. It reports problems
//! together, each with its field, what is valid, and where the value comes from. Ranges and contradictions are checked
//! only if all keys and types are valid. figment and `serde_path_to_error` report only the first problem, show secrets, and change
//! values (`00123` becomes `123`), so the reader is our own.
//!
//! [`DEFAULT_FILE`] documents every key. A test compares it with the defaults in the code.

use std::collections::BTreeMap;

use redeliver_core::HumanDuration;
use serde::{Deserialize, Deserializer, Serialize};

mod api;
mod audit;
mod auth;
mod batch;
mod breaker;
mod connections;
mod control;
mod deserialize;
mod error;
mod grouping;
mod http;
mod http_request;
mod kafka;
mod limits;
pub mod listen_address;
mod load;
mod login;
mod output;
mod overrides;
mod pipeline;
mod process;
mod program;
mod rate_limit;
mod retry;
mod scheduler;
mod schema;
mod scope;
mod secret;
mod tls;
mod tokens;
mod topology;
mod tree;
mod yaml;

pub use api::{ApiConfig, token_in};
pub use audit::{AUDIT_TOPIC, AuditConfig};
pub use auth::{AuthConfig, ClientCertificateConfig, JwtConfig};
pub use batch::{BatchConfig, BatchValues};
pub use breaker::{BreakerConfig, FailureRateConfig};
pub use connections::{ConnectionsConfig, HttpVersion};
pub use control::{CONTROL_TOPIC, ControlConfig, STATUS_TOPIC, WAITING_ACTIONS_TOPIC};
pub use error::{ConfigError, Findings, InvalidField, suggestion};
pub use grouping::{LimitByConfig, OrderingConfig};
pub use http::{HttpConfig, Meaning, ResponseMode, Status, TlsConfig};
pub use http_request::{
    ProxyChoice, endpoint_url, header_name, header_value, is_loopback, issuer_url, request_method,
};
pub use kafka::{KafkaConfig, TopicsConfig, check_id_prefix};
pub use limits::ApiLimitsConfig;
pub use load::{Sources, is_instance_char};
pub use login::{ClientAuth, LoginConfig, MskIamConfig, OidcConfig};
pub use output::{ChosenBy, ChosenOutput, OutputConfig, is_pointer, pointer_problem};
pub use pipeline::{AnchorConfig, LongWaitsConfig, PipelineConfig, ReturnTarget};
pub use process::{AdminConfig, ClockConfig, LogFormat, OtlpConfig, ShutdownConfig, TelemetryConfig};
pub use program::{NoSections, OwnSections, ProgramConfig};
pub use rate_limit::RateLimitConfig;
pub use retry::{JitterConfig, RetryConfig};
pub use scheduler::{AppConfig, JobTopicsConfig, SchedulerConfig};
pub use schema::SchemaConfig;
pub use scope::{Area, MAX_SCOPES, Scope, Verb};
pub use secret::{REDACTED, RequestHeaders, Secret, SecretSetting, Settings, Url, redact_url};
pub use tls::ServerTlsConfig;
pub use tokens::{MAX_CALLER_NAME, Sha256, TokenConfig, TokensFile, caller_name};

/// The default configuration, which documents every key in comments.
pub const DEFAULT_FILE: &str = include_str!("../config/default.yaml");

/// The sections that programs share. `Debug` and serde show no secrets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The stable name of this process, unique among processes of the same service. Default: the host's name.
    #[serde(deserialize_with = "instance_or_host_name")]
    pub instance: String,
    /// The connection to Kafka, and topics.
    pub kafka: KafkaConfig,
    /// Pipelines by name.
    pub pipelines: BTreeMap<String, PipelineConfig>,
    /// Retired pipelines by name: they accept no new records and finish the waiting ones.
    pub retired: BTreeMap<String, PipelineConfig>,
    /// What operators change at run time.
    pub control: ControlConfig,
    /// Where it is recorded who has changed or seen what.
    pub audit: AuditConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// Steps of the wall clock.
    pub clock: ClockConfig,
    /// The admin port.
    pub admin: AdminConfig,
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
    /// Shutdown of the process.
    pub shutdown: ShutdownConfig,
    /// Whether `instance` is set, and not the host's name by default.
    #[serde(skip)]
    explicit_instance: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            instance: host_name(),
            kafka: KafkaConfig::default(),
            pipelines: BTreeMap::new(),
            retired: BTreeMap::new(),
            control: ControlConfig::default(),
            audit: AuditConfig::default(),
            scheduler: SchedulerConfig::default(),
            clock: ClockConfig::default(),
            admin: AdminConfig::default(),
            telemetry: TelemetryConfig::default(),
            shutdown: ShutdownConfig::default(),
            explicit_instance: false,
        }
    }
}

impl Config {
    /// Whether consumers keep their partitions across a restart.
    #[must_use]
    pub fn static_membership(&self) -> bool {
        self.kafka.static_membership.unwrap_or(self.explicit_instance)
    }

    /// All pipelines with their names, including retired ones.
    pub fn all_pipelines(&self) -> impl Iterator<Item = (&str, &PipelineConfig)> {
        let all = self.pipelines.iter().chain(&self.retired);
        all.map(|(name, pipeline)| (name.as_str(), pipeline))
    }

    /// A pipeline by its name, including retired ones.
    #[must_use]
    pub fn any_pipeline(&self, name: &str) -> Option<&PipelineConfig> {
        self.pipelines.get(name).or_else(|| self.retired.get(name))
    }

    /// The tiers of all pipelines, in ascending order.
    #[must_use]
    pub fn tiers(&self) -> Vec<HumanDuration> {
        let policies = self
            .all_pipelines()
            .filter_map(|(_, pipeline)| pipeline.retry.policy().ok());
        let mut tiers: Vec<HumanDuration> = policies.flat_map(|policy| policy.tiers().to_vec()).collect();
        tiers.sort_unstable();
        tiers.dedup();
        tiers
    }
}

/// The host's name, with characters that are invalid in an instance name replaced.
fn host_name() -> String {
    let name = gethostname::gethostname().to_string_lossy().into_owned();
    let replaced = name
        .chars()
        .take(100)
        .map(|c| if is_instance_char(c) { c } else { '-' });
    let name: String = replaced.collect();
    if name.is_empty() {
        "redeliver".to_owned()
    } else {
        name
    }
}

fn instance_or_host_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(host_name))
}
