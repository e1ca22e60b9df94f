//! Retry topics that exist although the configuration does not need them: those of tiers that a pipeline no longer has,
//! and those of pipelines that are no longer configured. Records may still wait in them.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::pipeline::{parse_retry_topic, retry_tier_group};
use redeliver_core::{HumanDuration, Pipeline};
use redeliver_kafka::backlog::Backlog;
use redeliver_kafka::topology::{Finding, Severity, TopologySpec};

/// A retry topic that the configuration does not need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The name of the topic.
    pub topic: Arc<str>,
    /// The pipeline in the topic's name.
    pub pipeline: Arc<str>,
    /// Whether that pipeline is configured, under `pipelines` or `retired`.
    pub is_known: bool,
    /// The tier in the topic's name, or `None` for a due topic.
    pub tier: Option<HumanDuration>,
}

/// The leftovers among the existing topics. A topic that the configuration needs in any role is not a leftover.
#[must_use]
pub fn leftovers(
    pipelines: &[Pipeline],
    needed: &TopologySpec,
    existing: &BTreeSet<String>,
) -> Vec<Leftover> {
    let needed: BTreeSet<&str> = needed.topics.iter().map(|topic| &*topic.name).collect();
    // `needed` does not contain sources of retired pipelines, and a source may have any name.
    let sources: BTreeSet<&str> = pipelines.iter().map(|pipeline| &*pipeline.source).collect();
    let found = existing
        .iter()
        .filter(|name| !needed.contains(name.as_str()) && !sources.contains(name.as_str()))
        .filter_map(|name| {
            let (pipeline, tier) = parse_retry_topic(name)?;
            Some(Leftover {
                topic: name.as_str().into(),
                pipeline: pipeline.into(),
                is_known: pipelines.iter().any(|known| *known.name == *pipeline),
                tier,
            })
        });
    // `needed` does not contain the due topic of a pipeline with `return_to: source`. Its workers still read it.
    found
        .filter(|leftover| !leftover.is_known || leftover.tier.is_some())
        .collect()
}

impl Leftover {
    /// The consumer group that reads the topic. `prefix`: that of all ids of this installation.
    #[must_use]
    pub fn group(&self, prefix: &str) -> String {
        match self.tier {
            Some(tier) => retry_tier_group(prefix, tier),
            None => Pipeline::new(&self.pipeline).worker_group(prefix),
        }
    }

    /// A warning that says what to do about the topic. `None` if it is empty and its pipeline is not configured: it may
    /// belong to another program.
    #[must_use]
    pub fn finding(&self, backlog: Backlog) -> Option<Finding> {
        let Self { pipeline, tier, .. } = self;
        let (problem, remedy) = if self.is_known {
            let tier = tier.unwrap_or_default();
            let leftover = format!("is a leftover tier ({tier}) of pipeline `{pipeline}`");
            if backlog.is_empty() {
                (
                    format!("{leftover} and is empty"),
                    "delete it once no process runs with the previous configuration".to_owned(),
                )
            } else {
                (
                    format!("{leftover} and holds {backlog}"),
                    "run a retry-tier with retry_tier.leftovers: true until it is empty".to_owned(),
                )
            }
        } else if backlog.is_empty() {
            return None;
        } else {
            (
                format!("is named after pipeline `{pipeline}`, which is not configured, and holds {backlog}"),
                format!("list `{pipeline}` under `retired` until it is empty"),
            )
        };
        Some(Finding {
            topic: self.topic.clone(),
            severity: Severity::Warning,
            problem,
            remedy,
        })
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::RetryPolicy;
    use redeliver_core::backoff::Jitter;
    use redeliver_core::pipeline::ReturnTo;
    use redeliver_kafka::topology::TopicSettings;

    use super::*;

    fn pipeline(name: &str, tiers: &[u64]) -> Pipeline {
        let tiers = tiers.iter().copied().map(HumanDuration::from_secs).collect();
        Pipeline {
            policy: RetryPolicy::listed(tiers, None, Jitter::None).unwrap(),
            ..Pipeline::new(name)
        }
    }

    fn found(pipelines: &[Pipeline], existing: &[&str]) -> Vec<String> {
        let settings = TopicSettings {
            partitions: 1,
            replication: 1,
            retention: HumanDuration::from_secs(86_400),
            dead_letter_retention: HumanDuration::from_secs(86_400),
        };
        let needed = TopologySpec::for_pipelines(pipelines, &settings);
        let existing = existing.iter().map(ToString::to_string).collect();
        leftovers(pipelines, &needed, &existing)
            .iter()
            .map(|found| format!("{} {} {}", found.topic, found.is_known, found.group("")))
            .collect()
    }

    #[test]
    fn leftovers_are_found_by_name() {
        let mut classic = pipeline("b", &[5]);
        classic.return_to = ReturnTo::Source;
        let retired = Pipeline {
            retired: true,
            source: "c-retry-9s".into(),
            ..pipeline("c", &[5])
        };
        let pipelines = [pipeline("a", &[5, 30]), classic, retired];
        let existing = "a a-dlq a-retry-5s a-retry-30s a-retry-1m a-retry-due a-retry-60s ab-retry-7s \
                        b-retry-30s b-retry-due c-retry-5s c-retry-9s c-retry-10s old-retry-due";
        let existing: Vec<&str> = existing.split(' ').collect();
        assert_eq!(
            found(&pipelines, &existing),
            [
                "a-retry-1m true redeliver-retry-1m",
                "ab-retry-7s false redeliver-retry-7s",
                "b-retry-30s true redeliver-retry-30s",
                "c-retry-10s true redeliver-retry-10s",
                "old-retry-due false redeliver-old",
            ]
        );
    }

    #[test]
    fn topic_with_role_is_no_leftover() {
        let reads_tiers_of_others = Pipeline {
            source: "a-retry-1m".into(),
            output: Some("a-retry-2m".into()),
            ..pipeline("b", &[5])
        };
        let existing = ["a-retry-1m", "a-retry-2m"];
        assert!(found(&[pipeline("a", &[5]), reads_tiers_of_others], &existing).is_empty());
    }
}
