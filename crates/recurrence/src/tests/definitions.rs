use super::*;

#[test]
fn errors_name_field_and_valid_values() {
    let berlin = || cron("0 3 * * *", "Europe/Berlin", Gap::Shift, None);
    let zone = |name: &str| cron("0 3 * * *", name, Gap::Shift, None);
    let misfire = |policy, grace: &str| Definition {
        misfire: Misfire {
            policy,
            grace: grace.parse().unwrap(),
        },
        ..berlin()
    };
    let range = |start: &str, end: &str| Definition {
        start: Some(at(start)),
        end: Some(at(end)),
        ..cron("0 3 29 2 *", "Europe/Berlin", Gap::Shift, None)
    };
    for (definition, field, problem) in [
        (
            zone("Europe/Berln"),
            "cron.zone",
            "`Europe/Berln` is not an IANA time zone, did you mean `Europe/Berlin`?",
        ),
        (
            zone("New York"),
            "cron.zone",
            "`New York` is not an IANA time zone, did you mean `America/New_York`?",
        ),
        (
            zone("Zzzzzzzzzzzz"),
            "cron.zone",
            "`Zzzzzzzzzzzz` is not an IANA time zone; use a name such as Europe/Berlin",
        ),
        (
            zone(""),
            "cron.zone",
            "is empty; use a name such as Europe/Berlin",
        ),
        (
            zone(&"x".repeat(65)),
            "cron.zone",
            "has 65 bytes; no IANA zone has more than 64",
        ),
        (
            every("999ms", None),
            "every.interval",
            "999ms is out of range: must be between 1s and 366d",
        ),
        (
            every("1h", Some(Timestamp::from_millis(-1))),
            "every.anchor",
            "1969-12-31T23:59:59.999Z is out of range: must be between 1970-01-01T00:00:00.000Z and 9999-12-30T00:00:00.000Z",
        ),
        (
            range("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"),
            "end",
            "2026-01-01T00:00:00.000Z is before the start 2026-01-02T00:00:00.000Z; must not be earlier",
        ),
        (
            range("2026-01-02T00:00:00Z", "2028-02-28T00:00:00Z"),
            "end",
            "is before the first occurrence",
        ),
        (
            Definition {
                jitter: "25h".parse().unwrap(),
                ..berlin()
            },
            "jitter",
            "25h is out of range: must be at most 1d",
        ),
        (
            Definition {
                max_count: Some(0),
                ..berlin()
            },
            "max_count",
            "is 0; must be at least 1, or not set",
        ),
        (
            misfire(MisfirePolicy::Skip, "9s"),
            "misfire.grace",
            "9s is out of range: must be between 10s and 366d",
        ),
        (
            misfire(MisfirePolicy::All { limit: 0 }, "1m"),
            "misfire.limit",
            "0 is out of range: must be between 1 and 1000",
        ),
    ] {
        let error = Recurrence::new(definition).unwrap_err();
        assert_eq!(error.field, field);
        assert!(error.problem.starts_with(problem), "{}", error.problem);
    }
}

#[test]
fn defaults_are_filled_in() {
    let recurrence = Recurrence::new(cron("0 3 * * *", "europe/berlin", Gap::Shift, None)).unwrap();
    let expected = cron("0 3 * * *", "Europe/Berlin", Gap::Shift, Some(Overlap::First));
    assert_eq!(recurrence.definition(), &expected);
    assert_eq!(Recurrence::new(expected).unwrap(), recurrence);

    let start = at("2026-01-01T12:34:56Z");
    let recurrence = Recurrence::new(Definition {
        start: Some(start),
        ..every("1h", None)
    })
    .unwrap();
    assert_eq!(
        recurrence.definition().timing,
        Timing::Every {
            interval: "1h".parse().unwrap(),
            anchor: Some(start)
        }
    );
}

#[test]
fn ids_contain_no_separators() {
    for wrong in ["", "a b", "a@b", "a+b", "a:b", "ä", &"x".repeat(129)] {
        assert_eq!(wrong.parse::<ScheduleId>().unwrap_err().field, "id", "{wrong}");
    }
    let id: ScheduleId = "Daily.report_1-a".parse().unwrap();
    let nominal = at("2026-03-29T01:30:00Z");
    assert_eq!(
        id.occurrence(nominal),
        "Daily.report_1-a@2026-03-29T01:30:00.000Z"
    );
    let command = JobId::new(nominal, 3, 7);
    assert_eq!(id.triggered(command), format!("Daily.report_1-a+{command}"));
}
