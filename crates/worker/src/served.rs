//! `worker` and `enricher`: the pipelines that a process serves.

use redeliver_runtime::config::{Config, Findings, OwnSections, PipelineConfig, suggestion};
use serde::{Deserialize, Serialize};

/// The section of programs with custom handlers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// Pipelines that a worker with a custom handler serves in this process.
    pub worker: ServedPipelines,
}

impl OwnSections for Sections {
    fn check(&self, shared: &Config, findings: &mut Findings<'_>) {
        findings.inside("worker", |at| self.worker.check(shared, false, at));
    }
}

/// `enricher` and `worker`: the pipelines that the process serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServedPipelines {
    /// Names of pipelines. Default: all with an endpoint (enricher), or all without one (worker).
    pub pipelines: Option<Vec<String>>,
}

impl ServedPipelines {
    /// The served pipelines with their names. Default: those with an endpoint, which the enricher serves, or those without one.
    #[must_use]
    pub fn of<'c>(&self, config: &'c Config, has_endpoint: bool) -> Vec<(&'c str, &'c PipelineConfig)> {
        let is_served = |(name, pipeline): &(&str, &PipelineConfig)| match &self.pipelines {
            Some(names) => names.iter().any(|served| served == name),
            None => pipeline.http.is_some() == has_endpoint,
        };
        config.all_pipelines().filter(is_served).collect()
    }

    /// Reports pipelines that do not exist, or have no endpoint.
    pub fn check(&self, config: &Config, needs_endpoint: bool, findings: &mut Findings<'_>) {
        for name in self.pipelines.iter().flatten() {
            match config.any_pipeline(name) {
                None => {
                    let known = config.all_pipelines().map(|(name, _)| name);
                    findings.report(
                        "pipelines",
                        format!("there is no pipeline `{name}`{}", suggestion(name, known)),
                    );
                }
                Some(pipeline) if needs_endpoint && pipeline.http.is_none() => {
                    findings.report("pipelines", format!("`{name}` has no endpoint; set its http.url"));
                }
                Some(_) => {}
            }
        }
    }
}
