//! Counts that the writer keeps up to date.

use jiff::tz::TimeZone;

use super::*;

#[test]
fn counts_depend_on_class_and_time() {
    let mut fixture = Fixture::new();
    fixture.put(vec![
        letter("a-dlq", 0, 10, &[("error-class", "permanent"), ("tenant", "x")]),
        letter("a-dlq", 0, 20, &[("error-class", "expired")]),
        letter("a-dlq", 0, 30, &[("error-class", "expired"), ("tenant", "x")]),
        letter("b-dlq", 0, 40, &[]),
    ]);
    fixture.mark("a-dlq/0/30", Some(State::Discarded));
    let counts = fixture.counts("", [30, 20, 0]);
    let names: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a-dlq", "b-dlq"]);
    let expected = TopicCounts {
        open: 2,
        total: 3,
        since: [1, 2, 3],
        oldest: Some(Timestamp::from_millis(10)),
        newest: Some(Timestamp::from_millis(20)),
        open_by_class: [("permanent".to_owned(), 1), ("expired".to_owned(), 1)].into(),
    };
    assert_eq!(counts[0].1, expected);
    let filtered = fixture.counts("headers.tenant = x", [0, 0, 0]);
    assert_eq!(
        (filtered.len(), filtered[0].1.open, filtered[0].1.total),
        (1, 1, 2)
    );
    let open = fixture.read(open_by_topic);
    let of = |count, oldest| super::query::OpenLetters {
        count,
        oldest: Timestamp::from_millis(oldest),
    };
    assert_eq!(
        open,
        [("a-dlq".to_owned(), of(2, 10)), ("b-dlq".to_owned(), of(1, 40))].into()
    );
}

#[test]
fn values_are_counted() {
    let mut fixture = Fixture::new();
    let day = 86_400_000;
    let of = |tenant| [("error-code", "http.422"), ("tenant", "old"), ("tenant", tenant)];
    fixture.put(vec![
        at(day - 1, "a-dlq", 0, 1, &of("x")),
        at(day, "a-dlq", 0, 2, &of("y")),
        at(day, "a-dlq", 0, 3, &of("x")),
        at(day + 3_600_000, "b-dlq", 0, 4, &of("x")),
        at(day, "b-dlq", 0, 5, &[]),
    ]);
    fixture.mark("a-dlq/0/3", Some(State::Discarded));
    let zone = TimeZone::fixed(jiff::tz::Offset::constant(1));
    let count = |by: &str, filter: &str, limit| {
        let by: Vec<CountField> = by
            .split(',')
            .map(|name| CountField::named(name).unwrap())
            .collect();
        let filter = parse(filter, &[]).unwrap();
        let query = Breakdown {
            filter: &filter,
            by: &by,
            zone: &zone,
            limit,
        };
        let shown = |topic: &str| {
            let hides = topic == "b-dlq";
            let shown = by.iter().map(|field| match field {
                CountField::Header(_) if hides => Shown::Text("<withheld>"),
                CountField::ErrorCode if hides => Shown::OfGroup,
                _ => Shown::Value,
            });
            shown.collect()
        };
        let counts = fixture.read(|connection| count_by(connection, &query, shown));
        let counted = counts
            .counts
            .iter()
            .map(|(values, count)| format!("{} {count}", values.join(",")));
        (counted.collect::<Vec<_>>().join("; "), counts.other)
    };
    for (by, filter, expected) in [
        (
            "error_code,headers.tenant",
            "",
            "http.422,x 2; ,<withheld> 1; http.422,<withheld> 1; http.422,y 1",
        ),
        ("topic,state", "", "a-dlq,OPEN 2; b-dlq,OPEN 2; a-dlq,DISCARDED 1"),
        ("topic", "headers.tenant = x AND state = OPEN", "a-dlq 1; b-dlq 1"),
        ("day", "", "1970-01-02 5"),
        (
            "hour",
            "",
            "1970-01-02T01:00+01:00 3; 1970-01-02T00:00+01:00 1; 1970-01-02T02:00+01:00 1",
        ),
        ("pipeline,error_class", "offset < 0", ""),
    ] {
        assert_eq!(count(by, filter, 10), (expected.to_owned(), 0), "{by}");
    }
    assert_eq!(count("headers.tenant", "", 1), ("<withheld> 2".to_owned(), 3));
    assert_eq!(CountField::named("headers."), None);
    assert_eq!(CountField::named("key"), None);
}

#[test]
fn many_values_are_counted_in_part() {
    let mut fixture = Fixture::new();
    let dead = |offset: i64| {
        letter(
            "a-dlq",
            0,
            offset,
            &[("tenant", (offset / 2).to_string().as_str())],
        )
    };
    fixture.put((0..20_010).map(dead).collect());
    let by = [CountField::Header("tenant".to_owned())];
    let query = Breakdown {
        filter: &parse("", &[]).unwrap(),
        by: &by,
        zone: &TimeZone::UTC,
        limit: 3,
    };
    let counts = fixture.read(|connection| count_by(connection, &query, |_| vec![Shown::Value]));
    assert_eq!(
        (counts.total, counts.other, counts.is_partial),
        (20_010, 20_004, true)
    );
}

#[test]
fn first_and_last_letters_are_found() {
    let mut fixture = Fixture::new();
    fixture.put((0..10).map(|offset| letter("a-dlq", 0, offset, &[])).collect());
    fixture.put(vec![letter("a-dlq", 1, 5, &[])]);
    let read = |topic: &str, lows: &[(i32, i64)]| {
        let digests = fixture.read(|connection| first_and_last(connection, topic, lows));
        let positions = digests.iter().map(|digest| (digest.partition, digest.offset));
        positions.collect::<Vec<_>>()
    };
    assert_eq!(read("a-dlq", &[(0, 4), (1, 0), (2, 0)]), [(0, 4), (0, 9), (1, 5)]);
    assert_eq!(read("none", &[(0, 0)]), []);
}

#[test]
fn counters_equal_the_rows() {
    let mut fixture = Fixture::new();
    let mut random = redeliver_testkit::chaos_random("counters_equal_the_rows");
    for round in 0..30 {
        let changes: Vec<Change> = (0..random.usize(1..5))
            .map(|_| {
                let topic = ["a-dlq", "b-dlq"][random.usize(..2)];
                let offset = random.i64(0..300);
                match random.u8(..10) {
                    0..=5 => Change::Letters(
                        (offset..offset + 20)
                            .map(|offset| {
                                let class = if offset % 2 == 0 { "permanent" } else { "expired" };
                                at(offset * 97_531, topic, 0, offset, &[("error-class", class)])
                            })
                            .collect(),
                    ),
                    6 | 7 => Change::Ledger(
                        (offset..offset + 30)
                            .map(|offset| {
                                let state =
                                    [None, Some(State::Discarded), Some(State::Redriven)][random.usize(..3)];
                                update(&format!("{topic}/0/{offset}"), state, None)
                            })
                            .collect(),
                    ),
                    8 => trim(topic, 0, offset / 3),
                    _ if random.bool() => Change::ForgetLedger,
                    _ => forget(topic),
                }
            })
            .collect();
        fixture.apply(&changes);
        let since = [0, 1, 2].map(|_| random.i64(-5..30_000_000));
        for filter in [
            "",
            "topic = a-dlq",
            "state = OPEN",
            "error_class != permanent AND topic : a",
        ] {
            let counted = fixture.counts(filter, since);
            // A restriction on another field makes the query read the rows.
            let of_rows = fixture.counts(&format!("{filter} offset >= 0"), since);
            assert_eq!(counted, of_rows, "{filter} in round {round}");
        }
    }
}

#[test]
fn rare_class_is_counted_cheaply() {
    let mut fixture = Fixture::new();
    let dead = |offset: i64| {
        let class = match offset {
            50 | 60 => "rare",
            51 => "redriven",
            _ => "frequent",
        };
        letter("a-dlq", 0, offset, &[("error-class", class)])
    };
    fixture.put((0..100).map(dead).collect());
    fixture.mark("a-dlq/0/60", Some(State::Redriven));
    let costs = |fixture: &Fixture| {
        [
            "error_class = rare",
            "error_class = rare AND topic = a-dlq AND state = OPEN",
        ]
        .map(|filter| {
            let filter = parse(filter, fixture.json_fields).unwrap();
            // A count since a time in a second reads the dead letters of that second.
            let since = [Timestamp::from_millis(100_000); 3];
            let (cost, counts) = cost(fixture, |connection| count_by_topic(connection, &filter, since));
            let counts = &counts["a-dlq"];
            let time = Some(Timestamp::from_millis(50));
            assert_eq!((counts.open, counts.oldest, counts.newest), (1, time, time));
            cost
        })
    };
    let before = costs(&fixture);
    fixture.put((100..5_000).map(dead).collect());
    for (before, after) in before.into_iter().zip(costs(&fixture)) {
        // The counters are more.
        assert!(after < 2 * before + 20, "{before} {after}");
    }
}
