//! The specification of topics, and the configuration that follows from it.

use std::sync::Arc;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{HumanDuration, Pipeline};

use super::{ActualTopic, Cleanup, Role, TopicSettings, TopicSpec, TopologySpec};

/// Added to twice the longest wait of a tier: how long the retry tier may be down before records are lost.
const TIER_MARGIN: HumanDuration = HumanDuration::from_secs(86_400);
/// A shorter retention of a topic between services is an error.
pub const MIN_RETENTION: HumanDuration = HumanDuration::from_secs(3_600);
/// The retention of tombstones for creating compacted topics, well above the minimum that [`super::examine`] requires.
const TOMBSTONE_RETENTION: HumanDuration = HumanDuration::from_secs(7 * 86_400);

impl TopologySpec {
    /// The topics of these pipelines. A topic is managed if it is managed for one of them, even if it is the source or
    /// output of another.
    #[must_use]
    pub fn for_pipelines(pipelines: &[Pipeline], settings: &TopicSettings) -> Self {
        let topics = pipelines.iter().flat_map(|pipeline| {
            let topics = pipeline.topics().into_iter();
            topics.map(|(name, role)| TopicSpec::of_pipeline(name, role, pipeline, settings))
        });
        Self::of(topics)
    }

    /// Declares that records of up to `bytes` are written to these topics.
    pub fn expect<'a>(&mut self, topics: impl IntoIterator<Item = &'a str>, bytes: u64) {
        for name in topics {
            let known = self.topics.iter_mut().filter(|topic| *topic.name == *name);
            known.for_each(|topic| topic.expect(bytes));
        }
    }

    /// Merges two specifications; each topic occurs once.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self::of(self.topics.into_iter().chain(other.topics))
    }

    /// Deduplicates by name, preferring managed topics.
    #[must_use]
    pub fn of(specs: impl IntoIterator<Item = TopicSpec>) -> Self {
        let mut topics: Vec<TopicSpec> = Vec::new();
        for spec in specs {
            match topics.iter_mut().find(|known| known.name == spec.name) {
                Some(known) => {
                    let largest = known.largest.max(spec.largest);
                    if spec.is_managed() && !known.is_managed() {
                        *known = spec;
                    }
                    known.largest = largest;
                }
                None => topics.push(spec),
            }
        }
        Self { topics }
    }

    /// The topics in the order of their creation: topics of users, managed topics whose configuration depends on those, and
    /// managed topics whose configuration depends on other managed topics.
    pub(super) fn stages(&self) -> [Vec<&TopicSpec>; 3] {
        let is_managed = |name: &Arc<str>| {
            let topic = self.topics.iter().find(|topic| topic.name == *name);
            topic.is_some_and(TopicSpec::is_managed)
        };
        let mut stages = [const { Vec::new() }; 3];
        for topic in &self.topics {
            let mut follows = topic.sources.iter().chain(&topic.partitions_as);
            let stage = match topic.is_managed() {
                false => 0,
                true => 1 + usize::from(follows.any(is_managed)),
            };
            stages[stage].push(topic);
        }
        stages
    }
}

impl TopicSpec {
    /// A topic of users, which contains `records`.
    #[must_use]
    pub fn new(
        name: impl Into<Arc<str>>,
        role: Role,
        records: &'static str,
        settings: &TopicSettings,
    ) -> Self {
        Self {
            name: name.into(),
            role,
            records,
            setting: None,
            partitions: settings.partitions,
            partitions_as: None,
            replication: settings.replication,
            retention: None,
            required_retention: None,
            sources: Vec::new(),
            largest: None,
            cleanup: None,
        }
    }

    /// A managed topic of one partition, because its records have one order.
    #[must_use]
    pub fn of_one_partition(
        name: impl Into<Arc<str>>,
        role: Role,
        records: &'static str,
        settings: &TopicSettings,
    ) -> Self {
        Self {
            partitions: 1,
            ..Self::new(name, role, records, settings).compacted()
        }
    }

    /// Old records are deleted after `retention`. A retention that is shorter than `required`, too, is an error.
    #[must_use]
    pub fn deleted_after(self, retention: HumanDuration, required: HumanDuration) -> Self {
        Self {
            retention: Some(retention),
            required_retention: Some(retention.min(required)),
            cleanup: Some(Cleanup::Delete),
            ..self
        }
    }

    /// The latest record of each key is kept.
    #[must_use]
    pub fn compacted(self) -> Self {
        let tombstones = TOMBSTONE_RETENTION;
        Self {
            cleanup: Some(Cleanup::Compact { tombstones }),
            ..self
        }
    }

    fn of_pipeline(name: Arc<str>, role: TopicRole, pipeline: &Pipeline, settings: &TopicSettings) -> Self {
        let new = |role, records| Self::new(name, role, records, settings);
        let managed = match role {
            TopicRole::Source => return new(Role::Input, "records"),
            TopicRole::Output => return new(Role::Output, "results"),
            TopicRole::Tier(tier) => {
                let longest = pipeline.longest_wait_in_tiers().max(tier);
                let twice = HumanDuration::from_millis(longest.as_millis().saturating_mul(2));
                let with_margin =
                    HumanDuration::from_millis(twice.as_millis().saturating_add(TIER_MARGIN.as_millis()));
                new(Role::Tier, "waiting records").deleted_after(settings.retention.max(with_margin), twice)
            }
            TopicRole::Due => {
                new(Role::Input, "released records").deleted_after(settings.retention, MIN_RETENTION)
            }
            TopicRole::DeadLetter => new(Role::DeadLetters, "dead letters")
                .deleted_after(settings.dead_letter_retention, MIN_RETENTION),
        };
        Self {
            sources: vec![pipeline.source.clone()],
            ..managed
        }
    }
}

/// Settings with which a topic of [`Role::Progress`] or [`Role::Status`] is compacted soon: the segment that is being written never is.
pub(super) const SMALL_SEGMENTS: [(&str, i64); 2] = [("segment.bytes", 32 << 20), ("segment.ms", 600_000)];

/// The value of `message.timestamp.type` with which brokers set the timestamps of records.
pub(super) const APPEND_TIME: &str = "LogAppendTime";

/// An upper bound of the size of the headers that services add to a record, in bytes.
pub(super) const HEADER_ROOM: i64 = 16 * 1024;

/// The configuration for creating a topic; `limit` is the size of its largest records in bytes, without added headers.
pub(super) fn creation_config(spec: &TopicSpec, limit: Option<i64>) -> Vec<(&'static str, String)> {
    let mut config = Vec::new();
    let millis = |duration: HumanDuration| {
        i64::try_from(duration.as_millis())
            .unwrap_or(i64::MAX)
            .to_string()
    };
    if let Some(cleanup) = spec.cleanup {
        match cleanup {
            Cleanup::Delete => config.push(("cleanup.policy", "delete".to_owned())),
            Cleanup::Compact { tombstones } => {
                config.push(("cleanup.policy", "compact".to_owned()));
                config.push(("delete.retention.ms", millis(tombstones)));
            }
        }
        // The broker's default may limit the size of the topic and so delete records early.
        config.push(("retention.bytes", "-1".to_owned()));
        if let Some(limit) = limit {
            let limit = limit.saturating_add(HEADER_ROOM).min(i64::from(i32::MAX));
            config.push(("max.message.bytes", limit.to_string()));
        }
    }
    if let Some(retention) = spec.retention {
        config.push(("retention.ms", millis(retention)));
    }
    if matches!(spec.role, Role::Progress | Role::Status) {
        config.extend(SMALL_SEGMENTS.map(|(name, value)| (name, value.to_string())));
        // Half of the topic would be superseded records otherwise.
        config.push(("min.cleanable.dirty.ratio", "0.1".to_owned()));
    }
    if spec.role == Role::Audit {
        // Entries are found by time, and removed by age. With the time of a writer whose clock is ahead, both would be wrong.
        config.push(("message.timestamp.type", APPEND_TIME.to_owned()));
    }
    config
}

/// The source with the largest records that go into a topic, and its limit in bytes, as far as known.
pub(super) fn largest_source<'a>(
    spec: &'a TopicSpec,
    actual: &std::collections::BTreeMap<String, ActualTopic>,
) -> Option<(&'a Arc<str>, i64)> {
    let sources = spec.sources.iter();
    let limits = sources.filter_map(|source| Some((source, actual.get(&**source)?.max_message_bytes()?)));
    limits.max_by_key(|(_, limit)| *limit)
}
