//! Occurrences on the nights in which clocks change, compared with another implementation: croniter and Python's zoneinfo.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use redeliver_core::{HumanDuration, Timestamp};
use redeliver_recurrence::{
    Definition, Gap, Misfire, MisfirePolicy, Occurrence, Overlap, Progress, Recurrence, Schedule, ScheduleId,
    Timing,
};
use redeliver_testkit::languages::python;
use serde::Deserialize;
use serde_json::json;

/// The first and the last year. Each zone changes its clock at least twice a year.
const YEARS: (u16, u16) = (2026, 2027);
/// Lord Howe changes by half an hour, Santiago at midnight, and Casablanca for Ramadan.
const ZONES: [&str; 5] = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Santiago",
    "Africa/Casablanca",
];
const EXPRESSIONS: [&str; 8] = [
    "30 2 * * *",
    "0,15,45 1-3 * * *",
    "*/10 * * * *",
    "0 * * * *",
    "59 23 * * *",
    "0 0 * * *",
    "5 0,2 * * 0",
    "0 3 5-11 * *",
];
/// An occurrence that is late by more is missed.
const GRACE: Duration = Duration::from_secs(600);
const LIMIT: u32 = 7;
const POLICIES: [(&str, MisfirePolicy); 3] = [
    ("skip", MisfirePolicy::Skip),
    ("once", MisfirePolicy::Once),
    ("all", MisfirePolicy::All { limit: LIMIT }),
];

/// What the other implementation says. Times are in seconds.
#[derive(Deserialize)]
struct Expected {
    zone: String,
    expression: String,
    gap: String,
    overlap: String,
    from: i64,
    until: i64,
    occurrences: Vec<i64>,
    /// When an outage ends that began at `from`.
    at: i64,
    /// What is dispatched then, by misfire policy.
    dispatched: BTreeMap<String, Vec<i64>>,
}

fn expected() -> Vec<Expected> {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/daylight_saving");
    let python = python(&files.join("requirements.txt")).unwrap();
    let mut reference = Command::new(python)
        .arg(files.join("reference.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (first, last) = YEARS;
    let request = json!({ "zones": ZONES, "expressions": EXPRESSIONS, "first": first, "last": last, "grace": GRACE.as_secs(), "limit": LIMIT });
    let input = reference.stdin.take();
    input.unwrap().write_all(request.to_string().as_bytes()).unwrap();
    let output = reference.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn recurrence(expected: &Expected, policy: MisfirePolicy) -> Recurrence {
    let gap = match expected.gap.as_str() {
        "skip" => Gap::Skip,
        _ => Gap::Shift,
    };
    let overlap = match expected.overlap.as_str() {
        "both" => Overlap::Both,
        _ => Overlap::First,
    };
    let timing = Timing::Cron {
        expression: expected.expression.clone(),
        zone: expected.zone.clone(),
        gap,
        overlap: Some(overlap),
    };
    Recurrence::new(Definition {
        timing,
        start: None,
        end: None,
        max_count: None,
        jitter: HumanDuration::default(),
        misfire: Misfire {
            policy,
            grace: GRACE.into(),
        },
    })
    .unwrap()
}

#[test]
fn occurrences_when_clocks_change_are_those_of_another_implementation() {
    let mut changes: BTreeMap<String, usize> = BTreeMap::new();
    for expected in expected() {
        let Expected {
            zone,
            expression,
            gap,
            overlap,
            ..
        } = &expected;
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let case = format!(
            "`{expression}` in {zone}, gap {gap}, overlap {overlap}, {}",
            at(expected.from)
        );
        for (name, policy) in POLICIES {
            let id = "nightly".parse::<ScheduleId>().unwrap();
            let schedule = Schedule::new(id, recurrence(&expected, policy));
            let decision = schedule.decide(Progress::new(at(expected.from)), at(expected.at), usize::MAX);
            let nominal = |occurrence: &Occurrence| occurrence.nominal.as_millis() / 1000;
            let dispatched: Vec<i64> = decision.dispatch.iter().map(nominal).collect();
            assert_eq!(dispatched, expected.dispatched[name], "misfire {name} {case}");
            let due = expected
                .occurrences
                .iter()
                .filter(|due| **due <= expected.at)
                .count();
            let skipped = decision.skipped.map_or(0, |skipped| skipped.count);
            assert_eq!(
                dispatched.len() as u64 + skipped,
                due as u64,
                "misfire {name} {case}"
            );
        }
        let recurrence = recurrence(&expected, MisfirePolicy::Once);
        let (from, until) = (expected.from, expected.until);
        let mut found = Vec::new();
        let mut last = at(from);
        while let Some((next, _)) = recurrence.next(last).filter(|(next, _)| *next <= at(until)) {
            found.push(next.as_millis() / 1000);
            last = next;
        }
        assert_eq!(found, expected.occurrences, "{case}");
        assert_eq!(
            recurrence.count(at(from), at(until)),
            found.len() as u64,
            "{case}"
        );
        let latest = recurrence.last(at(from), at(until));
        let latest = latest.map(|(at, _)| at.as_millis() / 1000);
        assert_eq!(latest, found.last().copied(), "{case}");
        *changes.entry(zone.clone()).or_default() += 1;
    }
    let (first, last) = YEARS;
    let cases = usize::from(2 * (last - first + 1)) * EXPRESSIONS.len() * 4;
    for zone in ZONES {
        assert!(changes[zone] >= cases, "{zone} {changes:?}");
    }
}
