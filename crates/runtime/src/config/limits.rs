//! `limits`: what clients of an API may use.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `scheduler.limits`: per process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApiLimitsConfig {
    /// Maximum number of open connections.
    pub connections: u32,
    /// Maximum number of requests per second of a caller; in a batch, each job counts. `None`: no limit.
    pub requests_per_second: Option<u32>,
    /// How long a connection may have no request in progress after its first one, until the headers of the next one are complete.
    pub idle_timeout: HumanDuration,
    /// How long a request waits in all for its client to send the body.
    pub body_timeout: HumanDuration,
    /// Maximum size of a batch of jobs, in bytes.
    pub batch_bytes: u64,
    /// Maximum size of the bodies of all requests in progress, in bytes. A caller may use a quarter.
    pub request_bytes: u64,
}

impl Default for ApiLimitsConfig {
    fn default() -> Self {
        Self {
            connections: 10_000,
            requests_per_second: Some(20_000),
            idle_timeout: HumanDuration::from_secs(120),
            body_timeout: HumanDuration::from_secs(30),
            batch_bytes: 8 << 20,
            request_bytes: 128 << 20,
        }
    }
}

impl ApiLimitsConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("connections", self.connections, 1..=1_000_000);
        if let Some(rate) = self.requests_per_second {
            findings.range("requests_per_second", rate, 1..=10_000_000);
        }
        findings.seconds("idle_timeout", self.idle_timeout, 1..=3_600);
        findings.seconds("body_timeout", self.body_timeout, 1..=3_600);
        findings.range("batch_bytes", self.batch_bytes, 1_000..=1_073_741_824);
        findings.range("request_bytes", self.request_bytes, 1_048_576..=4_294_967_295);
    }
}
