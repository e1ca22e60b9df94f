//! What is known about topics while the process runs: whether the topics of jobs can be written, and whether those of the scheduler have changed. A record for an unavailable topic would block its transaction, and with it every other job of the lane.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::TopicWatch;
pub(crate) use redeliver_kafka::{Presence, TopicState};

/// How long a topic stays unknown before it is treated as existing. The embedded broker does not answer this request,
/// and all of its topics exist.
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
    unknown_timeout: Duration,
}

impl WatchedTopics {
    pub(crate) fn new(watch: TopicWatch, is_embedded: bool) -> Self {
        Self {
            watch,
            unknown_timeout: if is_embedded {
                Duration::ZERO
            } else {
                UNKNOWN_TIMEOUT
            },
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
                if queried.elapsed() < self.unknown_timeout {
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

#[cfg(test)]
mod tests {
    use redeliver_kafka::KafkaSettings;

    use super::*;

    #[test]
    fn only_embedded_broker_knows_all_topics() {
        // No broker listens there.
        let settings = KafkaSettings::new("127.0.0.1:1", "test");
        for (is_embedded, expected) in [(true, Presence::Exists), (false, Presence::Unknown)] {
            let topics = WatchedTopics::new(TopicWatch::start(&settings).unwrap(), is_embedded);
            assert_eq!(topics.presence(&"docs".into()), expected);
        }
    }
}
