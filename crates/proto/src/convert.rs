//! Conversions between protobuf types and domain types.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::job::{JobState, Priority};
use redeliver_core::{Headers, HumanDuration, Position, Timestamp};

use crate::v1;

/// 0001-01-01T00:00:00Z and 9999-12-31T23:59:59Z, the first and the last second that a protobuf timestamp can have. Clients refuse
/// messages with others, and these have no JSON.
const SECONDS: RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;
/// The limit of a protobuf duration in seconds, about 10,000 years.
const MAX_DURATION: u64 = 315_576_000_000;

/// Converts a timestamp. The result is one that every client can read: outside of the years 1 to 9999, it is the first or the last time
/// of them. For the time of a record, which can be anything, use [`time_of_record`].
#[must_use]
pub fn to_timestamp(time: Timestamp) -> ProtoTimestamp {
    let millis = time
        .as_millis()
        .clamp(SECONDS.start() * 1000, SECONDS.end() * 1000 + 999);
    ProtoTimestamp {
        seconds: millis.div_euclid(1000),
        nanos: i32::try_from(millis.rem_euclid(1000)).unwrap_or(0) * 1_000_000,
    }
}

/// Converts a time that a record contains, for an answer. `None` if its year is not from 1 to 9999: one such record must not make an
/// answer about many unreadable.
#[must_use]
pub fn time_of_record(time: Timestamp) -> Option<ProtoTimestamp> {
    let is_readable = SECONDS.contains(&time.as_millis().div_euclid(1000));
    is_readable.then(|| to_timestamp(time))
}

/// Converts a timestamp, rounded up to the next millisecond, so that no due time becomes earlier. `None` if a field is
/// out of the range that protobuf documents (years 1 to 9999).
#[must_use]
pub fn from_timestamp(time: &ProtoTimestamp) -> Option<Timestamp> {
    if !SECONDS.contains(&time.seconds) || !(0..1_000_000_000).contains(&time.nanos) {
        return None;
    }
    let millis = (i64::from(time.nanos) + 999_999) / 1_000_000;
    Some(Timestamp::from_millis(time.seconds * 1000 + millis))
}

/// Converts the time of a message. `None` if it is not set or out of range: one such field must not make the rest of an answer unreadable.
#[must_use]
pub fn time(time: Option<ProtoTimestamp>) -> Option<Timestamp> {
    from_timestamp(&time?)
}

impl v1::DeadLetter {
    /// The timestamp of the record. `None` if it has none, which is known only with the FULL view: `dead_at` is 1970-01-01 then.
    #[must_use]
    pub fn timestamp(&self) -> Option<Timestamp> {
        time(self.dead_at).filter(|_| self.timestamp_type() != v1::TimestampType::None)
    }

    /// Whether a field of this name is masked, because the caller lacks the scope `dead-letters:unmasked`.
    #[must_use]
    pub fn is_masked(&self, field: &str) -> bool {
        let masked = self.masked.iter().flat_map(|masked| &masked.fields);
        masked.into_iter().any(|masked| masked == field)
    }
}

impl From<v1::Position> for Position {
    fn from(position: v1::Position) -> Self {
        Self {
            topic: position.topic.into(),
            partition: position.partition,
            offset: position.offset,
        }
    }
}

impl From<&Position> for v1::Position {
    fn from(position: &Position) -> Self {
        Self {
            topic: position.topic.to_string(),
            partition: position.partition,
            offset: position.offset,
        }
    }
}

impl fmt::Display for v1::Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.topic, self.partition, self.offset)
    }
}

/// Converts a duration. One beyond the limit of protobuf, about 10,000 years, becomes the limit.
#[must_use]
pub fn to_duration(duration: HumanDuration) -> ProtoDuration {
    let duration = duration.duration().min(Duration::from_secs(MAX_DURATION));
    ProtoDuration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

/// Converts a duration, rounded up to the next millisecond. `None` if it is negative or out of range.
#[must_use]
pub fn from_duration(duration: &ProtoDuration) -> Option<HumanDuration> {
    let seconds = u64::try_from(duration.seconds).ok()?;
    let nanos = u64::try_from(duration.nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000)?;
    let millis = seconds
        .checked_mul(1000)?
        .checked_add(nanos.div_ceil(1_000_000))?;
    Some(HumanDuration::from_millis(millis))
}

/// Converts headers.
#[must_use]
pub fn to_headers(headers: &Headers) -> Vec<v1::Header> {
    headers
        .iter()
        .map(|(name, value)| v1::Header {
            name: name.to_owned(),
            value: value.map(bytes::Bytes::copy_from_slice),
        })
        .collect()
}

/// Converts headers.
#[must_use]
pub fn from_headers(headers: &[v1::Header]) -> Headers {
    headers
        .iter()
        .map(|header| (header.name.as_str(), header.value.as_deref()))
        .collect()
}

/// Converts the priority of a job.
#[must_use]
pub fn to_priority(priority: Priority) -> v1::Priority {
    match priority {
        Priority::High => v1::Priority::High,
        Priority::Normal => v1::Priority::Normal,
        Priority::Low => v1::Priority::Low,
    }
}

/// Converts the priority of a job; an unspecified one is normal.
#[must_use]
pub fn from_priority(priority: v1::Priority) -> Priority {
    match priority {
        v1::Priority::High => Priority::High,
        v1::Priority::Unspecified | v1::Priority::Normal => Priority::Normal,
        v1::Priority::Low => Priority::Low,
    }
}

/// Converts the state of a job.
#[must_use]
pub fn to_state(state: JobState) -> v1::JobState {
    match state {
        JobState::Scheduled => v1::JobState::Scheduled,
        JobState::Dispatched => v1::JobState::Dispatched,
        JobState::Cancelled => v1::JobState::Cancelled,
        JobState::Expired => v1::JobState::Expired,
    }
}

/// Converts the state of a job; `None` if it is unspecified.
#[must_use]
pub fn from_state(state: v1::JobState) -> Option<JobState> {
    match state {
        v1::JobState::Unspecified => None,
        v1::JobState::Scheduled => Some(JobState::Scheduled),
        v1::JobState::Dispatched => Some(JobState::Dispatched),
        v1::JobState::Cancelled => Some(JobState::Cancelled),
        v1::JobState::Expired => Some(JobState::Expired),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamp_is_converted_back() {
        for millis in [0, 1, 999, 1_763_722_800_123, -1, -1500] {
            let time = Timestamp::from_millis(millis);
            assert_eq!(from_timestamp(&to_timestamp(time)), Some(time));
        }
        let finer = ProtoTimestamp { seconds: 5, nanos: 1 };
        assert_eq!(from_timestamp(&finer), Some(Timestamp::from_millis(5001)));
        for (seconds, nanos) in [(i64::MAX, 0), (0, -1), (0, 1_000_000_000)] {
            assert_eq!(from_timestamp(&ProtoTimestamp { seconds, nanos }), None);
        }
    }

    #[test]
    fn a_letter_may_lack_a_timestamp() {
        let letter = |timestamp_type: v1::TimestampType| v1::DeadLetter {
            dead_at: Some(ProtoTimestamp::default()),
            timestamp_type: timestamp_type.into(),
            ..v1::DeadLetter::default()
        };
        assert_eq!(letter(v1::TimestampType::None).timestamp(), None);
        let time = letter(v1::TimestampType::Unspecified).timestamp();
        assert_eq!(time, Some(Timestamp::from_millis(0)));
    }

    #[test]
    fn extreme_times_stay_readable() {
        for millis in [i64::MIN, -62_135_596_800_001, 253_402_300_800_000, i64::MAX] {
            let time = Timestamp::from_millis(millis);
            assert!(from_timestamp(&to_timestamp(time)).is_some(), "{millis}");
            assert_eq!(time_of_record(time), None, "{millis}");
        }
        for millis in [-62_135_596_800_000, 253_402_300_799_999] {
            let time = Timestamp::from_millis(millis);
            let shown = time_of_record(time).unwrap();
            assert_eq!(from_timestamp(&shown), Some(time));
        }
        let longest = to_duration(HumanDuration::from_millis(u64::MAX));
        assert_eq!(longest.seconds, 315_576_000_000);
    }

    #[test]
    fn duration_is_converted_back() {
        let duration = HumanDuration::from_millis(90_001);
        assert_eq!(from_duration(&to_duration(duration)), Some(duration));
        let finer = ProtoDuration { seconds: 0, nanos: 1 };
        assert_eq!(from_duration(&finer), Some(HumanDuration::from_millis(1)));
        for (seconds, nanos) in [(-1, 0), (0, -1), (i64::MAX, 0)] {
            assert_eq!(from_duration(&ProtoDuration { seconds, nanos }), None);
        }
    }

    #[test]
    fn null_and_empty_headers_differ() {
        let headers: Headers = [("a", Some(&b""[..])), ("b", None), ("a", Some(&b"\xff"[..]))]
            .into_iter()
            .collect();
        assert_eq!(from_headers(&to_headers(&headers)), headers);
    }

    #[test]
    fn priorities_and_states_are_converted_back() {
        for priority in [Priority::High, Priority::Normal, Priority::Low] {
            assert_eq!(from_priority(to_priority(priority)), priority);
        }
        for state in [
            JobState::Scheduled,
            JobState::Dispatched,
            JobState::Cancelled,
            JobState::Expired,
        ] {
            assert_eq!(from_state(to_state(state)), Some(state));
        }
    }
}
