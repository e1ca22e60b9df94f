//! `audit`: where it is recorded who has changed or seen what.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::Config;
use super::error::Findings;

/// The default name of the audit topic, after `kafka.id_prefix`.
pub const AUDIT_TOPIC: &str = "redeliver.audit";

/// `audit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuditConfig {
    /// The topic with an entry for each change and each disclosure. `None`: `redeliver.audit`, after `kafka.id_prefix`.
    pub topic: Option<String>,
    /// The retention with which the topic is created.
    pub retention: HumanDuration,
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self {
            topic: None,
            retention: HumanDuration::from_secs(400 * 86_400),
        }
    }
}

impl AuditConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Some(topic) = &self.topic {
            findings.topic("topic", topic);
        }
        let day = 86_400;
        findings.seconds("retention", self.retention, day..=36_500 * day);
    }
}

impl Config {
    /// The audit topic. With different prefixes of ids, installations have different ones.
    #[must_use]
    pub fn audit_topic(&self) -> String {
        let own = || self.kafka.id(AUDIT_TOPIC);
        self.audit.topic.clone().unwrap_or_else(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installations_have_own_audit_topics() {
        for (text, topic) in [
            ("{}", "redeliver.audit"),
            ("kafka: { id_prefix: staging- }", "staging-redeliver.audit"),
            ("audit: { topic: shared }", "shared"),
        ] {
            assert_eq!(Config::from_yaml(text).unwrap().audit_topic(), topic);
        }
    }

    #[test]
    fn topic_and_retention_are_checked() {
        for (text, problem) in [
            (
                "audit: { topic: a b }",
                "audit.topic: `a b` is not a valid topic name",
            ),
            ("audit: { retention: 1h }", "audit.retention: 1h is out of range"),
            (
                "audit: { topic: redeliver.control }",
                "audit.topic: `redeliver.control` is also the control topic",
            ),
            (
                "audit: { topic: redeliver.status }",
                "audit.topic: `redeliver.status` is also the status topic",
            ),
            (
                "audit: { topic: redeliver.waiting.actions }",
                "audit.topic: `redeliver.waiting.actions` is also the topic of actions on waiting records",
            ),
            (
                "pipelines: { docs: { source: redeliver.status, output: done } }",
                "kafka.id_prefix: `redeliver.status` is also the source of the pipeline `docs`",
            ),
        ] {
            let error = Config::from_yaml(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
