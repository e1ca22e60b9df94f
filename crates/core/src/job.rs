//! Ids, priorities and states of scheduled jobs.

use std::fmt;
use std::str::FromStr;

use ulid::Ulid;

use crate::time::Timestamp;

/// The id of a job: a ULID that encodes the position of its request in the ingest topic.
///
/// The time of the ULID is the timestamp of the request. The other 80 bits are the partition (16) and the offset (64).
/// So the id names the shard of the job, sorts by time, and is the same if the request is read again.
///
/// A job without a request, which a recurring schedule has created, has a number in place of the offset. Numbers begin where no
/// offset is. The highest ones identify schedules in an index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(Ulid);

/// No topic has so many records, so it distinguishes a number from an offset.
const FIRST_OF_OCCURRENCES: u64 = 1 << 61;
const FIRST_OF_SCHEDULES: u64 = 1 << 62;
/// Schedules have few numbers, because an index stores neighbours together. Most of their hash is in place of the time.
const SCHEDULE_NUMBERS: u64 = 1 << 20;

impl JobId {
    /// The id of the job whose request has this timestamp, partition and offset.
    #[must_use]
    pub fn new(timestamp: Timestamp, partition: i32, offset: i64) -> Self {
        let millis = u64::try_from(timestamp.as_millis()).unwrap_or(0) & ((1 << 48) - 1);
        let shard = u128::from(u16::try_from(partition).unwrap_or(u16::MAX));
        let rest = shard << 64 | u128::from(offset.unsigned_abs());
        Self(Ulid::from_parts(millis, rest))
    }

    /// The id of a job without a request, which a schedule has created at this time. `number` must be unique in the shard.
    #[must_use]
    pub fn of_occurrence(created: Timestamp, shard: i32, number: i64) -> Self {
        let number = number.unsigned_abs() % FIRST_OF_OCCURRENCES;
        let offset = FIRST_OF_OCCURRENCES | number;
        Self::new(created, shard, i64::try_from(offset).unwrap_or(i64::MAX))
    }

    /// The id of an entry of an index for a schedule, from a hash of the schedule's own id. It is not the id of a job.
    #[must_use]
    pub fn of_schedule(shard: i32, hash: [u8; 16]) -> Self {
        let hash = u128::from_be_bytes(hash);
        let time = i64::try_from(hash >> 80).unwrap_or(0);
        let number = u64::try_from(hash & u128::from(SCHEDULE_NUMBERS - 1)).unwrap_or(0);
        let offset = FIRST_OF_SCHEDULES | number;
        Self::new(
            Timestamp::from_millis(time),
            shard,
            i64::try_from(offset).unwrap_or(i64::MAX),
        )
    }

    /// Whether this identifies a schedule instead of a job.
    #[must_use]
    pub fn is_schedule(self) -> bool {
        self.offset() >= FIRST_OF_SCHEDULES
    }

    /// Whether the job has a request in the ingest topic.
    #[must_use]
    pub fn has_request(self) -> bool {
        self.offset() < FIRST_OF_OCCURRENCES
    }

    /// The shard that stores the job: a partition of the ingest topic and of the state topic.
    #[must_use]
    pub fn shard(self) -> i32 {
        i32::from(u16::try_from(self.0.random() >> 64).unwrap_or(u16::MAX))
    }

    /// The offset of the request in the ingest topic, if the job [has a request](Self::has_request).
    #[must_use]
    pub fn offset(self) -> u64 {
        u64::try_from(self.0.random() & u128::from(u64::MAX)).unwrap_or(u64::MAX)
    }

    /// The timestamp of the request.
    #[must_use]
    pub fn requested_at(self) -> Timestamp {
        Timestamp::from_millis(i64::try_from(self.0.timestamp_ms()).unwrap_or(i64::MAX))
    }

    /// The id as 16 bytes, which sort like ids.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_bytes()
    }

    /// The id with these 16 bytes.
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

/// The text is not a job id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a job id; a job id has 26 characters, such as 01KAJQ6Z2B0003000000000A7X")]
pub struct InvalidJobId;

impl FromStr for JobId {
    type Err = InvalidJobId;

    fn from_str(text: &str) -> Result<Self, InvalidJobId> {
        // Only the canonical form is accepted, so that two different texts are never the same job.
        let id = Ulid::from_string(text).map_err(|_| InvalidJobId)?;
        (id.to_string() == text).then_some(Self(id)).ok_or(InvalidJobId)
    }
}

/// The order in which due jobs are dispatched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Dispatched first.
    High,
    /// Dispatched like a high-priority job that is due 1 second later.
    #[default]
    Normal,
    /// Dispatched like a high-priority job that is due 10 seconds later.
    Low,
}

impl Priority {
    /// The name of the priority in headers and APIs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
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

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waits for its due time.
    Scheduled,
    /// Written to the topic of its application.
    Dispatched,
    /// Cancelled before its dispatch.
    Cancelled,
    /// Not dispatched within its `expire_after`.
    Expired,
}

impl JobState {
    /// The name of the state in APIs.
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

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let all = [Self::Scheduled, Self::Dispatched, Self::Cancelled, Self::Expired];
        let found = all.into_iter().find(|state| state.as_str() == text);
        found.ok_or(UnknownName("scheduled, dispatched, cancelled or expired"))
    }
}

/// The text is not the name of a priority or state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not one of {0}")]
pub struct UnknownName(&'static str);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_encodes_time_and_position() {
        let at = Timestamp::from_millis(1_763_722_800_123);
        let id = JobId::new(at, 47, 1 << 40);
        assert_eq!((id.shard(), id.offset(), id.requested_at()), (47, 1 << 40, at));
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(JobId::from_bytes(id.to_bytes()), id);
        assert!(JobId::new(at, 47, (1 << 40) + 1) > id);
        assert!(JobId::new(at.after(std::time::Duration::from_millis(1)), 0, 0) > id);
    }

    #[test]
    fn only_canonical_ids_are_accepted() {
        let id = JobId::new(Timestamp::from_millis(5), 1, 2).to_string();
        for text in [
            "",
            "x",
            &id.to_lowercase(),
            &format!("{id}0"),
            "ZZZZZZZZZZZZZZZZZZZZZZZZZZ",
        ] {
            assert_eq!(text.parse::<JobId>(), Err(InvalidJobId), "{text}");
        }
    }

    #[test]
    fn priorities_and_states_are_parsed_back() {
        for priority in [Priority::High, Priority::Normal, Priority::Low] {
            assert_eq!(priority.as_str().parse(), Ok(priority));
        }
        for state in [
            JobState::Scheduled,
            JobState::Dispatched,
            JobState::Cancelled,
            JobState::Expired,
        ] {
            assert_eq!(state.to_string().parse(), Ok(state));
        }
        let wrong = "High".parse::<Priority>().unwrap_err();
        assert_eq!(wrong.to_string(), "is not one of high, normal or low");
        assert!("done".parse::<JobState>().is_err());
    }
}
