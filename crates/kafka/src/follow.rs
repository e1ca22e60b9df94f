//! Following partitions for as long as a process lives, outside of any group: from a given offset on, as a
//! read_committed consumer sees them, with the moments at which everything that is there has been given.
//!
//! Partitions come and go while it runs. Each has its own queue in the client, so that the end of a partition
//! says whose end it is, and trouble with one stops no other.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use rdkafka::{ClientConfig, TopicPartitionList};
use redeliver_core::Record;

use crate::client::{ClientLog, KafkaSettings};
use crate::convert;
use crate::processor::Waker;
use crate::reader::{ReadError, client, kafka};

/// What happens on followed partitions.
#[derive(Debug)]
pub enum Event {
    /// The next record of its partition.
    Record(Record),
    /// Everything that was committed to a partition has been given. More may come.
    End {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
    },
    /// A partition cannot be read, because it is gone or not ours to read. It stays followed.
    Refused {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// Why.
        error: RDKafkaErrorCode,
    },
}

/// A partition with the offset to begin at; `None` is its beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The next offset to read. One that is not there any more means the first that is.
    pub from: Option<i64>,
}

/// Reads partitions from given offsets on. All calls come from one thread.
pub struct Follower {
    config: ClientConfig,
    waker: Waker,
    // The queues go before the consumer that they are of.
    partitions: Vec<Followed>,
    consumer: Arc<BaseConsumer<Log>>,
    /// The partition that is asked first, so that none is always the last.
    turn: usize,
}

struct Followed {
    queue: PartitionQueue<Log>,
    topic: Arc<str>,
    partition: i32,
    next: Option<i64>,
}

#[derive(Default)]
struct Log(ClientLog);

impl ClientContext for Log {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.0.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // The end of a partition is no trouble, and comes through its queue.
        let is_end = error.rdkafka_error_code() == Some(RDKafkaErrorCode::PartitionEOF);
        if !is_end && self.0.is_time("error") {
            tracing::warn!(%error, reason, "kafka consumer");
        }
    }
}

impl ConsumerContext for Log {}

/// The most records of one partition before the next one has its turn.
const SHARE: usize = 500;

impl Follower {
    /// Follows nothing yet. `waker` ends a wait in [`Follower::poll`] early.
    ///
    /// # Errors
    /// When the client cannot be made from its configuration.
    pub fn new(settings: &KafkaSettings, waker: Waker) -> Result<Self, ReadError> {
        let mut config = client(settings, "read_committed");
        config
            // Offsets that retention has removed; a topic that was made again is noticed by its offsets.
            .set("auto.offset.reset", "earliest")
            // Answers come at once when there is something to tell.
            .set("fetch.wait.max.ms", "500");
        for (name, value) in [
            ("queued.min.messages", "5000"),
            ("queued.max.messages.kbytes", "1024"),
        ] {
            if !settings.properties.contains_key(name) {
                config.set(name, value);
            }
        }
        Ok(Self {
            consumer: make(&config, &waker)?,
            config,
            waker,
            partitions: Vec::new(),
            turn: 0,
        })
    }

    /// Follows more partitions. One that is followed already begins again at the given offset.
    ///
    /// # Errors
    /// When the client refuses.
    pub fn add(&mut self, starts: &[Start]) -> Result<(), ReadError> {
        let followed = |start: &&Start| {
            let mut partitions = self.partitions.iter();
            partitions.any(|known| known.topic == start.topic && known.partition == start.partition)
        };
        let again: Vec<(Arc<str>, i32)> = starts
            .iter()
            .filter(followed)
            .map(|start| (start.topic.clone(), start.partition))
            .collect();
        self.drop_partitions(|topic, partition| {
            again
                .iter()
                .any(|(gone, number)| gone == topic && *number == partition)
        })?;
        self.assign(starts)
    }

    /// Follows a topic no longer.
    ///
    /// # Errors
    /// When the client refuses.
    pub fn remove(&mut self, topic: &str) -> Result<(), ReadError> {
        self.drop_partitions(|followed, _| &**followed == topic)
    }

    /// Goes on with a new client from where the old one was: a fetch that a restart of the broker left behind
    /// may never end.
    ///
    /// # Errors
    /// When the client refuses.
    pub fn renew(&mut self) -> Result<(), ReadError> {
        let starts: Vec<Start> = self
            .partitions
            .drain(..)
            .map(|followed| Start {
                topic: followed.topic,
                partition: followed.partition,
                from: followed.next,
            })
            .collect();
        self.consumer = make(&self.config, &self.waker)?;
        self.assign(&starts)
    }

    /// Visits what has come until the visitor breaks off; when there is nothing, waits for up to `wait`. What
    /// was not visited comes the next time.
    ///
    /// # Errors
    /// When the client cannot go on.
    pub fn poll(
        &mut self,
        wait: Duration,
        mut visit: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.waker.attach_current_thread();
        // Nothing but callbacks and errors of the whole client come this way.
        if let Some(Err(error)) = self.consumer.poll(Duration::ZERO) {
            fatal(error)?;
        }
        let mut is_idle = true;
        let partitions = self.partitions.len();
        for step in 0..partitions {
            let index = (self.turn + step) % partitions;
            let (count, flow) = self.partitions[index].drain(&mut visit)?;
            is_idle &= count == 0;
            if flow.is_break() {
                // The next round begins behind this one.
                self.turn = index + 1;
                break;
            }
        }
        if is_idle {
            std::thread::park_timeout(wait);
        }
        Ok(())
    }

    fn assign(&mut self, starts: &[Start]) -> Result<(), ReadError> {
        let assigning = kafka("assigning");
        let mut list = TopicPartitionList::new();
        for start in starts {
            let offset = start.from.map_or(Offset::Beginning, Offset::Offset);
            list.add_partition_offset(&start.topic, start.partition, offset)
                .map_err(&assigning)?;
            // The queue is split before fetching begins, so that no record takes another way.
            let queue = self.consumer.split_partition_queue(&start.topic, start.partition);
            let mut queue = queue.ok_or_else(|| assigning(KafkaError::Canceled))?;
            let waker = self.waker.clone();
            queue.set_nonempty_callback(move || waker.wake());
            self.partitions.push(Followed {
                queue,
                topic: start.topic.clone(),
                partition: start.partition,
                next: start.from,
            });
        }
        if starts.is_empty() {
            return Ok(());
        }
        self.consumer.incremental_assign(&list).map_err(assigning)
    }

    fn drop_partitions(&mut self, gone: impl Fn(&Arc<str>, i32) -> bool) -> Result<(), ReadError> {
        let mut list = TopicPartitionList::new();
        self.partitions.retain(|followed| {
            let stays = !gone(&followed.topic, followed.partition);
            if !stays {
                list.add_partition(&followed.topic, followed.partition);
            }
            stays
        });
        if list.count() == 0 {
            return Ok(());
        }
        self.consumer
            .incremental_unassign(&list)
            .map_err(kafka("unassigning"))
    }
}

impl Followed {
    /// Visits what has come, up to its share. Gives how much that was, and whether the visitor has enough.
    fn drain(
        &mut self,
        visit: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(usize, ControlFlow<()>), ReadError> {
        for count in 0..SHARE {
            let event = match self.queue.poll(Duration::ZERO) {
                None => return Ok((count, ControlFlow::Continue(()))),
                Some(Ok(message)) => {
                    self.next = Some(message.offset() + 1);
                    Event::Record(convert::record(&message, &self.topic))
                }
                Some(Err(KafkaError::PartitionEOF(_))) => Event::End {
                    topic: self.topic.clone(),
                    partition: self.partition,
                },
                Some(Err(error)) => match error.rdkafka_error_code() {
                    Some(code) if is_refusal(code) => Event::Refused {
                        topic: self.topic.clone(),
                        partition: self.partition,
                        error: code,
                    },
                    _ => {
                        fatal(error)?;
                        continue;
                    }
                },
            };
            if visit(event).is_break() {
                return Ok((count + 1, ControlFlow::Break(())));
            }
        }
        Ok((SHARE, ControlFlow::Continue(())))
    }
}

fn make(config: &ClientConfig, waker: &Waker) -> Result<Arc<BaseConsumer<Log>>, ReadError> {
    let made = config.create_with_context(Log::default());
    let mut consumer: BaseConsumer<Log> = made.map_err(kafka("making a consumer"))?;
    let waker = waker.clone();
    consumer.set_nonempty_callback(move || waker.wake());
    Ok(Arc::new(consumer))
}

/// Whether an error is about one partition alone.
fn is_refusal(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::UnknownTopic
            | Code::UnknownPartition
            | Code::UnknownTopicOrPartition
            | Code::TopicAuthorizationFailed
            | Code::OffsetOutOfRange
            | Code::AutoOffsetReset
            | Code::InvalidTopic
            | Code::KafkaStorageError
            | Code::BadMessage
    )
}

/// Errors that the client does not get over by itself.
fn fatal(error: KafkaError) -> Result<(), ReadError> {
    match error.rdkafka_error_code() {
        Some(RDKafkaErrorCode::Fatal | RDKafkaErrorCode::FencedInstanceId) => Err(kafka("polling")(error)),
        _ => {
            tracing::debug!(%error, "follower");
            Ok(())
        }
    }
}
