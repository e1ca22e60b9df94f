//! The topics of a configuration.

use redeliver_core::scheduler::{SchedulerRole, SchedulerTopics};
use redeliver_core::{HumanDuration, Pipeline};
use redeliver_kafka::topology::{MIN_RETENTION, Role, TopicSettings, TopicSpec, TopologySpec};
use redeliver_runtime::Config;
use redeliver_runtime::config::ResponseMode;

/// Clients stop waiting for an answer long before.
const ANSWER_RETENTION: HumanDuration = HumanDuration::from_secs(3_600);
const MIN_ANSWER_RETENTION: HumanDuration = HumanDuration::from_secs(60);
/// Answers are few and small, and each scheduler reads all of them.
const MAX_ANSWER_PARTITIONS: i32 = 4;
/// A shorter retention of audit entries is an error.
const MIN_AUDIT_RETENTION: HumanDuration = HumanDuration::from_secs(86_400);

/// How missing topics are created, from the configuration.
#[must_use]
pub fn topic_settings(config: &Config) -> TopicSettings {
    let topics = &config.kafka.topics;
    TopicSettings {
        partitions: i32::try_from(topics.partitions).unwrap_or(i32::MAX),
        replication: i32::try_from(topics.replication).unwrap_or(i32::MAX),
        retention: topics.retention,
        dead_letter_retention: topics.dead_letter_retention,
    }
}

/// The topics of these pipelines, the scheduler's topics if records of one of them can wait in the scheduler, the status topic and the control topic.
#[must_use]
pub fn of_pipelines(config: &Config, pipelines: &[Pipeline]) -> TopologySpec {
    used_by(config, pipelines).join(of_control(config))
}

fn used_by(config: &Config, pipelines: &[Pipeline]) -> TopologySpec {
    let settings = topic_settings(config);
    let mut spec = TopologySpec::for_pipelines(pipelines, &settings);
    for pipeline in pipelines {
        expect_results(&mut spec, config, &pipeline.name);
    }
    if !pipelines.is_empty() {
        let topic = TopicSpec::of_one_partition(
            config.status_topic(),
            Role::Status,
            "states of circuit breakers",
            &settings,
        );
        spec = spec.join(TopologySpec::of([topic]));
    }
    if pipelines.iter().all(|pipeline| pipeline.long_waits.is_none()) {
        return spec;
    }
    spec.join(scheduler_topics(&config.scheduler.topics(), pipelines, &settings))
}

/// The topics of the scheduler. Records of the pipelines whose long waits go through it must fit into them.
fn scheduler_topics(
    topics: &SchedulerTopics,
    pipelines: &[Pipeline],
    settings: &TopicSettings,
) -> TopologySpec {
    let ingest = || vec![topics.ingest.clone()];
    TopologySpec::of(topics.topics().into_iter().map(|(name, role)| {
        let new = |role, records| TopicSpec::new(name, role, records, settings);
        match role {
            SchedulerRole::App => new(Role::Output, "jobs"),
            SchedulerRole::Ingest => {
                let waits = |pipeline: &&Pipeline| pipeline.long_waits.as_ref() == Some(&topics.ingest);
                let waiting = pipelines.iter().filter(waits);
                TopicSpec {
                    sources: waiting.map(|pipeline| pipeline.source.clone()).collect(),
                    ..new(Role::Input, "commands").deleted_after(settings.retention, MIN_RETENTION)
                }
            }
            SchedulerRole::State => TopicSpec {
                partitions_as: Some(topics.ingest.clone()),
                sources: ingest(),
                ..new(Role::State, "waiting jobs").compacted()
            },
            SchedulerRole::DeadLetter => TopicSpec {
                sources: ingest(),
                ..new(Role::DeadLetters, "dead letters")
                    .deleted_after(settings.dead_letter_retention, MIN_RETENTION)
            },
            SchedulerRole::Answers => TopicSpec {
                partitions: settings.partitions.min(MAX_ANSWER_PARTITIONS),
                ..new(Role::Broadcast, "answers").deleted_after(ANSWER_RETENTION, MIN_ANSWER_RETENTION)
            },
        }
    }))
}

/// The topics of the scheduler, and those of pipelines whose records can wait in it, because it writes to their return
/// topics.
#[must_use]
pub fn of_scheduler(config: &Config) -> TopologySpec {
    let settings = topic_settings(config);
    let waiting: Vec<Pipeline> = pipelines(config)
        .into_iter()
        .filter(|pipeline| pipeline.long_waits.is_some())
        .collect();
    let mut spec = scheduler_topics(&config.scheduler.topics(), &waiting, &settings);
    let apps = config.scheduler.apps.values();
    spec.expect(apps.map(|app| app.topic.as_str()), config.scheduler.max_data);
    spec.expect(
        [config.scheduler.topics.state.as_str()],
        config.scheduler.max_data,
    );
    spec.join(TopologySpec::for_pipelines(&waiting, &settings))
        .join(of_control(config))
        .join(of_audit(config))
}

/// The control topic.
#[must_use]
pub fn of_control(config: &Config) -> TopologySpec {
    let records = "what operators have paused or limited";
    TopologySpec::of([TopicSpec {
        setting: Some("control.topic"),
        ..TopicSpec::of_one_partition(
            config.control_topic(),
            Role::Documents,
            records,
            &topic_settings(config),
        )
    }])
}

/// The topic of actions on waiting records, and the audit topic, in which tiers record what they have done.
#[must_use]
pub fn of_waiting_actions(config: &Config) -> TopologySpec {
    let records = "actions on waiting records";
    TopologySpec::of([TopicSpec::of_one_partition(
        config.waiting_actions_topic(),
        Role::Progress,
        records,
        &topic_settings(config),
    )])
    .join(of_audit(config))
}

/// The audit topic.
#[must_use]
pub fn of_audit(config: &Config) -> TopologySpec {
    let records = "records of changes and disclosures";
    let topic = TopicSpec::of_one_partition(
        config.audit_topic(),
        Role::Audit,
        records,
        &topic_settings(config),
    );
    TopologySpec::of([TopicSpec {
        setting: Some("audit.topic"),
        ..topic.deleted_after(config.audit.retention, MIN_AUDIT_RETENTION)
    }])
}

/// Sets the largest result of a pipeline. It is known only if results are responses of an endpoint.
fn expect_results(spec: &mut TopologySpec, config: &Config, pipeline: &str) {
    let Some(settings) = config.any_pipeline(pipeline) else {
        return;
    };
    if let (Some(output), Some(http)) = (&settings.output, &settings.http)
        && http.response != ResponseMode::Keep
    {
        spec.expect(output.topics(), http.max_response_bytes);
    }
}

/// The topics of all pipelines with the status topic, the scheduler's topics if it has applications or waiting records, the control topic, and those of
/// [`of_waiting_actions`]. None without pipelines and applications.
#[must_use]
pub fn of_all(config: &Config) -> TopologySpec {
    let mut spec = used_by(config, &pipelines(config));
    if !config.scheduler.apps.is_empty() {
        spec = spec.join(of_scheduler(config));
    }
    if spec.topics.is_empty() {
        return spec;
    }
    spec.join(of_control(config)).join(of_waiting_actions(config))
}

/// All configured pipelines, including retired ones.
#[must_use]
pub fn pipelines(config: &Config) -> Vec<Pipeline> {
    config
        .all_pipelines()
        .map(|(name, pipeline)| pipeline.pipeline(name, &config.scheduler))
        .collect()
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::topology::plan;

    use super::*;

    #[test]
    fn pipelines_need_topics_of_actions() {
        let names = |yaml: &str| -> Vec<String> {
            let spec = of_all(&Config::from_yaml(yaml).unwrap());
            spec.topics.iter().map(|topic| topic.name.to_string()).collect()
        };
        assert!(names("{}").is_empty());
        let of_pipeline = names("{ kafka: { id_prefix: eu- }, pipelines: { docs: {} } }");
        assert!(
            of_pipeline.ends_with(&[
                "eu-redeliver.waiting.actions".to_owned(),
                "eu-redeliver.audit".to_owned()
            ]),
            "{of_pipeline:?}"
        );
    }

    #[test]
    fn scheduler_topics_follow_ingest() {
        let yaml = "{ pipelines: { crawl: { long_waits: scheduler }, docs: {} }, scheduler: { apps: { a: { topic: sms } } } }";
        let spec = of_scheduler(&Config::from_yaml(yaml).unwrap());
        let ingest = spec
            .topics
            .iter()
            .find(|topic| &*topic.name == "scheduler.jobs.ingest");
        assert_eq!(ingest.unwrap().sources, ["crawl".into()]);
        let planned = plan(&spec);
        let of = |name: &str| planned.iter().find(|topic| &*topic.name == name).unwrap();
        for (name, partitions, property, value) in [
            ("scheduler.jobs.ingest", 12, "retention.ms", "604800000"),
            ("scheduler.jobs.state", 12, "cleanup.policy", "compact"),
            ("scheduler.jobs.answers", 4, "retention.ms", "3600000"),
            ("scheduler.jobs.dlq", 12, "retention.ms", "2592000000"),
            ("redeliver.control", 1, "cleanup.policy", "compact"),
            ("redeliver.audit", 1, "message.timestamp.type", "LogAppendTime"),
        ] {
            let topic = of(name);
            assert_eq!(topic.partitions, partitions, "{name}");
            assert!(topic.config.contains(&(property, value.to_owned())), "{topic:?}");
        }
        assert!(!of("sms").is_managed && of("sms").config.is_empty());
    }
}
