//! Filters, pages and watches, and which index answers them.

use super::super::message_cache::MessageCache;
use super::super::tables::LetterRow;
use super::*;

#[test]
fn many_headers_are_found() {
    let headers: Vec<(String, &str)> = (0..100_000).map(|number| (format!("h{number}"), "x")).collect();
    let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (&**name, *value)).collect();
    let large = letter("a-dlq", 0, 1, &headers);
    let document = terms::document(&large, 1);
    assert!(
        document.split_whitespace().count() <= 256,
        "{} terms",
        document.len()
    );
    assert!(large.headers.len() <= 64 << 10, "{} bytes", large.headers.len());
    let mut fixture = Fixture::new();
    fixture.put(vec![large, letter("a-dlq", 0, 2, &[("h1", "x"), ("h900", "y")])]);
    for (filter, expected) in [
        ("headers.h1 = x", &[2, 1][..]),
        // It has no term.
        ("headers.h900 = x", &[1]),
        ("headers.h900 = y", &[2]),
        ("headers.h900 = z", &[]),
        ("NOT headers.h900 = x", &[2]),
    ] {
        assert_eq!(fixture.matching(filter), expected, "{filter}");
    }
}

#[test]
fn filters_select_dead_letters() {
    let mut fixture = Fixture::new();
    fixture.put(vec![
        letter(
            "a-dlq",
            0,
            1,
            &[("error-class", "permanent"), ("tenant", "x"), ("tenant", "y")],
        ),
        letter(
            "a-dlq",
            1,
            2,
            &[
                ("error-class", "exhausted"),
                ("error-code", "http.503"),
                ("retry-count", "5"),
            ],
        ),
        letter(
            "b-dlq",
            0,
            3,
            &[
                ("error-class", "exhausted"),
                ("error-message", "50% of it's gone"),
            ],
        ),
        letter("b-dlq", 0, 4, &[("tenant", ""), ("job-id", "j-4")]),
    ]);
    let check = |filter: &str, expected: &[i64]| assert_eq!(fixture.matching(filter), expected, "{filter}");
    check("", &[4, 3, 2, 1]);
    check("topic = a-dlq", &[2, 1]);
    check("topic = none", &[]);
    check("NOT topic = none", &[4, 3, 2, 1]);
    check("topic : b", &[4, 3]);
    check("error_class = exhausted AND topic != b-dlq", &[2]);
    check("error_class : *", &[3, 2, 1]);
    check("retry_count > 3", &[2]);
    check("error_message : \"50% of it's\"", &[3]);
    check("error_message : Gone", &[]);
    check("headers.tenant = y", &[1]);
    check("headers.tenant : *", &[4, 1]);
    check("NOT headers.tenant : *", &[3, 2]);
    check("headers.tenant = \"\"", &[4]);
    check("headers.tenant != x", &[4, 3, 2]);
    check("id = a-dlq/1/2", &[2]);
    check("key = key-3 OR job_id = j-4", &[4, 3]);
    check("partition = 1 OR offset >= 4", &[4, 2]);
    check("dead_at <= \"1970-01-01T00:00:00.002Z\"", &[2, 1]);
    check("failed_at < \"2030-01-01T00:00:00Z\"", &[]);
    check("NOT failed_at < \"2030-01-01T00:00:00Z\"", &[4, 3, 2, 1]);
    check("value_size = 7 state = open dialect = redeliver", &[3, 2, 1]);
    check("topic = \"a-dlq' OR '1'='1\"", &[]);
}

#[test]
fn expiring_letters_are_found() {
    let mut fixture = Fixture::new();
    for topic in ["short-dlq", "long-dlq", "endless-dlq"] {
        fixture.put((0..10).map(|offset| letter(topic, 0, offset, &[])).collect());
    }
    let ages = [("short-dlq".to_owned(), 5), ("long-dlq".to_owned(), 8)].into();
    let ages = std::sync::Arc::new(ages);
    let found = |filter: &str| {
        let filter = parse(filter, &[]).unwrap().with_ages(&ages);
        let page =
            fixture.read(|connection| list(connection, &filter, Direction::Ascending, None, letters(100)));
        let found = page
            .letters
            .iter()
            .map(|letter| (letter.id.topic[..1].to_owned(), letter.id.offset));
        let mut found: Vec<_> = found.map(|(topic, offset)| format!("{topic}{offset}")).collect();
        found.sort();
        found.join(" ")
    };
    for (filter, expected) in [
        ("expires_at < 1970-01-01T00:00:00.010Z", "l0 l1 s0 s1 s2 s3 s4"),
        ("expires_at >= 1970-01-01T00:00:00.016Z", "l8 l9"),
        ("expires_at = 1970-01-01T00:00:00.010Z state = OPEN", "l2 s5"),
        ("NOT expires_at:* offset < 2", "e0 e1"),
        ("expires_at < 1970-01-01T00:00:00.010Z topic = long-dlq", "l0 l1"),
    ] {
        assert_eq!(found(filter), expected, "{filter}");
    }
}

#[test]
fn pages_contain_each_letter_once() {
    const COUNT: i64 = 12_000;
    let mut fixture = Fixture::new();
    let mut extra = 0;
    let classes = ["permanent", "exhausted", "expired"];
    for start in (0..COUNT).step_by(3_000) {
        let batch = (start..start + 3_000).map(|offset| {
            let class = classes[usize::try_from(offset % 3).unwrap()];
            // Many have the same time, and the order of times is not that of arrival.
            at(
                (offset * 7919) % 1000,
                "t-dlq",
                (offset % 4) as i32,
                offset,
                &[("error-class", class)],
            )
        });
        fixture.put(batch.collect());
    }
    for (filter, direction, expected) in [
        ("", Direction::Descending, COUNT),
        ("", Direction::Ascending, COUNT),
        ("error_class = permanent", Direction::Descending, (COUNT + 2) / 3),
    ] {
        let mut seen = HashSet::new();
        let mut after: Option<Cursor> = None;
        loop {
            let page = fixture.list(filter, direction, after, 499);
            let Some(last) = page.last() else { break };
            let end = last.cursor();
            after = Some(end);
            for found in &page {
                if &*found.id.topic == "t-dlq" {
                    assert!(seen.insert(found.id.offset), "{} twice", found.id);
                }
            }
            let in_order = page.windows(2).all(|pair| {
                let (first, second) = (pair[0].cursor(), pair[1].cursor());
                if direction == Direction::Ascending {
                    first < second
                } else {
                    first > second
                }
            });
            assert!(in_order, "page up to {end:?}");
            extra += 1;
            fixture.put(vec![at(
                extra,
                "more-dlq",
                0,
                extra,
                &[("error-class", "permanent")],
            )]);
        }
        assert_eq!(seen.len() as i64, expected, "{filter}");
    }
}

#[tokio::test]
async fn abandoned_query_is_interrupted() {
    let mut fixture = Fixture::new();
    fixture.put((0..2_000).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let endless = fixture.index.pool.internal(move |connection| {
        let sql = "SELECT count(*) FROM letters a, letters b, letters c, letters d";
        let result = connection.query_row(sql, (), |row| row.get::<_, i64>(0));
        sender.send(result.is_err()).unwrap();
        result
    });
    let timed_out = tokio::time::timeout(std::time::Duration::from_millis(20), endless).await;
    assert!(timed_out.is_err());
    let interrupted = tokio::task::spawn_blocking(move || receiver.recv())
        .await
        .unwrap();
    assert_eq!(interrupted, Ok(true));
    let id = parse_id("t-dlq/0/7").unwrap();
    let found = fixture
        .index
        .pool
        .internal(move |connection| get(connection, &id));
    assert_eq!(found.await.unwrap().unwrap().id.offset, 7);
}

#[test]
fn large_headers_end_a_page_early() {
    let mut fixture = Fixture::new();
    let large = "x".repeat(60 << 10);
    let with_large = (0..100).map(|offset| letter("t-dlq", 0, offset, &[("large", &large)]));
    fixture.put(with_large.collect());
    let everything = Expr::And(Vec::new());
    let stretch = |next| {
        let part = Unread { next, ..part(0) };
        let query = |connection: &_| {
            list_unread(
                connection,
                &everything,
                &MessageCache::default(),
                &[part],
                letters(100),
            )
        };
        let stretch = fixture.read(query);
        (stretch.letters.len(), stretch.next)
    };
    assert_eq!(stretch(0), (69, vec![69]));
    assert_eq!(stretch(80), (20, vec![100_000]));
    let query = |connection: &_| list(connection, &everything, Direction::Descending, None, letters(2));
    let limited = fixture.read(query);
    assert_eq!((limited.letters.len(), limited.has_more), (2, true));
}

#[test]
fn equalities_and_states_use_an_index() {
    let mut fixture = Fixture::new();
    fixture.json_fields = JSON_FIELDS.as_slice();
    varied(&mut fixture, 100);
    let terms = "SCAN terms VIRTUAL TABLE INDEX";
    let topic = "SEARCH l USING INDEX letters_by_topic_and_state (topic_id=? AND state=?";
    let code = "SEARCH l USING INDEX letters_by_state_and_code (state=? AND error_code_id=?";
    let state = "SEARCH l USING INDEX letters_by_state (state=?";
    let time = "SEARCH l USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)";
    let id = "SEARCH l USING INDEX letters_by_position (topic_id=? AND partition=? AND offset=?)";
    for (filter, expected) in [
        ("", time),
        ("dead_at > 2026-01-01T00:00:00Z", time),
        ("error_class = permanent", terms),
        ("error_code = http.401", terms),
        ("pipeline = p1", terms),
        ("topic = a-dlq", terms),
        ("topic = a-dlq AND state = OPEN", topic),
        ("topic = a-dlq state = OPEN dead_at > 2026-01-01T00:00:00Z", topic),
        ("error_code = http.401 AND state = OPEN", code),
        ("state = OPEN", state),
        ("state = DISCARDED AND headers.tenant = t1", state),
        ("key = key-7", terms),
        ("headers.tenant = t1", terms),
        ("headers.request = r7", terms),
        ("headers.tenant = t1 AND state = OPEN", terms),
        ("json./order/id = o7", terms),
        ("job_id = j7", terms),
        ("trace_id = 00000000000000000000000000000008", terms),
        (
            "origin.topic = docs AND origin.partition = 3 AND origin.offset = 1",
            terms,
        ),
        ("origin.offset = 1", terms),
        (
            "headers.tenant = t1 AND error_code = http.401 AND topic = a-dlq AND state = OPEN",
            terms,
        ),
        ("key = key-7 OR job_id = j8", terms),
        ("error_message : refused", terms),
        ("error_message = 'host-2 refused after 7 ms'", terms),
        ("id = b-dlq/0/7", id),
    ] {
        let parsed = parse(filter, fixture.json_fields).unwrap();
        let steps = fixture.read(|connection| Ok(query_plan(connection, &parsed)));
        assert!(steps[0].starts_with(expected), "{filter}: {steps:?}");
        let others = &steps[1..];
        let looks_up = |step: &String| step.contains("USING INTEGER PRIMARY KEY (rowid=?)");
        // The lists of templates are read once.
        let lists = ["SUBQUERY", "json_each", "CREATE BLOOM FILTER"];
        let is_subquery = |step: &String| lists.iter().any(|part| step.contains(part));
        assert!(
            others.iter().all(|step| looks_up(step) || is_subquery(step)),
            "{filter}: {steps:?}"
        );
    }
}

#[test]
fn number_is_found_by_any_spelling() {
    let mut fixture = Fixture::new();
    fixture.json_fields = JSON_FIELDS.as_slice();
    let values = [
        "18446744073709551616",
        "18446744073709551617",
        "0.1",
        "0.10000000000000001",
        "1e2",
        r#""100""#,
        r#""1e2""#,
        "1e400",
        "true",
    ];
    let fields = JsonFields::new(&JSON_FIELDS);
    let letters = values.iter().zip(0..).map(|(value, offset)| {
        let mut letter = letter("t-dlq", 0, offset, &[]);
        letter.json_fields = fields.read(Some(format!(r#"{{"order":{{"id":{value}}}}}"#).as_bytes()));
        letter
    });
    fixture.put(letters.collect());
    for (filter, expected) in [
        ("= 18446744073709551616", &[0][..]),
        ("= 18446744073709551617.0", &[1]),
        ("= 0.10", &[2]),
        ("= 0.10000000000000001", &[3]),
        ("= 100", &[4, 5]),
        ("= 100.0", &[4]),
        ("= 1e2", &[4, 6]),
        ("= 10e399", &[7]),
        ("= true", &[8]),
        (": 00", &[3, 4, 5, 7]),
        (":*", &[0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("= nothing", &[]),
    ] {
        for filter in [
            format!("json./order/id {filter}"),
            // A double negation is answered by a scan.
            format!("NOT (NOT (json./order/id {filter}))"),
        ] {
            let mut found = fixture.matching(&filter);
            found.sort_unstable();
            assert_eq!(found, expected, "{filter}");
        }
    }
}

#[test]
fn index_finds_what_scan_finds() {
    let mut fixture = Fixture::new();
    fixture.json_fields = JSON_FIELDS.as_slice();
    varied(&mut fixture, 300);
    fixture.apply(&[Change::Ledger(
        (0..40)
            .map(|number| {
                let topic = ["a-dlq", "b-dlq"][number % 2];
                update(&format!("{topic}/0/{}", number * 3), Some(State::Discarded), None)
            })
            .collect(),
    )]);
    for filter in [
        "error_class = permanent",
        "topic = a-dlq AND state = OPEN",
        "topic = a-dlq AND state = DISCARDED",
        "error_code = http.401 AND state = OPEN",
        "state = DISCARDED",
        "key = key-7",
        "key = key-7 OR job_id = j8 OR headers.request = r299",
        "headers.tenant = t1 AND error_code = http.403 AND topic = b-dlq",
        "headers.tenant = t1 AND NOT error_code = http.403",
        "headers.tenant = T1",
        "json./order/id = o7",
        "trace_id = 00000000000000000000000000000008",
        "origin.topic = docs AND origin.partition = 3 AND origin.offset = 1",
        "error_message : refused",
        "error_message : \"host-2 refused after 7 \"",
        "error_message : \"after 29\"",
        "error_message = \"host-2 refused after 7 ms\"",
        "error_message : none",
        "id = b-dlq/0/7",
        "topic = a-dlq AND dead_at >= 2023-11-14T22:13:20.300Z",
    ] {
        let found: Vec<i64> = fixture.matching(filter);
        // A double negation is answered by a scan.
        let scanned: Vec<i64> = fixture.matching(&format!("NOT (NOT ({filter}))"));
        assert_eq!(found, scanned, "{filter}");
        assert!(
            !found.is_empty() || filter.contains("none") || filter.contains("T1"),
            "{filter}"
        );
        let of_index = fixture.counts(filter, [1_700_000_000_450; 3]);
        let of_scan = fixture.counts(&format!("NOT (NOT ({filter}))"), [1_700_000_000_450; 3]);
        assert_eq!(of_index, of_scan, "{filter}");
    }
}

#[test]
fn pages_continue_in_another_index() {
    let (mut first, mut second) = (Fixture::new(), Fixture::new());
    // Many share a time, and the two read the partitions in different orders.
    let partition = |partition: i32| {
        Change::Letters(
            (0..200)
                .map(|offset| at(1_000 + offset / 50, "t-dlq", partition, offset, &[]))
                .collect(),
        )
    };
    first.apply(&[partition(0), partition(1)]);
    second.apply(&[partition(1)]);
    second.apply(&[partition(0)]);
    for direction in [Direction::Descending, Direction::Ascending] {
        let (mut seen, mut after) = (Vec::new(), None);
        for turn in 0.. {
            let fixture = if turn % 2 == 0 { &first } else { &second };
            let page = fixture.list("", direction, after, 7);
            let Some(last) = page.last() else { break };
            after = Some(last.cursor());
            seen.extend(page.into_iter().map(|letter| letter.id.to_string()));
        }
        let distinct: HashSet<&String> = seen.iter().collect();
        assert_eq!((seen.len(), distinct.len()), (400, 400), "{direction:?}");
    }
}

#[test]
fn deepest_filter_is_answered() {
    let mut fixture = Fixture::new();
    fixture.put(vec![
        letter("t-dlq", 0, 1, &[("tenant", "x")]),
        letter("t-dlq", 0, 2, &[("tenant", "y")]),
    ]);
    for operators in [["AND", "OR"], ["OR", "AND"]] {
        // The inner part decides: AND joins it with what is true, and OR with what is false.
        let mut filter = "headers.tenant = x".to_owned();
        for depth in 0..crate::filter::MAX_DEPTH {
            let operator = operators[depth % 2];
            let other = if operator == "AND" {
                "topic = t-dlq"
            } else {
                "topic = none"
            };
            filter = format!("({other} {operator} {filter})");
        }
        assert_eq!(fixture.matching(&filter), [1], "{filter}");
    }
}

#[test]
fn page_tokens_are_stable() {
    let mut fixture = Fixture::new();
    fixture.put(vec![at(7, "t-dlq", 3, 44, &[])]);
    let expected = Cursor {
        dead_at: 7,
        id_hash: 0x2ed9_6285_c08d_c8a9,
    };
    assert_eq!(fixture.get("t-dlq/3/44").unwrap().cursor(), expected);
}

/// All dead letters of a partition of `t-dlq`.
fn part(partition: i32) -> Unread {
    Unread {
        topic: "t-dlq".into(),
        partition,
        next: 0,
        end: 100_000,
    }
}

#[test]
fn watches_read_partitions_in_order() {
    let mut fixture = Fixture::new();
    let all = (0..50_000).map(|number| letter("t-dlq", number % 2, (number / 2).into(), &[]));
    fixture.put(all.collect());
    let stretch = |filter: &str, parts: &[Unread]| {
        let filter = parse(filter, &[]).unwrap();
        let query =
            |connection: &_| list_unread(connection, &filter, &MessageCache::default(), parts, letters(997));
        fixture.read(query)
    };
    let mut parts = vec![part(0), part(2), part(1)];
    let mut seen = [0_i64; 2];
    while !parts.is_empty() {
        let stretch = stretch("", &parts);
        for letter in stretch.letters {
            let next = &mut seen[usize::try_from(letter.id.partition).unwrap()];
            assert_eq!(letter.id.offset, *next);
            *next += 1;
        }
        for (part, next) in parts.iter_mut().zip(stretch.next) {
            part.next = next;
        }
        parts.retain(|part| part.next < part.end);
        parts.reverse();
    }
    assert_eq!(seen, [25_000; 2]);
    // Without a match, a part is read at a time.
    let parts = [part(1), part(0)];
    assert_eq!(stretch("pipeline = none", &parts).next, [20_000]);
    let part = Unread {
        next: 20_000,
        ..part(1)
    };
    let stretch = stretch("offset = 24999", &[part, parts[1].clone()]);
    assert_eq!((stretch.letters.len(), stretch.next), (1, vec![100_000, 15_000]));
}

#[test]
fn watch_finds_messages_of_new_templates() {
    let mut fixture = Fixture::new();
    let with_message = |offset, message: &str| {
        letter(
            "t-dlq",
            0,
            offset,
            &[("error-class", "permanent"), ("error-message", message)],
        )
    };
    let filter = parse("error_message : refused", &[]).unwrap();
    let known = MessageCache::default();
    let found = |fixture: &Fixture| -> Vec<i64> {
        let query = |connection: &_| list_unread(connection, &filter, &known, &[part(0)], letters(9));
        let letters = fixture.read(query).letters;
        letters.into_iter().map(|letter| letter.id.offset).collect()
    };
    fixture.put(vec![with_message(1, "refused by host"), with_message(2, "gone")]);
    assert_eq!(found(&fixture), [1]);
    fixture.put(vec![with_message(3, "refused again"), with_message(4, "lost")]);
    assert_eq!(found(&fixture), [1, 3]);
    // The id of a deleted template is not used for another one.
    let trim = trim("t-dlq", 0, 2_000);
    fixture.put(
        (5..2_000)
            .map(|offset| with_message(offset, "refused for good"))
            .collect(),
    );
    fixture.apply(&[trim]);
    fixture.put(vec![
        with_message(2_000, "not at all"),
        with_message(2_001, "refused at last"),
    ]);
    assert_eq!(found(&fixture), [2_001]);
}

/// A filter of a caller that sees these topics.
fn seen_in(fixture: &Fixture, filter: &str, sees: impl Fn(&str) -> bool) -> Expr {
    let topics = fixture.read(topics).into_iter();
    let topics = topics.filter(|(_, topic)| sees(topic)).collect();
    let filter = parse(filter, fixture.json_fields).unwrap();
    Expr::And(vec![Expr::Is(Restriction::TopicIn(topics)), filter])
}

#[test]
fn filter_takes_thousands_of_topics() {
    let mut fixture = Fixture::new();
    // SQLite permits expressions with a depth of 1,000.
    let dead = (0..1_050).map(|number| letter(&format!("t{number}-dlq"), 0, number, &[("tenant", "x")]));
    fixture.put(dead.collect());
    for (filter, topics, expected) in [
        ("", 1_050, 1_050),
        ("state = OPEN", 1_049, 1_049),
        ("headers.tenant = x", 50, 50),
        ("NOT headers.tenant = x", 50, 0),
        ("offset >= 10", 100, 90),
        ("", 0, 0),
    ] {
        let filter = seen_in(&fixture, filter, |topic| {
            let number = topic.trim_start_matches('t').trim_end_matches("-dlq");
            number.parse::<i64>().unwrap() < topics
        });
        let pool = &fixture.index.pool;
        let query = |connection: &_| list(connection, &filter, Direction::Descending, None, letters(5_000));
        assert_eq!(
            pool.read_blocking(query).unwrap().letters.len(),
            expected,
            "{filter:?}"
        );
        let since = [Timestamp::from_millis(0); 3];
        let counts = pool.read_blocking(|connection| count_by_topic(connection, &filter, since));
        assert_eq!(counts.unwrap().len(), expected, "{filter:?}");
        let groups = |connection: &_| list_groups(connection, &all_groups(&filter));
        assert_eq!(
            pool.read_blocking(groups).unwrap().groups.len(),
            expected,
            "{filter:?}"
        );
    }
}

#[test]
fn visible_topics_choose_the_driver() {
    use super::plan::Driver;

    let mut fixture = Fixture::new();
    let dead = |topic: &str, count| (0..count).map(|offset| letter(topic, 0, offset, &[])).collect();
    fixture.put(dead("a-dlq", 30));
    fixture.put(dead("b-dlq", 2));
    fixture.put(dead("c-dlq", 1));
    let driver = |fixture: &Fixture, filter: &str, sees: &str| {
        let filter = seen_in(fixture, filter, |topic| sees.contains(&topic[..1]));
        let plan = |connection: &_| super::query::plan(connection, &filter);
        fixture.read(plan).driver
    };
    // More dead letters are open than are in the topics.
    assert!(matches!(driver(&fixture, "state = OPEN", "bc"), Driver::Terms(_)));
    assert!(matches!(driver(&fixture, "", "bc"), Driver::Terms(_)));
    let of_topic = driver(&fixture, "state = OPEN AND topic = a-dlq", "ab");
    assert_eq!(of_topic, Driver::TopicAndState);
    let of_code = driver(&fixture, "state = OPEN AND error_code = x", "ab");
    assert_eq!(of_code, Driver::StateAndCode);
    let redriven = (0..29).map(|offset| update(&format!("a-dlq/0/{offset}"), Some(State::Redriven), None));
    fixture.apply(&[Change::Ledger(redriven.collect())]);
    assert_eq!(driver(&fixture, "state = OPEN", "ab"), Driver::State);
}

/// Dead letters of a topic, with these messages, a millisecond after each other.
fn with_messages(fixture: &mut Fixture, topic: &str, messages: impl Iterator<Item = String>) {
    let all = (0..).zip(messages).map(|(offset, message)| {
        let mut letter = letter(topic, 0, offset, &[("tenant", topic)]);
        letter.facts.error_message = message;
        letter
    });
    fixture.put(all.collect());
}

fn driver(fixture: &Fixture, filter: &str) -> super::plan::Driver {
    let filter = parse(filter, &[]).unwrap();
    let plan = |connection: &_| super::query::plan(connection, &filter);
    fixture.read(plan).driver
}

#[test]
fn frequent_number_is_searched_by_time() {
    use super::plan::Driver;

    let check = |numbered: i64, others: i64, is_by_time: bool| {
        let mut fixture = Fixture::new();
        let messages = (0..numbered).map(|offset| format!("refused after {offset} ms"));
        let others = (0..others).map(|_| "gone".to_owned());
        with_messages(&mut fixture, "a-dlq", messages.chain(others));
        let number = numbered - 1;
        for filter in [
            format!("error_message : {number}"),
            format!("error_message = \"refused after {number} ms\""),
        ] {
            let driver = driver(&fixture, &filter);
            assert_eq!(driver == Driver::Time, is_by_time, "{filter}: {driver:?}");
            assert_eq!(fixture.matching(&filter), [number], "{filter}");
        }
    };
    check(3_000, 1_000, true);
    check(3_000, 9_000, false);
    // So few that each of them is found quickly.
    check(1_000, 0, false);
}

#[test]
fn number_search_uses_rarer_condition() {
    use super::plan::Driver;

    let mut fixture = Fixture::new();
    with_messages(
        &mut fixture,
        "a-dlq",
        (0..4_000).map(|number| format!("refused after {number} ms")),
    );
    let is_by_terms = |fixture: &Fixture, filter: &str| matches!(driver(fixture, filter), Driver::Terms(_));
    let number = "error_message : 39";
    assert_eq!(driver(&fixture, number), Driver::Time);
    assert!(is_by_terms(
        &fixture,
        &format!("headers.tenant = a-dlq AND {number}")
    ));
    let before = |millis: i64| {
        let time = redeliver_core::Timestamp::from_millis(millis);
        format!("{number} AND dead_at < {time}")
    };
    // Fewer rows than are sampled are in the range.
    assert!(is_by_terms(&fixture, &before(1_000)));
    assert_eq!(driver(&fixture, &before(3_999)), Driver::Time);
    assert_eq!(
        driver(&fixture, &format!("state = OPEN AND {number}")),
        Driver::State
    );
    // An alternative that matches nothing needs no search of all rows.
    assert!(is_by_terms(
        &fixture,
        "headers.tenant = b OR error_message : gateway"
    ));
    assert_eq!(
        fixture.matching("headers.tenant = b OR error_message : gateway"),
        [0; 0]
    );
}

#[test]
fn messages_are_found_among_many_templates() {
    let mut fixture = Fixture::new();
    let with = |offset, message: &str| {
        let headers = [("error-class", "permanent"), ("error-message", message)];
        letter("t-dlq", 0, offset, &headers)
    };
    fixture.put(vec![with(1, "alpha 7 x"), with(2, "beta"), with(3, "the alpha")]);
    let connection = rusqlite::Connection::open(fixture.directory.path().join(FILE)).unwrap();
    connection
        .execute_batch(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100001) \
             INSERT INTO templates (text) SELECT 'alpha of ' || i FROM n",
        )
        .unwrap();
    let known = MessageCache::default();
    for _ in 0..2 {
        let found = known.matches(&connection, "alpha").unwrap();
        assert!(found.all.len() + found.some.len() <= 100_000);
    }
    assert_eq!(fixture.matching("error_message : alpha"), [3, 1]);
    assert_eq!(fixture.matching("error_message : \"lpha 7\""), [1]);
    assert_eq!(fixture.matching("NOT error_message : alpha"), [2]);
    assert_eq!(
        fixture.matching("error_message : alpha AND error_message : the"),
        [3]
    );
}

#[test]
fn rows_beyond_full_bucket_are_listed() {
    let mut fixture = Fixture::new();
    let dead = |time, offset| at(time, "t-dlq", 0, offset, &[]);
    fixture.put(vec![dead(3, 1)]);
    let connection = rusqlite::Connection::open(fixture.directory.path().join(FILE)).unwrap();
    let row: i64 = connection
        .query_row("SELECT row FROM letters", (), |row| row.get("row"))
        .unwrap();
    // All slots that the next dead letter tries in its bucket are taken.
    let first = LetterRow::load(&connection, row).unwrap();
    let mut insert = LetterRow::inserter(&connection).unwrap();
    let mut taken = 0;
    while row_key::candidate(Timestamp::from_millis(3), row + 1, taken)
        <= row_key::last(Timestamp::from_millis(3))
    {
        let other = LetterRow {
            row: row_key::candidate(Timestamp::from_millis(3), row + 1, taken),
            partition: 1,
            offset: taken,
            ..first.clone()
        };
        other.insert(&mut insert).unwrap();
        taken += 1;
    }
    fixture.put(vec![dead(3, 2), dead(9, 3)]);
    let mut cursor = None;
    let mut listed = Vec::new();
    while let [letter] = &fixture.list("partition = 0", Direction::Ascending, cursor, 1)[..] {
        listed.push(letter.id.offset);
        cursor = Some(letter.cursor());
    }
    assert_eq!(listed, [1, 2, 3]);
    let before = fixture.matching("partition = 0 dead_at < 1970-01-01T00:00:00.008Z");
    let after = fixture.matching("partition = 0 dead_at >= 1970-01-01T00:00:00.008Z");
    assert_eq!([after, before].concat(), [3, 2, 1]);
}
