//! The topics of the scheduler.

use std::sync::Arc;

/// The names of the scheduler's topics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerTopics {
    /// The ingest topic, to which clients write job requests. Each partition is a shard.
    pub ingest: Arc<str>,
    /// The state topic: compacted, holds the current state of every job, and is the source of truth.
    pub state: Arc<str>,
    /// The dead-letter topic for rejected requests.
    pub dlq: Arc<str>,
    /// The answers topic: outcomes of requests for which a client waits.
    pub answers: Arc<str>,
    /// The topics of the applications, to which due jobs are dispatched.
    pub apps: Vec<Arc<str>>,
}

/// The role of a topic in the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerRole {
    /// The ingest topic.
    Ingest,
    /// The state topic.
    State,
    /// The dead-letter topic.
    DeadLetter,
    /// The answers topic.
    Answers,
    /// The topic of an application.
    App,
}

impl SchedulerTopics {
    /// Every topic with its role. A topic that applications share occurs more than once.
    #[must_use]
    pub fn topics(&self) -> Vec<(Arc<str>, SchedulerRole)> {
        let own = [
            (&self.ingest, SchedulerRole::Ingest),
            (&self.state, SchedulerRole::State),
            (&self.dlq, SchedulerRole::DeadLetter),
            (&self.answers, SchedulerRole::Answers),
        ];
        let apps = self.apps.iter().map(|topic| (topic, SchedulerRole::App));
        own.into_iter()
            .chain(apps)
            .map(|(topic, role)| (topic.clone(), role))
            .collect()
    }
}

impl Default for SchedulerTopics {
    /// `scheduler.jobs.ingest`, `scheduler.jobs.state`, `scheduler.jobs.dlq` and `scheduler.jobs.answers`; no
    /// applications.
    fn default() -> Self {
        Self {
            ingest: "scheduler.jobs.ingest".into(),
            state: "scheduler.jobs.state".into(),
            dlq: "scheduler.jobs.dlq".into(),
            answers: "scheduler.jobs.answers".into(),
            apps: Vec::new(),
        }
    }
}
