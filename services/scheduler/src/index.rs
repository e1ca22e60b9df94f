//! The index: the scheduled jobs by flow and due time, and the jobs that ended recently. It is a copy of the state topic that
//! can be queried, and can be deleted at any time.
//!
//! Each [`Flow`] has a due set of its own. A scan reads from all flows that are due, so a burst in one flow hides no job of
//! another flow. A flow without scheduled jobs does not exist in the index and costs nothing.
//!
//! The index has the payloads of waiting jobs: to read them from the state topic by offset takes 114 us of processor time per record, too
//! slow for a burst (BENCHMARKS.md). It has few ended jobs: all of a day at 1,000/s would be 24 GB.
//!
//! A shard of the index contains the jobs of one partition and a [`Checkpoint`]. A change and the checkpoint are applied in
//! one step. Every query returns the checkpoint's offset ([`Applied`]) with its result. So a caller detects an index that
//! went back in time, by a failover or a restored dump, and brings it up to date from the topic.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::TopicId;
use sha2::{Digest as _, Sha256};

use crate::job::{self, Flow, Job, JobId, KeyHash};
use crate::schedule_key;

mod flow_key;
pub mod memory;
mod paging;
pub mod redis;

/// The format of the index that this version writes and reads. An index of another format is cleared and rebuilt from the state topic.
///
/// It is the sum of the version of the layout and of [`job::FORMAT`], because an index contains records of jobs. Neither is ever lowered.
pub const FORMAT: u32 = 3 + job::FORMAT;

/// How long an ended job has a record, however many others end. Clients repeat a command whose answer they did not get, and get a job
/// whose command was pending. The API gives up after 10 seconds, and this leaves time for five further attempts.
pub const MIN_KEPT: Duration = Duration::from_secs(60);

/// Whether a job that ended at `ended` can lose its record at `now`. An end in the future, after the clock was put back, must not
/// hold up all others.
fn is_evictable(ended: Timestamp, now: Timestamp) -> bool {
    ended.as_millis().abs_diff(now.as_millis()) >= min_kept_millis()
}

fn min_kept_millis() -> u64 {
    u64::try_from(MIN_KEPT.as_millis()).unwrap_or(u64::MAX)
}

/// How far the index contains the state topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The offset up to which all records are applied; the next one to apply.
    pub offset: i64,
    /// When the index was last known to contain all records, by the clock of the process that knew it: when the offset was
    /// set, or renewed later.
    pub at: Timestamp,
}

/// The digest of the last applied record. It identifies the state topic: another topic of the same name does not have this
/// record at this offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRecordDigest {
    /// The offset of the record.
    pub offset: i64,
    /// The first 16 bytes of SHA-256 over key and value, each with its length.
    pub hash: [u8; 16],
}

impl LastRecordDigest {
    /// The digest of a record with this key and value.
    #[must_use]
    pub fn of(offset: i64, key: Option<&[u8]>, value: Option<&[u8]>) -> Self {
        let mut digest = Sha256::new();
        for part in [key, value] {
            // Null differs from empty: no key or value has this length.
            let length = part.map_or(u64::MAX, |part| part.len() as u64);
            digest.update(length.to_be_bytes());
            digest.update(part.unwrap_or_default());
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&digest.finalize()[..16]);
        Self { offset, hash }
    }

    /// The digest of a record.
    #[must_use]
    pub fn of_record(record: &Record) -> Self {
        Self::of(
            record.position.offset,
            record.key.as_deref(),
            record.value.as_deref(),
        )
    }
}

/// The checkpoint of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The offset up to which the index is complete.
    pub applied: Applied,
    /// The digest of the last applied record; `None` if no record was applied.
    pub last_record: Option<LastRecordDigest>,
    /// The format of the index, see [`FORMAT`]. A scheduler of another version may have written it.
    pub format: u32,
}

/// A release of long waits of a pipeline that is finished: no job of the pipeline whose command was before an offset of the ingest topic waits for a
/// due time in the future, and none ever will. That is a fact about the state topic, which the index only remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedRelease {
    /// The ingest topic.
    pub topic: TopicId,
    /// The offset.
    pub before: i64,
}

impl FinishedRelease {
    /// Whether the other release is a part of this one.
    #[must_use]
    pub fn includes(&self, other: &Self) -> bool {
        self.topic == other.topic && self.before >= other.before
    }
}

/// The token of the indexer that may change a shard: a random number, drawn at each takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub u64);

/// The topic of which an index is a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    /// The id of the Kafka cluster.
    pub cluster: String,
    /// The state topic.
    pub topic: Arc<str>,
    /// The id of the state topic; `None` if the cluster has no such ids. A topic that was created again has another one.
    pub topic_id: Option<TopicId>,
}

/// The change that a record of the state topic makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The job.
    pub id: JobId,
    /// The id of the schedule, if it is one instead of a job.
    pub schedule: Option<Arc<str>>,
    /// Its new state.
    pub effect: Effect,
}

impl Change {
    /// A change of a job.
    #[must_use]
    pub fn of_job(id: JobId, effect: Effect) -> Self {
        Self {
            id,
            schedule: None,
            effect,
        }
    }

    /// The approximate size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        match &self.effect {
            Effect::Waits { record, .. } | Effect::Ended { record, .. } => 100 + record.len(),
            Effect::Forgotten => 100,
        }
    }

    /// The digest of the record that makes this change, at this offset.
    #[must_use]
    pub fn digest(&self, offset: i64) -> LastRecordDigest {
        let value = match &self.effect {
            Effect::Waits { record, .. } | Effect::Ended { record, .. } => Some(&**record),
            Effect::Forgotten => None,
        };
        let key = match &self.schedule {
            Some(id) => schedule_key::state_key(id),
            None => self.id.to_string(),
        };
        LastRecordDigest::of(offset, Some(key.as_bytes()), value)
    }
}

/// The new state of a job in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Scheduled. This replaces any earlier state.
    Waits {
        /// The flow of the job, the same in all changes of the job.
        flow: Flow,
        /// The due time.
        due: Timestamp,
        /// The value of the state record.
        record: Bytes,
        /// The idempotency key.
        key: Option<KeyEntry>,
    },
    /// Ended. The index has no record of the job any more when too many others have ended since, but never within [`MIN_KEPT`].
    Ended {
        /// The flow of the job, the same in all changes of the job.
        flow: Flow,
        /// When the job ended.
        ended: Timestamp,
        /// When to forget the job.
        forget: Timestamp,
        /// The value of the state record.
        record: Bytes,
        /// The idempotency key.
        key: Option<KeyEntry>,
    },
    /// Deleted. The idempotency key expires on its own.
    Forgotten,
}

/// An idempotency key in use.
///
/// Each change of a job repeats the key of the job. Another job can have taken over the key meanwhile: its window had ended, or was shorter than it is now. So
/// of two uses of a key that have not expired, the one counts that was requested later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyEntry {
    /// The hash of the key and its application.
    pub hash: KeyHash,
    /// The value, see [`KeyValue`](crate::codec::KeyValue). It begins with the id of the job.
    pub value: Bytes,
    /// When the key can be used again.
    pub expires: Timestamp,
}

/// Whether the job of one value of an idempotency key was requested before that of another one. The id of a job has the time of its request in its first six bytes,
/// and the offset in its last eight. If they disagree, a clock was wrong, or the ingest topic was created again or has lost its end. Then it counts as later, so
/// that a new use is never dropped.
fn is_earlier_use(value: &[u8], other: &[u8]) -> bool {
    value.get(8..16) < other.get(8..16) && value.get(..6) <= other.get(..6)
}

/// The changes of a range of the state topic's partition, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The first offset of the range. The index must be complete up to here, or further.
    pub from: i64,
    /// The end of the range, up to which the index is complete afterwards.
    pub to: i64,
    /// The changes.
    pub changes: Vec<Change>,
    /// The digest of the last record of the range; `None` if it is unknown, or if the range contains no record.
    pub last_record: Option<LastRecordDigest>,
    /// Whether to apply the batch even if the index is full.
    pub force: bool,
}

impl Batch {
    /// An empty batch that renews the time of the checkpoint at this offset: the index is still complete.
    #[must_use]
    pub fn renewal(offset: i64) -> Self {
        Self {
            from: offset,
            to: offset,
            ..Self::default()
        }
    }

    /// The jobs that have ended after the batch, with their ends, in the order of their last changes.
    fn ends(&self) -> Vec<(JobId, Timestamp)> {
        let mut known = HashSet::new();
        let last = self.changes.iter().rev().filter(|change| known.insert(change.id));
        let mut ends: Vec<_> = last
            .filter_map(|change| match change.effect {
                Effect::Ended { ended, .. } => Some((change.id, ended)),
                Effect::Waits { .. } | Effect::Forgotten => None,
            })
            .collect();
        ends.reverse();
        ends
    }

    /// Whether the batch only renews the time of the checkpoint at this offset.
    pub(crate) fn is_renewal_at(&self, offset: i64) -> bool {
        self.from == offset && self.to == offset
    }
}

/// How much of an index's memory is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPressure {
    /// Below the high-water mark, or unknown.
    #[default]
    Low,
    /// At or above the high-water mark.
    High,
    /// At or above the limit.
    Full,
}

/// The memory usage of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// The level, which decides which new jobs are accepted.
    pub pressure: MemoryPressure,
    /// The share of the limit in use, 1.0 for all of it; `None` if there is no limit, or if it is unknown.
    pub share: Option<f64>,
}

/// A key to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The state record of a job.
    Job(JobId),
    /// The value of an idempotency key, unless it has expired.
    Key(KeyHash),
}

/// A position in the order of due times, then of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// The due time.
    pub due: Timestamp,
    /// The id.
    pub id: JobId,
}

impl Cursor {
    /// The position of a job.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        Self {
            due: job.due,
            id: job.id,
        }
    }

    /// The last position with this due time.
    #[must_use]
    pub fn end_of(due: Timestamp) -> Self {
        Self {
            due,
            id: JobId::from_bytes([0xff; 16]),
        }
    }

    /// The position right before this one.
    #[must_use]
    pub fn before(self) -> Self {
        match u128::from_be_bytes(self.id.to_bytes()).checked_sub(1) {
            Some(id) => Self {
                id: JobId::from_bytes(id.to_be_bytes()),
                ..self
            },
            None => Self {
                due: Timestamp::from_millis(self.due.as_millis().saturating_sub(1)),
                id: JobId::from_bytes([0xff; 16]),
            },
        }
    }
}

/// A scheduled job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its position in the order of due times.
    pub cursor: Cursor,
    /// The value of the state record.
    pub record: Bytes,
}

/// Which jobs to read in a scan of all flows.
///
/// The scan takes one flow after the other, and reads of each flow all jobs that its position allows, until a limit of the
/// whole scan is reached. The flows are in the order of the due times of their first jobs, and `rotation` chooses the flow
/// with which the scan begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanRequest {
    /// Only jobs that are due at or before this time.
    pub until: Timestamp,
    /// The current time, up to which due jobs are counted.
    pub now: Timestamp,
    /// Flows that are not in `positions` are read after this position; `None`: from their first job.
    pub after: Option<Cursor>,
    /// The maximum number of jobs of each flow that is not in `positions`. With 0, these flows are only counted.
    pub jobs_per_flow: usize,
    /// Flows that are read differently; each at most once. A flow that has no due job is ignored.
    pub positions: Vec<(Flow, FlowPosition)>,
    /// The maximum number of jobs in all.
    pub jobs: usize,
    /// About the maximum number of bytes of records in all: once the records have this many bytes, no further one is read.
    /// One job is read even if it is larger, or if this is 0.
    pub bytes: usize,
    /// The number of the flow with which the scan begins, modulo the number of flows of the result. After the last flow, the
    /// scan continues with the first one. If the limits cut scans off, other numbers reach other flows: of one snapshot with
    /// `n` flows, `n` consecutive numbers begin with each of them.
    pub rotation: usize,
}

/// What a scan reads of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowPosition {
    /// At most `jobs` jobs after this position (`None`: from the first) that are due at or before `until`.
    After {
        /// The position. No job needs to be there.
        cursor: Option<Cursor>,
        /// The latest due time. A later one than that of the request has no effect.
        until: Timestamp,
        /// The maximum number of jobs.
        jobs: usize,
    },
    /// Nothing: its due jobs are only counted.
    CountOnly,
}

/// The result of a scan, with the records of jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan<R = Row> {
    /// How far the index contains the state topic.
    pub applied: Option<Applied>,
    /// All flows with a job that is due at or before `until` of the request, in the order in which they were read. That
    /// includes flows of which no job is read, because of their position or of the limits.
    pub flows: Vec<FlowScan<R>>,
}

impl<R> Default for Scan<R> {
    /// What a scan finds in a shard without a checkpoint.
    fn default() -> Self {
        Self {
            applied: None,
            flows: Vec::new(),
        }
    }
}

/// What a scan has found in a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowScan<R = Row> {
    /// The flow.
    pub flow: Flow,
    /// The due time of its first job in the index, whether or not that job is after the position.
    pub first: Timestamp,
    /// The number of its jobs in the index that are due at or before `now` of the request, whether or not they are after the
    /// position.
    pub due: u64,
    /// Its jobs after the position, in the order of their cursors.
    pub rows: Vec<R>,
    /// Whether the rows are all of its jobs after the position, up to the latest due time. Otherwise, continue with a scan after the
    /// last row, or from the same position if there is no row. False for [`FlowPosition::CountOnly`].
    pub is_complete: bool,
}

/// Which scheduled jobs to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListRequest<'a> {
    /// Only jobs of this application, or long waits of this pipeline; `None`: all jobs.
    pub app: Option<&'a str>,
    /// Only jobs after this position; `None`: from the first. No job needs to be there.
    pub after: Option<Cursor>,
    /// Only jobs that are due at or after this time; `None`: from the first.
    pub from: Option<Timestamp>,
    /// Only jobs that are due at or before this time.
    pub until: Timestamp,
    /// The maximum number of jobs.
    pub limit: usize,
    /// About the maximum number of bytes of records. One job is read even if it is larger.
    pub bytes: usize,
}

/// A page of the scheduled jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// How far the index contains the state topic; `None`: it has no checkpoint, and the page is empty.
    pub applied: Option<Applied>,
    /// The jobs in the order of their cursors. At least one, unless there is none or the limit is 0.
    pub rows: Vec<Row>,
    /// Whether the rows are all requested jobs. Otherwise, continue after the last row. The page can have fewer rows than the
    /// limit even if it is not complete.
    pub is_complete: bool,
}

/// The number of scheduled jobs of a shard, of one or all applications, by due time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// How far the index contains the state topic; `None`: it has no checkpoint, and the numbers are 0.
    pub applied: Option<Applied>,
    /// All scheduled jobs.
    pub scheduled: u64,
    /// Those that are due.
    pub due: u64,
    /// The earliest due time.
    pub next_due: Option<Timestamp>,
    /// Those that become due in each of the next minutes.
    pub per_minute: Vec<u64>,
}

/// Whether the entries of a flow are listed and counted for `app`; `None` stands for all applications and pipelines. A flow without
/// an application does not contain jobs, so it is only listed and counted for the empty name.
fn is_requested(flow: &Flow, app: Option<&str>) -> bool {
    match app {
        Some(app) => *flow.app == *app,
        None => !flow.app.is_empty(),
    }
}

fn gap(found: Option<i64>, expected: i64) -> String {
    match found {
        Some(offset) => format!("the index is complete up to offset {offset}, not {expected}"),
        None => format!("the index has no checkpoint; expected offset {expected}"),
    }
}

/// An error of the index.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The index lacks records before the changes.
    #[error("{}", gap(*found, *expected))]
    Gap {
        /// The offset up to which the index is complete; `None` if it has no checkpoint.
        found: Option<i64>,
        /// The offset that was expected.
        expected: i64,
    },
    /// Another process has claimed the shard.
    #[error("another process has claimed the shard")]
    Fenced,
    /// The index contains something that it cannot contain, for example because it was changed from outside. Only a rebuild repairs it.
    #[error("the index is damaged: {0}")]
    Damaged(String),
    /// The index has no memory for a batch, and has applied nothing of it.
    #[error("the index is full: {0}")]
    Full(String),
    /// The index cannot be reached, or its reply is invalid.
    #[error("the index is unavailable: {0}")]
    Unavailable(String),
}

/// An index by due time. All methods can be called at any time from any thread. Consecutive calls of one caller for one shard
/// take effect in their order.
pub trait Index: Clone + Send + Sync + 'static {
    /// The index for its owner. A query fails with [`IndexError::Fenced`] once another owner has claimed the
    /// shard, and with [`IndexError::Gap`] while the index is complete only up to an offset before
    /// `expected`. Without this, any process may query, for example for an API.
    #[must_use]
    fn of_owner(&self, owner: Owner, expected: i64) -> Self;

    /// The id of the state topic whose copy this is; `None` if it is unknown.
    fn state_topic_id(&self) -> Option<TopicId> {
        None
    }

    /// Makes `owner` the owner of the shard, and returns the checkpoint, if there is one.
    fn claim(
        &self,
        shard: i32,
        owner: Owner,
    ) -> impl Future<Output = Result<Option<Checkpoint>, IndexError>> + Send;

    /// Deletes the shard's content, including idempotency keys and the checkpoint. Afterwards [`Index::apply`] accepts a batch
    /// that starts at any offset. A shard without an owner, because the index lost it, is claimed for `owner`.
    fn clear(&self, shard: i32, owner: Owner) -> impl Future<Output = Result<(), IndexError>> + Send;

    /// Applies changes and moves the checkpoint to the end of the batch, in one step. If the checkpoint is there already, or
    /// further, nothing happens, except that a [renewal](Batch::renewal) moves its time. If it is within the batch, the whole batch is applied. That has the same result as applying
    /// the rest, because the last record of a job counts.
    ///
    /// An idempotency key that has expired by `now` is not added: another job may have used the key since. Nor is one that a job uses that was requested later.
    ///
    /// A full index refuses the whole batch unless it is forced, including the changes that would free memory.
    ///
    /// A shard without a checkpoint accepts a batch only directly after [`Index::clear`] by the same owner. Otherwise it has
    /// lost its content, which is a gap.
    fn apply(
        &self,
        shard: i32,
        owner: Owner,
        batch: &Batch,
        now: Timestamp,
    ) -> impl Future<Output = Result<(), IndexError>> + Send;

    /// Looks up several keys in one snapshot. The results are in the order of the keys. Of the ended jobs, only those that ended within [`MIN_KEPT`]
    /// and a limited number of others that ended last are found.
    fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> impl Future<Output = Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError>> + Send;

    /// Reads the next jobs of all flows, and counts their due jobs, in one snapshot.
    fn scan(
        &self,
        shard: i32,
        request: &ScanRequest,
    ) -> impl Future<Output = Result<Scan, IndexError>> + Send;

    /// Lists scheduled jobs of one application or of all in the order of their cursors, for example for the pages of an API. Flows
    /// without an application are not listed: their entries are not jobs.
    ///
    /// This takes one or more scans: usually two for an application, and one or two for all. So it is not a
    /// snapshot: of the jobs that change during the call, it returns some states from before and some from
    /// after it.
    fn list(
        &self,
        shard: i32,
        request: &ListRequest<'_>,
    ) -> impl Future<Output = Result<Page, IndexError>> + Send {
        paging::list(self, shard, request)
    }

    /// How much of the release of a pipeline's long waits is finished, as [`Index::finish_release`] was told last. An index that was cleared since has
    /// forgotten it.
    fn finished_release(
        &self,
        shard: i32,
        pipeline: &str,
    ) -> impl Future<Output = Result<(Option<Applied>, Option<FinishedRelease>), IndexError>> + Send;

    /// Remembers that this is finished, also in a full index. Call it only once the state topic contains what has finished it.
    fn finish_release(
        &self,
        shard: i32,
        owner: Owner,
        pipeline: &str,
        finished: &FinishedRelease,
    ) -> impl Future<Output = Result<(), IndexError>> + Send;

    /// Ended jobs whose retention is over at `now`. Jobs that are not found any more can follow some minutes after their time. A job is
    /// returned again until it is forgotten.
    fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> impl Future<Output = Result<(Option<Applied>, Vec<JobId>), IndexError>> + Send;

    /// The approximate number of idempotency keys in use at `now`. Keys that have just expired may count.
    fn known_keys(&self, shard: i32, now: Timestamp) -> impl Future<Output = Result<u64, IndexError>> + Send;

    /// The memory usage at the last check.
    fn usage(&self) -> Usage {
        Usage::default()
    }

    /// The number of scheduled jobs of one application or of all: in total, and for each of `minutes` minutes from `now` on. The
    /// entries of flows without an application are not counted.
    ///
    /// The counts are those of one snapshot only for each flow.
    fn stats(
        &self,
        shard: i32,
        app: Option<&str>,
        now: Timestamp,
        minutes: u32,
    ) -> impl Future<Output = Result<ShardStats, IndexError>> + Send;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_jobs_are_evictable_after_minute() {
        let now = Timestamp::from_millis(1_000_000);
        for (ended, expected) in [
            (0, true),
            (940_000, true),
            (940_001, false),
            (1_000_000, false),
            (1_059_999, false),
            (1_060_000, true),
        ] {
            assert_eq!(
                is_evictable(Timestamp::from_millis(ended), now),
                expected,
                "{ended}"
            );
        }
    }

    #[test]
    fn newest_use_survives_lower_offsets() {
        let value = |at, offset| JobId::new(Timestamp::from_millis(at), 0, offset).to_bytes();
        for (job, other, expected) in [
            ((1_000, 1), (2_000, 2), true),
            ((1_000, 1), (1_000, 2), true),
            ((2_000, 2), (1_000, 1), false),
            // The ingest topic was created again.
            ((2_000, 1), (1_000, 1_000_000), false),
            // A clock was set back.
            ((1_000, 2), (2_000, 1), false),
        ] {
            let (job, other) = (value(job.0, job.1), value(other.0, other.1));
            assert_eq!(is_earlier_use(&job, &other), expected, "{job:?} {other:?}");
        }
    }
}
