//! The messages between a shard and its indexer.

use crate::index::{Batch, Lookup, Scan, ScanRequest};
use crate::job::JobId;
use bytes::Bytes;

/// What a shard requests of its indexer.
#[derive(Debug)]
pub(crate) enum IndexRequest {
    /// Apply the changes that were committed up to a turn.
    Apply { turn: u64, batch: Batch },
    /// Look up jobs and idempotency keys.
    LookUp(Vec<Lookup>),
    /// Read the jobs that are due next.
    Scan(ScanRequest),
    /// List ended jobs whose retention is over.
    Forgettable,
}

/// What the indexer reports to its shard.
#[derive(Debug)]
pub(crate) enum IndexResponse {
    /// The index is up to date with the state topic, which ends at `end`.
    Ready { end: i64 },
    /// The state topic contains a record that this version does not support. The shard must not act until the index
    /// is ready again.
    Halted,
    /// The index contains everything that was committed up to this turn.
    Applied {
        turn: u64,
        /// Whether the batch was forced, so that success does not prove that the index has free memory.
        forced: bool,
    },
    /// The index is full and has applied nothing of this batch.
    Full { turn: u64, batch: Batch },
    /// Results in the order of the lookups.
    LookedUp(Vec<Option<Bytes>>),
    /// Jobs that are due next.
    Scanned(Scan),
    /// Ended jobs whose retention is over.
    Forgettable(Vec<JobId>),
}
