//! Dead letters whose values are decoded after they were indexed.

use super::*;
use crate::letter::Undecoded;

static FIELDS: LazyLock<Vec<String>> = LazyLock::new(|| vec!["/id".to_owned()]);

fn with_fields(letter: Letter, id: Option<&str>, undecoded: Option<Undecoded>) -> Letter {
    let fields: Headers = id.iter().map(|id| ("/id", Some(id.as_bytes()))).collect();
    Letter {
        json_fields: id.map(|_| crate::header_list::encode(&fields)),
        undecoded,
        ..letter
    }
}

fn undecoded(topic: &str, offset: i64, undecoded: Undecoded) -> Letter {
    with_fields(
        letter(topic, 0, offset, &[("tenant", "t")]),
        None,
        Some(undecoded),
    )
}

/// Four dead letters: two of one schema, one of another one, and one whose schema is missing.
fn fixture() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.json_fields = FIELDS.as_slice();
    fixture.put(vec![
        undecoded("a-dlq", 0, Undecoded::Pending(7)),
        undecoded("b-dlq", 1, Undecoded::Pending(u32::MAX)),
        undecoded("a-dlq", 2, Undecoded::NoSchema(8)),
        undecoded("a-dlq", 3, Undecoded::Pending(7)),
    ]);
    fixture
}

impl Fixture {
    fn read<T>(&self, query: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> T {
        self.index.pool.read_blocking(query).unwrap()
    }

    /// How many are pending that match, and the number of the first one after this number.
    fn pending(&self, filter: &str, after: i64) -> (u64, Option<i64>) {
        let filter = parse(filter, self.json_fields).unwrap();
        let count = self.read(|connection| pending(connection, &filter, after));
        let Reach { up_to, is_pending } = self.read(|connection| reach(connection, &filter, after, i64::MAX));
        (count, is_pending.then(|| up_to + 1))
    }

    fn of_schema(&self, is_pending: bool, schema_id: u32) -> Vec<i64> {
        let letters = self.read(|connection| of_schema(connection, is_pending, schema_id, 0, 100));
        letters.into_iter().map(|letter| letter.position.offset).collect()
    }

    fn schemas(&self, is_pending: bool) -> Vec<u32> {
        let mut schemas = Vec::new();
        while let Some(next) =
            self.read(|connection| next_schema(connection, is_pending, schemas.last().copied()))
        {
            schemas.push(next);
        }
        schemas
    }
}

fn decoded(letters: Vec<Letter>) -> Change {
    Change::Decoded {
        letters,
        gone: Vec::new(),
    }
}

#[test]
fn dead_letters_are_pending_until_they_are_decoded_and_then_found_by_their_fields() {
    let mut fixture = fixture();
    assert_eq!(fixture.pending("", 0), (3, Some(1)));
    assert_eq!(fixture.pending("", 1), (2, Some(2)));
    assert_eq!(
        fixture.pending("topic = b-dlq headers.tenant = t", 0),
        (1, Some(2))
    );
    assert_eq!(fixture.pending("topic = c-dlq", 0), (0, None));
    assert_eq!(fixture.schemas(true), [7, u32::MAX]);
    assert_eq!(fixture.schemas(false), [8]);
    assert_eq!(fixture.of_schema(true, 7), [0, 3]);
    assert_eq!(fixture.of_schema(false, 8), [2]);

    fixture.apply(&[decoded(vec![
        with_fields(letter("a-dlq", 0, 0, &[("tenant", "t")]), Some("o-7"), None),
        // It has no such field.
        with_fields(letter("b-dlq", 0, 1, &[("tenant", "t")]), None, None),
        undecoded("a-dlq", 3, Undecoded::NoSchema(7)),
    ])]);
    assert_eq!(fixture.matching("json./id = o-7"), [0]);
    // Its other terms are still there.
    assert_eq!(fixture.matching("json./id = o-7 AND headers.tenant = t"), [0]);
    assert_eq!(fixture.matching("headers.tenant = t"), [3, 2, 1, 0]);
    assert!(!fixture.read(has_pending));
    assert_eq!(fixture.schemas(false), [7, 8]);
    fixture.apply(&[decoded(vec![with_fields(
        letter("a-dlq", 0, 3, &[("tenant", "t")]),
        Some("o-7"),
        None,
    )])]);
    assert_eq!(fixture.matching("json./id = o-7"), [3, 0]);
    assert_eq!(fixture.schemas(false), [8]);
    // Nothing is counted or numbered again.
    let [(_, a), (_, b)] = &fixture.counts("", [0; 3])[..] else {
        panic!("two topics");
    };
    assert_eq!((a.total, b.total), (3, 1));
    assert_eq!(fixture.index.writer.last_sequence(), 4);
}

#[test]
fn a_watch_goes_on_in_bounded_steps_up_to_a_dead_letter_that_is_pending_and_matches() {
    let mut fixture = Fixture::new();
    let all = query::SCANNED_ROWS + 10;
    let letters = (0..all).map(|offset| undecoded("a-dlq", offset, Undecoded::Pending(7)));
    let last = undecoded("b-dlq", 0, Undecoded::Pending(7));
    fixture.put(letters.chain([last]).collect());
    let reached = |filter: &str, after, up_to| {
        let filter = parse(filter, &[]).unwrap();
        let found = fixture.read(|connection| reach(connection, &filter, after, up_to));
        (found.up_to, found.is_pending)
    };
    assert_eq!(reached("topic = b-dlq", 0, all + 1), (query::SCANNED_ROWS, false));
    assert_eq!(
        reached("topic = b-dlq", query::SCANNED_ROWS, all + 1),
        (all, true)
    );
    // What a watch does not reach now does not hold it back.
    assert_eq!(reached("topic = b-dlq", query::SCANNED_ROWS, all), (all, false));
    assert_eq!(reached("topic = a-dlq", 4, all), (4, true));
    assert_eq!(reached("topic = c-dlq", all, all + 1), (all + 1, false));
}

#[test]
fn only_the_same_dead_letter_gets_decoded_fields() {
    let mut fixture = fixture();
    fixture.apply(&[decoded(vec![
        // Another record at the same position, and one that is not indexed.
        with_fields(letter("a-dlq", 0, 0, &[("tenant", "other")]), Some("o-7"), None),
        with_fields(letter("a-dlq", 0, 9, &[("tenant", "t")]), Some("o-7"), None),
    ])]);
    assert_eq!(fixture.matching("json./id:*"), [0; 0]);
    assert_eq!(fixture.pending("", 0).0, 3);
}

#[test]
fn what_is_removed_is_not_pending_any_more() {
    let mut fixture = fixture();
    let trim = Change::Trim {
        topic: "a-dlq".into(),
        partition: 0,
        low: 1,
    };
    fixture.apply(&[trim]);
    assert_eq!(fixture.pending("", 0), (2, Some(2)));
    // Kafka does not have this record any more, for example because its topic is compacted.
    let gone = Change::Decoded {
        letters: Vec::new(),
        gone: vec![2],
    };
    fixture.apply(&[gone]);
    assert_eq!(fixture.pending("", 0), (1, Some(4)));
    fixture.apply(&[Change::Forget {
        topic: "a-dlq".into(),
    }]);
    assert!(!fixture.read(has_pending));
    assert_eq!(fixture.schemas(false), [0; 0]);
}
