//! The consumer groups of the configuration, and whether they had other names before.
//!
//! A process that starts with another `kafka.id_prefix` has groups without committed offsets. It would read every topic from
//! the beginning, and process all records in them again. So it does not start while another group of the cluster has the
//! same name after its prefix, and a lane has committed offsets for it in a topic in which the process's own group has none.
//! Nothing that a process keeps says which prefix it had before; Kafka's groups do. A broker that does not list its groups is only a
//! warning: the check is a precaution, and must not keep processes from starting.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::pipeline::retry_tier_group;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::groups::{self, GroupOffsets};
use redeliver_kafka::reader::ReadError;
use redeliver_runtime::Config;
use redeliver_runtime::config::check_id_prefix;

use crate::leftovers::leftovers;
use crate::topics::configured;

/// A consumer group of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredGroup {
    /// The name without `kafka.id_prefix`.
    pub name: String,
    /// The existing topics that it reads.
    pub topics: Vec<Arc<str>>,
}

/// All groups of the configuration that read one of the existing topics: those of workers, tiers, leftover tiers and the
/// scheduler.
#[must_use]
pub fn of_config(config: &Config, existing: &BTreeSet<String>) -> Vec<ConfiguredGroup> {
    let pipelines = configured::pipelines(config);
    let mut groups: BTreeMap<String, BTreeSet<Arc<str>>> = BTreeMap::new();
    let mut add = |group: String, topic: Arc<str>| {
        if existing.contains(&*topic) {
            groups.entry(group).or_default().insert(topic);
        }
    };
    for pipeline in &pipelines {
        for topic in pipeline.worker_topics(true) {
            add(pipeline.worker_group(""), topic);
        }
        for &tier in pipeline.policy.tiers() {
            add(retry_tier_group("", tier), pipeline.tier_topic(tier));
        }
        if let Some(ingest) = &pipeline.long_waits {
            add(config.scheduler.group.clone(), ingest.clone());
        }
    }
    for leftover in leftovers(&pipelines, &configured::of_all(config), existing) {
        if leftover.is_known {
            add(leftover.group(""), leftover.topic);
        }
    }
    if !config.scheduler.apps.is_empty() {
        add(config.scheduler.group.clone(), config.scheduler.topics().ingest);
    }
    let groups = groups.into_iter();
    groups
        .map(|(name, topics)| ConfiguredGroup {
            name,
            topics: topics.into_iter().collect(),
        })
        .collect()
}

/// The groups had another prefix before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "kafka.id_prefix: is `{prefix}`, but the consumer group `{previous}` has committed offsets of topic `{topic}`, and \
     `{group}` has none: this process would read the topic from the beginning and process its records again; set \
     kafka.id_prefix to `{previous_prefix}`, or stop all processes and run `redeliver topics migrate-offsets \
     --from-prefix={previous_prefix}`"
)]
pub struct PrefixChanged {
    /// The configured prefix.
    pub prefix: String,
    /// The group with that prefix.
    pub group: String,
    /// The group that has committed offsets.
    pub previous: String,
    /// Its prefix.
    pub previous_prefix: String,
    /// A topic that only the previous group has read.
    pub topic: String,
}

const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Finds a group of the configuration that had another prefix before. Blocks.
///
/// # Errors
/// If the groups of a broker or their offsets cannot be read, unless a changed prefix was found nevertheless.
pub(crate) fn find_previous(
    kafka: &KafkaSettings,
    configured: &[ConfiguredGroup],
) -> Result<Option<PrefixChanged>, FindError> {
    let list = groups::list(kafka, LIST_TIMEOUT)?;
    let names: Vec<&str> = list.groups.iter().map(|group| group.name.as_str()).collect();
    for group in configured {
        let own = kafka.id(&group.name);
        let others = previous_prefixes(&own, &group.name, &names);
        if others.is_empty() {
            continue;
        }
        let own_offsets = groups::previous_offsets(kafka, &own, &group.topics)?;
        for previous_prefix in others {
            let previous = format!("{previous_prefix}{}", group.name);
            let offsets = groups::previous_offsets(kafka, &previous, &group.topics)?;
            if let Some(topic) = only_read_by(&offsets, &own_offsets) {
                return Ok(Some(PrefixChanged {
                    prefix: kafka.id_prefix.clone(),
                    group: own,
                    previous,
                    previous_prefix: previous_prefix.to_owned(),
                    topic: topic.to_owned(),
                }));
            }
        }
    }
    match list.error {
        Some(code) => Err(FindError::Incomplete(code.to_string())),
        None => Ok(None),
    }
}

/// Why it is unknown whether the prefix has changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    /// A request failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A broker did not list its groups.
    #[error("a broker did not list its consumer groups: {0}")]
    Incomplete(String),
}

/// The prefixes of other groups with this name. `own` is the name with the configured prefix.
fn previous_prefixes<'g>(own: &str, name: &str, existing: &[&'g str]) -> Vec<&'g str> {
    let others = existing.iter().filter(|existing| **existing != own);
    let prefixes = others.filter_map(|existing| existing.strip_suffix(name));
    prefixes
        .filter(|prefix| check_id_prefix(prefix).is_ok())
        .collect()
}

/// A topic that lanes of `previous` have read, and of which `own` has not committed any partition.
fn only_read_by<'o>(previous: &'o GroupOffsets, own: &GroupOffsets) -> Option<&'o str> {
    let read: BTreeSet<&str> = own.keys().map(|(topic, _)| topic.as_str()).collect();
    let mut of_lanes = previous.iter().filter(|(_, committed)| committed.is_of_lane());
    of_lanes
        .find(|((topic, _), _)| !read.contains(topic.as_str()))
        .map(|((topic, _), _)| topic.as_str())
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::groups::CommittedOffset;

    use super::*;

    fn config(yaml: &str) -> Config {
        Config::from_yaml(yaml).unwrap()
    }

    fn listed(config: &Config, existing: &[&str]) -> Vec<String> {
        let existing = existing.iter().map(ToString::to_string).collect();
        of_config(config, &existing)
            .into_iter()
            .map(|group| format!("{}: {}", group.name, group.topics.join(" ")))
            .collect()
    }

    #[test]
    fn groups_of_existing_topics_are_known() {
        let config = config(
            "pipelines:\n  a: { output: out, long_waits: scheduler, retry: { tiers: [5s, 30s] } }\n  b: { source: b-in, \
             output: out, return_to: source, retry: { tiers: [5s] } }\nscheduler: { group: jobs }\n",
        );
        let existing = "a a-dlq a-retry-5s a-retry-30s a-retry-due a-retry-9m b-in b-retry-5s b-retry-due \
                        c-retry-5s out scheduler.jobs.ingest";
        let existing: Vec<&str> = existing.split(' ').collect();
        assert_eq!(
            listed(&config, &existing),
            [
                "jobs: scheduler.jobs.ingest",
                "redeliver-a: a a-retry-due",
                "redeliver-b: b-in b-retry-due",
                "redeliver-retry-30s: a-retry-30s",
                "redeliver-retry-5s: a-retry-5s b-retry-5s",
                "redeliver-retry-9m: a-retry-9m",
            ]
        );
        assert!(listed(&config, &["out"]).is_empty());
    }

    #[test]
    fn previous_prefixes_exclude_the_own() {
        let name = "redeliver-docs";
        let existing = [
            "redeliver-docs",
            "a-redeliver-docs",
            "b-redeliver-docs",
            "redeliver-docs-2",
            "my group/redeliver-docs",
        ];
        assert_eq!(previous_prefixes("redeliver-docs", name, &existing), ["a-", "b-"]);
        assert_eq!(previous_prefixes("a-redeliver-docs", name, &existing), ["", "b-"]);
    }

    fn offsets(list: &[(&str, i32, &str)]) -> GroupOffsets {
        let list = list.iter().map(|(topic, partition, metadata)| {
            let partition = ((*topic).to_owned(), *partition);
            (partition, CommittedOffset::new(7, *metadata))
        });
        list.collect()
    }

    #[test]
    fn topic_of_previous_group_is_found() {
        let lane = "r1:AQE";
        let previous = offsets(&[("a", 0, lane), ("b", 0, ""), ("c", 1, lane)]);
        assert_eq!(only_read_by(&previous, &offsets(&[])), Some("a"));
        assert_eq!(only_read_by(&previous, &offsets(&[("a", 3, "")])), Some("c"));
        // Another program has read `b`.
        assert_eq!(
            only_read_by(&previous, &offsets(&[("a", 3, ""), ("c", 0, "")])),
            None
        );
    }
}
