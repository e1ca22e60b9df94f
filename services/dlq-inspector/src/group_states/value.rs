//! Values of the topic of group states.

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_proto::convert::{from_timestamp, to_timestamp};
use redeliver_proto::{Message as _, has_unknown_fields, v1};
use redeliver_store::Document;

use super::state::{Decided, Decision};
use crate::fingerprint::GroupId;

/// The prefix of keys.
const KEY: &str = "group/";
/// The newest format that this version knows.
const FORMAT: u32 = 0;
/// The maximum size of a value, in bytes. What this version writes is smaller.
const MAX_VALUE: usize = 16 << 10;

/// What is known about a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Value {
    /// Increases by 1 with each change.
    pub revision: u64,
    /// Different for each change.
    pub change_id: Bytes,
    /// `None` if the state was never changed.
    pub decision: Option<Decision>,
    /// `None` if there is none.
    pub note: Option<Note>,
    /// Whether a newer version has written it, which may say more.
    pub is_newer: bool,
}

/// A text for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The text.
    pub text: String,
    /// When it was written; `None` if that is not readable.
    pub time: Option<Timestamp>,
    /// The name of the caller.
    pub by: String,
}

/// Why a value cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// It is not a `redeliver.v1.GroupRecord`.
    #[error("is not a redeliver.v1.GroupRecord")]
    Malformed,
    /// The state is unknown, or a newer version has written it.
    #[error("has an unknown state")]
    State,
    /// The time of the decision is missing or out of range.
    #[error("has a decision without a valid time")]
    Time,
}

impl Value {
    /// When it was changed last, or changes by itself.
    #[must_use]
    pub fn last_time(&self) -> Option<Timestamp> {
        let decision = self.decision.as_ref();
        let until = decision.and_then(|decision| match decision.decided {
            Decided::Muted(until) => until,
            Decided::Open | Decided::Resolved => None,
        });
        let note = self.note.as_ref().and_then(|note| note.time);
        decision.map(|decision| decision.time).max(until).max(note)
    }

    /// Whether a group with this value is as one without a value.
    #[must_use]
    pub fn says_nothing(&self) -> bool {
        let is_open = |decision: &Decision| decision.decided == Decided::Open;
        self.note.is_none() && self.decision.as_ref().is_none_or(is_open)
    }

    /// Reads the value of a record.
    ///
    /// # Errors
    /// When the state cannot be known.
    pub fn decode(value: &Bytes) -> Result<Self, InvalidValue> {
        if value.len() > MAX_VALUE {
            return Err(InvalidValue::Malformed);
        }
        let record = v1::GroupRecord::decode(value.clone()).map_err(|_| InvalidValue::Malformed)?;
        let is_newer = record.format > FORMAT || has_unknown_fields(value, &record);
        Ok(Self {
            revision: record.revision,
            change_id: record.change_id,
            decision: record.decision.map(read_decision).transpose()?,
            note: record.note.map(|note| Note {
                text: note.text,
                time: note.time.as_ref().and_then(from_timestamp),
                by: note.by,
            }),
            is_newer,
        })
    }

    /// The value of a record.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let record = v1::GroupRecord {
            revision: self.revision,
            change_id: self.change_id.clone(),
            format: FORMAT,
            decision: self.decision.as_ref().map(write_decision),
            note: self.note.as_ref().map(|note| v1::GroupNote {
                text: note.text.clone(),
                time: note.time.map(to_timestamp),
                by: note.by.clone(),
            }),
        };
        record.encode_to_vec().into()
    }
}

impl Document for Value {
    type Key = GroupId;
    type Invalid = InvalidValue;

    const IF_UNREADABLE: &'static str = ", and the group is open until it can be read";
    const IF_NEWER: &'static str = ", and shown as far as this one knows it";

    fn parse_key(key: &str) -> Option<GroupId> {
        key.strip_prefix(KEY)?.parse().ok()
    }

    fn record_key(id: &GroupId) -> String {
        format!("{KEY}{id}")
    }

    fn decode(_id: &GroupId, value: &Bytes) -> Result<Self, InvalidValue> {
        Self::decode(value)
    }

    fn revision(&self) -> u64 {
        self.revision
    }

    fn change_id(&self) -> &Bytes {
        &self.change_id
    }

    fn is_newer(&self) -> bool {
        self.is_newer
    }
}

fn read_decision(decision: v1::GroupDecision) -> Result<Decision, InvalidValue> {
    let time = |time: &_| from_timestamp(time).ok_or(InvalidValue::Time);
    let until = decision.muted_until.as_ref().map(time).transpose()?;
    let decided = match decision.state() {
        v1::GroupState::Open => Decided::Open,
        v1::GroupState::Resolved => Decided::Resolved,
        v1::GroupState::Muted => Decided::Muted(until),
        v1::GroupState::Unspecified | v1::GroupState::Regressed => return Err(InvalidValue::State),
    };
    Ok(Decision {
        decided,
        time: decision.time.as_ref().map_or(Err(InvalidValue::Time), time)?,
        resolved_until: decision.resolved_until.as_ref().map(time).transpose()?,
        by: decision.by,
        reason: decision.reason,
    })
}

fn write_decision(decision: &Decision) -> v1::GroupDecision {
    let (state, until) = match decision.decided {
        Decided::Open => (v1::GroupState::Open, None),
        Decided::Resolved => (v1::GroupState::Resolved, None),
        Decided::Muted(until) => (v1::GroupState::Muted, until),
    };
    v1::GroupDecision {
        state: state.into(),
        time: Some(to_timestamp(decision.time)),
        resolved_until: decision.resolved_until.map(to_timestamp),
        by: decision.by.clone(),
        reason: decision.reason.clone(),
        muted_until: until.map(to_timestamp),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn value(decided: Decided) -> Value {
        Value {
            revision: 3,
            change_id: Bytes::from_static(b"1"),
            decision: Some(Decision {
                decided,
                time: at(5),
                resolved_until: Some(at(6)),
                by: "ann".to_owned(),
                reason: "fixed".to_owned(),
            }),
            note: Some(Note {
                text: "see the runbook".to_owned(),
                time: Some(at(7)),
                by: "bob".to_owned(),
            }),
            is_newer: false,
        }
    }

    #[test]
    fn value_round_trips() {
        for decided in [
            Decided::Open,
            Decided::Resolved,
            Decided::Muted(None),
            Decided::Muted(Some(at(9))),
        ] {
            let value = value(decided);
            assert_eq!(Value::decode(&value.encode()), Ok(value.clone()));
            let without_note = Value { note: None, ..value };
            assert_eq!(Value::decode(&without_note.encode()), Ok(without_note.clone()));
            assert_eq!(without_note.says_nothing(), decided == Decided::Open);
        }
        assert_eq!(value(Decided::Resolved).last_time(), Some(at(7)));
        assert_eq!(value(Decided::Muted(Some(at(9)))).last_time(), Some(at(9)));
        assert!(Value::default().says_nothing());
    }

    #[test]
    fn unknown_parts_are_told_apart() {
        let with = |change: fn(&mut v1::GroupRecord)| {
            let mut record = v1::GroupRecord::decode(value(Decided::Resolved).encode()).unwrap();
            change(&mut record);
            Value::decode(&record.encode_to_vec().into())
        };
        assert!(with(|record| record.format = 1).unwrap().is_newer);
        let mut with_field = v1::GroupRecord::default().encode_to_vec();
        with_field.extend([0xc0, 0x3e, 1]);
        assert!(Value::decode(&with_field.into()).unwrap().is_newer);
        for state in [0, 4, 9] {
            let mut record = v1::GroupRecord::decode(value(Decided::Open).encode()).unwrap();
            record.decision.as_mut().unwrap().state = state;
            let read = Value::decode(&record.encode_to_vec().into());
            assert_eq!(read, Err(InvalidValue::State), "{state}");
        }
        let without_time = with(|record| record.decision.as_mut().unwrap().time = None);
        assert_eq!(without_time, Err(InvalidValue::Time));
        for damaged in [vec![0xff], vec![0; MAX_VALUE + 1]] {
            assert_eq!(Value::decode(&damaged.into()), Err(InvalidValue::Malformed));
        }
    }
}
