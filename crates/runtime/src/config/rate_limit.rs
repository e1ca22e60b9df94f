//! `rate_limit`: how many attempts may start in a time.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `pipelines.<name>.rate_limit`: per process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimitConfig {
    /// Maximum number of attempts that start in the time `per`.
    pub attempts: u32,
    /// The time.
    #[serde(default = "default_per")]
    pub per: HumanDuration,
    /// How many attempts may start at once after a pause. `None`: as many as in 100 ms, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
}

const fn default_per() -> HumanDuration {
    HumanDuration::from_secs(1)
}

impl RateLimitConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("attempts", self.attempts, 1..=1_000_000);
        let longest = HumanDuration::from_secs(86_400);
        findings.range("per", self.per, HumanDuration::from_millis(10)..=longest);
        if let Some(burst) = self.burst {
            findings.range("burst", burst, 1..=1_000_000);
            let year = 365 * 86_400_000;
            if u128::from(self.per.as_millis()) * u128::from(burst) > year * u128::from(self.attempts) {
                findings.report(
                    "burst",
                    "has as many attempts as the limit allows in over 365d: write fewer",
                );
            }
        }
    }
}
