//! Tests of the index. Here is what they share.

use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

use redeliver_core::{Headers, Record, Timestamp};
use redeliver_kafka::TopicId;
use redeliver_testkit::record_at;
use tempfile::TempDir;

use super::positions::read_topic_ids;
use super::*;
use crate::dialect::Facts;
use crate::filter::{Expr, Restriction, parse};
use crate::fingerprint::GroupId;
use crate::group_states::contents::tests as states;
use crate::group_states::{Decided, GroupState, GroupStates};
use crate::id::parse_id;
use crate::json_fields::JsonFields;
use crate::ledger::{self, LedgerEntry, State, Update, Version};
use crate::letter::{ContentHash, Letter};

mod counts;
mod damaged;
mod files;
mod group_lists;
mod ledger_entries;
mod queries;
mod removals;

pub(super) struct Fixture {
    directory: TempDir,
    pub(super) index: Index,
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
    pub(super) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let index = Index::open(directory.path(), &[]).unwrap();
        Self {
            directory,
            index,
            json_fields: &[],
        }
    }

    fn apply(&mut self, changes: &[Change]) {
        let writer = &mut self.index.writer;
        let mut rest = changes;
        while !rest.is_empty() {
            let count = writer.write(rest, Timestamp::from_millis(77)).unwrap();
            rest = &rest[count..];
            while writer.remove_slice().unwrap() {}
        }
    }

    fn put(&mut self, letters: Vec<Letter>) {
        self.apply(&[Change::Letters(letters)]);
    }

    /// Writes an entry of the ledger.
    fn mark(&mut self, id: &str, state: Option<State>) {
        self.apply(&[Change::Ledger(vec![update(id, state, None)])]);
    }

    fn read<T>(&self, query: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<T>) -> T {
        self.index.pool.read_blocking(query).unwrap()
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
        self.read(query).letters
    }

    /// The offsets of the dead letters that match, newest first.
    fn matching(&self, filter: &str) -> Vec<i64> {
        let letters = self.list(filter, Direction::Descending, None, 1000);
        letters.into_iter().map(|letter| letter.id.offset).collect()
    }

    fn get(&self, id: &str) -> Option<IndexedLetter> {
        let id = parse_id(id).unwrap();
        self.read(|connection| get(connection, &id))
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
        timestamp: Some(Timestamp::from_millis(time)),
        key: Some(format!("key-{offset}").into()),
        value: Some(format!("value-{offset}").into()),
        headers,
        ..record_at(topic, partition, offset)
    })
}

fn update(id: &str, state: Option<State>, content: Option<ContentHash>) -> Update {
    Update {
        id: parse_id(id).unwrap(),
        entry: state.map(|state| LedgerEntry {
            state,
            time: Some(Timestamp::from_millis(9)),
            by: "ann".to_owned(),
            reason: "because".to_owned(),
            content,
        }),
        version: Version {
            closes: state.is_some_and(|state| state != State::Open),
            ..Version::default()
        },
    }
}

fn trim(topic: &str, partition: i32, low: i64) -> Change {
    Change::Trim {
        topic: topic.into(),
        partition,
        low,
    }
}

fn forget(topic: &str) -> Change {
    Change::Forget { topic: topic.into() }
}

fn position(topic: &str, partition: i32, next: i64) -> Change {
    Change::Position {
        topic: topic.into(),
        partition,
        next,
    }
}

fn identify(topic: &str, bits: u128) -> Change {
    Change::Identify {
        topic: topic.into(),
        id: TopicId::from_bits(bits),
    }
}

#[test]
fn indexed_letter_has_all_fields() {
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
    assert_eq!(found.facts, written.facts);
    assert_eq!(
        (found.facts.retry_count, found.facts.job_id.as_deref()),
        (3, Some("job"))
    );
    assert_eq!(
        (found.key.as_deref(), found.value_size),
        (Some(&b"key-44"[..]), Some(8))
    );
    assert_eq!(
        (&*found.headers, found.content),
        (&*written.headers, written.content)
    );
    assert_eq!(found.indexed_at, Timestamp::from_millis(77));
    assert_eq!(fixture.get("t-dlq/3/45"), None);
    assert_eq!(fixture.get("other/3/44"), None);
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

static JSON_FIELDS: std::sync::LazyLock<Vec<String>> =
    std::sync::LazyLock::new(|| vec!["/order/id".to_owned()]);

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
        self.read(query)
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
