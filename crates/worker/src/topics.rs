//! The topics a process works with, looked at before anything is read: a topology that would lose records
//! refuses to start.

use std::collections::BTreeSet;
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::SchedulerRole;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::topology::{self, Finding, Role, Severity, TopicSettings, TopologyError, TopologySpec};
use redeliver_runtime::Config;
use redeliver_runtime::config::ResponseMode;
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

/// Topics are not as they must be.
#[derive(Debug, thiserror::Error)]
pub enum TopicsError {
    /// Records would be lost or could not be written.
    #[error("topics are not as they must be{}", listed(.0))]
    Unsound(Vec<Finding>),
    /// They could not be looked at.
    #[error("looking at topics")]
    Topology(#[from] TopologyError),
}

fn listed(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("\n  {finding}")).collect()
}

/// How long one look may take.
const LOOK: Duration = Duration::from_secs(10);
/// How long the first one may take, so that a wrong address is soon said.
const FIRST_LOOK: Duration = Duration::from_secs(3);
/// How often it is said that Kafka does not answer.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// How new topics are made, from the configuration.
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

/// The topics of these pipelines, and the scheduler's when one of them lets records wait there.
#[must_use]
pub fn of_pipelines(config: &Config, pipelines: &[Pipeline]) -> TopologySpec {
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

/// The topics of the scheduler, and those of the pipelines that let records wait there: it writes to where
/// these come back.
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
}

/// How large results may be is known where the endpoint's answers are the results.
fn expect_results(spec: &mut TopologySpec, config: &Config, pipeline: &str) {
    let Some(settings) = config.any_pipeline(pipeline) else {
        return;
    };
    if let (Some(output), Some(http)) = (&settings.output, &settings.http)
        && http.response == ResponseMode::Replace
    {
        spec.expect(output.topics(), http.max_response_bytes);
    }
}

/// The topics of all pipelines, and the scheduler's when there is anything for it to do.
#[must_use]
pub fn of_all(config: &Config) -> TopologySpec {
    let spec = of_pipelines(config, &pipelines(config));
    if config.scheduler.apps.is_empty() {
        return spec;
    }
    spec.join(of_scheduler(config))
}

/// All configured pipelines, the retired ones included.
#[must_use]
pub fn pipelines(config: &Config) -> Vec<Pipeline> {
    config
        .all_pipelines()
        .map(|(name, pipeline)| pipeline.pipeline(name, &config.scheduler))
        .collect()
}

/// Makes sure that these topics are sound; with `kafka.topics.create` makes the missing
/// ones. While Kafka does not answer it waits, until `shutdown`, and `part` says so. That the
/// part is ready is for the caller to say, once what comes after has begun.
///
/// Answers with the names of all topics there are; with none when it was told to stop.
///
/// # Errors
/// [`TopicsError::Unsound`] with everything that is wrong.
pub async fn ensure(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    shutdown: &CancellationToken,
    part: &Part,
) -> Result<BTreeSet<String>, TopicsError> {
    part.not_ready("looking at them");
    let mut pause = Duration::from_millis(200);
    let mut said: Option<std::time::Instant> = None;
    loop {
        let looked = tokio::select! {
            looked = look(config, kafka, spec, said.is_none()) => looked,
            () = shutdown.cancelled() => return Ok(BTreeSet::new()),
        };
        match looked {
            Ok((findings, names)) => {
                judge(findings, |topic| may_be_missing(spec, &names, topic))?;
                return Ok(names);
            }
            Err(ref error @ TopologyError::Unreachable { ref refusal, .. }) => {
                part.not_ready(format!("kafka at `{}` does not answer{refusal}", kafka.brokers));
                if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
                    said = Some(std::time::Instant::now());
                    let cause = std::error::Error::source(error)
                        .map(ToString::to_string)
                        .unwrap_or_default();
                    tracing::warn!(brokers = kafka.brokers, error = %error, cause, "kafka does not answer; trying again");
                }
                tokio::select! {
                    () = tokio::time::sleep(pause) => pause = (2 * pause).min(Duration::from_secs(5)),
                    () = shutdown.cancelled() => return Ok(BTreeSet::new()),
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Looks at topics that a process can do without, and logs what is wrong with them. While Kafka does not answer it
/// waits, until `shutdown`.
pub async fn warn_about(kafka: &KafkaSettings, spec: &TopologySpec, shutdown: &CancellationToken) {
    let client = kafka.client();
    loop {
        let looked = tokio::select! {
            looked = topology::check(&client, spec, LOOK) => looked,
            () = shutdown.cancelled() => return,
        };
        match looked {
            Ok(findings) => return findings.iter().for_each(warn),
            Err(TopologyError::Unreachable { .. }) => {}
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "a topic cannot be looked at");
                return;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5)) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

async fn look(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    is_first: bool,
) -> Result<(Vec<Finding>, BTreeSet<String>), TopologyError> {
    let client = kafka.client();
    let patience = if is_first { FIRST_LOOK } else { LOOK };
    let findings = if config.kafka.topics.create {
        let applied = topology::apply(&client, spec, LOOK).await?;
        for topic in applied.iter().filter(|topic| topic.created) {
            tracing::info!(topic = &*topic.topic, "topic created");
        }
        applied.into_iter().flat_map(|topic| topic.findings).collect()
    } else {
        topology::check(&client, spec, patience).await?
    };
    Ok((findings, topology::names(&client, LOOK).await?))
}

/// Whether a process starts without this topic: what is written to it waits for it, and delays nothing else.
fn may_be_missing(spec: &TopologySpec, existing: &BTreeSet<String>, topic: &str) -> bool {
    let is_waited_for = |role| {
        matches!(
            role,
            Role::Pipeline(TopicRole::Output) | Role::Scheduler(SchedulerRole::App)
        )
    };
    let mut specs = spec.topics.iter().filter(|spec| *spec.name == *topic);
    !existing.contains(topic) && specs.all(|spec| is_waited_for(spec.role))
}

fn judge(findings: Vec<Finding>, may_be_missing: impl Fn(&str) -> bool) -> Result<(), TopicsError> {
    let (errors, warnings): (Vec<_>, Vec<_>) = findings
        .into_iter()
        .partition(|finding| finding.severity == Severity::Error);
    warnings.iter().for_each(warn);
    if errors.iter().all(|finding| may_be_missing(&finding.topic)) {
        errors.iter().for_each(warn);
        Ok(())
    } else {
        Err(TopicsError::Unsound(errors))
    }
}

fn warn(finding: &Finding) {
    tracing::warn!(
        topic = &*finding.topic,
        problem = finding.problem,
        remedy = finding.remedy,
        "topic"
    );
}
