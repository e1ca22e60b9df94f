//! A job, its progress and its state. No IO.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{HumanDuration, Timestamp};
use redeliver_proto::convert::{from_duration, from_timestamp};
use redeliver_proto::{Message as _, has_unknown_fields, v1};
use redeliver_service::identity::CallerName;
use redeliver_store::Document;

use crate::id::LetterId;
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

/// What callers want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// It is not started.
    Planned,
    /// It runs.
    Running,
    /// It is paused.
    Paused,
    /// It is cancelled for good.
    Cancelled,
}

impl Wanted {
    fn from_wire(state: v1::RedriveState) -> Option<Self> {
        match state {
            v1::RedriveState::Planned => Some(Self::Planned),
            v1::RedriveState::Running => Some(Self::Running),
            v1::RedriveState::Paused => Some(Self::Paused),
            v1::RedriveState::Cancelled => Some(Self::Cancelled),
            _ => None,
        }
    }

    /// As it is written.
    #[must_use]
    pub const fn to_wire(self) -> v1::RedriveState {
        match self {
            Self::Planned => v1::RedriveState::Planned,
            Self::Running => v1::RedriveState::Running,
            Self::Paused => v1::RedriveState::Paused,
            Self::Cancelled => v1::RedriveState::Cancelled,
        }
    }
}

/// Why a dead letter was skipped. The topic stores these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Skip {
    /// Kafka does not have the record any more.
    Gone = 16,
    /// Another record is at its position.
    Changed = 17,
    /// It was redriven meanwhile.
    Redriven = 18,
    /// It was discarded meanwhile.
    Discarded = 19,
    /// It is open, and was to be restored.
    Open = 20,
    /// Its payload was left out.
    PayloadOmitted = 21,
    /// It has headers that cannot be read, and so not be written.
    UnreadableHeaders = 22,
    /// The pipeline would reject it because of its own headers.
    InvalidHeaders = 23,
    /// Its headers name no topic.
    NoDestination = 24,
    /// The configuration does not allow the destination, or the caller who has planned the job has not seen it.
    DestinationNotAllowed = 25,
    /// The destination does not exist.
    DestinationMissing = 26,
    /// It was redriven often, and came back each time.
    TooOften = 27,
    /// The inspector that executes jobs may not write to the destination, or not see it.
    DestinationDenied = 28,
}

/// What a caller wants of all dead letters of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// The destination; empty: that of each dead letter.
    pub destination: String,
    /// Whether to redrive records that were redriven often.
    pub force: bool,
}

/// What became of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was done.
    Done,
    /// Its destination refuses the record.
    Failed,
    /// It was skipped.
    Skipped(Skip),
}

impl Outcome {
    /// As it is stored.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Done => 1,
            Self::Failed => 2,
            Self::Skipped(skip) => skip as u8,
        }
    }
}

/// A dead letter of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its id.
    pub id: LetterId,
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
    pub wanted: Wanted,
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
        if record.format > NEWEST_FORMAT {
            return Err(InvalidValue::Newer);
        }
        let redrive = record.redrive.as_ref().ok_or(InvalidValue::Malformed)?;
        if record.format != format_of(redrive) {
            return Err(InvalidValue::Malformed);
        }
        let kind = Kind::from_wire(redrive.kind()).ok_or(InvalidValue::Malformed)?;
        let wanted = Wanted::from_wire(record.wanted()).ok_or(InvalidValue::Malformed)?;
        let is_whole = record.chunks == redrive.total.div_ceil(CHUNK) && redrive.total <= MAX_ITEMS;
        if !is_whole {
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
        self.kind == Kind::Redrive && self.spec().max_returned_share < 1.0
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

/// How far a job is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The number of items that were tried.
    pub next: u32,
    /// The number of those that were done.
    pub done: u32,
    /// The number of those that failed.
    pub failed: u32,
    /// The number of those that were skipped.
    pub skipped: u32,
    /// The number of redriven records that have come back.
    pub returned: u32,
    /// When `done` has changed last.
    pub sent_at: Option<Timestamp>,
    /// `done` when the records that had come back were counted last, and all of them were known.
    pub observed: u32,
    /// The run that was auto-paused; 0: none.
    pub auto_paused_run: u32,
    /// Why.
    pub auto_pause_reason: String,
    /// `done` and `returned` at the last auto-pause.
    pub auto_paused_at: (u32, u32),
    /// Why the last attempt did nothing; empty if it did something. The executor tries again.
    pub problem: String,
}

impl Progress {
    /// Counts an item that was tried.
    pub fn count(&mut self, outcome: Outcome) {
        self.next += 1;
        match outcome {
            Outcome::Done => self.done += 1,
            Outcome::Failed => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }

    /// Progress from its record.
    ///
    /// # Errors
    /// If its numbers contradict each other.
    pub fn read(record: v1::RedriveProgress) -> Result<Self, InvalidValue> {
        let sum = [record.done, record.failed, record.skipped].map(u64::from);
        if sum.iter().sum::<u64>() != u64::from(record.next) {
            return Err(InvalidValue::Malformed);
        }
        Ok(Self {
            next: record.next,
            done: record.done,
            failed: record.failed,
            skipped: record.skipped,
            returned: record.returned,
            sent_at: record.sent_at.as_ref().and_then(from_timestamp),
            observed: record.observed,
            auto_paused_run: record.auto_paused_run,
            auto_pause_reason: record.auto_pause_reason,
            auto_paused_at: (record.auto_paused_done, record.auto_paused_returned),
            problem: record.problem,
        })
    }

    /// As it is written.
    #[must_use]
    pub fn to_record(&self) -> v1::RedriveProgress {
        v1::RedriveProgress {
            next: self.next,
            done: self.done,
            failed: self.failed,
            skipped: self.skipped,
            returned: self.returned,
            sent_at: self.sent_at.map(redeliver_proto::convert::to_timestamp),
            observed: self.observed,
            auto_paused_run: self.auto_paused_run,
            auto_pause_reason: self.auto_pause_reason.clone(),
            auto_paused_done: self.auto_paused_at.0,
            auto_paused_returned: self.auto_paused_at.1,
            problem: self.problem.clone(),
        }
    }
}

/// Whether records of a job may come back that were not counted yet.
#[must_use]
pub fn awaits_returns(job: &Job, progress: &Progress) -> bool {
    job.kind == Kind::Redrive && progress.observed != progress.done
}

/// The state of a job. It has ended once everything was tried, and it is known which records have come back.
#[must_use]
pub fn state(job: &Job, progress: &Progress) -> v1::RedriveState {
    let total = job.spec().total;
    if progress.next >= total && !awaits_returns(job, progress) {
        // Each of several results of a record can come back.
        let returned = progress.returned.min(progress.done);
        return match (
            progress.done - returned,
            progress.failed + progress.skipped + returned,
        ) {
            (_, 0) => v1::RedriveState::Succeeded,
            (0, _) => v1::RedriveState::Failed,
            _ => v1::RedriveState::PartiallySucceeded,
        };
    }
    match job.wanted {
        Wanted::Running if is_auto_paused(job, progress) => v1::RedriveState::Paused,
        wanted => wanted.to_wire(),
    }
}

/// Whether the current run of a job was auto-paused.
#[must_use]
pub fn is_auto_paused(job: &Job, progress: &Progress) -> bool {
    progress.auto_paused_run != 0 && progress.auto_paused_run == job.record.run
}

/// Whether nothing will happen to a job in this state any more.
#[must_use]
pub fn has_ended(state: v1::RedriveState) -> bool {
    matches!(
        state,
        v1::RedriveState::Succeeded
            | v1::RedriveState::PartiallySucceeded
            | v1::RedriveState::Cancelled
            | v1::RedriveState::Failed
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
                if chunk.topics.last() != Some(&item.id.topic) {
                    chunk.topics.push(item.id.topic.clone());
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
            id: LetterId {
                topic: topic.clone(),
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
            id: LetterId {
                topic: topic.to_owned(),
                partition: 0,
                offset,
            },
            content: [u8::try_from(offset % 200).unwrap(); HASH_BYTES],
        }
    }

    pub(crate) fn job(total: u32, wanted: Wanted) -> Job {
        Job::read(v1::RedriveRecord {
            revision: 2,
            run: 1,
            wanted: wanted.to_wire().into(),
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
                ..job(2, Wanted::Running).record
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
            outcomes.iter().for_each(|outcome| progress.count(*outcome));
            progress.observed = progress.done;
            assert_eq!(Progress::read(progress.to_record()), Ok(progress.clone()));
            progress
        };
        let (done, failed, skipped) = (Outcome::Done, Outcome::Failed, Outcome::Skipped(Skip::Gone));
        for (wanted, outcomes, expected) in [
            (Wanted::Planned, &[][..], v1::RedriveState::Planned),
            (Wanted::Running, &[done], v1::RedriveState::Running),
            (Wanted::Paused, &[done], v1::RedriveState::Paused),
            (Wanted::Cancelled, &[done], v1::RedriveState::Cancelled),
            (Wanted::Running, &[done, done], v1::RedriveState::Succeeded),
            // The last step was written before the pause was read.
            (Wanted::Paused, &[done, done], v1::RedriveState::Succeeded),
            (Wanted::Cancelled, &[done, done], v1::RedriveState::Succeeded),
            (
                Wanted::Running,
                &[done, failed],
                v1::RedriveState::PartiallySucceeded,
            ),
            (Wanted::Running, &[skipped, failed], v1::RedriveState::Failed),
        ] {
            assert_eq!(
                state(&job(2, wanted), &progress(outcomes)),
                expected,
                "{wanted:?} {outcomes:?}"
            );
        }
        let mut ended = progress(&[done, done]);
        for (returned, expected) in [
            (1, v1::RedriveState::PartiallySucceeded),
            (2, v1::RedriveState::Failed),
            (3, v1::RedriveState::Failed),
        ] {
            ended.returned = returned;
            assert_eq!(state(&job(2, Wanted::Running), &ended), expected, "{returned}");
        }
        // It is not known yet what has come back.
        ended.observed = 1;
        for wanted in [Wanted::Running, Wanted::Paused, Wanted::Cancelled] {
            assert_eq!(state(&job(2, wanted), &ended), wanted.to_wire());
        }
        let paused = Progress {
            auto_paused_run: 1,
            ..progress(&[done])
        };
        let mut job = job(2, Wanted::Running);
        assert_eq!(state(&job, &paused), v1::RedriveState::Paused);
        // It was resumed.
        job.record.run = 2;
        assert_eq!(state(&job, &paused), v1::RedriveState::Running);
    }

    #[test]
    fn outcomes_match_the_schema() {
        use Skip::{
            Changed, DestinationDenied, DestinationMissing, DestinationNotAllowed, Discarded, Gone,
            InvalidHeaders, NoDestination, Open, PayloadOmitted, Redriven, TooOften, UnreadableHeaders,
        };
        let name = |outcome: Outcome| {
            let wire = v1::RedriveOutcome::try_from(i32::from(outcome.number())).unwrap();
            let name = wire.as_str_name().strip_prefix("REDRIVE_OUTCOME_").unwrap();
            name.replace('_', "").to_lowercase()
        };
        assert_eq!(name(Outcome::Done), "done");
        assert_eq!(name(Outcome::Failed), "failed");
        for skip in [
            Gone,
            Changed,
            Redriven,
            Discarded,
            Open,
            PayloadOmitted,
            UnreadableHeaders,
            InvalidHeaders,
            NoDestination,
            DestinationNotAllowed,
            DestinationMissing,
            TooOften,
            DestinationDenied,
        ] {
            assert_eq!(name(Outcome::Skipped(skip)), format!("{skip:?}").to_lowercase());
        }
    }
}
