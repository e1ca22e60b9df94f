//! Loading: defaults, the file, the environment, flags; then everything is checked.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::problem::{ConfigError, Findings, hint};
use super::tree::{Node, Value};
use super::{Config, ServedPipelines, overlay, read, topology, yaml};

/// Where a configuration comes from, in the order of precedence from low to high.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file named by `--config`; without it `REDELIVER_CONFIG` names one, or there is none.
    pub file: Option<PathBuf>,
    /// The environment, of which `REDELIVER_CONFIG` and `REDELIVER__*` are read.
    pub environment: BTreeMap<String, String>,
    /// Dotted keys with their values, from flags.
    pub overrides: Vec<(String, String)>,
}

impl Sources {
    /// With the environment of this process. A variable that is not UTF-8 is left out.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, overrides: Vec<(String, String)>) -> Self {
        let utf8 = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self {
            file,
            environment: std::env::vars_os().filter_map(utf8).collect(),
            overrides,
        }
    }

    /// The file that is read, if any.
    #[must_use]
    pub fn file(&self) -> Option<PathBuf> {
        let named = || {
            self.environment
                .get("REDELIVER_CONFIG")
                .filter(|path| !path.is_empty())
        };
        self.file.clone().or_else(|| named().map(PathBuf::from))
    }
}

impl Config {
    /// Loads the configuration of a process.
    ///
    /// # Errors
    /// When the file that was named cannot be read or is not YAML, or when fields are unknown, of the wrong
    /// type, out of range, or contradict each other.
    pub fn load(sources: &Sources) -> Result<Self, ConfigError> {
        let mut tree = match sources.file() {
            None => Node::empty(),
            Some(path) => {
                let text = std::fs::read_to_string(&path).map_err(|source| ConfigError::Unreadable {
                    path: path.clone(),
                    source,
                })?;
                yaml::parse(&text, &path.to_string_lossy())?
            }
        };
        let mut problems = Vec::new();
        overlay::lay_environment(&mut tree, &sources.environment, &mut problems);
        overlay::lay_flags(&mut tree, &sources.overrides, &mut problems);
        if !problems.is_empty() {
            return Err(ConfigError::Invalid(problems));
        }
        Self::from_tree(&tree)
    }

    /// Reads a configuration from YAML alone, without environment or flags.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_yaml(text: &str) -> Result<Self, ConfigError> {
        Self::from_tree(&yaml::parse(text, "configuration")?)
    }

    fn from_tree(tree: &Node) -> Result<Self, ConfigError> {
        let mut config: Self = read::read(tree.clone()).map_err(ConfigError::Invalid)?;
        config.explicit_instance = tree.get("instance").is_some_and(|node| match &node.value {
            Value::Null => false,
            Value::Raw(text) => !matches!(text.trim(), "" | "~" | "null"),
            _ => true,
        });
        for pipeline in config.retired.values_mut() {
            pipeline.retire();
        }
        let mut findings = Findings::new(tree);
        config.check(&mut findings);
        let problems = findings.into_problems();
        if !problems.is_empty() {
            return Err(ConfigError::Invalid(problems));
        }
        config.resolve();
        Ok(config)
    }

    /// Writes out what was left out and depends on other fields.
    fn resolve(&mut self) {
        self.kafka.static_membership = Some(self.static_membership());
        for (name, pipeline) in self.pipelines.iter_mut().chain(&mut self.retired) {
            pipeline.resolve(name);
        }
    }

    fn check(&self, findings: &mut Findings<'_>) {
        if self.instance.is_empty()
            || self.instance.len() > 100
            || !self.instance.chars().all(is_instance_char)
        {
            let rule =
                "cannot name a process: write 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`";
            findings.wrong("instance", format!("`{}` {rule}", self.instance));
        }
        findings.inside("kafka", |at| self.kafka.check(at));
        self.check_retention(findings);
        findings.inside("pipelines", |at| {
            for (name, pipeline) in &self.pipelines {
                at.inside(name, |at| pipeline.check(name, &self.scheduler, at));
            }
        });
        findings.inside("retired", |at| {
            for (name, pipeline) in &self.retired {
                if self.pipelines.contains_key(name) {
                    at.wrong(
                        name,
                        "stands under `pipelines` too; a pipeline is in use or retired",
                    );
                }
                at.inside(name, |at| pipeline.check(name, &self.scheduler, at));
            }
        });
        topology::check(self, findings);
        findings.inside("retry_tier", |at| self.retry_tier.check(&self.tiers(), at));
        findings.inside("enricher", |at| self.check_served(&self.enricher, true, at));
        findings.inside("worker", |at| self.check_served(&self.worker, false, at));
        findings.inside("redis", |at| self.redis.check(at));
        findings.inside("scheduler", |at| self.scheduler.check(at));
        findings.inside("dlq_inspector", |at| self.dlq_inspector.check(at));
        findings.inside("admin", |at| self.admin.check(at));
        findings.inside("telemetry", |at| self.telemetry.check(at));
        findings.inside("shutdown", |at| self.shutdown.check(at));
    }

    /// A record that waits longer than its topic keeps it is lost.
    fn check_retention(&self, findings: &mut Findings<'_>) {
        let topics = &self.kafka.topics;
        let longest = self.tiers().last().copied().unwrap_or_default();
        if topics.create && topics.retention.duration() < longest.duration().saturating_mul(2) {
            let problem = format!(
                "{} is too short for the tier {longest}: keep records at least twice as long as they wait",
                topics.retention
            );
            findings.inside("kafka", |at| {
                at.inside("topics", |at| at.wrong("retention", problem));
            });
        }
    }

    fn check_served(&self, served: &ServedPipelines, needs_endpoint: bool, findings: &mut Findings<'_>) {
        for name in served.pipelines.iter().flatten() {
            match self.any_pipeline(name) {
                None => {
                    let known = self.all_pipelines().map(|(name, _)| name);
                    findings.wrong(
                        "pipelines",
                        format!("there is no pipeline `{name}`{}", hint(name, known)),
                    );
                }
                Some(pipeline) if needs_endpoint && pipeline.http.is_none() => {
                    findings.wrong("pipelines", format!("`{name}` has no endpoint: give it http.url"));
                }
                Some(_) => {}
            }
        }
    }
}

/// Whether a name of an instance may have this character.
pub(super) fn is_instance_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}
