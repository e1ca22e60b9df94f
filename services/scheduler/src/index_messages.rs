//! The messages between a shard and its indexer.

use std::sync::Arc;

use crate::codec::KeyValue;
use crate::index::{Batch, Cursor, FinishedRelease, Scan, ScanRequest};
use crate::job::{Job, JobId, KeyHash};

/// What a shard requests of its indexer.
#[derive(Debug)]
pub(crate) enum IndexRequest {
    /// Apply the changes that were committed up to a turn.
    Apply { turn: u64, batch: Batch },
    /// Look up jobs and idempotency keys.
    LookUp(Vec<Query>),
    /// Read the jobs that are due next.
    Scan(ScanRequest),
    /// Read long waits that are released.
    ScanWaits(ScanRequest),
    /// Look up how much of the release of a pipeline's long waits is finished.
    FinishedRelease(Arc<str>),
    /// Remember that this is finished.
    FinishRelease(Arc<str>, FinishedRelease),
    /// List ended jobs whose retention is over.
    Forgettable,
    /// Count the waiting jobs of these applications.
    Count(Vec<Arc<str>>),
}

/// What a shard needs to know in order to decide a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// A job.
    Job(JobId),
    /// The use of an idempotency key.
    Key(KeyHash),
    /// The use of an idempotency key, and the job that uses it.
    JobOfKey(KeyHash),
}

impl Query {
    /// Whether the answer contains a job, whose record can be large.
    pub(crate) fn wants_job(self) -> bool {
        !matches!(self, Self::Key(_))
    }
}

/// What the index contains of what a query asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// The use of the idempotency key.
    pub(crate) key: Option<KeyValue>,
    /// The job or the schedule.
    pub(crate) job: Option<Arc<Job>>,
}

impl Found {
    /// The approximate size of the job in memory.
    pub(crate) fn size(&self) -> usize {
        self.job.as_ref().map_or(0, |job| job.size())
    }
}

/// A job that a scan has found.
#[derive(Clone, Debug)]
pub(crate) struct ScannedJob {
    pub(crate) cursor: Cursor,
    pub(crate) job: Arc<Job>,
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
    /// Results in the order of the queries.
    LookedUp(Vec<Found>),
    /// Jobs that are due next.
    Scanned(Scan<ScannedJob>),
    /// Long waits of a pipeline.
    ScannedWaits(Scan<ScannedJob>),
    /// How much of the release of a pipeline's long waits is finished, as far as the index remembers it.
    FinishedRelease(Option<FinishedRelease>),
    /// The index remembers what is finished.
    ReleaseFinished,
    /// Ended jobs whose retention is over.
    Forgettable(Vec<JobId>),
    /// The numbers of waiting jobs of applications.
    Counted(Vec<(Arc<str>, u64)>),
}
