//! The topics of the scheduler, and what each of them is to it.

use std::sync::Arc;

/// The topics of the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerTopics {
    /// Commands arrive here; a partition of it is a shard of the scheduler.
    pub ingest: Arc<str>,
    /// What is known of each job, the newest record of a job holding: the truth.
    pub state: Arc<str>,
    /// Commands that cannot be understood or accepted.
    pub dlq: Arc<str>,
    /// What became of commands, for those who wait to hear it.
    pub answers: Arc<str>,
    /// Where due jobs go, by application.
    pub apps: Vec<Arc<str>>,
}

/// How a topic belongs to the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerRole {
    /// Commands.
    Ingest,
    /// What is known of jobs.
    State,
    /// Commands that cannot be accepted.
    DeadLetter,
    /// What became of commands.
    Answers,
    /// Due jobs of an application.
    App,
}

impl SchedulerTopics {
    /// Every topic with its role. Applications may share one.
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
    /// `scheduler.jobs.ingest` and its like; no applications.
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
