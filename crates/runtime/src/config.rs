//! The configuration: one YAML file for all services, environment variables over it, flags over both.
//!
//! [`Config::load`] is the only way in for a process. What it returns is complete and consistent: all that
//! was left out is filled in, all ranges hold, and no two fields contradict each other. Everything that is
//! wrong is reported at once, each with its field, what would be right, and the place where it was written.
//!
//! The file [`DEFAULT_FILE`] is the manual; a test holds it equal to the defaults.

use std::collections::BTreeMap;

use redeliver_core::Span;
use serde::{Deserialize, Deserializer, Serialize};

mod api;
mod http;
mod http_request;
mod kafka;
mod load;
mod output;
mod overlay;
mod pipeline;
mod problem;
mod process;
mod read;
mod retry;
mod scheduler;
mod secret;
mod services;
mod text;
mod topology;
mod tree;
mod yaml;

pub use api::ApiConfig;
pub use http::{HttpConfig, Meaning, ResponseMode, Status, TlsConfig};
pub use http_request::{endpoint_url, header_name, header_value, request_method};
pub use kafka::{KafkaConfig, TopicsConfig};
pub use load::Sources;
pub use output::{ChosenOutput, OutputConfig};
pub use pipeline::{AnchorConfig, LongWaitsConfig, PipelineConfig, ReturnTarget};
pub use problem::{ConfigError, Problem};
pub use process::{AdminConfig, LogFormat, OtlpConfig, ShutdownConfig, TelemetryConfig};
pub use retry::{JitterConfig, RetryConfig};
pub use scheduler::{AppConfig, JobTopicsConfig, SchedulerConfig};
pub use secret::{REDACTED, RequestHeaders, Secret, Settings, Url, redact_url};
pub use services::{DlqInspectorConfig, RedisConfig, RetryTierConfig, ServedPipelines};

/// The commented file with every default: the manual of the configuration.
pub const DEFAULT_FILE: &str = include_str!("../config/default.yaml");

/// The whole configuration. `Debug` and serde show no secrets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The stable name of this process, unique among those of its kind.
    #[serde(deserialize_with = "instance_or_host_name")]
    pub instance: String,
    /// Kafka.
    pub kafka: KafkaConfig,
    /// The pipelines by name.
    pub pipelines: BTreeMap<String, PipelineConfig>,
    /// Pipelines that were removed, by name: they take nothing new and finish what waits.
    pub retired: BTreeMap<String, PipelineConfig>,
    /// The service that calls endpoints.
    pub enricher: ServedPipelines,
    /// Workers with handlers of their own.
    pub worker: ServedPipelines,
    /// The service that holds records until they are due.
    pub retry_tier: RetryTierConfig,
    /// The scheduler's time index.
    pub redis: RedisConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// The inspector of dead letters.
    pub dlq_inspector: DlqInspectorConfig,
    /// The admin port.
    pub admin: AdminConfig,
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
    /// The end of the process.
    pub shutdown: ShutdownConfig,
    /// Whether `instance` was given and is not the host's name by default.
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
            enricher: ServedPipelines::default(),
            worker: ServedPipelines::default(),
            retry_tier: RetryTierConfig::default(),
            redis: RedisConfig::default(),
            scheduler: SchedulerConfig::default(),
            dlq_inspector: DlqInspectorConfig::default(),
            admin: AdminConfig::default(),
            telemetry: TelemetryConfig::default(),
            shutdown: ShutdownConfig::default(),
            explicit_instance: false,
        }
    }
}

impl Config {
    /// Whether consumers keep their partitions over a restart.
    #[must_use]
    pub fn static_membership(&self) -> bool {
        self.kafka.static_membership.unwrap_or(self.explicit_instance)
    }

    /// All pipelines with their names, the retired ones included.
    pub fn all_pipelines(&self) -> impl Iterator<Item = (&str, &PipelineConfig)> {
        let all = self.pipelines.iter().chain(&self.retired);
        all.map(|(name, pipeline)| (name.as_str(), pipeline))
    }

    /// A pipeline by its name, be it retired or not.
    #[must_use]
    pub fn any_pipeline(&self, name: &str) -> Option<&PipelineConfig> {
        self.pipelines.get(name).or_else(|| self.retired.get(name))
    }

    /// The pipelines that the enricher of this process serves, with their names.
    #[must_use]
    pub fn enricher_pipelines(&self) -> Vec<(&str, &PipelineConfig)> {
        self.served(&self.enricher, |pipeline| pipeline.http.is_some())
    }

    /// The pipelines that a worker with a handler of its own serves, with their names: those that are
    /// named, else those without an endpoint, because those with one belong to the enricher.
    #[must_use]
    pub fn worker_pipelines(&self) -> Vec<(&str, &PipelineConfig)> {
        self.served(&self.worker, |pipeline| pipeline.http.is_none())
    }

    fn served(
        &self,
        named: &ServedPipelines,
        by_default: impl Fn(&PipelineConfig) -> bool,
    ) -> Vec<(&str, &PipelineConfig)> {
        let all = self.all_pipelines();
        match &named.pipelines {
            Some(names) => all
                .filter(|(name, _)| names.iter().any(|served| served == name))
                .collect(),
            None => all.filter(|(_, pipeline)| by_default(pipeline)).collect(),
        }
    }

    /// The tiers that the retry tier of this process serves, growing; leftovers are among them only when they are
    /// named.
    #[must_use]
    pub fn served_tiers(&self) -> Vec<Span> {
        let mut tiers = self.retry_tier.tiers.clone().unwrap_or_else(|| self.tiers());
        tiers.sort_unstable();
        tiers.dedup();
        tiers
    }

    /// The tiers of all pipelines, growing.
    #[must_use]
    pub fn tiers(&self) -> Vec<Span> {
        let policies = self
            .all_pipelines()
            .filter_map(|(_, pipeline)| pipeline.retry.policy().ok());
        let mut tiers: Vec<Span> = policies.flat_map(|policy| policy.tiers()).collect();
        tiers.sort_unstable();
        tiers.dedup();
        tiers
    }

    /// The effective configuration as YAML that can be read back, without secrets.
    ///
    /// # Panics
    /// Never: everything in a configuration can be written as YAML.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("a configuration can be written as YAML")
    }

    /// The effective configuration as JSON, without secrets.
    ///
    /// # Panics
    /// Never: everything in a configuration can be written as JSON.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a configuration can be written as JSON")
    }
}

/// The host's name, with what an instance's name cannot have replaced.
fn host_name() -> String {
    let name = gethostname::gethostname().to_string_lossy().into_owned();
    let replaced = name
        .chars()
        .take(100)
        .map(|c| if load::is_instance_char(c) { c } else { '-' });
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
