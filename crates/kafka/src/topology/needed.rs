//! Which topics are needed, and how they are created.

use std::sync::Arc;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::{SchedulerRole, SchedulerTopics};
use redeliver_core::{Pipeline, Span};

use super::{ActualTopic, Cleanup, Role, TopicSettings, TopicSpec, TopologySpec};

/// A retry tier may be down for so long before a waiting record is lost, beyond the wait itself twice.
const TIER_MARGIN: Span = Span::from_secs(86_400);
/// No topic between services is sound with less.
const SHORTEST_RETENTION: Span = Span::from_secs(3_600);
/// Whoever waits for an answer gives up long before.
const ANSWER_RETENTION: Span = Span::from_secs(3_600);
const SHORTEST_ANSWER_RETENTION: Span = Span::from_secs(60);
/// Answers are few and small, and each process that gives some reads all of them.
const MOST_ANSWER_PARTITIONS: i32 = 4;
/// How long an index may be behind before it has to be built again from the beginning, twice.
const TOMBSTONE_RETENTION: Span = Span::from_secs(7 * 86_400);

impl TopologySpec {
    /// The topics of these pipelines. A topic that is ours for one pipeline and a source or an output for
    /// another is ours.
    #[must_use]
    pub fn for_pipelines(pipelines: &[Pipeline], settings: &TopicSettings) -> Self {
        let topics = pipelines.iter().flat_map(|pipeline| {
            let topics = pipeline.topics().into_iter();
            topics.map(|(name, role)| TopicSpec::of_pipeline(name, role, pipeline, settings))
        });
        Self::of(topics)
    }

    /// The topics of the scheduler. Records of those pipelines whose long waits go through it must fit.
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

    /// The ledger of what was done with dead letters.
    #[must_use]
    pub fn for_ledger(name: &str, settings: &TopicSettings) -> Self {
        Self::of(std::iter::once(TopicSpec {
            name: name.into(),
            role: Role::Ledger,
            partitions: settings.partitions,
            partitions_as: None,
            replication: settings.replication,
            retention: None,
            required_retention: None,
            sources: Vec::new(),
            largest: None,
            cleanup: Some(Cleanup::Compact {
                tombstones: TOMBSTONE_RETENTION,
            }),
        }))
    }

    /// Notes that records up to so many bytes are written into these topics.
    pub fn expect<'a>(&mut self, topics: impl IntoIterator<Item = &'a str>, bytes: u64) {
        for name in topics {
            let known = self.topics.iter_mut().filter(|topic| *topic.name == *name);
            known.for_each(|topic| topic.expect(bytes));
        }
    }

    /// These topics and those, each once.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self::of(self.topics.into_iter().chain(other.topics))
    }

    /// Of a topic that is named more than once the first is kept that is ours.
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

    /// The topics in the order in which they are to be created: those of the users, then ours that follow
    /// them in size, then ours that follow others of ours.
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
    fn of_pipeline(name: Arc<str>, role: TopicRole, pipeline: &Pipeline, settings: &TopicSettings) -> Self {
        let (retention, required_retention) = match role {
            TopicRole::Source | TopicRole::Output => (None, None),
            TopicRole::Tier(tier) => {
                let longest = pipeline.longest_wait_in_tiers().max(tier);
                let twice = Span::from_millis(longest.as_millis().saturating_mul(2));
                let roomy = Span::from_millis(twice.as_millis().saturating_add(TIER_MARGIN.as_millis()));
                (Some(settings.retention.max(roomy)), Some(twice))
            }
            TopicRole::Due => kept_for(settings.retention, SHORTEST_RETENTION),
            TopicRole::DeadLetter => kept_for(settings.dead_letter_retention, SHORTEST_RETENTION),
        };
        let is_ours = required_retention.is_some();
        Self {
            name,
            role: Role::Pipeline(role),
            partitions: settings.partitions,
            partitions_as: None,
            replication: settings.replication,
            retention,
            required_retention,
            sources: is_ours.then(|| pipeline.source.clone()).into_iter().collect(),
            largest: None,
            cleanup: is_ours.then_some(Cleanup::Delete),
        }
    }

    fn of_scheduler(
        name: Arc<str>,
        role: SchedulerRole,
        scheduler: &SchedulerTopics,
        settings: &TopicSettings,
    ) -> Self {
        let users = Self {
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
            ..users.clone()
        };
        match role {
            SchedulerRole::App => users,
            SchedulerRole::Ingest => deleted_after(kept_for(settings.retention, SHORTEST_RETENTION)),
            SchedulerRole::DeadLetter => Self {
                sources: vec![scheduler.ingest.clone()],
                ..deleted_after(kept_for(settings.dead_letter_retention, SHORTEST_RETENTION))
            },
            SchedulerRole::Answers => Self {
                partitions: settings.partitions.min(MOST_ANSWER_PARTITIONS),
                ..deleted_after(kept_for(ANSWER_RETENTION, SHORTEST_ANSWER_RETENTION))
            },
            SchedulerRole::State => Self {
                partitions_as: Some(scheduler.ingest.clone()),
                sources: vec![scheduler.ingest.clone()],
                cleanup: Some(Cleanup::Compact {
                    tombstones: TOMBSTONE_RETENTION,
                }),
                ..users
            },
        }
    }
}

/// The retention to create with, and the one below which it is an error.
fn kept_for(retention: Span, shortest: Span) -> (Option<Span>, Option<Span>) {
    (Some(retention), Some(retention.min(shortest)))
}

/// What our headers add to a record at most, generously.
pub(super) const HEADER_ROOM: i64 = 16 * 1024;

/// The configuration to create a topic with; `limit` is the size of the largest records that go into it.
pub(super) fn creation_config(spec: &TopicSpec, limit: Option<i64>) -> Vec<(&'static str, String)> {
    let mut config = Vec::new();
    let millis = |span: Span| i64::try_from(span.as_millis()).unwrap_or(i64::MAX).to_string();
    if let Some(cleanup) = spec.cleanup {
        match cleanup {
            Cleanup::Delete => config.push(("cleanup.policy", "delete".to_owned())),
            Cleanup::Compact { tombstones } => {
                config.push(("cleanup.policy", "compact".to_owned()));
                config.push(("delete.retention.ms", millis(tombstones)));
            }
        }
        // The broker's default may limit the size.
        config.push(("retention.bytes", "-1".to_owned()));
        if let Some(limit) = limit {
            let roomy = limit.saturating_add(HEADER_ROOM).min(i64::from(i32::MAX));
            config.push(("max.message.bytes", roomy.to_string()));
        }
    }
    if let Some(retention) = spec.retention {
        config.push(("retention.ms", millis(retention)));
    }
    config
}

/// The largest records that go into a topic, in bytes, and where they come from, as far as it is known.
pub(super) fn largest_source<'a>(
    spec: &'a TopicSpec,
    actual: &std::collections::BTreeMap<String, ActualTopic>,
) -> Option<(&'a Arc<str>, i64)> {
    let sources = spec.sources.iter();
    let limits = sources.filter_map(|source| Some((source, actual.get(&**source)?.max_message_bytes()?)));
    limits.max_by_key(|(_, limit)| *limit)
}
