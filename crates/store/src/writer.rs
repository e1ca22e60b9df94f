//! Changes of documents. No change can overlap another one, see [`redeliver_kafka::exclusive`].
//!
//! A process makes all waiting changes in one transaction, deciding one after the other: a transaction takes about the same time for any number of
//! changes, and those of several processes fence each other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Headers, Output, Position, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{ExclusiveError, ExclusiveWriter};
use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::task::JoinError;

use crate::replica::{Replica, State, read_after};
use crate::table::{Document, DocumentProblem};

/// How long a transaction may take, with everything before it.
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
type DocumentOf<C> = <<C as Change>::State as State>::Document;
type ErrorOf<C> = ChangeError<DocumentOf<C>, <C as Change>::Refused>;
type ResultOf<C> = Result<Changed<DocumentOf<C>>, ErrorOf<C>>;

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
pub struct Writer<C: Change>(Arc<Shared<C>>);

struct Shared<C: Change> {
    writer: ExclusiveWriter,
    kafka: KafkaSettings,
    topic: Arc<str>,
    replica: Replica<C::State>,
    waiting: Mutex<Vec<Waiting<C>>>,
    /// One transaction of this process at a time: several would fence each other.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A change whose caller waits for its result.
struct Waiting<C: Change> {
    change: C,
    id: ChangeId,
    result: oneshot::Sender<ResultOf<C>>,
}

impl<C: Change> Clone for Writer<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: Change> Writer<C> {
    /// A writer of the topic of a replica. All writers of the topic need the same `transactional_id`.
    #[must_use]
    pub fn new(
        kafka: &KafkaSettings,
        transactional_id: &str,
        topic: &str,
        replica: Replica<C::State>,
    ) -> Self {
        let topic: Arc<str> = topic.into();
        Self(Arc::new(Shared {
            writer: ExclusiveWriter::new(kafka, transactional_id, topic.clone()),
            kafka: kafka.clone(),
            topic,
            replica,
            waiting: Mutex::default(),
            turn: Arc::default(),
        }))
    }

    /// Makes a change. When this returns, the change is durable, and the replica has applied it, unless that takes long. A change without an effect
    /// writes nothing.
    ///
    /// # Errors
    /// [`ChangeError`] says whether something may have been written. If Kafka refuses the records of a change, those that are made with it fail, too.
    pub async fn change(&self, change: C) -> Result<Changed<DocumentOf<C>>, ErrorOf<C>> {
        let (result, mut written) = oneshot::channel();
        let id = ChangeId(fastrand::u128(..));
        self.0.waiting().push(Waiting { change, id, result });
        let written = tokio::select! {
            biased;
            written = &mut written => written,
            turn = tokio::time::timeout(CHANGE_TIMEOUT, self.0.turn.clone().lock_owned()) => {
                // Those who had the turn before may have made this change.
                match (written.try_recv(), turn) {
                    (Ok(written), _) => Ok(written),
                    (Err(TryRecvError::Empty), Ok(turn)) => {
                        let this = self.0.clone();
                        // The change goes on when its caller does not wait any longer.
                        let writing = tokio::task::spawn_blocking(move || {
                            let _turn = turn;
                            this.write_waiting();
                        });
                        writing.await.map_err(never_ran)?;
                        written.await
                    }
                    (Err(TryRecvError::Empty), Err(_)) if self.0.withdraw(id) => {
                        return Err(ChangeError::Unavailable("waiting for other changes".to_owned()));
                    }
                    (Err(_), _) => written.await,
                }
            }
        };
        let panicked = "the thread that made it with others has panicked";
        let changed = written.unwrap_or_else(|_| Err(ChangeError::Unconfirmed(panicked.to_owned())))?;
        if let Some(document) = &changed.document {
            let is_applied = |state: &C::State| {
                let known = state.table().get(&changed.key);
                known.is_some_and(|known| known.revision() >= document.revision())
            };
            self.0.replica.wait_applied(is_applied).await;
        }
        Ok(changed)
    }
}

impl<C: Change> Shared<C> {
    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting<C>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a change still waits. Then it is not made any more.
    fn withdraw(&self, id: ChangeId) -> bool {
        let mut waiting = self.waiting();
        let before = waiting.len();
        waiting.retain(|waiting| waiting.id != id);
        waiting.len() < before
    }

    /// Makes the changes that wait now, and tells their callers the results.
    fn write_waiting(&self) {
        let mut batch = std::mem::take(&mut *self.waiting());
        // Their callers have given up before anything was written.
        batch.retain(|waiting| !waiting.result.is_closed());
        if batch.is_empty() {
            return;
        }
        // The same for all attempts, so that each reads what those before it have written.
        let known = self.replica.known();
        let read = |timeout| {
            let (mut reader, state) = read_after(known.as_ref(), &self.kafka, &self.topic)?;
            let mut tail = Tail::new(state, batch.iter().map(|waiting| waiting.id));
            reader.read_to_end(timeout, |record| tail.apply(&record))?;
            Ok(tail)
        };
        let fates = RefCell::new(Vec::new());
        let decide = |mut tail: Tail<C::State>| {
            let changes = batch.iter().map(|waiting| (&waiting.change, waiting.id));
            let mut outputs = Vec::new();
            let (results, decided) = tail.decide_all(changes, &self.topic, &mut outputs);
            fates.replace(decided);
            (results, outputs)
        };
        match self.writer.write(CHANGE_TIMEOUT, read, decide) {
            Ok(results) => {
                for (Waiting { change, result, .. }, written) in batch.into_iter().zip(results) {
                    if let Ok(Changed {
                        document: Some(document),
                        is_written: true,
                        ..
                    }) = &written
                    {
                        change.log(document);
                    }
                    // Fails if the caller does not wait any longer.
                    let _ = result.send(written);
                }
            }
            Err(error) => {
                // Without an attempt that has decided, nothing was written.
                let fates = fates.into_inner().into_iter();
                let fates = fates.chain(std::iter::repeat_with(|| Fate::NothingWritten));
                for (Waiting { change, id, result }, fate) in batch.into_iter().zip(fates) {
                    let _ = result.send(failed(&change, id, fate, &error));
                }
            }
        }
    }
}

/// What the last attempt that has decided knows of a change. The changes of a transaction that fails do not all fail in the same way.
enum Fate<D> {
    /// A previous attempt has written it.
    Durable(Arc<D>),
    /// The transaction of the attempt contains it.
    InTransaction,
    /// It is refused, or has no effect.
    NothingWritten,
}

/// The result of a change whose transaction has failed.
fn failed<C: Change>(
    change: &C,
    id: ChangeId,
    fate: Fate<DocumentOf<C>>,
    error: &ExclusiveError,
) -> ResultOf<C> {
    match (fate, error) {
        (Fate::Durable(document), _) => {
            change.log(&document);
            Ok(Changed {
                key: change.key(id),
                document: Some(document),
                is_written: true,
            })
        }
        (Fate::InTransaction, ExclusiveError::Unknown(_)) => {
            Err(ChangeError::Unconfirmed(error_chain(error)))
        }
        (Fate::InTransaction | Fate::NothingWritten, _) => Err(ChangeError::Unavailable(error_chain(error))),
    }
}

/// The state with which changes are decided, one after the other.
struct Tail<S: State> {
    state: S,
    /// What a previous attempt has written, whose outcome was unknown, by the id of the change.
    own: HashMap<Bytes, Option<Arc<S::Document>>>,
}

impl<S: State> Tail<S> {
    fn new(state: S, ids: impl Iterator<Item = ChangeId>) -> Self {
        Self {
            state,
            own: ids.map(|id| (id.bytes(), None)).collect(),
        }
    }

    /// Applies a record that was written since the replica has read the topic.
    fn apply(&mut self, record: &Record) {
        State::apply(&mut self.state, record);
        // Another change may come right after it.
        if let Some(document) = S::Document::key_of(record).and_then(|key| self.state.table().get(&key))
            && let Some(own) = self.own.get_mut(document.change_id())
        {
            *own = Some(document.clone());
        }
    }

    /// What a previous attempt has written for a change.
    fn own_document(&self, id: ChangeId) -> Option<Arc<S::Document>> {
        self.own.get(&id.bytes()).cloned().flatten()
    }

    /// Decides about changes one after the other, and adds what they write.
    fn decide_all<'c, C: Change<State = S>>(
        &mut self,
        changes: impl Iterator<Item = (&'c C, ChangeId)>,
        topic: &Arc<str>,
        outputs: &mut Vec<Output>,
    ) -> (Vec<ResultOf<C>>, Vec<Fate<S::Document>>) {
        let decided = changes.map(|(change, id)| {
            let (own, before) = (self.own_document(id), outputs.len());
            let result = self.decide(change, id, topic, outputs);
            let fate = match own {
                Some(own) => Fate::Durable(own),
                None if outputs.len() > before => Fate::InTransaction,
                None => Fate::NothingWritten,
            };
            (result, fate)
        });
        decided.unzip()
    }

    /// Decides about a change with what those before it write, and adds what it writes.
    fn decide<C: Change<State = S>>(
        &mut self,
        change: &C,
        id: ChangeId,
        topic: &Arc<str>,
        outputs: &mut Vec<Output>,
    ) -> ResultOf<C> {
        let key = change.key(id);
        if let Some(own) = self.own_document(id) {
            return Ok(Changed {
                key,
                document: Some(own),
                is_written: true,
            });
        }
        let state = &mut self.state;
        if let Some(problem) = state.table().problem(&key) {
            return Err(ChangeError::Unsupported(problem));
        }
        let revision = state.table().get(&key).map_or(0, |current| current.revision());
        let expected = change.expected_revision();
        if expected.is_some_and(|expected| expected != revision) {
            return Err(ChangeError::Revised(revision));
        }
        match change.decide(state, id).map_err(ChangeError::Refused)? {
            Decision::Unchanged(key) => Ok(Changed {
                document: state.table().get(&key).cloned(),
                key,
                is_written: false,
            }),
            Decision::Write {
                document,
                records,
                entry,
            } => {
                for (key, value) in records {
                    let output = Output {
                        topic: topic.clone(),
                        partition: Some(0),
                        key: Some(key.into()),
                        value,
                        headers: Headers::new(),
                    };
                    State::apply(state, &unwritten(&output));
                    outputs.push(output);
                }
                outputs.push(entry);
                Ok(Changed {
                    key,
                    document: Some(Arc::new(document)),
                    is_written: true,
                })
            }
        }
    }
}

/// A record as the next change of the same transaction sees it. It has no offset yet.
fn unwritten(output: &Output) -> Record {
    Record {
        position: Position {
            topic: output.topic.clone(),
            partition: 0,
            offset: -1,
        },
        timestamp: None,
        key: output.key.clone(),
        value: output.value.clone(),
        headers: Headers::new(),
        unreadable_headers: 0,
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
mod tests;
