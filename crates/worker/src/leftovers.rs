//! Retry topics that exist in Kafka though the configuration does not ask for them: of tiers that a pipeline does not
//! have any more, and of pipelines that are not configured any more. Records may wait in them.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::pipeline::{parse_retry_topic, retry_tier_group};
use redeliver_core::{Pipeline, Span};
use redeliver_kafka::backlog::Backlog;
use redeliver_kafka::topology::{Finding, Severity, TopologySpec};

/// A retry topic that the configuration does not ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The topic.
    pub topic: Arc<str>,
    /// The pipeline that it is named after.
    pub pipeline: Arc<str>,
    /// Whether that pipeline is configured, be it retired or not.
    pub is_known: bool,
    /// The tier; nothing for a due topic.
    pub tier: Option<Span>,
}

/// The leftovers among the topics that exist. What the configuration asks for, as whatever, is none.
#[must_use]
pub fn leftovers(
    pipelines: &[Pipeline],
    needed: &TopologySpec,
    existing: &BTreeSet<String>,
) -> Vec<Leftover> {
    let needed: BTreeSet<&str> = needed.topics.iter().map(|topic| &*topic.name).collect();
    // The source of a retired pipeline is not asked for, and may be called like anything.
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
    // The due topic of a pipeline whose records return to the source is read by its workers.
    found
        .filter(|leftover| !leftover.is_known || leftover.tier.is_some())
        .collect()
}

impl Leftover {
    /// The consumer group whose offsets tell what was released, or handled, of it.
    #[must_use]
    pub fn group(&self) -> String {
        match self.tier {
            Some(tier) => retry_tier_group(tier),
            None => Pipeline::new(&self.pipeline).worker_group(),
        }
    }

    /// What is to be said of it; nothing when it is somebody else's and holds nothing.
    #[must_use]
    pub fn finding(&self, backlog: Backlog) -> Option<Finding> {
        let Self { pipeline, tier, .. } = self;
        let (problem, remedy) = match (self.is_known, tier, backlog.is_empty()) {
            (true, tier, false) => (
                format!(
                    "is left over from when pipeline `{pipeline}` had the tier {}, and {backlog} wait in it",
                    tier.unwrap_or_default()
                ),
                "run a retry-tier with retry_tier.leftovers: true until it is empty".to_owned(),
            ),
            (true, tier, true) => (
                format!(
                    "is left over from when pipeline `{pipeline}` had the tier {}, and nothing waits in it",
                    tier.unwrap_or_default()
                ),
                "delete it once no process runs with the former configuration".to_owned(),
            ),
            (false, _, false) => (
                format!(
                    "is named after pipeline `{pipeline}`, which is not configured, and {backlog} wait in it"
                ),
                format!("list `{pipeline}` under `retired` until it is empty"),
            ),
            (false, _, true) => return None,
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
        let tiers = tiers.iter().copied().map(Span::from_secs).collect();
        Pipeline {
            policy: RetryPolicy::listed(tiers, None, Jitter::None).unwrap(),
            ..Pipeline::new(name)
        }
    }

    fn found(pipelines: &[Pipeline], existing: &[&str]) -> Vec<String> {
        let settings = TopicSettings {
            partitions: 1,
            replication: 1,
            retention: Span::from_secs(86_400),
            dead_letter_retention: Span::from_secs(86_400),
        };
        let needed = TopologySpec::for_pipelines(pipelines, &settings);
        let existing = existing.iter().map(ToString::to_string).collect();
        leftovers(pipelines, &needed, &existing)
            .iter()
            .map(|found| format!("{} {} {}", found.topic, found.is_known, found.group()))
            .collect()
    }

    #[test]
    fn tiers_that_a_pipeline_had_are_found_by_the_names_of_their_topics() {
        let mut classic = pipeline("b", &[5]);
        classic.return_to = ReturnTo::Source;
        let retired = Pipeline {
            retired: true,
            source: "c-retry-9s".into(),
            ..pipeline("c", &[5])
        };
        let pipelines = [pipeline("a", &[5, 30]), classic, retired];
        let existing = [
            "a",
            "a-dlq",
            "a-retry-5s",
            "a-retry-30s",
            "a-retry-1m",
            "a-retry-due",
            "a-retry-60s",
            "ab-retry-7s",
            "b-retry-30s",
            "b-retry-due",
            "c-retry-5s",
            "c-retry-9s",
            "c-retry-10s",
            "old-retry-due",
        ];
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
    fn a_topic_that_has_another_meaning_is_no_leftover() {
        let reads_tiers_of_others = Pipeline {
            source: "a-retry-1m".into(),
            output: Some("a-retry-2m".into()),
            ..pipeline("b", &[5])
        };
        let existing = ["a-retry-1m", "a-retry-2m"];
        assert!(found(&[pipeline("a", &[5]), reads_tiers_of_others], &existing).is_empty());
    }
}
