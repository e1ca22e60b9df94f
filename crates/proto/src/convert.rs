//! Between wire types and the domain's.

use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::job::{Priority, State};
use redeliver_core::{Headers, Span, Timestamp};

use crate::v1;

/// A time on the wire, to the millisecond.
#[must_use]
pub fn to_timestamp(time: Timestamp) -> ProtoTimestamp {
    let millis = time.as_millis();
    ProtoTimestamp {
        seconds: millis.div_euclid(1000),
        nanos: i32::try_from(millis.rem_euclid(1000)).unwrap_or(0) * 1_000_000,
    }
}

/// A time from the wire, rounded up to the millisecond, so that nothing becomes early; `None` when its
/// fields are out of the ranges that the type documents (years 1 to 9999).
#[must_use]
pub fn from_timestamp(time: &ProtoTimestamp) -> Option<Timestamp> {
    const FIRST: i64 = -62_135_596_800;
    const LAST: i64 = 253_402_300_799;
    if !(FIRST..=LAST).contains(&time.seconds) || !(0..1_000_000_000).contains(&time.nanos) {
        return None;
    }
    let millis = (i64::from(time.nanos) + 999_999) / 1_000_000;
    Some(Timestamp::from_millis(time.seconds * 1000 + millis))
}

/// A span on the wire.
#[must_use]
pub fn to_duration(span: Span) -> ProtoDuration {
    let duration = span.duration();
    ProtoDuration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

/// A span from the wire, rounded up to the millisecond; `None` when it is negative or malformed.
#[must_use]
pub fn from_duration(duration: &ProtoDuration) -> Option<Span> {
    let seconds = u64::try_from(duration.seconds).ok()?;
    let nanos = u64::try_from(duration.nanos)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000)?;
    let millis = seconds
        .checked_mul(1000)?
        .checked_add(nanos.div_ceil(1_000_000))?;
    Some(Span::from_millis(millis))
}

/// Headers on the wire.
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

/// Headers from the wire.
#[must_use]
pub fn from_headers(headers: &[v1::Header]) -> Headers {
    headers
        .iter()
        .map(|header| (header.name.as_str(), header.value.as_deref()))
        .collect()
}

/// A job's priority on the wire.
#[must_use]
pub fn to_priority(priority: Priority) -> v1::Priority {
    match priority {
        Priority::High => v1::Priority::High,
        Priority::Normal => v1::Priority::Normal,
        Priority::Low => v1::Priority::Low,
    }
}

/// A job's priority from the wire; none given is the normal one.
#[must_use]
pub fn from_priority(priority: v1::Priority) -> Priority {
    match priority {
        v1::Priority::High => Priority::High,
        v1::Priority::Unspecified | v1::Priority::Normal => Priority::Normal,
        v1::Priority::Low => Priority::Low,
    }
}

/// A job's state on the wire.
#[must_use]
pub fn to_state(state: State) -> v1::JobState {
    match state {
        State::Scheduled => v1::JobState::Scheduled,
        State::Dispatched => v1::JobState::Dispatched,
        State::Cancelled => v1::JobState::Cancelled,
        State::Expired => v1::JobState::Expired,
    }
}

/// A job's state from the wire; `None` when none is given.
#[must_use]
pub fn from_state(state: v1::JobState) -> Option<State> {
    match state {
        v1::JobState::Unspecified => None,
        v1::JobState::Scheduled => Some(State::Scheduled),
        v1::JobState::Dispatched => Some(State::Dispatched),
        v1::JobState::Cancelled => Some(State::Cancelled),
        v1::JobState::Expired => Some(State::Expired),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_back_and_never_become_early() {
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
    fn spans_are_read_back_and_never_become_shorter() {
        let span = Span::from_millis(90_001);
        assert_eq!(from_duration(&to_duration(span)), Some(span));
        let finer = ProtoDuration { seconds: 0, nanos: 1 };
        assert_eq!(from_duration(&finer), Some(Span::from_millis(1)));
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
    fn priorities_and_states_are_read_back() {
        for priority in [Priority::High, Priority::Normal, Priority::Low] {
            assert_eq!(from_priority(to_priority(priority)), priority);
        }
        for state in [
            State::Scheduled,
            State::Dispatched,
            State::Cancelled,
            State::Expired,
        ] {
            assert_eq!(from_state(to_state(state)), Some(state));
        }
    }
}
