//! The topics that a process needs. They are checked before anything is read: a process does not start while a topic's
//! configuration would lose records, or serves only the pipelines whose topics can be used.

pub(crate) mod configured;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::topology::{self, Finding, Role, Severity, TopologyError, TopologySpec};
use redeliver_runtime::Config;
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use crate::groups::{self, FindError, PrefixChanged};
pub use configured::{
    of_all, of_audit, of_control, of_pipelines, of_scheduler, of_waiting_actions, pipelines, topic_settings,
};

/// Why the topics cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TopicsError {
    /// Records would be lost or could not be written.
    #[error("topics are missing or misconfigured{}", listed(.0))]
    Invalid(Vec<Finding>),
    /// The topics could not be checked or created.
    #[error("cannot check topics")]
    Topology(#[from] TopologyError),
    /// The process has not served this pipeline, and can after a restart.
    #[error("the topics of pipeline `{0}` can be used now; restart the process to serve it")]
    Corrected(Arc<str>),
    /// The process would repeat what it did under another prefix.
    #[error(transparent)]
    Prefix(#[from] PrefixChanged),
}

fn listed(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("\n  {finding}")).collect()
}

const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Shorter than [`CHECK_TIMEOUT`], so that a wrong address is soon reported.
const FIRST_CHECK_TIMEOUT: Duration = Duration::from_secs(3);
const MIN_DELAY: Duration = Duration::from_millis(200);
const MAX_DELAY: Duration = Duration::from_secs(5);

/// What [`ensure`] has found.
#[derive(Debug, Default)]
pub struct Ensured {
    /// The names of all existing topics.
    pub existing: BTreeSet<String>,
    /// The pipelines that must not be served, with the errors of their topics.
    pub refused: BTreeMap<Arc<str>, Vec<Finding>>,
}

/// Checks these topics and, with `kafka.topics.create`, creates missing ones. While Kafka is unavailable, this waits
/// until `shutdown` is cancelled, and `part` shows the reason. `part` is still not ready when this returns: the caller
/// decides when it is.
///
/// Errors that only concern some of `pipelines` refuse these, and the others can be served. After `shutdown`, nothing was found.
///
/// # Errors
/// [`TopicsError::Invalid`] lists every problem, if other topics have some, or if no pipeline is left.
pub async fn ensure(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    pipelines: &[Pipeline],
    shutdown: &CancellationToken,
    part: &Part,
) -> Result<Ensured, TopicsError> {
    part.not_ready("checking topics");
    let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
    let mut log_throttle = LogThrottle::default();
    loop {
        let checked = tokio::select! {
            checked = check(config, kafka, spec, !log_throttle.has_logged()) => checked,
            () = shutdown.cancelled() => return Ok(Ensured::default()),
        };
        match checked {
            Ok(checked) => {
                let awaited = |error: &&Finding| checked.awaited.contains(&*error.topic);
                let awaited = checked.errors.iter().filter(awaited);
                checked.warnings.iter().chain(awaited).for_each(warn);
                let refused = reject_errors(checked.errors, &checked.awaited, pipelines)?;
                return Ok(Ensured {
                    existing: checked.existing,
                    refused,
                });
            }
            Err(ref error @ TopologyError::Unreachable { ref refusal, .. }) => {
                part.not_ready(format!("Kafka at `{}` is unavailable{refusal}", kafka.brokers));
                if log_throttle.should_log() {
                    let cause = error.source().map(ToString::to_string).unwrap_or_default();
                    tracing::warn!(brokers = kafka.brokers, error = %error, cause, "Kafka unavailable; retrying");
                }
                tokio::select! {
                    () = tokio::time::sleep(backoff.next_delay()) => {}
                    () = shutdown.cancelled() => return Ok(Ensured::default()),
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Repeats the check of [`ensure`], which has refused some of `pipelines`, until a start would refuse fewer of them and no others.
/// Only a start serves a pipeline: what a process has, does not change while it runs.
///
/// # Errors
/// [`TopicsError::Corrected`], then.
pub(crate) async fn until_corrected(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    pipelines: &[Pipeline],
    refused: &BTreeSet<Arc<str>>,
) -> Result<Infallible, TopicsError> {
    let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
    loop {
        tokio::time::sleep(backoff.next_delay()).await;
        if let Ok(checked) = check(config, kafka, spec, false).await
            && let Some(pipeline) = corrected(refused, checked.errors, &checked.awaited, pipelines)
        {
            return Err(TopicsError::Corrected(pipeline));
        }
    }
}

/// A pipeline that a start would not refuse any more, if it would not refuse more than that.
fn corrected(
    refused: &BTreeSet<Arc<str>>,
    errors: Vec<Finding>,
    awaited: &BTreeSet<String>,
    pipelines: &[Pipeline],
) -> Option<Arc<str>> {
    let now = reject_errors(errors, awaited, pipelines).ok()?;
    let mut corrected = refused.iter().filter(|pipeline| !now.contains_key(*pipeline));
    corrected
        .next()
        .filter(|_| now.keys().all(|pipeline| refused.contains(pipeline)))
        .cloned()
}

/// Checks that the groups that read these topics have not had another `kafka.id_prefix`. `existing` are the names of all
/// topics.
///
/// # Errors
/// [`TopicsError::Prefix`]. While Kafka does not answer, this waits. If only some brokers do not list their groups, it logs a
/// warning: it is a precaution against a mistake, and must not keep a process from starting while one of several brokers is
/// down.
pub(crate) async fn check_prefix(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    existing: &BTreeSet<String>,
) -> Result<(), TopicsError> {
    if kafka.is_embedded {
        // The embedded broker has no groups.
        return Ok(());
    }
    let mut configured = groups::of_config(config, existing);
    let is_used = |topic: &str| spec.topics.iter().any(|spec| *spec.name == *topic);
    configured.retain(|group| group.topics.iter().any(|topic| is_used(topic)));
    let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
    let mut log_throttle = LogThrottle::default();
    loop {
        let (kafka, configured) = (kafka.clone(), configured.clone());
        let found = tokio::task::spawn_blocking(move || groups::find_previous(&kafka, &configured)).await;
        let error = match found {
            Ok(Ok(None)) => return Ok(()),
            Ok(Ok(Some(changed))) => return Err(changed.into()),
            // Kafka does not answer now.
            Ok(Err(FindError::Read(error @ ReadError::Kafka { .. }))) => error,
            Ok(Err(error)) => {
                tracing::warn!(
                    error = error_chain(&error),
                    "cannot check all consumer groups for offsets under another kafka.id_prefix"
                );
                return Ok(());
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down.
            Err(_) => return Ok(()),
        };
        if log_throttle.should_log() {
            tracing::warn!(
                error = error_chain(&error),
                "cannot check whether consumer groups have offsets under another kafka.id_prefix; retrying"
            );
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Checks topics that a process can work without, and logs what is wrong with them. While Kafka is unavailable, this
/// waits until `shutdown` is cancelled.
pub async fn warn_about(kafka: &KafkaSettings, spec: &TopologySpec, shutdown: &CancellationToken) {
    let client = kafka.client();
    loop {
        let checked = tokio::select! {
            checked = topology::check(&client, spec, CHECK_TIMEOUT) => checked,
            () = shutdown.cancelled() => return,
        };
        match checked {
            Ok(findings) => return findings.iter().for_each(warn),
            Err(TopologyError::Unreachable { .. }) => {}
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "cannot check topics");
                return;
            }
        }
        tokio::select! {
            () = tokio::time::sleep(MAX_DELAY) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

struct Checked {
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
    /// The missing topics without which a process can start.
    awaited: BTreeSet<String>,
    /// The names of all existing topics.
    existing: BTreeSet<String>,
}

async fn check(
    config: &Config,
    kafka: &KafkaSettings,
    spec: &TopologySpec,
    is_first: bool,
) -> Result<Checked, TopologyError> {
    let client = kafka.client();
    let timeout = if is_first {
        FIRST_CHECK_TIMEOUT
    } else {
        CHECK_TIMEOUT
    };
    let findings = if config.kafka.topics.create {
        let applied = topology::apply(&client, spec, CHECK_TIMEOUT).await?;
        for topic in applied.iter().filter(|topic| topic.created) {
            tracing::info!(topic = &*topic.topic, "topic created");
        }
        applied.into_iter().flat_map(|topic| topic.findings).collect()
    } else {
        topology::check(&client, spec, timeout).await?
    };
    let existing = topology::names(&client, CHECK_TIMEOUT).await?;
    let (errors, warnings): (Vec<Finding>, _) = findings
        .into_iter()
        .partition(|finding| finding.severity == Severity::Error);
    let topics = errors.iter().map(|error| error.topic.to_string());
    let awaited = topics.filter(|topic| may_be_missing(spec, &existing, topic));
    Ok(Checked {
        awaited: awaited.collect(),
        errors,
        warnings,
        existing,
    })
}

/// Whether a process can start without this topic. Records for a missing output or application topic wait until it
/// exists, and delay no others.
fn may_be_missing(spec: &TopologySpec, existing: &BTreeSet<String>, topic: &str) -> bool {
    let mut specs = spec.topics.iter().filter(|spec| *spec.name == *topic);
    !existing.contains(topic) && specs.all(|spec| spec.role == Role::Output)
}

/// The pipelines whose topics have these errors, besides missing topics that are awaited. Fails if something else has some, or all
/// pipelines.
fn reject_errors(
    errors: Vec<Finding>,
    awaited: &BTreeSet<String>,
    pipelines: &[Pipeline],
) -> Result<BTreeMap<Arc<str>, Vec<Finding>>, TopicsError> {
    let topics: Vec<_> = pipelines
        .iter()
        .map(|pipeline| (&pipeline.name, pipeline.topics()))
        .collect();
    let mut refused: BTreeMap<Arc<str>, Vec<Finding>> = BTreeMap::new();
    let mut is_shared = false;
    for error in errors.iter().filter(|error| !awaited.contains(&*error.topic)) {
        let owners = topics
            .iter()
            .filter(|(_, topics)| topics.iter().any(|(topic, _)| *topic == error.topic));
        let mut has_owner = false;
        for (name, _) in owners {
            has_owner = true;
            refused.entry((*name).clone()).or_default().push(error.clone());
        }
        is_shared |= !has_owner;
    }
    if is_shared || (!refused.is_empty() && refused.len() == pipelines.len()) {
        return Err(TopicsError::Invalid(errors));
    }
    Ok(refused)
}

fn warn(finding: &Finding) {
    tracing::warn!(
        topic = &*finding.topic,
        problem = finding.problem,
        remedy = finding.remedy,
        "topic has a problem"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(topics: &[&str]) -> Vec<Finding> {
        let findings = topics.iter().map(|topic| Finding {
            topic: (*topic).into(),
            severity: Severity::Error,
            problem: "is compacted".to_owned(),
            remedy: "change it".to_owned(),
        });
        findings.collect()
    }

    fn pipelines(names: &[&str]) -> Vec<Pipeline> {
        names.iter().map(|name| Pipeline::new(name)).collect()
    }

    fn refused(topics: &[&str], names: &[&str]) -> Option<Vec<String>> {
        let awaited = ["awaited".to_owned()].into();
        let refused = reject_errors(errors(topics), &awaited, &pipelines(names)).ok()?;
        Some(refused.keys().map(ToString::to_string).collect())
    }

    #[test]
    fn errors_refuse_their_pipelines() {
        let both = ["a", "b"];
        assert_eq!(refused(&["b-dlq"], &both), Some(vec!["b".to_owned()]));
        assert_eq!(refused(&["awaited"], &both), Some(Vec::new()));
        // None is left, or something else is wrong.
        assert_eq!(refused(&["a-dlq", "b-retry-due"], &both), None);
        assert_eq!(refused(&["b-dlq", "redeliver.control"], &both), None);
        assert_eq!(refused(&["a-dlq"], &["a"]), None);
        assert_eq!(refused(&["redeliver.control"], &[]), None);
        assert_eq!(refused(&[], &[]), Some(Vec::new()));
    }

    #[test]
    fn a_restart_must_serve_more_pipelines() {
        let all = pipelines(&["a", "b", "c"]);
        let before = ["b", "c"].map(Arc::from).into();
        let corrected = |topics: &[&str]| corrected(&before, errors(topics), &BTreeSet::new(), &all);
        assert_eq!(corrected(&["c-dlq"]), Some("b".into()));
        assert_eq!(corrected(&[]), Some("b".into()));
        // The same, one that is served, or all that the process needs.
        for topics in [
            &["b-dlq", "c-dlq"],
            &["a-dlq", "c-dlq"],
            &["c-dlq", "redeliver.control"],
        ] {
            assert_eq!(corrected(topics), None);
        }
    }
}
