//! The topics that an installation needs: specifies them, checks whether existing ones would lose records, and creates missing
//! ones. Who owns a topic specifies it; this module knows only those of pipelines.
//!
//! Records may wait in topics for a year or longer, so the cleanup of a topic is the one thing in Kafka that can lose them
//! without an error: a retention shorter than the wait, compaction of a topic whose records share keys, or deletion of old
//! records from the state topic. The specification ([`TopologySpec`]) and the comparison ([`examine()`]) do no IO; [`check`]
//! and [`apply`] send requests.
//!
//! Source topics and output topics belong to users: missing ones are created, and of existing ones
//! only the size limit is checked. Existing topics are never changed.

mod admin;
mod examine;
mod needed;
mod offsets;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use redeliver_core::HumanDuration;

pub use admin::{Applied, TopologyError, apply, check, names, tombstone_retention};
pub use examine::{examine, examine_all};
pub use needed::MIN_RETENTION;
pub use plan::{PlannedTopic, plan};

/// Settings for creating topics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// The number of partitions of each topic.
    pub partitions: i32,
    /// The replication factor; -1 means the broker's default.
    pub replication: i32,
    /// The minimum retention of tiers and of topics between services.
    pub retention: HumanDuration,
    /// The retention of dead letters.
    pub dead_letter_retention: HumanDuration,
}

/// The topics that something needs. Each topic occurs once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopologySpec {
    /// The topics, in the order of those who need them.
    pub topics: Vec<TopicSpec>,
}

/// The specification of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSpec {
    /// The name of the topic.
    pub name: Arc<str>,
    /// What the topic is used for.
    pub role: Role,
    /// What it contains, for texts: a plural.
    pub records: &'static str,
    /// The setting with its name, for texts.
    pub setting: Option<&'static str>,
    /// The number of partitions for creating it.
    pub partitions: i32,
    /// The topic whose number of partitions it must have.
    pub partitions_as: Option<Arc<str>>,
    /// The replication factor for creating it; -1 means the broker's default.
    pub replication: i32,
    /// The retention for creating it; `None` means the broker's default.
    pub retention: Option<HumanDuration>,
    /// With a shorter retention, records would be lost; `None` if the retention is not checked.
    pub required_retention: Option<HumanDuration>,
    /// The topics whose records must fit into it.
    pub sources: Vec<Arc<str>>,
    /// The size of the largest records written to it according to the settings, in bytes and without added headers.
    pub largest: Option<u64>,
    /// The required cleanup policy; `None` for topics of users.
    pub cleanup: Option<Cleanup>,
}

/// What a topic is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A consumer group reads it.
    Input,
    /// A consumer group reads it; its records wait until they are due.
    Tier,
    /// Users read it. Records for it wait while it does not exist.
    Output,
    /// Records that have ended.
    DeadLetters,
    /// Each process reads all of it, and old records are deleted.
    Broadcast,
    /// Compacted: what waits until it is due. An index follows it.
    State,
    /// Compacted: states of what is elsewhere. An index follows it.
    Ledger,
    /// Compacted, with one partition: each process reads all of it.
    Documents,
    /// As [`Role::Documents`]; records are superseded all the time.
    Progress,
    /// As [`Role::Progress`]. Nothing depends on it, so that what is wrong with it is a warning.
    Status,
    /// One partition, in the order of time.
    Audit,
}

/// The cleanup policy of a managed topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleanup {
    /// Old records are deleted.
    Delete,
    /// The latest record of each key is kept forever.
    Compact {
        /// How long tombstones are kept.
        tombstones: HumanDuration,
    },
}

/// An existing topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActualTopic {
    /// The number of partitions.
    pub partitions: i32,
    /// The known configuration, including defaults.
    pub config: BTreeMap<String, String>,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Records would be lost or could not be written, so processes do not start.
    Error,
    /// Records may be lost in special cases.
    Warning,
}

/// A problem of a topic and its remedy, as text for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The topic.
    pub topic: Arc<str>,
    /// The severity.
    pub severity: Severity,
    /// The problem and its consequence.
    pub problem: String,
    /// What to do about it.
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
    fn expect(&mut self, bytes: u64) {
        self.largest = self.largest.max(Some(bytes));
    }

    /// Whether Redeliver relies on the configuration of the topic. Topics of users are not managed.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.cleanup.is_some()
    }

    fn finding(&self, severity: Severity, problem: String, remedy: String) -> Finding {
        let severity = match self.role {
            Role::Status => Severity::Warning,
            _ => severity,
        };
        Finding {
            topic: self.name.clone(),
            severity,
            problem,
            remedy,
        }
    }
}

impl ActualTopic {
    fn number(&self, name: &str) -> Option<i64> {
        self.config.get(name)?.trim().parse().ok()
    }

    /// How long tombstones are kept.
    fn tombstone_retention(&self) -> Option<HumanDuration> {
        let millis = self.number("delete.retention.ms")?;
        Some(HumanDuration::from_millis(u64::try_from(millis).ok()?))
    }

    fn max_message_bytes(&self) -> Option<i64> {
        self.number("max.message.bytes")
    }

    /// Whether the cleanup policy includes `policy`; `None` if it is unknown.
    fn is_cleaned_by(&self, policy: &str) -> Option<bool> {
        let policies = self.config.get("cleanup.policy")?;
        Some(policies.split(',').any(|word| word.trim() == policy))
    }
}
