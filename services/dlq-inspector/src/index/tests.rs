use std::collections::HashSet;

use redeliver_core::{Headers, Position, Record, Timestamp};
use redeliver_kafka::TopicId;
use tempfile::TempDir;

use super::*;
use crate::filter::{Expr, parse};
use crate::id::LetterId;
use crate::ledger::{self, Entry, State, Update};
use crate::letter::{ContentHash, Letter};

struct Fixture {
    directory: TempDir,
    index: Index,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let index = Index::open(directory.path()).unwrap();
        Self { directory, index }
    }

    fn apply(&mut self, changes: &[Change]) -> i64 {
        self.index.writer.apply(changes).unwrap()
    }

    fn put(&mut self, letters: Vec<Letter>) -> i64 {
        self.apply(&[Change::Letters(letters)])
    }

    fn list(
        &self,
        filter: &str,
        direction: Direction,
        after: Option<Cursor>,
        limit: usize,
    ) -> Vec<IndexedLetter> {
        let filter = parse(filter).unwrap();
        let query = |connection: &_| list(connection, &filter, direction, after, limit);
        self.index.pool.read_blocking(query).unwrap().letters
    }

    /// The offsets of the dead letters that match, newest first.
    fn matching(&self, filter: &str) -> Vec<i64> {
        let letters = self.list(filter, Direction::Descending, None, 1000);
        letters.into_iter().map(|letter| letter.id.offset).collect()
    }

    fn get(&self, id: &str) -> Option<IndexedLetter> {
        let id = id.parse().unwrap();
        self.index
            .pool
            .read_blocking(|connection| get(connection, &id))
            .unwrap()
    }

    fn counts(&self, filter: &str, since: [i64; 3]) -> Vec<(String, TopicCounts)> {
        let filter = parse(filter).unwrap();
        let since = since.map(Timestamp::from_millis);
        let counts = self
            .index
            .pool
            .read_blocking(|connection| count_by_topic(connection, &filter, since));
        counts.unwrap().into_iter().collect()
    }
}

/// A dead letter whose timestamp equals its offset.
fn letter(topic: &str, partition: i32, offset: i64, headers: &[(&str, &str)]) -> Letter {
    at(offset, topic, partition, offset, headers)
}

fn at(time: i64, topic: &str, partition: i32, offset: i64, headers: &[(&str, &str)]) -> Letter {
    let headers: Headers = headers
        .iter()
        .map(|(name, value)| (*name, Some(value.as_bytes())))
        .collect();
    Letter::read(&Record {
        position: Position {
            topic: topic.into(),
            partition,
            offset,
        },
        timestamp: Some(Timestamp::from_millis(time)),
        key: Some(format!("key-{offset}").into()),
        value: Some(format!("value-{offset}").into()),
        headers,
        unreadable_headers: 0,
    })
}

fn update(id: &str, state: Option<State>, content: Option<ContentHash>) -> Update {
    Update {
        id: id.parse().unwrap(),
        entry: state.map(|state| Entry {
            state,
            time: Some(Timestamp::from_millis(9)),
            by: "ann".to_owned(),
            note: "because".to_owned(),
            content,
        }),
    }
}

#[test]
fn an_indexed_dead_letter_has_all_fields() {
    let mut fixture = Fixture::new();
    let headers = [
        ("tenant", "x"),
        ("error-class", "permanent"),
        ("error-code", "http.404"),
        ("error-message", "gone"),
        ("error-timestamp", "1970-01-01T00:00:00.007Z"),
        ("pipeline", "crawl"),
        ("retry-count", "3"),
        ("original-topic", "docs"),
        ("original-partition", "1"),
        ("original-offset", "2"),
        ("job-id", "job"),
    ];
    let written = letter("t-dlq", 3, 44, &headers);
    fixture.put(vec![written.clone()]);
    let found = fixture.get("t-dlq/3/44").unwrap();
    assert_eq!(
        (found.id.to_string().as_str(), found.state),
        ("t-dlq/3/44", State::Open)
    );
    assert_eq!(
        (found.pipeline.as_str(), found.error_class.as_str()),
        ("crawl", "permanent")
    );
    assert_eq!(
        (found.error_code.as_str(), found.error_message.as_str()),
        ("http.404", "gone")
    );
    assert_eq!(
        (found.retry_count, found.failed_at),
        (3, Some(Timestamp::from_millis(7)))
    );
    assert_eq!(
        (found.origin_topic.as_str(), found.origin_offset),
        ("docs", Some(2))
    );
    assert_eq!((found.job_id.as_str(), found.trace_id.as_str()), ("job", ""));
    assert_eq!(
        (found.key.as_deref(), found.value_size),
        (Some(&b"key-44"[..]), Some(8))
    );
    assert_eq!(
        (&*found.headers, found.content),
        (&*written.headers, written.content)
    );
    assert_eq!(fixture.get("t-dlq/3/45"), None);
    assert_eq!(fixture.get("other/3/44"), None);
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
fn pages_contain_each_dead_letter_once_while_others_are_indexed() {
    const COUNT: i64 = 50_000;
    let mut fixture = Fixture::new();
    let mut extra = 0;
    let classes = ["permanent", "exhausted", "expired"];
    for start in (0..COUNT).step_by(5_000) {
        let batch = (start..start + 5_000).map(|offset| {
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
            let page = fixture.list(filter, direction, after, 997);
            let Some(last) = page.last() else { break };
            let end = (last.dead_at.as_millis(), last.row);
            after = Some(last.cursor());
            for found in &page {
                if found.id.topic == "t-dlq" {
                    assert!(seen.insert(found.id.offset), "{} twice", found.id);
                }
            }
            let in_order = page.windows(2).all(|pair| {
                let (first, second) = (pair[0].cursor(), pair[1].cursor());
                let (first, second) = ((first.dead_at, first.row), (second.dead_at, second.row));
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
    let (_, last) = fixture.index.pool.read_blocking(read_positions).unwrap();
    let mut seen = HashSet::new();
    let mut after = 0;
    loop {
        let everything = Expr::And(Vec::new());
        let page = fixture
            .index
            .pool
            .read_blocking(|connection| list_by_row(connection, &everything, after, last, 500));
        let page = page.unwrap().letters;
        let Some(end) = page.last() else { break };
        after = end.row;
        assert!(page.iter().all(|found| seen.insert(found.row)));
    }
    assert_eq!(seen.len() as i64, last);
}

#[test]
fn a_ledger_entry_sets_the_state_before_or_after_its_dead_letter() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[]), letter("t-dlq", 0, 2, &[])]);
    let discarded = Some(State::Discarded);
    fixture.apply(&[Change::Ledger(vec![
        update("t-dlq/0/1", discarded, None),
        update("t-dlq/0/3", Some(State::Redriven), None),
    ])]);
    fixture.put(vec![letter("t-dlq", 0, 3, &[])]);
    assert_eq!(fixture.matching("state = OPEN"), [2]);
    assert_eq!(fixture.matching("state = DISCARDED"), [1]);
    let redriven = fixture.get("t-dlq/0/3").unwrap();
    assert_eq!(
        (redriven.state, redriven.state_by.as_str()),
        (State::Redriven, "ann")
    );
    assert_eq!(
        (redriven.state_note.as_str(), redriven.state_time),
        ("because", Some(Timestamp::from_millis(9)))
    );
    fixture.apply(&[Change::Ledger(vec![update("t-dlq/0/1", None, None)])]);
    let open = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!((open.state, open.state_by.as_str()), (State::Open, ""));
    fixture.apply(&[Change::ForgetLedger]);
    assert_eq!(fixture.matching("state = OPEN"), [3, 2, 1]);
}

#[test]
fn a_ledger_entry_for_another_record_at_the_same_offset_is_ignored() {
    let mut fixture = Fixture::new();
    let first = letter("t-dlq", 0, 1, &[]);
    let second = letter("t-dlq", 0, 1, &[("tenant", "x")]);
    fixture.put(vec![first.clone()]);
    let discarded = update("t-dlq/0/1", Some(State::Discarded), Some(first.content));
    fixture.apply(&[Change::Ledger(vec![discarded])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Discarded);
    fixture.apply(&[
        Change::Forget {
            topic: "t-dlq".into(),
        },
        Change::Letters(vec![second.clone()]),
    ]);
    let found = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!(
        (found.state, found.state_by.as_str(), found.content),
        (State::Open, "", second.content)
    );
    fixture.apply(&[Change::Ledger(vec![update(
        "t-dlq/0/1",
        Some(State::Redriven),
        Some(second.content),
    )])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Redriven);
    fixture.apply(&[Change::Ledger(vec![update(
        "t-dlq/0/1",
        Some(State::Discarded),
        Some(first.content),
    )])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Open);
}

#[test]
fn a_ledger_entry_without_a_hash_that_is_older_than_the_record_is_ignored() {
    let mut fixture = Fixture::new();
    // The entries have the timestamp 9, and clocks may differ by a minute.
    let near = at(60_009, "t-dlq", 0, 1, &[]);
    let far = at(60_010, "t-dlq", 0, 2, &[]);
    let both = |state| {
        Change::Ledger(vec![
            update("t-dlq/0/1", state, None),
            update("t-dlq/0/2", state, None),
        ])
    };
    let discarded = Some(State::Discarded);
    for entries_first in [true, false] {
        fixture.apply(&[
            Change::ForgetLedger,
            Change::Forget {
                topic: "t-dlq".into(),
            },
        ]);
        let letters = Change::Letters(vec![near.clone(), far.clone()]);
        let mut changes = [both(discarded), letters];
        if !entries_first {
            changes.reverse();
        }
        fixture.apply(&changes);
        let states = [1, 2].map(|offset| {
            let found = fixture.get(&format!("t-dlq/0/{offset}")).unwrap();
            (found.state, found.state_by)
        });
        let expected = [(State::Discarded, "ann".to_owned()), (State::Open, String::new())];
        assert_eq!(states, expected, "{entries_first}");
    }
    // An entry with the content hash applies regardless of its time.
    let named = update("t-dlq/0/2", discarded, Some(far.content));
    fixture.apply(&[Change::Ledger(vec![named])]);
    assert_eq!(fixture.get("t-dlq/0/2").unwrap().state, State::Discarded);
}

#[test]
fn unused_texts_are_removed() {
    let mut fixture = Fixture::new();
    let texts = |fixture: &Fixture| -> Vec<String> {
        let query = |connection: &rusqlite::Connection| {
            let mut statement = connection.prepare("SELECT text FROM texts ORDER BY text")?;
            statement.query_map((), |row| row.get(0))?.collect()
        };
        fixture.index.pool.read_blocking(query).unwrap()
    };
    let code = |offset: i64| format!("code-{offset}");
    let letters = |offsets: std::ops::Range<i64>| {
        offsets
            .map(|offset| letter("t-dlq", 0, offset, &[("error-code", &code(offset))]))
            .collect::<Vec<_>>()
    };
    fixture.put(letters(0..1_500));
    let update = update("t-dlq/0/7", Some(State::Discarded), None);
    fixture.apply(&[Change::Ledger(vec![update])]);
    let trim = |low| Change::Trim {
        topic: "t-dlq".into(),
        partition: 0,
        low,
    };
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
    fixture.put(letters(0..1));
    assert_eq!(fixture.matching("error_code = code-0"), [0]);
    assert_eq!(fixture.matching("error_code = code-1499"), [1_499]);
}

#[test]
fn trimmed_dead_letters_are_removed_and_row_numbers_are_not_reused() {
    let mut fixture = Fixture::new();
    let letters = |topic: &str| {
        (0..10)
            .map(|offset| letter(topic, 0, offset, &[]))
            .collect::<Vec<_>>()
    };
    fixture.put(letters("a-dlq"));
    let last = fixture.put(letters("b-dlq"));
    let trim = Change::Trim {
        topic: "a-dlq".into(),
        partition: 0,
        low: 7,
    };
    fixture.apply(&[trim]);
    assert_eq!(fixture.matching("topic = a-dlq"), [9, 8, 7]);
    assert_eq!(fixture.matching("topic = b-dlq").len(), 10);
    let position = |next| Change::Position {
        topic: "b-dlq".into(),
        partition: 0,
        next,
    };
    fixture.apply(&[position(10)]);
    let (positions, _) = fixture.index.pool.read_blocking(read_positions).unwrap();
    assert_eq!((positions[0].topic.as_str(), positions[0].next), ("b-dlq", 10));
    fixture.apply(&[Change::Forget {
        topic: "b-dlq".into(),
    }]);
    assert_eq!(fixture.matching("topic = b-dlq"), [0_i64; 0]);
    assert_eq!(fixture.index.pool.read_blocking(read_positions).unwrap().0, []);
    let again = fixture.apply(&[Change::Letters(letters("b-dlq")), position(10)]);
    assert!(again >= last + 10, "{again} after {last}");
    let (positions, _) = fixture.index.pool.read_blocking(read_positions).unwrap();
    assert_eq!(positions[0].next, 10);
    // A record that is read twice is indexed once.
    fixture.put(letters("b-dlq"));
    assert_eq!(fixture.matching("topic = b-dlq").len(), 10);
}

#[test]
fn counts_are_by_topic_class_and_time() {
    let mut fixture = Fixture::new();
    fixture.put(vec![
        letter("a-dlq", 0, 10, &[("error-class", "permanent"), ("tenant", "x")]),
        letter("a-dlq", 0, 20, &[("error-class", "expired")]),
        letter("a-dlq", 0, 30, &[("error-class", "expired"), ("tenant", "x")]),
        letter("b-dlq", 0, 40, &[]),
    ]);
    fixture.apply(&[Change::Ledger(vec![update(
        "a-dlq/0/30",
        Some(State::Discarded),
        None,
    )])]);
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
    let open = fixture.index.pool.read_blocking(open_by_topic).unwrap();
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
fn the_first_and_the_last_dead_letter_of_each_partition_are_found() {
    let mut fixture = Fixture::new();
    fixture.put((0..10).map(|offset| letter("a-dlq", 0, offset, &[])).collect());
    fixture.put(vec![letter("a-dlq", 1, 5, &[])]);
    let read = |topic: &str, lows: &[(i32, i64)]| {
        let digests = fixture
            .index
            .pool
            .read_blocking(|connection| first_and_last(connection, topic, lows))
            .unwrap();
        let positions = digests.iter().map(|digest| (digest.partition, digest.offset));
        positions.collect::<Vec<_>>()
    };
    assert_eq!(read("a-dlq", &[(0, 4), (1, 0), (2, 0)]), [(0, 4), (0, 9), (1, 5)]);
    assert_eq!(read("none", &[(0, 0)]), []);
}

#[test]
fn an_existing_index_is_opened_and_an_unusable_one_is_replaced() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let generation = fixture.index.pool.generation();
    let path = fixture.directory.path().join(FILE);
    assert!(matches!(
        Index::open(fixture.directory.path()),
        Err(IndexError::InUse { .. })
    ));
    let reopen = |fixture: Fixture| {
        let Fixture { directory, index } = fixture;
        drop(index);
        let index = Index::open(directory.path()).unwrap();
        Fixture { directory, index }
    };
    let fixture = reopen(fixture);
    assert_eq!(
        (fixture.index.is_new, fixture.index.pool.generation()),
        (false, generation)
    );
    assert_eq!(fixture.matching(""), [1]);

    rusqlite::Connection::open(&path)
        .unwrap()
        .pragma_update(None, "user_version", 99)
        .unwrap();
    let mut fixture = reopen(fixture);
    assert!(fixture.index.is_new && fixture.index.pool.generation() != generation);
    assert_eq!(fixture.matching(""), [0_i64; 0]);
    assert_eq!(fixture.put(vec![letter("t-dlq", 0, 1, &[])]), 1);

    let Fixture { directory, index } = fixture;
    drop(index);
    std::fs::write(&path, b"this is no database").unwrap();
    let index = Index::open(directory.path()).unwrap();
    assert!(index.is_new);
    drop(index);
    std::fs::remove_file(&path).unwrap();
    assert!(Index::open(directory.path()).unwrap().is_new);
}

/// Overwrites the root page of a table, as a disk may do.
fn damage(path: &Path, table: &str) {
    let connection = rusqlite::Connection::open(path).unwrap();
    let root: i64 = connection
        .query_row(
            "SELECT rootpage FROM sqlite_master WHERE name = ?",
            [table],
            |row| row.get(0),
        )
        .unwrap();
    let size: i64 = connection
        .pragma_query_value(None, "page_size", |row| row.get(0))
        .unwrap();
    // All changes move from the write-ahead log to the file.
    connection
        .pragma_update(None, "wal_checkpoint", "truncate")
        .unwrap();
    drop(connection);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xa5; 512], u64::try_from((root - 1) * size).unwrap())
        .unwrap();
}

#[test]
fn an_index_whose_positions_are_damaged_is_replaced_at_the_start() {
    for table in ["positions", "topic_ids"] {
        let mut fixture = Fixture::new();
        fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
        let Fixture { directory, index } = fixture;
        drop(index);
        damage(&directory.path().join(FILE), table);
        let index = Index::open(directory.path()).unwrap();
        assert!(index.is_new, "{table}");
        assert!(index.pool.read_blocking(read_positions).is_ok());
    }
}

#[test]
fn a_rebuilt_index_is_empty_and_can_be_read_and_written() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[]), letter("t-dlq", 0, 2, &[])]);
    assert_eq!(fixture.matching(""), [2, 1]);
    let generation = fixture.index.pool.generation();
    fixture.index.writer.rebuild(&fixture.index.pool).unwrap();
    assert_ne!(fixture.index.pool.generation(), generation);
    assert_eq!(fixture.matching(""), [0_i64; 0]);
    assert_eq!(fixture.put(vec![letter("t-dlq", 0, 7, &[])]), 1);
    assert_eq!(fixture.matching(""), [1]);
}

#[test]
fn a_full_disk_is_a_temporary_failure_that_changes_nothing() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    fixture.index.writer.limit_size_to_pages(1);
    let many = (2..500).map(|offset| letter("t-dlq", 0, offset, &[]));
    let changes = [Change::Letters(many.collect())];
    let error = fixture.index.writer.apply(&changes).unwrap_err();
    assert!(error.is_temporary() && !error.is_damage(), "{error:?}");
    assert_eq!(fixture.matching(""), [1]);
    fixture.index.writer.limit_size_to_pages(1_000_000);
    assert_eq!(fixture.apply(&changes), 499);
}

#[test]
fn the_ids_of_topics_are_kept_until_the_topic_is_forgotten() {
    let mut fixture = Fixture::new();
    let identify = |topic: &str, bits| Change::Identify {
        topic: topic.into(),
        id: TopicId::from_bits(bits),
    };
    fixture.apply(&[
        identify("a-dlq", 1),
        identify("a-dlq", u128::MAX),
        identify(ledger::TOPIC, 3),
        Change::Position {
            topic: ledger::TOPIC.into(),
            partition: 0,
            next: 7,
        },
    ]);
    let read = |fixture: &Fixture| {
        let ids = fixture.index.pool.read_blocking(read_topic_ids).unwrap();
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
    fixture.apply(&[Change::Forget {
        topic: "a-dlq".into(),
    }]);
    // The position in a deleted ledger would be beyond the end of the next one.
    fixture.apply(&[Change::ForgetLedger]);
    assert_eq!(read(&fixture), []);
    let (positions, _) = fixture.index.pool.read_blocking(read_positions).unwrap();
    assert_eq!(positions.len(), 0);
}

#[tokio::test]
async fn a_query_whose_caller_went_away_is_interrupted() {
    let mut fixture = Fixture::new();
    fixture.put((0..2_000).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let endless = fixture.index.pool.read(move |connection| {
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
    assert_eq!(
        fixture
            .index
            .pool
            .read(|connection| get(
                connection,
                &LetterId {
                    topic: "t-dlq".into(),
                    partition: 0,
                    offset: 7
                }
            ))
            .await
            .unwrap()
            .unwrap()
            .id
            .offset,
        7
    );
}

#[test]
fn large_headers_make_a_page_end_early() {
    let mut fixture = Fixture::new();
    let large = "x".repeat(1 << 20);
    let letters = (0..10).map(|offset| letter("t-dlq", 0, offset, &[("large", &large)]));
    fixture.put(letters.collect());
    let everything = Expr::And(Vec::new());
    let page = |after| {
        let query = |connection: &_| list_by_row(connection, &everything, after, 100, 100);
        fixture.index.pool.read_blocking(query).unwrap()
    };
    let first = page(0);
    assert_eq!((first.letters.len(), first.has_more), (4, true));
    let last = page(7);
    assert_eq!((last.letters.len(), last.has_more), (3, false));
    let query = |connection: &_| list(connection, &everything, Direction::Descending, None, 2);
    let limited = fixture.index.pool.read_blocking(query).unwrap();
    assert_eq!((limited.letters.len(), limited.has_more), (2, true));
}
