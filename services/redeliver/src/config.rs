//! The configuration of all services, which commands check as a whole.

use redeliver_runtime::config::{Findings, OwnSections};
use redeliver_runtime::{Config as Shared, ProgramConfig};
use redeliver_worker::ServedPipelines;
use serde::{Deserialize, Serialize};

pub(crate) type Config = ProgramConfig<Sections>;

/// The sections of all programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Sections {
    pub(crate) enricher: ServedPipelines,
    pub(crate) worker: ServedPipelines,
    pub(crate) retry_tier: redeliver_retry_tier::RetryTierConfig,
    redis: redeliver_scheduler::index::redis::RedisConfig,
    pub(crate) dlq_inspector: redeliver_dlq_inspector::DlqInspectorConfig,
    pub(crate) console: redeliver_console::ConsoleConfig,
    lake: redeliver_lake::LakeConfig,
}

impl OwnSections for Sections {
    fn check(&self, shared: &Shared, findings: &mut Findings<'_>) {
        findings.inside("enricher", |at| self.enricher.check(shared, true, at));
        findings.inside("worker", |at| self.worker.check(shared, false, at));
        findings.inside("retry_tier", |at| self.retry_tier.check(shared, at));
        findings.inside("redis", |at| self.redis.check(at));
        findings.inside("dlq_inspector", |at| self.dlq_inspector.check(at));
        findings.inside("console", |at| self.console.check(at));
        findings.inside("lake", |at| self.lake.check(at));
    }
}

#[cfg(test)]
mod tests;
