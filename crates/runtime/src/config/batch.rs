//! `batch`: calls of an endpoint for several records.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `pipelines.<name>.http.batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Maximum number of records in a call.
    pub records: u32,
    /// Maximum size of their values in bytes, together. A larger value is sent alone.
    #[serde(default = "default_bytes")]
    pub bytes: u64,
    /// For how long a call waits for more records.
    #[serde(default = "default_wait")]
    pub wait: HumanDuration,
    /// How values are written.
    #[serde(default)]
    pub values: BatchValues,
}

/// How a call for several records contains their values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchValues {
    /// As the JSON documents that they are.
    #[default]
    Json,
    /// As base64.
    Base64,
}

const fn default_bytes() -> u64 {
    1_000_000
}

const fn default_wait() -> HumanDuration {
    HumanDuration::from_millis(5)
}

impl BatchConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("records", self.records, 1..=10_000);
        findings.range("bytes", self.bytes, 1..=1 << 30);
        findings.seconds("wait", self.wait, 0..=60);
    }
}
