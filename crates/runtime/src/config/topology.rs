//! No topic may have two meanings: what one pipeline writes as a dead letter must not be another's source.

use std::collections::BTreeMap;

use redeliver_core::pipeline::TopicRole;

use super::problem::Findings;
use super::{Config, PipelineConfig};

/// Checks the topics of all pipelines against each other. A pipeline may read what another one writes as
/// its results, and several may write to the same output; every other meeting is a mistake.
pub(super) fn check(config: &Config, findings: &mut Findings<'_>) {
    let mut taken: BTreeMap<String, Use<'_>> = BTreeMap::new();
    for (section, pipelines) in [("pipelines", &config.pipelines), ("retired", &config.retired)] {
        findings.inside(section, |findings| {
            check_pipelines(config, pipelines, &mut taken, findings);
        });
    }
    findings.inside("scheduler", |at| {
        at.inside("topics", |at| check_job_topics(config, &taken, at));
        at.inside("apps", |at| check_apps(config, &taken, at));
    });
}

fn check_pipelines<'c>(
    config: &Config,
    pipelines: &'c BTreeMap<String, PipelineConfig>,
    taken: &mut BTreeMap<String, Use<'c>>,
    findings: &mut Findings<'_>,
) {
    for (name, settings) in pipelines {
        // That it stands twice is said elsewhere.
        if settings.is_retired() && config.pipelines.contains_key(name) {
            continue;
        }
        settings.check_names(name, &config.scheduler, findings);
        for used in uses(
            name,
            &settings.pipeline(name, &config.scheduler).topics(),
            settings,
        ) {
            match taken.get(&used.topic) {
                Some(other) if !may_meet(other, &used) => {
                    let problem = format!(
                        "`{}` is {} of this pipeline and {} of `{}`; a topic has one meaning",
                        used.topic,
                        used.role.words(),
                        other.role.words(),
                        other.pipeline
                    );
                    match used.role {
                        Role::Source => findings.inside(name, |at| at.wrong("source", problem)),
                        Role::Output => findings.inside(name, |at| at.wrong("output", problem)),
                        Role::Own => findings.wrong(name, problem),
                    }
                }
                // Of an output and a source the source is kept: a second source must be found.
                Some(other) if other.role == Role::Source => {}
                _ => {
                    taken.insert(used.topic.clone(), used);
                }
            }
        }
    }
}

/// A pipeline may write jobs to be scheduled, and read what could not be; the rest is the scheduler's alone.
fn check_job_topics(config: &Config, taken: &BTreeMap<String, Use<'_>>, findings: &mut Findings<'_>) {
    for (key, topic) in config.scheduler.topics.by_key() {
        let may_meet = |role| matches!((key, role), ("ingest", Role::Output) | ("dlq", Role::Source));
        if let Some(other) = taken.get(topic).filter(|other| !may_meet(other.role)) {
            let problem = format!(
                "`{topic}` is {} of the pipeline `{}` too; a topic has one meaning",
                other.role.words(),
                other.pipeline
            );
            findings.wrong(key, problem);
        }
    }
}

fn check_apps(config: &Config, taken: &BTreeMap<String, Use<'_>>, findings: &mut Findings<'_>) {
    for (app, settings) in &config.scheduler.apps {
        if let Some(other) = taken.get(&settings.topic).filter(|other| other.role == Role::Own) {
            let problem = format!(
                "`{}` is {} of the pipeline `{}`; jobs go to a source",
                settings.topic,
                other.role.words(),
                other.pipeline
            );
            findings.inside(app, |at| at.wrong("topic", problem));
        }
        let own = config.scheduler.topics.by_key();
        if let Some((key, _)) = own.into_iter().find(|(_, own)| *own == settings.topic) {
            let problem = format!(
                "`{}` is scheduler.topics.{key}; jobs go to a topic of their application",
                settings.topic
            );
            findings.inside(app, |at| at.wrong("topic", problem));
        }
    }
}

struct Use<'c> {
    topic: String,
    pipeline: &'c str,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Source,
    Output,
    /// A tier, the due topic or the dead-letter topic: named after the pipeline and only for it.
    Own,
}

impl Role {
    fn words(self) -> &'static str {
        match self {
            Self::Source => "the source",
            Self::Output => "an output",
            Self::Own => "a retry or dead-letter topic",
        }
    }
}

fn uses<'c>(
    name: &'c str,
    topics: &[(std::sync::Arc<str>, TopicRole)],
    settings: &super::PipelineConfig,
) -> Vec<Use<'c>> {
    let used = |topic: &str, role| Use {
        topic: topic.to_owned(),
        pipeline: name,
        role,
    };
    let outputs = settings.output.iter().flat_map(super::OutputConfig::topics);
    let mut uses: Vec<Use<'c>> = outputs.map(|topic| used(topic, Role::Output)).collect();
    uses.extend(topics.iter().filter_map(|(topic, role)| match role {
        TopicRole::Source => Some(used(topic, Role::Source)),
        TopicRole::Output => None,
        TopicRole::Tier(_) | TopicRole::Due | TopicRole::DeadLetter => Some(used(topic, Role::Own)),
    }));
    uses
}

fn may_meet(one: &Use<'_>, other: &Use<'_>) -> bool {
    match (one.role, other.role) {
        // A source that is an output of the same pipeline is reported where the output is checked.
        (Role::Source, Role::Output) | (Role::Output, Role::Source | Role::Output) => true,
        _ => false,
    }
}
