//! A job, its progress and its state. No IO.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{HumanDuration, Position, Timestamp, redrive};
use redeliver_kafka::TopicId;
use redeliver_proto::convert::{from_duration, from_timestamp};
pub use redeliver_proto::v1::{RedriveOutcome as Outcome, RedriveProgress as Progress, RedriveState};
use redeliver_proto::{Message as _, has_unknown_fields, v1};
use redeliver_service::identity::CallerName;
use redeliver_store::Document;

use crate::ledger::State;
use crate::letter::{ContentHash, HASH_BYTES};

/// The number of items of all chunks of a plan but the last.
pub const CHUNK: u32 = 500;
/// The maximum number of dead letters of a job.
pub const MAX_ITEMS: u32 = 100_000;
/// The version of the format of a job.
const FORMAT: u32 = 0;
/// The version of the format of a job whose dead letter is edited.
pub const EDIT_FORMAT: u32 = 1;
/// The newest version of the format that this version knows.
const NEWEST_FORMAT: u32 = EDIT_FORMAT;

/// What a job does with its dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes their records again.
    Redrive,
    /// Sets them to DISCARDED.
    Discard,
    /// Sets them to OPEN.
    Restore,
}

impl Kind {
    /// The kind with this number of the schema.
    #[must_use]
    pub fn from_wire(kind: v1::RedriveKind) -> Option<Self> {
        match kind {
            v1::RedriveKind::Unspecified => None,
            v1::RedriveKind::Redrive => Some(Self::Redrive),
            v1::RedriveKind::Discard => Some(Self::Discard),
            v1::RedriveKind::Restore => Some(Self::Restore),
        }
    }

    /// The state in which it takes dead letters.
    #[must_use]
    pub const fn takes(self) -> State {
        match self {
            Self::Redrive | Self::Discard => State::Open,
            Self::Restore => State::Discarded,
        }
    }

    /// The state in which it leaves them.
    #[must_use]
    pub const fn leaves(self) -> State {
        match self {
            Self::Redrive => State::Redriven,
            Self::Discard => State::Discarded,
            Self::Restore => State::Open,
        }
    }
}

/// What a caller wants of all dead letters of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// The destination; empty: that of each dead letter.
    pub destination: String,
    /// Whether to redrive records that were redriven often.
    pub force: bool,
}

/// The number with which an outcome is stored.
#[must_use]
pub fn number(outcome: Outcome) -> u8 {
    u8::try_from(i32::from(outcome)).unwrap_or_default()
}

/// The outcome of a dead letter that is in a state in which its job does not take it.
#[must_use]
pub fn skipped_in(state: State) -> Outcome {
    match state {
        State::Open => Outcome::Open,
        State::Redriven => Outcome::Redriven,
        State::Discarded => Outcome::Discarded,
    }
}

/// A dead letter of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its id.
    pub id: Position,
    /// The hash of its content.
    pub content: ContentHash,
}

/// A job as callers have planned and changed it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// As it is written.
    pub record: v1::RedriveRecord,
    /// What it does.
    pub kind: Kind,
    /// What callers want.
    pub wanted: RedriveState,
    /// Whether a newer version has written something that this one does not know, and would drop with a change.
    pub is_newer: bool,
}

/// Why a value cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// It is not a message of its kind.
    #[error("cannot be read")]
    Malformed,
    /// A newer version has written it.
    #[error("was written by a newer version")]
    Newer,
}

/// The version of the format of a job: the oldest one whose versions execute it, and drop nothing of it.
#[must_use]
pub fn format_of(redrive: &v1::Redrive) -> u32 {
    if redrive.edited.is_empty() {
        FORMAT
    } else {
        EDIT_FORMAT
    }
}

impl Job {
    /// A job from its record.
    ///
    /// # Errors
    /// If the record is not one that this version writes.
    pub fn read(record: v1::RedriveRecord) -> Result<Self, InvalidValue> {
        use RedriveState::{Cancelled, Paused, Planned, Running};
        if record.format > NEWEST_FORMAT {
            return Err(InvalidValue::Newer);
        }
        let redrive = record.redrive.as_ref().ok_or(InvalidValue::Malformed)?;
        if record.format != format_of(redrive) {
            return Err(InvalidValue::Malformed);
        }
        let kind = Kind::from_wire(redrive.kind()).ok_or(InvalidValue::Malformed)?;
        let wanted = record.wanted();
        let is_valid = [Planned, Running, Paused, Cancelled].contains(&wanted);
        let is_whole = record.chunks == redrive.total.div_ceil(CHUNK) && redrive.total <= MAX_ITEMS;
        if !is_valid || !is_whole {
            return Err(InvalidValue::Malformed);
        }
        Ok(Self {
            record,
            kind,
            wanted,
            is_newer: false,
        })
    }

    /// What callers see of it, without its progress.
    #[must_use]
    pub fn spec(&self) -> &v1::Redrive {
        // `read` has checked that it is there.
        static NONE: std::sync::LazyLock<v1::Redrive> = std::sync::LazyLock::new(v1::Redrive::default);
        self.record.redrive.as_ref().unwrap_or(&NONE)
    }

    /// Whether its dead letter is edited.
    #[must_use]
    pub fn is_edit(&self) -> bool {
        !self.spec().edited.is_empty()
    }

    /// Who has planned it.
    #[must_use]
    pub fn author(&self) -> CallerName {
        CallerName::recorded(&self.spec().created_by)
    }

    /// What its caller wants of each dead letter.
    #[must_use]
    pub fn target_options(&self) -> TargetOptions {
        TargetOptions {
            destination: self.spec().destination.clone(),
            force: self.spec().force,
        }
    }

    /// The topics that have the payloads that share groups have not copied, with their ids when it was planned.
    #[must_use]
    pub fn origin_ids(&self) -> BTreeMap<&str, TopicId> {
        let id = |origin: &v1::RedriveOrigin| u128::from_str_radix(&origin.topic_id, 16).ok();
        let origins = self.spec().origins.iter();
        let known = origins.filter_map(|origin| Some((&*origin.topic, TopicId::from_bits(id(origin)?))));
        known.collect()
    }

    /// When it was planned.
    #[must_use]
    pub fn created_at(&self) -> Timestamp {
        let time = self.spec().created_at.as_ref().and_then(from_timestamp);
        time.unwrap_or(Timestamp::from_millis(0))
    }

    /// When it starts, if it is delayed.
    #[must_use]
    pub fn start_at(&self) -> Option<Timestamp> {
        self.spec().start_at.as_ref().and_then(from_timestamp)
    }

    /// Whether it can be auto-paused. Otherwise, a job does not depend on what comes back.
    #[must_use]
    pub fn has_auto_pause(&self) -> bool {
        self.kind == Kind::Redrive && redrive::has_auto_pause(self.spec().max_returned_share)
    }

    /// Whether it begins with [`redrive::BATCHES`].
    #[must_use]
    pub fn has_batches(&self) -> bool {
        let spec = self.spec();
        self.kind == Kind::Redrive && redrive::has_batches(spec.max_returned_share, spec.all_at_once)
    }

    /// How long it waits after a batch.
    #[must_use]
    pub fn observe(&self) -> Duration {
        let observe = self.spec().observe.as_ref().and_then(from_duration);
        observe.map(HumanDuration::duration).unwrap_or_default()
    }
}

impl Document for Job {
    type Key = String;
    type Invalid = InvalidValue;

    // It is neither shown nor executed.
    const IF_UNREADABLE: &'static str = "";

    fn parse_key(key: &str) -> Option<String> {
        let id = key.strip_prefix("job/")?;
        is_hex(id).then(|| id.to_owned())
    }

    fn record_key(id: &String) -> String {
        format!("job/{id}")
    }

    fn decode(_id: &String, value: &Bytes) -> Result<Self, InvalidValue> {
        let record = v1::RedriveRecord::decode(value.clone()).map_err(|_| InvalidValue::Malformed)?;
        let is_newer = has_unknown_fields(value, &record);
        Ok(Self {
            is_newer,
            ..Self::read(record)?
        })
    }

    fn revision(&self) -> u64 {
        self.record.revision
    }

    fn change_id(&self) -> &Bytes {
        &self.record.change_id
    }

    fn is_newer(&self) -> bool {
        self.is_newer
    }

    fn is_damaged(invalid: InvalidValue) -> bool {
        invalid == InvalidValue::Malformed
    }
}

/// Whether a text can be the id of a job of any version.
pub(super) fn is_hex(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Counts an item that was tried.
pub fn count(progress: &mut Progress, outcome: Outcome) {
    progress.next += 1;
    match outcome {
        Outcome::Done => progress.done += 1,
        Outcome::Failed => progress.failed += 1,
        _ => progress.skipped += 1,
    }
}

/// Whether the numbers of a progress do not contradict each other.
#[must_use]
pub fn is_consistent(progress: &Progress) -> bool {
    let sum = [progress.done, progress.failed, progress.skipped].map(u64::from);
    sum.iter().sum::<u64>() == u64::from(progress.next)
}

/// Whether records of a job may come back that were not counted yet.
#[must_use]
pub fn awaits_returns(job: &Job, progress: &Progress) -> bool {
    job.kind == Kind::Redrive && progress.observed != progress.done
}

/// The state of a job. It has ended once everything was tried, and it is known which records have come back.
#[must_use]
pub fn state(job: &Job, progress: &Progress) -> RedriveState {
    let total = job.spec().total;
    if progress.next >= total && !awaits_returns(job, progress) {
        // Each of several results of a record can come back.
        let returned = progress.returned.min(progress.done);
        return match (
            progress.done - returned,
            progress.failed + progress.skipped + returned,
        ) {
            (_, 0) => RedriveState::Succeeded,
            (0, _) => RedriveState::Failed,
            _ => RedriveState::PartiallySucceeded,
        };
    }
    match job.wanted {
        RedriveState::Running if is_auto_paused(job, progress) => RedriveState::Paused,
        wanted => wanted,
    }
}

/// Whether the current run of a job was auto-paused.
#[must_use]
pub fn is_auto_paused(job: &Job, progress: &Progress) -> bool {
    progress.auto_paused_run != 0 && progress.auto_paused_run == job.record.run
}

/// Whether nothing will happen to a job in this state any more.
#[must_use]
pub fn has_ended(state: RedriveState) -> bool {
    matches!(
        state,
        RedriveState::Succeeded
            | RedriveState::PartiallySucceeded
            | RedriveState::Cancelled
            | RedriveState::Failed
    )
}

/// The chunks of a plan.
#[must_use]
pub fn chunks(items: &[Item]) -> Vec<v1::RedrivePlanChunk> {
    items
        .chunks(CHUNK as usize)
        .map(|items| {
            let mut chunk = v1::RedrivePlanChunk::default();
            for item in items {
                // The items are in the order of topics, so that there are few.
                if chunk.topics.last().is_none_or(|last| **last != *item.id.topic) {
                    chunk.topics.push(item.id.topic.to_string());
                }
                chunk.items.push(v1::RedrivePlanItem {
                    topic: u32::try_from(chunk.topics.len() - 1).unwrap_or(u32::MAX),
                    partition: item.id.partition,
                    offset: item.id.offset,
                    content_hash: item.content.to_vec().into(),
                });
            }
            chunk
        })
        .collect()
}

/// The items of a chunk.
///
/// # Errors
/// If it is not one that [`chunks`] makes.
pub fn items(chunk: &v1::RedrivePlanChunk) -> Result<Vec<Item>, InvalidValue> {
    let item = |item: &v1::RedrivePlanItem| {
        let topic = chunk.topics.get(item.topic as usize);
        let is_valid = item.partition >= 0 && item.offset >= 0 && item.content_hash.len() == HASH_BYTES;
        let topic = topic.filter(|_| is_valid).ok_or(InvalidValue::Malformed)?;
        Ok(Item {
            id: Position {
                topic: topic.as_str().into(),
                partition: item.partition,
                offset: item.offset,
            },
            content: ContentHash::try_from(&*item.content_hash).map_err(|_| InvalidValue::Malformed)?,
        })
    };
    if chunk.items.len() > CHUNK as usize {
        return Err(InvalidValue::Malformed);
    }
    chunk.items.iter().map(item).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn item(topic: &str, offset: i64) -> Item {
        Item {
            id: Position {
                topic: topic.into(),
                partition: 0,
                offset,
            },
            content: [u8::try_from(offset % 200).unwrap(); HASH_BYTES],
        }
    }

    pub(crate) fn job(total: u32, wanted: RedriveState) -> Job {
        Job::read(v1::RedriveRecord {
            revision: 2,
            run: 1,
            wanted: wanted.into(),
            chunks: total.div_ceil(CHUNK),
            redrive: Some(v1::Redrive {
                id: "r1".to_owned(),
                kind: v1::RedriveKind::Redrive.into(),
                total,
                max_returned_share: 0.2,
                ..v1::Redrive::default()
            }),
            ..v1::RedriveRecord::default()
        })
        .unwrap()
    }

    #[test]
    fn newer_jobs_are_recognised() {
        let read = |format, unknown: &[u8]| {
            let record = v1::RedriveRecord {
                format,
                ..job(2, RedriveState::Running).record
            };
            let value = [&record.encode_to_vec()[..], unknown].concat();
            let read = <Job as Document>::decode(&"1f".to_owned(), &value.into())?;
            Ok(read.is_newer)
        };
        assert_eq!(read(2, &[]), Err(InvalidValue::Newer));
        // The field 1000.
        assert_eq!(read(0, &[0xc0, 0x3e, 1]), Ok(true));
        assert_eq!(read(0, &[]), Ok(false));
    }

    #[test]
    fn plan_reads_as_written() {
        let planned: Vec<Item> = (0..1_201)
            .map(|offset| item(if offset < 700 { "a-dlq" } else { "b-dlq" }, offset))
            .collect();
        let written = chunks(&planned);
        assert_eq!(
            written.iter().map(|chunk| chunk.items.len()).collect::<Vec<_>>(),
            [500, 500, 201]
        );
        let read: Vec<Item> = written.iter().flat_map(|chunk| items(chunk).unwrap()).collect();
        assert_eq!(read, planned);
        let mut broken = written[0].clone();
        broken.items[3].topic = 1;
        assert_eq!(items(&broken), Err(InvalidValue::Malformed));
    }

    #[test]
    fn state_follows_from_wish_and_progress() {
        let progress = |outcomes: &[Outcome]| {
            let mut progress = Progress::default();
            outcomes.iter().for_each(|outcome| count(&mut progress, *outcome));
            progress.observed = progress.done;
            assert!(is_consistent(&progress));
            progress
        };
        let (done, failed, skipped) = (Outcome::Done, Outcome::Failed, Outcome::Gone);
        for (wanted, outcomes, expected) in [
            (RedriveState::Planned, &[][..], RedriveState::Planned),
            (RedriveState::Running, &[done], RedriveState::Running),
            (RedriveState::Paused, &[done], RedriveState::Paused),
            (RedriveState::Cancelled, &[done], RedriveState::Cancelled),
            (RedriveState::Running, &[done, done], RedriveState::Succeeded),
            // The last step was written before the pause was read.
            (RedriveState::Paused, &[done, done], RedriveState::Succeeded),
            (RedriveState::Cancelled, &[done, done], RedriveState::Succeeded),
            (
                RedriveState::Running,
                &[done, failed],
                RedriveState::PartiallySucceeded,
            ),
            (RedriveState::Running, &[skipped, failed], RedriveState::Failed),
        ] {
            assert_eq!(
                state(&job(2, wanted), &progress(outcomes)),
                expected,
                "{wanted:?} {outcomes:?}"
            );
        }
        let mut ended = progress(&[done, done]);
        for (returned, expected) in [
            (1, RedriveState::PartiallySucceeded),
            (2, RedriveState::Failed),
            (3, RedriveState::Failed),
        ] {
            ended.returned = returned;
            assert_eq!(
                state(&job(2, RedriveState::Running), &ended),
                expected,
                "{returned}"
            );
        }
        // It is not known yet what has come back.
        ended.observed = 1;
        for wanted in [
            RedriveState::Running,
            RedriveState::Paused,
            RedriveState::Cancelled,
        ] {
            assert_eq!(state(&job(2, wanted), &ended), wanted);
        }
        let paused = Progress {
            auto_paused_run: 1,
            ..progress(&[done])
        };
        let mut job = job(2, RedriveState::Running);
        assert_eq!(state(&job, &paused), RedriveState::Paused);
        // It was resumed.
        job.record.run = 2;
        assert_eq!(state(&job, &paused), RedriveState::Running);
    }
}
