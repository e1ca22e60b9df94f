//! Whether a copy is complete, and whether the table contains everything.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::Position;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::credentials::Replaceable;
use redeliver_kafka::group_client::GroupClient;
use redeliver_kafka::reader::{ReadError, TopicClient};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::{JobOutcomes, Partition};

/// How long a call waits until the table contains everything.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(2);

/// How many calls ask Kafka at the same time. Others wait.
const CONNECTIONS: usize = 8;

/// By group.
type IdleGroups = Mutex<HashMap<String, Vec<GroupClient>>>;

/// Clients that wait between calls, so that a call needs no connection of its own.
pub(super) struct Clients {
    permits: Semaphore,
    groups: Arc<Replaceable<IdleGroups>>,
    ends: Arc<Replaceable<Mutex<Vec<TopicClient>>>>,
}

/// How far the group is that reads a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether it has not completed the record.
    pub(crate) is_unread: bool,
    /// Whether it has completed anything of the partition.
    pub(crate) has_begun: bool,
    /// Whether a process is a member; false if that is unknown.
    pub(crate) has_members: bool,
}

impl Clients {
    pub(super) fn new(kafka: &KafkaSettings) -> Self {
        let Ok(groups) = Replaceable::new(kafka, "groups of jobs", || Ok::<_, Infallible>(Mutex::default()));
        let Ok(ends) = Replaceable::new(kafka, "ends of jobs", || Ok::<_, Infallible>(Mutex::default()));
        Self {
            permits: Semaphore::new(CONNECTIONS),
            groups,
            ends,
        }
    }
}

impl JobOutcomes {
    /// Runs what asks Kafka. The error is `None` if the process is ending.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce() -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, Option<ReadError>> {
        // The semaphore is never closed.
        let _permit = self.0.clients.permits.acquire().await.ok();
        match spawn_blocking(ask).await {
            Ok(asked) => asked.map_err(Some),
            Err(_) => Err(None),
        }
    }

    /// How far a group is. Blocks.
    pub(crate) fn progress(
        &self,
        group: &str,
        position: &Position,
        needs_members: bool,
    ) -> Result<Progress, ReadError> {
        // A client returns to the pool from which it was taken. One that has failed is dropped.
        let pool = self.0.clients.groups.get();
        let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().get_mut(group).and_then(Vec::pop);
        let client = match taken {
            Some(client) => client,
            None => GroupClient::new(&self.0.kafka, group)?,
        };
        let positions = client.positions(&position.topic, position.partition)?;
        let is_unread = positions.is_unread(position);
        let progress = Progress {
            is_unread,
            has_begun: positions
                .completed_to(&position.topic, position.partition)
                .is_some(),
            has_members: is_unread
                && needs_members
                && client.has_members().unwrap_or_else(|error| {
                    tracing::debug!(group, %error, "cannot describe a group");
                    false
                }),
        };
        idle().entry(group.to_owned()).or_default().push(client);
        Ok(progress)
    }

    /// Waits until the table contains everything that the topics of a pipeline contain now. Blocks. False if that takes too long.
    ///
    /// Also what open transactions have written: Kafka can show the offsets that a transaction commits before its records.
    pub(crate) fn catch_up(&self, pipeline: u16) -> Result<bool, ReadError> {
        let partitions: Vec<Partition> = {
            let state = self.state();
            let is_of_pipeline = |(topic, _): &&Partition| {
                let of = state.of_pipelines.get(topic);
                of.is_some_and(|pipelines| pipelines.contains(&pipeline))
            };
            state.next.keys().filter(is_of_pipeline).cloned().collect()
        };
        if partitions.is_empty() {
            return Ok(false);
        }
        let pool = self.0.clients.ends.get();
        let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let client = match taken {
            Some(client) => client,
            None => TopicClient::new(&self.0.kafka)?,
        };
        let ends = client.ends(&partitions)?;
        idle().push(client);
        let until = Instant::now() + PATIENCE;
        loop {
            let is_read = {
                let state = self.state();
                let mut ends = ends.iter();
                ends.all(|(partition, end)| state.next.get(partition).is_some_and(|next| next >= end))
            };
            if is_read || Instant::now() >= until {
                return Ok(is_read);
            }
            std::thread::park_timeout(LOOK);
        }
    }
}
