//! Follows partitions from given offsets, outside of any consumer group, as a read_committed consumer, and reports when
//! the current end of a partition is reached.
//!
//! Partitions can be added and removed at any time. Each has its own queue in the client, so that an end-of-partition event
//! can be attributed to its partition, and an error of one partition does not stop the others.
//!
//! The client prefetches records into each queue. Their size is limited by the number of partitions, so that all queues together
//! have about the same size, however many there are.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_core::Record;
use redeliver_core::error_chain::error_chain;
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use crate::client::{ClientSettings, KafkaSettings};
use crate::convert;
use crate::credentials::Renewal;
use crate::describe::describe_topics;
use crate::partition_end::EndContext;
use crate::processor::Waker;
use crate::reader::{CALL, ReadError, kafka};
use crate::recovery::error_code;
use crate::shared_prefetch::SharedPrefetch;

/// An event of a followed partition.
#[derive(Debug)]
pub enum Event {
    /// The next record of its partition.
    Record(Record),
    /// All records before an offset have been returned: the end of the partition as far as the broker knows it. A
    /// broker that has just become the leader, or a follower, may not know the last records yet. They follow.
    End {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The offset.
        offset: i64,
    },
    /// The partition cannot be read, because it is missing or access is denied. It stays followed.
    Refused {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The error of the broker.
        error: RDKafkaErrorCode,
        /// Whether access is denied. Other errors may pass soon.
        is_denied: bool,
    },
}

/// A partition to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The offset of the first record to read; `None`: the beginning, as of an offset that is out of range.
    pub from: Option<i64>,
}

type FollowConsumer = KafkaClient<Arc<BaseConsumer<EndContext>>>;
type Describing = KafkaClient<BaseConsumer<EndContext>>;

/// Reads partitions from given offsets. All calls must come from one thread.
pub struct Follower {
    config: ClientSettings,
    /// The prefetch of the current client; `None` if the configuration sets it.
    prefetch: Option<SharedPrefetch>,
    waker: Waker,
    renewal: Renewal,
    // Declared before the consumer, so that the queues are dropped before it.
    partitions: Vec<FollowedPartition>,
    consumer: FollowConsumer,
    /// For the ids of topics. A broker answers the requests of a connection in their order, and the consumer's fetches wait for records. `None`
    /// with the embedded broker, whose topics are never deleted.
    describing: Option<Describing>,
    /// The index of the partition that the next poll begins with, so that all get their share.
    first: usize,
    /// The number of partitions that had their turn in this round.
    turns: usize,
    rounds: u64,
}

struct FollowedPartition {
    queue: PartitionQueue<EndContext>,
    topic: Arc<str>,
    partition: i32,
    next: Option<i64>,
}

/// The maximum number of records of one partition per poll.
const MAX_RECORDS: usize = 500;

impl Follower {
    /// Creates a follower without partitions. `waker` ends a wait in [`Follower::poll`] early.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings, waker: Waker) -> Result<Self, ReadError> {
        let renewal = Renewal::new(settings, "follower");
        let mut config = settings.reader("read_committed");
        // For offsets that retention has deleted. If the topic was created again, the caller notices it by the offsets.
        config.set("auto.offset.reset", "earliest");
        // The broker answers at once when there are records; without any, longer waits save requests.
        if !settings.properties.contains_key("fetch.wait.max.ms") {
            config.set("fetch.wait.max.ms", "500");
        }
        let prefetch = (!SharedPrefetch::is_configured(settings)).then(|| SharedPrefetch::of(1));
        if let Some(prefetch) = prefetch {
            prefetch.configure(&mut config);
        }
        Ok(Self {
            consumer: create_consumer(&config, &waker)?,
            describing: (!settings.takes_all_partitions)
                .then(|| create_describing(&config))
                .transpose()?,
            config,
            prefetch,
            waker,
            renewal,
            partitions: Vec::new(),
            first: 0,
            turns: 0,
            rounds: 0,
        })
    }

    /// How many times each partition had its turn to return records, since the start.
    #[must_use]
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// The current ids of topics, as far as the broker tells them. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn topic_ids(&mut self, topics: &[&str]) -> Result<BTreeMap<String, TopicId>, ReadError> {
        // Also for a caller that repeats the request until it succeeds.
        if self.renewal.is_due() {
            self.renew_credentials()?;
        }
        let Some(describing) = self.describing.as_ref().filter(|_| !topics.is_empty()) else {
            return Ok(BTreeMap::new());
        };
        let failed = |code| kafka("requesting the ids of topics")(KafkaError::AdminOp(code));
        let described = describe_topics(describing.client(), topics, CALL).map_err(failed)?;
        let known = described.into_iter();
        Ok(known
            .filter_map(|(name, topic)| Some((name, topic.ok()?.id?)))
            .collect())
    }

    /// Follows more partitions. A partition that is already followed continues from the given offset.
    ///
    /// # Errors
    /// If the client fails.
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
                .any(|(known, number)| known == topic && *number == partition)
        })?;
        let prefetch = SharedPrefetch::of(self.partitions.len() + starts.len());
        // The client stays if there are fewer partitions: each queue could have more memory, but needs none.
        if self.prefetch.is_some_and(|current| prefetch < current) {
            self.prefetch = Some(prefetch);
            prefetch.configure(&mut self.config);
            self.renew()?;
        }
        self.assign(starts)
    }

    /// Stops following a topic.
    ///
    /// # Errors
    /// If the client fails.
    pub fn remove(&mut self, topic: &str) -> Result<(), ReadError> {
        self.drop_partitions(|followed, _| &**followed == topic)
    }

    /// Replaces the client and continues from the same offsets: after a restart of the broker, a fetch may hang forever.
    ///
    /// # Errors
    /// If the client fails.
    pub fn renew(&mut self) -> Result<(), ReadError> {
        let clients = self.connect()?;
        self.continue_with(clients)
    }

    /// Replaces the client because credentials have changed. If there can be no new one, the previous one stays in use.
    fn renew_credentials(&mut self) -> Result<(), ReadError> {
        self.renewal.begin();
        match self.connect() {
            Ok(clients) => {
                self.continue_with(clients)?;
                self.renewal.end();
            }
            Err(error) => {
                self.renewal.failed();
                tracing::warn!(
                    error = %error_chain(&error),
                    "cannot replace the consumer of a follower; trying again later"
                );
            }
        }
        Ok(())
    }

    fn connect(&self) -> Result<(FollowConsumer, Option<Describing>), ReadError> {
        let describing = self.describing.as_ref().map(|_| create_describing(&self.config));
        Ok((
            create_consumer(&self.config, &self.waker)?,
            describing.transpose()?,
        ))
    }

    fn continue_with(
        &mut self,
        (consumer, describing): (FollowConsumer, Option<Describing>),
    ) -> Result<(), ReadError> {
        let starts: Vec<Start> = self
            .partitions
            .drain(..)
            .map(|followed| Start {
                topic: followed.topic,
                partition: followed.partition,
                from: followed.next,
            })
            .collect();
        (self.consumer, self.describing) = (consumer, describing);
        self.assign(&starts)
    }

    /// Visits events until the visitor breaks. If there are none, waits for up to `wait`. Events that were not visited
    /// follow with the next call.
    ///
    /// # Errors
    /// On a fatal error of the client.
    pub fn poll(
        &mut self,
        wait: Duration,
        mut visit: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.waker.attach_current_thread();
        if self.renewal.is_due() {
            self.renew_credentials()?;
        }
        // The main queue contains only callbacks and errors of the whole client.
        if let Some(Err(error)) = self.consumer.poll(Duration::ZERO) {
            fatal(error)?;
        }
        let mut is_idle = true;
        let partitions = self.partitions.len();
        for step in 0..partitions {
            let index = (self.first + step) % partitions;
            let (count, flow) = self.partitions[index].drain(self.consumer.context(), &mut visit)?;
            is_idle &= count == 0;
            self.turns += 1;
            if flow.is_break() {
                self.first = index + 1;
                break;
            }
        }
        if self.turns >= partitions {
            self.turns = 0;
            self.rounds += 1;
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
            list.add_partition_offset(
                &start.topic,
                start.partition,
                start.from.map_or(Offset::Beginning, Offset::Offset),
            )
            .map_err(&assigning)?;
            // The queue is split before fetching begins, so that all records arrive in it.
            let queue = self.consumer.split_partition_queue(&start.topic, start.partition);
            let mut queue = queue.ok_or_else(|| assigning(KafkaError::Canceled))?;
            let waker = self.waker.clone();
            queue.set_nonempty_callback(move || waker.wake());
            self.partitions.push(FollowedPartition {
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

    fn drop_partitions(&mut self, should_drop: impl Fn(&Arc<str>, i32) -> bool) -> Result<(), ReadError> {
        let mut list = TopicPartitionList::new();
        self.partitions.retain(|followed| {
            let should_drop = should_drop(&followed.topic, followed.partition);
            if should_drop {
                list.add_partition(&followed.topic, followed.partition);
            }
            !should_drop
        });
        if list.count() == 0 {
            return Ok(());
        }
        self.consumer
            .incremental_unassign(&list)
            .map_err(kafka("unassigning"))
    }
}

impl FollowedPartition {
    /// Visits up to [`MAX_RECORDS`] events. Returns their number, and whether the visitor has stopped.
    fn drain(
        &mut self,
        context: &EndContext,
        visit: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(usize, ControlFlow<()>), ReadError> {
        for count in 0..MAX_RECORDS {
            let event = match self.queue.poll(Duration::ZERO) {
                None => return Ok((count, ControlFlow::Continue(()))),
                Some(Ok(message)) => {
                    self.next = Some(message.offset() + 1);
                    Event::Record(convert::record(&message, &self.topic))
                }
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    // An end without an offset says nothing.
                    let Some(offset) = context.take_end() else {
                        continue;
                    };
                    Event::End {
                        topic: self.topic.clone(),
                        partition: self.partition,
                        offset,
                    }
                }
                Some(Err(error)) => match error_code(&error) {
                    Some(code) if is_refusal(code) => Event::Refused {
                        topic: self.topic.clone(),
                        partition: self.partition,
                        error: code,
                        is_denied: code == RDKafkaErrorCode::TopicAuthorizationFailed,
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
        Ok((MAX_RECORDS, ControlFlow::Continue(())))
    }
}

fn create_consumer(config: &ClientSettings, waker: &Waker) -> Result<FollowConsumer, ReadError> {
    let waker = waker.clone();
    config
        .create_shared(EndContext::default(), |consumer| {
            consumer.set_nonempty_callback(move || waker.wake());
        })
        .map_err(kafka("creating a consumer"))
}

fn create_describing(config: &ClientSettings) -> Result<Describing, ReadError> {
    let created = config.create_with_context(EndContext::default());
    created.map_err(kafka("creating a client"))
}

/// Whether an error concerns only one partition.
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

/// Returns fatal errors. The client recovers from all others by itself.
fn fatal(error: KafkaError) -> Result<(), ReadError> {
    match error_code(&error) {
        Some(RDKafkaErrorCode::Fatal | RDKafkaErrorCode::FencedInstanceId) => Err(kafka("polling")(error)),
        _ => {
            tracing::debug!(%error, "consumer error");
            Ok(())
        }
    }
}
