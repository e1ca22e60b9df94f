//! Changes of documents. No change can overlap another one, see [`redeliver_kafka::exclusive`].

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{ExclusiveError, ExclusiveWriter};
use tokio::sync::Mutex;
use tokio::task::JoinError;

use crate::replica::{Replica, State, read_after};
use crate::table::{Document, DocumentProblem};

/// How long a change may take.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Identifies a change, so that it recognises what it has written with an unknown outcome. Different for each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeId(pub u128);

impl ChangeId {
    /// As documents contain it.
    #[must_use]
    pub fn bytes(self) -> Bytes {
        Bytes::copy_from_slice(&self.0.to_be_bytes())
    }
}

/// A change of one document.
pub trait Change: Send + Sync + 'static {
    /// What it changes.
    type State: State;
    /// Why it is refused.
    type Refused: Debug + Send + 'static;

    /// The key of the document.
    fn key(&self, id: ChangeId) -> Key<Self::State>;

    /// The revision that the document must have; 0: there must be none. `None`: it does not matter.
    fn expected_revision(&self) -> Option<u64>;

    /// Decides with the newest state. The document has the expected revision, and can be read completely. Called again if the decision could not be
    /// written.
    ///
    /// # Errors
    /// Why nothing is to be written.
    fn decide(&self, state: &Self::State, id: ChangeId) -> Result<Decision<Self::State>, Self::Refused>;

    /// Logs the written change.
    fn log(&self, document: &DocumentOf<Self>);
}

type Key<S> = <<S as State>::Document as Document>::Key;
type Decided<S> = (Changed<<S as State>::Document>, Vec<Output>);
type DocumentOf<C> = <<C as Change>::State as State>::Document;
type ErrorOf<C> = ChangeError<DocumentOf<C>, <C as Change>::Refused>;

/// What follows from a change.
#[derive(Debug)]
pub enum Decision<S: State> {
    /// It has no effect. The caller gets the document with this key, if there is one.
    Unchanged(Key<S>),
    /// It is written.
    Write {
        /// The document with the next revision and the id of the change.
        document: S::Document,
        /// The keys and values to write, also those of other records. `None` removes a record.
        records: Vec<(String, Option<Bytes>)>,
        /// The entry of the audit log, for the same transaction.
        entry: Output,
    },
}

/// The changed documents.
#[derive(Debug, PartialEq)]
pub struct Changed<D: Document> {
    /// The key of the document.
    pub key: D::Key,
    /// The document that applies; `None` if there is none.
    pub document: Option<Arc<D>>,
    /// Whether the change has written it.
    pub is_written: bool,
}

/// Why a document was not changed.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ChangeError<D: Document, R> {
    /// The document has another revision than the expected one. Nothing was written.
    #[error("has revision {0}")]
    Revised(u64),
    /// This version would lose something of the document. Nothing was written.
    #[error("has a value that this version cannot change: it {0}")]
    Unsupported(DocumentProblem<D>),
    /// The change is refused. Nothing was written.
    #[error("the change is refused")]
    Refused(R),
    /// Kafka did not answer in time, or refuses. Nothing was written.
    #[error("Kafka did not take the change; nothing was written ({0})")]
    Unavailable(String),
    /// The time ended before it was known whether the commit took effect.
    #[error("Kafka did not confirm the change, so it may or may not take effect ({0})")]
    Unconfirmed(String),
}

/// Changes the documents of a topic. Cheap to clone.
#[derive(Clone)]
pub struct Writer<S: State> {
    writer: ExclusiveWriter,
    kafka: KafkaSettings,
    topic: Arc<str>,
    replica: Replica<S>,
    /// One change of this process at a time: several would fence each other.
    turn: Arc<Mutex<()>>,
}

impl<S: State> Writer<S> {
    /// A writer of the topic of a replica. All writers of the topic need the same `transactional_id`.
    #[must_use]
    pub fn new(kafka: &KafkaSettings, transactional_id: &str, topic: &str, replica: Replica<S>) -> Self {
        let topic: Arc<str> = topic.into();
        Self {
            writer: ExclusiveWriter::new(kafka, transactional_id, topic.clone()),
            kafka: kafka.clone(),
            topic,
            replica,
            turn: Arc::default(),
        }
    }

    /// Makes a change. When this returns, the change is durable, and the replica has applied it, unless that takes long. A change without an effect
    /// writes nothing.
    ///
    /// # Errors
    /// [`ChangeError`] says whether something may have been written.
    pub async fn change<C: Change<State = S>>(&self, change: C) -> Result<Changed<S::Document>, ErrorOf<C>> {
        let turn = tokio::time::timeout(CHANGE_TIMEOUT, self.turn.clone().lock_owned()).await;
        let turn = turn.map_err(|_| ChangeError::Unavailable("waiting for other changes".to_owned()))?;
        let this = self.clone();
        // The change goes on when its caller does not wait any longer.
        let changing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            this.write(&change)
        });
        let changed = changing.await.unwrap_or_else(|error| Err(never_ran(error)))?;
        if let Some(document) = &changed.document {
            let is_applied = |state: &S| {
                let known = state.get(&changed.key);
                known.is_some_and(|known| known.revision() >= document.revision())
            };
            self.replica.wait_applied(is_applied).await;
        }
        Ok(changed)
    }

    fn write<C: Change<State = S>>(&self, change: &C) -> Result<Changed<S::Document>, ErrorOf<C>> {
        let id = ChangeId(fastrand::u128(..));
        // The same for all attempts, so that each reads what those before it have written.
        let known = self.replica.known();
        let read = |timeout| {
            let (mut reader, state) = read_after(known.as_ref(), &self.kafka, &self.topic)?;
            let mut tail = Tail::new(change, id, state);
            reader.read_to_end(timeout, |record| tail.apply(&record))?;
            Ok(tail)
        };
        let decide = |tail: Tail<C::State>| tail.decide(change, id, &self.topic);
        let changed = self.writer.write(CHANGE_TIMEOUT, read, decide);
        let changed = changed.map_err(|error| match error {
            ExclusiveError::Refused(error) => error,
            ExclusiveError::Unavailable { .. } => ChangeError::Unavailable(error_chain(&error)),
            ExclusiveError::Unknown(_) => ChangeError::Unconfirmed(error_chain(&error)),
        })?;
        if let Some(document) = changed.document.as_ref().filter(|_| changed.is_written) {
            change.log(document);
        }
        Ok(changed)
    }
}

/// The state with which a change is decided.
struct Tail<S: State> {
    state: S,
    key: Key<S>,
    change_id: Bytes,
    /// What a previous attempt has written, whose outcome was unknown.
    own: Option<Arc<S::Document>>,
}

impl<S: State> Tail<S> {
    fn new<C: Change<State = S>>(change: &C, id: ChangeId, state: S) -> Self {
        Self {
            state,
            key: change.key(id),
            change_id: id.bytes(),
            own: None,
        }
    }

    /// Applies a record that was written since the replica has read the topic.
    fn apply(&mut self, record: &Record) {
        State::apply(&mut self.state, record);
        // Another change may come right after it.
        if let Some(document) = self.state.get(&self.key)
            && *document.change_id() == self.change_id
        {
            self.own = Some(document.clone());
        }
    }

    fn decide<C: Change<State = S>>(
        self,
        change: &C,
        id: ChangeId,
        topic: &Arc<str>,
    ) -> Result<Decided<S>, ErrorOf<C>> {
        let Self { state, key, own, .. } = self;
        let changed = |key, document, is_written| Changed {
            key,
            document,
            is_written,
        };
        if own.is_some() {
            return Ok((changed(key, own, true), Vec::new()));
        }
        if let Some(problem) = state.problem(&key) {
            return Err(ChangeError::Unsupported(problem));
        }
        let revision = state.get(&key).map_or(0, |current| current.revision());
        let expected = change.expected_revision();
        if expected.is_some_and(|expected| expected != revision) {
            return Err(ChangeError::Revised(revision));
        }
        match change.decide(&state, id).map_err(ChangeError::Refused)? {
            Decision::Unchanged(key) => {
                let current = state.get(&key).cloned();
                Ok((changed(key, current, false), Vec::new()))
            }
            Decision::Write {
                document,
                records,
                entry,
            } => {
                let records = records.into_iter().map(|(key, value)| Output {
                    topic: topic.clone(),
                    partition: Some(0),
                    key: Some(key.into()),
                    value,
                    headers: Headers::new(),
                });
                let outputs = records.chain([entry]).collect();
                Ok((changed(key, Some(Arc::new(document)), true), outputs))
            }
        }
    }
}

/// The error of a change that did not come to its end. Once it runs, it ends, unless it panics.
fn never_ran<D: Document, R>(error: JoinError) -> ChangeError<D, R> {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => ChangeError::Unavailable("the process is shutting down".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replica::tests::Notes;
    use crate::table::tests::{Note, broken, newer, record};

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
            let revision = notes.get(&1).map_or(0, |note| note.revision);
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

    fn decide(values: impl IntoIterator<Item = Option<Bytes>>, expected: Option<u64>, most: u64) -> Outcome {
        let change = Increment { expected, most };
        let mut tail = Tail::new(&change, ID, Notes::default());
        for value in values {
            tail.apply(&record("note/1", value));
        }
        let (changed, outputs) = tail.decide(&change, ID, &"notes".into())?;
        assert!(changed.is_written || outputs.is_empty());
        let written = outputs.into_iter();
        let written = written.map(|output| (output.topic.to_string(), output.key, output.value));
        Ok((changed.document, written.collect()))
    }

    fn of(revision: u8) -> Option<Bytes> {
        Some(Note::of(revision).encode())
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
            // Even if the change has no effect.
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
}
