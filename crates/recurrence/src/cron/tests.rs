use croner::CronPattern;
use croner::parser::CronParser;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;
use proptest::prelude::*;
use redeliver_testkit::fuzz;

use super::*;
use crate::tests::{expression, matches};

/// 2026-01-01T00:00:00.
const NEW_YEAR: i64 = 1_767_225_600;

fn local(text: &str) -> i64 {
    let time: DateTime = text.parse().unwrap();
    Offset::UTC.to_timestamp(time).unwrap().as_second()
}

fn text(local: i64) -> String {
    Offset::UTC
        .to_datetime(Timestamp::from_second(local).unwrap())
        .to_string()
}

fn pattern(expression: &str) -> CronPattern {
    CronParser::new().parse(expression).unwrap().pattern
}

#[test]
fn next_match_follows_each_field() {
    for (expression, after, next) in [
        ("* * * * *", "2026-01-01T00:00:30", "2026-01-01T00:01:00"),
        ("* * * * * *", "2026-01-01T00:00:30", "2026-01-01T00:00:31"),
        ("*/20 5-6 4 * * *", "2026-01-01T04:06:40", "2026-01-02T04:05:00"),
        ("@daily", "2026-01-01T00:00:00", "2026-01-02T00:00:00"),
        ("@weekly", "2026-01-01T00:00:00", "2026-01-04T00:00:00"),
        ("0 0 * * SUN", "2026-01-01T00:00:00", "2026-01-04T00:00:00"),
        ("0 0 * * 7", "2026-01-01T00:00:00", "2026-01-04T00:00:00"),
        ("0 0 * * sat-sun", "2026-01-03T00:00:00", "2026-01-04T00:00:00"),
        ("59 23 31 dec ?", "2026-01-01T00:00:00", "2026-12-31T23:59:00"),
        // The last day, the last working day, and the working day nearest to the 15th (a Sunday in February and March).
        ("0 0 L * *", "2026-02-01T00:00:00", "2026-02-28T00:00:00"),
        ("0 0 LW * *", "2026-02-01T00:00:00", "2026-02-27T00:00:00"),
        ("0 0 15W * *", "2026-02-01T00:00:00", "2026-02-16T00:00:00"),
        // The third Friday, and the last Monday.
        ("0 0 * * FRI#3", "2026-01-01T00:00:00", "2026-01-16T00:00:00"),
        ("0 0 * * 1L", "2026-01-01T00:00:00", "2026-01-26T00:00:00"),
        ("0 0 * * 1#L", "2026-01-01T00:00:00", "2026-01-26T00:00:00"),
        // Day of the month or weekday; both with a plus sign.
        ("0 0 13 * FRI", "2026-01-01T00:00:00", "2026-01-02T00:00:00"),
        ("0 0 13 * +FRI", "2026-01-01T00:00:00", "2026-02-13T00:00:00"),
        // Leap days: 2100 is not a leap year.
        ("0 0 29 2 *", "2026-01-01T00:00:00", "2028-02-29T00:00:00"),
        ("0 0 29 2 *", "2096-03-01T00:00:00", "2104-02-29T00:00:00"),
        ("0 0 29 2 +SAT", "2076-03-01T00:00:00", "2116-02-29T00:00:00"),
        ("0 0 * 2 MON#5", "2026-01-01T00:00:00", "2044-02-29T00:00:00"),
    ] {
        let found = parse(expression).unwrap().at_or_after(local(after) + 1).unwrap();
        assert_eq!(text(found), next, "{expression} after {after}");
    }
}

#[test]
fn errors_name_field_and_valid_values() {
    for (expression, problem) in [
        (
            "",
            "has 0 fields; write 5 (minute, hour, day of the month, month, weekday), or 6 with the second in front",
        ),
        ("* * * *", "has 4 fields; write 5"),
        ("60 * * * *", "field 1 (minute): `60` is not valid; use 0 to 59"),
        ("60 * * * * *", "field 1 (second): `60` is not valid; use 0 to 59"),
        ("0 24 * * *", "field 2 (hour): `24` is not valid; use 0 to 23"),
        (
            "0 0 * FEV *",
            "field 4 (month): `FEV` is not valid; use 1 to 12, or JAN to DEC",
        ),
        (
            "0 0 * * 8",
            "field 5 (weekday): `8` is not valid; use 0 to 7, or SUN to SAT",
        ),
        (
            "0 0 * * MON#6",
            "field 5 (weekday): `MON#6` needs a number from 1 to 5, or L, after the `#`",
        ),
        ("0 0 1-5L * *", "field 3 (day of the month): `5L` is not valid"),
        (
            "0 0 L,LW * *",
            "field 3 (day of the month): `L` and `LW` cannot be combined",
        ),
        (
            "0/10 * * * *",
            "field 1 (minute): `0/10` has a step without a range; write `0-59/10`, or `*/10`",
        ),
        (
            "*/0 * * * *",
            "field 1 (minute): the step `0` of `*/0` must be from 1 to 60",
        ),
        (
            "5-1 * * * *",
            "field 1 (minute): the range `5-1` ends before it begins; write its values as a list",
        ),
        ("1,,2 * * * *", "field 1 (minute): an item of the list is empty"),
        ("*,5 * * * *", "field 1 (minute): `*` cannot be an item of a list"),
        ("? * * * *", "field 1 (minute): `?` is not valid"),
        ("@reboot", "`@reboot` is not known; use one of @hourly, @daily"),
        (
            "0 0 * * *\n",
            "contains the character '\\n'; use ASCII, with spaces between fields",
        ),
        (
            "０ 0 * * *",
            "contains the character '０'; use ASCII, with spaces between fields",
        ),
        (
            "0 0 30 2 *",
            "never matches: no month of the expression has a day that it selects",
        ),
        ("0 0 1 * +MON#2", "never matches"),
    ] {
        let error = parse(expression).unwrap_err();
        assert_eq!(error.field, "cron.expression");
        assert!(
            error.problem.starts_with(problem),
            "{expression}: {}",
            error.problem
        );
    }
    let long = "1,".repeat(200);
    assert_eq!(
        parse(&long).unwrap_err().problem,
        "has 400 bytes; at most 256 are allowed"
    );
}

#[test]
fn random_text_is_refused_or_matches() {
    let valid = [
        "0 */5 9-17 ? JAN-MAR,7 MON-FRI",
        "0 0 LW 2 *",
        "15 3 15W,L * +FRI#5",
        "@daily",
        "59 59 23 29 2 6L",
    ];
    let valid = valid.map(|text| text.as_bytes().to_vec());
    fuzz::fuzz("cron expressions", 20 * fuzz::FEW, &valid, |input| {
        let Ok(text) = std::str::from_utf8(input) else {
            return;
        };
        if let Ok(calendar) = parse(text) {
            // The number of visited months is the cost of a search.
            let next = calendar.at_or_after(NEW_YEAR).unwrap();
            assert!(next - NEW_YEAR <= 41 * 366 * 86_400, "{text}");
            let previous = calendar.at_or_before(NEW_YEAR).unwrap();
            assert!(NEW_YEAR - previous <= 41 * 366 * 86_400, "{text}");
        }
    });
}

#[test]
fn unreachable_expressions_end() {
    let calendar = parse("0 0 29 2 *").unwrap();
    assert_eq!(calendar.at_or_after(local("9997-01-01T00:00:00")), None);
    assert_eq!(calendar.at_or_before(local("-009998-01-01T00:00:00")), None);
    assert_eq!(calendar.at_or_after(i64::MAX), None);
    assert_eq!(calendar.at_or_before(i64::MIN), None);
    assert_eq!(calendar.count(i64::MIN, i64::MAX), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_calendar_selects_what_croner_matches(
        expression in expression(),
        day in -40_000..40_000i64,
        times in prop::collection::vec(0..86_400i64, 50),
    ) {
        let pattern = pattern(&expression);
        let calendar = parse(&expression);
        for (offset, time) in times.into_iter().enumerate() {
            let local = (day + offset as i64) * 86_400 + time;
            let expected = matches(&pattern, local);
            prop_assert_eq!(
                calendar.as_ref().is_ok_and(|calendar| calendar.contains(local)), expected, "{}", text(local)
            );
            // Most times do not match; the first match on the same day does.
            if let Some(found) = calendar.as_ref().ok().and_then(|calendar| calendar.at_or_after(local)) {
                prop_assert!(matches(&pattern, found), "{}", text(found));
            }
        }
    }

    #[test]
    fn searches_and_counts_equal_a_walk(
        expression in expression(),
        start in -2_000_000_000..4_000_000_000i64,
        length in 0..60_000i64,
    ) {
        prop_assume!(parse(&expression).is_ok());
        let calendar = parse(&expression).unwrap();
        let pattern = pattern(&expression);
        let walk: Vec<i64> = (start..start + length).filter(|local| matches(&pattern, *local)).collect();
        prop_assert_eq!(calendar.count(start, start + length - 1), walk.len() as u64);
        let in_range = |local: &i64| (start..start + length).contains(local);
        prop_assert_eq!(calendar.at_or_after(start).filter(in_range), walk.first().copied());
        prop_assert_eq!(calendar.at_or_before(start + length - 1).filter(in_range), walk.last().copied());
    }
}
