use redeliver_testkit::record;

use super::*;
use crate::replica::tests::Notes;
use crate::table::tests::{Note, broken, newer};

const ID: ChangeId = ChangeId(7);

/// Writes the next revision of a note, unless it has this one.
struct Increment {
    expected: Option<u64>,
    most: u64,
}

impl Change for Increment {
    type State = Notes;
    type Refused = &'static str;

    fn key(&self, _id: ChangeId) -> u8 {
        1
    }

    fn expected_revision(&self) -> Option<u64> {
        self.expected
    }

    fn decide(&self, notes: &Notes, id: ChangeId) -> Result<Decision<Notes>, &'static str> {
        let revision = notes.table().get(&1).map_or(0, |note| note.revision);
        match self.most.checked_sub(revision.into()) {
            None => return Err("too many"),
            Some(0) => return Ok(Decision::Unchanged(1)),
            Some(_) => {}
        }
        let document = Note {
            revision: revision + 1,
            change_id: id.bytes(),
        };
        Ok(Decision::Write {
            records: vec![
                ("note/1".to_owned(), Some(document.encode())),
                ("note/2".to_owned(), None),
            ],
            document,
            entry: Output {
                topic: "audit".into(),
                partition: None,
                key: None,
                value: None,
                headers: Headers::new(),
            },
        })
    }

    fn log(&self, _note: &Note) {}
}

/// A topic, a key and a value.
type Written = (String, Option<Bytes>, Option<Bytes>);
type Outcome = Result<(Option<Arc<Note>>, Vec<Written>), ChangeError<Note, &'static str>>;

fn tail(values: impl IntoIterator<Item = Option<Bytes>>, ids: &[ChangeId]) -> Tail<Notes> {
    let mut tail = Tail::new(Notes::default(), ids.iter().copied());
    for value in values {
        tail.apply(&record("note/1", value));
    }
    tail
}

fn decide(values: impl IntoIterator<Item = Option<Bytes>>, expected: Option<u64>, most: u64) -> Outcome {
    let (change, mut outputs) = (Increment { expected, most }, Vec::new());
    let changed = tail(values, &[ID]).decide(&change, ID, &"notes".into(), &mut outputs)?;
    assert!(changed.is_written || outputs.is_empty());
    let written = outputs.into_iter();
    let written = written.map(|output| (output.topic.to_string(), output.key, output.value));
    Ok((changed.document, written.collect()))
}

fn of(revision: u8) -> Option<Bytes> {
    Some(Note::of(revision).encode())
}

fn written(revision: u8, id: ChangeId) -> Option<Bytes> {
    let note = Note {
        revision,
        change_id: id.bytes(),
    };
    Some(note.encode())
}

fn own(revision: u8) -> Note {
    Note {
        revision,
        change_id: ID.bytes(),
    }
}

#[test]
fn change_is_written_with_its_entry() {
    let written =
        |topic: &str, key: Option<&'static str>, value| (topic.to_owned(), key.map(Bytes::from), value);
    let outputs = vec![
        written("notes", Some("note/1"), Some(own(5).encode())),
        written("notes", Some("note/2"), None),
        written("audit", None, None),
    ];
    assert_eq!(decide([of(4)], None, 9), Ok((Some(own(5).into()), outputs)));
    let unchanged = Ok((Some(Note::of(4).into()), vec![]));
    assert_eq!(decide([of(4)], None, 4), unchanged);
    assert_eq!(decide([], None, 0), Ok((None, vec![])));
    assert_eq!(decide([of(4)], None, 3), Err(ChangeError::Refused("too many")));
}

#[test]
fn unexpected_revision_is_refused() {
    for (values, expected, revision) in [
        (vec![of(4)], 4, None),
        (vec![of(4)], 3, Some(4)),
        (vec![], 0, None),
        (vec![], 1, Some(0)),
    ] {
        // Also if nothing would change.
        for most in [4, 9] {
            let decided = decide(values.clone(), Some(expected), most);
            assert_eq!(decided.err(), revision.map(ChangeError::Revised), "{expected}");
        }
    }
}

#[test]
fn change_with_unknown_outcome_is_recognised() {
    // Another change came right after it.
    let values = [Some(own(4).encode()), of(5)];
    assert_eq!(decide(values, Some(3), 9), Ok((Some(own(4).into()), vec![])));
}

#[test]
fn changes_of_failed_transaction_differ() {
    let ids = [1, 2, 3].map(ChangeId);
    let increment = |most| Increment { expected: None, most };
    let changes = [increment(9), increment(9), increment(5)];
    // A previous attempt has written the first one, and the limit of the last one is exceeded then.
    let before = [of(4), written(5, ids[0])];
    for (error, second) in [
        (ExclusiveError::Unknown("timed out".into()), "Unconfirmed"),
        (
            ExclusiveError::Unavailable {
                step: "reading",
                source: "timed out".into(),
            },
            "Unavailable",
        ),
    ] {
        let with_ids = changes.iter().zip(ids);
        let (_, fates) = tail(before.clone(), &ids).decide_all(with_ids, &"notes".into(), &mut Vec::new());
        let results = changes.iter().zip(ids).zip(fates).map(|((change, id), fate)| {
            match failed(change, id, fate, &error) {
                Ok(changed) => format!("revision {}", changed.document.unwrap().revision),
                Err(ChangeError::Unconfirmed(_)) => "Unconfirmed".to_owned(),
                Err(ChangeError::Unavailable(_)) => "Unavailable".to_owned(),
                Err(other) => format!("{other:?}"),
            }
        });
        assert_eq!(results.collect::<Vec<_>>(), ["revision 5", second, "Unavailable"]);
    }
}

#[test]
fn changes_see_those_before_them() {
    let ids = [1, 2, 3, 4].map(ChangeId);
    // Whether a previous attempt has written them or not.
    for before in [vec![of(4)], vec![of(4), written(5, ids[0]), written(6, ids[2])]] {
        let (mut tail, mut outputs) = (tail(before.clone(), &ids), Vec::new());
        let revisions = [(ids[0], 4), (ids[1], 4), (ids[2], 5), (ids[3], 4)].map(|(id, expected)| {
            let change = Increment {
                expected: Some(expected),
                most: 9,
            };
            let changed = tail.decide(&change, id, &"notes".into(), &mut outputs)?;
            Ok(changed.document.unwrap().revision)
        });
        let last = if before.len() == 1 { 5 } else { 6 };
        let expected = [
            Ok(5),
            Err(ChangeError::Revised(last)),
            Ok(6),
            Err(ChangeError::Revised(6)),
        ];
        assert_eq!(revisions, expected);
        let values: Vec<_> = outputs
            .into_iter()
            .filter(|output| output.key == Some("note/1".into()))
            .map(|output| output.value)
            .collect();
        let unwritten = [written(5, ids[0]), written(6, ids[2])];
        assert_eq!(values, if before.len() == 1 { &unwritten[..] } else { &[] });
    }
}

#[test]
fn unsupported_documents_are_not_changed() {
    for (value, problem) in [
        (broken(), DocumentProblem::Unreadable(crate::table::tests::Empty)),
        (Some(newer().encode()), DocumentProblem::Newer),
    ] {
        let refused = decide([value], Some(3), 9);
        assert_eq!(refused, Err(ChangeError::Unsupported(problem)));
    }
}

#[tokio::test]
async fn change_cancelled_by_shutdown_wrote_nothing() {
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(std::future::pending::<()>());
    tasks.abort_all();
    let error = never_ran::<Note, ()>(tasks.join_next().await.unwrap().unwrap_err());
    assert!(matches!(error, ChangeError::Unavailable(_)), "{error:?}");
}
