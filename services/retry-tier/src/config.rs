//! The sections of the configuration that only the retry tier reads.

use redeliver_core::HumanDuration;
use redeliver_runtime::Config;
use redeliver_runtime::config::{Findings, OwnSections};
use serde::{Deserialize, Serialize};

/// The section of the retry tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// The tiers to serve, and how far to look ahead.
    pub retry_tier: RetryTierConfig,
}

impl OwnSections for Sections {
    fn check(&self, shared: &Config, findings: &mut Findings<'_>) {
        findings.inside("retry_tier", |at| self.retry_tier.check(shared, at));
    }
}

/// `retry_tier`: the tiers that the process serves, and how far it looks ahead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryTierConfig {
    /// The tiers to serve. Default: all tiers of all pipelines.
    pub tiers: Option<Vec<HumanDuration>>,
    /// Whether leftover tiers are served too. Default: true unless `tiers` is set.
    pub leftovers: Option<bool>,
    /// Maximum records in memory per partition.
    pub look_ahead: u32,
    /// Maximum size of records in memory per partition, in bytes.
    pub look_ahead_bytes: u64,
}

impl Default for RetryTierConfig {
    fn default() -> Self {
        Self {
            tiers: None,
            leftovers: None,
            look_ahead: 1_024,
            look_ahead_bytes: 1 << 20,
        }
    }
}

impl RetryTierConfig {
    /// Whether leftover tiers are served.
    #[must_use]
    pub fn serves_leftovers(&self) -> bool {
        self.leftovers.unwrap_or(self.tiers.is_none())
    }

    /// Whether this tier is served, either for a pipeline or as a leftover.
    #[must_use]
    pub fn serves(&self, tier: HumanDuration) -> bool {
        self.tiers.as_ref().is_none_or(|tiers| tiers.contains(&tier))
    }

    /// The tiers that this process serves, in ascending order. Leftover tiers are included only if `tiers` lists them.
    #[must_use]
    pub fn served_tiers(&self, config: &Config) -> Vec<HumanDuration> {
        let mut tiers = self.tiers.clone().unwrap_or_else(|| config.tiers());
        tiers.sort_unstable();
        tiers.dedup();
        tiers
    }

    /// Reports tiers that no pipeline has, and values out of range.
    pub fn check(&self, shared: &Config, findings: &mut Findings<'_>) {
        let existing = &shared.tiers()[..];
        for (index, tier) in self.tiers.iter().flatten().enumerate() {
            // Only Kafka knows which leftover tiers exist, so any tier is valid if leftovers are served.
            if !existing.contains(tier) && !self.serves_leftovers() {
                let problem = match existing {
                    [] => format!("no pipeline has the tier {tier}: no pipelines are configured"),
                    _ => {
                        let names: Vec<String> = existing.iter().map(HumanDuration::to_string).collect();
                        format!(
                            "no pipeline has the tier {tier}; expected one of {}. To serve a leftover tier, set \
                             retry_tier.leftovers: true",
                            names.join(", ")
                        )
                    }
                };
                findings.report("tiers", problem);
            } else if self.tiers.iter().flatten().take(index).any(|other| other == tier) {
                findings.report("tiers", format!("lists {tier} twice"));
            }
        }
        if self.tiers.as_ref().is_some_and(Vec::is_empty) {
            findings.report("tiers", "is empty; omit it to serve all tiers");
        }
        findings.range("look_ahead", self.look_ahead, 16..=16_384);
        findings.range("look_ahead_bytes", self.look_ahead_bytes, 1 << 16..=1 << 30);
    }
}
