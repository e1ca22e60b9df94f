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
/// A reader that has not looked at its partitions for so long is stuck. A round takes less than a second.
const STUCK: Duration = Duration::from_secs(30);

/// The inboxes of the shards of a lane.
pub(crate) struct UrgentCopies {
    /// The urgent topic.
    pub(crate) topic: Arc<str>,
    shards: Mutex<HashMap<i32, Inbox>>,
    /// When the reader last looked at its partitions.
    progress: Mutex<Instant>,
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
    /// Whether all copies that the partition contains were read, as far as the reader knows.
    is_current: bool,
    /// Whether the shard dispatches jobs: they were read once, or the wait is over.
    may_dispatch: bool,
    /// Whether the wait is over although they were not read. Reported once.
    has_given_up: bool,
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
    pub(crate) may_dispatch: bool,
    /// Whether the wait has just ended although the copies were not read.
    pub(crate) gave_up: bool,
}

impl UrgentCopies {
    pub(crate) fn new(topic: Arc<str>, waker: Waker) -> Arc<Self> {
        Arc::new(Self {
            topic,
            shards: Mutex::default(),
            progress: Mutex::new(Instant::now()),
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
            is_current: false,
            may_dispatch: false,
            has_given_up: false,
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

    /// What has come for a shard that has `passed` the commands before an offset. It does not wait for the reader if the topic does not
    /// exist.
    pub(crate) fn take(&self, assignment: AssignmentId, shard: i32, passed: i64, exists: bool) -> Delivery {
        let mut shards = self.lock();
        let Some(inbox) = of(&mut shards, assignment, shard) else {
            return Delivery::default();
        };
        inbox.passed = passed;
        if exists && !inbox.may_dispatch && inbox.since.elapsed() >= MAX_WAIT {
            inbox.has_given_up = true;
        }
        let gave_up = std::mem::take(&mut inbox.has_given_up);
        inbox.may_dispatch |= gave_up || !exists;
        if inbox.copies.len() >= MAX_NAMES {
            self.reader.wake();
        }
        let copies = inbox.copies.drain();
        Delivery {
            copies: copies
                .map(|(names, original)| UrgentCopy { names, original })
                .collect(),
            may_dispatch: inbox.may_dispatch,
            gave_up,
        }
    }

    /// The number of shards that dispatch jobs although copies may not have been read.
    pub(crate) fn unprotected(&self, now: Instant) -> usize {
        let last = *self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let is_stuck = now.saturating_duration_since(last) >= STUCK;
        let shards = self.lock();
        let unprotected = |inbox: &&Inbox| inbox.may_dispatch && (is_stuck || !inbox.is_current);
        shards.values().filter(unprotected).count()
    }

    /// The reader looks at its partitions.
    pub(super) fn note_progress(&self, now: Instant) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = now;
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

    /// The reader has passed on all copies that a partition contains, or cannot read it. Returns whether the shard has waited for that.
    pub(crate) fn set_current(&self, shard: i32, is_current: bool) -> bool {
        let mut shards = self.lock();
        let Some(inbox) = shards.get_mut(&shard).filter(|inbox| inbox.is_read) else {
            return false;
        };
        inbox.is_current = is_current;
        is_current && !std::mem::replace(&mut inbox.may_dispatch, true)
    }

    /// The reader cannot read a partition, and it does not help to wait. Returns whether the shard has waited.
    pub(super) fn give_up(&self, shard: i32) -> bool {
        let mut shards = self.lock();
        let inbox = shards.get_mut(&shard).filter(|inbox| !inbox.may_dispatch);
        inbox.map(|inbox| inbox.has_given_up = true).is_some()
    }

    /// No partition is read any more.
    pub(super) fn unread(&self) {
        for inbox in self.lock().values_mut() {
            inbox.is_read = false;
            inbox.is_current = false;
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
        let delivery = copies.take(assignment, 3, passed, true);
        assert!(!delivery.gave_up);
        let mut originals: Vec<i64> = delivery.copies.iter().map(|copy| copy.original).collect();
        originals.sort_unstable();
        (originals, delivery.may_dispatch)
    }

    #[test]
    fn a_shard_gets_the_copies_that_were_read_for_its_assignment() {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let (former, current) = (AssignmentId::for_tests(0, 1), AssignmentId::for_tests(0, 2));
        copies.assigned(former, 3);
        assert_eq!(copies.push(3, copy(1, 1)), Pushed::Outdated, "not read yet");
        assert!(!copies.set_current(3, true));
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
        assert!(!copies.set_current(3, true));
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
        assert_eq!(copies.push(3, copy(1, 1)), Pushed::Added);
        assert_eq!(copies.push(3, copy(2, 2)), Pushed::Added);
        assert_eq!(taken(&copies, former, 0), (vec![], false));
        assert_eq!(taken(&copies, current, 0), (vec![1, 2], false));
        assert!(copies.set_current(3, true) && !copies.set_current(3, true));
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
        assert_eq!(copies.take(assignment, 3, 6, true).copies.len(), MAX_NAMES);
        assert_eq!(copies.push(3, copy(last, 10)), Pushed::Added);
    }

    fn assigned() -> (Arc<UrgentCopies>, AssignmentId) {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let assignment = AssignmentId::for_tests(0, 1);
        copies.assigned(assignment, 3);
        copies.begin();
        (copies, assignment)
    }

    #[test]
    fn a_shard_that_dispatches_jobs_without_all_copies_is_unprotected() {
        let (copies, assignment) = assigned();
        let now = Instant::now();
        let may_dispatch = |exists| copies.take(assignment, 3, 0, exists).may_dispatch;
        assert!(!may_dispatch(true));
        assert_eq!(copies.unprotected(now), 0, "it waits");
        assert!(may_dispatch(false) && may_dispatch(true));
        assert_eq!(copies.unprotected(now), 1);
        assert!(!copies.set_current(3, true), "the shard has not waited");
        assert_eq!(copies.unprotected(now), 0);
        copies.set_current(3, false);
        assert!(may_dispatch(true));
        assert_eq!(copies.unprotected(now), 1);
        copies.set_current(3, true);
        copies.unread();
        assert_eq!(copies.unprotected(now), 1);
    }

    #[test]
    fn a_shard_gives_up_once_if_waiting_does_not_help() {
        let (copies, assignment) = assigned();
        assert!(copies.give_up(3));
        let delivery = copies.take(assignment, 3, 0, true);
        assert!(delivery.gave_up && delivery.may_dispatch);
        assert!(!copies.give_up(3));
        assert!(!copies.take(assignment, 3, 0, true).gave_up);
        assert_eq!(copies.unprotected(Instant::now()), 1);
    }

    #[test]
    fn no_shard_is_protected_by_a_reader_that_is_stuck() {
        let (copies, _) = assigned();
        copies.set_current(3, true);
        let now = Instant::now();
        copies.note_progress(now);
        assert_eq!(copies.unprotected(now + STUCK / 2), 0);
        assert_eq!(copies.unprotected(now + STUCK), 1);
        copies.note_progress(now + STUCK);
        assert_eq!(copies.unprotected(now + STUCK), 0);
    }
}
