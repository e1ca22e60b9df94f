//! The section of the configuration that only the enricher reads.

use redeliver_runtime::Config;
use redeliver_runtime::config::{Findings, OwnSections};
use redeliver_worker::ServedPipelines;
use serde::{Deserialize, Serialize};

/// The section of the enricher.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// Pipelines that the enricher of this process serves.
    pub enricher: ServedPipelines,
}

impl OwnSections for Sections {
    fn check(&self, shared: &Config, findings: &mut Findings<'_>) {
        findings.inside("enricher", |at| self.enricher.check(shared, true, at));
    }
}
