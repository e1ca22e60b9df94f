//! Copies on their way from the thread that reads them to the shards of a lane.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::{AssignmentId, Waker};

use crate::shard::{NamedBy, UrgentCopy};

/// The maximum number of jobs that the copies in an inbox name. The lane empties it in each round.
pub(super) const MAX_NAMES: usize = 10_000;
/// How long a shard waits at most for the end of its partition.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The inboxes of the shards of a lane.
pub(crate) struct UrgentCopies {
    /// The urgent topic.
    pub(crate) topic: Arc<str>,
    shards: Mutex<HashMap<i32, Inbox>>,
    /// Of the lane.
    pub(super) waker: Waker,
    /// Of the reader.
    pub(super) reader: Waker,
}

/// The copies for a shard.
struct Inbox {
    assignment: AssignmentId,
    since: Instant,
    /// The offset of the last original that names each job.
    copies: HashMap<NamedBy, i64>,
    /// The offset before which all commands that name jobs have had their turn.
    passed: i64,
    /// Whether the reader reads the partition for this assignment.
    is_read: bool,
    /// Whether the reader has reached the end of the partition once, or cannot.
    is_complete: bool,
}

/// What becomes of a copy that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// The shard takes it.
    Added,
    /// The shard takes it together with another copy that names the same job.
    Merged,
    /// The original has had its turn.
    Late,
    /// There is no room before the shard has taken others.
    Full,
    /// The lane does not own the shard any more, or reads the partition again.
    Outdated,
}

/// What a shard takes from its inbox.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    pub(crate) copies: Vec<UrgentCopy>,
    /// Whether the copies are all that the partition contained when the shard began to wait for them, or the wait is over.
    pub(crate) is_complete: bool,
    /// Whether the wait has ended in this moment although the end of the partition was not reached.
    pub(crate) gave_up: bool,
}

impl UrgentCopies {
    pub(crate) fn new(topic: Arc<str>, waker: Waker) -> Arc<Self> {
        Arc::new(Self {
            topic,
            shards: Mutex::default(),
            waker,
            reader: Waker::new(),
        })
    }

    /// The lane owns a shard.
    pub(crate) fn assigned(&self, assignment: AssignmentId, shard: i32) {
        let inbox = Inbox {
            assignment,
            since: Instant::now(),
            copies: HashMap::new(),
            passed: 0,
            is_read: false,
            is_complete: false,
        };
        self.lock().insert(shard, inbox);
        self.reader.wake();
    }

    /// The shard reads the ingest topic from this offset on.
    pub(crate) fn starts_at(&self, assignment: AssignmentId, shard: i32, offset: i64) {
        if let Some(inbox) = of(&mut self.lock(), assignment, shard) {
            inbox.passed = offset;
        }
    }

    /// The lane does not own a shard any more.
    pub(crate) fn revoked(&self, assignment: AssignmentId) {
        self.lock().retain(|_, inbox| inbox.assignment != assignment);
        self.reader.wake();
    }

    /// What has come for a shard that has `passed` the commands before an offset.
    pub(crate) fn take(&self, assignment: AssignmentId, shard: i32, passed: i64) -> Delivery {
        let mut shards = self.lock();
        let Some(inbox) = of(&mut shards, assignment, shard) else {
            return Delivery::default();
        };
        inbox.passed = passed;
        let gave_up = !inbox.is_complete && inbox.since.elapsed() >= MAX_WAIT;
        inbox.is_complete |= gave_up;
        if inbox.copies.len() >= MAX_NAMES {
            self.reader.wake();
        }
        let copies = inbox.copies.drain();
        Delivery {
            copies: copies
                .map(|(names, original)| UrgentCopy { names, original })
                .collect(),
            is_complete: inbox.is_complete,
            gave_up,
        }
    }

    /// The shards, and those whose partitions the reader must read from the beginning now.
    pub(crate) fn begin(&self) -> (BTreeSet<i32>, Vec<i32>) {
        let mut shards = self.lock();
        let is_new = |inbox: &mut Inbox| !std::mem::replace(&mut inbox.is_read, true);
        let new = shards
            .iter_mut()
            .filter_map(|(shard, inbox)| is_new(inbox).then_some(*shard));
        let new = new.collect();
        (shards.keys().copied().collect(), new)
    }

    pub(crate) fn push(&self, shard: i32, copy: UrgentCopy) -> Pushed {
        let mut shards = self.lock();
        let Some(inbox) = shards.get_mut(&shard).filter(|inbox| inbox.is_read) else {
            return Pushed::Outdated;
        };
        if copy.original < inbox.passed {
            return Pushed::Late;
        }
        if let Some(original) = inbox.copies.get_mut(&copy.names) {
            *original = copy.original.max(*original);
            return Pushed::Merged;
        }
        if inbox.copies.len() >= MAX_NAMES {
            return Pushed::Full;
        }
        inbox.copies.insert(copy.names, copy.original);
        Pushed::Added
    }

    /// The reader has reached the end of a partition, or cannot read it. Returns whether the shard has waited for that.
    pub(crate) fn complete(&self, shard: i32) -> bool {
        let mut shards = self.lock();
        let inbox = shards.get_mut(&shard).filter(|inbox| inbox.is_read);
        inbox.is_some_and(|inbox| !std::mem::replace(&mut inbox.is_complete, true))
    }

    /// No partition is read any more.
    pub(super) fn unread(&self) {
        for inbox in self.lock().values_mut() {
            inbox.is_read = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Inbox>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of(shards: &mut HashMap<i32, Inbox>, assignment: AssignmentId, shard: i32) -> Option<&mut Inbox> {
    let inbox = shards.get_mut(&shard);
    inbox.filter(|inbox| inbox.assignment == assignment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(name: u16, original: i64) -> UrgentCopy {
        let mut key = [7; 16];
        key[..2].copy_from_slice(&name.to_be_bytes());
        UrgentCopy {
            names: NamedBy::Key(key),
            original,
        }
    }

    fn taken(copies: &UrgentCopies, assignment: AssignmentId, passed: i64) -> (Vec<i64>, bool) {
        let delivery = copies.take(assignment, 3, passed);
        assert!(!delivery.gave_up);
        let mut originals: Vec<i64> = delivery.copies.iter().map(|copy| copy.original).collect();
        originals.sort_unstable();
        (originals, delivery.is_complete)
    }

    #[test]
    fn a_shard_gets_the_copies_that_were_read_for_its_assignment() {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let (former, current) = (AssignmentId::for_tests(0, 1), AssignmentId::for_tests(0, 2));
        copies.assigned(former, 3);
        assert_eq!(copies.push(3, copy(1, 1)), Pushed::Outdated, "not read yet");
        assert!(!copies.complete(3));
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
        assert_eq!(copies.begin(), ([3].into(), vec![]));
        assert_eq!(copies.push(3, copy(1, 1)), Pushed::Added);
        assert_eq!(copies.push(4, copy(1, 1)), Pushed::Outdated);
        copies.revoked(former);
        assert_eq!(copies.begin(), ([].into(), vec![]));
        copies.assigned(current, 3);
        copies.revoked(former);
        // What was read for the former assignment.
        assert_eq!(copies.push(3, copy(2, 2)), Pushed::Outdated);
        assert!(!copies.complete(3));
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
        assert_eq!(copies.push(3, copy(1, 1)), Pushed::Added);
        assert_eq!(copies.push(3, copy(2, 2)), Pushed::Added);
        assert_eq!(taken(&copies, former, 0), (vec![], false));
        assert_eq!(taken(&copies, current, 0), (vec![1, 2], false));
        assert!(copies.complete(3) && !copies.complete(3));
        assert_eq!(taken(&copies, current, 0), (vec![], true));
        // A client that was replaced reads them again.
        copies.unread();
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
    }

    #[test]
    fn late_copies_and_those_of_one_job_use_no_memory_and_none_is_lost() {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let assignment = AssignmentId::for_tests(0, 1);
        copies.assigned(assignment, 3);
        copies.begin();
        // Known before the lane takes anything: otherwise a backlog of late copies fills the inbox.
        copies.starts_at(assignment, 3, 5);
        assert_eq!(copies.push(3, copy(1, 4)), Pushed::Late);
        assert_eq!(copies.push(3, copy(1, 5)), Pushed::Added);
        assert_eq!(copies.push(3, copy(1, 9)), Pushed::Merged);
        assert_eq!(copies.push(3, copy(1, 7)), Pushed::Merged);
        assert_eq!(taken(&copies, assignment, 6), (vec![9], false));
        assert_eq!(copies.push(3, copy(1, 5)), Pushed::Late);
        for name in 0..u16::try_from(MAX_NAMES).unwrap() {
            assert_eq!(copies.push(3, copy(name, 10)), Pushed::Added);
        }
        let last = u16::MAX;
        assert_eq!(copies.push(3, copy(last, 10)), Pushed::Full);
        assert_eq!(copies.push(3, copy(0, 11)), Pushed::Merged);
        assert_eq!(copies.take(assignment, 3, 6).copies.len(), MAX_NAMES);
        assert_eq!(copies.push(3, copy(last, 10)), Pushed::Added);
    }
}
