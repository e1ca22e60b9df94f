use super::*;

/// The occurrences after a time, as local times with reasons.
fn occurrences(definition: Definition, after: &str, until: &str) -> Vec<String> {
    let recurrence = Recurrence::new(definition).unwrap();
    let mut found = recurrence.preview(at(after), MAX_PREVIEW);
    found.retain(|preview| preview.nominal <= at(until));
    let text = |preview: &Preview| {
        let local = preview.local.split('[').next().unwrap();
        format!("{local} {}", preview.reason)
    };
    found.iter().map(text).collect()
}

#[test]
fn missing_time_is_shifted_or_skipped() {
    for (expression, zone, after, until, shifted, skipped) in [
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-28T00:00:00Z",
            "2026-03-30T12:00:00Z",
            &[
                "2026-03-28T02:30:00+01:00 regular",
                "2026-03-29T03:30:00+02:00 shifted by a gap: 2026-03-29T02:30:00 does not exist",
                "2026-03-30T02:30:00+02:00 regular",
            ][..],
            &[
                "2026-03-28T02:30:00+01:00 regular",
                "2026-03-30T02:30:00+02:00 regular",
            ][..],
        ),
        // A gap of half an hour, from 02:00 to 02:30.
        (
            "0,15,45 2 * * *",
            "Australia/Lord_Howe",
            "2026-10-03T00:00:00Z",
            "2026-10-04T00:00:00Z",
            &[
                "2026-10-04T02:30:00+11:00 shifted by a gap: 2026-10-04T02:00:00 does not exist",
                "2026-10-04T02:45:00+11:00 regular",
            ],
            &["2026-10-04T02:45:00+11:00 regular"],
        ),
        // A missing day: the 30th of December 2011 in Samoa.
        (
            "0 12 30 * *",
            "Pacific/Apia",
            "2011-12-29T00:00:00Z",
            "2012-02-01T00:00:00Z",
            &[
                "2011-12-31T12:00:00+14:00 shifted by a gap: 2011-12-30T12:00:00 does not exist",
                "2012-01-30T12:00:00+14:00 regular",
            ],
            &["2012-01-30T12:00:00+14:00 regular"],
        ),
    ] {
        for (gap, expected) in [(Gap::Shift, shifted), (Gap::Skip, skipped)] {
            let definition = cron(expression, zone, gap, None);
            assert_eq!(occurrences(definition, after, until), expected, "{zone} {gap:?}");
        }
    }
}

#[test]
fn repeated_time_occurs_once_or_twice() {
    for (expression, zone, after, until, first, both) in [
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-24T12:00:00Z",
            "2026-10-26T12:00:00Z",
            &[
                "2026-10-25T02:30:00+02:00 first of an overlap",
                "2026-10-26T02:30:00+01:00 regular",
            ][..],
            &[
                "2026-10-25T02:30:00+02:00 first of an overlap",
                "2026-10-25T02:30:00+01:00 second of an overlap",
                "2026-10-26T02:30:00+01:00 regular",
            ][..],
        ),
        // Half an hour, from 01:30 to 02:00.
        (
            "*/15 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-04T12:00:00Z",
            "2026-04-05T00:00:00Z",
            &[
                "2026-04-05T01:00:00+11:00 regular",
                "2026-04-05T01:15:00+11:00 regular",
                "2026-04-05T01:30:00+11:00 first of an overlap",
                "2026-04-05T01:45:00+11:00 first of an overlap",
            ],
            &[
                "2026-04-05T01:00:00+11:00 regular",
                "2026-04-05T01:15:00+11:00 regular",
                "2026-04-05T01:30:00+11:00 first of an overlap",
                "2026-04-05T01:45:00+11:00 first of an overlap",
                "2026-04-05T01:30:00+10:30 second of an overlap",
                "2026-04-05T01:45:00+10:30 second of an overlap",
            ],
        ),
        // A repeated day: the 30th of September 1969 in Kwajalein began again an hour after it had begun.
        (
            "0 23 30 9 *",
            "Pacific/Kwajalein",
            "1970-01-01T00:00:00Z",
            "1970-12-31T00:00:00Z",
            &["1970-09-30T23:00:00-12:00 regular"],
            &["1970-09-30T23:00:00-12:00 regular"],
        ),
    ] {
        for (overlap, expected) in [(Overlap::First, first), (Overlap::Both, both)] {
            let definition = cron(expression, zone, Gap::Shift, Some(overlap));
            assert_eq!(
                occurrences(definition, after, until),
                expected,
                "{zone} {overlap:?}"
            );
        }
    }
}

#[test]
fn hourly_expression_keeps_its_pace() {
    let half_hours = |day: &str| {
        let definition = cron("*/30 * * * *", "Europe/Berlin", Gap::Shift, None);
        let schedule = schedule(definition);
        let mut times = Vec::new();
        let mut last = at(day);
        while times.len() < 12 {
            last = schedule.next_after(last).unwrap().nominal;
            times.push(last.as_millis() - at(day).as_millis());
        }
        times
    };
    let expected: Vec<i64> = (1..=12).map(|n| n * 30 * MINUTE).collect();
    assert_eq!(half_hours("2026-03-28T23:00:00Z"), expected);
    assert_eq!(half_hours("2026-10-24T22:00:00Z"), expected);
}

#[test]
fn only_hourly_expressions_occur_twice() {
    for (expression, expected) in [
        ("*/10 * * * *", Overlap::Both),
        ("@hourly", Overlap::Both),
        ("0 0-23 * * *", Overlap::Both),
        ("30 2 * * *", Overlap::First),
        ("* 2 * * *", Overlap::First),
        ("0 */2 * * *", Overlap::First),
    ] {
        let recurrence = Recurrence::new(cron(expression, "Europe/Berlin", Gap::Shift, None)).unwrap();
        let Timing::Cron { overlap, .. } = recurrence.definition().timing else {
            unreachable!();
        };
        assert_eq!(overlap, Some(expected), "{expression}");
    }
}

#[test]
fn sparse_expression_finds_second_overlap() {
    let definition = cron("30 2 25 10 *", "Europe/Berlin", Gap::Shift, Some(Overlap::Both));
    let expected = [
        "2026-10-25T02:30:00+02:00 first of an overlap",
        "2026-10-25T02:30:00+01:00 second of an overlap",
        "2027-10-25T02:30:00+02:00 regular",
    ];
    let found = occurrences(definition, "2026-10-01T00:00:00Z", "2028-01-01T00:00:00Z");
    assert_eq!(found, expected);
}

/// The search looks at one transition at a time, which is exact if no two are closer than the local times that they affect.
#[test]
fn changes_of_zones_never_overlap() {
    let end = at("2100-01-01T00:00:00Z").as_millis() / 1000;
    let mut zones = 0;
    for name in jiff::tz::db().available() {
        let zone = Zone::named(name.as_str()).unwrap_or(Zone::UTC);
        zones += 1;
        let mut segment = zone.segment(-10_000_000_000);
        while segment.last < end {
            let next = zone.segment(segment.last + 1);
            let affected = segment.gap().max(segment.repeated()).max(next.repeated());
            let length = i128::from(segment.last) - i128::from(segment.first);
            assert!(length > affected.into(), "{name} {segment:?}");
            segment = next;
        }
    }
    assert!(zones > 400, "{zones}");
}
