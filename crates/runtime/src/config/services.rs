//! What belongs to single services: which pipelines and tiers they serve, where they listen.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use redeliver_core::Span;
use serde::{Deserialize, Serialize};

use super::api::ApiConfig;
use super::problem::Findings;
use super::secret::Url;
use super::text;

/// `enricher` and `worker`: the pipelines that the process serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServedPipelines {
    /// Their names; left out, all that have an endpoint (enricher) or none (worker).
    pub pipelines: Option<Vec<String>>,
}

/// `retry_tier`: the tiers that the process serves, and how far it looks ahead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryTierConfig {
    /// The tiers; left out, all tiers of all pipelines.
    #[serde(with = "text::optional_list")]
    pub tiers: Option<Vec<Span>>,
    /// Whether it also serves tiers that pipelines do not have any more; left out, only when `tiers` is left out.
    pub leftovers: Option<bool>,
    /// The most records in hand per partition.
    pub look_ahead: u32,
    /// The most bytes in hand per partition.
    pub look_ahead_bytes: u64,
}

/// `redis`: the scheduler's time index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedisConfig {
    /// `redis://` or `rediss://` with host and port; `redis-cluster://`, `redis-sentinel://` and the same with TLS.
    pub url: Url,
    /// A PEM file of authorities that are trusted beside the machine's own, for TLS.
    pub ca_file: Option<PathBuf>,
    /// What all keys begin with.
    pub prefix: String,
    /// The share of Redis' `maxmemory` from which on far jobs are refused.
    pub high_water: f64,
}

/// `dlq_inspector`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DlqInspectorConfig {
    /// Where its gRPC listens.
    #[serde(serialize_with = "text::serialize", deserialize_with = "text::listen")]
    pub listen: SocketAddr,
    /// See [`ApiConfig::token_file`].
    pub token_file: Option<PathBuf>,
    /// See [`ApiConfig::allow_remote`].
    pub allow_remote: bool,
    /// Dead-letter topics; `*` stands for any text.
    pub topics: Vec<String>,
    /// Where its index lies, which can always be built again.
    pub data_dir: PathBuf,
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
            prefix: "redeliver".to_owned(),
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
            topics: vec!["*-dlq".to_owned(), "scheduler.jobs.dlq".to_owned()],
            data_dir: "./data".into(),
        }
    }
}

impl RetryTierConfig {
    /// Whether tiers are served that pipelines do not have any more.
    #[must_use]
    pub fn serves_leftovers(&self) -> bool {
        self.leftovers.unwrap_or(self.tiers.is_none())
    }

    /// Whether this tier is served, by a pipeline that has it or as a leftover.
    #[must_use]
    pub fn serves(&self, tier: Span) -> bool {
        self.tiers.as_ref().is_none_or(|tiers| tiers.contains(&tier))
    }

    /// `existing`: the tiers that any pipeline has, growing.
    pub(super) fn check(&self, existing: &[Span], findings: &mut Findings<'_>) {
        for (index, tier) in self.tiers.iter().flatten().enumerate() {
            // Which leftovers there are only Kafka knows.
            if !existing.contains(tier) && !self.serves_leftovers() {
                let problem = match existing {
                    [] => format!("no pipeline has the tier {tier}; there is no pipeline"),
                    _ => {
                        let names: Vec<String> = existing.iter().map(Span::to_string).collect();
                        format!(
                            "no pipeline has the tier {tier}; there are {}; to serve one that is left over, set \
                             retry_tier.leftovers: true",
                            names.join(", ")
                        )
                    }
                };
                findings.wrong("tiers", problem);
            } else if self.tiers.iter().flatten().take(index).any(|other| other == tier) {
                findings.wrong("tiers", format!("names {tier} twice"));
            }
        }
        if self.tiers.as_ref().is_some_and(Vec::is_empty) {
            findings.wrong("tiers", "is empty; leave it out to serve all tiers");
        }
        findings.range("look_ahead", self.look_ahead, 16..=16_384);
        findings.range("look_ahead_bytes", self.look_ahead_bytes, 1 << 16..=1 << 30);
    }
}

impl RedisConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let scheme = self.url.expose().split_once("://").map(|(scheme, _)| scheme);
        let right = matches!(
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
        if !right {
            findings.wrong(
                "url",
                "is not a Redis URL: write redis://HOST:PORT, or rediss:// for TLS",
            );
        }
        if self.ca_file.is_some() && right && scheme.is_some_and(|scheme| !scheme.starts_with("rediss")) {
            findings.wrong(
                "ca_file",
                "is for TLS, and redis.url does not ask for it: write rediss://",
            );
        }
        findings.range("high_water", self.high_water, 0.1..=1.0);
        // Braces would take the place of the shard in what decides on the node of a cluster.
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        if self.prefix.is_empty() || self.prefix.len() > 100 || !self.prefix.chars().all(is_plain) {
            findings.wrong(
                "prefix",
                "has 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_`, `:` and `-`",
            );
        }
    }
}

impl DlqInspectorConfig {
    /// Its listener.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        ApiConfig {
            listen: self.listen,
            token_file: self.token_file.clone(),
            allow_remote: self.allow_remote,
        }
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        self.api().check(findings);
        for topic in &self.topics {
            if !redeliver_core::pipeline::is_topic_name(&topic.replace('*', "x")) {
                findings.wrong(
                    "topics",
                    format!("`{topic}` cannot be a topic or a pattern of topics such as *-dlq"),
                );
            }
        }
    }
}
