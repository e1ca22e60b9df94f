//! `kafka`: the connection to Kafka, and the topics that services create.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::load::is_instance_char;
use super::login::LoginConfig;
use super::secret::Settings;

/// `kafka`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KafkaConfig {
    /// Bootstrap brokers, `host:port`, separated by commas.
    pub brokers: String,
    /// The prefix of the names of consumer groups, of transactional ids and of client ids. Installations that share a
    /// cluster need different ones.
    pub id_prefix: String,
    /// Lanes per pipeline, per tier and of the scheduler, in each process.
    pub lanes: u32,
    /// Maximum records per transaction.
    pub batch: u32,
    /// Whether consumers keep their partitions across a restart (`group.instance.id`). Default: true if `instance` is
    /// set. Always set after loading.
    pub static_membership: Option<bool>,
    /// Time without a heartbeat after which a consumer loses its partitions.
    pub session_timeout: HumanDuration,
    /// Time after which the broker aborts an open transaction.
    pub transaction_timeout: HumanDuration,
    /// Tokens with which clients log in. Default: none.
    pub login: Option<LoginConfig>,
    /// Properties of librdkafka.
    pub properties: Settings,
    /// The time over which a process replaces its clients when credentials in files have changed.
    pub credentials_spread: HumanDuration,
    /// Topics that services create.
    pub topics: TopicsConfig,
}

/// `kafka.topics`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopicsConfig {
    /// Whether services create missing topics when they start.
    pub create: bool,
    /// Partitions of a new topic.
    pub partitions: u32,
    /// Replication factor of a new topic.
    pub replication: u32,
    /// Retention of new due topics and of the ingest topic, and the minimum for new tier topics.
    pub retention: HumanDuration,
    /// Retention of a new dead-letter topic.
    pub dead_letter_retention: HumanDuration,
    /// How long a result or a job waits for a missing topic before it becomes a dead letter.
    pub missing_timeout: HumanDuration,
}

impl Default for KafkaConfig {
    fn default() -> Self {
        Self {
            brokers: "localhost:9092".to_owned(),
            id_prefix: String::new(),
            lanes: 1,
            batch: 5_000,
            static_membership: None,
            session_timeout: HumanDuration::from_secs(10),
            transaction_timeout: HumanDuration::from_secs(10),
            login: None,
            properties: Settings::default(),
            credentials_spread: HumanDuration::from_secs(30),
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
            retention: HumanDuration::from_secs(7 * 86_400),
            dead_letter_retention: HumanDuration::from_secs(30 * 86_400),
            missing_timeout: HumanDuration::from_secs(15 * 60),
        }
    }
}

/// Properties of librdkafka with their aliases, and what to set instead. The client receives properties in no particular
/// order, so of a name and its alias either one could win.
const REPLACED_PROPERTIES: &[(&[&str], &str)] = &[
    (&["bootstrap.servers", "metadata.broker.list"], "kafka.brokers"),
    (&["client.id", "group.instance.id"], "instance"),
    (
        &["session.timeout.ms", "heartbeat.interval.ms"],
        "kafka.session_timeout",
    ),
    (
        &[
            "transaction.timeout.ms",
            "message.timeout.ms",
            "delivery.timeout.ms",
        ],
        "kafka.transaction_timeout",
    ),
    (&["queue.buffering.max.ms"], "kafka.properties.linger.ms"),
    (
        &["max.partition.fetch.bytes"],
        "kafka.properties.fetch.message.max.bytes",
    ),
];

/// Properties of librdkafka, and their aliases, that Redeliver sets itself or that would change what it relies on.
const FIXED_PROPERTIES: &[&str] = &[
    "acks",
    "allow.auto.create.topics",
    "auto.commit.enable",
    "auto.offset.reset",
    "check.crcs",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.idempotence",
    "enable.partition.eof",
    "group.id",
    "group.protocol",
    "isolation.level",
    "partition.assignment.strategy",
    "partitioner",
    "request.required.acks",
    "transactional.id",
];

/// Properties of the producer with an upper limit, and the limit. A transaction waits until all of its records are delivered, so
/// each one takes at least as long as the client collects records.
const LIMITED_PROPERTIES: &[(&str, f64)] = &[("linger.ms", 1_000.0)];

/// The maximum length of `id_prefix`. Kafka allows 249 characters in the longest of the ids, `group.instance.id`.
const MAX_ID_PREFIX: usize = 64;

/// Checks a value of `kafka.id_prefix`.
///
/// # Errors
/// What is valid instead.
pub fn check_id_prefix(prefix: &str) -> Result<(), String> {
    // The same characters as in a topic's name, which Kafka also requires of group.instance.id.
    if prefix.len() > MAX_ID_PREFIX || !prefix.chars().all(is_instance_char) {
        return Err(format!(
            "`{prefix}` is not a valid prefix of ids: use up to {MAX_ID_PREFIX} of the characters a-z, A-Z, 0-9, `.`, `_` and `-`"
        ));
    }
    Ok(())
}

impl KafkaConfig {
    /// An id with the prefix of this installation.
    #[must_use]
    pub fn id(&self, name: &str) -> String {
        format!("{}{name}", self.id_prefix)
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Some(invalid) = self.brokers.split(',').find(|broker| !is_broker(broker.trim())) {
            findings.report(
                "brokers",
                format!("`{invalid}` is not a broker address: write host:port, such as localhost:9092"),
            );
        }
        if let Err(problem) = check_id_prefix(&self.id_prefix) {
            findings.report("id_prefix", problem);
        }
        findings.range("lanes", self.lanes, 1..=64);
        findings.range("batch", self.batch, 1..=100_000);
        // The broker's default limits: group.min.session.timeout.ms, group.max.session.timeout.ms and
        // transaction.max.timeout.ms.
        findings.seconds("session_timeout", self.session_timeout, 6..=1_800);
        findings.seconds("transaction_timeout", self.transaction_timeout, 1..=900);
        findings.seconds("credentials_spread", self.credentials_spread, 0..=3_600);
        findings.inside("properties", |at| {
            for (name, value) in self.properties.iter() {
                // librdkafka accepts this prefix for properties of topics.
                let plain = name.strip_prefix("topic.").unwrap_or(name);
                let mut replaced = REPLACED_PROPERTIES.iter();
                if let Some((_, setting)) = replaced.find(|(names, _)| names.contains(&plain)) {
                    at.report(name, format!("cannot be set here; set {setting} instead"));
                } else if FIXED_PROPERTIES.contains(&plain) {
                    at.report(name, "cannot be set; Redeliver relies on its value");
                }
                // The client reports what is not a number.
                let mut limited = LIMITED_PROPERTIES.iter();
                if let Some((_, limit)) = limited.find(|(limited, _)| *limited == plain)
                    && let Ok(number) = value.trim().parse::<f64>()
                {
                    at.range(name, number, 0.0..=*limit);
                }
            }
        });
        if let Some(login) = &self.login {
            findings.inside("login", |at| login.check(&self.brokers, at));
            findings.inside("properties", |at| {
                LoginConfig::check_properties(&self.properties, at);
            });
        }
        findings.inside("topics", |at| {
            let (topics, day) = (&self.topics, 86_400);
            at.range("partitions", topics.partitions, 1..=10_000);
            at.range("replication", topics.replication, 1..=100);
            at.seconds("retention", topics.retention, 60..=3_660 * day);
            at.seconds(
                "dead_letter_retention",
                topics.dead_letter_retention,
                60..=3_660 * day,
            );
            at.seconds("missing_timeout", topics.missing_timeout, 1..=7 * day);
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
    fn broker_is_host_and_port() {
        for valid in [
            "localhost:9092",
            "10.0.0.1:1",
            "[::1]:9092",
            "kafka-0.kafka:65535",
        ] {
            assert!(is_broker(valid), "{valid}");
        }
        for invalid in [
            "",
            "localhost",
            ":9092",
            "kafka:0",
            "kafka:99999",
            "http://kafka:9092",
            "::1:9092",
        ] {
            assert!(!is_broker(invalid), "{invalid}");
        }
    }
}
