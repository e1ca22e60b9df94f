//! Times in arguments: RFC 3339, a duration from now, or the beginning of a day in the time zone of the caller.

use jiff::Zoned;
use jiff::tz::TimeZone;
use redeliver_client::Timestamp;
use redeliver_core::time::InvalidTimestamp;
use redeliver_core::{Clock as _, HumanDuration, SystemClock};

use crate::connection::CliError;

/// What a duration without a sign means.
#[derive(Clone, Copy, Debug)]
enum Direction {
    Ago,
    FromNow,
}

/// A time that is usually in the past: `2h` is two hours ago, and `+2h` in two hours.
pub(crate) fn past(text: &str) -> Result<Timestamp, String> {
    read(text, Direction::Ago)
}

/// A time that is usually in the future: `2h` is in two hours, and `-2h` two hours ago.
pub(crate) fn future(text: &str) -> Result<Timestamp, String> {
    read(text, Direction::FromNow)
}

/// Requires that a range is not empty. `from`: its first time, and the name of the flag.
pub(crate) fn check_range(
    (flag, from): (&str, Option<Timestamp>),
    until: Option<Timestamp>,
) -> Result<(), CliError> {
    match (from, until) {
        (Some(from), Some(until)) if from >= until => {
            Err(CliError::Usage(format!("--until is not later than {flag}")))
        }
        _ => Ok(()),
    }
}

fn read(text: &str, direction: Direction) -> Result<Timestamp, String> {
    let now = SystemClock.now();
    if let Some(day) = day(text, now, &TimeZone::system()) {
        let day = day.map_err(|error| format!("`{text}` {error}"))?;
        // Where a day begins depends on the machine.
        eprintln!("{text}: from {day}");
        return Ok(Timestamp::from_millis(day.timestamp().as_millisecond()));
    }
    time(text, direction, now).map_err(|error| match error {
        InvalidTimestamp::Form => format!(
            "`{text}` is not a time: write one such as 2026-01-31T12:00:00Z, a duration such as 2h ({}), today, \
             yesterday or tomorrow",
            match direction {
                Direction::Ago => "ago",
                Direction::FromNow => "from now",
            }
        ),
        error => format!("`{text}` {error}"),
    })
}

/// The beginning of a day with a name; `None` if the text is none.
fn day(text: &str, now: Timestamp, zone: &TimeZone) -> Option<Result<Zoned, jiff::Error>> {
    let now = jiff::Timestamp::from_millisecond(now.as_millis());
    let today = now.map(|now| now.to_zoned(zone.clone()));
    let day = match text {
        "today" => today,
        "yesterday" => today.and_then(|today| today.yesterday()),
        "tomorrow" => today.and_then(|today| today.tomorrow()),
        _ => return None,
    };
    Some(day.and_then(|day| day.start_of_day()))
}

fn time(text: &str, direction: Direction, now: Timestamp) -> Result<Timestamp, InvalidTimestamp> {
    let (direction, wait) = match text.split_at_checked(1) {
        Some(("-", wait)) => (Direction::Ago, wait),
        Some(("+", wait)) => (Direction::FromNow, wait),
        _ => (direction, text),
    };
    let Ok(wait) = wait.parse::<HumanDuration>() else {
        return text.parse();
    };
    let wait = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
    let time = Timestamp::from_millis(match direction {
        Direction::Ago => now.as_millis().saturating_sub(wait),
        Direction::FromNow => now.as_millis().saturating_add(wait),
    });
    let is_representable = time.to_rfc3339().is_some();
    is_representable.then_some(time).ok_or(InvalidTimestamp::Range)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn durations_count_from_now() {
        let now = at("2026-11-30T08:00:00Z");
        for (text, direction, expected) in [
            ("2h", Direction::Ago, "2026-11-30T06:00:00.000Z"),
            ("2h", Direction::FromNow, "2026-11-30T10:00:00.000Z"),
            ("-1d", Direction::FromNow, "2026-11-29T08:00:00.000Z"),
            ("+90s", Direction::Ago, "2026-11-30T08:01:30.000Z"),
            (
                "2026-11-30T01:00:00+01:00",
                Direction::Ago,
                "2026-11-30T00:00:00.000Z",
            ),
        ] {
            let time = time(text, direction, now).map(|time| time.to_string());
            assert_eq!(time.as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_times_say_what_is_valid() {
        for (text, expected) in [
            (
                "soon",
                "a duration such as 2h (ago), today, yesterday or tomorrow",
            ),
            ("2hours", "is not a time"),
            ("", "is not a time"),
            ("ä", "is not a time"),
            ("2026-01-31T12:00", "has no offset"),
            ("999999999d", "is not in the years 1 to 9999"),
        ] {
            let error = past(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(future("soon").unwrap_err().contains("2h (from now)"));
    }

    #[test]
    fn days_begin_in_their_zone() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        // After midnight there, before midnight in UTC, a day after the clocks went back.
        let now = at("2026-10-25T23:30:00Z");
        for (text, expected) in [
            ("yesterday", "2026-10-24T22:00:00.000Z"),
            ("today", "2026-10-25T23:00:00.000Z"),
            ("tomorrow", "2026-10-26T23:00:00.000Z"),
        ] {
            let day = day(text, now, &zone).unwrap().unwrap();
            let begin = Timestamp::from_millis(day.timestamp().as_millisecond());
            assert_eq!(begin.to_string(), expected, "{text}");
        }
        assert!(day("2h", now, &zone).is_none());
    }
}
