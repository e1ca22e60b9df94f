//! What retention, deleted topics and a deleted ledger remove.

use super::*;

#[test]
fn unused_texts_are_removed() {
    let mut fixture = Fixture::new();
    let texts = |fixture: &Fixture| -> Vec<String> {
        let query = |connection: &rusqlite::Connection| {
            let mut statement = connection.prepare("SELECT text FROM texts ORDER BY text")?;
            statement.query_map((), |row| row.get(0))?.collect()
        };
        fixture.read(query)
    };
    let code = |offset: i64| format!("code-{offset}");
    let coded = |offsets: std::ops::Range<i64>| {
        offsets
            .map(|offset| letter("t-dlq", 0, offset, &[("error-code", &code(offset))]))
            .collect::<Vec<_>>()
    };
    fixture.put(coded(0..1_500));
    fixture.mark("t-dlq/0/7", Some(State::Discarded));
    let trim = |low| trim("t-dlq", 0, low);
    fixture.apply(&[trim(10)]);
    assert!(texts(&fixture).contains(&code(0)), "removed after a small trim");
    fixture.apply(&[trim(1_498)]);
    let left = ["", &code(1_498), &code(1_499), "t-dlq"].map(str::to_owned);
    let known: Vec<String> = texts(&fixture)
        .into_iter()
        .filter(|text| text.is_empty() || text.starts_with("code-") || text == "t-dlq")
        .collect();
    assert_eq!(known, left);
    // Removed texts get new ids when they occur again.
    fixture.put(coded(0..1));
    assert_eq!(fixture.matching("error_code = code-0"), [0]);
    assert_eq!(fixture.matching("error_code = code-1499"), [1_499]);
}

#[test]
fn texts_of_groups_are_kept() {
    let mut fixture = Fixture::new();
    let masked = (0..1_500).map(|offset| {
        let letter = letter("t-dlq", 0, offset, &[("error-code", &format!("code-{offset}"))]);
        Letter {
            masked_facts: Some(Facts {
                error_code: "<masked>".to_owned(),
                ..letter.facts.clone()
            }),
            ..letter
        }
    });
    fixture.put(masked.collect());
    let trim = trim("t-dlq", 0, 1_498);
    fixture.apply(&[trim]);
    let groups = fixture.index.pool.read_blocking(|connection| {
        let all = Expr::And(Vec::new());
        let query = GroupQuery {
            limit: 10,
            ..GroupQuery::first(&all, &NO_STATES, None, Timestamp::from_millis(0))
        };
        list_groups(connection, &query)
    });
    let groups = groups.unwrap().groups;
    assert_eq!(groups.len(), 2);
    assert!(
        groups.iter().all(|group| group.error_code == "<masked>"),
        "{groups:?}"
    );
}

#[test]
fn topic_ids_are_kept_until_forgotten() {
    let mut fixture = Fixture::new();
    fixture.apply(&[
        identify("a-dlq", 1),
        identify("a-dlq", u128::MAX),
        identify(ledger::TOPIC, 3),
        position(ledger::TOPIC, 0, 7),
    ]);
    let read = |fixture: &Fixture| {
        let ids = fixture.read(read_topic_ids);
        let ids: Vec<_> = ids
            .into_iter()
            .map(|(topic, id)| (topic.to_string(), id.bits()))
            .collect();
        ids
    };
    assert_eq!(
        read(&fixture),
        [("a-dlq".to_owned(), u128::MAX), (ledger::TOPIC.to_owned(), 3)]
    );
    fixture.apply(&[forget("a-dlq")]);
    // The position in a deleted ledger would be beyond the end of the next one.
    fixture.apply(&[Change::ForgetLedger]);
    assert_eq!(read(&fixture), []);
    let positions = fixture.read(read_positions);
    assert_eq!(positions.len(), 0);
}

#[test]
fn topic_being_removed_has_another_id() {
    let mut fixture = Fixture::new();
    fixture.apply(&[identify("a-dlq", 1), position("a-dlq", 0, 7)]);
    let writer = &mut fixture.index.writer;
    writer
        .write(&[forget("a-dlq")], Timestamp::from_millis(0))
        .unwrap();
    let positions = fixture.read(read_positions);
    let id = positions[0].id.expect("an id");
    assert_ne!(id, TopicId::from_bits(1));
}

#[test]
fn many_letters_are_removed_in_slices() {
    let mut fixture = Fixture::new();
    let count = 3 * sql::SLICE_ROWS as i64 + 1;
    fixture.put((0..count).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let trim = trim("t-dlq", 0, count);
    let writer = &mut fixture.index.writer;
    writer.write(&[trim], Timestamp::from_millis(0)).unwrap();
    let mut slices = 0;
    while fixture.index.writer.remove_slice().unwrap() {
        slices += 1;
        // Other changes are applied in between.
        let other = Change::Letters(vec![letter("other-dlq", 0, slices, &[])]);
        fixture
            .index
            .writer
            .write(&[other], Timestamp::from_millis(0))
            .unwrap();
        // Answers in between count what is left.
        let counted = fixture.counts("", [0; 3]);
        assert_eq!(counted, fixture.counts("offset >= 0", [0; 3]));
        let left = usize::try_from((count - slices * sql::SLICE_ROWS as i64).max(0)).unwrap();
        assert_eq!(
            fixture.matching("topic = t-dlq AND offset >= 0").len(),
            left.min(1_000)
        );
    }
    // The search for unused texts follows.
    assert!(slices > 3);
    assert_eq!(fixture.matching("topic = t-dlq"), [0_i64; 0]);
    assert_eq!(fixture.matching("").len(), usize::try_from(slices).unwrap());
    let left = |table: &str| {
        let sql = format!("SELECT count(*) FROM {table}");
        fixture
            .index
            .pool
            .read_blocking(|connection| connection.query_row(&sql, (), |row| row.get::<_, i64>(0)))
    };
    assert_eq!(
        (left("bodies").unwrap(), left("letters").unwrap()),
        (slices, slices)
    );
    assert_eq!(fixture.matching("key = key-77"), [0_i64; 0]);
}

#[test]
fn cancelled_changes_leave_no_counters() {
    let mut fixture = Fixture::new();
    // The dead letter counts as open, and in the same transaction no longer.
    fixture.apply(&[
        Change::Letters(vec![letter("t-dlq", 0, 1, &[])]),
        Change::Ledger(vec![update("t-dlq/0/1", Some(State::Discarded), None)]),
    ]);
    let zeros = |fixture: &Fixture| {
        let sql = "SELECT count(*) FROM counters WHERE count = 0";
        let count = fixture
            .index
            .pool
            .read_blocking(|connection| connection.query_row(sql, (), |row| row.get::<_, i64>(0)));
        count.unwrap()
    };
    assert_eq!(zeros(&fixture), 0);
    fixture.apply(&[forget("t-dlq")]);
    assert_eq!(zeros(&fixture), 0);
    assert!(fixture.counts("", [0; 3]).is_empty());
}

#[test]
fn changes_wait_for_removal_of_topic() {
    let mut fixture = Fixture::new();
    let now = Timestamp::from_millis(0);
    let count = 2 * sql::SLICE_ROWS as i64;
    fixture.put((0..count).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let again = Change::Letters(vec![letter("t-dlq", 0, 7, &[])]);
    let other = Change::Letters(vec![letter("other-dlq", 0, 7, &[])]);
    let forget = forget("t-dlq");
    let writer = &mut fixture.index.writer;
    assert_eq!(
        writer
            .write(&[other.clone(), forget, again.clone()], now)
            .unwrap(),
        2
    );
    assert!(writer.remove_slice().unwrap() && writer.is_forgetting());
    assert_eq!(writer.write(std::slice::from_ref(&again), now).unwrap(), 0);
    assert_eq!(writer.write(&[other], now).unwrap(), 1);
    while writer.remove_slice().unwrap() {}
    assert!(!writer.is_forgetting());
    assert_eq!(writer.write(&[again], now).unwrap(), 1);
    assert_eq!(fixture.matching("topic = t-dlq"), [7]);
    assert_eq!(fixture.matching("topic = other-dlq"), [7]);
}

#[test]
fn a_removal_continues_after_a_restart() {
    let mut fixture = Fixture::new();
    let rows = 2 * sql::SLICE_ROWS as i64;
    let position = position("t-dlq", 0, rows);
    let identify = identify("t-dlq", 1);
    let all = (0..rows).map(|offset| letter("t-dlq", 0, offset, &[]));
    fixture.apply(&[Change::Letters(all.collect()), position, identify]);
    let forget = [forget("t-dlq")];
    let writer = &mut fixture.index.writer;
    writer.write(&forget, Timestamp::from_millis(0)).unwrap();
    assert!(writer.remove_slice().unwrap());
    let Fixture { directory, index, .. } = fixture;
    drop(index);

    let index = Index::open(directory.path(), &[]).unwrap();
    let mut fixture = Fixture {
        directory,
        index,
        json_fields: &[],
    };
    // A survey finds by the id or the position that the topic is another one.
    let progress = |fixture: &Fixture| {
        let progress = fixture.index.writer.read_progress().unwrap();
        (progress.positions.len(), progress.topic_ids.len())
    };
    assert_eq!(progress(&fixture), (1, 1));
    let left = fixture.counts("", [0; 3]);
    assert_eq!(left[0].1.total, sql::SLICE_ROWS as u64);
    fixture.apply(&forget);
    assert_eq!(fixture.counts("", [0; 3]), []);
    assert_eq!(progress(&fixture), (0, 0));
}

#[test]
fn small_removals_share_a_slice() {
    let mut fixture = Fixture::new();
    for partition in 0..50 {
        fixture.put(
            (0..10)
                .map(|offset| letter("t-dlq", partition, offset, &[]))
                .collect(),
        );
    }
    let trims: Vec<Change> = (0..50).map(|partition| trim("t-dlq", partition, 5)).collect();
    let writer = &mut fixture.index.writer;
    writer.write(&trims, Timestamp::from_millis(0)).unwrap();
    assert_eq!(writer.removing().count(), 50);
    assert!(!writer.remove_slice().unwrap());
    assert_eq!(writer.removing().count(), 0);
    assert_eq!(fixture.matching("").len(), 250);
}

#[test]
fn text_used_during_search_is_kept() {
    let mut fixture = Fixture::new();
    let coded = |offset: i64, code: i64| {
        let (code, message) = (
            format!("code-{code}"),
            format!("no {}", "x".repeat(usize::try_from(code % 50).unwrap())),
        );
        letter(
            "t-dlq",
            0,
            offset,
            &[("error-code", &code), ("error-message", &message)],
        )
    };
    fixture.put((0..1_500).map(|offset| coded(offset, offset)).collect());
    let trim = trim("t-dlq", 0, 1_500);
    let now = Timestamp::from_millis(0);
    let writer = &mut fixture.index.writer;
    writer.write(&[trim], now).unwrap();
    for (step, code) in (10..).enumerate() {
        let again = Change::Letters(vec![coded(2_000 + step as i64, code)]);
        writer.write(&[again], now).unwrap();
        if !writer.remove_slice().unwrap() {
            assert!(step > 2, "no search");
            break;
        }
    }
    let left = fixture.matching("offset >= 2000");
    for offset in left {
        let code = 10 + offset - 2_000;
        assert_eq!(fixture.matching(&format!("error_code = code-{code}")), [offset]);
        let found = fixture.get(&format!("t-dlq/0/{offset}")).unwrap();
        assert_eq!(found.facts.error_code, format!("code-{code}"));
        assert_eq!(
            found.facts.error_message,
            format!("no {}", "x".repeat(usize::try_from(code % 50).unwrap()))
        );
    }
    let unused = fixture.index.pool.read_blocking(|connection| {
        let sql = "SELECT count(*) FROM texts WHERE text LIKE 'code-1__'";
        connection.query_row(sql, (), |row| row.get::<_, i64>(0))
    });
    assert_eq!(unused.unwrap(), 0);
}
