//! The sections of single services, except for the scheduler: `enricher`, `worker`, `retry_tier`, `redis`,
//! `dlq_inspector`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::api::ApiConfig;
use super::auth::AuthConfig;
use super::display_from_str;
use super::error::Findings;
use super::kafka::KafkaConfig;
use super::masking::{self, MaskingRule};
use super::output::{is_pointer, pointer_problem};
use super::redrive::RedriveConfig;
use super::schema_registry::SchemaRegistryConfig;
use super::secret::Url;
use super::tls::ServerTlsConfig;

/// `enricher` and `worker`: the pipelines that the process serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServedPipelines {
    /// Names of pipelines. Default: all with an endpoint (enricher), or all without one (worker).
    pub pipelines: Option<Vec<String>>,
}

/// `retry_tier`: the tiers that the process serves, and how far it looks ahead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryTierConfig {
    /// The tiers to serve. Default: all tiers of all pipelines.
    #[serde(with = "display_from_str::optional_list")]
    pub tiers: Option<Vec<HumanDuration>>,
    /// Whether leftover tiers are served too. Default: true unless `tiers` is set.
    pub leftovers: Option<bool>,
    /// Maximum records in memory per partition.
    pub look_ahead: u32,
    /// Maximum size of records in memory per partition, in bytes.
    pub look_ahead_bytes: u64,
}

/// `redis`: the scheduler's index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedisConfig {
    /// `redis://`, `redis-cluster://` or `redis-sentinel://` with host and port; `rediss...` for TLS.
    pub url: Url,
    /// Additional CA certificates (PEM) for TLS.
    pub ca_file: Option<PathBuf>,
    /// The prefix of all keys. `None`: see [`RedisConfig::prefix`].
    pub prefix: Option<String>,
    /// The fraction of `maxmemory` above which jobs that are not due soon are rejected.
    pub high_water: f64,
}

/// `dlq_inspector`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DlqInspectorConfig {
    /// The address of the gRPC API.
    #[serde(
        serialize_with = "display_from_str::serialize",
        deserialize_with = "display_from_str::listen"
    )]
    pub listen: SocketAddr,
    /// See [`ApiConfig::token_file`].
    pub token_file: Option<PathBuf>,
    /// See [`ApiConfig::allow_remote`].
    pub allow_remote: bool,
    /// See [`ApiConfig::tls`].
    pub tls: ServerTlsConfig,
    /// See [`ApiConfig::auth`].
    pub auth: AuthConfig,
    /// Names of dead-letter topics. `*` matches any text.
    pub topics: Vec<String>,
    /// The directory of the index, which can be rebuilt at any time.
    pub data_dir: PathBuf,
    /// JSON pointers to the fields of JSON values that filters can use.
    pub json_fields: Vec<String>,
    /// What only callers with the scope `dead-letters:unmasked` see.
    pub masking: Vec<MaskingRule>,
    /// Whether payloads are sent only after it was recorded in the audit topic who gets them.
    pub record_disclosures: bool,
    /// Where the schemas of values are.
    pub schema_registry: Option<SchemaRegistryConfig>,
    /// Redrives, discards and restores of dead letters.
    pub redrive: RedriveConfig,
}

impl Default for RetryTierConfig {
    fn default() -> Self {
        Self {
            tiers: None,
            leftovers: None,
            look_ahead: 1_024,
            look_ahead_bytes: 1 << 20,
        }
    }
}

impl Default for RedisConfig {
    fn default() -> Self {
        Self {
            url: Url::new("redis://localhost:6379"),
            ca_file: None,
            prefix: None,
            high_water: 0.9,
        }
    }
}

impl Default for DlqInspectorConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 50_051).into(),
            token_file: None,
            allow_remote: false,
            tls: ServerTlsConfig::default(),
            auth: AuthConfig::default(),
            topics: vec!["*-dlq".to_owned(), "scheduler.jobs.dlq".to_owned()],
            data_dir: "./data".into(),
            json_fields: Vec::new(),
            masking: Vec::new(),
            record_disclosures: true,
            schema_registry: None,
            redrive: RedriveConfig::default(),
        }
    }
}

impl RetryTierConfig {
    /// Whether leftover tiers are served.
    #[must_use]
    pub fn serves_leftovers(&self) -> bool {
        self.leftovers.unwrap_or(self.tiers.is_none())
    }

    /// Whether this tier is served, either for a pipeline or as a leftover.
    #[must_use]
    pub fn serves(&self, tier: HumanDuration) -> bool {
        self.tiers.as_ref().is_none_or(|tiers| tiers.contains(&tier))
    }

    /// `existing`: the tiers of all pipelines, in ascending order.
    pub(super) fn check(&self, existing: &[HumanDuration], findings: &mut Findings<'_>) {
        for (index, tier) in self.tiers.iter().flatten().enumerate() {
            // Only Kafka knows which leftover tiers exist, so any tier is valid if leftovers are served.
            if !existing.contains(tier) && !self.serves_leftovers() {
                let problem = match existing {
                    [] => format!("no pipeline has the tier {tier}: no pipelines are configured"),
                    _ => {
                        let names: Vec<String> = existing.iter().map(HumanDuration::to_string).collect();
                        format!(
                            "no pipeline has the tier {tier}; expected one of {}. To serve a leftover tier, set \
                             retry_tier.leftovers: true",
                            names.join(", ")
                        )
                    }
                };
                findings.report("tiers", problem);
            } else if self.tiers.iter().flatten().take(index).any(|other| other == tier) {
                findings.report("tiers", format!("lists {tier} twice"));
            }
        }
        if self.tiers.as_ref().is_some_and(Vec::is_empty) {
            findings.report("tiers", "is empty; omit it to serve all tiers");
        }
        findings.range("look_ahead", self.look_ahead, 16..=16_384);
        findings.range("look_ahead_bytes", self.look_ahead_bytes, 1 << 16..=1 << 30);
    }
}

impl RedisConfig {
    /// The prefix of all keys of an installation with these settings for Kafka, on the cluster with this id. By default, installations on different clusters
    /// or with different prefixes of ids have different ones.
    #[must_use]
    pub fn prefix(&self, kafka: &KafkaConfig, cluster: &str) -> String {
        let default = || format!("{}:{cluster}", kafka.id("redeliver"));
        self.prefix.clone().unwrap_or_else(default)
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let scheme = self.url.expose().split_once("://").map(|(scheme, _)| scheme);
        let is_redis = matches!(
            scheme,
            Some(
                "redis"
                    | "rediss"
                    | "redis-cluster"
                    | "rediss-cluster"
                    | "redis-sentinel"
                    | "rediss-sentinel"
            )
        );
        if !is_redis {
            findings.report(
                "url",
                "is not a Redis URL: write redis://HOST:PORT, or rediss:// for TLS",
            );
        }
        if self.ca_file.is_some() && is_redis && scheme.is_some_and(|scheme| !scheme.starts_with("rediss")) {
            findings.report(
                "ca_file",
                "requires TLS: change the scheme of redis.url to rediss, rediss-cluster or rediss-sentinel",
            );
        }
        findings.range("high_water", self.high_water, 0.1..=1.0);
        // Braces in the prefix would replace the shard as the hash tag, which selects the node of a cluster.
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        let is_valid = |prefix: &String| (1..=100).contains(&prefix.len()) && prefix.chars().all(is_plain);
        if !self.prefix.as_ref().is_none_or(is_valid) {
            findings.report(
                "prefix",
                "is not a valid prefix: use 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_`, `:` and `-`",
            );
        }
    }
}

impl DlqInspectorConfig {
    /// The listener of the API.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        ApiConfig {
            listen: self.listen,
            token_file: self.token_file.clone(),
            allow_remote: self.allow_remote,
            tls: self.tls.clone(),
            auth: self.auth.clone(),
        }
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        self.api().check(findings);
        for (index, pointer) in self.json_fields.iter().enumerate() {
            if !is_pointer(pointer) {
                findings.report("json_fields", pointer_problem(pointer));
            } else if self.json_fields[..index].contains(pointer) {
                findings.report("json_fields", format!("lists {pointer} twice"));
            }
        }
        if self.json_fields.len() > JSON_FIELDS {
            findings.report(
                "json_fields",
                format!(
                    "lists {} fields; the limit is {JSON_FIELDS}",
                    self.json_fields.len()
                ),
            );
        }
        if let Some(registry) = &self.schema_registry {
            findings.inside("schema_registry", |at| registry.check(at));
        }
        masking::check(&self.masking, self.auth.has_scopes(), findings);
        self.redrive.check(findings);
        for topic in &self.topics {
            if !redeliver_core::pipeline::is_topic_name(&topic.replace('*', "x")) {
                findings.report(
                    "topics",
                    format!("`{topic}` is not a topic name or a pattern such as *-dlq"),
                );
            }
        }
    }
}

/// Maximum number of `dlq_inspector.json_fields`.
const JSON_FIELDS: usize = 32;
