//! `breaker`: when a pipeline stops calling an endpoint that fails.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `pipelines.<name>.breaker`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerConfig {
    /// Failures of the endpoint in a row after which the breaker opens, unless `rate` decides. 0: it never opens, and each failure
    /// counts as a failed attempt.
    pub failures: u32,
    /// The share of failures that opens the breaker as soon as there are enough calls. `None`: `failures` always decides.
    pub rate: Option<FailureRateConfig>,
    /// Maximum delay between two probes while the breaker is open. Delays start at 1 s and double.
    pub open_max: HumanDuration,
    /// For how long no other record may have been probed, and how long a record is probed, before its failure counts as a
    /// failed attempt.
    pub poison_after: HumanDuration,
}

/// `pipelines.<name>.breaker.rate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureRateConfig {
    /// The breaker opens if more than this share of the calls fails.
    #[serde(default = "default_share")]
    pub share: f64,
    /// The time whose calls count.
    #[serde(default = "default_window")]
    pub window: HumanDuration,
    /// How many calls there must have been in the window. With fewer, [`BreakerConfig::failures`] decides.
    #[serde(default = "default_calls")]
    pub calls: u32,
}

impl Default for FailureRateConfig {
    fn default() -> Self {
        Self {
            share: default_share(),
            window: default_window(),
            calls: default_calls(),
        }
    }
}

const fn default_share() -> f64 {
    0.5
}

const fn default_window() -> HumanDuration {
    HumanDuration::from_secs(10)
}

const fn default_calls() -> u32 {
    20
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failures: 5,
            rate: Some(FailureRateConfig::default()),
            open_max: HumanDuration::from_secs(4),
            poison_after: HumanDuration::from_secs(900),
        }
    }
}

impl BreakerConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("failures", self.failures, 0..=1_000);
        findings.seconds("open_max", self.open_max, 1..=3_600);
        findings.seconds("poison_after", self.poison_after, 1..=86_400);
        let Some(rate) = &self.rate else { return };
        findings.inside("rate", |at| {
            at.range("share", rate.share, 0.01..=0.99);
            at.seconds("window", rate.window, 1..=600);
            at.range("calls", rate.calls, 1..=100_000);
        });
    }
}
