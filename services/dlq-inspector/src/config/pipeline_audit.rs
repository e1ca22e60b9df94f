//! `dlq_inspector.pipeline_audit`: whether each record of a pipeline is exactly once in its output, dead or waiting.

use redeliver_core::HumanDuration;
use redeliver_runtime::config::Findings;
use serde::{Deserialize, Serialize};

/// `dlq_inspector.pipeline_audit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineAuditConfig {
    /// Whether this process audits all pipelines.
    pub enabled: bool,
    /// The time between two passes.
    pub interval: HumanDuration,
    /// The maximum number of bytes of records that are read per second.
    pub bytes_per_second: u64,
    /// The maximum number of records and waiting copies of all pipelines that are kept in memory.
    pub max_kept: u32,
}

impl Default for PipelineAuditConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            interval: HumanDuration::from_secs(60),
            bytes_per_second: 10_000_000,
            max_kept: 1_000_000,
        }
    }
}

impl PipelineAuditConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.seconds("pipeline_audit.interval", self.interval, 1..=86_400);
        if self.bytes_per_second < 1_000 {
            findings.report("pipeline_audit.bytes_per_second", "must be at least 1000");
        }
        if self.max_kept < 1_000 {
            findings.report("pipeline_audit.max_kept", "must be at least 1000");
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::ProgramConfig;

    use crate::config::Sections;

    #[test]
    fn limits_are_checked() {
        for (text, field) in [
            ("interval: 10ms", "pipeline_audit.interval"),
            ("bytes_per_second: 999", "pipeline_audit.bytes_per_second"),
            ("max_kept: 999", "pipeline_audit.max_kept"),
        ] {
            let text = format!("dlq_inspector: {{ pipeline_audit: {{ {text} }} }}");
            let error = ProgramConfig::<Sections>::from_yaml(&text)
                .unwrap_err()
                .to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
