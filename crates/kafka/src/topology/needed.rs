//! Which topics pipelines and the scheduler need, and their configuration.

use std::sync::Arc;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::{SchedulerRole, SchedulerTopics};
use redeliver_core::{HumanDuration, Pipeline};

use super::{ActualTopic, Cleanup, Role, TopicSettings, TopicSpec, TopologySpec};

/// Added to twice the longest wait of a tier: how long the retry tier may be down before records are lost.
const TIER_MARGIN: HumanDuration = HumanDuration::from_secs(86_400);
/// A shorter retention of a topic between services is an error.
const MIN_RETENTION: HumanDuration = HumanDuration::from_secs(3_600);
/// How long the urgent topic is kept: longer than backlogs usually last. A shard reads the last copies again when it moves to another
/// process.
const URGENT_RETENTION: HumanDuration = HumanDuration::from_secs(3_600);
/// Kafka deletes whole segments. With its default of seven days, one that is written to would keep all copies of that time.
const URGENT_SEGMENT: HumanDuration = HumanDuration::from_secs(600);
/// Clients stop waiting for an answer long before.
const ANSWER_RETENTION: HumanDuration = HumanDuration::from_secs(3_600);
const MIN_ANSWER_RETENTION: HumanDuration = HumanDuration::from_secs(60);
/// Answers are few and small, and each scheduler reads all of them.
const MAX_ANSWER_PARTITIONS: i32 = 4;
const MIN_AUDIT_RETENTION: HumanDuration = HumanDuration::from_secs(86_400);
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

    /// The topics of the scheduler. Records of the pipelines whose long waits go through it must fit into them.
    #[must_use]
    pub fn for_scheduler(
        scheduler: &SchedulerTopics,
        pipelines: &[Pipeline],
        settings: &TopicSettings,
    ) -> Self {
        let topics = scheduler.topics().into_iter();
        Self::of(topics.map(|(name, role)| {
            let mut spec = TopicSpec::of_scheduler(name, role, scheduler, settings);
            if role == SchedulerRole::Ingest {
                let waiting = pipelines
                    .iter()
                    .filter(|pipeline| pipeline.long_waits.as_ref() == Some(&scheduler.ingest));
                spec.sources = waiting.map(|pipeline| pipeline.source.clone()).collect();
            }
            spec
        }))
    }

    /// The topic of the ledger.
    #[must_use]
    pub fn for_ledger(name: &str, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec::compacted(
            name,
            Role::Ledger,
            settings.partitions,
            settings,
        )))
    }

    /// The control topic. It has one partition, because its changes have one order.
    #[must_use]
    pub fn for_control(name: &str, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec::compacted(
            name,
            Role::Control,
            1,
            settings,
        )))
    }

    /// The topic of the states of groups. It has one partition, because its changes have one order.
    #[must_use]
    pub fn for_group_states(name: &str, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec::compacted(
            name,
            Role::GroupStates,
            1,
            settings,
        )))
    }

    /// The topic of redrives. It has one partition, because its changes have one order, and one process executes them.
    #[must_use]
    pub fn for_redrives(name: &str, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec::compacted(
            name,
            Role::Redrives,
            1,
            settings,
        )))
    }

    /// The audit topic. It has one partition, so that its entries have one order. A shorter retention than a day is an error.
    #[must_use]
    pub fn for_audit(name: &str, retention: HumanDuration, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec {
            retention: Some(retention),
            required_retention: Some(MIN_AUDIT_RETENTION),
            cleanup: Some(Cleanup::Delete),
            ..TopicSpec::compacted(name, Role::Audit, 1, settings)
        }))
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
    fn of(specs: impl Iterator<Item = TopicSpec>) -> Self {
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
    /// A compacted topic that no other topic is related to.
    fn compacted(name: &str, role: Role, partitions: i32, settings: &TopicSettings) -> Self {
        Self {
            name: name.into(),
            role,
            partitions,
            partitions_as: None,
            replication: settings.replication,
            retention: None,
            required_retention: None,
            sources: Vec::new(),
            largest: None,
            cleanup: Some(Cleanup::Compact {
                tombstones: TOMBSTONE_RETENTION,
            }),
        }
    }

    fn of_pipeline(name: Arc<str>, role: TopicRole, pipeline: &Pipeline, settings: &TopicSettings) -> Self {
        let (retention, required_retention) = match role {
            TopicRole::Source | TopicRole::Output => (None, None),
            TopicRole::Tier(tier) => {
                let longest = pipeline.longest_wait_in_tiers().max(tier);
                let twice = HumanDuration::from_millis(longest.as_millis().saturating_mul(2));
                let with_margin =
                    HumanDuration::from_millis(twice.as_millis().saturating_add(TIER_MARGIN.as_millis()));
                (Some(settings.retention.max(with_margin)), Some(twice))
            }
            TopicRole::Due => kept_for(settings.retention, MIN_RETENTION),
            TopicRole::DeadLetter => kept_for(settings.dead_letter_retention, MIN_RETENTION),
        };
        let is_managed = required_retention.is_some();
        Self {
            name,
            role: Role::Pipeline(role),
            partitions: settings.partitions,
            partitions_as: None,
            replication: settings.replication,
            retention,
            required_retention,
            sources: is_managed.then(|| pipeline.source.clone()).into_iter().collect(),
            largest: None,
            cleanup: is_managed.then_some(Cleanup::Delete),
        }
    }

    fn of_scheduler(
        name: Arc<str>,
        role: SchedulerRole,
        scheduler: &SchedulerTopics,
        settings: &TopicSettings,
    ) -> Self {
        let unmanaged = Self {
            name,
            role: Role::Scheduler(role),
            partitions: settings.partitions,
            partitions_as: None,
            replication: settings.replication,
            retention: None,
            required_retention: None,
            sources: Vec::new(),
            largest: None,
            cleanup: None,
        };
        let deleted_after = |(retention, required_retention)| Self {
            retention,
            required_retention,
            cleanup: Some(Cleanup::Delete),
            ..unmanaged.clone()
        };
        match role {
            SchedulerRole::App => unmanaged,
            SchedulerRole::Ingest => deleted_after(kept_for(settings.retention, MIN_RETENTION)),
            SchedulerRole::DeadLetter => Self {
                sources: vec![scheduler.ingest.clone()],
                ..deleted_after(kept_for(settings.dead_letter_retention, MIN_RETENTION))
            },
            SchedulerRole::Answers => Self {
                partitions: settings.partitions.min(MAX_ANSWER_PARTITIONS),
                ..deleted_after(kept_for(ANSWER_RETENTION, MIN_ANSWER_RETENTION))
            },
            SchedulerRole::Urgent => Self {
                partitions_as: Some(scheduler.ingest.clone()),
                sources: vec![scheduler.ingest.clone()],
                ..deleted_after(kept_for(URGENT_RETENTION, MIN_ANSWER_RETENTION))
            },
            SchedulerRole::State => Self {
                partitions_as: Some(scheduler.ingest.clone()),
                sources: vec![scheduler.ingest.clone()],
                cleanup: Some(Cleanup::Compact {
                    tombstones: TOMBSTONE_RETENTION,
                }),
                ..unmanaged
            },
        }
    }
}

/// The retention for creating a topic, and the minimum, below which there is an error.
fn kept_for(
    retention: HumanDuration,
    shortest: HumanDuration,
) -> (Option<HumanDuration>, Option<HumanDuration>) {
    (Some(retention), Some(retention.min(shortest)))
}

/// Settings with which the topic of redrives is compacted soon: the segment that is being written never is, and each step of a job supersedes records.
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
    if spec.role == Role::Scheduler(SchedulerRole::Urgent) {
        config.push(("segment.ms", millis(URGENT_SEGMENT)));
        // Otherwise, clocks of producers decide how long copies are kept.
        config.push(("message.timestamp.type", "LogAppendTime".to_owned()));
    }
    if spec.role == Role::Redrives {
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
