//! The sections of the configuration that the lake reads.

use redeliver_core::HumanDuration;
use redeliver_dlq_inspector::DlqInspectorConfig;
use redeliver_runtime::Config;
use redeliver_runtime::config::{Findings, OwnSections};
use serde::{Deserialize, Serialize};

/// The most headers that are in a column.
const MAX_HEADERS: usize = 32;

/// The section of the lake, and what it reads of another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// Where the tables are, and how often rows are written.
    pub lake: LakeConfig,
    /// Which topics have dead letters, and what is masked in them.
    pub dlq_inspector: DlqInspectorConfig,
}

impl OwnSections for Sections {
    fn check(&self, _: &Config, findings: &mut Findings<'_>) {
        findings.inside("lake", |at| self.lake.check(at));
        // A mistake here would write what must not be in the tables.
        findings.inside("dlq_inspector", |at| self.dlq_inspector.check_letters(at));
    }
}

/// `lake`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LakeConfig {
    /// The directory with the tables: an absolute path, or a URL such as `s3://bucket/redeliver`.
    pub location: Option<String>,
    /// How long rows are gathered until they are committed.
    pub flush_interval: HumanDuration,
    /// Maximum size of the rows of all tables in memory, in bytes. Then the largest tables are committed early.
    pub buffer_bytes: u64,
    /// Time between two looks for files that can be merged or deleted.
    pub maintenance_interval: HumanDuration,
    /// How long files stay in the store after they were replaced, for readers of earlier snapshots.
    pub keep_replaced: HumanDuration,
    /// Whether the table of dead letters contains their values.
    pub payloads: bool,
    /// Names of headers that attempts, outcomes and dead letters contain.
    pub headers: Vec<String>,
}

impl Default for LakeConfig {
    fn default() -> Self {
        Self {
            location: None,
            flush_interval: HumanDuration::from_secs(60),
            buffer_bytes: 128 << 20,
            maintenance_interval: HumanDuration::from_secs(3_600),
            keep_replaced: HumanDuration::from_secs(7 * 86_400),
            payloads: false,
            headers: Vec::new(),
        }
    }
}

impl LakeConfig {
    /// Reports values that are out of range.
    pub fn check(&self, findings: &mut Findings<'_>) {
        let (least, hour) = (HumanDuration::from_millis(100), HumanDuration::from_secs(3_600));
        findings.range("flush_interval", self.flush_interval, least..=hour);
        findings.seconds("maintenance_interval", self.maintenance_interval, 1..=86_400);
        findings.seconds("keep_replaced", self.keep_replaced, 3_600..=366 * 86_400);
        // A column of texts has less than 2 GiB.
        findings.range("buffer_bytes", self.buffer_bytes, 1 << 20..=1 << 30);
        if self.headers.len() > MAX_HEADERS || self.headers.iter().any(String::is_empty) {
            findings.report("headers", format!("must be at most {MAX_HEADERS} names"));
        }
        if let Some(location) = &self.location
            && !location.starts_with('/')
            && !location.contains("://")
        {
            let problem =
                format!("`{location}` is neither an absolute path nor a URL such as s3://bucket/redeliver");
            findings.report("location", problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::ProgramConfig;

    use super::*;

    #[test]
    fn mistakes_in_masking_are_found() {
        let load = |section: &str| {
            let yaml = format!("dlq_inspector: {{ {section} }}");
            ProgramConfig::<Sections>::from_yaml(&yaml)
        };
        // Without auth: whoever reads the tables has no scopes.
        assert!(load("masking: [{ topics: ['*'], key: true }]").is_ok());
        for (section, says) in [
            ("maskng: [{ topics: ['*'], key: true }]", "maskng"),
            ("masking: [{ topics: [], key: true }]", "topics is empty"),
            ("masking: [{ topics: ['*'] }]", "masks nothing"),
            ("topics: ['my letters']", "my letters"),
        ] {
            let error = load(section).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
