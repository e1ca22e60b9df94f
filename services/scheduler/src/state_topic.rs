//! Records of the state topic as a takeover reads them. A record that is not understood is never skipped: whoever
//! skipped it would act on a part of the truth, and move the index past what a newer scheduler wrote.
//!
//! What is not understood counts no longer once a later record under the same key has taken its place, such as the
//! tombstone by which an operator removes a damaged record, or a newer scheduler its own.

use std::collections::HashMap;

use bytes::Bytes;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Position, Record};

use crate::codec::{self, CodecError, RetentionPolicy};
use crate::index::{Change, Effect};
use crate::job::JobId;

/// A record that this version does not understand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotUnderstood {
    /// Another kind than a job.
    #[error(
        "a newer version of the scheduler is needed: {position} is a record of kind `{kind}`, which this version does \
         not know"
    )]
    UnknownKind { position: Position, kind: String },
    /// A job in a later format.
    #[error(
        "a newer version of the scheduler is needed: {position} is a job that this version does not know: {found}"
    )]
    NewerFormat { position: Position, found: String },
    /// Nothing that a scheduler writes.
    #[error(
        "{position} under the key `{key}` is damaged, or no scheduler wrote it ({problem}): write a sound record, or one \
         without a value, under this key to this partition"
    )]
    Damaged {
        position: Position,
        key: String,
        problem: String,
    },
}

impl NotUnderstood {
    fn position(&self) -> &Position {
        match self {
            Self::UnknownKind { position, .. }
            | Self::NewerFormat { position, .. }
            | Self::Damaged { position, .. } => position,
        }
    }
}

/// What a record changes in the index; nothing when it removes what was never a job.
pub(crate) fn read(record: &Record, memory: RetentionPolicy) -> Result<Option<Change>, NotUnderstood> {
    let position = || record.position.clone();
    let text = record.key.as_deref().map(std::str::from_utf8);
    let damaged = |problem: String| NotUnderstood::Damaged {
        position: position(),
        key: bounded_text(
            &String::from_utf8_lossy(record.key.as_deref().unwrap_or_default()),
            60,
        ),
        problem,
    };
    let Some(Ok(key)) = text else {
        return match &record.value {
            Some(_) => Err(damaged("its key is no text".to_owned())),
            None => Ok(None),
        };
    };
    let Ok(id) = key.parse::<JobId>() else {
        return match (kind_of(key), &record.value) {
            // Even its removal: the index of a newer scheduler may show it.
            (Some(kind), _) => Err(NotUnderstood::UnknownKind {
                position: position(),
                kind: kind.to_owned(),
            }),
            (None, Some(_)) => Err(damaged("its key is no job's id".to_owned())),
            (None, None) => Ok(None),
        };
    };
    let Some(value) = &record.value else {
        let effect = Effect::Forgotten;
        return Ok(Some(Change { id, effect }));
    };
    match codec::decode(id, value) {
        Ok(job) => Ok(Some(codec::change(&job, value.clone(), memory))),
        Err(CodecError::Newer(found)) => Err(NotUnderstood::NewerFormat {
            position: position(),
            found,
        }),
        Err(error) => Err(damaged(error.to_string())),
    }
}

/// Keys of other kinds than jobs are `<kind>:<name>`.
fn kind_of(key: &str) -> Option<&str> {
    let (kind, _) = key.split_once(':')?;
    let is_sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_kind = kind.starts_with(|first: char| first.is_ascii_lowercase()) && kind.bytes().all(is_sound);
    (is_kind && kind.len() <= 60).then_some(kind)
}

/// The most keys of which it is known that they are not understood. With more of them, none is taken for superseded.
const MOST: usize = 10_000;

/// What a pass over the state topic has not understood, and what of it still holds.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    holds: HashMap<Option<Bytes>, NotUnderstood>,
    has_met: bool,
}

impl Unread {
    /// Whether there was anything; from there on nothing may be applied.
    pub(crate) fn has_met(&self) -> bool {
        self.has_met
    }

    /// Takes note of a record behind the first one that was not understood, or of that one.
    pub(crate) fn note(&mut self, record: &Record, read: Result<Option<Change>, NotUnderstood>) {
        let is_removed = record.value.is_none();
        match read {
            Err(problem) if !is_removed => {
                self.has_met = true;
                if self.holds.len() < MOST || self.holds.contains_key(&record.key) {
                    self.holds.insert(record.key.clone(), problem);
                }
            }
            Err(_) => {
                self.has_met = true;
                self.holds.remove(&record.key);
            }
            Ok(_) => drop(self.holds.remove(&record.key)),
        }
    }

    /// The first record that holds and is not understood, and how many others there are.
    pub(crate) fn first(&self) -> Option<(&NotUnderstood, usize)> {
        let first = self.holds.values().min_by_key(|found| found.position().offset)?;
        Some((first, self.holds.len() - 1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redeliver_core::{Headers, Timestamp};
    use redeliver_proto::{Message as _, v1};

    use super::*;

    const MEMORY: RetentionPolicy = RetentionPolicy {
        keys: Duration::ZERO,
        ended: Duration::ZERO,
    };

    fn record(offset: i64, key: &str, value: Option<Bytes>) -> Record {
        Record {
            position: Position {
                topic: "state".into(),
                partition: 2,
                offset,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            headers: Headers::new(),
            unreadable_headers: 0,
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

    fn said(key: &str, value: Option<Bytes>) -> String {
        match read(&record(7, key, value), MEMORY) {
            Ok(change) => format!("{:?}", change.map(|change| change.id.to_string())),
            Err(problem) => problem.to_string(),
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let id = JobId::new(Timestamp::from_millis(0), 2, 1).to_string();
        let newer = "a newer version of the scheduler is needed: state-2@7 is a";
        let known = format!("Some({id:?})");
        assert_eq!(said(&id, job(|_| {})), known);
        assert_eq!(said(&id, None), known);
        for later in [
            job(|job| job.format = 1),
            job(|job| job.state = 99),
            job(|job| job.priority = 99),
        ] {
            let said = said(&id, later);
            assert!(said.starts_with(&format!("{newer} job")), "{said}");
        }
        for value in [job(|_| {}), None] {
            let said = said("schedule:nightly", value);
            assert!(
                said.starts_with(&format!("{newer} record of kind `schedule`")),
                "{said}"
            );
        }
        for (key, value) in [
            (id.as_str(), Some(Bytes::from_static(b"\xff\xff"))),
            (id.as_str(), job(|job| job.state = 0)),
            ("no id", job(|_| {})),
            ("No:kind", job(|_| {})),
        ] {
            let said = said(key, value);
            let start = format!("state-2@7 under the key `{key}` is damaged");
            assert!(said.starts_with(&start), "{said}");
        }
        // Of something that was never a job nothing is left.
        assert_eq!(said("no id", None), "None");
    }

    #[test]
    fn what_a_later_record_replaced_counts_no_longer() {
        let mut unread = Unread::default();
        let note = |unread: &mut Unread, offset, key, value| {
            let record = record(offset, key, value);
            let found = read(&record, MEMORY);
            unread.note(&record, found);
        };
        note(&mut unread, 1, "schedule:a", job(|_| {}));
        note(&mut unread, 2, "no id", job(|_| {}));
        note(&mut unread, 3, "schedule:b", job(|_| {}));
        note(&mut unread, 4, "schedule:a", None);
        let (first, others) = unread.first().unwrap();
        assert_eq!((first.position().offset, others), (2, 1));
        note(&mut unread, 5, "no id", None);
        note(&mut unread, 6, "schedule:b", None);
        assert!(unread.has_met() && unread.first().is_none());
    }
}
