//! `dlq_inspector.redrive`: redrives, discards and restores of dead letters.

use std::time::Duration;

use redeliver_core::HumanDuration;
use redeliver_core::pipeline::is_topic_name;
use redeliver_runtime::config::{Findings, KafkaConfig};
use serde::{Deserialize, Serialize};

/// The topic of the jobs, without a prefix.
const TOPIC: &str = "redeliver.dlq.redrives";
/// Maximum number of entries of `dlq_inspector.redrive.destinations`.
const MAX_DESTINATIONS: usize = 64;

/// `dlq_inspector.redrive`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RedriveConfig {
    /// Whether this process executes jobs. All inspectors accept them.
    pub execute: bool,
    /// The topic of the jobs. `None`: `redeliver.dlq.redrives`, after `kafka.id_prefix`.
    pub topic: Option<String>,
    /// Topics to which dead letters may be written besides those of pipelines. `*` matches any text.
    pub destinations: Vec<String>,
    /// How often a record is redriven without `force`.
    pub max_count: u32,
    /// Whether callers may have records written with other contents.
    pub edit: bool,
    /// How long after Kafka has deleted a dead letter its entry is removed from the ledger. `None`: it stays.
    pub remove_entries_after: Option<HumanDuration>,
}

impl Default for RedriveConfig {
    fn default() -> Self {
        Self {
            execute: true,
            topic: None,
            destinations: Vec::new(),
            max_count: 3,
            edit: false,
            remove_entries_after: Some(HumanDuration::from_secs(600)),
        }
    }
}

impl RedriveConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Some(topic) = &self.topic {
            findings.topic("redrive.topic", topic);
        }
        if self.destinations.len() > MAX_DESTINATIONS {
            findings.report(
                "redrive.destinations",
                format!("has more than {MAX_DESTINATIONS} entries"),
            );
        }
        for topic in &self.destinations {
            if !is_topic_name(&topic.replace('*', "x")) {
                findings.report(
                    "redrive.destinations",
                    format!("`{topic}` is not a topic name or a pattern such as orders-*"),
                );
            }
        }
        findings.range("redrive.max_count", self.max_count, 1..=1_000);
        if let Some(after) = self.remove_entries_after {
            findings.seconds("redrive.remove_entries_after", after, 1..=366 * 86_400);
        }
    }

    /// The topic of an installation with these settings for Kafka. With different prefixes of ids, the topics differ too: each installation has the pipelines
    /// to which it writes.
    #[must_use]
    pub fn topic(&self, kafka: &KafkaConfig) -> String {
        self.topic.clone().unwrap_or_else(|| kafka.id(TOPIC))
    }

    /// How long after Kafka has deleted a dead letter its entry is removed from the ledger; `None`: it stays.
    #[must_use]
    pub fn remove_entries_after(&self) -> Option<Duration> {
        self.remove_entries_after.map(HumanDuration::duration)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::ProgramConfig;

    use super::*;
    use crate::config::Sections;

    #[test]
    fn topic_and_destinations_are_checked() {
        let load = ProgramConfig::<Sections>::from_yaml;
        let topic = |text: &str| {
            let config = load(text).unwrap();
            config.own.dlq_inspector.redrive.topic(&config.kafka)
        };
        assert_eq!(topic("{}"), TOPIC);
        assert_eq!(
            topic("kafka: { id_prefix: staging- }"),
            "staging-redeliver.dlq.redrives"
        );
        assert_eq!(topic("dlq_inspector: { redrive: { topic: mine } }"), "mine");
        for (text, field) in [
            ("topic: 'a b'", "redrive.topic"),
            ("destinations: ['a b']", "redrive.destinations"),
            ("max_count: 0", "redrive.max_count"),
            ("remove_entries_after: 999ms", "redrive.remove_entries_after"),
        ] {
            let refused = load(&format!("dlq_inspector: {{ redrive: {{ {text} }} }}"));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
