//! State that the parts of the inspector share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redeliver_core::Timestamp;
use redeliver_kafka::survey::Retention;
use tokio::sync::watch;

use crate::completeness::Completeness;
use crate::redrive::gone::Gone;

/// What is known about a dead-letter topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TopicStatus {
    /// `None` if unknown.
    pub(crate) retention: Option<Retention>,
    /// Number of records that are not indexed yet, as of the last survey.
    pub(crate) lag: u64,
}

impl TopicStatus {
    /// From when on Kafka may delete a dead letter of this time because of its age; `None` if never, or if the retention is
    /// unknown.
    pub(crate) fn removes_at(&self, dead_at: Timestamp) -> Option<Timestamp> {
        Some(dead_at.after(self.retention?.age?.duration()))
    }
}

/// Of how many topics the last commit is known. Topics come and go.
const MAX_TOPICS: usize = 10_000;

/// The commits that have added dead letters to the index.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    /// The number of the last one.
    pub(crate) last: u64,
    /// By topic.
    last_of: BTreeMap<String, u64>,
    /// The last one of the topics that are not known any more.
    forgotten: u64,
}

impl Commits {
    /// Counts a commit that has added dead letters of these topics.
    pub(crate) fn add<'t>(&mut self, topics: impl Iterator<Item = &'t str>) {
        self.last += 1;
        for topic in topics {
            match self.last_of.get_mut(topic) {
                Some(last) => *last = self.last,
                None => drop(self.last_of.insert(topic.to_owned(), self.last)),
            }
        }
        if self.last_of.len() > MAX_TOPICS {
            self.forget_oldest();
        }
    }

    /// Forgets the topics to which nothing was added for the longest time, so that half of the maximum is left.
    fn forget_oldest(&mut self) {
        let mut commits: Vec<u64> = self.last_of.values().copied().collect();
        commits.sort_unstable();
        self.forgotten = commits[commits.len() - MAX_TOPICS / 2 - 1];
        self.last_of.retain(|_, last| *last > self.forgotten);
    }

    /// Whether a commit after this one has added dead letters of a topic for which a condition holds. If that is not known any more, it may have.
    pub(crate) fn have_added(&self, after: u64, is_wanted: impl Fn(&str) -> bool) -> bool {
        let mut topics = self.last_of.iter();
        self.forgotten > after || topics.any(|(topic, last)| *last > after && is_wanted(topic))
    }
}

/// State that the parts of the inspector share.
#[derive(Debug)]
pub(crate) struct SharedState {
    /// Changes when dead letters were added to the index, or it was rebuilt.
    pub(crate) commits: watch::Sender<Commits>,
    /// Whether the index contains everything that existed at the start.
    pub(crate) caught_up: watch::Sender<bool>,
    completeness: Mutex<Arc<Completeness>>,
    build: AtomicU64,
    applied: AtomicU64,
    topics: Mutex<BTreeMap<String, TopicStatus>>,
    gone: Mutex<Gone>,
}

impl SharedState {
    /// The build that the process has opened or created at its start.
    pub(crate) const FIRST_BUILD: u64 = 0;

    /// Before the index is open.
    pub(crate) fn new() -> Self {
        Self {
            commits: watch::Sender::new(Commits::default()),
            caught_up: watch::Sender::new(false),
            completeness: Mutex::default(),
            build: AtomicU64::new(Self::FIRST_BUILD),
            applied: AtomicU64::new(0),
            topics: Mutex::default(),
            gone: Mutex::default(),
        }
    }

    /// What the index contains.
    pub(crate) fn completeness(&self) -> Arc<Completeness> {
        self.lock_completeness().clone()
    }

    /// Sets what the index contains. Counts how often the ledger has become missing.
    pub(crate) fn set_completeness(&self, completeness: Completeness) {
        let has_caught_up = completeness.as_of.is_some();
        let mut current = self.lock_completeness();
        let is_lost = current.are_states_known() && !completeness.are_states_known();
        let ledger_losses = current.ledger_losses + u64::from(is_lost);
        *current = Arc::new(Completeness {
            ledger_losses,
            ..completeness
        });
        drop(current);
        self.caught_up
            .send_if_modified(|caught_up| std::mem::replace(caught_up, has_caught_up) != has_caught_up);
    }

    fn lock_completeness(&self) -> MutexGuard<'_, Arc<Completeness>> {
        self.completeness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of times that the index was rebuilt because it was damaged. Everything that was decided for an earlier build
    /// is void.
    pub(crate) fn build(&self) -> u64 {
        self.build.load(Ordering::Acquire)
    }

    /// Begins another build of the index, which is empty.
    pub(crate) fn begin_build(&self) {
        // In this order, a call that saw the previous completeness also saw the previous build.
        self.set_completeness(Completeness::default());
        self.build.fetch_add(1, Ordering::AcqRel);
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

    /// Below which offsets dead letters are gone for good.
    pub(crate) fn gone(&self) -> MutexGuard<'_, Gone> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of records that are not indexed yet, in the topics for which a condition holds.
    pub(crate) fn lag(&self, includes: impl Fn(&str) -> bool) -> u64 {
        let topics = self.topics();
        let included = topics.iter().filter(|(topic, _)| includes(topic));
        included.map(|(_, status)| status.lag).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_concern_watchers_of_their_topics() {
        let mut commits = Commits::default();
        let have_added =
            |commits: &Commits, after, wanted: &str| commits.have_added(after, |topic| topic == wanted);
        commits.add(["a-dlq", "b-dlq"].into_iter());
        commits.add(["b-dlq"].into_iter());
        assert!(have_added(&commits, 0, "a-dlq") && !have_added(&commits, 1, "a-dlq"));
        assert!(have_added(&commits, 1, "b-dlq") && !have_added(&commits, commits.last, "b-dlq"));
        assert!(!have_added(&commits, 0, "c-dlq"));
    }

    #[test]
    fn commits_of_many_topics_are_forgotten() {
        let mut commits = Commits::default();
        for number in 0..3 * MAX_TOPICS {
            let topic = format!("t{number}-dlq");
            commits.add([&*topic, "a-dlq"].into_iter());
            assert!(commits.last_of.len() <= MAX_TOPICS);
        }
        let newest = format!("t{}-dlq", 3 * MAX_TOPICS - 1);
        assert!(commits.have_added(commits.last - 1, |topic| topic == newest));
        assert!(!commits.have_added(commits.last - 1, |topic| topic == "b-dlq"));
        // A watcher that has not looked since.
        assert!(commits.have_added(0, |topic| topic == "t0-dlq"));
        assert!(!commits.have_added(commits.last, |_| true));
        // All in one commit.
        let topics: Vec<String> = (0..=MAX_TOPICS).map(|number| format!("u{number}-dlq")).collect();
        commits.add(topics.iter().map(String::as_str));
        assert!(commits.last_of.len() <= MAX_TOPICS);
        assert!(commits.have_added(commits.last - 1, |topic| topic == "u0-dlq"));
    }
}
