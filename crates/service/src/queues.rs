//! The topics that services read, with what waits in them: the figures of `redeliver status` and of the inspector's overview.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::headers::ReservedHeaders;
use redeliver_core::pipeline::{TopicRole, retry_tier_group};
use redeliver_core::{Clock as _, Record, SystemClock, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::{Backlog, Head, Mode, heads};
use redeliver_kafka::reader::ReadError;
use redeliver_runtime::Config;

use crate::leftovers::leftovers;
use crate::topics;

/// Maximum number of offsets of a partition that are read. Records of a tier are nearly in the order of their due times.
const HEAD: i64 = 100;

/// A topic that a service reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The pipeline; `None` for the ingest topic of the scheduler.
    pub pipeline: Option<Arc<str>>,
    /// Whether the pipeline is in the configuration. The topic of another one may be of another installation, whose groups have other names:
    /// what those have read is not known.
    pub is_configured: bool,
    /// The topic.
    pub topic: Arc<str>,
    /// What it is for the pipeline. The ingest topic counts as a source.
    pub role: TopicRole,
    /// The group that reads it.
    pub group: String,
}

/// What waits in a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// What the group has not completed.
    pub backlog: Backlog,
    /// Partitions whose leaders do not answer.
    pub unreachable: Vec<i32>,
    /// The due times of its first records; `None` if they do not wait for them.
    pub due: Option<Vec<Timestamp>>,
}

impl Waiting {
    /// How many of the first records are due.
    #[must_use]
    pub fn due_at(&self, now: Timestamp) -> Option<usize> {
        let due = self.due.as_ref()?;
        Some(due.iter().filter(|due| **due <= now).count())
    }

    /// The earliest due time of the records that were read.
    #[must_use]
    pub fn earliest(&self) -> Option<Timestamp> {
        self.due.as_ref()?.iter().min().copied()
    }

    /// When the next record is due: see [`next_due`].
    #[must_use]
    pub fn next_due(&self, now: Timestamp) -> Option<Timestamp> {
        next_due([self], now)
    }
}

/// When the next record of these queues is due. `None` also if it is unknown: a record of an unreachable partition may be due before the
/// earliest known one, unless that is due already.
#[must_use]
pub fn next_due<'w>(waiting: impl IntoIterator<Item = &'w Waiting>, now: Timestamp) -> Option<Timestamp> {
    let mut earliest: Option<Timestamp> = None;
    let mut is_whole = true;
    for waiting in waiting.into_iter().filter(|waiting| waiting.due.is_some()) {
        earliest = earliest.into_iter().chain(waiting.earliest()).min();
        is_whole &= waiting.unreachable.is_empty();
    }
    earliest.filter(|earliest| is_whole || *earliest <= now)
}

/// The existing topics that services of this configuration read, each once.
#[must_use]
pub fn queues(config: &Config, kafka: &KafkaSettings, existing: &BTreeSet<String>) -> Vec<Queue> {
    let pipelines = topics::pipelines(config);
    let mut read = Vec::new();
    for pipeline in &pipelines {
        let worker = pipeline.worker_group(&kafka.id_prefix);
        let queue = |topic, role, group: &str| Queue {
            pipeline: Some(pipeline.name.clone()),
            is_configured: true,
            topic,
            role,
            group: group.to_owned(),
        };
        let mut own = pipeline.worker_topics(existing.contains(&*pipeline.due_topic()));
        let due = own.split_off(usize::from(!pipeline.retired));
        read.extend(
            own.into_iter()
                .map(|topic| queue(topic, TopicRole::Source, &worker)),
        );
        for &tier in pipeline.policy.tiers() {
            let group = retry_tier_group(&kafka.id_prefix, tier);
            read.push(queue(pipeline.tier_topic(tier), TopicRole::Tier(tier), &group));
        }
        read.extend(due.into_iter().map(|topic| queue(topic, TopicRole::Due, &worker)));
    }
    for leftover in leftovers(&pipelines, &topics::of_all(config), existing) {
        read.push(Queue {
            group: leftover.group(&kafka.id_prefix),
            pipeline: Some(leftover.pipeline),
            is_configured: leftover.is_known,
            topic: leftover.topic,
            role: leftover.tier.map_or(TopicRole::Due, TopicRole::Tier),
        });
    }
    if needs_scheduler(config) {
        read.push(Queue {
            pipeline: None,
            is_configured: true,
            topic: config.scheduler.topics().ingest,
            role: TopicRole::Source,
            group: kafka.id(&config.scheduler.group),
        });
    }
    let mut seen = BTreeSet::new();
    read.retain(|queue| existing.contains(&*queue.topic) && seen.insert(queue.topic.clone()));
    read
}

/// Whether the configuration needs a scheduler.
#[must_use]
pub fn needs_scheduler(config: &Config) -> bool {
    let pipelines = topics::pipelines(config);
    !config.scheduler.apps.is_empty() || pipelines.iter().any(|pipeline| pipeline.long_waits.is_some())
}

/// What waits in these queues, by topic, as far as the leaders of partitions answer. Leaves out topics that are deleted meanwhile. Blocks.
///
/// # Errors
/// If the broker does not answer.
pub fn waiting(
    kafka: &KafkaSettings,
    queues: &[Queue],
    timeout: Duration,
) -> Result<BTreeMap<Arc<str>, Waiting>, ReadError> {
    let pairs: Vec<(String, Arc<str>)> = queues
        .iter()
        .map(|queue| (queue.group.clone(), queue.topic.clone()))
        .collect();
    let mut heads = heads(kafka, &pairs, Mode::Reachable, HEAD, timeout, |record| {
        due_time(&record)
    })?;
    let waiting = queues.iter().filter_map(|queue| {
        let Head {
            backlog,
            first,
            unreachable,
        } = heads.remove(&queue.topic)?;
        let has_due = matches!(queue.role, TopicRole::Tier(_)) && queue.is_configured;
        let waiting = Waiting {
            backlog,
            unreachable,
            due: has_due.then(|| first.into_iter().flatten().collect()),
        };
        Some((queue.topic.clone(), waiting))
    });
    Ok(waiting.collect())
}

fn due_time(record: &Record) -> Option<Timestamp> {
    let headers = ReservedHeaders::read(record).ok()?;
    // A malformed record becomes a dead letter at once.
    headers.process_after(SystemClock.now(), MAX_WAIT).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_due_is_unknown_with_unreachable_partitions() {
        let of = |due: Option<&[i64]>, unreachable: &[i32]| Waiting {
            unreachable: unreachable.to_vec(),
            due: due.map(|due| due.iter().copied().map(Timestamp::from_millis).collect()),
            ..Waiting::default()
        };
        let next = |waiting: &[Waiting]| {
            let next = next_due(waiting, Timestamp::from_millis(100));
            next.map(Timestamp::as_millis)
        };
        assert_eq!(next(&[]), None);
        assert_eq!(next(&[of(Some(&[300, 200]), &[])]), Some(200));
        assert_eq!(next(&[of(Some(&[200]), &[1])]), None);
        assert_eq!(next(&[of(Some(&[200, 100]), &[1])]), Some(100));
        // A queue of which nothing is known can be the next one.
        assert_eq!(next(&[of(Some(&[200]), &[]), of(Some(&[]), &[0])]), None);
        assert_eq!(next(&[of(Some(&[200]), &[]), of(Some(&[50]), &[0])]), Some(50));
        // Records of it do not wait for a time.
        assert_eq!(next(&[of(Some(&[200]), &[]), of(None, &[0])]), Some(200));
    }

    #[test]
    fn queues_are_existing_topics() {
        let config = Config::from_yaml(
            "pipelines:\n  a: { output: out, long_waits: scheduler, retry: { tiers: [5s] } }\n  b: { source: b-in, \
             output: out, return_to: source, retry: { tiers: [5s] } }\n",
        );
        let existing = "a a-retry-5s a-retry-9m a-retry-due b-in b-retry-5s b-retry-due c-retry-5s out \
                        scheduler.jobs.ingest";
        let existing = existing.split(' ').map(str::to_owned).collect();
        let kafka = KafkaSettings::new("localhost:9092", "test");
        let queues = queues(&config.unwrap(), &kafka, &existing);
        let texts: Vec<String> = queues
            .iter()
            .map(|queue| {
                let pipeline = queue.pipeline.as_deref().unwrap_or("-");
                let known = if queue.is_configured { "" } else { " unknown" };
                format!(
                    "{pipeline}{known} {} {:?} {}",
                    queue.topic, queue.role, queue.group
                )
            })
            .collect();
        let tier = |seconds| {
            format!(
                "{:?}",
                TopicRole::Tier(redeliver_core::HumanDuration::from_secs(seconds))
            )
        };
        let (five, long) = (tier(5), tier(540));
        assert_eq!(
            texts,
            [
                "a a Source redeliver-a".to_owned(),
                format!("a a-retry-5s {five} redeliver-retry-5s"),
                "a a-retry-due Due redeliver-a".to_owned(),
                "b b-in Source redeliver-b".to_owned(),
                format!("b b-retry-5s {five} redeliver-retry-5s"),
                "b b-retry-due Due redeliver-b".to_owned(),
                format!("a a-retry-9m {long} redeliver-retry-9m"),
                format!("c unknown c-retry-5s {five} redeliver-retry-5s"),
                "- scheduler.jobs.ingest Source redeliver-scheduler".to_owned(),
            ]
        );
    }
}
