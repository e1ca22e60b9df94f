//! The indexer of one shard. It claims the shard's part of the index, brings it up to date from the state topic, then
//! applies committed changes and serves queries, one request at a time. It waits while the index is unavailable, and
//! restores from the topic what the index has lost.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_core::{Clock, HumanDuration, Record};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker, fault, topology};
use redeliver_runtime::error_chain::error_chain;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::checkpoint_age::{ALWAYS_RECENT, is_at_end, max_age, renewal_delay};
use crate::codec::RetentionPolicy;
use crate::index::{self, Batch, Checkpoint, Index, IndexError, LastRecordDigest, Owner};
use crate::index_messages::{IndexRequest, IndexResponse};
use crate::limits::{ProcessLimits, TakeOver, TakeOverPermit};
use crate::lookups;
use crate::metrics::GaugeShare;
use crate::readiness::ShardReadiness;
use crate::state_topic::{self, UnreadRecords, UnsupportedRecord};

/// Responses of the indexers of a lane, which the lane drains once per round.
#[derive(Debug, Default)]
pub(crate) struct IndexResponses {
    list: Mutex<Vec<(AssignmentId, IndexResponse)>>,
    waker: Waker,
}

impl IndexResponses {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            list: Mutex::default(),
            waker,
        }
    }

    pub(crate) fn push(&self, assignment: AssignmentId, response: IndexResponse) {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((assignment, response));
        self.waker.wake();
    }

    pub(crate) fn drain(&self) -> Vec<(AssignmentId, IndexResponse)> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The maximum number and size of records per batch of a replay. Each batch must be applied within the timeout of one
/// command, and Redis limits the number of arguments.
const MAX_CHUNK: usize = 2_000;
const MAX_CHUNK_BYTES: usize = 4 << 20;
/// How much of the state topic is read ahead of what is applied. It keeps Redis busy, and limits the memory of a reader.
const READ_AHEAD_KIBIBYTES: u32 = 16 << 10;
/// A backlog of at most this many records is forced into a full index: the previous owner had accepted these records but
/// could not apply them, because its index was full. A longer backlog needs an index with more memory.
const MAX_FORCED_BACKLOG: i64 = 200_000;
/// The maximum time to read the state topic to its end, before the attempt fails and is repeated.
const READ_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum time to request the settings of the state topic.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two attempts to read a state topic with unsupported records.
const UNSUPPORTED_RETRY: Duration = Duration::from_secs(5);
/// The delays between two attempts while the index is unavailable.
const MIN_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(1);
/// The time between two counts of the idempotency keys.
const KEY_COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of jobs to forget per request.
const MAX_FORGETTABLE: usize = 1_000;

/// The indexer of one shard.
pub(crate) struct ShardIndexer<I> {
    pub(crate) index: I,
    pub(crate) kafka: KafkaSettings,
    pub(crate) topic: Arc<str>,
    pub(crate) shard: i32,
    pub(crate) assignment: AssignmentId,
    pub(crate) retention: RetentionPolicy,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) requests: mpsc::Receiver<IndexRequest>,
    pub(crate) responses: Arc<IndexResponses>,
    pub(crate) readiness: Arc<ShardReadiness>,
    pub(crate) limits: Arc<ProcessLimits>,
    /// The idempotency keys of this shard.
    pub(crate) known_keys: GaugeShare,
    /// Cancelled when the lane no longer owns the shard.
    pub(crate) cancelled: CancellationToken,
}

/// Why the index is not up to date.
#[derive(Debug, thiserror::Error)]
enum CatchUpError {
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error("reading the state topic")]
    Topic(#[from] ReadError),
    #[error("the last record that the index contains is not in the state topic")]
    TopicMismatch,
    #[error("the index has not been up to date for {}", HumanDuration::from_secs(age.as_secs()))]
    Outdated { age: Duration },
    #[error("{first}{}", and_more(*others))]
    UnsupportedRecords { first: UnsupportedRecord, others: usize },
    #[error(
        "records before offset {before} of the state topic are unsupported, but later records have replaced them"
    )]
    Superseded { before: i64 },
}

fn and_more(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!("; and {count} more"),
    }
}

/// What of the index's content is used when it is brought up to date.
#[derive(Clone, Copy)]
enum Trust {
    /// Everything up to the checkpoint.
    Checkpoint,
    /// Nothing, because it is damaged. It is rebuilt.
    Nothing,
}

impl<I: Index> ShardIndexer<I> {
    /// Runs until the lane no longer owns the shard.
    pub(crate) async fn run(mut self) {
        let cancelled = self.cancelled.clone();
        tokio::select! {
            () = cancelled.cancelled() => {}
            () = self.serve_requests() => {}
        }
    }

    async fn serve_requests(&mut self) {
        let owner = Owner(fastrand::u64(..));
        let applied = self.bring_up_to_date(owner, Trust::Checkpoint).await;
        self.responses
            .push(self.assignment, IndexResponse::Ready { end: applied });
        self.serve_requests_from(owner, applied).await;
    }

    /// Serves requests with an index that is up to date at `applied`.
    async fn serve_requests_from(&mut self, owner: Owner, mut applied: i64) {
        let mut next_renewal = Instant::now();
        let mut next_count = Instant::now();
        loop {
            let request = tokio::select! {
                // Changes that wait to be applied move the checkpoint anyway.
                biased;
                request = self.requests.recv() => request,
                () = tokio::time::sleep_until(next_renewal) => {
                    applied = self.renew_checkpoint(owner, applied).await;
                    next_renewal = Instant::now() + renewal_delay(fastrand::f64());
                    continue;
                }
                () = tokio::time::sleep_until(next_count) => {
                    self.count_keys(owner, applied).await;
                    next_count = Instant::now() + KEY_COUNT_INTERVAL;
                    continue;
                }
            };
            let Some(request) = request else { return };
            let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
            let mut log_throttle = LogThrottle::default();
            let response = loop {
                let reason = match self.execute(&request, owner, &mut applied).await {
                    Ok(response) => break response,
                    // Retrying here would block queries, also those for the jobs that are due next. The shard knows which
                    // changes free memory and must be forced.
                    Err(IndexError::Full(reason)) => match request {
                        IndexRequest::Apply { turn, batch } => break IndexResponse::Full { turn, batch },
                        _ => reason,
                    },
                    Err(IndexError::Unavailable(reason)) => reason,
                    Err(error @ (IndexError::Gap { .. } | IndexError::Fenced | IndexError::Damaged(_))) => {
                        applied = self.restore(owner, &error).await;
                        continue;
                    }
                };
                self.wait(&mut backoff, &mut log_throttle, "index unavailable", &reason)
                    .await;
            };
            if log_throttle.has_logged() {
                self.readiness.set_ready(self.assignment);
            }
            self.responses.push(self.assignment, response);
        }
    }

    /// Renews the time of the checkpoint of a shard without changes, so that it is recent when another process takes over. Returns
    /// the offset up to which the index is complete.
    async fn renew_checkpoint(&self, owner: Owner, applied: i64) -> i64 {
        let (renewal, now) = (Batch::renewal(applied), self.clock.now());
        match self.index.apply(self.shard, owner, &renewal, now).await {
            Ok(()) => applied,
            Err(error @ (IndexError::Gap { .. } | IndexError::Fenced | IndexError::Damaged(_))) => {
                self.restore(owner, &error).await
            }
            // The next renewal comes long before the checkpoint is too old.
            Err(error @ (IndexError::Full(_) | IndexError::Unavailable(_))) => {
                tracing::debug!(shard = self.shard, %error, "cannot renew the checkpoint of the index");
                applied
            }
        }
    }

    /// Updates the metric of known idempotency keys, and so tells other installations that the index is in use. While the index is unavailable, the metric
    /// keeps its value.
    async fn count_keys(&mut self, owner: Owner, applied: i64) {
        let index = self.index.of_owner(owner, applied);
        match index.known_keys(self.shard, self.clock.now()).await {
            Ok(count) => self.known_keys.set(count),
            Err(error) => tracing::debug!(shard = self.shard, %error, "cannot count the idempotency keys"),
        }
    }

    /// Restores from the state topic what the index has lost, and returns the end of the topic.
    async fn restore(&self, owner: Owner, error: &IndexError) -> i64 {
        tracing::warn!(
            shard = self.shard, %error,
            "index is damaged or not at the expected checkpoint; replaying the state topic"
        );
        let trust = match error {
            IndexError::Damaged(_) => Trust::Nothing,
            _ => Trust::Checkpoint,
        };
        self.bring_up_to_date(owner, trust).await
    }

    async fn wait(&self, backoff: &mut Backoff, log_throttle: &mut LogThrottle, state: &str, reason: &str) {
        let readiness = format!("shard {}: {state}: {reason}", self.shard);
        self.readiness.set_waiting(self.assignment, readiness);
        if log_throttle.should_log() {
            tracing::warn!(shard = self.shard, reason, "{state}; retrying");
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }

    async fn execute(
        &self,
        request: &IndexRequest,
        owner: Owner,
        applied: &mut i64,
    ) -> Result<IndexResponse, IndexError> {
        let now = self.clock.now();
        let shard = self.shard;
        // An index that was restored from an older dump, or failed over to a lagging replica, would return jobs that were
        // dispatched since.
        let index = self.index.of_owner(owner, *applied);
        match request {
            IndexRequest::Apply { turn, batch } => {
                fault::point("index");
                self.index.apply(shard, owner, batch, now).await?;
                *applied = batch.to.max(*applied);
                Ok(IndexResponse::Applied {
                    turn: *turn,
                    forced: batch.force,
                })
            }
            IndexRequest::LookUp(queries) => {
                let found = lookups::answer(&index, shard, queries, now).await?;
                Ok(IndexResponse::LookedUp(found))
            }
            IndexRequest::Scan(scan) | IndexRequest::ScanWaits(scan) => {
                let scan = lookups::read_scan(index.scan(shard, scan).await?)?;
                Ok(match request {
                    IndexRequest::ScanWaits(_) => IndexResponse::ScannedWaits(scan),
                    _ => IndexResponse::Scanned(scan),
                })
            }
            IndexRequest::FinishedRelease(pipeline) => {
                let (_, finished) = index.finished_release(shard, pipeline).await?;
                Ok(IndexResponse::FinishedRelease(finished))
            }
            IndexRequest::FinishRelease(pipeline, finished) => {
                self.index
                    .finish_release(shard, owner, pipeline, finished)
                    .await?;
                Ok(IndexResponse::ReleaseFinished)
            }
            IndexRequest::Forgettable => {
                let (_, ids) = index.forgettable(shard, now, MAX_FORGETTABLE).await?;
                Ok(IndexResponse::Forgettable(ids))
            }
            IndexRequest::Count(apps) => {
                let mut counted = Vec::with_capacity(apps.len());
                for app in apps {
                    let stats = index.stats(shard, Some(app), now, 0).await?;
                    counted.push((app.clone(), stats.scheduled));
                }
                Ok(IndexResponse::Counted(counted))
            }
        }
    }

    /// Replays the state topic until the index is complete, and returns the end of the topic. Retries until it succeeds.
    /// While the topic contains unsupported records, the shard is halted.
    async fn bring_up_to_date(&self, owner: Owner, trust: Trust) -> i64 {
        let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
        let mut log_throttle = LogThrottle::default();
        let mut is_halted = false;
        loop {
            match self.take_over(owner, trust).await {
                Ok(end) => {
                    self.readiness.set_ready(self.assignment);
                    if is_halted {
                        tracing::info!(
                            shard = self.shard,
                            "state topic readable again; resuming the shard"
                        );
                        self.responses.push(self.assignment, IndexResponse::Ready { end });
                    }
                    return end;
                }
                Err(error @ CatchUpError::UnsupportedRecords { .. }) => {
                    if !is_halted {
                        self.responses.push(self.assignment, IndexResponse::Halted);
                    }
                    is_halted = true;
                    let readiness = format!("shard {}: {error}", self.shard);
                    self.readiness.set_waiting(self.assignment, readiness);
                    if log_throttle.should_log() {
                        tracing::error!(shard = self.shard, reason = %error, "state topic contains unsupported records; shard halted");
                    }
                    tokio::time::sleep(UNSUPPORTED_RETRY).await;
                }
                Err(error) => {
                    let reason = error_chain(&error);
                    self.wait(&mut backoff, &mut log_throttle, "index not up to date", &reason)
                        .await;
                }
            }
        }
    }

    async fn take_over(&self, owner: Owner, trust: Trust) -> Result<i64, CatchUpError> {
        // From here on, a batch that the previous owner still sends is fenced.
        let checkpoint = self.index.claim(self.shard, owner).await?;
        fault::point("claim");
        let mut superseded_before = 0;
        match checkpoint {
            Some(Checkpoint { format, .. }) if format != index::FORMAT => tracing::warn!(
                shard = self.shard,
                format,
                supported = index::FORMAT,
                "index has the format of another version; rebuilding"
            ),
            Some(_) if matches!(trust, Trust::Nothing) => {
                tracing::warn!(shard = self.shard, "index is damaged; rebuilding");
            }
            Some(checkpoint) => match self.resume(owner, checkpoint).await {
                Err(error @ CatchUpError::TopicMismatch) => tracing::warn!(
                    shard = self.shard, reason = %error,
                    "index does not match the state topic; rebuilding"
                ),
                Err(error @ CatchUpError::Outdated { .. }) => tracing::warn!(
                    shard = self.shard, reason = %error,
                    "state topic may lack tombstones that the index needs; rebuilding"
                ),
                // The index may contain the effects of records that only the version that wrote them supports.
                Err(CatchUpError::Superseded { before }) => superseded_before = before,
                done => return done,
            },
            None => {}
        }
        let _permit = self.permit(TakeOver::Rebuild).await;
        loop {
            let opened = self.open(None).await?;
            self.index.clear(self.shard, owner).await?;
            // A crash from here on leaves a shard without a checkpoint, so the next owner clears it again.
            fault::point("clear");
            self.log_progress(0, opened.1);
            match self.replay(opened, owner, None, superseded_before).await {
                Err(CatchUpError::Superseded { before }) => superseded_before = before,
                done => return done,
            }
        }
    }

    /// Waits until this shard may read the state topic.
    async fn permit(&self, kind: TakeOver) -> TakeOverPermit<'_> {
        if let Some(permit) = self.limits.try_take_over(kind) {
            return permit;
        }
        let waits = format!(
            "shard {}: waiting until the indexes of other shards are up to date",
            self.shard
        );
        self.readiness.set_waiting(self.assignment, waits);
        let permit = self.limits.take_over(kind).await;
        let reads = format!("shard {}: bringing the index up to date", self.shard);
        self.readiness.set_waiting(self.assignment, reads);
        permit
    }

    /// Resumes from the checkpoint, if it is recent enough and belongs to this topic: the brokers may have been replaced, or the
    /// topic created again, under the same name.
    async fn resume(&self, owner: Owner, checkpoint: Checkpoint) -> Result<i64, CatchUpError> {
        let from = checkpoint.applied.offset;
        let begin = match checkpoint.last_record {
            Some(last_record) => last_record.offset,
            // The index of a topic from which no record was applied.
            None if from == 0 => 0,
            None => return Err(CatchUpError::TopicMismatch),
        };
        let _permit = self.permit(TakeOver::Resume).await;
        let (reader, end) = self.open(Some(begin)).await?;
        if from > end {
            return Err(CatchUpError::TopicMismatch);
        }
        let age = self.clock.now().since(checkpoint.applied.at);
        if !is_at_end(from, end) && age >= ALWAYS_RECENT && age >= self.max_checkpoint_age().await {
            return Err(CatchUpError::Outdated { age });
        }
        self.log_progress(from, end);
        self.replay((reader, end), owner, Some(checkpoint), 0).await
    }

    /// The age from which on a checkpoint is not resumed. Reads the settings of the topic, as at the start of the process,
    /// because they may have changed since.
    async fn max_checkpoint_age(&self) -> Duration {
        let kept = topology::tombstone_retention(&self.kafka.client(), &self.topic, SETTINGS_TIMEOUT).await;
        max_age(kept.unwrap_or_else(|error| {
            tracing::debug!(
                shard = self.shard,
                error = error_chain(&error),
                "cannot read the settings of the state topic"
            );
            None
        }))
    }

    fn log_progress(&self, from: i64, end: i64) {
        if from < end {
            tracing::info!(
                shard = self.shard,
                from,
                end,
                "bringing the index up to date from the state topic"
            );
        }
    }

    /// Opens a reader of the state topic, and returns the end of the topic.
    async fn open(&self, from: Option<i64>) -> Result<(TopicReader, i64), ReadError> {
        let (mut kafka, topic, shard) = (self.kafka.clone(), self.topic.clone(), self.shard);
        let id = self.index.state_topic_id();
        kafka
            .properties
            .entry("queued.max.messages.kbytes".to_owned())
            .or_insert_with(|| READ_AHEAD_KIBIBYTES.to_string());
        blocking(move || {
            let mut reader = TopicReader::of_partition(&kafka, &topic, shard, from)?;
            // The index is a copy of this topic, and of no other one with its name.
            reader.expect_id(&topic, id);
            reader.check_ids()?;
            let (_, end) = reader.topics().watermarks(&topic, shard)?;
            Ok((reader, end))
        })
        .await
    }

    /// Applies all records from the reader's position to the end of the state topic. With a checkpoint, the reader begins at
    /// the checkpoint's last record. After an unsupported record, nothing more is applied; the remaining records are only
    /// read to find out whether they replace it. Those before `superseded_before` are known to be replaced.
    async fn replay(
        &self,
        (mut reader, end): (TopicReader, i64),
        owner: Owner,
        known: Option<Checkpoint>,
        superseded_before: i64,
    ) -> Result<i64, CatchUpError> {
        let (sender, mut chunks) = mpsc::channel::<Vec<Record>>(2);
        let (topic, shard) = (self.topic.clone(), self.shard);
        let reading = async move {
            let position = blocking(move || {
                let mut chunk = Chunk::default();
                reader.read_while(READ_TIMEOUT, |record| {
                    let sent = chunk.push(record).map(|full| sender.blocking_send(full));
                    match sent {
                        // The receiver is gone: applying has failed.
                        Some(Err(_)) => ControlFlow::Break(()),
                        Some(Ok(())) | None => ControlFlow::Continue(()),
                    }
                })?;
                let _ = sender.blocking_send(chunk.records);
                Ok(reader.position(&topic, shard))
            });
            position.await.map_err(CatchUpError::from)
        };
        // This future owns the receiver. When it fails, the receiver is dropped, so the reading thread's next send fails
        // instead of blocking forever.
        let applying = async move {
            let mut applied = known.map_or(0, |known| known.applied.offset);
            let force = known.is_some() && end - applied <= MAX_FORCED_BACKLOG;
            let mut last_record = known.and_then(|known| known.last_record);
            let mut unread = UnreadRecords::default();
            while let Some(mut chunk) = chunks.recv().await {
                // The first record must be the one whose digest the checkpoint stores. Otherwise this is another topic of
                // the same name, and the checkpoint says nothing about it.
                if let Some(last_record) = last_record.take() {
                    if chunk.first().map(LastRecordDigest::of_record) != Some(last_record) {
                        return Err(CatchUpError::TopicMismatch);
                    }
                    chunk.retain(|record| record.position.offset >= applied);
                }
                if let Some(mut batch) = self.read(&chunk, applied, superseded_before, &mut unread) {
                    batch.force = force;
                    self.apply(owner, &batch).await?;
                    applied = batch.to;
                }
            }
            Ok((applied, force, unread))
        };
        let (position, (applied, force, unread)) = tokio::try_join!(reading, applying)?;
        // Transaction markers can follow the last record, and so move the end.
        let end = position.unwrap_or(applied).max(applied);
        if let Some((first, others)) = unread.first() {
            let first = first.clone();
            return Err(CatchUpError::UnsupportedRecords { first, others });
        }
        if unread.is_any() {
            return Err(CatchUpError::Superseded { before: end });
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

    /// The batch of these records, up to the first one that is not supported.
    fn read(
        &self,
        records: &[Record],
        from: i64,
        superseded_before: i64,
        unread: &mut UnreadRecords,
    ) -> Option<Batch> {
        let mut changes = Vec::new();
        let mut last = None;
        for record in records {
            let found = state_topic::read(record, self.retention);
            match found {
                Err(_) if record.position.offset < superseded_before => {}
                Ok(change) if !unread.is_any() => {
                    changes.extend(change);
                    last = Some(record);
                }
                found => unread.note(record, found),
            }
        }
        let last = last?;
        Some(Batch {
            from,
            to: last.position.offset + 1,
            changes,
            last_record: Some(LastRecordDigest::of_record(last)),
            force: false,
        })
    }
}

/// Records that are applied as one batch.
#[derive(Default)]
struct Chunk {
    records: Vec<Record>,
    bytes: usize,
}

impl Chunk {
    /// Adds a record, and returns all records once they fill a batch.
    fn push(&mut self, record: Record) -> Option<Vec<Record>> {
        self.bytes += record.value.as_ref().map_or(0, Bytes::len);
        self.records.push(record);
        if self.records.len() < MAX_CHUNK && self.bytes < MAX_CHUNK_BYTES {
            return None;
        }
        self.bytes = 0;
        Some(std::mem::take(&mut self.records))
    }
}

/// Runs blocking work on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::{ManualClock, Timestamp};
    use redeliver_runtime::health::Health;

    use super::*;
    use crate::index::Applied;
    use crate::index::memory::MemoryIndex;

    const START: Timestamp = Timestamp::from_millis(1_763_722_800_000);
    const SHARD: i32 = 0;

    #[tokio::test(start_paused = true)]
    async fn idle_shard_renews_its_checkpoint() {
        let (index, clock) = (MemoryIndex::new(), Arc::new(ManualClock::new(START)));
        let owner = Owner(1);
        index.claim(SHARD, owner).await.unwrap();
        index.clear(SHARD, owner).await.unwrap();
        let first = Batch {
            to: 10,
            ..Batch::default()
        };
        index.apply(SHARD, owner, &first, START).await.unwrap();
        let (_sender, requests) = mpsc::channel(1);
        let mut indexer = ShardIndexer {
            index: index.clone(),
            kafka: KafkaSettings::new("localhost:1", "test"),
            topic: "state".into(),
            shard: SHARD,
            assignment: AssignmentId::for_tests(0, 1),
            retention: RetentionPolicy {
                keys: Duration::ZERO,
                ended: Duration::ZERO,
            },
            clock: clock.clone(),
            requests,
            responses: Arc::new(IndexResponses::new(Waker::new())),
            readiness: Arc::new(ShardReadiness::new(Health::new().part("shards"))),
            limits: Arc::new(ProcessLimits::new()),
            known_keys: GaugeShare::new(prometheus_client::metrics::gauge::Gauge::default()),
            cancelled: CancellationToken::new(),
        };
        let hours = async {
            for hours in 1..=20 {
                let now = START.after(Duration::from_secs(hours * 3_600));
                clock.set(now);
                tokio::time::sleep(Duration::from_secs(3_600)).await;
                let (applied, _) = index.look_up(SHARD, &[], now).await.unwrap();
                assert_eq!(
                    applied,
                    Some(Applied { offset: 10, at: now }),
                    "after {hours} hours"
                );
            }
        };
        tokio::select! {
            () = indexer.serve_requests_from(owner, 10) => panic!("it has ended"),
            () = hours => {}
        }
    }
}
