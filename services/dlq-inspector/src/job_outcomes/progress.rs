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
use tokio::task::spawn_blocking;

use super::{JobOutcomes, Partition};
use crate::waiting::limit::ScanLimit;

/// How long a call waits until the table contains everything.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it checks the table.
const RECHECK: Duration = Duration::from_millis(2);

/// How many calls ask Kafka at the same time, and how many clients of groups wait between calls. Other calls wait.
const CONNECTIONS: usize = 8;

/// By group.
type IdleGroups = Mutex<HashMap<String, Vec<GroupClient>>>;

/// Clients that wait between calls, so that a call needs no connection of its own.
pub(super) struct Clients {
    limit: ScanLimit,
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
    /// Whether a process is a member; `None` if Kafka does not tell, or if it does not matter.
    pub(crate) has_members: Option<bool>,
}

/// Why Kafka was not asked, or did not answer.
pub(crate) enum AskError {
    /// Others took too long.
    Busy,
    /// The process is ending.
    Ending,
    Kafka(ReadError),
}

impl Clients {
    pub(super) fn new(kafka: &KafkaSettings) -> Self {
        let Ok(groups) = Replaceable::new(kafka, "groups of jobs", || Ok::<_, Infallible>(Mutex::default()));
        let Ok(ends) = Replaceable::new(kafka, "ends of jobs", || Ok::<_, Infallible>(Mutex::default()));
        Self {
            limit: ScanLimit::new(CONNECTIONS),
            groups,
            ends,
        }
    }
}

impl JobOutcomes {
    /// Runs what asks Kafka.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce() -> Result<T, ReadError> + Send + 'static,
    ) -> Result<T, AskError> {
        let permit = self.0.clients.limit.enter().await.ok_or(AskError::Busy)?;
        let asking = move || {
            // Kafka is asked to the end if the caller does not wait any longer.
            let _permit = permit;
            ask()
        };
        match spawn_blocking(asking).await {
            Ok(asked) => asked.map_err(AskError::Kafka),
            Err(_) => Err(AskError::Ending),
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
            has_members: match is_unread && needs_members {
                true => client
                    .has_members()
                    .inspect_err(|error| tracing::debug!(group, %error, "cannot describe a group"))
                    .ok(),
                false => None,
            },
        };
        let mut idle = idle();
        let is_full = idle.values().map(Vec::len).sum::<usize>() >= CONNECTIONS;
        let closed = is_full.then(|| std::mem::take(&mut *idle));
        idle.entry(group.to_owned()).or_default().push(client);
        // Others need not wait for the end of their connections.
        drop((idle, closed));
        Ok(progress)
    }

    /// Waits until the table contains everything that the topics of a pipeline contain now. Blocks. Why not, if that takes too long or is not known.
    ///
    /// Also what open transactions have written: Kafka can show the offsets that a transaction commits before its records.
    pub(crate) fn catch_up(&self, pipeline: u16) -> Result<Result<(), String>, ReadError> {
        let mut topics: Vec<Arc<str>> = Vec::new();
        {
            let state = self.state();
            for (topic, pipelines) in &state.of_pipelines {
                if !pipelines.contains(&pipeline) {
                    continue;
                }
                if let Some(error) = state.refused.get(topic) {
                    return Ok(Err(format!("the inspector cannot read {topic}: {error}")));
                }
                topics.push(topic.clone());
            }
        }
        let pool = self.0.clients.ends.get();
        let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let client = match taken {
            Some(client) => client,
            None => TopicClient::new(&self.0.kafka)?,
        };
        let mut partitions: Vec<Partition> = Vec::new();
        for topic in &topics {
            match client.partitions(topic) {
                Ok(count) => partitions.extend((0..count).map(|partition| (topic.clone(), partition))),
                Err(ReadError::Missing(_))
                    if self.state().next.keys().any(|(followed, _)| followed == topic) =>
                {
                    return Ok(Err(format!("Kafka does not know {topic} now")));
                }
                // Of a tier without records, for example.
                Err(ReadError::Missing(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let ends = client.ends(&partitions)?;
        // After the ends: they are of these topics.
        let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
        let ids = client.ids(&names)?;
        idle().push(client);
        for (topic, id) in ids {
            let followed = self.state().ids.get(&*topic).copied();
            match id {
                Err(error) => return Ok(Err(format!("Kafka does not tell the id of {topic}: {error}"))),
                Ok(id) if followed.is_some_and(|followed| followed != id) => {
                    return Ok(Err(format!("{topic} was created again a moment ago")));
                }
                Ok(_) => {}
            }
        }
        let until = Instant::now() + PATIENCE;
        loop {
            let is_read = {
                let state = self.state();
                let mut ends = ends.iter();
                ends.all(|(partition, end)| state.next.get(partition).is_some_and(|next| next >= end))
            };
            if is_read {
                return Ok(Ok(()));
            }
            if Instant::now() >= until {
                return Ok(Err(
                    "the inspector has not read all records of the pipeline yet".to_owned()
                ));
            }
            std::thread::park_timeout(RECHECK);
        }
    }
}
