//! What a service plugs into a lane: it accepts records and, at any later time and in any order, hands
//! over what is finished with them.

use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use redeliver_core::{Failure, Output, Record, Timestamp};

/// One assignment of one partition to a lane. A partition that is lost and assigned again has a new id,
/// so that what is left over from the old assignment cannot touch the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssignmentId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl AssignmentId {
    /// An id for the test of a processor, which sees no lane.
    #[must_use]
    pub fn for_tests(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }
}

/// What is written in one transaction: results, and the records that are thereby done.
#[derive(Debug, Default)]
pub struct TransactionBatch {
    /// What is produced.
    pub outputs: Vec<Output>,
    /// The records that are done: their assignment and offset.
    pub completed: Vec<(AssignmentId, i64)>,
    /// Assignments in whose name something is written though none of their records is done. Their position
    /// is committed again, because only the offsets in a transaction prove that they are still ours.
    pub owners: Vec<AssignmentId>,
}

impl TransactionBatch {
    /// Outputs of about so many bytes fit into a turn, which has to be written before its transaction times out.
    pub const BYTES: usize = 32 << 20;

    pub(crate) fn clear(&mut self) {
        self.outputs.clear();
        self.completed.clear();
        self.owners.clear();
    }
}

/// An output of a turn that its topic does not take, whatever is tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Where it stands among the outputs of the turn.
    pub index: usize,
    /// What is wrong with it.
    pub failure: Failure,
}

/// The service's part of a lane. All calls come from the lane's thread and must not block.
pub trait Processor {
    /// A partition is ours from now on, read from its committed offset.
    fn assigned(&mut self, assignment: AssignmentId, topic: &Arc<str>, partition: i32);

    /// Everything about this assignment must be forgotten: the partition has moved, or the lane reads it
    /// again from its committed offset under a new id.
    fn revoked(&mut self, assignment: AssignmentId);

    /// How many more records of this assignment are welcome now.
    fn capacity(&self, assignment: AssignmentId) -> usize;

    /// Takes a record. It stays incomplete until it is handed over in a [`TransactionBatch`].
    fn accept(&mut self, assignment: AssignmentId, record: Record, now: Timestamp);

    /// All records of a round have been accepted.
    fn accepted_all(&mut self) {}

    /// Hands over what is finished, about `limit` records at most.
    fn finish(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch);

    /// The turn that is going to be committed has written into this partition of the lane's changelog up
    /// to `end`, the offset behind its last record. Called before [`Processor::committed`].
    fn changelog_written(&mut self, _partition: i32, _end: i64) {}

    /// Some outputs of the turn cannot be written, in the order of their places; nothing of the turn has been. Puts
    /// something in their place, so that the turn can be written as it is then; false when it cannot.
    fn refused(&mut self, _refused: &[Refused], _turn: &mut TransactionBatch, _now: Timestamp) -> bool {
        false
    }

    /// The turn has been committed at this time.
    fn committed(&mut self, now: Timestamp);

    /// The turn was lost; its records will be accepted again.
    fn aborted(&mut self) {}

    /// When there will be something to finish even if nothing else happens.
    fn next_due(&self) -> Option<Timestamp>;

    /// Whether work is under way that should be finished before the lane stops.
    fn is_busy(&self) -> bool;

    /// The lane is going to stop: nothing more will be accepted.
    fn stopping(&mut self) {}
}

/// Wakes a lane's thread from any other thread.
#[derive(Clone, Debug, Default)]
pub struct Waker(Arc<OnceLock<Thread>>);

impl Waker {
    /// A waker for a lane that has not started yet; waking is without effect until then.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the lane look for finished work. Never lost: a lane that is busy looks again before it waits.
    pub fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }

    pub(crate) fn attach_current_thread(&self) {
        // A lane that restarts stays on its thread, so a second attachment is the same one.
        let _ = self.0.set(std::thread::current());
    }
}
