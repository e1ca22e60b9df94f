//! The connection to Kafka and the topics that are made there.

use redeliver_core::Span;
use serde::{Deserialize, Serialize};

use super::problem::Findings;
use super::secret::Settings;
use super::text;

/// `kafka`: how every service talks to Kafka.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KafkaConfig {
    /// `host:port` of some brokers, separated by commas.
    pub brokers: String,
    /// How many lanes (consumer and transactional producer on a thread of their own) a process runs.
    pub lanes: u32,
    /// The most records of one transaction.
    pub batch: u32,
    /// Whether consumers keep their partitions over a restart (`group.instance.id`). After loading it is
    /// always set; left out it is true when `instance` was given.
    pub static_membership: Option<bool>,
    /// After this long without a heartbeat a consumer loses its partitions.
    #[serde(with = "text")]
    pub session_timeout: Span,
    /// After this long the broker aborts a transaction that was left open.
    #[serde(with = "text")]
    pub transaction_timeout: Span,
    /// Options of librdkafka, passed through.
    pub properties: Settings,
    /// Topics that Redeliver makes itself.
    pub topics: TopicsConfig,
}

/// `kafka.topics`: the topics of a pipeline that do not exist yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopicsConfig {
    /// Whether services create missing topics at start.
    pub create: bool,
    /// Partitions of a new topic.
    pub partitions: u32,
    /// Copies of each partition of a new topic.
    pub replication: u32,
    /// How long a new tier or due topic keeps records.
    #[serde(with = "text")]
    pub retention: Span,
    /// How long a new dead-letter topic keeps records.
    #[serde(with = "text")]
    pub dead_letter_retention: Span,
    /// How long a result or a job waits for a topic that does not exist before it becomes a dead letter.
    #[serde(with = "text")]
    pub missing_timeout: Span,
}

impl Default for KafkaConfig {
    fn default() -> Self {
        Self {
            brokers: "localhost:9092".to_owned(),
            lanes: 1,
            batch: 5_000,
            static_membership: None,
            session_timeout: Span::from_secs(10),
            transaction_timeout: Span::from_secs(10),
            properties: Settings::default(),
            topics: TopicsConfig::default(),
        }
    }
}

impl Default for TopicsConfig {
    fn default() -> Self {
        Self {
            create: false,
            partitions: 12,
            replication: 1,
            retention: Span::from_secs(7 * 86_400),
            dead_letter_retention: Span::from_secs(30 * 86_400),
            missing_timeout: Span::from_secs(15 * 60),
        }
    }
}

impl KafkaConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Some(wrong) = self.brokers.split(',').find(|broker| !is_broker(broker.trim())) {
            findings.wrong(
                "brokers",
                format!("`{wrong}` is not a broker: write host:port, such as localhost:9092"),
            );
        }
        findings.range("lanes", self.lanes, 1..=64);
        findings.range("batch", self.batch, 1..=100_000);
        // The bounds of the broker's own defaults.
        findings.range(
            "session_timeout",
            self.session_timeout,
            Span::from_secs(6)..=Span::from_secs(1_800),
        );
        findings.range(
            "transaction_timeout",
            self.transaction_timeout,
            Span::from_secs(1)..=Span::from_secs(900),
        );
        for name in ["bootstrap.servers", "metadata.broker.list"] {
            if self.properties.get(name).is_some() {
                findings.inside("properties", |at| at.wrong(name, "write kafka.brokers instead"));
            }
        }
        findings.inside("topics", |at| {
            at.range("partitions", self.topics.partitions, 1..=10_000);
            at.range("replication", self.topics.replication, 1..=100);
            let year = Span::from_secs(3_660 * 86_400);
            at.range("retention", self.topics.retention, Span::from_secs(60)..=year);
            at.range(
                "dead_letter_retention",
                self.topics.dead_letter_retention,
                Span::from_secs(60)..=year,
            );
            at.range(
                "missing_timeout",
                self.topics.missing_timeout,
                Span::from_secs(1)..=Span::from_secs(7 * 86_400),
            );
        });
    }
}

fn is_broker(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let host_is_plain = host.starts_with('[') || !host.contains([':', '/', ' ']);
    !host.is_empty() && host_is_plain && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::is_broker;

    #[test]
    fn a_broker_is_a_host_and_a_port() {
        for right in [
            "localhost:9092",
            "10.0.0.1:1",
            "[::1]:9092",
            "kafka-0.kafka:65535",
        ] {
            assert!(is_broker(right), "{right}");
        }
        for wrong in [
            "",
            "localhost",
            ":9092",
            "kafka:0",
            "kafka:99999",
            "http://kafka:9092",
            "::1:9092",
        ] {
            assert!(!is_broker(wrong), "{wrong}");
        }
    }
}
