//! The urgent topic: copies of cancellations, which overtake the backlog of the ingest topic.
//!
//! A copy is written after its original, to the same partition, with the lineage of the original: a forwarded command has the same
//! headers. A thread per lane reads the partitions of the lane's shards, outside of the consumer group. There is no committed
//! position: a shard that moves reads the topic from its beginning, and ignores copies whose originals have had their turn. If the
//! topic cannot be read, cancellations wait for their turn in the ingest topic.

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_core::{Headers, JobId, Output, Position, Record};
use redeliver_kafka::follow::{Event, Follower, Start};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker};
use redeliver_runtime::error_chain::error_chain;
use tokio_util::sync::CancellationToken;

use crate::request::NAME;

/// The maximum number and size of copies of a shard in memory. Beyond, the oldest ones are dropped: of a shard that does not know its
/// position yet, they are the ones whose originals have most likely had their turn.
const MAX_COPIES: usize = 5_000;
const MAX_COPY_BYTES: usize = 16 << 10;
/// The maximum time until the reader notices a new shard, or the end of the process.
const POLL: Duration = Duration::from_millis(200);

/// Copies on their way from the thread that reads them to the shards of a lane.
pub(crate) struct UrgentCopies {
    ingest: Arc<str>,
    shards: Mutex<Shards>,
    /// Of the lane.
    waker: Waker,
    /// Of the reader.
    reader: Waker,
}

#[derive(Default)]
struct Shards {
    copies: HashMap<i32, (AssignmentId, VecDeque<Record>)>,
    /// Shards that the reader does not read yet.
    new: Vec<i32>,
}

impl UrgentCopies {
    pub(crate) fn new(ingest: Arc<str>, waker: Waker) -> Arc<Self> {
        Arc::new(Self {
            ingest,
            shards: Mutex::default(),
            waker,
            reader: Waker::new(),
        })
    }

    /// The lane owns a shard.
    pub(crate) fn assigned(&self, assignment: AssignmentId, shard: i32) {
        let mut shards = self.lock();
        shards.copies.insert(shard, (assignment, VecDeque::new()));
        shards.new.push(shard);
        drop(shards);
        self.reader.wake();
    }

    /// The lane does not own a shard any more.
    pub(crate) fn revoked(&self, assignment: AssignmentId) {
        self.lock().copies.retain(|_, (owner, _)| *owner != assignment);
    }

    /// The next copies for a shard, with the position and the timestamp of their originals.
    pub(crate) fn take(&self, assignment: AssignmentId, count: usize) -> Vec<Record> {
        let mut shards = self.lock();
        let mut copies = shards.copies.values_mut();
        match copies.find(|(owner, _)| *owner == assignment) {
            Some((_, copies)) => copies.drain(..count.min(copies.len())).collect(),
            None => Vec::new(),
        }
    }

    fn push(&self, copy: &Record) {
        let Some(original) = as_original(copy, &self.ingest) else {
            tracing::debug!(position = %copy.position, "record of the urgent topic does not name its original");
            return;
        };
        let mut shards = self.lock();
        let Some((_, copies)) = shards.copies.get_mut(&original.position.partition) else {
            return;
        };
        if copies.len() >= MAX_COPIES {
            copies.pop_front();
        }
        copies.push_back(original);
        drop(shards);
        self.waker.wake();
    }

    fn lock(&self) -> MutexGuard<'_, Shards> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The copy as its original: with the position and the timestamp that its lineage names. `None` if it does not name a record of the
/// same partition of the ingest topic, or is too large for a cancellation.
fn as_original(copy: &Record, ingest: &Arc<str>) -> Option<Record> {
    let origin = ReservedHeaders::read(copy)
        .ok()
        .filter(|found| found.is_retry_of(NAME))?;
    let origin = origin.origin().ok()?;
    let size = copy.value.as_ref().map_or(0, Bytes::len) + copy.headers.byte_len();
    let is_copy = origin.topic == *ingest && origin.partition == copy.position.partition;
    (is_copy && size <= MAX_COPY_BYTES).then(|| Record {
        position: Position {
            topic: ingest.clone(),
            partition: origin.partition,
            offset: origin.offset,
        },
        timestamp: origin.timestamp,
        ..copy.clone()
    })
}

/// The copy of a protobuf command. The id contains the position and the timestamp of the original.
pub(crate) fn copy_of(original: &Output, topic: Arc<str>, id: JobId) -> Option<Output> {
    let mut list: Headers = headers::user_headers(&original.headers, None);
    let origin = headers::Origin {
        topic: original.topic.clone(),
        partition: id.shard(),
        offset: i64::try_from(id.offset()).ok()?,
        timestamp: Some(id.requested_at()),
    };
    headers::write_lineage(&mut list, NAME, &origin, 0);
    Some(Output {
        topic,
        partition: Some(id.shard()),
        headers: list,
        ..original.clone()
    })
}

/// The thread that reads the urgent topic.
pub(crate) struct Reader {
    pub(crate) kafka: KafkaSettings,
    pub(crate) topic: Arc<str>,
    pub(crate) copies: Arc<UrgentCopies>,
    pub(crate) stop: CancellationToken,
}

impl Reader {
    /// Runs until the process shuts down. Failures are logged and retried: nothing depends on the copies.
    pub(crate) fn run(self) -> Result<(), ReadError> {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let mut log = LogThrottle::default();
        while !self.stop.is_cancelled() {
            if let Err(error) = self.follow(&mut log) {
                self.log(&mut log, &error_chain(&error));
                std::thread::park_timeout(backoff.next_delay());
                // The new client reads all shards.
                let mut shards = self.copies.lock();
                shards.new = shards.copies.keys().copied().collect();
            }
        }
        Ok(())
    }

    fn follow(&self, log: &mut LogThrottle) -> Result<(), ReadError> {
        let mut follower = Follower::new(&self.kafka, self.copies.reader.clone())?;
        while !self.stop.is_cancelled() {
            let new = std::mem::take(&mut self.copies.lock().new);
            let starts: Vec<Start> = new
                .into_iter()
                .map(|partition| Start {
                    topic: self.topic.clone(),
                    partition,
                    from: None,
                })
                .collect();
            follower.add(&starts)?;
            follower.poll(POLL, |event| {
                match event {
                    Event::Record(copy) => self.copies.push(&copy),
                    Event::Refused { partition, error, .. } => {
                        self.log(log, &format!("partition {partition}: {error}"));
                    }
                    Event::End { .. } => {}
                }
                ControlFlow::Continue(())
            })?;
        }
        Ok(())
    }

    fn log(&self, log: &mut LogThrottle, reason: &str) {
        if log.should_log() {
            tracing::warn!(
                topic = &*self.topic,
                reason,
                "cannot read the urgent topic; cancellations wait for their turn in the ingest topic"
            );
        }
    }
}
