//! Topics of different parts must not collide: the dead letters of one pipeline must not be the source of another.

use std::collections::BTreeMap;

use redeliver_core::pipeline::TopicRole;

use super::error::Findings;
use super::{Config, PipelineConfig};

/// Checks the topics of all pipelines, applications and the scheduler against each other. A pipeline may read the
/// results of another one, and pipelines may share an output. Any other shared topic is an error.
pub(super) fn check(config: &Config, findings: &mut Findings<'_>) {
    let mut taken: BTreeMap<String, TopicUse<'_>> = BTreeMap::new();
    for (section, pipelines) in [("pipelines", &config.pipelines), ("retired", &config.retired)] {
        findings.inside(section, |findings| {
            check_pipelines(config, pipelines, &mut taken, findings);
        });
    }
    let (control, audit, status, actions) = (
        config.control_topic(),
        config.audit_topic(),
        config.status_topic(),
        config.waiting_actions_topic(),
    );
    let mut others = Vec::new();
    for (section, field, topic, name) in [
        ("kafka", "id_prefix", &status, "the status topic"),
        (
            "kafka",
            "id_prefix",
            &actions,
            "the topic of actions on waiting records",
        ),
        ("control", "topic", &control, "the control topic"),
        ("audit", "topic", &audit, "the audit topic"),
    ] {
        findings.inside(section, |at| {
            check_own(config, (field, topic), &others, &taken, at);
        });
        others.push((name, topic));
    }
    findings.inside("scheduler", |at| {
        at.inside("topics", |at| check_job_topics(config, &taken, at));
        at.inside("apps", |at| check_apps(config, &taken, at));
    });
}

fn check_pipelines<'c>(
    config: &Config,
    pipelines: &'c BTreeMap<String, PipelineConfig>,
    taken: &mut BTreeMap<String, TopicUse<'c>>,
    findings: &mut Findings<'_>,
) {
    for (name, settings) in pipelines {
        // A name that is both in use and retired is reported elsewhere.
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
                Some(other) if !may_share(other, &used) => {
                    let problem = format!(
                        "`{}` is {} of this pipeline and {} of `{}`; a topic can have only one role",
                        used.topic,
                        used.role.description(),
                        other.role.description(),
                        other.pipeline
                    );
                    match used.role {
                        Role::Source => findings.inside(name, |at| at.report("source", problem)),
                        Role::Output => findings.inside(name, |at| at.report("output", problem)),
                        Role::Own => findings.report(name, problem),
                    }
                }
                // Keep the source when a topic is an output too, so that a second source is detected.
                Some(other) if other.role == Role::Source => {}
                _ => {
                    taken.insert(used.topic.clone(), used);
                }
            }
        }
    }
}

/// The status topic, the control topic and the audit topic have no other role. `others`: those of them that were checked before, with their descriptions.
fn check_own(
    config: &Config,
    (field, topic): (&str, &str),
    others: &[(&str, &String)],
    taken: &BTreeMap<String, TopicUse<'_>>,
    findings: &mut Findings<'_>,
) {
    let mut others = others.iter();
    let is_other = others
        .find(|(_, other)| *other == topic)
        .map(|(name, _)| (*name).to_owned());
    let of_pipeline = taken.get(topic).map(|other| {
        let role = other.role.description();
        format!("{role} of the pipeline `{}`", other.pipeline)
    });
    let mut of_scheduler = config.scheduler.topics.by_key().into_iter();
    let of_scheduler = of_scheduler
        .find(|(_, own)| *own == topic)
        .map(|(key, _)| format!("scheduler.topics.{key}"));
    let mut apps = config.scheduler.apps.iter();
    let of_app = apps
        .find(|(_, app)| app.topic == topic)
        .map(|(name, _)| format!("the topic of the application `{name}`"));
    if let Some(other) = is_other.or(of_pipeline).or(of_scheduler).or(of_app) {
        let problem = format!("`{topic}` is also {other}; choose another topic");
        findings.report(field, problem);
    }
}

/// A pipeline may write jobs to the ingest topic and read rejected ones from the dead-letter topic. The scheduler's
/// other topics are its own.
fn check_job_topics(config: &Config, taken: &BTreeMap<String, TopicUse<'_>>, findings: &mut Findings<'_>) {
    for (key, topic) in config.scheduler.topics.by_key() {
        let may_share = |role| matches!((key, role), ("ingest", Role::Output) | ("dlq", Role::Source));
        if let Some(other) = taken.get(topic).filter(|other| !may_share(other.role)) {
            let problem = format!(
                "`{topic}` is also {} of the pipeline `{}`; a topic can have only one role",
                other.role.description(),
                other.pipeline
            );
            findings.report(key, problem);
        }
    }
}

fn check_apps(config: &Config, taken: &BTreeMap<String, TopicUse<'_>>, findings: &mut Findings<'_>) {
    for (app, settings) in &config.scheduler.apps {
        if let Some(other) = taken.get(&settings.topic).filter(|other| other.role == Role::Own) {
            let problem = format!(
                "`{}` is {} of the pipeline `{}`; choose a source topic",
                settings.topic,
                other.role.description(),
                other.pipeline
            );
            findings.inside(app, |at| at.report("topic", problem));
        }
        let own = config.scheduler.topics.by_key();
        if let Some((key, _)) = own.into_iter().find(|(_, own)| *own == settings.topic) {
            let problem = format!(
                "`{}` is scheduler.topics.{key}; choose a topic of the application",
                settings.topic
            );
            findings.inside(app, |at| at.report("topic", problem));
        }
    }
}

struct TopicUse<'c> {
    topic: String,
    pipeline: &'c str,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Source,
    Output,
    /// A tier topic, the due topic or the dead-letter topic, which are named after the pipeline and belong to it.
    Own,
}

impl Role {
    fn description(self) -> &'static str {
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
) -> Vec<TopicUse<'c>> {
    let used = |topic: &str, role| TopicUse {
        topic: topic.to_owned(),
        pipeline: name,
        role,
    };
    let outputs = settings.output.iter().flat_map(super::OutputConfig::topics);
    let mut uses: Vec<TopicUse<'c>> = outputs.map(|topic| used(topic, Role::Output)).collect();
    uses.extend(topics.iter().filter_map(|(topic, role)| match role {
        TopicRole::Source => Some(used(topic, Role::Source)),
        TopicRole::Output => None,
        TopicRole::Tier(_) | TopicRole::Due | TopicRole::DeadLetter => Some(used(topic, Role::Own)),
    }));
    uses
}

fn may_share(one: &TopicUse<'_>, other: &TopicUse<'_>) -> bool {
    match (one.role, other.role) {
        // A source that is an output of the same pipeline is reported where the output is checked.
        (Role::Source, Role::Output) | (Role::Output, Role::Source | Role::Output) => true,
        _ => false,
    }
}
