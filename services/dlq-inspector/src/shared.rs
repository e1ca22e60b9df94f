//! What the parts of the inspector tell each other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redeliver_kafka::survey::Retention;
use tokio::sync::watch;

/// A dead-letter topic as the last survey saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeenTopic {
    /// How long it keeps its records; `None`: not known.
    pub(crate) retention: Option<Retention>,
    /// Records that are in it and not in the index yet.
    pub(crate) lag: u64,
}

/// What the parts of the inspector tell each other.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The number of the last row that was written.
    pub(crate) last_row: watch::Sender<i64>,
    /// Whether all that was there at the start is in the index.
    pub(crate) caught_up: watch::Sender<bool>,
    /// How much of the writer's work is done, as the reader numbers it.
    applied: AtomicU64,
    topics: Mutex<BTreeMap<String, SeenTopic>>,
}

impl Shared {
    /// With an index that ends with this row.
    pub(crate) fn new(last_row: i64) -> Self {
        Self {
            last_row: watch::Sender::new(last_row),
            caught_up: watch::Sender::new(false),
            applied: AtomicU64::new(0),
            topics: Mutex::default(),
        }
    }

    /// The work up to this number is done.
    pub(crate) fn set_applied(&self, number: u64) {
        self.applied.store(number, Ordering::Release);
    }

    /// Up to which number the work is done.
    pub(crate) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// The dead-letter topics that there are.
    pub(crate) fn topics(&self) -> MutexGuard<'_, BTreeMap<String, SeenTopic>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that are in the topics and not in the index yet.
    pub(crate) fn lag(&self) -> u64 {
        self.topics().values().map(|topic| topic.lag).sum()
    }
}
