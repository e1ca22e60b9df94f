//! The time index: which jobs wait, until when, and which ended lately. It is a picture of the state topic,
//! kept where it can be searched, and it can be thrown away at any moment.
//!
//! A shard of the index holds the jobs of one partition. It knows how far of the state topic's partition it
//! is a picture ([`Applied`]), and changes move that mark in one step with what they change. Whoever reads is
//! told the mark along with what was read, so that a picture of the past, after a failover or a restored
//! dump, is recognised and brought up to date from the topic.

use std::future::Future;

use bytes::Bytes;
use redeliver_core::{Record, Timestamp};
use sha2::{Digest as _, Sha256};

use crate::job::{Job, JobId, KeyHash};

pub mod memory;
pub mod redis;

/// How far a shard has followed the state topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The next offset of the state topic's partition.
    pub offset: i64,
    /// When it got there, by the clock of the process that moved it.
    pub at: Timestamp,
}

/// The last record of the state topic that a shard shows: by this a topic is told from another one of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRecordDigest {
    /// Where it stands in the partition.
    pub offset: i64,
    /// Of its key and value.
    pub hash: [u8; 16],
}

impl LastRecordDigest {
    /// Of a record with this key and value.
    #[must_use]
    pub fn of(offset: i64, key: Option<&[u8]>, value: Option<&[u8]>) -> Self {
        let mut digest = Sha256::new();
        for part in [key, value] {
            // Null is not empty, and no length is that of null.
            let length = part.map_or(u64::MAX, |part| part.len() as u64);
            digest.update(length.to_be_bytes());
            digest.update(part.unwrap_or_default());
        }
        let mut hash = [0; 16];
        hash.copy_from_slice(&digest.finalize()[..16]);
        Self { offset, hash }
    }

    /// Of a record as it was read.
    #[must_use]
    pub fn of_record(record: &Record) -> Self {
        Self::of(
            record.position.offset,
            record.key.as_deref(),
            record.value.as_deref(),
        )
    }
}

/// What a shard shows when it is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// How far it has followed the state topic.
    pub applied: Applied,
    /// By what that topic is recognised; none when nothing was ever read of it.
    pub seal: Option<LastRecordDigest>,
    /// The latest format of what it shows, see [`crate::codec::FORMAT`]: a newer scheduler may have written it.
    pub format: u32,
}

/// Who may change a shard: a random number that each takeover draws anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub u64);

/// What a record of the state topic changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The job.
    pub id: JobId,
    /// What becomes of it.
    pub effect: Effect,
}

impl Change {
    /// About how many bytes it takes.
    #[must_use]
    pub fn size(&self) -> usize {
        match &self.effect {
            Effect::Waits { record, .. } | Effect::Ended { record, .. } => 100 + record.len(),
            Effect::Forgotten => 100,
        }
    }

    /// The seal of a shard of which the record that makes this change, at this offset, is the last one.
    #[must_use]
    pub fn seal(&self, offset: i64) -> LastRecordDigest {
        let value = match &self.effect {
            Effect::Waits { record, .. } | Effect::Ended { record, .. } => Some(&**record),
            Effect::Forgotten => None,
        };
        LastRecordDigest::of(offset, Some(self.id.to_string().as_bytes()), value)
    }
}

/// What becomes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It waits, in place of whatever was known of it.
    Waits {
        /// Until then.
        due: Timestamp,
        /// The job as the state topic has it.
        record: Bytes,
        /// Its idempotency key.
        key: Option<KeyEntry>,
    },
    /// It waits no more, and is remembered for a while.
    Ended {
        /// Until then.
        forget: Timestamp,
        /// The job as the state topic has it.
        record: Bytes,
        /// Its idempotency key.
        key: Option<KeyEntry>,
    },
    /// Nothing is known of it any more. Its idempotency key is forgotten by its own time.
    Forgotten,
}

/// An idempotency key that is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyEntry {
    /// The key.
    pub hash: KeyHash,
    /// What is remembered with it.
    pub value: Bytes,
    /// Until then.
    pub expires: Timestamp,
}

/// Changes of one stretch of the state topic's partition, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The mark must be here, or further.
    pub from: i64,
    /// And is here afterwards.
    pub to: i64,
    /// What changes between.
    pub changes: Vec<Change>,
    /// The last record of the stretch; `None` when it is not known, or there is none.
    pub seal: Option<LastRecordDigest>,
    /// A full index takes it all the same.
    pub force: bool,
}

/// Whether an index can hold more jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Room {
    /// As far as is known.
    #[default]
    Enough,
    /// Its memory is used up to the high-water mark.
    Scarce,
    /// Its memory is used up.
    None,
}

/// How much of an index's memory is used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// What that means for new jobs.
    pub room: Room,
    /// 1.0 is all that it may use; `None` where there is no limit, or it cannot be seen.
    pub share: Option<f64>,
}

/// Something to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The record of a job.
    Job(JobId),
    /// The value of an idempotency key, unless it has expired.
    Key(KeyHash),
}

/// A place in the order of due times: behind this job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// Its due time.
    pub due: Timestamp,
    /// Its id.
    pub id: JobId,
}

impl Cursor {
    /// The place of a job.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        Self {
            due: job.due,
            id: job.id,
        }
    }

    /// The place before this job and behind any other that is before it.
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

/// A job that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where it stands in the order of due times.
    pub cursor: Cursor,
    /// The job as the state topic has it.
    pub record: Bytes,
}

/// The jobs that are due next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueScan {
    /// How far the shard has followed the state topic.
    pub applied: Option<Applied>,
    /// In the order of due times, then of ids.
    pub rows: Vec<Row>,
    /// Whether there is no more up to the asked time: otherwise ask again from the last row.
    pub is_complete: bool,
}

/// How many jobs of a shard wait, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// All that wait.
    pub scheduled: u64,
    /// Those whose time is over.
    pub due: u64,
    /// The time of the first one.
    pub next_due: Option<Timestamp>,
    /// Those of each of the next minutes.
    pub per_minute: Vec<u64>,
}

/// The index did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The mark is not where the changes begin: some of the past is missing.
    #[error("the index has followed the state topic to {found:?} only, not to {expected}")]
    Gap {
        /// Where the mark is; `None` when the shard is empty.
        found: Option<i64>,
        /// Where it should be.
        expected: i64,
    },
    /// Another process has claimed the shard.
    #[error("another process has claimed the shard")]
    Fenced,
    /// It has no memory for a batch, of which nothing was done.
    #[error("the memory of the index is full: {0}")]
    Full(String),
    /// It cannot be reached, or did not understand.
    #[error("the index does not answer: {0}")]
    Unavailable(String),
}

/// A time index. All methods may be called at any time from any thread; calls of one caller for one shard that
/// are made one after the other take effect in this order.
pub trait Index: Clone + Send + Sync + 'static {
    /// Makes `owner` the one who may change the shard, and says how far it has followed the state topic.
    fn claim(
        &self,
        shard: i32,
        owner: Owner,
    ) -> impl Future<Output = Result<Option<Claimed>, IndexError>> + Send;

    /// Empties the shard, of idempotency keys too. It is then at no offset; [`Index::apply`] takes a batch
    /// from any. A shard that lost its owner with everything else becomes the shard of `owner`.
    fn clear(&self, shard: i32, owner: Owner) -> impl Future<Output = Result<(), IndexError>> + Send;

    /// Applies changes and moves the mark to the batch's end in one step. When the mark is there already,
    /// or further, nothing happens; when it lies within the batch, all of it is applied, which is the same
    /// as the rest, because the newest record of a job holds.
    ///
    /// An idempotency key that has expired by `now` is not taken: another job may have it since.
    ///
    /// A full index refuses all of a batch that is not forced, also what would free memory.
    ///
    /// An empty shard takes a batch only right after [`Index::clear`] by the same owner, as otherwise it lost
    /// what it had: that is a gap.
    fn apply(
        &self,
        shard: i32,
        owner: Owner,
        batch: &Batch,
        now: Timestamp,
    ) -> impl Future<Output = Result<(), IndexError>> + Send;

    /// Looks up several things at once; the answers are in the order of the questions, and as of one moment.
    fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> impl Future<Output = Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError>> + Send;

    /// The jobs behind `after` (`None`: all) that are due at or before `until`, as of one moment; at most `limit`
    /// of them, and about `bytes` of records.
    fn ahead(
        &self,
        shard: i32,
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    ) -> impl Future<Output = Result<DueScan, IndexError>> + Send;

    /// Ended jobs that are to be forgotten by now, oldest first.
    fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> impl Future<Output = Result<(Option<Applied>, Vec<JobId>), IndexError>> + Send;

    /// How much of its memory is used, as was seen lately.
    fn usage(&self) -> Usage {
        Usage::default()
    }

    /// How many jobs wait, in all and by minute from `now` on, for so many minutes.
    fn stats(
        &self,
        shard: i32,
        now: Timestamp,
        minutes: u32,
    ) -> impl Future<Output = Result<ShardStats, IndexError>> + Send;
}
