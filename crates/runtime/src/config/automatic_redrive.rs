//! `automatic_redrive`: dead letters of a pipeline that are redriven without a caller.

use redeliver_core::{ErrorClass, HumanDuration, Pipeline};
use serde::{Deserialize, Serialize};

use super::error::{Findings, suggestion};
use super::{Config, display_from_str};

/// Maximum number of entries of a list.
const MAX_ENTRIES: usize = 20;
/// Maximum length of an error code.
const MAX_CODE: usize = 200;

/// `pipelines.<name>.automatic_redrive`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutomaticRedriveConfig {
    /// How old a dead letter is at least.
    #[serde(with = "display_from_str")]
    pub after: HumanDuration,
    /// How often a record is redriven before its dead letter is parked. Redrives by callers count, too.
    pub max_count: u32,
    /// Maximum number of dead letters per second.
    pub rate: u32,
    /// The time between two looks for dead letters.
    #[serde(with = "display_from_str")]
    pub every: HumanDuration,
    /// How long a job waits after its first batches and at its end for what comes back. `None`: until the retries of the pipeline are over.
    #[serde(with = "display_from_str::optional")]
    pub observe: Option<HumanDuration>,
    /// The brake acts when a larger share of the redriven records has come back. 1: never.
    pub max_returned_share: f64,
    /// Only failures of these classes. Empty: of all classes.
    pub error_classes: Vec<String>,
    /// Only failures with these codes. Empty: with all codes.
    pub error_codes: Vec<String>,
}

impl Default for AutomaticRedriveConfig {
    fn default() -> Self {
        Self {
            after: HumanDuration::from_secs(3_600),
            max_count: 2,
            rate: 10,
            every: HumanDuration::from_secs(300),
            observe: None,
            max_returned_share: 0.2,
            error_classes: Vec::new(),
            error_codes: Vec::new(),
        }
    }
}

impl AutomaticRedriveConfig {
    /// `max_by_callers`: `dlq_inspector.redrive.max_count`, which applies to each redrive without force.
    pub(super) fn check(&self, max_by_callers: u32, findings: &mut Findings<'_>) {
        let (second, year) = (
            HumanDuration::from_secs(1),
            HumanDuration::from_secs(366 * 86_400),
        );
        findings.range("after", self.after, second..=year);
        let day = HumanDuration::from_secs(86_400);
        findings.range("every", self.every, second..=day);
        if let Some(observe) = self.observe {
            findings.range("observe", observe, HumanDuration::default()..=day);
        }
        findings.range("max_returned_share", self.max_returned_share, 0.0..=1.0);
        findings.range("rate", self.rate, 1..=1_000_000);
        findings.range("max_count", self.max_count, 1..=1_000);
        if self.max_count > max_by_callers && (1..=1_000).contains(&self.max_count) {
            findings.report(
                "max_count",
                format!(
                    "{} is more than dlq_inspector.redrive.max_count: must be at most {max_by_callers}",
                    self.max_count
                ),
            );
        }
        let classes = ErrorClass::ALL.map(ErrorClass::as_str);
        for class in &self.error_classes {
            if !classes.contains(&class.as_str()) {
                let problem = format!("`{class}` is no error class{}", suggestion(class, classes));
                findings.report("error_classes", problem);
            }
        }
        for code in &self.error_codes {
            let is_char = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\');
            if code.is_empty() || code.len() > MAX_CODE || !code.chars().all(is_char) {
                let problem = format!(
                    "`{code}` is no error code: use 1 to {MAX_CODE} printable ASCII characters except spaces, `\"` and `\\`"
                );
                findings.report("error_codes", problem);
            }
        }
        for (key, list) in [
            ("error_classes", &self.error_classes),
            ("error_codes", &self.error_codes),
        ] {
            if list.len() > MAX_ENTRIES {
                findings.report(key, format!("has more than {MAX_ENTRIES} entries"));
            }
        }
    }
}

impl Config {
    /// The pipelines with automatic redrives, which have a parking topic.
    #[must_use]
    pub fn automatic_redrives(&self) -> Vec<(Pipeline, &AutomaticRedriveConfig)> {
        let all = self.all_pipelines();
        let automatic = all.filter_map(|(name, pipeline)| {
            let automatic = pipeline.automatic_redrive.as_ref()?;
            Some((pipeline.pipeline(name, &self.scheduler), automatic))
        });
        automatic.collect()
    }

    /// The names and patterns of all topics with dead letters: `dlq_inspector.topics` and the parking topics.
    #[must_use]
    pub fn dead_letter_patterns(&self) -> Vec<String> {
        let mut patterns = self.dlq_inspector.topics.clone();
        for (pipeline, _) in self.automatic_redrives() {
            let parking = pipeline.parking_topic().to_string();
            if !patterns.contains(&parking) {
                patterns.push(parking);
            }
        }
        patterns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(automatic: &str, rest: &str) -> Result<Config, String> {
        let text =
            format!("pipelines: {{ docs: {{ output: out, automatic_redrive: {automatic} }} }}\n{rest}");
        Config::from_yaml(&text).map_err(|error| error.to_string())
    }

    #[test]
    fn automatic_redrives_are_off_unless_they_are_configured() {
        let off = load("null", "").unwrap();
        assert!(off.automatic_redrives().is_empty());
        assert_eq!(off.dead_letter_patterns(), off.dlq_inspector.topics);
        let on = load(
            "{ after: 10m, error_classes: [exhausted], error_codes: [http.503] }",
            "",
        )
        .unwrap();
        let [(pipeline, settings)] = &on.automatic_redrives()[..] else {
            panic!("{on:?}");
        };
        assert_eq!(&*pipeline.parking_topic(), "docs-parked");
        assert_eq!(
            (settings.after, settings.max_count),
            (HumanDuration::from_secs(600), 2)
        );
        assert_eq!(on.dead_letter_patterns().last().unwrap(), "docs-parked");
        let again = Config::from_yaml(&on.to_yaml()).unwrap();
        assert_eq!(again.pipelines, on.pipelines);
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_refused_with_its_field() {
        for (automatic, rest, field, problem) in [
            ("{ after: 0s }", "", "after", "out of range"),
            ("{ rate: 0 }", "", "rate", "out of range"),
            ("{ every: 2d }", "", "every", "out of range"),
            ("{ observe: 2d }", "", "observe", "out of range"),
            (
                "{ max_returned_share: 1.5 }",
                "",
                "max_returned_share",
                "out of range",
            ),
            ("{ max_count: 0 }", "", "max_count", "out of range"),
            ("{ max_count: 4 }", "", "max_count", "must be at most 3"),
            (
                "{ max_count: 2 }",
                "dlq_inspector: { redrive: { max_count: 1 } }",
                "max_count",
                "must be at most 1",
            ),
            (
                "{ error_classes: [exausted] }",
                "",
                "error_classes",
                "did you mean `exhausted`?",
            ),
            ("{ error_codes: ['a b'] }", "", "error_codes", "no error code"),
            ("{ parking: x }", "", "parking", "unknown"),
            (
                "{}",
                "control: { topic: docs-parked }",
                "control.topic",
                "a retry or dead-letter topic",
            ),
        ] {
            let Err(error) = load(automatic, rest) else {
                panic!("{automatic} {rest}");
            };
            assert!(error.contains(field) && error.contains(problem), "{error}");
        }
    }
}
