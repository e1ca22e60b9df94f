//! `redis`: how to connect to Redis, and how much of its memory the index may use.

use std::path::PathBuf;

use redeliver_runtime::config::{Findings, KafkaConfig, Url};
use serde::{Deserialize, Serialize};

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

impl RedisConfig {
    /// The prefix of all keys of an installation with these settings for Kafka, on the cluster with this id. By default, installations on different clusters
    /// or with different prefixes of ids have different ones.
    #[must_use]
    pub fn prefix(&self, kafka: &KafkaConfig, cluster: &str) -> String {
        let default = || format!("{}:{cluster}", kafka.id("redeliver"));
        self.prefix.clone().unwrap_or_else(default)
    }

    /// Reports values that are out of range, or contradict each other.
    pub fn check(&self, findings: &mut Findings<'_>) {
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
