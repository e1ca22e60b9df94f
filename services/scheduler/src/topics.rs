//! What is known about topics while the process runs: whether the topics of jobs can be written, and whether those of the scheduler have changed. A record for an unavailable topic would block its transaction, and with it every other job of the lane.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::TopicWatch;
pub(crate) use redeliver_kafka::{Presence, TopicState};

/// How long a topic stays unknown before it is treated as existing.
const UNKNOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// What is known about topics.
pub(crate) trait Topics: Send + Sync {
    /// The last known presence of a topic. Does not block.
    fn presence(&self, topic: &Arc<str>) -> Presence;

    /// The last known state of a topic. Does not block.
    fn state(&self, topic: &str) -> TopicState;
}

/// The topics that the process's topic watch observes.
pub(crate) struct WatchedTopics {
    watch: TopicWatch,
    /// When each unknown topic was queried first.
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
        match self.watch.presence(topic) {
            Presence::Unknown => {
                let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
                let queried = unknown.entry(topic.clone()).or_insert_with(Instant::now);
                // Brokers that do not answer this request may still accept records.
                if queried.elapsed() < UNKNOWN_TIMEOUT {
                    Presence::Unknown
                } else {
                    Presence::Exists
                }
            }
            known => known,
        }
    }

    fn state(&self, topic: &str) -> TopicState {
        self.watch.state(topic)
    }
}
