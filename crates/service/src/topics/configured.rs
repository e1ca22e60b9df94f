//! The topics of a configuration.

use redeliver_core::Pipeline;
use redeliver_kafka::topology::{TopicSettings, TopologySpec};
use redeliver_runtime::Config;
use redeliver_runtime::config::ResponseMode;

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

/// The topics of these pipelines, the scheduler's topics if records of one of them can wait in the scheduler, and the control topic.
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
    if pipelines.iter().all(|pipeline| pipeline.long_waits.is_none()) {
        return spec;
    }
    spec.join(TopologySpec::for_scheduler(
        &config.scheduler.topics(),
        pipelines,
        &settings,
    ))
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
    let mut spec = TopologySpec::for_scheduler(&config.scheduler.topics(), &waiting, &settings);
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
    TopologySpec::for_control(&config.control_topic(), &topic_settings(config))
}

/// The audit topic.
#[must_use]
pub fn of_audit(config: &Config) -> TopologySpec {
    TopologySpec::for_audit(
        &config.audit_topic(),
        config.audit.retention,
        &topic_settings(config),
    )
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

/// The topics of all pipelines, the scheduler's topics if it has applications or waiting records, and the control topic. None without
/// pipelines and applications.
#[must_use]
pub fn of_all(config: &Config) -> TopologySpec {
    let mut spec = used_by(config, &pipelines(config));
    if !config.scheduler.apps.is_empty() {
        spec = spec.join(of_scheduler(config));
    }
    if spec.topics.is_empty() {
        return spec;
    }
    spec.join(of_control(config))
}

/// All configured pipelines, including retired ones.
#[must_use]
pub fn pipelines(config: &Config) -> Vec<Pipeline> {
    config
        .all_pipelines()
        .map(|(name, pipeline)| pipeline.pipeline(name, &config.scheduler))
        .collect()
}
