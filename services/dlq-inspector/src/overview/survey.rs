//! What a survey has found.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use redeliver_kafka::survey::SurveyedTopic;
use redeliver_proto::v1;
use redeliver_service::control::Snapshot;
use redeliver_service::queues::{Queue, Waiting};

use crate::completeness::Completeness;
use crate::index::{TopicGroup, Trends};

/// What was found at one moment. A part is `None` if it is unknown.
#[derive(Debug)]
pub(crate) struct Survey {
    /// Counts surveys.
    pub(crate) number: u64,
    pub(crate) at: Timestamp,
    /// The same by a clock that never steps.
    pub(crate) uptime: Duration,
    pub(crate) topics: Option<Arc<Topics>>,
    /// The last reading, which is older.
    pub(crate) waiting: Option<Arc<Reading>>,
    pub(crate) letters: Option<Arc<Letters>>,
    /// The last known ones.
    pub(crate) controls: Option<Arc<Snapshot>>,
    pub(crate) redrives: Option<Vec<Redrive>>,
    /// By pipeline. One that is missing is unknown.
    pub(crate) breakers: Option<BTreeMap<String, v1::BreakerStatus>>,
    /// What audits have found, by pipeline. Empty if this process does not audit.
    pub(crate) audits: BTreeMap<String, v1::PipelineAudit>,
    /// What is unknown or old, and why.
    pub(crate) incomplete: BTreeMap<v1::OverviewPart, &'static str>,
}

impl Survey {
    /// What is known about the circuit breaker of a pipeline.
    pub(crate) fn breaker(&self, pipeline: &str) -> Option<&v1::BreakerStatus> {
        self.breakers.as_ref()?.get(pipeline)
    }
}

/// The existing topics that pipelines need.
#[derive(Debug, Default)]
pub(crate) struct Topics {
    pub(crate) ends: BTreeMap<Arc<str>, TopicEnd>,
    /// Topics that Kafka does not describe to this process, so that they may exist.
    pub(crate) refused: BTreeSet<Arc<str>>,
}

/// Where a topic ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TopicEnd {
    /// `None` if it is unknown.
    pub(crate) id: Option<TopicId>,
    /// The sum of the ends of its partitions.
    pub(crate) offsets: i64,
    pub(crate) partitions: usize,
    /// Whether the leaders of all partitions have answered.
    pub(crate) is_whole: bool,
}

impl Topics {
    pub(crate) fn of(surveyed: Vec<SurveyedTopic>) -> Self {
        let mut topics = Self::default();
        for topic in surveyed {
            if topic.refusal.is_some() {
                topics.refused.insert(topic.name);
                continue;
            }
            let ends = topic.partitions.iter().flatten();
            let end = TopicEnd {
                id: topic.id,
                offsets: ends.map(|extent| extent.end).sum(),
                partitions: topic.partitions.len(),
                is_whole: topic.partitions.iter().all(Option::is_some),
            };
            topics.ends.insert(topic.name, end);
        }
        topics
    }

    /// Whether a topic certainly does not exist.
    pub(crate) fn lacks(&self, topic: &str) -> bool {
        !self.ends.contains_key(topic) && !self.refused.contains(topic)
    }
}

/// What waits in the topics that services read.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) at: Timestamp,
    /// How many consumer groups were asked.
    pub(crate) groups: u32,
    /// Of configured pipelines, by pipeline.
    pub(crate) queues: BTreeMap<Arc<str>, Vec<(Queue, Waiting)>>,
}

impl Reading {
    /// What waits in a topic.
    pub(crate) fn of_topic(&self, pipeline: &str, topic: &str) -> Option<&Waiting> {
        let mut queues = self.queues.get(pipeline)?.iter();
        queues
            .find(|(queue, _)| *queue.topic == *topic)
            .map(|(_, waiting)| waiting)
    }
}

/// What the index knows.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    /// By topic. A topic without open dead letters is missing.
    pub(crate) open: BTreeMap<String, Open>,
    /// Whether states are known.
    pub(crate) has_states: bool,
    /// Groups that need attention; `None` if the states of groups are unknown.
    pub(crate) groups: Option<Vec<TopicGroup>>,
    /// A bit older than the rest.
    pub(crate) trends: Arc<Trends>,
    pub(crate) completeness: Completeness,
}

/// The open dead letters of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) count: u64,
    /// When the oldest one died.
    pub(crate) oldest: Timestamp,
    /// From when on Kafka may remove it.
    pub(crate) removed_from: Option<Timestamp>,
}

/// A job that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redrive {
    pub(crate) id: String,
    /// The topics of its dead letters.
    pub(crate) sources: Vec<Arc<str>>,
    pub(crate) state: RedriveState,
    /// When it has redriven something last.
    pub(crate) sent_at: Option<Timestamp>,
    pub(crate) returned: u32,
    pub(crate) by: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RedriveState {
    Running,
    Paused,
    /// Paused because too many records came back.
    AutoPaused,
}
