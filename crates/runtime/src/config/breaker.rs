//! `breaker`: when a pipeline stops calling an endpoint that fails.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::display_from_str;
use super::error::Findings;

/// `pipelines.<name>.breaker`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerConfig {
    /// Consecutive failures of the endpoint after which the breaker opens. 0: it never opens, and each failure counts as a
    /// failed attempt.
    pub failures: u32,
    /// Maximum delay between two probes while the breaker is open. Delays start at 1 s and double.
    #[serde(with = "display_from_str")]
    pub open_max: HumanDuration,
    /// For how long no other record may have been probed, and how long a record is probed, before its failure counts as a
    /// failed attempt.
    #[serde(with = "display_from_str")]
    pub poison_after: HumanDuration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failures: 5,
            open_max: HumanDuration::from_secs(60),
            poison_after: HumanDuration::from_secs(900),
        }
    }
}

impl BreakerConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("failures", self.failures, 0..=1_000);
        let (second, day) = (HumanDuration::from_secs(1), HumanDuration::from_secs(86_400));
        findings.range(
            "open_max",
            self.open_max,
            second..=HumanDuration::from_secs(3_600),
        );
        findings.range("poison_after", self.poison_after, second..=day);
    }
}
