//! Groups of dead letters.

use super::*;

#[test]
fn group_sums_up_its_letters() {
    let mut fixture = Fixture::new();
    let timeout = |topic: &str, offset: i64| {
        let message = format!("timeout after {offset} ms");
        let headers = [
            ("error-class", "permanent"),
            ("error-code", "timeout"),
            ("error-message", &*message),
            ("pipeline", "crawl"),
            ("error-timestamp", "1970-01-01T00:00:00.007Z"),
        ];
        at(3_600_000 * offset, topic, 0, offset, &headers)
    };
    let refused = letter("b-dlq", 0, 5, &[("error-class", "permanent")]);
    fixture.put(vec![
        timeout("a-dlq", 1),
        timeout("a-dlq", 23),
        timeout("b-dlq", 2),
        timeout("b-dlq", 3),
        refused,
    ]);
    fixture.mark("b-dlq/0/3", Some(State::Discarded));
    let listed = fixture.groups("", GroupOrder::Last, None, 10);
    assert_eq!((listed.groups.len(), listed.next), (2, None));
    let group = &listed.groups[0];
    assert_eq!(group.template, "timeout after <number> ms");
    assert_eq!(
        (&*group.pipeline, &*group.error_class, &*group.error_code),
        ("crawl", "permanent", "timeout")
    );
    assert_eq!((group.count, group.open), (4, 3));
    let hour = |hour: i64| Timestamp::from_millis(3_600_000 * hour);
    assert_eq!((group.first, group.last), (hour(1), hour(23)));
    let topics: Vec<(&str, u64)> = group
        .topics
        .iter()
        .map(|(name, count)| (&**name, *count))
        .collect();
    assert_eq!(topics, [("a-dlq", 2), ("b-dlq", 2)]);
    // The trend ends with the hour that begins at 24:00.
    let mut trend = vec![0; 24];
    for hour in [0, 1, 2, 22] {
        trend[hour] = 1;
    }
    assert_eq!(group.trend, trend);
    let trends = fixture.read(|connection| crate::index::trends(connection, hour(24)));
    assert_eq!(trends.keys().collect::<Vec<_>>(), ["a-dlq", "b-dlq"]);
    assert_eq!(trends["a-dlq"].iter().sum::<u64>(), 2);
    // Also of discarded ones.
    assert_eq!((trends["b-dlq"][1], trends["b-dlq"][2]), (1, 1));
    assert_eq!(group.sample.as_ref().unwrap().to_string(), "a-dlq/0/23");
    let in_group = format!("group = {}", group.id);
    assert_eq!(fixture.matching(&in_group), [23, 3, 2, 1]);
    assert_eq!(fixture.matching(&format!("{in_group} AND topic = b-dlq")), [3, 2]);
    assert_eq!(fixture.matching(&format!("group != {}", group.id)), [5]);
    let counted = fixture.groups("topic = b-dlq", GroupOrder::Count, None, 10);
    let counts: Vec<u64> = counted.groups.iter().map(|group| group.count).collect();
    assert_eq!(counts, [2, 1]);
}

#[test]
fn trend_is_forgotten_after_a_day() {
    let mut fixture = Fixture::new();
    let hours = 3_600_000;
    let dead = |hour, offset| at(hour * hours, "a-dlq", 0, offset, &[]);
    fixture.put(vec![dead(0, 1), dead(0, 2), dead(5, 3)]);
    let stored = |fixture: &Fixture| {
        let read = |connection: &rusqlite::Connection| {
            let mut statement = connection.prepare("SELECT hour, count FROM group_hours ORDER BY hour")?;
            let rows = statement.query_map((), |row| Ok((row.get("hour")?, row.get("count")?)))?;
            rows.collect::<rusqlite::Result<Vec<(i64, i64)>>>()
        };
        fixture.read(read)
    };
    assert_eq!(stored(&fixture), [(0, 2), (5, 1)]);
    let later = |fixture: &mut Fixture, hour: i64, offset| {
        let letters = [Change::Letters(vec![dead(hour, offset)])];
        let now = Timestamp::from_millis(hour * hours);
        fixture.index.writer.write(&letters, now).unwrap();
    };
    later(&mut fixture, 23, 4);
    assert_eq!(stored(&fixture), [(0, 2), (5, 1), (23, 1)]);
    later(&mut fixture, 24, 5);
    assert_eq!(stored(&fixture), [(5, 1), (23, 1), (24, 1)]);
    // The removal of a dead letter whose hour is forgotten counts nowhere.
    fixture.apply(&[trim("a-dlq", 0, 4)]);
    assert_eq!(stored(&fixture), [(23, 1), (24, 1)]);
    // After a mistaken time, hours are forgotten as before.
    later(&mut fixture, 900, 6);
    assert_eq!(stored(&fixture), [(900, 1)]);
    later(&mut fixture, 48, 7);
    later(&mut fixture, 72, 8);
    assert_eq!(stored(&fixture), [(72, 1), (900, 1)]);
}

#[test]
fn many_hours_are_forgotten_in_slices() {
    let mut fixture = Fixture::new();
    let hours = 3_600_000;
    let slice = i64::try_from(super::sql::SLICE_ROWS).unwrap();
    let dead = |hour: i64| at(hour * hours, "a-dlq", 0, hour, &[]);
    fixture.put((0..2 * slice + 1).map(dead).collect());
    let mut write = |hour: i64| {
        let position = position("a-dlq", 0, 1);
        let now = Timestamp::from_millis(hour * hours);
        fixture.index.writer.write(&[position], now).unwrap();
        let count = |connection: &rusqlite::Connection| {
            connection.query_row("SELECT count(*) AS hours FROM group_hours", (), |row| {
                row.get("hours")
            })
        };
        fixture.read(count)
    };
    let left: [i64; 4] = [10_000; 4].map(&mut write);
    assert_eq!(left, [slice + 1, 1, 0, 0]);
}

#[test]
fn page_of_groups_is_cheap() {
    let mut fixture = Fixture::new();
    let dead = |number: i64| {
        let code = number.to_string();
        letter("a-dlq", 0, number, &[("pipeline", "p"), ("error-code", &code)])
    };
    fixture.put((0..100).map(dead).collect());
    let known = fixture.groups("", GroupOrder::Last, None, 5).groups;
    let known: Vec<_> = known
        .iter()
        .map(|group| (group.id, Decided::Resolved, 1_000))
        .collect();
    let known = decided(&known);
    let all = [
        ("", GroupOrder::Last, &[][..]),
        ("", GroupOrder::First, &[]),
        ("pipeline = p AND state = OPEN", GroupOrder::Last, &[]),
        ("", GroupOrder::Last, &[GroupState::Open]),
        ("", GroupOrder::Count, &[GroupState::Resolved]),
        ("", GroupOrder::Count, &[]),
        (
            "pipeline = p AND state = OPEN",
            GroupOrder::Count,
            &[GroupState::Open],
        ),
    ];
    let costs = |fixture: &Fixture| {
        all.map(|(filter, order, wanted)| {
            let filter = parse(filter, fixture.json_fields).unwrap();
            let query = GroupQuery {
                order,
                wanted,
                states: &known,
                limit: 10,
                ..all_groups(&filter)
            };
            let (cost, page) = cost(fixture, |connection| list_groups(connection, &query));
            assert!(!page.groups.is_empty());
            cost
        })
    };
    let before = costs(&fixture);
    fixture.put((100..3_000).map(dead).collect());
    for ((before, after), case) in before.into_iter().zip(costs(&fixture)).zip(all) {
        assert!(after < 2 * before, "{before} {after} {case:?}");
    }
}

#[test]
fn pages_contain_each_group_once() {
    let mut fixture = Fixture::new();
    let mut dead = Vec::new();
    for code in 0..300 {
        for number in 0..=code % 3 {
            let offset = 3 * code + number;
            let headers = [("error-code", &*format!("e{code}")), ("pipeline", "p")];
            dead.push(letter("a-dlq", 0, offset, &headers));
        }
    }
    fixture.put(dead);
    // Some have counts in several topics and states, with the same and other times.
    let more = (0..300).filter(|code| code % 5 == 0).flat_map(|code| {
        let headers = [("error-code", format!("e{code}")), ("pipeline", "p".to_owned())];
        [3 * code, 450, 900 - 3 * code].map(|time| {
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, &**value)).collect();
            at(time, "b-dlq", 0, 10_000 + 1_000 * time + code, &headers)
        })
    });
    fixture.put(more.collect());
    let discarded = (0..300).filter(|code| code % 7 == 0);
    let discarded =
        discarded.map(|code| update(&format!("a-dlq/0/{}", 3 * code), Some(State::Discarded), None));
    fixture.apply(&[Change::Ledger(discarded.collect())]);
    let orders = [GroupOrder::Last, GroupOrder::First, GroupOrder::Count];
    // With the first filter, the counts say how many groups there are; with the others, which of them match.
    let filters = ["", "topic = a-dlq", "error_class != none"];
    for (order, filter) in orders
        .into_iter()
        .flat_map(|order| filters.map(|filter| (order, filter)))
    {
        let mut seen = Vec::new();
        let mut after = None;
        loop {
            let page = fixture.groups(filter, order, after, 7);
            let key = |group: &IndexedGroup| match order {
                GroupOrder::Last => group.last.as_millis().unsigned_abs(),
                GroupOrder::First => group.first.as_millis().unsigned_abs(),
                GroupOrder::Count => group.count,
            };
            seen.extend(page.groups.iter().map(|group| (key(group), group.id)));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert!(seen.is_sorted_by(|one, other| one.0 >= other.0), "{order:?}");
        let distinct: HashSet<_> = seen.iter().map(|(_, id)| *id).collect();
        assert_eq!((seen.len(), distinct.len()), (300, 300), "{order:?}");
    }
}

/// Random changes; the groups of the writer are compared with those of the rows after each.
#[test]
fn groups_equal_the_rows() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut fixture = Fixture::new();
    let mut next = [[0_i64; 2]; 2];
    for step in 0..250 {
        let (topic, partition) = (random.usize(..2), random.usize(..2));
        let name = ["a-dlq", "b-dlq"][topic];
        let end = &mut next[topic][partition];
        let number = i32::try_from(partition).unwrap();
        match random.u8(..10) {
            0..5 => {
                let count = random.i64(1..20);
                let dead = (0..count).map(|index| {
                    let code = format!("e{}", random.u8(..5));
                    // Rows are not in the order of offsets; half of them share few buckets, in any order.
                    let range = [200, 8_000_000_000][random.usize(..2)];
                    let time = random.i64(0..range);
                    at(
                        time,
                        name,
                        number,
                        *end + index,
                        &[("error-code", &*code), ("pipeline", "p")],
                    )
                });
                let dead = dead.collect();
                *end += count;
                fixture.put(dead);
            }
            5..7 => {
                let state = [None, Some(State::Redriven), Some(State::Discarded)][random.usize(..3)];
                let updates = (0..random.i64(1..8)).map(|_| {
                    let id = format!("{name}/{partition}/{}", random.i64(0..=*end));
                    update(&id, state, None)
                });
                fixture.apply(&[Change::Ledger(updates.collect())]);
            }
            7..9 => {
                let low = random.i64(0..=*end);
                fixture.apply(&[trim(name, number, low)]);
            }
            _ => {
                if random.u8(..3) == 0 {
                    fixture.apply(&[Change::ForgetLedger]);
                } else if random.u8(..3) == 0 {
                    next[topic] = [0; 2];
                    fixture.apply(&[forget(name)]);
                }
            }
        }
        for filter in ["", "state = OPEN", "topic = a-dlq AND error_code != e1"] {
            let counted = fixture.groups(filter, GroupOrder::Last, None, 100).groups;
            let rows = if filter.is_empty() {
                "retry_count >= 0".to_owned()
            } else {
                format!("retry_count >= 0 AND {filter}")
            };
            let read = fixture.groups(&rows, GroupOrder::Last, None, 100).groups;
            assert_eq!(counted, read, "step {step}: {filter}");
        }
        let stored: i64 = fixture.read(|connection| {
                connection.query_row(
                    "SELECT (SELECT count(*) FROM groups) + (SELECT count(*) FROM group_hours WHERE group_id NOT IN \
                     (SELECT group_id FROM group_counts)) AS stored",
                    (),
                    |row| row.get("stored"),
                )
            });
        const ROWS: &str = "SELECT group_id, topic_id, dead_at / 3600000 AS hour, count(*) AS count FROM letters \
                            GROUP BY group_id, topic_id, hour";
        const HOURS: &str = "SELECT group_id, topic_id, hour, count FROM group_hours";
        // Of all states together, the last times are exact.
        const LAST_ROWS: &str =
            "SELECT group_id, topic_id, max(dead_at) AS last FROM letters GROUP BY group_id, topic_id";
        const LAST: &str =
            "SELECT group_id, topic_id, max(last) AS last FROM group_counts GROUP BY group_id, topic_id";
        const COUNT_ROWS: &str = "SELECT group_id, count(*) AS count FROM letters GROUP BY group_id";
        const COUNTS: &str = "SELECT id AS group_id, count FROM groups";
        for (one, other) in [
            (ROWS, HOURS),
            (HOURS, ROWS),
            (LAST_ROWS, LAST),
            (LAST, LAST_ROWS),
            (COUNT_ROWS, COUNTS),
            (COUNTS, COUNT_ROWS),
        ] {
            let sql = format!("SELECT count(*) AS count FROM ({one} EXCEPT {other})");
            let different = fixture
                .index
                .pool
                .read_blocking(|connection| connection.query_row(&sql, (), |row| row.get::<_, i64>("count")));
            assert_eq!(different.unwrap(), 0, "step {step}: {sql}");
        }
        let groups = fixture.groups("", GroupOrder::Count, None, 100).groups;
        assert_eq!(stored, i64::try_from(groups.len()).unwrap(), "step {step}");
    }
}

/// Three groups whose dead letters are written at these times; the first and last one of `a` in the topic `b-dlq`.
fn groups_with_times(fixture: &mut Fixture) -> [GroupId; 3] {
    let dead =
        |time, topic, offset, code| at(time, topic, 0, offset, &[("error-code", code), ("pipeline", "p")]);
    fixture.put(vec![
        dead(20, "a-dlq", 1, "a"),
        dead(30, "a-dlq", 2, "a"),
        dead(10, "b-dlq", 1, "a"),
        dead(40, "b-dlq", 2, "a"),
        dead(20, "a-dlq", 3, "b"),
        dead(20, "a-dlq", 4, "c"),
    ]);
    ["a", "b", "c"].map(|code| {
        let page = fixture.groups(&format!("error_code = {code}"), GroupOrder::Count, None, 10);
        page.groups[0].id
    })
}

fn decided(values: &[(GroupId, Decided, i64)]) -> GroupStates {
    let mut known = GroupStates::default();
    for (id, decided, time) in values {
        let value = states::decided(*decided, *time, 1);
        known.table.insert(*id, value);
    }
    known
}

#[test]
fn state_follows_from_visible_letters() {
    let mut fixture = Fixture::new();
    let [a, b, c] = groups_with_times(&mut fixture);
    let found =
        |fixture: &Fixture, known: &GroupStates, filter: &str, seen: Option<&str>, wanted: &[GroupState]| {
            let filter = parse(filter, fixture.json_fields).unwrap();
            let read = |connection: &_| {
                let topics = topics(connection)?.into_iter();
                let topics = topics
                    .filter(|(_, topic)| Some(&**topic) == seen)
                    .map(|(id, _)| id);
                let visible = seen.map(|_| topics.collect::<HashSet<i64>>());
                let query = GroupQuery {
                    states: known,
                    wanted,
                    visible: visible.as_ref(),
                    ..all_groups(&filter)
                };
                list_groups(connection, &query)
            };
            let page = fixture.read(read);
            let states = page.groups.iter().map(|group| (group.id, group.state));
            states.collect::<HashSet<_>>()
        };
    let known = decided(&[(a, Decided::Resolved, 35), (b, Decided::Muted(None), 5)]);
    let all: [(GroupId, GroupState); 3] = [
        (a, GroupState::Regressed),
        (b, GroupState::Muted),
        (c, GroupState::Open),
    ];
    assert_eq!(found(&fixture, &known, "", None, &[]), HashSet::from(all));
    for (id, state) in all {
        assert_eq!(
            found(&fixture, &known, "", None, &[state]),
            HashSet::from([(id, state)])
        );
    }
    // A filter chooses what is counted. The state is one of the group.
    let of_a = "topic = a-dlq AND error_code = a";
    assert_eq!(found(&fixture, &known, of_a, None, &[]), HashSet::from([all[0]]));
    // What the caller does not see does not count.
    let resolved = HashSet::from([(a, GroupState::Resolved)]);
    assert_eq!(found(&fixture, &known, of_a, Some("a-dlq"), &[]), resolved);
    // Whatever was done with the dead letter.
    fixture.mark("b-dlq/0/2", Some(State::Discarded));
    assert_eq!(
        found(&fixture, &known, "", None, &[GroupState::Regressed]),
        HashSet::from([all[0]])
    );
    let known = decided(&[(a, Decided::Resolved, 40), (b, Decided::Open, 5)]);
    assert_eq!(
        found(&fixture, &known, "", None, &[GroupState::Resolved]),
        resolved
    );
    assert_eq!(
        found(&fixture, &known, "", None, &[GroupState::Muted]),
        HashSet::new()
    );
}

#[test]
fn open_groups_are_counted_by_state() {
    let mut fixture = Fixture::new();
    let [a, b, _] = groups_with_times(&mut fixture);
    let known = decided(&[
        (a, Decided::Resolved, 35),
        (b, Decided::Muted(None), 5),
        (GroupId::from_number(1), Decided::Resolved, 5),
    ]);
    let counted = |fixture: &Fixture| {
        let now = Timestamp::from_millis(100);
        let read = |connection: &_| open_groups(connection, &known, now);
        fixture.read(read)
    };
    let groups = counted(&fixture);
    let expected = [
        (GroupState::Open, 1),
        (GroupState::Muted, 1),
        (GroupState::Regressed, 1),
    ];
    assert_eq!(groups, expected.into());
    // A group without open dead letters needs no attention.
    let all = [
        ("a-dlq", 1),
        ("a-dlq", 2),
        ("b-dlq", 1),
        ("b-dlq", 2),
        ("a-dlq", 4),
    ];
    let discarded =
        all.map(|(topic, offset)| update(&format!("{topic}/0/{offset}"), Some(State::Discarded), None));
    fixture.apply(&[Change::Ledger(discarded.into())]);
    let groups = counted(&fixture);
    let expected = [(GroupState::Open, 0), (GroupState::Muted, 1)];
    assert_eq!(groups, expected.into());

    let pool = &fixture.index.pool;
    let topics = pool
        .read_blocking(|connection| topics_of_group(connection, a))
        .unwrap();
    let expected = [("a-dlq", 30), ("b-dlq", 40)];
    let expected = expected.map(|(topic, time)| (topic.to_owned(), Timestamp::from_millis(time)));
    assert_eq!(topics, expected.into());
}

#[test]
fn search_for_next_letter_is_bounded() {
    let mut fixture = Fixture::new();
    let headers = [("pipeline", "p"), ("error-code", "e")];
    fixture.put(
        (0..3_000)
            .map(|offset| letter("a-dlq", 0, offset, &headers))
            .collect(),
    );
    fixture.put(
        (0..3_000)
            .map(|offset| letter("b-dlq", 0, offset, &headers))
            .collect(),
    );
    let redriven = |topic: &str, offsets: std::ops::Range<i64>| {
        let updates =
            offsets.map(|offset| update(&format!("{topic}/0/{offset}"), Some(State::Redriven), None));
        Change::Ledger(updates.collect())
    };
    // The last open one is behind more redriven ones than are read at once, so that the time is a bound.
    fixture.apply(&[redriven("a-dlq", 1..3_000)]);
    let last = |fixture: &Fixture| {
        let page = fixture.groups("state = OPEN AND topic = a-dlq", GroupOrder::Last, None, 10);
        page.groups[0].last.as_millis()
    };
    let bound = last(&fixture);
    assert!((1_000..2_999).contains(&bound), "{bound}");
    // Each change goes on with the search.
    for offset in 3_000..3_004 {
        fixture.put(vec![letter("a-dlq", 0, offset, &headers)]);
        assert_eq!(last(&fixture), offset);
        fixture.apply(&[redriven("a-dlq", offset..offset + 1)]);
    }
    let all = &fixture.groups("", GroupOrder::Last, None, 10).groups[0];
    assert_eq!((all.count, all.last.as_millis()), (6_004, 3_003));
    let of_b = &fixture.groups("topic = b-dlq", GroupOrder::Last, None, 10).groups[0];
    assert_eq!(of_b.sample.as_ref().unwrap().to_string(), "b-dlq/0/2999");
}

#[test]
fn filters_on_masked_fields_match_letters() {
    let mut fixture = Fixture::new();
    let of = |topic: &str, offset, pipeline| {
        let headers = [("error-class", "permanent"), ("pipeline", pipeline)];
        letter(topic, 0, offset, &headers)
    };
    let masked = |letter: Letter| Letter {
        group: GroupId::from_number(7),
        masked_facts: Some(Facts {
            pipeline: "<masked>".to_owned(),
            ..letter.facts.clone()
        }),
        ..letter
    };
    fixture.put(vec![
        masked(of("a-dlq", 1, "x")),
        masked(of("a-dlq", 2, "y")),
        of("b-dlq", 1, "x"),
    ]);
    let counts = |filter| {
        let filter = parse(filter, fixture.json_fields).unwrap();
        let query = GroupQuery {
            tests_masked: true,
            ..all_groups(&filter)
        };
        let listed = fixture
            .index
            .pool
            .read_blocking(|connection| list_groups(connection, &query));
        let mut counts: Vec<(String, u64)> = Vec::new();
        for group in listed.unwrap().groups {
            counts.push((group.pipeline, group.count));
        }
        counts.sort();
        counts
    };
    let group = |pipeline: &str, count| (pipeline.to_owned(), count);
    assert_eq!(counts("pipeline = x"), [group("<masked>", 1), group("x", 1)]);
    assert_eq!(counts("pipeline != x"), [group("<masked>", 1)]);
    assert_eq!(counts("pipeline = <masked>"), []);
}

#[test]
fn groups_in_need_count_by_topic() {
    let mut fixture = Fixture::new();
    let dead = |topic: &str, offset: i64, code: &str| {
        at(
            1_000 * offset,
            topic,
            0,
            offset,
            &[("error-code", code), ("error-class", "permanent")],
        )
    };
    fixture.put(vec![
        dead("a-dlq", 1, "old"),
        dead("b-dlq", 20, "old"),
        dead("a-dlq", 12, "new"),
        dead("a-dlq", 13, "new"),
        dead("a-dlq", 14, "discarded"),
    ]);
    fixture.mark("a-dlq/0/12", Some(State::Discarded));
    fixture.mark("a-dlq/0/14", Some(State::Discarded));
    let id = |fixture: &Fixture, code: &str| {
        fixture
            .groups(&format!("error_code = {code}"), GroupOrder::Last, None, 1)
            .groups[0]
            .id
    };
    let found = |fixture: &Fixture, states: &GroupStates| {
        let (since, now) = (Timestamp::from_millis(10_000), Timestamp::from_millis(30_000));
        let read =
            |connection: &rusqlite::Connection| crate::index::groups_in_need(connection, states, since, now);
        let mut found: Vec<String> = fixture
            .read(read)
            .into_iter()
            .map(|group| {
                let (first, last) = (group.first.as_millis(), group.last.as_millis());
                let state = group.state.name();
                format!(
                    "{} {} {state} {first} {last} {}",
                    group.error_code, group.topic, group.open
                )
            })
            .collect();
        found.sort_unstable();
        found
    };
    let none = GroupStates::default();
    // In the topic `b-dlq`, the old group is new.
    assert_eq!(
        found(&fixture, &none),
        ["new a-dlq open 12000 13000 1", "old b-dlq open 20000 20000 1"]
    );
    let decided = |code: &str, state, time| decided(&[(id(&fixture, code), state, time)]);
    // Resolved after the dead letter in `a-dlq`, and before the one in `b-dlq`.
    assert_eq!(
        found(&fixture, &decided("old", Decided::Resolved, 5_000)),
        [
            "new a-dlq open 12000 13000 1",
            "old b-dlq regressed 20000 20000 1"
        ]
    );
    assert_eq!(
        found(&fixture, &decided("new", Decided::Resolved, 12_500)),
        [
            "new a-dlq regressed 12500 13000 1",
            "old b-dlq open 20000 20000 1"
        ]
    );
    assert_eq!(
        found(&fixture, &decided("new", Decided::Muted(None), 5_000)),
        ["old b-dlq open 20000 20000 1"]
    );
}

#[test]
fn noisy_topic_hides_no_groups() {
    let mut fixture = Fixture::new();
    let dead = |topic: &str, time: i64, offset: i64, code: &str| {
        at(
            time,
            topic,
            0,
            offset,
            &[("error-code", code), ("error-class", "permanent")],
        )
    };
    fixture.put(vec![
        dead("quiet-dlq", 10_000, 1, "quiet"),
        // The clock of who wrote it was ahead.
        dead("quiet-dlq", 90_000, 2, "future"),
    ]);
    // One is in the future, and takes no place.
    let times = (0..150).map(|number| if number == 149 { 90_000 } else { 20_000 + number });
    let noisy = (0..)
        .zip(times)
        .map(|(number, time)| dead("noisy-dlq", time, number, &format!("n-{number}")));
    fixture.put(noisy.collect());
    let (since, now) = (Timestamp::from_millis(10_000), Timestamp::from_millis(30_000));
    let states = GroupStates::default();
    let found = fixture.read(|connection| crate::index::groups_in_need(connection, &states, since, now));
    let codes = |topic: &str| {
        let of_topic = found.iter().filter(|group| group.topic == topic);
        let codes = of_topic.map(|group| group.error_code.clone());
        codes.collect::<HashSet<String>>()
    };
    assert_eq!(codes("quiet-dlq"), HashSet::from(["quiet".to_owned()]));
    // The newest ones.
    let newest = (49..149).map(|number| format!("n-{number}"));
    assert_eq!(codes("noisy-dlq"), newest.collect());
}
