//! Loading: the file over the defaults, the environment over the file, flags over all; then validation.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::error::{ConfigError, Findings, suggestion};
use super::tree::{Node, Value};
use super::{Config, ServedPipelines, deserialize, overrides, topology, yaml};

/// The sources of a configuration, from lowest to highest precedence.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file given by `--config`. If unset, the file that `REDELIVER_CONFIG` names is used, if any.
    pub file: Option<PathBuf>,
    /// The environment, of which `REDELIVER_CONFIG` and `REDELIVER__*` are read.
    pub environment: BTreeMap<String, String>,
    /// Dotted keys and values of flags.
    pub overrides: Vec<(String, String)>,
}

impl Sources {
    /// Uses the environment of this process. Variables that are not UTF-8 are ignored.
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

    /// The file to read, if any.
    #[must_use]
    pub fn file(&self) -> Option<PathBuf> {
        let from_environment = || {
            self.environment
                .get("REDELIVER_CONFIG")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from)
        };
        self.file.clone().or_else(from_environment)
    }
}

impl Config {
    /// Loads the configuration of a process.
    ///
    /// # Errors
    /// When the file cannot be read or is not valid YAML, or when fields are unknown, of the wrong type, out of range,
    /// or contradict each other.
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
        overrides::apply_environment(&mut tree, &sources.environment, &mut problems);
        overrides::apply_flags(&mut tree, &sources.overrides, &mut problems);
        // Without a failed override, correct settings could be reported as missing.
        if !problems.is_empty() {
            return Err(ConfigError::Invalid(problems));
        }
        Self::from_tree(&tree)
    }

    /// Reads a configuration from YAML, ignoring environment and flags.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_yaml(text: &str) -> Result<Self, ConfigError> {
        Self::from_tree(&yaml::parse(text, "configuration")?)
    }

    fn from_tree(tree: &Node) -> Result<Self, ConfigError> {
        let mut config: Self = deserialize::from_tree(tree.clone()).map_err(ConfigError::Invalid)?;
        // Processes on one host would fence each other under the host's name, so only a configured name turns on
        // static membership. The tree still shows whether the name is configured.
        config.explicit_instance = tree.get("instance").is_some_and(|node| match &node.value {
            Value::Null | Value::Empty => false,
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

    /// Fills in omitted fields whose defaults depend on other fields.
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
            let rule = "is not a valid instance name: use 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`";
            findings.report("instance", format!("`{}` {rule}", self.instance));
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
                    at.report(name, "is also listed under `pipelines`; remove one of the two");
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
        findings.inside("console", |at| self.console.check(at));
        findings.inside("clock", |at| self.clock.check(at));
        findings.inside("admin", |at| self.admin.check(at));
        findings.inside("telemetry", |at| self.telemetry.check(at));
        findings.inside("control", |at| self.control.check(at));
        findings.inside("audit", |at| self.audit.check(at));
        findings.inside("shutdown", |at| self.shutdown.check(at));
    }

    /// Kafka deletes a record that waits longer than the retention of its topic.
    fn check_retention(&self, findings: &mut Findings<'_>) {
        let topics = &self.kafka.topics;
        let longest = self.tiers().last().copied().unwrap_or_default();
        if topics.create && topics.retention.duration() < longest.duration().saturating_mul(2) {
            let problem = format!(
                "{} is too short for the tier {longest}: must be at least twice as long as the longest tier",
                topics.retention
            );
            findings.inside("kafka", |at| {
                at.inside("topics", |at| at.report("retention", problem));
            });
        }
    }

    fn check_served(&self, served: &ServedPipelines, needs_endpoint: bool, findings: &mut Findings<'_>) {
        for name in served.pipelines.iter().flatten() {
            match self.any_pipeline(name) {
                None => {
                    let known = self.all_pipelines().map(|(name, _)| name);
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

/// Whether an instance name may contain this character.
#[must_use]
pub fn is_instance_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}
