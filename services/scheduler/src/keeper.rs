//! The keeper of one shard's index: takes it over, brings it up to date from the state topic, applies what was
//! committed and answers questions, one after the other. Outages of the index are waited out here, and
//! whatever it lost is brought back from the topic.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::{Clock, Record};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker};
use redeliver_runtime::error_chain::error_chain;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::codec::{self, Memory};
use crate::index::{Applied, Batch, Change, Effect, Index, IndexError, Owner};
use crate::job::JobId;
use crate::shard::{Answer, Ask};
use crate::standing::Standing;

/// What keepers have to say to a lane, which takes it when it looks around.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    list: Mutex<Vec<(AssignmentId, Answer)>>,
    waker: Waker,
}

impl Answers {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            list: Mutex::default(),
            waker,
        }
    }

    fn give(&self, assignment: AssignmentId, answer: Answer) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((assignment, answer));
        self.waker.wake();
    }

    pub(crate) fn take(&self) -> Vec<(AssignmentId, Answer)> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Tombstones of the state topic are kept for at least this long (`delete.retention.ms` is a day by default).
/// A picture older than half of it could have missed one, and bring a forgotten job back.
const OLDEST_PICTURE: Duration = Duration::from_secs(12 * 3600);
/// The most records that are applied at once while the index is brought up to date.
const CHUNK: usize = 2_000;
/// How long the end of the state topic may take to be reached before it is said and tried again.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many jobs are forgotten at once.
const FORGET: usize = 1_000;

/// A keeper.
pub(crate) struct Keeper<I> {
    pub(crate) index: I,
    pub(crate) kafka: KafkaSettings,
    /// The state topic.
    pub(crate) topic: Arc<str>,
    pub(crate) shard: i32,
    pub(crate) assignment: AssignmentId,
    pub(crate) memory: Memory,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) asks: mpsc::Receiver<Ask>,
    pub(crate) answers: Arc<Answers>,
    pub(crate) standing: Arc<Standing>,
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
}

impl<I: Index> Keeper<I> {
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
        self.answers.give(self.assignment, Answer::Ready { end: applied });
        while let Some(ask) = self.asks.recv().await {
            let mut pause = Pause::default();
            let answer = loop {
                match self.serve(&ask, owner, &mut applied).await {
                    Ok(answer) => break answer,
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
                self.standing.is_ready(self.assignment);
            }
            self.answers.give(self.assignment, answer);
        }
    }

    async fn wait(&self, pause: &mut Pause, what: &str, reason: &str) {
        let standing = format!("shard {}: {what}: {reason}", self.shard);
        self.standing.waits(self.assignment, standing);
        pause.wait(self.shard, what, reason).await;
    }

    async fn serve(&self, ask: &Ask, owner: Owner, applied: &mut i64) -> Result<Answer, IndexError> {
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
            Ask::Apply { turn, batch } => {
                redeliver_kafka::fault::point("index");
                self.index.apply(shard, owner, batch, now).await?;
                *applied = batch.to.max(*applied);
                Ok(Answer::Applied(*turn))
            }
            Ask::LookUp(keys) => {
                let (mark, found) = self.index.look_up(shard, keys, now).await?;
                is_current(mark)?;
                Ok(Answer::Found(found))
            }
            Ask::Ahead {
                after,
                until,
                limit,
                bytes,
            } => {
                let ahead = self.index.ahead(shard, *after, *until, *limit, *bytes).await?;
                is_current(ahead.applied)?;
                Ok(Answer::Ahead(ahead))
            }
            Ask::Forgettable => {
                let (mark, ids) = self.index.forgettable(shard, now, FORGET).await?;
                is_current(mark)?;
                Ok(Answer::Forgettable(ids))
            }
        }
    }

    /// Makes the index show all of the state topic, and says where that ends. Tries until it succeeds.
    async fn bring_up_to_date(&self, owner: Owner) -> i64 {
        let mut pause = Pause::default();
        loop {
            match self.take_over(owner).await {
                Ok(end) => {
                    self.standing.is_ready(self.assignment);
                    return end;
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
        let applied = self.index.claim(self.shard, owner).await?;
        let now = self.clock.now();
        let fresh = applied.filter(|applied| now.since(applied.at) < OLDEST_PICTURE);
        let (mut reader, end) = self.open(fresh.map(|applied| applied.offset)).await?;
        let from = match fresh {
            Some(applied) if applied.offset <= end => applied.offset,
            _ => {
                // Nothing, too old, or of another topic of the same name.
                self.index.clear(self.shard, owner).await?;
                (reader, _) = self.open(None).await?;
                0
            }
        };
        let behind = end - from;
        if behind > 0 {
            tracing::info!(
                shard = self.shard,
                from,
                end,
                "bringing the index up to date from the state topic"
            );
        }
        self.replay(reader, owner, from).await
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

    /// Applies everything from the reader's position to the end of the state topic.
    async fn replay(&self, mut reader: TopicReader, owner: Owner, from: i64) -> Result<i64, Trouble> {
        let (sender, mut records) = mpsc::channel::<Vec<Record>>(2);
        let (topic, shard) = (self.topic.clone(), self.shard);
        let reading = blocking(move || {
            let mut chunk = Vec::with_capacity(CHUNK);
            reader.read_to_end(PATIENCE, |record| {
                chunk.push(record);
                if chunk.len() == CHUNK {
                    // When nobody listens any more, what is read is thrown away.
                    let _ = sender.blocking_send(std::mem::take(&mut chunk));
                }
            })?;
            let _ = sender.blocking_send(chunk);
            Ok::<_, ReadError>(reader.position(&topic, shard))
        });
        let applying = async {
            let mut applied = from;
            while let Some(chunk) = records.recv().await {
                let to = chunk.last().map_or(applied, |record| record.position.offset + 1);
                let batch = Batch {
                    from: applied,
                    to,
                    changes: self.changes(&chunk),
                };
                self.index
                    .apply(self.shard, owner, &batch, self.clock.now())
                    .await?;
                applied = to;
            }
            Ok::<_, IndexError>(applied)
        };
        let (position, applied) = tokio::join!(reading, applying);
        let applied = applied?;
        // Behind the last record there may be markers of transactions.
        let end = position?.unwrap_or(applied).max(applied);
        let batch = Batch {
            from: applied,
            to: end,
            changes: Vec::new(),
        };
        self.index
            .apply(self.shard, owner, &batch, self.clock.now())
            .await?;
        Ok(end)
    }

    fn changes(&self, records: &[Record]) -> Vec<Change> {
        records.iter().filter_map(|record| self.change(record)).collect()
    }

    fn change(&self, record: &Record) -> Option<Change> {
        let id = record
            .key
            .as_deref()
            .and_then(|key| std::str::from_utf8(key).ok());
        let Some(id) = id.and_then(|id| id.parse::<JobId>().ok()) else {
            tracing::error!(position = %record.position, "the state topic holds a record whose key is no job's id");
            return None;
        };
        let Some(value) = &record.value else {
            return Some(Change {
                id,
                effect: Effect::Forgotten,
            });
        };
        match codec::decode(id, value) {
            Ok(job) => Some(codec::change(&job, value.clone(), self.memory)),
            Err(error) => {
                tracing::error!(position = %record.position, %error, "the state topic holds a record that is no job");
                None
            }
        }
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

    async fn wait(&mut self, shard: i32, what: &str, reason: &str) {
        let now = tokio::time::Instant::now();
        if self
            .said
            .is_none_or(|said| now.duration_since(said) > Duration::from_secs(30))
        {
            self.said = Some(now);
            tracing::warn!(shard, reason, "{what}; trying again");
        }
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(Duration::from_secs(1));
    }
}
