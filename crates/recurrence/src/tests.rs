use std::collections::BTreeSet;

use croner::parser::CronParser;
use croner::{CronPattern, Weekday};
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use proptest::prelude::*;
use redeliver_core::{HumanDuration, JobId, Timestamp};

use super::*;
use crate::zone::Zone;

/// The maximum number of occurrences of a decision, unless a test is about it.
const MAX_DISPATCH: usize = 1_000;

mod decisions;
mod definitions;
mod dst;
mod jitter;

const SECOND: i64 = 1000;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn plus(time: Timestamp, millis: i64) -> Timestamp {
    Timestamp::from_millis(time.as_millis() + millis)
}

fn cron(expression: &str, zone: &str, gap: Gap, overlap: Option<Overlap>) -> Definition {
    definition(Timing::Cron {
        expression: expression.into(),
        zone: zone.into(),
        gap,
        overlap,
    })
}

fn every(interval: &str, anchor: Option<Timestamp>) -> Definition {
    definition(Timing::Every {
        interval: interval.parse().unwrap(),
        anchor,
    })
}

fn definition(timing: Timing) -> Definition {
    Definition {
        timing,
        start: None,
        end: None,
        max_count: None,
        jitter: HumanDuration::default(),
        misfire: Misfire::default(),
    }
}

fn schedule(definition: Definition) -> Schedule {
    Schedule::new("nightly".parse().unwrap(), Recurrence::new(definition).unwrap())
}

/// Whether croner's own functions match a local time, in seconds.
pub(crate) fn matches(pattern: &CronPattern, local: i64) -> bool {
    let time = Offset::UTC.to_datetime(jiff::Timestamp::from_second(local).unwrap());
    let number = |value: i8| u32::from(value.unsigned_abs());
    let weekday = Weekday::from_days_from_sunday(number(time.weekday().to_sunday_zero_offset()));
    pattern.second_match(number(time.second())).unwrap()
        && pattern.minute_match(number(time.minute())).unwrap()
        && pattern.hour_match(number(time.hour())).unwrap()
        && pattern.month_match(number(time.month())).unwrap()
        && pattern
            .day_match(
                time.year().into(),
                number(time.month()),
                number(time.day()),
                weekday,
            )
            .unwrap()
}

/// Random expressions.
pub(crate) fn expression() -> impl Strategy<Value = String> {
    let field = |low: u32, high: u32| {
        prop_oneof![
            3 => Just("*".to_owned()),
            3 => (low..=high).prop_map(|value| value.to_string()),
            1 => (1..=high).prop_map(|step| format!("*/{step}")),
            2 => (low..=high, low..=high).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
            1 => (low..=high, low..=high, 1..=high)
                .prop_map(|(a, b, step)| format!("{}-{}/{step},{b}", a.min(b), a.max(b))),
        ]
    };
    let second = prop_oneof![
        2 => Just(None),
        1 => field(0, 59).prop_map(Some),
    ];
    let day = prop_oneof![
        6 => Just("*".to_owned()),
        3 => field(1, 31),
        1 => Just("L".to_owned()),
        1 => Just("LW".to_owned()),
        1 => (1..=31u32).prop_map(|day| format!("{day}W")),
    ];
    let month = prop_oneof![6 => Just("*".to_owned()), 1 => field(1, 12)];
    let weekday = prop_oneof![
        6 => Just("*".to_owned()),
        2 => field(0, 7),
        1 => (0..=7u32, 1..=5u32).prop_map(|(day, nth)| format!("{day}#{nth}")),
        1 => (0..=7u32).prop_map(|day| format!("{day}L")),
        1 => (0..=6u32).prop_map(|day| format!("+{day}")),
    ];
    (second, field(0, 59), field(0, 23), day, month, weekday).prop_map(
        |(second, minute, hour, day, month, weekday)| {
            let second = second.map(|second| format!("{second} ")).unwrap_or_default();
            format!("{second}{minute} {hour} {day} {month} {weekday}")
        },
    )
}

/// What the search must find, by walking over all local times: the nominal seconds of a window.
fn model(pattern: &CronPattern, zone: &TimeZone, gap: Gap, overlap: Overlap, window: (i64, i64)) -> Vec<i64> {
    let (first, last) = window;
    let mut found = BTreeSet::new();
    // No offset is as long as a day.
    for local in first - 86_400..=last + 86_400 {
        if !matches(pattern, local) {
            continue;
        }
        let time = Offset::UTC.to_datetime(jiff::Timestamp::from_second(local).unwrap());
        let mut add = |offset: Offset| found.insert(local - i64::from(offset.seconds()));
        match zone.to_ambiguous_timestamp(time).offset() {
            AmbiguousOffset::Unambiguous { offset } => {
                add(offset);
            }
            AmbiguousOffset::Gap { before, .. } => {
                if gap == Gap::Shift {
                    add(before);
                }
            }
            AmbiguousOffset::Fold { before, after } => {
                add(before);
                if overlap == Overlap::Both {
                    add(after);
                }
            }
        }
    }
    found
        .into_iter()
        .filter(|instant| (first..=last).contains(instant))
        .collect()
}

/// A zone, and a window around one of its transitions in seconds.
fn transition() -> impl Strategy<Value = (String, (i64, i64))> {
    let names: Vec<String> = jiff::tz::db()
        .available()
        .map(|name| name.as_str().to_owned())
        .collect();
    let zone = prop_oneof![
        1 => Just("Europe/Berlin".to_owned()),
        1 => Just("Australia/Lord_Howe".to_owned()),
        1 => Just("Pacific/Apia".to_owned()),
        1 => Just("Africa/Casablanca".to_owned()),
        4 => prop::sample::select(names),
    ];
    let window = (0..4_000_000_000i64, -20_000..20_000i64, 0..40_000i64);
    (zone, window).prop_map(|(name, (near, offset, length))| {
        let zone = TimeZone::get(&name).unwrap();
        let near = jiff::Timestamp::from_second(near).unwrap();
        let next = zone
            .following(near)
            .next()
            .map_or(near, |transition| transition.timestamp());
        let first = (next.as_second() + offset).max(1);
        (name, (first, first + length))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn nominal_times_equal_a_walk(
        expression in expression(),
        (zone, window) in transition(),
        is_shifted: bool,
        is_twice: bool,
    ) {
        let gap = if is_shifted { Gap::Shift } else { Gap::Skip };
        let overlap = if is_twice { Overlap::Both } else { Overlap::First };
        let recurrence = Recurrence::new(cron(&expression, &zone, gap, Some(overlap)));
        prop_assume!(recurrence.is_ok());
        let recurrence = recurrence.unwrap();
        let pattern = CronParser::new().parse(&expression).unwrap().pattern;
        let expected = model(&pattern, &TimeZone::get(&zone).unwrap(), gap, overlap, window);

        let (after, until) =
            (Timestamp::from_millis((window.0 - 1) * SECOND), Timestamp::from_millis(window.1 * SECOND));
        let mut forward = Vec::new();
        let mut position = after;
        while let Some((nominal, _)) = recurrence.next(position).filter(|(nominal, _)| *nominal <= until) {
            prop_assert!(nominal > position);
            forward.push(nominal.as_millis() / SECOND);
            position = nominal;
        }
        prop_assert_eq!(&forward, &expected);
        prop_assert_eq!(recurrence.count(after, until), expected.len() as u64);

        let mut backward = Vec::new();
        let mut position = until;
        while let Some((nominal, reason)) = recurrence.last(after, position) {
            let from_before = recurrence.next(plus(nominal, -1)).unwrap();
            prop_assert_eq!(from_before, (nominal, reason));
            backward.push(nominal.as_millis() / SECOND);
            position = plus(nominal, -1);
        }
        backward.reverse();
        prop_assert_eq!(&backward, &expected);
    }
}

#[test]
fn an_interval_keeps_its_phase() {
    let schedule = schedule(every("90m", Some(at("2026-01-01T00:10:00Z"))));
    let next = |after: &str| schedule.next_after(at(after)).unwrap();
    for (after, nominal, reason) in [
        ("2025-12-31T22:00:00Z", "2025-12-31T22:40:00Z", Reason::Regular),
        ("2025-12-31T22:40:00Z", "2026-01-01T00:10:00Z", Reason::Anchor),
        ("2026-01-01T00:10:00Z", "2026-01-01T01:40:00Z", Reason::Regular),
        ("2026-03-29T00:00:00Z", "2026-03-29T00:10:00Z", Reason::Regular),
    ] {
        let nominal = at(nominal);
        assert_eq!(
            next(after),
            Occurrence {
                nominal,
                due: nominal,
                reason
            }
        );
    }
}

#[test]
fn start_and_end_are_inclusive() {
    let (start, end) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T02:00:00Z"));
    for definition in [every("1h", None), cron("@hourly", "UTC", Gap::Shift, None)] {
        let recurrence = Recurrence::new(Definition {
            start: Some(start),
            end: Some(end),
            ..definition
        })
        .unwrap();
        let nominals: Vec<_> = recurrence
            .preview(at("1980-01-01T00:00:00Z"), 10)
            .into_iter()
            .map(|preview| preview.nominal)
            .collect();
        assert_eq!(nominals, [start, at("2026-01-01T01:00:00Z"), end]);
        assert_eq!(
            recurrence.count(at("1980-01-01T00:00:00Z"), at("2030-01-01T00:00:00Z")),
            3
        );
        let last = recurrence.last(at("1980-01-01T00:00:00Z"), at("2030-01-01T00:00:00Z"));
        assert_eq!(last.map(|(nominal, _)| nominal), Some(end));
        assert_eq!(recurrence.next(end), None);
    }
}

#[test]
fn extreme_times_are_harmless() {
    let extremes = [i64::MIN, 0, i64::MAX].map(Timestamp::from_millis);
    for definition in [
        every("1s", None),
        cron("* * * * * *", "Europe/Berlin", Gap::Shift, None),
    ] {
        let schedule = schedule(definition);
        for position in extremes {
            for now in extremes {
                let progress = Progress {
                    position,
                    ..Progress::new(now)
                };
                let decision = schedule.decide(progress, now, MAX_DISPATCH);
                assert!(decision.dispatch.len() <= MAX_DISPATCH);
                let (resumed, _) = schedule.resume(progress.pause(), now, CatchUp::Skip);
                assert!(resumed.position >= position);
                assert!(schedule.preview(progress, now, now, 3).len() <= 3);
            }
        }
    }
}
