//! `retry`: a list of delays, or delays that grow exponentially.

use redeliver_core::backoff::InvalidPolicy;
use redeliver_core::{HumanDuration, Jitter, RetryPolicy};
use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `pipelines.<name>.retry`: either `tiers` or `base`. Loading fills in omitted fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryConfig {
    /// One delay per retry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Vec<HumanDuration>>,
    /// The first delay of exponential backoff.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<HumanDuration>,
    /// The ratio of each delay to the previous one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// The upper limit of delays of exponential backoff.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap: Option<HumanDuration>,
    /// Maximum retries of a record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_retries: Option<u32>,
    /// Randomisation of delays.
    pub jitter: JitterConfig,
}

/// The key `jitter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JitterConfig {
    /// Exactly the delay.
    #[default]
    None,
    /// Between half of the delay and the delay.
    Equal,
    /// Between zero and the delay.
    Full,
}

const DEFAULT_FACTOR: f64 = 2.0;
const DEFAULT_EXPONENTIAL_RETRIES: u32 = 5;

impl RetryConfig {
    /// The policy as `redeliver_core` defines it.
    ///
    /// # Errors
    /// When fields are out of range or contradict each other. The error names the field.
    pub fn policy(&self) -> Result<RetryPolicy, InvalidPolicy> {
        let contradiction = |field| {
            let problem =
                "cannot be combined with retry.tiers; set either tiers, or base with factor and cap"
                    .to_owned();
            Err(InvalidPolicy { field, problem })
        };
        let jitter = match self.jitter {
            JitterConfig::None => Jitter::None,
            JitterConfig::Equal => Jitter::Equal,
            JitterConfig::Full => Jitter::Full,
        };
        match (&self.tiers, self.base) {
            (Some(_), Some(_)) => contradiction("retry.base"),
            (Some(_), None) if self.factor.is_some() => contradiction("retry.factor"),
            (Some(_), None) if self.cap.is_some() => contradiction("retry.cap"),
            (Some(tiers), None) => RetryPolicy::listed(tiers.clone(), self.max_retries, jitter),
            (None, Some(base)) => RetryPolicy::exponential(
                base,
                self.factor.unwrap_or(DEFAULT_FACTOR),
                self.max_retries.unwrap_or(DEFAULT_EXPONENTIAL_RETRIES),
                self.cap,
                jitter,
            ),
            (None, None) if self.factor.is_some() || self.cap.is_some() => {
                let field = if self.factor.is_some() {
                    "retry.factor"
                } else {
                    "retry.cap"
                };
                Err(InvalidPolicy {
                    field,
                    problem: "requires retry.base, such as 2m".to_owned(),
                })
            }
            (None, None) => RetryPolicy::listed(default_tiers(), self.max_retries, jitter),
        }
    }

    pub(super) fn resolve(&mut self) {
        if self.base.is_some() {
            self.factor.get_or_insert(DEFAULT_FACTOR);
        } else if self.factor.is_none() && self.cap.is_none() {
            self.tiers.get_or_insert_with(default_tiers);
        }
        if let Ok(policy) = self.policy() {
            self.max_retries = Some(policy.max_retries());
        }
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        match self.policy() {
            Ok(_) => {}
            Err(InvalidPolicy { field, problem }) => findings.inside("retry", |at| {
                at.report(field.strip_prefix("retry.").unwrap_or(field), problem);
            }),
        }
    }
}

fn default_tiers() -> Vec<HumanDuration> {
    RetryPolicy::default().tiers().to_vec()
}
