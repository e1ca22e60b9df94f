//! The urgent topic: copies of commands that name a job, which overtake the backlog of the ingest topic.
//!
//! A copy is written after its original, to the same partition, with the lineage of the original: a forwarded command has the same
//! headers. A thread per lane reads the partitions of the lane's shards, outside of the consumer group. There is no committed
//! position: a shard that moves reads the topic from its beginning, before it dispatches jobs, and ignores copies whose originals have
//! had their turn. If the topic cannot be read, commands wait for their turn in the ingest topic.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_core::{Clock, Headers, JobId, Output, Record, Timestamp};
use redeliver_kafka::follow::{Event, Follower, Start};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker};
use redeliver_runtime::error_chain::error_chain;
use tokio_util::sync::CancellationToken;

use crate::request::{Command, JobRef, NAME, shard_of};
use crate::settings::Settings;
use crate::shard::{NamedBy, UrgentCopy};

/// The maximum size of a copy.
const MAX_COPY_BYTES: usize = 16 << 10;
/// The maximum number of copies of a shard on their way to it. The lane takes them in each round.
const MAX_COPIES: usize = 10_000;
/// The maximum time until the reader notices a new shard, or the end of the process.
const POLL: Duration = Duration::from_millis(200);
/// How long a shard waits at most for the end of its partition.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Copies on their way from the thread that reads them to the shards of a lane.
pub(crate) struct UrgentCopies {
    /// The urgent topic.
    pub(crate) topic: Arc<str>,
    shards: Mutex<HashMap<i32, Inbox>>,
    /// Of the lane.
    waker: Waker,
    /// Of the reader.
    reader: Waker,
}

/// The copies for a shard.
struct Inbox {
    assignment: AssignmentId,
    since: Instant,
    copies: Vec<UrgentCopy>,
    /// The offset before which all commands that name jobs have had their turn.
    passed: i64,
    /// Whether the reader reads the partition for this assignment.
    is_read: bool,
    /// Whether the reader has reached the end of the partition once.
    is_complete: bool,
    late: u64,
    /// The number of copies for which there was no room.
    dropped: u64,
}

/// What a shard takes from its [`Inbox`].
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    pub(crate) copies: Vec<UrgentCopy>,
    /// Whether the copies are all that the partition contained when the shard began to wait for them, or the wait is over.
    pub(crate) is_complete: bool,
    /// The number of copies whose originals have had their turn.
    pub(crate) late: u64,
    /// The number of copies for which there was no room.
    pub(crate) dropped: u64,
}

impl UrgentCopies {
    pub(crate) fn new(topic: Arc<str>, waker: Waker) -> Arc<Self> {
        Arc::new(Self {
            topic,
            shards: Mutex::default(),
            waker,
            reader: Waker::new(),
        })
    }

    /// The lane owns a shard.
    pub(crate) fn assigned(&self, assignment: AssignmentId, shard: i32) {
        let inbox = Inbox {
            assignment,
            since: Instant::now(),
            copies: Vec::new(),
            passed: 0,
            is_read: false,
            is_complete: false,
            late: 0,
            dropped: 0,
        };
        self.lock().insert(shard, inbox);
        self.reader.wake();
    }

    /// The lane does not own a shard any more.
    pub(crate) fn revoked(&self, assignment: AssignmentId) {
        self.lock().retain(|_, inbox| inbox.assignment != assignment);
        self.reader.wake();
    }

    /// What has come for a shard that has `passed` the commands before an offset.
    pub(crate) fn take(&self, assignment: AssignmentId, passed: i64) -> Delivery {
        let mut shards = self.lock();
        let mut inboxes = shards.values_mut();
        match inboxes.find(|inbox| inbox.assignment == assignment) {
            Some(inbox) => {
                inbox.passed = passed;
                Delivery {
                    copies: std::mem::take(&mut inbox.copies),
                    is_complete: inbox.is_complete || inbox.since.elapsed() >= MAX_WAIT,
                    late: std::mem::take(&mut inbox.late),
                    dropped: std::mem::take(&mut inbox.dropped),
                }
            }
            None => Delivery::default(),
        }
    }

    /// The shards, and those whose partitions the reader must read from the beginning now.
    pub(crate) fn begin(&self) -> (BTreeSet<i32>, Vec<i32>) {
        let mut shards = self.lock();
        let is_new = |inbox: &mut Inbox| !std::mem::replace(&mut inbox.is_read, true);
        let new = shards
            .iter_mut()
            .filter_map(|(shard, inbox)| is_new(inbox).then_some(*shard));
        let new = new.collect();
        (shards.keys().copied().collect(), new)
    }

    /// Returns whether the shard has something to take.
    pub(crate) fn push(&self, shard: i32, copy: UrgentCopy) -> bool {
        let mut shards = self.lock();
        let Some(inbox) = shards.get_mut(&shard).filter(|inbox| inbox.is_read) else {
            return false;
        };
        if copy.original < inbox.passed {
            inbox.late += 1;
        } else if inbox.copies.len() >= MAX_COPIES {
            inbox.dropped += 1;
        } else {
            inbox.copies.push(copy);
            return true;
        }
        false
    }

    /// The reader has reached the end of a partition, or cannot read it. Returns whether the shard has waited for that.
    pub(crate) fn complete(&self, shard: i32) -> bool {
        let mut shards = self.lock();
        let inbox = shards.get_mut(&shard).filter(|inbox| inbox.is_read);
        inbox.is_some_and(|inbox| !std::mem::replace(&mut inbox.is_complete, true))
    }

    /// No partition is read any more.
    fn unread(&self) {
        for inbox in self.lock().values_mut() {
            inbox.is_read = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Inbox>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a copy. `None` if it does not name a record of the same partition of the ingest topic, is not a command that names a job of that
/// shard, or is too large for one.
pub(crate) fn read_copy(copy: &Record, settings: &Settings, now: Timestamp) -> Option<UrgentCopy> {
    let size = copy.value.as_ref().map_or(0, Bytes::len) + copy.headers.byte_len();
    if size > MAX_COPY_BYTES {
        return None;
    }
    let reserved = ReservedHeaders::read(copy).ok()?;
    let origin = reserved
        .is_retry_of(NAME)
        .then(|| reserved.origin().ok())
        .flatten()?;
    let partition = copy.position.partition;
    if origin.topic != settings.ingest || origin.partition != partition {
        return None;
    }
    let (Command::Cancel(job) | Command::Reschedule { job, .. }) =
        crate::request::read(copy, &settings.rules, now).command.ok()?
    else {
        return None;
    };
    let owner = match &job {
        JobRef::Id(id) => id.shard(),
        JobRef::Key { app, key } => shard_of(app, key, settings.partitions),
    };
    (owner == partition).then(|| UrgentCopy {
        names: NamedBy::of(&job),
        original: origin.offset,
        written: copy.timestamp.map_or(now, |written| written.min(now)),
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
    pub(crate) settings: Arc<Settings>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) copies: Arc<UrgentCopies>,
    pub(crate) stop: CancellationToken,
}

impl Reader {
    /// Runs until the process shuts down. Failures are logged and retried: nothing depends on the copies.
    pub(crate) fn run(self) -> Result<(), ReadError> {
        let mut log = LogThrottle::default();
        let new_backoff = || Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let mut backoff = new_backoff();
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            if let Err(error) = self.follow(&mut log) {
                self.log(&mut log, &error_chain(&error));
                // The next client reads all shards.
                self.copies.unread();
                if began.elapsed() > Duration::from_secs(60) {
                    backoff = new_backoff();
                }
                self.pause(backoff.next_delay());
            }
        }
        Ok(())
    }

    /// Pauses, but not beyond the end of the process.
    fn pause(&self, delay: Duration) {
        let until = Instant::now() + delay;
        while !self.stop.is_cancelled() && Instant::now() < until {
            std::thread::park_timeout(POLL.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn follow(&self, log: &mut LogThrottle) -> Result<(), ReadError> {
        let mut follower = Follower::new(&self.kafka, self.copies.reader.clone())?;
        while !self.stop.is_cancelled() {
            self.follow_shards(&mut follower)?;
            let mut is_new = false;
            follower.poll(POLL, |event| {
                match event {
                    Event::Record(copy) => match read_copy(&copy, &self.settings, self.clock.now()) {
                        Some(read) => is_new |= self.copies.push(copy.position.partition, read),
                        None => tracing::debug!(
                            position = %copy.position,
                            "record of the urgent topic is no copy of a command that names a job"
                        ),
                    },
                    Event::End { partition, .. } => is_new |= self.copies.complete(partition),
                    Event::Refused { partition, error, .. } => {
                        is_new |= self.copies.complete(partition);
                        self.log(log, &format!("partition {partition}: {error}"));
                    }
                }
                ControlFlow::Continue(())
            })?;
            if is_new {
                self.copies.waker.wake();
            }
        }
        Ok(())
    }

    /// Reads the shards that the lane has, each assignment from the beginning.
    fn follow_shards(&self, follower: &mut Follower) -> Result<(), ReadError> {
        let (owned, new) = self.copies.begin();
        let starts = new.into_iter().map(|partition| Start {
            topic: self.copies.topic.clone(),
            partition,
            from: None,
        });
        let starts: Vec<Start> = starts.collect();
        follower.retain(|_, partition| owned.contains(&partition))?;
        if starts.is_empty() {
            return Ok(());
        }
        follower.add(&starts)
    }

    fn log(&self, log: &mut LogThrottle, reason: &str) {
        if log.should_log() {
            tracing::warn!(
                topic = &*self.copies.topic,
                reason,
                "cannot read the urgent topic; commands wait for their turn in the ingest topic"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Position;
    use redeliver_proto::{Message as _, v1};

    use super::*;
    use crate::request::{ParsedRequest, write_protobuf};
    use crate::shard::tests::settings;

    const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000);

    fn copy(original: i64) -> UrgentCopy {
        UrgentCopy {
            names: NamedBy::Key([7; 16]),
            original,
            written: NOW,
        }
    }

    fn taken(copies: &UrgentCopies, assignment: AssignmentId, passed: i64) -> (Vec<i64>, bool, u64, u64) {
        let Delivery {
            copies,
            is_complete,
            late,
            dropped,
        } = copies.take(assignment, passed);
        let originals = copies.iter().map(|copy| copy.original).collect();
        (originals, is_complete, late, dropped)
    }

    #[test]
    fn a_shard_gets_the_copies_that_were_read_for_its_assignment() {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let (former, current) = (AssignmentId::for_tests(0, 1), AssignmentId::for_tests(0, 2));
        copies.assigned(former, 3);
        assert!(!copies.push(3, copy(1)) && !copies.complete(3), "not read yet");
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
        assert_eq!(copies.begin(), ([3].into(), vec![]));
        assert!(copies.push(3, copy(1)) && !copies.push(4, copy(1)));
        copies.revoked(former);
        assert_eq!(copies.begin(), ([].into(), vec![]));
        copies.assigned(current, 3);
        copies.revoked(former);
        // What was read for the former assignment.
        assert!(!copies.push(3, copy(2)) && !copies.complete(3));
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
        assert!(copies.push(3, copy(1)) && copies.push(3, copy(2)));
        assert_eq!(taken(&copies, former, 0), (vec![], false, 0, 0));
        assert_eq!(taken(&copies, current, 0), (vec![1, 2], false, 0, 0));
        assert!(copies.complete(3) && !copies.complete(3));
        assert_eq!(taken(&copies, current, 0), (vec![], true, 0, 0));
        // A client that was replaced reads them again.
        copies.unread();
        assert_eq!(copies.begin(), ([3].into(), vec![3]));
    }

    #[test]
    fn late_copies_use_no_memory_and_the_newest_are_dropped() {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let assignment = AssignmentId::for_tests(0, 1);
        copies.assigned(assignment, 0);
        copies.begin();
        assert_eq!(taken(&copies, assignment, 5), (vec![], false, 0, 0));
        assert!(!copies.push(0, copy(4)) && copies.push(0, copy(5)));
        assert_eq!(taken(&copies, assignment, 5), (vec![5], false, 1, 0));
        for original in 0..MAX_COPIES as i64 {
            assert!(copies.push(0, copy(10 + original)));
        }
        assert!(!copies.push(0, copy(9)));
        let delivery = copies.take(assignment, 5);
        assert_eq!((delivery.copies.len(), delivery.dropped), (MAX_COPIES, 1));
        assert_eq!(delivery.copies[0].original, 10);
    }

    #[test]
    fn the_copies_of_the_api_can_be_read() {
        let id = JobId::new(NOW, 0, 41);
        let command = JobId::new(NOW, 0, 42);
        let mut headers = Headers::new();
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let original = Output {
            topic: "ingest".into(),
            partition: Some(0),
            key: None,
            value: Some(write_protobuf(&ParsedRequest::Cancel(JobRef::Id(id)), "me")),
            headers,
        };
        let copy = copy_of(&original, "urgent".into(), command).unwrap();
        assert_eq!((&*copy.topic, copy.partition), ("urgent", Some(0)));
        let value = v1::JobCommand::decode(copy.value.clone().unwrap()).unwrap();
        assert_eq!(value.answer_to, "me");
        let record = Record {
            position: Position {
                topic: copy.topic,
                partition: 0,
                offset: 0,
            },
            timestamp: Some(NOW.after(Duration::from_secs(5))),
            key: copy.key,
            value: copy.value,
            headers: copy.headers,
            unreadable_headers: 0,
        };
        let expected = UrgentCopy {
            names: NamedBy::Id(id),
            original: 42,
            // The clock of its producer is ahead.
            written: NOW,
        };
        assert_eq!(read_copy(&record, &settings(), NOW), Some(expected));
    }
}
