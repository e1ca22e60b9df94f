//! The interface between a lane and a service: a processor accepts records and finishes them later, in any order.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use redeliver_core::{Failure, Output, Record, Timestamp};
use redeliver_kafka_ffi::TopicId;

/// One assignment of a partition to a lane. A partition that is assigned or read again gets a new id, so that a late
/// result for an earlier assignment never matches a record of the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssignmentId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl AssignmentId {
    /// An id for tests of a processor without a lane.
    #[must_use]
    pub const fn for_tests(slot: u32, generation: u32) -> Self {
        Self { slot, generation }
    }
}

/// What one transaction writes: outputs, and the records that they complete.
#[derive(Debug, Default)]
pub struct TransactionBatch {
    /// The records to produce.
    pub outputs: Vec<Output>,
    /// The assignment and offset of each completed record.
    pub completed: Vec<(AssignmentId, i64)>,
    /// Assignments on whose behalf something is written although none of their records is completed. Their position is
    /// committed again, because only offsets in a transaction prove to the broker that the lane still owns the partition.
    pub owners: Vec<AssignmentId>,
    /// What is written about where the outputs are.
    pub follow_up: Option<FollowUp>,
}

/// The partition and offset at which an output was written; `None` if the broker does not tell, because it recognised a repeated request.
pub type Delivered = Option<(i32, i64)>;

/// Writes more records in the transaction of a batch, once the positions of its outputs are known. Written with the next transaction, the positions
/// of the last one before a crash would be lost.
///
/// The function gets the positions in the order of [`TransactionBatch::outputs`]. It runs on the thread that writes, must not block, and is called again if the
/// transaction is repeated: then the records are at other positions.
#[derive(Clone)]
pub struct FollowUp(Arc<WriteMore>);

type WriteMore = dyn Fn(&[Delivered]) -> Vec<Output> + Send + Sync;

impl FollowUp {
    /// A follow-up of this function.
    pub fn new(write: impl Fn(&[Delivered]) -> Vec<Output> + Send + Sync + 'static) -> Self {
        Self(Arc::new(write))
    }

    /// What to write, given the positions of the outputs.
    #[must_use]
    pub fn outputs(&self, delivered: &[Delivered]) -> Vec<Output> {
        (self.0)(delivered)
    }
}

impl fmt::Debug for FollowUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FollowUp")
    }
}

impl TransactionBatch {
    /// The approximate maximum size of all outputs, in bytes. A larger batch might not be written before its transaction
    /// times out.
    pub const BYTES: usize = 32 << 20;

    pub(crate) fn clear(&mut self) {
        self.outputs.clear();
        self.completed.clear();
        self.owners.clear();
        self.follow_up = None;
    }
}

/// An output that its topic refuses permanently, or to whose topic the process may not write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its index in [`TransactionBatch::outputs`].
    pub index: usize,
    /// Why it was refused.
    pub failure: Failure,
}

/// The service's part of a lane. All calls come from the lane's thread and must not block.
pub trait Processor {
    /// The lane owns this partition now and reads it from its committed offset.
    fn assigned(&mut self, assignment: AssignmentId, topic: &Arc<str>, partition: i32);

    /// The lane reads the partition of this assignment from this offset on. Called after [`Processor::assigned`].
    fn starts_at(&mut self, _assignment: AssignmentId, _offset: i64) {}

    /// Some records before this offset may be completed, and are not read again; none from it on. Called after [`Processor::starts_at`].
    fn completed_to(&mut self, _assignment: AssignmentId, _offset: i64) {}

    /// The topic of this assignment; `None` if it is not known. A topic that was created again has another id, and its partitions other
    /// assignments. Called after [`Processor::assigned`].
    fn reads_topic(&mut self, _assignment: AssignmentId, _topic: Option<TopicId>) {}

    /// Drops all state of this assignment: the partition was revoked, or the lane reads it again from its committed offset
    /// under a new id.
    fn revoked(&mut self, assignment: AssignmentId);

    /// How many more records of this assignment the processor accepts now.
    fn capacity(&self, assignment: AssignmentId) -> usize;

    /// Accepts a record. It stays in flight until a [`TransactionBatch`] completes it. The batch of the last call of
    /// [`Processor::finish`] may be being written. `now` is the latest time that may be the current one, see
    /// [`Clock::possible`](redeliver_core::Clock::possible).
    fn accept(&mut self, assignment: AssignmentId, record: Record, now: Timestamp);

    /// The lane has reached the end of the partition of this assignment: every record before this offset that it will ever read
    /// was passed to [`Processor::accept`]. Offsets before it that were not are those of transaction markers, for example.
    fn reached_end(&mut self, _assignment: AssignmentId, _offset: i64) {}

    /// All records of this round have been accepted.
    fn accepted_all(&mut self) {}

    /// Adds finished records to the batch, about `limit` at most.
    fn finish(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch);

    /// The committed batch wrote to this partition of the lane's changelog; `end` is the offset after its last record
    /// there, or negative if the broker has not told it. Called before [`Processor::committed`].
    ///
    /// # Errors
    /// Why the changelog cannot end there. After [`Processor::committed`], the lane begins a new session, and reads all partitions again from their committed
    /// offsets.
    fn changelog_written(&mut self, _partition: i32, _end: i64) -> Result<(), String> {
        Ok(())
    }

    /// Topics refused these outputs, in ascending order of their index, and the transaction was aborted. Replaces them in
    /// the batch and returns true if the batch can be written again.
    fn refused(&mut self, _refused: &[Refused], _batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        false
    }

    /// This process may not write to the topics of these outputs, in ascending order of their index, and the transaction was aborted.
    /// Replaces them in the batch and returns true if the batch can be written again. Otherwise the lane calls [`Processor::take_back`], or drops the batch, and
    /// [`TopicWatch::presence`](crate::TopicWatch::presence) reports the topics as unwritable.
    fn denied(&mut self, _denied: &[Refused], _batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        false
    }

    /// Whether a batch whose transaction was aborted should not be written again as it is, because of records that were accepted since. The lane then calls
    /// [`Processor::take_back`].
    fn is_outdated(&self, _batch: &TransactionBatch) -> bool {
        false
    }

    /// Takes back everything of a batch whose transaction was aborted, so that [`Processor::finish`] returns its records
    /// again, perhaps fewer at a time. Returns false if the processor cannot; the lane then writes the same batch again, or
    /// drops it.
    fn take_back(&mut self, _batch: &mut TransactionBatch) -> bool {
        false
    }

    /// The batch was committed.
    fn committed(&mut self, now: Timestamp);

    /// The batch was dropped. All assignments are or will be revoked, and their records accepted again under new ids.
    fn aborted(&mut self) {}

    /// When there will be something to finish, even if nothing else happens.
    fn next_due(&self) -> Option<Timestamp>;

    /// Whether there is work that should be finished before the lane stops.
    fn is_busy(&self) -> bool;

    /// The lane is about to stop, or to replace its clients, and will not call [`Processor::accept`] before
    /// [`Processor::starting`].
    fn stopping(&mut self) {}

    /// The lane begins, or begins again after [`Processor::stopping`].
    fn starting(&mut self) {}
}

/// Wakes a lane's thread from any other thread.
#[derive(Clone, Debug, Default)]
pub struct Waker(Arc<OnceLock<Thread>>);

impl Waker {
    /// A waker for a lane that has not started yet. Until then it has no effect.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the lane look for finished work. No call is lost: a busy lane looks again before it waits.
    pub fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }

    pub(crate) fn attach_current_thread(&self) {
        // A lane that restarts stays on its thread, so a second call would set the same value.
        let _ = self.0.set(std::thread::current());
    }
}
