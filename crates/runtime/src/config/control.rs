//! `control`: what operators change at run time.

use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `control`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlConfig {
    /// The topic with what operators have paused or limited.
    pub topic: String,
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self {
            topic: "redeliver.control".to_owned(),
        }
    }
}

impl ControlConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.topic("topic", &self.topic);
    }
}
