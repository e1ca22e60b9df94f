//! The indexer of one shard's index: takes it over, brings it up to date from the state topic, applies what was
//! committed and answers questions, one after the other. Outages of the index are waited out here, and
//! whatever it lost is brought back from the topic.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Clock, Record};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker, fault};
use redeliver_runtime::error_chain::error_chain;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::codec::{self, RetentionPolicy};
use crate::index::{Applied, Batch, Claimed, Index, IndexError, LastRecordDigest, Owner};
use crate::readiness::ShardReadiness;
use crate::shard::{IndexRequest, IndexResponse};
use crate::state_topic::{self, NotUnderstood, Unread};

/// What indexers have to say to a lane, which takes it when it looks around.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    list: Mutex<Vec<(AssignmentId, IndexResponse)>>,
    waker: Waker,
}

impl Answers {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            list: Mutex::default(),
            waker,
        }
    }

    fn give(&self, assignment: AssignmentId, answer: IndexResponse) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((assignment, answer));
        self.waker.wake();
    }

    pub(crate) fn take(&self) -> Vec<(AssignmentId, IndexResponse)> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A picture that is older could have missed a tombstone, and bring a job back that was dispatched long ago. It is half
/// of the shortest `delete.retention.ms` with which a scheduler starts.
const OLDEST_PICTURE: Duration = Duration::from_secs(12 * 3600);
/// The most records that are applied at once while the index is brought up to date, and their bytes: one answer of the
/// index is waited for as long as for any other, and Redis refuses what is too long altogether.
const CHUNK: usize = 2_000;
const CHUNK_BYTES: usize = 4 << 20;
/// So many records behind what the index shows are brought into a full one, too: they are what the owner before had
/// accepted when its index was full. What is more than that needs an index with more memory.
const BACKLOG: i64 = 200_000;
/// How long the end of the state topic may take to be reached before it is said and tried again.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at a state topic that is not understood.
const NOT_UNDERSTOOD: Duration = Duration::from_secs(5);
/// How many jobs are forgotten at once.
const FORGET: usize = 1_000;

/// An indexer.
pub(crate) struct ShardIndexer<I> {
    pub(crate) index: I,
    pub(crate) kafka: KafkaSettings,
    /// The state topic.
    pub(crate) topic: Arc<str>,
    pub(crate) shard: i32,
    pub(crate) assignment: AssignmentId,
    pub(crate) memory: RetentionPolicy,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) asks: mpsc::Receiver<IndexRequest>,
    pub(crate) answers: Arc<Answers>,
    pub(crate) readiness: Arc<ShardReadiness>,
    /// Cancelled when the shard is somebody else's.
    pub(crate) gone: CancellationToken,
}

/// Why the index cannot answer yet.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error("reading the state topic")]
    Topic(#[from] ReadError),
    #[error("the last record that the index shows does not stand in the state topic")]
    OfAnotherTopic,
    #[error("{first}{}", others_of(*others))]
    NotUnderstood { first: NotUnderstood, others: usize },
    #[error(
        "records before offset {before} of the state topic were not understood, and have been replaced since"
    )]
    Superseded { before: i64 },
}

fn others_of(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!("; and {count} more"),
    }
}

/// How a pass over the state topic treats its records.
#[derive(Clone, Copy)]
enum Pass {
    /// They are applied. Those before this offset that are not understood are known to be replaced by later ones.
    Apply { superseded_before: i64 },
    /// They are looked at, and the index stays as it is.
    Look,
}

impl<I: Index> ShardIndexer<I> {
    /// Runs until the shard is somebody else's.
    pub(crate) async fn run(mut self) {
        let gone = self.gone.clone();
        tokio::select! {
            () = gone.cancelled() => {}
            () = self.keep() => {}
        }
    }

    async fn keep(&mut self) {
        let owner = Owner(fastrand::u64(..));
        let mut applied = self.bring_up_to_date(owner).await;
        self.answers
            .give(self.assignment, IndexResponse::Ready { end: applied });
        while let Some(ask) = self.asks.recv().await {
            let mut pause = Pause::default();
            let answer = loop {
                match self.serve(&ask, owner, &mut applied).await {
                    Ok(answer) => break answer,
                    Err(IndexError::Full(reason)) => match ask {
                        // Questions are answered meanwhile, and what is to be applied first is for the shard to say.
                        IndexRequest::Apply { turn, batch } => break IndexResponse::Full { turn, batch },
                        _ => self.wait(&mut pause, "the index does not answer", &reason).await,
                    },
                    Err(IndexError::Unavailable(reason)) => {
                        self.wait(&mut pause, "the index does not answer", &reason).await;
                    }
                    Err(error @ (IndexError::Gap { .. } | IndexError::Fenced)) => {
                        tracing::warn!(
                            shard = self.shard, %error,
                            "the index is not what it was; bringing it up to date from the state topic"
                        );
                        applied = self.bring_up_to_date(owner).await;
                    }
                }
            };
            if pause.has_waited() {
                self.readiness.is_ready(self.assignment);
            }
            self.answers.give(self.assignment, answer);
        }
    }

    async fn wait(&self, pause: &mut Pause, what: &str, reason: &str) {
        let readiness = format!("shard {}: {what}: {reason}", self.shard);
        self.readiness.waits(self.assignment, readiness);
        pause.wait(self.shard, what, reason).await;
    }

    async fn serve(
        &self,
        ask: &IndexRequest,
        owner: Owner,
        applied: &mut i64,
    ) -> Result<IndexResponse, IndexError> {
        let now = self.clock.now();
        let shard = self.shard;
        let expected = *applied;
        let is_current = |found: Option<Applied>| match found {
            Some(found) if found.offset >= expected => Ok(()),
            found => Err(IndexError::Gap {
                found: found.map(|found| found.offset),
                expected,
            }),
        };
        match ask {
            IndexRequest::Apply { turn, batch } => {
                fault::point("index");
                self.index.apply(shard, owner, batch, now).await?;
                *applied = batch.to.max(*applied);
                Ok(IndexResponse::Applied {
                    turn: *turn,
                    by_force: batch.force,
                })
            }
            IndexRequest::LookUp(keys) => {
                let (mark, found) = self.index.look_up(shard, keys, now).await?;
                is_current(mark)?;
                Ok(IndexResponse::Found(found))
            }
            IndexRequest::DueScan {
                after,
                until,
                limit,
                bytes,
            } => {
                let ahead = self.index.ahead(shard, *after, *until, *limit, *bytes).await?;
                is_current(ahead.applied)?;
                Ok(IndexResponse::DueScan(ahead))
            }
            IndexRequest::Sweep {
                after,
                until,
                limit,
                bytes,
            } => {
                let ahead = self
                    .index
                    .ahead(shard, Some(*after), *until, *limit, *bytes)
                    .await?;
                is_current(ahead.applied)?;
                Ok(IndexResponse::Swept(ahead))
            }
            IndexRequest::Forgettable => {
                let (mark, ids) = self.index.forgettable(shard, now, FORGET).await?;
                is_current(mark)?;
                Ok(IndexResponse::Forgettable(ids))
            }
        }
    }

    /// Makes the index show all of the state topic, and says where that ends. Tries until it succeeds. While the topic
    /// holds what is not understood, the shard acts no longer.
    async fn bring_up_to_date(&self, owner: Owner) -> i64 {
        let mut pause = Pause::default();
        let mut is_held_up = false;
        loop {
            match self.take_over(owner).await {
                Ok(end) => {
                    self.readiness.is_ready(self.assignment);
                    if is_held_up {
                        tracing::info!(shard = self.shard, "the state topic is understood again");
                        self.answers.give(self.assignment, IndexResponse::Ready { end });
                    }
                    return end;
                }
                Err(trouble @ Trouble::NotUnderstood { .. }) => {
                    if !is_held_up {
                        self.answers.give(self.assignment, IndexResponse::HeldUp);
                    }
                    is_held_up = true;
                    let readiness = format!("shard {}: {trouble}", self.shard);
                    self.readiness.waits(self.assignment, readiness);
                    if pause.is_to_be_said() {
                        tracing::error!(shard = self.shard, reason = %trouble, "the state topic is not understood; the shard stands still");
                    }
                    tokio::time::sleep(NOT_UNDERSTOOD).await;
                }
                Err(trouble) => {
                    let reason = error_chain(&trouble);
                    self.wait(&mut pause, "the index is not up to date yet", &reason)
                        .await;
                }
            }
        }
    }

    async fn take_over(&self, owner: Owner) -> Result<i64, Trouble> {
        let claimed = self.index.claim(self.shard, owner).await?;
        fault::point("claim");
        let now = self.clock.now();
        let is_recent = |claimed: &Claimed| now.since(claimed.applied.at) < OLDEST_PICTURE;
        let mut superseded_before = 0;
        match claimed {
            Some(Claimed { format, .. }) if format > codec::FORMAT => {
                // It is the newer scheduler's, as long as there is something in the topic that only that one understands.
                let opened = self.open(None).await?;
                match self.replay(opened, owner, None, Pass::Look).await {
                    Err(Trouble::Superseded { before }) => superseded_before = before,
                    looked => drop(looked?),
                }
            }
            Some(claimed) if is_recent(&claimed) => match self.go_on(owner, claimed).await {
                Err(trouble @ Trouble::OfAnotherTopic) => tracing::warn!(
                    shard = self.shard, reason = %trouble,
                    "the index is of another topic of this name, or cannot be told from one; building it anew"
                ),
                // What the index shows may be of a kind that was known to whoever wrote it.
                Err(Trouble::Superseded { before }) => superseded_before = before,
                done => return done,
            },
            _ => {}
        }
        loop {
            self.index.clear(self.shard, owner).await?;
            fault::point("clear");
            let opened = self.open(None).await?;
            self.say_how_far(0, opened.1);
            let pass = Pass::Apply { superseded_before };
            match self.replay(opened, owner, None, pass).await {
                Err(Trouble::Superseded { before }) => superseded_before = before,
                done => return done,
            }
        }
    }

    /// Goes on from what the index shows, if that is of this topic: brokers may have been exchanged, or the topic made
    /// again, under the same names.
    async fn go_on(&self, owner: Owner, claimed: Claimed) -> Result<i64, Trouble> {
        let from = claimed.applied.offset;
        let begin = match claimed.seal {
            Some(seal) => seal.offset,
            // Of an empty topic.
            None if from == 0 => 0,
            None => return Err(Trouble::OfAnotherTopic),
        };
        let (reader, end) = self.open(Some(begin)).await?;
        if from > end {
            return Err(Trouble::OfAnotherTopic);
        }
        self.say_how_far(from, end);
        let superseded_before = 0;
        self.replay(
            (reader, end),
            owner,
            Some(claimed),
            Pass::Apply { superseded_before },
        )
        .await
    }

    fn say_how_far(&self, from: i64, end: i64) {
        if from < end {
            tracing::info!(
                shard = self.shard,
                from,
                end,
                "bringing the index up to date from the state topic"
            );
        }
    }

    /// A reader of the state topic, and where that ends.
    async fn open(&self, from: Option<i64>) -> Result<(TopicReader, i64), ReadError> {
        let (kafka, topic, shard) = (self.kafka.clone(), self.topic.clone(), self.shard);
        blocking(move || {
            let reader = TopicReader::of_partition(&kafka, &topic, shard, from)?;
            let end = reader.high_watermark(&topic, shard)?;
            Ok((reader, end))
        })
        .await
    }

    /// Applies everything from the reader's position to the end of the state topic. What is known before begins with
    /// the record that is its seal. Of what is behind a record that is not understood nothing is applied: it is only
    /// looked for what has taken that record's place.
    async fn replay(
        &self,
        (mut reader, end): (TopicReader, i64),
        owner: Owner,
        known: Option<Claimed>,
        pass: Pass,
    ) -> Result<i64, Trouble> {
        let (sender, mut chunks) = mpsc::channel::<Vec<Record>>(2);
        let (topic, shard) = (self.topic.clone(), self.shard);
        let reading = async move {
            let position = blocking(move || {
                let mut chunk = Chunk::default();
                reader.read_while(PATIENCE, |record| {
                    let sent = chunk.push(record).map(|full| sender.blocking_send(full));
                    match sent {
                        // Nobody listens any more: applying has failed.
                        Some(Err(_)) => ControlFlow::Break(()),
                        Some(Ok(())) | None => ControlFlow::Continue(()),
                    }
                })?;
                let _ = sender.blocking_send(chunk.records);
                Ok(reader.position(&topic, shard))
            });
            position.await.map_err(Trouble::from)
        };
        // It owns the receiver: when it fails, whoever reads is told by the next chunk, and does not wait for ever for
        // somebody to take it.
        let applying = async move {
            let mut applied = known.map_or(0, |known| known.applied.offset);
            let force = known.is_some() && end - applied <= BACKLOG;
            let mut seal = known.and_then(|known| known.seal);
            let mut unread = Unread::default();
            while let Some(mut chunk) = chunks.recv().await {
                if let Some(seal) = seal.take() {
                    if chunk.first().map(LastRecordDigest::of_record) != Some(seal) {
                        return Err(Trouble::OfAnotherTopic);
                    }
                    chunk.retain(|record| record.position.offset >= applied);
                }
                if let Some(mut batch) = self.read(&chunk, applied, pass, &mut unread) {
                    batch.force = force;
                    self.apply(owner, &batch).await?;
                    applied = batch.to;
                }
            }
            Ok((applied, force, unread))
        };
        let (position, (applied, force, unread)) = tokio::try_join!(reading, applying)?;
        // Behind the last record there may be markers of transactions.
        let end = position.unwrap_or(applied).max(applied);
        if let Some((first, others)) = unread.first() {
            let first = first.clone();
            return Err(Trouble::NotUnderstood { first, others });
        }
        if unread.has_met() {
            return Err(Trouble::Superseded { before: end });
        }
        if matches!(pass, Pass::Look) {
            return Ok(end);
        }
        let batch = Batch {
            from: applied,
            to: end,
            force,
            ..Batch::default()
        };
        self.apply(owner, &batch).await?;
        Ok(end)
    }

    async fn apply(&self, owner: Owner, batch: &Batch) -> Result<(), IndexError> {
        fault::point("replay");
        self.index.apply(self.shard, owner, batch, self.clock.now()).await
    }

    /// What is to be applied of these records: all of them, or those before the first one that is not understood.
    fn read(&self, records: &[Record], from: i64, pass: Pass, unread: &mut Unread) -> Option<Batch> {
        let mut changes = Vec::new();
        let mut last = None;
        for record in records {
            let found = state_topic::read(record, self.memory);
            match (pass, found) {
                (Pass::Apply { superseded_before }, Err(_)) if record.position.offset < superseded_before => {
                }
                (Pass::Apply { .. }, Ok(change)) if !unread.has_met() => {
                    changes.extend(change);
                    last = Some(record);
                }
                (_, found) => unread.note(record, found),
            }
        }
        let last = last?;
        Some(Batch {
            from,
            to: last.position.offset + 1,
            changes,
            seal: Some(LastRecordDigest::of_record(last)),
            force: false,
        })
    }
}

/// Records that are applied at once.
#[derive(Default)]
struct Chunk {
    records: Vec<Record>,
    bytes: usize,
}

impl Chunk {
    /// Takes a record; gives all of them when they are enough.
    fn push(&mut self, record: Record) -> Option<Vec<Record>> {
        self.bytes += record.value.as_ref().map_or(0, Bytes::len);
        self.records.push(record);
        if self.records.len() < CHUNK && self.bytes < CHUNK_BYTES {
            return None;
        }
        self.bytes = 0;
        Some(std::mem::take(&mut self.records))
    }
}

/// Runs what blocks on a thread for it.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Growing pauses; what is waited for is said once, and again every half minute.
struct Pause {
    next: Duration,
    said: Option<tokio::time::Instant>,
}

impl Default for Pause {
    fn default() -> Self {
        Self {
            next: Duration::from_millis(20),
            said: None,
        }
    }
}

impl Pause {
    fn has_waited(&self) -> bool {
        self.said.is_some()
    }

    /// Whether it is time to say what is waited for.
    fn is_to_be_said(&mut self) -> bool {
        let now = tokio::time::Instant::now();
        let is_new = |said| now.duration_since(said) > Duration::from_secs(30);
        if self.said.is_some_and(|said| !is_new(said)) {
            return false;
        }
        self.said = Some(now);
        true
    }

    async fn wait(&mut self, shard: i32, what: &str, reason: &str) {
        if self.is_to_be_said() {
            tracing::warn!(shard, reason, "{what}; trying again");
        }
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(Duration::from_secs(1));
    }
}
