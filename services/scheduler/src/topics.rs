//! Whether the topics of jobs exist. A record for a topic that does not would hold up the transaction that it is in, and
//! with it every other job of the lane.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::{TopicState, TopicWatch};

/// How long a job waits to hear about its topic, before it is written all the same.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is known of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Exists,
    /// The answer is under way.
    Unknown,
    Missing {
        /// For how long, as far as this process has seen.
        lasting: Duration,
    },
}

/// Who knows.
pub(crate) trait Topics: Send + Sync {
    /// What is known of a topic, without waiting.
    fn presence(&self, topic: &Arc<str>) -> Presence;
}

/// What the process's watch has seen.
pub(crate) struct WatchedTopics {
    watch: TopicWatch,
    /// Since when topics of which nothing is known have been asked for.
    unknown: Mutex<HashMap<Arc<str>, Instant>>,
}

impl WatchedTopics {
    pub(crate) fn new(watch: TopicWatch) -> Self {
        Self {
            watch,
            unknown: Mutex::default(),
        }
    }
}

impl Topics for WatchedTopics {
    fn presence(&self, topic: &Arc<str>) -> Presence {
        match self.watch.state(topic) {
            TopicState::Exists { .. } => Presence::Exists,
            TopicState::Missing { since } => Presence::Missing {
                lasting: since.elapsed(),
            },
            TopicState::Unknown => {
                let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
                let asked = unknown.entry(topic.clone()).or_insert_with(Instant::now);
                // Brokers that do not answer this question may take records all the same.
                if asked.elapsed() < PATIENCE {
                    Presence::Unknown
                } else {
                    Presence::Exists
                }
            }
        }
    }
}
