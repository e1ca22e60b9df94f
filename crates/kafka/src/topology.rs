//! The topics that pipelines and the scheduler need: which they are, whether they would lose records as they
//! stand, and creating what is missing.
//!
//! Records wait in topics for as long as a year or more, so a topic's own clean-up is the one thing in Kafka
//! that can lose them without an error: a retention shorter than the wait, compaction of a topic whose
//! records share keys, deletion from the one that is a log of states. What is needed ([`TopologySpec`]) and
//! what a topic is told to be wrong for (`examine`) are pure; [`check`] and [`apply`] do the asking and
//! creating.
//!
//! Source and output topics and those of applications belong to the users: they are created when they are
//! missing, and of an existing one is only said when it is too narrow. Existing topics are never changed.

mod admin;
mod examine;
mod needed;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use redeliver_core::Span;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::SchedulerRole;

pub use admin::{Applied, TopologyError, apply, check, names};
pub use examine::{examine, examine_all};

/// How topics are created when they are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Partitions of each topic.
    pub partitions: i32,
    /// Replicas of each partition; -1 leaves it to the broker.
    pub replication: i32,
    /// How long tiers, due topics and the scheduler's ingest topic keep records at least.
    pub retention: Span,
    /// How long dead letters are kept.
    pub dead_letter_retention: Span,
}

/// All topics of some pipelines, of the scheduler, or of both, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopologySpec {
    /// The topics, in the order of the pipelines.
    pub topics: Vec<TopicSpec>,
}

/// One topic as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSpec {
    /// Its name.
    pub name: Arc<str>,
    /// What it is to its pipeline or the scheduler.
    pub role: Role,
    /// Partitions to create it with.
    pub partitions: i32,
    /// The topic that must have as many partitions.
    pub partitions_as: Option<Arc<str>>,
    /// Replicas to create it with; -1 leaves it to the broker.
    pub replication: i32,
    /// Retention to create it with; `None` leaves it to the broker.
    pub retention: Option<Span>,
    /// With a shorter retention records would be lost; `None` where that is not asked.
    pub required_retention: Option<Span>,
    /// The topics whose records must fit into it.
    pub sources: Vec<Arc<str>>,
    /// The largest records that are written into it, in bytes and without our headers, as far as settings say.
    pub largest: Option<u64>,
    /// How it is cleaned; `None` for topics of the users, which are not judged.
    pub cleanup: Option<Cleanup>,
}

/// What a topic is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// To a pipeline.
    Pipeline(TopicRole),
    /// To the scheduler.
    Scheduler(SchedulerRole),
    /// To the inspector of dead letters: what was done with each.
    Ledger,
}

/// How a topic of ours is cleaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleanup {
    /// Records are deleted when they are old.
    Delete,
    /// The newest record of each key stays for ever; a tombstone is kept for so long.
    Compact {
        /// At least that long a tombstone should be kept.
        tombstones: Span,
    },
}

/// A topic as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActualTopic {
    /// How many partitions it has.
    pub partitions: i32,
    /// Its configuration as far as it is known, defaults included.
    pub config: BTreeMap<String, String>,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Records would be lost or could not be written: do not start.
    Error,
    /// Records can be lost in special cases.
    Warning,
}

/// Something wrong with a topic, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The topic.
    pub topic: Arc<str>,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong and what comes of it.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        write!(
            f,
            "{severity}: topic `{}` {}; {}",
            self.topic, self.problem, self.remedy
        )
    }
}

impl TopicSpec {
    /// Writes into it are not larger than this, by a setting.
    fn expect(&mut self, bytes: u64) {
        self.largest = self.largest.max(Some(bytes));
    }

    /// Whether it is ours: its records are lost or late when its configuration is wrong.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.cleanup.is_some()
    }

    fn finding(&self, severity: Severity, problem: String, remedy: String) -> Finding {
        Finding {
            topic: self.name.clone(),
            severity,
            problem,
            remedy,
        }
    }

    /// What the topic holds, for messages.
    fn records(&self) -> &'static str {
        match self.role {
            Role::Pipeline(TopicRole::Source) => "records",
            Role::Pipeline(TopicRole::Output) => "results",
            Role::Pipeline(TopicRole::Tier(_)) => "waiting records",
            Role::Pipeline(TopicRole::Due) => "released records",
            Role::Pipeline(TopicRole::DeadLetter) | Role::Scheduler(SchedulerRole::DeadLetter) => {
                "dead letters"
            }
            Role::Scheduler(SchedulerRole::Ingest) => "commands",
            Role::Scheduler(SchedulerRole::State) => "waiting jobs",
            Role::Scheduler(SchedulerRole::Answers) => "answers",
            Role::Scheduler(SchedulerRole::App) => "jobs",
            Role::Ledger => "states of dead letters",
        }
    }
}

impl ActualTopic {
    fn number(&self, name: &str) -> Option<i64> {
        self.config.get(name)?.trim().parse().ok()
    }

    /// The largest batch of records it takes, in bytes.
    fn max_message_bytes(&self) -> Option<i64> {
        self.number("max.message.bytes")
    }

    /// Whether its clean-up includes this; `None` when it is not known.
    fn is_cleaned_by(&self, policy: &str) -> Option<bool> {
        let policies = self.config.get("cleanup.policy")?;
        Some(policies.split(',').any(|word| word.trim() == policy))
    }
}
