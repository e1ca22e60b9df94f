//! Which topics belong to which tables.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::pipeline::{TopicRole, parse_retry_topic};
use redeliver_dlq_inspector::ledger;
use redeliver_dlq_inspector::pattern::Patterns;
use redeliver_runtime::Config;
use redeliver_service::topics::pipelines;

use crate::config::Sections;
use crate::rows::Origin;
use crate::schema::{ATTEMPTS, AUDIT, DEAD_LETTERS, DECISIONS, JOBS, OUTCOMES, Schema, TABLES};

/// The topics that the configuration names, and patterns of others.
pub(crate) struct Sources {
    letters: Patterns,
    /// The dead-letter topic of each output's pipeline.
    outputs: BTreeMap<Arc<str>, Arc<str>>,
    /// Pipelines, in whose tiers attempts are, whatever tiers they have now, and whether each success has a result.
    pipelines: BTreeMap<Arc<str>, bool>,
    state: Arc<str>,
    audit: String,
}

/// A topic that is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// The numbers of the tables that have rows of it.
    pub(crate) tables: Vec<usize>,
    pub(crate) origin: Origin,
}

impl Sources {
    pub(crate) fn new(config: &Config, own: &Sections) -> Self {
        let pipelines = pipelines(config);
        let outputs = pipelines.iter().flat_map(|pipeline| {
            let topics = pipeline.topics().into_iter();
            let outputs = topics.filter(|(_, role)| *role == TopicRole::Output);
            outputs.map(|(topic, _)| (topic, pipeline.dead_letter_topic()))
        });
        Self {
            letters: Patterns::new(&own.dlq_inspector.topics)
                .without([config.audit_topic(), config.control_topic()]),
            outputs: outputs.collect(),
            pipelines: pipelines
                .iter()
                .map(|pipeline| {
                    let expects_result = pipeline.output.is_some() && !pipeline.drops_results;
                    (pipeline.name.clone(), expects_result)
                })
                .collect(),
            state: config.scheduler.topics().state,
            audit: config.audit_topic(),
        }
    }

    /// What is read of a topic with this id; `None`: nothing.
    pub(crate) fn of(&self, topic: &str, topic_id: &str) -> Option<Source> {
        let source = |schemas: &[&'static Schema], masked_as: &str| Source {
            tables: schemas.iter().map(|schema| number(schema)).collect(),
            origin: Origin {
                topic_id: topic_id.to_owned(),
                tier: None,
                is_dead: false,
                expects_result: false,
                masked_as: masked_as.to_owned(),
            },
        };
        if self.letters.matches(topic) {
            let mut letters = source(&[&DEAD_LETTERS, &OUTCOMES], topic);
            letters.origin.is_dead = true;
            return Some(letters);
        }
        if let Some((pipeline, Some(tier))) = parse_retry_topic(topic)
            && let Some(expects_result) = self.pipelines.get(pipeline)
        {
            let mut attempts = source(&[&ATTEMPTS], &format!("{pipeline}-dlq"));
            attempts.origin.tier = Some(tier.to_string());
            attempts.origin.expects_result = *expects_result;
            return Some(attempts);
        }
        if let Some(letters) = self.outputs.get(topic) {
            return Some(source(&[&OUTCOMES], letters));
        }
        let schema = match topic {
            ledger::TOPIC => &DECISIONS,
            topic if *topic == *self.state => &JOBS,
            topic if *topic == *self.audit => &AUDIT,
            _ => return None,
        };
        Some(source(&[schema], topic))
    }
}

/// The number of a table.
fn number(schema: &Schema) -> usize {
    let mut tables = TABLES.iter();
    tables
        .position(|table| table.table == schema.table)
        .expect("TABLES has all of them")
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::ProgramConfig;

    use super::*;

    #[test]
    fn topics_belong_to_tables() {
        let yaml = "pipelines: { docs: { output: docs-out } }";
        let config = ProgramConfig::<Sections>::from_yaml(yaml).unwrap();
        let sources = Sources::new(&config, &config.own);
        let tables = |topic: &str| {
            let source = sources.of(topic, "id")?;
            let names = source.tables.iter().map(|number| TABLES[*number].table);
            Some((names.collect::<Vec<_>>().join(" "), source.origin.masked_as))
        };
        let found = |names: &str, masked: &str| Some((names.to_owned(), masked.to_owned()));
        for (topic, expected) in [
            ("docs", None),
            ("docs-retry-due", None),
            ("other-retry-5s", None),
            ("docs-retry-5s", found("attempts", "docs-dlq")),
            ("docs-retry-2h", found("attempts", "docs-dlq")),
            ("docs-out", found("outcomes", "docs-dlq")),
            ("docs-dlq", found("dead_letters outcomes", "docs-dlq")),
            ("theirs-dlq", found("dead_letters outcomes", "theirs-dlq")),
            (
                "scheduler.jobs.dlq",
                found("dead_letters outcomes", "scheduler.jobs.dlq"),
            ),
            (ledger::TOPIC, found("decisions", ledger::TOPIC)),
            ("scheduler.jobs.state", found("jobs", "scheduler.jobs.state")),
            ("scheduler.jobs.ingest", None),
        ] {
            assert_eq!(tables(topic), expected, "{topic}");
        }
        for (yaml, expected) in [
            (yaml, true),
            ("pipelines: { docs: {} }", false),
            (
                "pipelines: { docs: { output: { pointer: /kind, topics: { a: docs-out }, default: null }, http: { url: 'http://x/' } } }",
                false,
            ),
        ] {
            let config = ProgramConfig::<Sections>::from_yaml(yaml).unwrap();
            let source = Sources::new(&config, &config.own)
                .of("docs-retry-5s", "id")
                .unwrap();
            assert_eq!(source.origin.expects_result, expected, "{yaml}");
        }
        let audit = config.audit_topic();
        assert_eq!(tables(&audit), found("audit", &audit));
    }
}
