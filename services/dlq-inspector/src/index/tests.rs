mod damaged;
mod undecoded;

use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

use redeliver_core::{Headers, Position, Record, Timestamp};
use redeliver_kafka::TopicId;
use redeliver_service::followed::Contents;
use tempfile::TempDir;

use super::query::read_topic_ids;
use super::*;
use crate::dialect::Facts;
use crate::filter::{Expr, Restriction, parse};
use crate::fingerprint::GroupId;
use crate::group_states::contents::tests as states;
use crate::group_states::{Decided, GroupState, GroupStates};
use crate::id::LetterId;
use crate::ledger::{self, Entry, State, Update, Version};
use crate::letter::{ContentHash, Letter};

struct Fixture {
    directory: TempDir,
    index: Index,
    json_fields: &'static [String],
}

/// No limit but that of the number of dead letters.
fn letters(count: usize) -> PageLimit {
    PageLimit {
        letters: count,
        bytes: 4 << 20,
    }
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let index = Index::open(directory.path(), &[]).unwrap();
        Self {
            directory,
            index,
            json_fields: &[],
        }
    }

    fn apply(&mut self, changes: &[Change]) -> i64 {
        let writer = &mut self.index.writer;
        let mut rest = changes;
        while !rest.is_empty() {
            let count = writer.write(rest, Timestamp::from_millis(77)).unwrap();
            rest = &rest[count..];
            while writer.remove_slice().unwrap() {}
        }
        writer.last_sequence()
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
        let filter = parse(filter, self.json_fields).unwrap();
        let query = |connection: &_| list(connection, &filter, direction, after, letters(limit));
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
        let filter = parse(filter, self.json_fields).unwrap();
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
        version: Version {
            closes: state.is_some_and(|state| state != State::Open),
            ..Version::default()
        },
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
            let end = last.cursor();
            after = Some(end);
            for found in &page {
                if found.id.topic == "t-dlq" {
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
    let (_, last) = fixture.index.pool.read_blocking(read_positions).unwrap();
    let nothing = parse("topic = none", &[]).unwrap();
    let stretch = fixture
        .index
        .pool
        .read_blocking(|connection| {
            list_by_sequence(
                connection,
                &nothing,
                &MessageCache::default(),
                0,
                last,
                letters(500),
            )
        })
        .unwrap();
    assert_eq!(
        (stretch.page.letters.len(), stretch.end),
        (0, query::SCANNED_ROWS)
    );
    let mut seen = HashSet::new();
    let mut after = 0;
    loop {
        let everything = Expr::And(Vec::new());
        let page = fixture.index.pool.read_blocking(|connection| {
            list_by_sequence(
                connection,
                &everything,
                &MessageCache::default(),
                after,
                last,
                letters(500),
            )
        });
        let page = page.unwrap().page.letters;
        let Some(end) = page.last() else { break };
        after = end.sequence;
        assert!(page.iter().all(|found| seen.insert(found.sequence)));
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
fn the_newest_ledger_entry_counts_in_whatever_order_partitions_are_read() {
    let written = |state, partition, millis| {
        let mut update = update("t-dlq/0/1", state, None);
        update.version.partition = partition;
        update.version.time = Some(Timestamp::from_millis(millis));
        update
    };
    // The ledger had one partition when the dead letter was discarded, then two.
    let discarded = written(Some(State::Discarded), 0, 1_000);
    for (newest, expected) in [(Some(State::Redriven), State::Redriven), (None, State::Open)] {
        let newest = written(newest, 1, 2_000);
        for updates in [[&discarded, &newest], [&newest, &discarded]] {
            let mut fixture = Fixture::new();
            fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
            fixture.apply(&[Change::Ledger(updates.map(Clone::clone).into())]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
            // Also of a dead letter that is indexed later.
            fixture.apply(&[Change::Forget {
                topic: "t-dlq".into(),
            }]);
            fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
        }
    }
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
        let mut changes = [both(discarded), Change::Letters(vec![near.clone(), far.clone()])];
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
    let coded = |offsets: std::ops::Range<i64>| {
        offsets
            .map(|offset| letter("t-dlq", 0, offset, &[("error-code", &code(offset))]))
            .collect::<Vec<_>>()
    };
    fixture.put(coded(0..1_500));
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
    fixture.put(coded(0..1));
    assert_eq!(fixture.matching("error_code = code-0"), [0]);
    assert_eq!(fixture.matching("error_code = code-1499"), [1_499]);
}

#[test]
fn texts_that_only_groups_have_are_kept() {
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
    let trim = Change::Trim {
        topic: "t-dlq".into(),
        partition: 0,
        low: 1_498,
    };
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
fn trimmed_dead_letters_are_removed_and_row_numbers_are_not_reused() {
    let mut fixture = Fixture::new();
    let ten = |topic: &str| {
        (0..10)
            .map(|offset| letter(topic, 0, offset, &[]))
            .collect::<Vec<_>>()
    };
    fixture.put(ten("a-dlq"));
    let last = fixture.put(ten("b-dlq"));
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
    let again = fixture.apply(&[Change::Letters(ten("b-dlq")), position(10)]);
    assert!(again >= last + 10, "{again} after {last}");
    let (positions, _) = fixture.index.pool.read_blocking(read_positions).unwrap();
    assert_eq!(positions[0].next, 10);
    // A record that is read twice is indexed once.
    fixture.put(ten("b-dlq"));
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
        Index::open(fixture.directory.path(), &[]),
        Err(IndexError::InUse { .. })
    ));
    let reopen = |fixture: Fixture| {
        let Fixture {
            directory,
            index,
            json_fields,
        } = fixture;
        drop(index);
        let index = Index::open(directory.path(), &[]).unwrap();
        Fixture {
            directory,
            index,
            json_fields,
        }
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

    let Fixture { directory, index, .. } = fixture;
    drop(index);
    std::fs::write(&path, b"this is no database").unwrap();
    let index = Index::open(directory.path(), &[]).unwrap();
    assert!(index.is_new);
    drop(index);
    std::fs::remove_file(&path).unwrap();
    assert!(Index::open(directory.path(), &[]).unwrap().is_new);
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
        let Fixture { directory, index, .. } = fixture;
        drop(index);
        damage(&directory.path().join(FILE), table);
        let index = Index::open(directory.path(), &[]).unwrap();
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
    assert_eq!(fixture.matching(""), [7]);
}

#[test]
fn a_full_disk_is_a_temporary_failure_that_changes_nothing() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    fixture.index.writer.limit_size_to_pages(1);
    let many = (2..500).map(|offset| letter("t-dlq", 0, offset, &[]));
    let changes = [Change::Letters(many.collect())];
    let error = fixture
        .index
        .writer
        .write(&changes, Timestamp::from_millis(0))
        .unwrap_err();
    assert!(error.is_temporary() && !error.is_damage(), "{error:?}");
    assert_eq!(fixture.matching(""), [1]);
    fixture.index.writer.limit_size_to_pages(1_000_000);
    assert_eq!(fixture.apply(&changes), 499);
}

#[test]
fn a_disk_without_space_for_shared_memory_is_full() {
    let failed = |code| IndexError::Database {
        step: "opening the index",
        source: rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None),
    };
    let full = [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_IOERR_SHMSIZE].map(failed);
    assert!(
        full.iter()
            .all(|error| error.is_disk_full() && error.can_be_opened_later())
    );
    let other = failed(rusqlite::ffi::SQLITE_IOERR_READ);
    assert!(!other.is_disk_full() && other.can_be_opened_later());
}

#[test]
fn an_index_that_cannot_be_created_leaves_no_file_that_looks_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    // The database can be opened, but not its write-ahead log.
    std::fs::create_dir(with_suffix(&path, "-wal")).unwrap();
    let error = schema::create(&path).unwrap_err();
    assert!(error.is_temporary(), "{error:?}");
    assert!(!path.exists());
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
    assert_eq!(
        fixture
            .index
            .pool
            .internal(|connection| get(
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
    let with_large = (0..10).map(|offset| letter("t-dlq", 0, offset, &[("large", &large)]));
    fixture.put(with_large.collect());
    let everything = Expr::And(Vec::new());
    let page = |after| {
        let query = |connection: &_| {
            list_by_sequence(
                connection,
                &everything,
                &MessageCache::default(),
                after,
                100,
                letters(100),
            )
        };
        fixture.index.pool.read_blocking(query).unwrap().page
    };
    let first = page(0);
    assert_eq!((first.letters.len(), first.has_more), (4, true));
    let last = page(7);
    assert_eq!((last.letters.len(), last.has_more), (3, false));
    let query = |connection: &_| list(connection, &everything, Direction::Descending, None, letters(2));
    let limited = fixture.index.pool.read_blocking(query).unwrap();
    assert_eq!((limited.letters.len(), limited.has_more), (2, true));
}

/// Dead letters that differ in everything that filters can test.
fn varied(fixture: &mut Fixture, count: i64) {
    let texts = |offset: i64| {
        [
            ("tenant", format!("t{}", offset % 3)),
            ("request", format!("r{offset}")),
            (
                "error-class",
                ["permanent", "exhausted"][usize::try_from(offset % 2).unwrap()].to_owned(),
            ),
            ("error-code", format!("http.{}", 400 + offset % 7)),
            (
                "error-message",
                format!("host-{} refused after {offset} ms", offset % 5),
            ),
            ("pipeline", format!("p{}", offset % 2)),
            ("original-topic", "docs".to_owned()),
            ("original-partition", (offset % 4).to_string()),
            ("original-offset", (offset / 4).to_string()),
            ("job-id", format!("j{offset}")),
            ("traceparent", format!("00-{:032x}-{:016x}-01", offset + 1, 1)),
        ]
    };
    let all = (0..count).map(|offset| {
        let texts = texts(offset);
        let headers: Vec<(&str, &str)> = texts
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let topic = ["a-dlq", "b-dlq"][usize::try_from(offset % 2).unwrap()];
        let mut letter = at(1_700_000_000_000 + offset * 3, topic, 0, offset, &headers);
        let fields: Headers = [("/order/id", Some(format!("o{offset}").into_bytes()))]
            .iter()
            .map(|(name, value)| (*name, value.as_deref()))
            .collect();
        letter.json_fields = Some(crate::header_list::encode(&fields));
        letter
    });
    fixture.put(all.collect());
}

/// The query plan of the rows of a filter, without the parts that only name tables.
fn query_plan(connection: &rusqlite::Connection, filter: &Expr) -> Vec<String> {
    let plan = super::query::plan(connection, filter).unwrap();
    let (from, params) = plan.from();
    let sql = format!(
        "EXPLAIN QUERY PLAN SELECT l.row, l.content {from} ORDER BY {} DESC",
        plan.order()
    );
    let mut statement = connection.prepare(&sql).unwrap();
    let steps = statement.query_map(rusqlite::params_from_iter(params), |row| row.get("detail"));
    steps.unwrap().collect::<rusqlite::Result<_>>().unwrap()
}

#[test]
fn each_filter_with_an_equality_or_a_state_is_answered_by_an_index_without_sorting() {
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
        let steps = fixture
            .index
            .pool
            .read_blocking(|connection| Ok(query_plan(connection, &parsed)))
            .unwrap();
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

static JSON_FIELDS: std::sync::LazyLock<Vec<String>> =
    std::sync::LazyLock::new(|| vec!["/order/id".to_owned()]);

#[test]
fn an_index_finds_what_a_scan_finds() {
    let mut fixture = Fixture::new();
    fixture.json_fields = JSON_FIELDS.as_slice();
    varied(&mut fixture, 300);
    fixture.apply(&[Change::Ledger(
        (0..40)
            .map(|number| {
                let topic = ["a-dlq", "b-dlq"][number % 2];
                update(&format!("{topic}/0/{}", number * 3), Some(State::Discarded), None)
            })
            .map(|mut update| {
                // Later than the dead letters, so that the entries apply.
                if let Some(entry) = &mut update.entry {
                    entry.time = None;
                }
                update
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
fn the_counters_of_the_writer_equal_the_rows() {
    let mut fixture = Fixture::new();
    let mut random = redeliver_testkit::chaos_random("the_counters_of_the_writer_equal_the_rows");
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
                                let mut update = update(&format!("{topic}/0/{offset}"), state, None);
                                if let Some(entry) = &mut update.entry {
                                    entry.time = None;
                                }
                                update
                            })
                            .collect(),
                    ),
                    8 => Change::Trim {
                        topic: topic.into(),
                        partition: 0,
                        low: offset / 3,
                    },
                    _ if random.bool() => Change::ForgetLedger,
                    _ => Change::Forget { topic: topic.into() },
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
fn many_dead_letters_are_removed_in_slices() {
    let mut fixture = Fixture::new();
    let count = 3 * removal::SLICE_ROWS as i64 + 1;
    fixture.put((0..count).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let trim = Change::Trim {
        topic: "t-dlq".into(),
        partition: 0,
        low: count,
    };
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
        let left = usize::try_from((count - slices * removal::SLICE_ROWS as i64).max(0)).unwrap();
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
fn the_log_shrinks_after_a_reader_has_held_it() {
    let mut fixture = Fixture::new();
    let reader = rusqlite::Connection::open(fixture.directory.path().join(FILE)).unwrap();
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM letters")
        .unwrap();
    let large = "x".repeat(100_000);
    let put = |fixture: &mut Fixture, from: i64| {
        for start in (from..from + 1_000).step_by(100) {
            fixture.put(
                (start..start + 100)
                    .map(|offset| letter("t-dlq", 0, offset, &[("large", &large)]))
                    .collect(),
            );
        }
    };
    put(&mut fixture, 0);
    let log = fixture.directory.path().join(format!("{FILE}-wal"));
    let size = || std::fs::metadata(&log).unwrap().len();
    assert!(size() > 90 << 20, "{}", size());
    drop(reader);
    put(&mut fixture, 1_000);
    assert!(size() <= 65 << 20, "{}", size());
}

#[test]
fn pages_of_two_indexes_continue_each_other() {
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
fn an_index_with_other_fields_is_built_beside_the_old_one() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let former = directory.path().join("dlq-index.db");
    std::fs::write(&former, b"of a former version").unwrap();
    let new = Index::open(directory.path(), &JSON_FIELDS).unwrap();
    assert!(new.is_new);
    let old = directory.path().join(FILE);
    assert!(old.exists() && former.exists());
    // Without the fields again, before the new index is complete: nothing is read again.
    drop(new);
    assert!(!Index::open(directory.path(), &[]).unwrap().is_new);
    let new = Index::open(directory.path(), &JSON_FIELDS).unwrap();
    assert!(!new.is_new);
    new.writer.remove_outdated();
    assert!(!old.exists() && !former.exists());
    assert!(directory.path().join("dlq-index.lock").exists());
    drop(new);
    assert!(!Index::open(directory.path(), &JSON_FIELDS).unwrap().is_new);
}

#[test]
fn a_dead_letter_knows_when_it_was_indexed() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let found = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!(found.indexed_at, Timestamp::from_millis(77));
}

#[tokio::test(flavor = "multi_thread")]
async fn fast_queries_run_next_to_any_number_of_slow_ones() {
    // More than there are connections for fast queries.
    const SLOW: usize = 6;
    let mut fixture = Fixture::new();
    fixture.put((0..1_000).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let pool = fixture.index.pool.clone();
    let (release, released) = std::sync::mpsc::sync_channel::<()>(SLOW);
    let released = Arc::new(std::sync::Mutex::new(released));
    let mut slow = tokio::task::JoinSet::new();
    for number in 0..SLOW {
        let (pool, released) = (pool.clone(), released.clone());
        slow.spawn(async move {
            let query = move |connection: &rusqlite::Connection| {
                let sql = "SELECT count(*) FROM letters a, letters b";
                // It is interrupted in the fast lane.
                let count: i64 = connection.query_row(sql, (), |row| row.get(0))?;
                released.lock().unwrap().recv().unwrap();
                Ok(count)
            };
            // A watch does not wait for other slow queries.
            if number == 0 {
                pool.watch(query).await
            } else {
                pool.query(query).await
            }
        });
    }
    for _ in 0..100 {
        let query = |connection: &rusqlite::Connection| {
            get(
                connection,
                &LetterId {
                    topic: "t-dlq".into(),
                    partition: 0,
                    offset: 7,
                },
            )
        };
        assert_eq!(pool.query(query).await.unwrap().unwrap().id.offset, 7);
    }
    for _ in 0..SLOW {
        release.send(()).unwrap();
    }
    while let Some(counted) = slow.join_next().await {
        assert_eq!(counted.unwrap().unwrap(), 1_000_000);
    }
}

#[test]
fn a_change_that_cancels_another_one_leaves_no_counter_of_a_forgotten_topic() {
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
    fixture.apply(&[Change::Forget {
        topic: "t-dlq".into(),
    }]);
    assert_eq!(zeros(&fixture), 0);
    assert!(fixture.counts("", [0; 3]).is_empty());
}

#[test]
fn changes_of_a_topic_wait_for_its_removal_and_others_do_not() {
    let mut fixture = Fixture::new();
    let now = Timestamp::from_millis(0);
    let count = 2 * removal::SLICE_ROWS as i64;
    fixture.put((0..count).map(|offset| letter("t-dlq", 0, offset, &[])).collect());
    let again = Change::Letters(vec![letter("t-dlq", 0, 7, &[])]);
    let other = Change::Letters(vec![letter("other-dlq", 0, 7, &[])]);
    let forget = Change::Forget {
        topic: "t-dlq".into(),
    };
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
fn numbers_are_not_reused_after_the_index_has_lost_its_last_transactions() {
    let mut fixture = Fixture::new();
    let last = fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let mut index = Index::open(directory.path(), &[]).unwrap();
    assert!(index.writer.last_sequence() >= last + schema::SEQUENCE_GAP);
    let (_, read) = index.pool.read_blocking(read_positions).unwrap();
    assert_eq!(read, index.writer.last_sequence());
    let more = [Change::Letters(vec![letter("t-dlq", 0, 2, &[])])];
    index.writer.write(&more, Timestamp::from_millis(0)).unwrap();
    assert_eq!(index.writer.last_sequence(), read + 1);
}

#[test]
fn a_filter_of_the_greatest_nesting_is_answered() {
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
fn an_index_that_cannot_be_opened_for_now_is_kept() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let generation = fixture.index.pool.generation();
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let other = rusqlite::Connection::open(directory.path().join(FILE)).unwrap();
    other
        .execute_batch("PRAGMA locking_mode = exclusive; BEGIN EXCLUSIVE")
        .unwrap();
    let error = Index::open(directory.path(), &[]).err().unwrap();
    assert!(error.is_temporary(), "{error:?}");
    drop(other);
    let index = Index::open(directory.path(), &[]).unwrap();
    assert_eq!((index.is_new, index.pool.generation()), (false, generation));
}

#[test]
fn a_page_token_of_another_version_continues_at_the_same_dead_letter() {
    let mut fixture = Fixture::new();
    fixture.put(vec![at(7, "t-dlq", 3, 44, &[])]);
    let expected = Cursor {
        dead_at: 7,
        id_hash: 0x2ed9_6285_c08d_c8a9,
    };
    assert_eq!(fixture.get("t-dlq/3/44").unwrap().cursor(), expected);
}

#[test]
fn a_removal_continues_after_a_restart() {
    let mut fixture = Fixture::new();
    let rows = 2 * removal::SLICE_ROWS as i64;
    let position = Change::Position {
        topic: "t-dlq".into(),
        partition: 0,
        next: rows,
    };
    let identify = Change::Identify {
        topic: "t-dlq".into(),
        id: TopicId::from_bits(1),
    };
    let all = (0..rows).map(|offset| letter("t-dlq", 0, offset, &[]));
    fixture.apply(&[Change::Letters(all.collect()), position, identify]);
    let forget = [Change::Forget {
        topic: "t-dlq".into(),
    }];
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
    assert_eq!(left[0].1.total, removal::SLICE_ROWS as u64);
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
    let trims: Vec<Change> = (0..50)
        .map(|partition| Change::Trim {
            topic: "t-dlq".into(),
            partition,
            low: 5,
        })
        .collect();
    let writer = &mut fixture.index.writer;
    writer.write(&trims, Timestamp::from_millis(0)).unwrap();
    assert_eq!(writer.removing().count(), 50);
    assert!(!writer.remove_slice().unwrap());
    assert_eq!(writer.removing().count(), 0);
    assert_eq!(fixture.matching("").len(), 250);
}

#[test]
fn a_failure_after_a_part_of_the_changes_repeats_only_the_rest() {
    let mut fixture = Fixture::new();
    let now = Timestamp::from_millis(0);
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let many = (0..500).map(|offset| letter("t-dlq", 0, offset, &[]));
    let changes = [
        Change::Letters(vec![letter("other-dlq", 0, 1, &[])]),
        Change::Forget {
            topic: "t-dlq".into(),
        },
        Change::Letters(many.collect()),
    ];
    let writer = &mut fixture.index.writer;
    assert_eq!(writer.write(&changes, now).unwrap(), 2);
    while writer.remove_slice().unwrap() {}
    let last = writer.last_sequence();
    writer.limit_size_to_pages(1);
    assert!(writer.write(&changes[2..], now).is_err());
    assert_eq!(writer.last_sequence(), last);
    assert_eq!(fixture.matching(""), [1]);
    let writer = &mut fixture.index.writer;
    writer.limit_size_to_pages(1_000_000);
    assert_eq!(writer.write(&changes[2..], now).unwrap(), 1);
    assert_eq!(fixture.matching("topic = t-dlq").len(), 500);
    assert_eq!(fixture.matching("topic = other-dlq"), [1]);
}

#[test]
fn a_text_that_is_used_again_while_unused_ones_are_searched_is_kept() {
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
    let trim = Change::Trim {
        topic: "t-dlq".into(),
        partition: 0,
        low: 1_500,
    };
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
        assert_eq!(found.error_code, format!("code-{code}"));
        assert_eq!(
            found.error_message,
            format!("no {}", "x".repeat(usize::try_from(code % 50).unwrap()))
        );
    }
    let unused = fixture.index.pool.read_blocking(|connection| {
        let sql = "SELECT count(*) FROM texts WHERE text LIKE 'code-1__'";
        connection.query_row(sql, (), |row| row.get::<_, i64>(0))
    });
    assert_eq!(unused.unwrap(), 0);
}

#[test]
fn a_watch_passes_unused_numbers_at_once() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let mut index = Index::open(directory.path(), &[]).unwrap();
    let more = [Change::Letters(vec![letter("t-dlq", 0, 2, &[])])];
    index.writer.write(&more, Timestamp::from_millis(0)).unwrap();
    let last = index.writer.last_sequence();
    let nothing = parse("topic = none", &[]).unwrap();
    let query = |connection: &_| {
        list_by_sequence(
            connection,
            &nothing,
            &MessageCache::default(),
            0,
            last,
            letters(9),
        )
    };
    assert_eq!(index.pool.read_blocking(query).unwrap().end, last);
}

#[test]
fn a_watch_that_knows_templates_finds_messages_of_later_ones() {
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
        let (_, last) = fixture.index.pool.read_blocking(read_positions).unwrap();
        let query = |connection: &_| list_by_sequence(connection, &filter, &known, 0, last, letters(9));
        let letters = fixture.index.pool.read_blocking(query).unwrap().page.letters;
        letters.into_iter().map(|letter| letter.id.offset).collect()
    };
    fixture.put(vec![with_message(1, "refused by host"), with_message(2, "gone")]);
    assert_eq!(found(&fixture), [1]);
    fixture.put(vec![with_message(3, "refused again"), with_message(4, "lost")]);
    assert_eq!(found(&fixture), [1, 3]);
    // The id of a deleted template is not used for another one.
    let trim = Change::Trim {
        topic: "t-dlq".into(),
        partition: 0,
        low: 2_000,
    };
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

impl Fixture {
    fn groups(&self, filter: &str, order: GroupOrder, after: Option<Cursor>, limit: usize) -> GroupPage {
        let filter = parse(filter, self.json_fields).unwrap();
        let query = GroupQuery {
            order,
            after,
            limit,
            ..all_groups(&filter)
        };
        let query = |connection: &_| list_groups(connection, &query);
        self.index.pool.read_blocking(query).unwrap()
    }
}

/// No group has a state.
static NO_STATES: LazyLock<GroupStates> = LazyLock::new(GroupStates::default);

fn all_groups(filter: &Expr) -> GroupQuery<'_> {
    GroupQuery {
        order: GroupOrder::Count,
        limit: 5_000,
        ..GroupQuery::first(filter, &NO_STATES, None, Timestamp::from_millis(86_400_000))
    }
}

#[test]
fn a_group_has_the_counts_times_and_topics_of_its_dead_letters() {
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
    let mut discarded = update("b-dlq/0/3", Some(State::Discarded), None);
    discarded.entry.as_mut().unwrap().time = None;
    fixture.apply(&[Change::Ledger(vec![discarded])]);
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
    trend[0] = 1;
    trend[1] = 1;
    trend[2] = 1;
    trend[22] = 1;
    assert_eq!(group.trend, trend);
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
fn the_hours_of_a_trend_are_forgotten_after_a_day() {
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
        fixture.index.pool.read_blocking(read).unwrap()
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
    fixture.apply(&[Change::Trim {
        topic: "a-dlq".into(),
        partition: 0,
        low: 4,
    }]);
    assert_eq!(stored(&fixture), [(23, 1), (24, 1)]);
    // After a mistaken time, hours are forgotten as before.
    later(&mut fixture, 900, 6);
    assert_eq!(stored(&fixture), [(900, 1)]);
    later(&mut fixture, 48, 7);
    later(&mut fixture, 72, 8);
    assert_eq!(stored(&fixture), [(72, 1), (900, 1)]);
}

#[test]
fn many_hours_are_forgotten_bit_by_bit() {
    let mut fixture = Fixture::new();
    let hours = 3_600_000;
    let slice = i64::try_from(super::removal::SLICE_ROWS).unwrap();
    let dead = |hour: i64| at(hour * hours, "a-dlq", 0, hour, &[]);
    fixture.put((0..2 * slice + 1).map(dead).collect());
    let mut write = |hour: i64| {
        let position = Change::Position {
            topic: "a-dlq".into(),
            partition: 0,
            next: 1,
        };
        let now = Timestamp::from_millis(hour * hours);
        fixture.index.writer.write(&[position], now).unwrap();
        let count = |connection: &rusqlite::Connection| {
            connection.query_row("SELECT count(*) AS hours FROM group_hours", (), |row| {
                row.get("hours")
            })
        };
        fixture.index.pool.read_blocking(count).unwrap()
    };
    let left: [i64; 4] = [10_000; 4].map(&mut write);
    assert_eq!(left, [slice + 1, 1, 0, 0]);
}

/// The number of hundreds of instructions that a query needs.
fn cost<T>(
    fixture: &Fixture,
    query: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<T>,
) -> (usize, T) {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let mut connection = rusqlite::Connection::open(fixture.directory.path().join(FILE)).unwrap();
    let cost = Arc::new(AtomicUsize::new(0));
    let count = cost.clone();
    let add = move || {
        count.fetch_add(1, Ordering::Relaxed);
        false
    };
    connection.progress_handler(100, Some(add)).unwrap();
    let answer = query(&connection).unwrap();
    (cost.load(Ordering::Relaxed), answer)
}

#[test]
fn the_cost_of_a_page_of_groups_does_not_depend_on_the_number_of_groups() {
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
fn the_cost_of_statistics_of_a_rare_class_does_not_depend_on_other_classes() {
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
    let redriven = update("a-dlq/0/60", Some(State::Redriven), None);
    fixture.apply(&[Change::Ledger(vec![redriven])]);
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

#[test]
fn a_copy_of_an_index_uses_other_numbers_than_the_original() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("a-dlq", 0, 1, &[])]);
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    // A resume token of one is neither beyond the end of the other soon, nor does it skip dead letters of the other.
    let next = [directory.path(), copy.path()].map(|directory| {
        let index = Index::open(directory, &[]).unwrap();
        index.writer.last_sequence()
    });
    assert!(next[0].abs_diff(next[1]) > 1_000, "{next:?}");
}

#[test]
fn pages_of_groups_contain_each_group_once_in_each_order() {
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

#[test]
fn groups_in_the_order_of_their_size_are_found_by_an_index_without_sorting() {
    let mut fixture = Fixture::new();
    varied(&mut fixture, 100);
    let plan = |filter: &str| -> Vec<String> {
        let filter = parse(filter, fixture.json_fields).unwrap();
        let explain = |connection: &rusqlite::Connection| {
            let (sql, params) = super::groups::by_count(connection, &filter, None)?;
            let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
            let steps = statement.query_map(rusqlite::params_from_iter(params), |row| row.get("detail"))?;
            steps.collect()
        };
        fixture.index.pool.read_blocking(explain).unwrap()
    };
    for (filter, of_group) in [
        ("", "group_id=?"),
        ("error_class = permanent", "group_id=?"),
        (
            "topic = a-dlq AND state = OPEN",
            "group_id=? AND topic_id=? AND state=?",
        ),
    ] {
        let plan: Vec<String> = plan(filter)
            .into_iter()
            .map(|step| step.replace("COVERING ", ""))
            .collect();
        let expected = [
            "SEARCH g USING INDEX groups_by_count (count<?)".to_owned(),
            format!("SEARCH c USING PRIMARY KEY ({of_group})"),
        ];
        assert_eq!(plan, expected, "{filter}");
    }
}

/// Random changes; the groups of the writer are compared with those of the rows after each.
#[test]
fn the_groups_of_the_writer_equal_the_rows() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut fixture = Fixture::new();
    let mut next = [[0_i64; 2]; 2];
    for step in 0..400 {
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
                    let mut update = update(&id, state, None);
                    if let Some(entry) = &mut update.entry {
                        entry.time = None;
                    }
                    update
                });
                fixture.apply(&[Change::Ledger(updates.collect())]);
            }
            7..9 => {
                let low = random.i64(0..=*end);
                fixture.apply(&[Change::Trim {
                    topic: name.into(),
                    partition: number,
                    low,
                }]);
            }
            _ => {
                if random.u8(..3) == 0 {
                    fixture.apply(&[Change::ForgetLedger]);
                } else if random.u8(..3) == 0 {
                    next[topic] = [0; 2];
                    fixture.apply(&[Change::Forget { topic: name.into() }]);
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
        let stored: i64 = fixture
            .index
            .pool
            .read_blocking(|connection| {
                connection.query_row(
                    "SELECT (SELECT count(*) FROM groups) + (SELECT count(*) FROM group_hours WHERE group_id NOT IN \
                     (SELECT group_id FROM group_counts)) AS stored",
                    (),
                    |row| row.get("stored"),
                )
            })
            .unwrap();
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
        let key = crate::group_states::contents::key(*id);
        Contents::apply(&mut known, &states::record(&key, Some(value.encode())));
    }
    known
}

#[test]
fn the_state_of_a_group_follows_from_all_dead_letters_in_the_topics_that_are_seen() {
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
            let page = fixture.index.pool.read_blocking(read).unwrap();
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
    fixture.apply(&[Change::Ledger(vec![update(
        "b-dlq/0/2",
        Some(State::Discarded),
        None,
    )])]);
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
fn groups_with_open_dead_letters_are_counted_by_state() {
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
        fixture.index.pool.read_blocking(read).unwrap()
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
fn new_groups_are_counted_once() {
    let mut fixture = Fixture::new();
    let dead = |offset, code| letter("a-dlq", 0, offset, &[("error-code", code)]);
    fixture.put(vec![dead(1, "a"), dead(2, "a"), dead(3, "b")]);
    fixture.put(vec![dead(4, "a")]);
    assert_eq!(fixture.index.writer.take_new_groups().len(), 2);
    fixture.put(vec![dead(5, "b"), dead(6, "c")]);
    assert_eq!(fixture.index.writer.take_new_groups().len(), 1);
}

/// A filter of a caller that sees these topics.
fn seen_in(fixture: &Fixture, filter: &str, sees: impl Fn(&str) -> bool) -> Expr {
    let topics = fixture.index.pool.read_blocking(topics).unwrap().into_iter();
    let topics = topics.filter(|(_, topic)| sees(topic)).collect();
    let filter = parse(filter, fixture.json_fields).unwrap();
    Expr::And(vec![Expr::Is(Restriction::TopicIn(topics)), filter])
}

#[test]
fn a_filter_can_be_limited_to_thousands_of_topics() {
    let mut fixture = Fixture::new();
    // SQLite permits expressions with a depth of 1,000.
    let dead = (0..2_000).map(|number| letter(&format!("t{number}-dlq"), 0, number, &[("tenant", "x")]));
    fixture.put(dead.collect());
    for (filter, topics, expected) in [
        ("", 2_000, 2_000),
        ("state = OPEN", 1_999, 1_999),
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
fn the_index_of_a_state_finds_the_few_dead_letters_of_a_caller_that_sees_some_topics() {
    use super::plan::Driver;

    let mut fixture = Fixture::new();
    let dead = |topic: &str, count| (0..count).map(|offset| letter(topic, 0, offset, &[])).collect();
    fixture.put(dead("a-dlq", 30));
    fixture.put(dead("b-dlq", 2));
    fixture.put(dead("c-dlq", 1));
    let driver = |fixture: &Fixture, filter: &str, sees: &str| {
        let filter = seen_in(fixture, filter, |topic| sees.contains(&topic[..1]));
        let plan = |connection: &_| super::query::plan(connection, &filter);
        fixture.index.pool.read_blocking(plan).unwrap().driver
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

#[test]
fn a_search_for_the_next_dead_letter_of_a_group_is_bounded_and_stays_in_its_topic() {
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
