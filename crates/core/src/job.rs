//! What every part knows of a job: its name, its priority, where it stands in its life.

use std::fmt;
use std::str::FromStr;

use ulid::Ulid;

use crate::time::Timestamp;

/// The name of a job: a ULID whose time is the timestamp of its request in the ingest topic, and whose other
/// 80 bits are the partition (16) and the offset (64) of the request there. So it says where the job is kept,
/// grows with time, and is the same whenever the request is read again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(Ulid);

impl JobId {
    /// The job of the request at this place.
    #[must_use]
    pub fn new(timestamp: Timestamp, partition: i32, offset: i64) -> Self {
        let millis = u64::try_from(timestamp.as_millis()).unwrap_or(0) & ((1 << 48) - 1);
        let shard = u128::from(u16::try_from(partition).unwrap_or(u16::MAX));
        let rest = shard << 64 | u128::from(offset.unsigned_abs());
        Self(Ulid::from_parts(millis, rest))
    }

    /// The partition of ingest and state topic, and the part of the index, where the job is kept.
    #[must_use]
    pub fn shard(self) -> i32 {
        i32::from(u16::try_from(self.0.random() >> 64).unwrap_or(u16::MAX))
    }

    /// The offset of its request in the ingest topic.
    #[must_use]
    pub fn offset(self) -> u64 {
        u64::try_from(self.0.random() & u128::from(u64::MAX)).unwrap_or(u64::MAX)
    }

    /// When it was requested.
    #[must_use]
    pub fn requested_at(self) -> Timestamp {
        Timestamp::from_millis(i64::try_from(self.0.timestamp_ms()).unwrap_or(i64::MAX))
    }

    /// 16 bytes, in the order of ids.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_bytes()
    }

    /// From 16 bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Ulid::from_bytes(bytes))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Not the id of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not the id of a job, which has 26 characters such as 01KAJQ6Z2B0003000000000A7X")]
pub struct NotAnId;

impl FromStr for JobId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        // Only the one way in which an id is written is read, so that two texts are never one job.
        let id = Ulid::from_string(text).map_err(|_| NotAnId)?;
        (id.to_string() == text).then_some(Self(id)).ok_or(NotAnId)
    }
}

/// Which of several due jobs goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Before the others.
    High,
    /// Between.
    #[default]
    Normal,
    /// After the others, by some seconds at most.
    Low,
}

impl Priority {
    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Priority {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all = [Self::High, Self::Normal, Self::Low];
        let found = all.into_iter().find(|priority| priority.as_str() == text);
        found.ok_or(UnknownName("high, normal or low"))
    }
}

/// Where a job stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Waits for its time.
    Scheduled,
    /// Is in its topic.
    Dispatched,
    /// Will never be dispatched, as it was asked for.
    Cancelled,
    /// Will never be dispatched, because it is too late.
    Expired,
}

impl State {
    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Dispatched => "dispatched",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for State {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all = [Self::Scheduled, Self::Dispatched, Self::Cancelled, Self::Expired];
        let found = all.into_iter().find(|state| state.as_str() == text);
        found.ok_or(UnknownName("scheduled, dispatched, cancelled or expired"))
    }
}

/// Not the name of a priority or a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not one of {0}")]
pub struct UnknownName(&'static str);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_says_where_its_job_is_kept() {
        let at = Timestamp::from_millis(1_763_722_800_123);
        let id = JobId::new(at, 47, 1 << 40);
        assert_eq!((id.shard(), id.offset(), id.requested_at()), (47, 1 << 40, at));
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(JobId::from_bytes(id.to_bytes()), id);
        assert!(JobId::new(at, 47, (1 << 40) + 1) > id);
        assert!(JobId::new(at.after(std::time::Duration::from_millis(1)), 0, 0) > id);
    }

    #[test]
    fn what_is_not_written_as_an_id_is_none() {
        let id = JobId::new(Timestamp::from_millis(5), 1, 2).to_string();
        for text in [
            "",
            "x",
            &id.to_lowercase(),
            &format!("{id}0"),
            "ZZZZZZZZZZZZZZZZZZZZZZZZZZ",
        ] {
            assert_eq!(text.parse::<JobId>(), Err(NotAnId), "{text}");
        }
    }

    #[test]
    fn priorities_and_states_are_read_as_they_are_written() {
        for priority in [Priority::High, Priority::Normal, Priority::Low] {
            assert_eq!(priority.to_string().parse(), Ok(priority));
        }
        for state in [
            State::Scheduled,
            State::Dispatched,
            State::Cancelled,
            State::Expired,
        ] {
            assert_eq!(state.to_string().parse(), Ok(state));
        }
        let wrong = "High".parse::<Priority>().unwrap_err();
        assert_eq!(wrong.to_string(), "is not one of high, normal or low");
        assert!("done".parse::<State>().is_err());
    }
}
