//! State that the parts of the inspector share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redeliver_core::Timestamp;
use redeliver_kafka::survey::Retention;
use tokio::sync::watch;

/// What is known about a dead-letter topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TopicStatus {
    /// `None` if unknown.
    pub(crate) retention: Option<Retention>,
    /// Number of records that are not indexed yet, as of the last survey.
    pub(crate) lag: u64,
}

impl TopicStatus {
    /// From when on Kafka may delete a dead letter of this time; `None` if never, or if the retention is unknown.
    pub(crate) fn removes_at(&self, dead_at: Timestamp) -> Option<Timestamp> {
        match self.retention? {
            Retention::For(retention) => Some(dead_at.after(retention.duration())),
            Retention::Unlimited => None,
        }
    }
}

/// State that the parts of the inspector share.
#[derive(Debug)]
pub(crate) struct SharedState {
    /// The number of the last dead letter of the index.
    pub(crate) last_row: watch::Sender<i64>,
    /// Whether the index contains everything that existed at the start.
    pub(crate) caught_up: watch::Sender<bool>,
    applied: AtomicU64,
    topics: Mutex<BTreeMap<String, TopicStatus>>,
}

impl SharedState {
    /// For an index whose last row has this number.
    pub(crate) fn new(last_row: i64) -> Self {
        Self {
            last_row: watch::Sender::new(last_row),
            caught_up: watch::Sender::new(false),
            applied: AtomicU64::new(0),
            topics: Mutex::default(),
        }
    }

    /// Sets the number of the last batch of changes that the index has applied.
    pub(crate) fn set_applied(&self, batch: u64) {
        self.applied.store(batch, Ordering::Release);
    }

    /// The number of the last batch of changes that the index has applied.
    pub(crate) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// The dead-letter topics of the last survey.
    pub(crate) fn topics(&self) -> MutexGuard<'_, BTreeMap<String, TopicStatus>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of records that are not indexed yet, in all topics.
    pub(crate) fn lag(&self) -> u64 {
        self.topics().values().map(|topic| topic.lag).sum()
    }
}
