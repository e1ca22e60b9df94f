//! The topics pipelines need: which they are, whether they would lose records as they stand, and creating
//! what is missing.
//!
//! Records wait in topics for as long as a day or more, so a topic's own clean-up is the one thing in Kafka
//! that can lose them without an error: a retention shorter than the wait, compaction of a topic whose
//! records share keys. What is needed ([`TopologySpec`]) and what a topic is told to be wrong for
//! ([`examine`]) are pure; [`check`] and [`apply`] do the asking and creating.
//!
//! Source and output topics belong to the users: they are created when they are missing and otherwise
//! never judged. Existing topics are never changed.

mod admin;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Span};

pub use admin::{Applied, TopologyError, apply, check};

/// How topics are created when they are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Partitions of each topic.
    pub partitions: i32,
    /// Replicas of each partition; -1 leaves it to the broker.
    pub replication: i32,
    /// How long tiers and due topics keep records at least.
    pub retention: Span,
    /// How long dead letters are kept.
    pub dead_letter_retention: Span,
}

/// One topic as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSpec {
    /// Its name.
    pub name: Arc<str>,
    /// What it is to its pipeline.
    pub role: TopicRole,
    /// Partitions to create it with.
    pub partitions: i32,
    /// Replicas to create it with; -1 leaves it to the broker.
    pub replication: i32,
    /// Retention to create it with; `None` leaves it to the broker.
    pub retention: Option<Span>,
    /// With a shorter retention records would be lost; `None` where that is the users' affair.
    pub required_retention: Option<Span>,
    /// The topic whose records must fit into it.
    pub source: Option<Arc<str>>,
    /// Whether it is ours: its records are lost or late when its configuration is wrong.
    pub managed: bool,
}

/// All topics of some pipelines, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopologySpec {
    /// The topics, in the order of the pipelines.
    pub topics: Vec<TopicSpec>,
}

/// A topic as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActualTopic {
    /// How many partitions it has.
    pub partitions: i32,
    /// Its configuration as far as it is known, defaults included.
    pub config: BTreeMap<String, String>,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Records would be lost or could not be written: do not start.
    Error,
    /// Records can be lost in special cases.
    Warning,
}

/// Something wrong with a topic, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The topic.
    pub topic: Arc<str>,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong and what comes of it.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        write!(
            f,
            "{severity}: topic `{}` {}; {}",
            self.topic, self.problem, self.remedy
        )
    }
}

/// A retry tier may be down for so long before a waiting record is lost, beyond the wait itself twice.
const TIER_MARGIN: Span = Span::from_secs(86_400);
/// No due or dead-letter topic is sound with less.
const SHORTEST_RETENTION: Span = Span::from_secs(3_600);

impl TopologySpec {
    /// The topics of these pipelines. A topic that is ours for one pipeline and a source or an output for
    /// another is ours.
    #[must_use]
    pub fn for_pipelines(pipelines: &[Pipeline], settings: &TopicSettings) -> Self {
        let mut topics: Vec<TopicSpec> = Vec::new();
        for pipeline in pipelines {
            for (name, role) in pipeline.topics() {
                let spec = TopicSpec::new(name, role, pipeline, settings);
                match topics.iter_mut().find(|known| known.name == spec.name) {
                    Some(known) if spec.managed && !known.managed => *known = spec,
                    Some(_) => {}
                    None => topics.push(spec),
                }
            }
        }
        Self { topics }
    }
}

impl TopicSpec {
    fn new(name: Arc<str>, role: TopicRole, pipeline: &Pipeline, settings: &TopicSettings) -> Self {
        let (retention, required_retention) = match role {
            TopicRole::Source | TopicRole::Output => (None, None),
            TopicRole::Tier(tier) => {
                let twice = Span::from_millis(pipeline.max_wait.max(tier).as_millis().saturating_mul(2));
                let roomy = Span::from_millis(twice.as_millis().saturating_add(TIER_MARGIN.as_millis()));
                (Some(settings.retention.max(roomy)), Some(twice))
            }
            TopicRole::Due => (
                Some(settings.retention),
                Some(settings.retention.min(SHORTEST_RETENTION)),
            ),
            TopicRole::DeadLetter => {
                let retention = settings.dead_letter_retention;
                (Some(retention), Some(retention.min(SHORTEST_RETENTION)))
            }
        };
        let managed = required_retention.is_some();
        Self {
            name,
            role,
            partitions: settings.partitions,
            replication: settings.replication,
            retention,
            required_retention,
            source: managed.then(|| pipeline.source.clone()),
            managed,
        }
    }

    fn finding(&self, severity: Severity, problem: String, remedy: String) -> Finding {
        Finding {
            topic: self.name.clone(),
            severity,
            problem,
            remedy,
        }
    }

    /// What the topic holds, for messages.
    fn records(&self) -> &'static str {
        match self.role {
            TopicRole::Source => "records",
            TopicRole::Output => "results",
            TopicRole::Tier(_) => "waiting records",
            TopicRole::Due => "released records",
            TopicRole::DeadLetter => "dead letters",
        }
    }
}

impl ActualTopic {
    fn number(&self, name: &str) -> Option<i64> {
        self.config.get(name)?.trim().parse().ok()
    }

    /// The largest batch of records it takes, in bytes.
    fn max_message_bytes(&self) -> Option<i64> {
        self.number("max.message.bytes")
    }

    fn is_compacted(&self) -> bool {
        let policy = self.config.get("cleanup.policy");
        policy.is_some_and(|policy| policy.split(',').any(|word| word.trim() == "compact"))
    }
}

/// What is wrong with the topics, by topic in the order of the specification.
#[must_use]
pub fn examine_all(spec: &TopologySpec, actual: &BTreeMap<String, ActualTopic>) -> Vec<Finding> {
    spec.topics
        .iter()
        .flat_map(|topic| {
            let source = topic.source.as_deref().and_then(|source| actual.get(source));
            examine(topic, actual.get(&*topic.name), source)
        })
        .collect()
}

/// What is wrong with a topic. `source` is the topic its records come from, where that is known. What the
/// broker did not tell is not judged.
#[must_use]
pub fn examine(spec: &TopicSpec, actual: Option<&ActualTopic>, source: Option<&ActualTopic>) -> Vec<Finding> {
    let Some(actual) = actual else {
        return vec![spec.finding(
            Severity::Error,
            "does not exist".to_owned(),
            "create it, or run `redeliver topics apply`".to_owned(),
        )];
    };
    if !spec.managed {
        return Vec::new();
    }
    let mut findings: Vec<_> = [
        examine_compaction(spec, actual),
        examine_retention(spec, actual),
        examine_size(spec, actual, source),
        examine_retention_bytes(spec, actual),
    ]
    .into_iter()
    .flatten()
    .collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

fn examine_compaction(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    actual.is_compacted().then(|| {
        spec.finding(
            Severity::Error,
            format!(
                "is compacted: compaction would drop {} that share a key",
                spec.records()
            ),
            "set its cleanup.policy to delete".to_owned(),
        )
    })
}

fn examine_retention(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let retention = actual.number("retention.ms")?;
    // Negative, usually -1, is unlimited.
    let retention = Span::from_millis(u64::try_from(retention).ok()?);
    let required = spec.required_retention?;
    let wanted = spec.retention?;
    let remedy = |least: Span| format!("set its retention.ms to {} ({wanted}) or more", least.as_millis());
    match spec.role {
        TopicRole::Tier(_) if retention < required => {
            let longest = Span::from_millis(required.as_millis() / 2);
            Some(spec.finding(
                Severity::Error,
                format!(
                    "keeps records for {retention} while they may wait for up to {longest}: they would be \
                     deleted before they are due, or after a short outage; needed is {required}"
                ),
                remedy(wanted),
            ))
        }
        TopicRole::Due | TopicRole::DeadLetter if retention < wanted => {
            let severity = if retention < required {
                Severity::Error
            } else {
                Severity::Warning
            };
            Some(spec.finding(
                severity,
                format!(
                    "deletes {} after {retention}, and {wanted} is configured",
                    spec.records()
                ),
                remedy(wanted),
            ))
        }
        TopicRole::Source
        | TopicRole::Output
        | TopicRole::Tier(_)
        | TopicRole::Due
        | TopicRole::DeadLetter => None,
    }
}

fn examine_size(spec: &TopicSpec, actual: &ActualTopic, source: Option<&ActualTopic>) -> Option<Finding> {
    let limit = actual.max_message_bytes()?;
    let needed = source?.max_message_bytes()?;
    let source = spec.source.as_deref()?;
    (limit < needed).then(|| {
        spec.finding(
            Severity::Error,
            format!("takes records of {limit} bytes while `{source}` takes {needed}: larger ones could not move on"),
            format!("set its max.message.bytes to {} or more", needed + HEADER_ROOM),
        )
    })
}

fn examine_retention_bytes(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let limit = actual.number("retention.bytes").filter(|limit| *limit >= 0)?;
    Some(spec.finding(
        Severity::Warning,
        format!(
            "has retention.bytes={limit}: a burst would delete {} before their time is over",
            spec.records()
        ),
        "set its retention.bytes to -1 and bound it by time".to_owned(),
    ))
}

/// What our headers add to a record at most, generously.
const HEADER_ROOM: i64 = 16 * 1024;

/// The configuration to create a topic of ours with.
fn creation_config(spec: &TopicSpec, source: Option<&ActualTopic>) -> Vec<(&'static str, String)> {
    let mut config = Vec::new();
    if spec.managed {
        config.push(("cleanup.policy", "delete".to_owned()));
        // The broker's default may limit the size.
        config.push(("retention.bytes", "-1".to_owned()));
        if let Some(limit) = source.and_then(ActualTopic::max_message_bytes) {
            let roomy = limit.saturating_add(HEADER_ROOM).min(i64::from(i32::MAX));
            config.push(("max.message.bytes", roomy.to_string()));
        }
    }
    if let Some(retention) = spec.retention {
        let millis = i64::try_from(retention.as_millis()).unwrap_or(i64::MAX);
        config.push(("retention.ms", millis.to_string()));
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> TopicSettings {
        TopicSettings {
            partitions: 12,
            replication: 3,
            retention: Span::from_secs(7 * 86_400),
            dead_letter_retention: Span::from_secs(30 * 86_400),
        }
    }

    fn crawl() -> Pipeline {
        Pipeline {
            output: Some("crawl-results".into()),
            ..Pipeline::new("crawl-jobs")
        }
    }

    fn spec_of(name: &str) -> TopicSpec {
        let spec = TopologySpec::for_pipelines(&[crawl()], &settings());
        spec.topics
            .into_iter()
            .find(|topic| &*topic.name == name)
            .unwrap()
    }

    fn topic(config: &[(&str, &str)]) -> ActualTopic {
        let mut actual = ActualTopic {
            partitions: 12,
            config: BTreeMap::new(),
        };
        for (name, value) in [
            ("cleanup.policy", "delete"),
            ("retention.ms", "2592000000"),
            ("retention.bytes", "-1"),
            ("max.message.bytes", "1048588"),
            ("message.timestamp.type", "CreateTime"),
        ]
        .iter()
        .chain(config)
        {
            actual.config.insert((*name).to_owned(), (*value).to_owned());
        }
        actual
    }

    /// The findings of one topic with this configuration, beside a source with default limits.
    #[track_caller]
    fn check(name: &str, config: &[(&str, &str)], expected: &[&str]) {
        let findings = examine(&spec_of(name), Some(&topic(config)), Some(&topic(&[])));
        let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(texts, expected, "{name} {config:?}");
    }

    #[test]
    fn a_pipeline_needs_its_topics_each_once() {
        let other = Pipeline {
            name: "again".into(),
            source: "crawl-jobs-dlq".into(),
            output: Some("crawl-jobs".into()),
            ..crawl()
        };
        // The dead letters are ours, in whichever order the pipelines come.
        for pipelines in [[crawl(), other.clone()], [other, crawl()]] {
            let spec = TopologySpec::for_pipelines(&pipelines, &settings());
            let mut names: Vec<_> = spec.topics.iter().map(|topic| &*topic.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!((spec.topics.len(), names.len()), (12, 12), "{names:?}");
            let dead = spec
                .topics
                .iter()
                .find(|topic| &*topic.name == "crawl-jobs-dlq")
                .unwrap();
            assert_eq!((dead.role, dead.managed), (TopicRole::DeadLetter, true));
            assert_eq!(dead.source.as_deref(), Some("crawl-jobs"));
        }
    }

    #[test]
    fn a_tier_keeps_records_for_twice_the_longest_wait_and_a_day() {
        let retention = |settings: &TopicSettings, pipeline: Pipeline| {
            let spec = TopologySpec::for_pipelines(&[pipeline], settings);
            let tier = spec
                .topics
                .iter()
                .find(|topic| &*topic.name == "crawl-jobs-retry-5s")
                .unwrap();
            (
                tier.retention.unwrap().to_string(),
                tier.required_retention.unwrap().to_string(),
            )
        };
        let of = |retention: &str, required: &str| (retention.to_owned(), required.to_owned());
        assert_eq!(retention(&settings(), crawl()), of("7d", "2d"));
        let patient = Pipeline {
            max_wait: Span::from_secs(30 * 86_400),
            ..crawl()
        };
        assert_eq!(retention(&settings(), patient), of("61d", "60d"));
        let hasty = Pipeline {
            max_wait: Span::from_secs(1),
            ..crawl()
        };
        assert_eq!(retention(&settings(), hasty.clone()), of("7d", "10s"));
        let short = TopicSettings {
            retention: Span::from_secs(1),
            ..settings()
        };
        assert_eq!(retention(&short, hasty), of("86410s", "10s"));
    }

    #[test]
    fn sound_topics_give_no_findings() {
        let spec = TopologySpec::for_pipelines(&[crawl()], &settings());
        let mut actual: BTreeMap<_, _> = spec
            .topics
            .iter()
            .map(|spec| (spec.name.to_string(), topic(&[])))
            .collect();
        assert_eq!(examine_all(&spec, &actual), []);
        for sound in [
            ("retention.ms", "-1"),
            ("message.timestamp.type", "LogAppendTime"),
            ("max.message.bytes", "9000000"),
        ] {
            check("crawl-jobs-retry-1m", &[sound], &[]);
        }
        for created in &spec.topics {
            let config = creation_config(created, Some(&topic(&[])));
            let created_topic = actual.get_mut(&*created.name).unwrap();
            created_topic.config = config
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect();
        }
        assert_eq!(examine_all(&spec, &actual), []);
    }

    #[test]
    fn users_own_topics_are_not_judged_but_must_exist() {
        let bad = [
            ("cleanup.policy", "compact"),
            ("retention.ms", "1"),
            ("retention.bytes", "1"),
        ];
        for name in ["crawl-jobs", "crawl-results"] {
            check(name, &bad, &[]);
            let findings = examine(&spec_of(name), None, None);
            assert_eq!(
                findings[0].to_string(),
                format!("error: topic `{name}` does not exist; create it, or run `redeliver topics apply`")
            );
        }
    }

    #[test]
    fn compaction_is_refused_where_records_wait() {
        check(
            "crawl-jobs-retry-5s",
            &[("cleanup.policy", "compact,delete")],
            &[
                "error: topic `crawl-jobs-retry-5s` is compacted: compaction would drop waiting records that \
               share a key; set its cleanup.policy to delete",
            ],
        );
        for (name, records) in [
            ("crawl-jobs-retry-due", "released records"),
            ("crawl-jobs-dlq", "dead letters"),
        ] {
            let findings = examine(
                &spec_of(name),
                Some(&topic(&[("cleanup.policy", "compact")])),
                None,
            );
            assert!(findings[0].problem.contains(records) && findings.len() == 1);
        }
    }

    #[test]
    fn a_tier_that_forgets_before_the_wait_is_over_twice_is_refused() {
        check("crawl-jobs-retry-5s", &[("retention.ms", "172800000")], &[]);
        check(
            "crawl-jobs-retry-5s",
            &[("retention.ms", "172799999")],
            &[
                "error: topic `crawl-jobs-retry-5s` keeps records for 172799999ms while they may wait for up \
               to 1d: they would be deleted before they are due, or after a short outage; needed is 2d; set \
               its retention.ms to 604800000 (7d) or more",
            ],
        );
    }

    #[test]
    fn due_and_dead_letters_are_kept_as_configured() {
        check("crawl-jobs-retry-due", &[("retention.ms", "604800000")], &[]);
        check(
            "crawl-jobs-dlq",
            &[("retention.ms", "604800000")],
            &[
                "warning: topic `crawl-jobs-dlq` deletes dead letters after 7d, and 30d is configured; set its \
               retention.ms to 2592000000 (30d) or more",
            ],
        );
        check(
            "crawl-jobs-retry-due",
            &[("retention.ms", "60000")],
            &[
                "error: topic `crawl-jobs-retry-due` deletes released records after 1m, and 7d is configured; \
               set its retention.ms to 604800000 (7d) or more",
            ],
        );
    }

    #[test]
    fn what_the_source_takes_must_fit_everywhere() {
        check(
            "crawl-jobs-dlq",
            &[("max.message.bytes", "1000")],
            &[
                "error: topic `crawl-jobs-dlq` takes records of 1000 bytes while `crawl-jobs` takes 1048588: \
               larger ones could not move on; set its max.message.bytes to 1064972 or more",
            ],
        );
    }

    #[test]
    fn a_size_limit_is_a_warning_and_comes_after_errors() {
        let findings = examine(
            &spec_of("crawl-jobs-retry-5s"),
            Some(&topic(&[
                ("retention.bytes", "1000000"),
                ("cleanup.policy", "compact"),
            ])),
            None,
        );
        let severities: Vec<_> = findings.iter().map(|finding| finding.severity).collect();
        assert_eq!(severities, [Severity::Error, Severity::Warning]);
        assert!(findings[1].problem.contains("retention.bytes=1000000"));
    }

    #[test]
    fn what_the_broker_does_not_tell_is_not_judged() {
        let unknown = ActualTopic {
            partitions: 1,
            config: BTreeMap::new(),
        };
        assert_eq!(
            examine(&spec_of("crawl-jobs-retry-5s"), Some(&unknown), Some(&unknown)),
            []
        );
        check(
            "crawl-jobs-retry-5s",
            &[("retention.ms", "soon"), ("max.message.bytes", "")],
            &[],
        );
    }
}
