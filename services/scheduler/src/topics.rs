//! Whether the topics of jobs exist. A record for a topic that does not would hold up the transaction that it is in, and
//! with it every other job of the lane.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::{TopicState, TopicWatch};

/// How long a job waits to hear about its topic, before it is written all the same. The embedded broker never answers that
/// question, and its topics all exist.
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
    patience: Duration,
}

impl WatchedTopics {
    pub(crate) fn new(watch: TopicWatch, is_embedded: bool) -> Self {
        Self {
            watch,
            patience: if is_embedded { Duration::ZERO } else { PATIENCE },
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
                if asked.elapsed() < self.patience {
                    Presence::Unknown
                } else {
                    Presence::Exists
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::KafkaSettings;

    use super::*;

    #[test]
    fn a_topic_of_which_nothing_is_known_is_waited_for_unless_the_broker_is_embedded() {
        // Nobody answers there.
        let settings = KafkaSettings::new("127.0.0.1:1", "test");
        for (is_embedded, expected) in [(true, Presence::Exists), (false, Presence::Unknown)] {
            let topics = WatchedTopics::new(TopicWatch::start(&settings).unwrap(), is_embedded);
            assert_eq!(topics.presence(&"docs".into()), expected);
        }
    }
}
