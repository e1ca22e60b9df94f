//! Reads the records of the state topic at a takeover. An unsupported record is never skipped: a shard that skipped it would
//! decide on incomplete state, and move the index past a record of a newer scheduler.
//!
//! An unsupported record no longer counts once a later record with the same key replaces it. Examples are the tombstone by
//! which an operator removes a damaged record, or by which a newer scheduler deletes its own.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Position, Record};

use crate::codec::{self, CodecError, RetentionPolicy};
use crate::index::{Change, Effect};
use crate::job::JobId;
use crate::{schedule_key, schedules};

/// A record that this version does not support.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnsupportedRecord {
    /// A record of another kind than a job or a schedule.
    #[error("record {position} has the kind `{kind}`, which requires a newer version of the scheduler")]
    UnknownKind { position: Position, kind: String },
    /// A job or a schedule in a newer format.
    #[error(
        "record {position} is a job or a schedule that requires a newer version of the scheduler: {found}"
    )]
    NewerFormat { position: Position, found: String },
    /// A record that no scheduler writes.
    #[error(
        "record {position} with the key `{key}` is damaged or not from a scheduler ({problem}); write a correct record, or \
         one without a value, with this key to this partition"
    )]
    Damaged {
        position: Position,
        key: String,
        problem: String,
    },
}

impl UnsupportedRecord {
    fn position(&self) -> &Position {
        match self {
            Self::UnknownKind { position, .. }
            | Self::NewerFormat { position, .. }
            | Self::Damaged { position, .. } => position,
        }
    }
}

/// The change of the index for a record; `None` if it is the tombstone of something that was neither a job nor a schedule.
pub(crate) fn read(record: &Record, retention: RetentionPolicy) -> Result<Option<Change>, UnsupportedRecord> {
    let position = || record.position.clone();
    let text = record.key.as_deref().map(std::str::from_utf8);
    let damaged = |problem: String| UnsupportedRecord::Damaged {
        position: position(),
        key: bounded_text(
            &String::from_utf8_lossy(record.key.as_deref().unwrap_or_default()),
            60,
        ),
        problem,
    };
    let Some(Ok(key)) = text else {
        return match &record.value {
            Some(_) => Err(damaged("its key is not UTF-8".to_owned())),
            None => Ok(None),
        };
    };
    let schedule: Option<Arc<str>> = schedule_key::id_of_key(key).map(|id| id.as_str().into());
    let id = match &schedule {
        Some(schedule) => Some(schedules::entry_id(schedule, record.position.partition)),
        None => key.parse::<JobId>().ok().filter(|id| !id.is_schedule()),
    };
    let Some(id) = id else {
        return match (kind_of(key), &record.value) {
            // Even for a tombstone: the index of a newer scheduler may contain the record.
            (Some(kind), _) => Err(UnsupportedRecord::UnknownKind {
                position: position(),
                kind: kind.to_owned(),
            }),
            (None, Some(_)) => Err(damaged("its key is not the id of a job or a schedule".to_owned())),
            (None, None) => Ok(None),
        };
    };
    let Some(value) = &record.value else {
        let effect = Effect::Forgotten;
        return Ok(Some(Change { id, schedule, effect }));
    };
    match codec::decode(id, value) {
        Ok(job) if schedule.is_some() && job.occurrence != schedule => {
            Err(damaged("it is the state of another schedule".to_owned()))
        }
        Ok(job) => Ok(Some(codec::change(&job, value.clone(), retention))),
        Err(CodecError::Newer(found)) => Err(UnsupportedRecord::NewerFormat {
            position: position(),
            found,
        }),
        Err(error) => Err(damaged(error.to_string())),
    }
}

/// The kind of a key that is not a job id, which has the form `<kind>:<name>`.
fn kind_of(key: &str) -> Option<&str> {
    let (kind, _) = key.split_once(':')?;
    let is_sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_kind = kind.starts_with(|first: char| first.is_ascii_lowercase()) && kind.bytes().all(is_sound);
    (is_kind && kind.len() <= 60).then_some(kind)
}

/// The maximum number of unsupported records to track.
const MAX_TRACKED: usize = 10_000;

/// The unsupported records of a replay, except those that later records replace.
#[derive(Debug, Default)]
pub(crate) struct UnreadRecords {
    records: HashMap<Option<Bytes>, UnsupportedRecord>,
    /// The first record beyond [`MAX_TRACKED`]. It counts until the next replay, since nothing tells whether it is replaced.
    untracked: Option<UnsupportedRecord>,
    is_any: bool,
}

impl UnreadRecords {
    /// Whether there was an unsupported record, replaced or not. No record after it may be applied.
    pub(crate) fn is_any(&self) -> bool {
        self.is_any
    }

    /// Adds the first unsupported record, or any record after it.
    pub(crate) fn note(&mut self, record: &Record, read: Result<Option<Change>, UnsupportedRecord>) {
        let is_removed = record.value.is_none();
        match read {
            Err(problem) if !is_removed => {
                self.is_any = true;
                if self.records.len() < MAX_TRACKED || self.records.contains_key(&record.key) {
                    self.records.insert(record.key.clone(), problem);
                } else {
                    self.untracked.get_or_insert(problem);
                }
            }
            Err(_) => {
                self.is_any = true;
                self.records.remove(&record.key);
            }
            Ok(_) => drop(self.records.remove(&record.key)),
        }
    }

    /// The first unsupported record that is not replaced, and the number of other tracked ones.
    pub(crate) fn first(&self) -> Option<(&UnsupportedRecord, usize)> {
        let counted = || self.records.values().chain(&self.untracked);
        let first = counted().min_by_key(|found| found.position().offset)?;
        Some((first, counted().count() - 1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redeliver_core::Timestamp;
    use redeliver_proto::{Message as _, v1};
    use redeliver_testkit::record_at;

    use super::*;
    use crate::index::LastRecordDigest;
    use crate::job::Flow;

    const RETENTION: RetentionPolicy = RetentionPolicy {
        keys: Duration::ZERO,
        ended: Duration::ZERO,
    };

    fn record(offset: i64, key: &str, value: Option<Bytes>) -> Record {
        Record {
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            ..record_at("state", 2, offset)
        }
    }

    fn job(change: impl FnOnce(&mut v1::JobRecord)) -> Option<Bytes> {
        let mut job = v1::JobRecord {
            state: v1::JobState::Scheduled.into(),
            request_hash: Bytes::from_static(&[0; 16]),
            ..v1::JobRecord::default()
        };
        change(&mut job);
        Some(job.encode_to_vec().into())
    }

    fn describe(key: &str, value: Option<Bytes>) -> String {
        match read(&record(7, key, value), RETENTION) {
            Ok(change) => format!("{:?}", change.map(|change| change.id.to_string())),
            Err(problem) => problem.to_string(),
        }
    }

    #[test]
    fn an_unsupported_record_is_named() {
        let id = JobId::new(Timestamp::from_millis(0), 2, 1).to_string();
        let newer = "requires a newer version of the scheduler";
        let known = format!("Some({id:?})");
        assert_eq!(describe(&id, job(|_| {})), known);
        assert_eq!(describe(&id, None), known);
        for later in [
            job(|job| job.format = 1),
            job(|job| job.state = 99),
            job(|job| job.priority = 99),
        ] {
            let description = describe(&id, later);
            let start = format!("record state/2/7 is a job or a schedule that {newer}");
            assert!(description.starts_with(&start), "{description}");
        }
        for value in [job(|_| {}), None] {
            let description = describe("redrive:nightly", value);
            assert_eq!(
                description,
                format!("record state/2/7 has the kind `redrive`, which {newer}")
            );
        }
        for (key, value) in [
            (id.as_str(), Some(Bytes::from_static(b"\xff\xff"))),
            (id.as_str(), job(|job| job.state = 0)),
            ("no id", job(|_| {})),
            ("No:kind", job(|_| {})),
        ] {
            let description = describe(key, value);
            let start = format!("record state/2/7 with the key `{key}` is damaged");
            assert!(description.starts_with(&start), "{description}");
        }
        // The tombstone of something that was not a job changes nothing.
        assert_eq!(describe("no id", None), "None");
    }

    #[test]
    fn schedule_has_its_own_key() {
        let spec = v1::ScheduleSpec {
            job: Some(v1::JobTemplate::default()),
            ..v1::ScheduleSpec::default()
        };
        let record_of = |id: &str| {
            let record = v1::ScheduleRecord {
                id: id.to_owned(),
                spec: Some(spec.clone()),
                next_ms: Some(7),
                ..v1::ScheduleRecord::default()
            };
            Some(Bytes::from(record.encode_to_vec()))
        };
        let value = record_of("nightly");
        let written = record(7, "schedule:nightly", value.clone());
        let change = read(&written, RETENTION).unwrap().unwrap();
        assert_eq!(change.id, schedules::entry_id("nightly", 2));
        // The digest names the topic to which a checkpoint belongs, so it must be that of the record.
        let digest = LastRecordDigest::of(7, written.key.as_deref(), written.value.as_deref());
        assert_eq!(change.digest(7), digest);
        let Effect::Waits { flow, due, .. } = change.effect else {
            panic!("a schedule waits for its next occurrence");
        };
        assert_eq!(
            (flow, due),
            (Flow::schedules().clone(), Timestamp::from_millis(7))
        );

        let deleted = record(8, "schedule:nightly", None);
        let change = read(&deleted, RETENTION).unwrap().unwrap();
        assert_eq!(change.effect, Effect::Forgotten);
        assert_eq!(
            change.digest(8),
            LastRecordDigest::of(8, deleted.key.as_deref(), None)
        );

        assert!(describe("schedule:other", value).contains("is damaged"));
        let as_job = schedules::entry_id("nightly", 2).to_string();
        assert!(describe(&as_job, record_of("nightly")).contains("is damaged"));
        assert!(describe("schedule:nightly", Some(Bytes::from_static(b"\xff"))).contains("is damaged"));
    }

    #[test]
    fn a_replaced_record_does_not_count() {
        let mut unread = UnreadRecords::default();
        let note = |unread: &mut UnreadRecords, offset, key, value| {
            let record = record(offset, key, value);
            let found = read(&record, RETENTION);
            unread.note(&record, found);
        };
        note(&mut unread, 1, "redrive:a", job(|_| {}));
        note(&mut unread, 2, "no id", job(|_| {}));
        note(&mut unread, 3, "redrive:b", job(|_| {}));
        note(&mut unread, 4, "redrive:a", None);
        let (first, others) = unread.first().unwrap();
        assert_eq!((first.position().offset, others), (2, 1));
        note(&mut unread, 5, "no id", None);
        note(&mut unread, 6, "redrive:b", None);
        assert!(unread.is_any() && unread.first().is_none());
    }

    #[test]
    fn record_beyond_the_limit_counts() {
        let mut unread = UnreadRecords::default();
        let mut note = |offset: i64, key: i64, value| {
            let record = record(offset, &format!("redrive:{key}"), value);
            let found = read(&record, RETENTION);
            unread.note(&record, found);
        };
        let limit = i64::try_from(MAX_TRACKED).unwrap();
        for key in 0..=limit {
            note(key, key, job(|_| {}));
        }
        for key in 0..limit {
            note(limit + 1 + key, key, None);
        }
        let (first, others) = unread.first().unwrap();
        assert_eq!((first.position().offset, others), (limit, 0));
    }
}
