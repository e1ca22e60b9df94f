//! `control`: what operators change at run time. And the names of other topics of an installation.

use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::{Config, KafkaConfig};

/// The name of the topic, after `kafka.id_prefix`.
pub const CONTROL_TOPIC: &str = "redeliver.control";
/// The status topic, after `kafka.id_prefix`.
pub const STATUS_TOPIC: &str = "redeliver.status";
/// The topic of actions on waiting records, after `kafka.id_prefix`.
pub const WAITING_ACTIONS_TOPIC: &str = "redeliver.waiting.actions";

/// `control`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlConfig {
    /// The topic with what operators have paused, limited or released. `None`: `redeliver.control`, after `kafka.id_prefix`.
    pub topic: Option<String>,
}

impl ControlConfig {
    /// The topic of an installation with these settings for Kafka. With different prefixes of ids, the topics differ too: what is paused in one installation runs
    /// in the other.
    #[must_use]
    pub fn topic(&self, kafka: &KafkaConfig) -> String {
        self.topic.clone().unwrap_or_else(|| kafka.id(CONTROL_TOPIC))
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Some(topic) = &self.topic {
            findings.topic("topic", topic);
        }
    }
}

impl Config {
    /// The control topic.
    #[must_use]
    pub fn control_topic(&self) -> String {
        self.control.topic(&self.kafka)
    }

    /// The status topic, in which workers tell the states of their circuit breakers.
    #[must_use]
    pub fn status_topic(&self) -> String {
        self.kafka.id(STATUS_TOPIC)
    }

    /// The topic of what operators want done with single waiting records.
    #[must_use]
    pub fn waiting_actions_topic(&self) -> String {
        self.kafka.id(WAITING_ACTIONS_TOPIC)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_separate_topics() {
        for (text, topic) in [
            ("{}", "redeliver.control"),
            ("kafka: { id_prefix: staging- }", "staging-redeliver.control"),
            (
                "{ kafka: { id_prefix: staging- }, control: { topic: ours } }",
                "ours",
            ),
        ] {
            assert_eq!(Config::from_yaml(text).unwrap().control_topic(), topic);
        }
    }
}
