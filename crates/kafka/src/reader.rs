//! Reads topics outside of any consumer group: whole topics, new records as they arrive, and the committed positions of
//! groups.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionListElem};
use rdkafka::types::RDKafkaRespErr;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use crate::client::{ClientSettings, KafkaSettings};
use crate::convert;
use crate::credentials::Renewal;
use crate::describe::describe_topics;
use crate::partition_end::{AtEnd, EndContext, at_end};
use crate::recovery::error_code;
use crate::tracker::Committed;

/// Why topics could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A topic is missing.
    #[error("topic `{0}` does not exist")]
    Missing(String),
    /// Kafka does not let this client see a topic, so that nobody knows whether it exists.
    #[error("Kafka does not let this client see the topic `{0}` (Describe)")]
    Denied(String),
    /// A partition has no leader, or its leader does not answer.
    #[error("{topic}/{partition} has no leader, or its leader does not answer")]
    NoLeader {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
    },
    /// A topic was deleted and created again while it was read.
    #[error("topic `{0}` was deleted and created again")]
    Recreated(String),
    /// The broker or the client returned an error.
    #[error("{step}")]
    Kafka {
        /// The operation that failed.
        step: &'static str,
        /// The cause.
        source: KafkaError,
    },
    /// The metadata of a committed offset is not text.
    #[error("the metadata of the committed offset of {topic}/{partition} is not UTF-8")]
    Metadata {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
    },
    /// The timeout passed before the end of a partition was reached.
    #[error("timed out before reaching {topic}/{partition}/{end}")]
    Late {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The end offset to reach.
        end: i64,
    },
}

impl ReadError {
    /// Whether Kafka does not let this client see or read the topic.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        match self {
            Self::Denied(_) => true,
            Self::Kafka { source, .. } => {
                error_code(source) == Some(RDKafkaErrorCode::TopicAuthorizationFailed)
            }
            Self::Missing(_)
            | Self::NoLeader { .. }
            | Self::Recreated(_)
            | Self::Metadata { .. }
            | Self::Late { .. } => false,
        }
    }
}
type TopicPartition = (String, i32);

/// Timeout of one request.
pub(crate) const CALL: Duration = Duration::from_secs(10);
/// The first time between two looks whether a transaction is still open, which doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest one.
const LAST_PAUSE: Duration = Duration::from_millis(20);
/// After this time without records, the consumer is replaced.
const STALL: Duration = Duration::from_secs(8);

pub(crate) fn kafka(step: &'static str) -> impl Fn(KafkaError) -> ReadError {
    move |source| ReadError::Kafka { step, source }
}

type EndConsumer = KafkaClient<Arc<BaseConsumer<EndContext>>>;

/// The configuration of a consumer that reads from leaders only.
fn leader_config(settings: &KafkaSettings, isolation: &str) -> ClientSettings {
    let mut config = settings.reader(isolation);
    // A follower knows the end of a partition later than the leader. The reader would wait for it.
    config.remove("client.rack");
    for (name, value) in [
        // The client notices the end of a partition by a fetch without records, for which the broker waits. A reader fetches only while it reads to an end.
        ("fetch.wait.max.ms", "1"),
        // For each partition. The default of 64 MiB would be most of the memory of a process that reads a long topic.
        ("queued.max.messages.kbytes", "8192"),
    ] {
        if !settings.properties.contains_key(name) {
            config.set(name, value);
        }
    }
    config
}

fn create_consumer(settings: &KafkaSettings, isolation: &str) -> Result<EndConsumer, ReadError> {
    leader_config(settings, isolation)
        .create_shared(EndContext::default(), |_| ())
        .map_err(kafka("creating a consumer"))
}

pub(crate) fn partition_count<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
) -> Result<i32, ReadError> {
    let metadata = consumer
        .fetch_metadata(Some(topic), CALL)
        .map_err(kafka("requesting the partitions of a topic"))?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    if found.is_some_and(|found| is_denied(found.error())) {
        return Err(ReadError::Denied(topic.to_owned()));
    }
    let found = found.filter(|found| !found.partitions().is_empty());
    let found = found.ok_or_else(|| ReadError::Missing(topic.to_owned()))?;
    Ok(i32::try_from(found.partitions().len()).unwrap_or(i32::MAX))
}

fn is_denied(error: Option<RDKafkaRespErr>) -> bool {
    error.is_some_and(|error| RDKafkaErrorCode::from(error) == RDKafkaErrorCode::TopicAuthorizationFailed)
}

/// The number of partitions of a topic. Blocks. For several topics, one [`PartitionCounts`] is faster.
///
/// # Errors
/// If the broker does not answer or the topic is missing.
pub fn partitions(settings: &KafkaSettings, topic: &str) -> Result<i32, ReadError> {
    PartitionCounts::new(settings)?.of(topic)
}

/// A client that tells the numbers of partitions of topics.
pub struct PartitionCounts(EndConsumer);

impl PartitionCounts {
    /// Creates the client without connecting to the broker.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        create_consumer(settings, "read_committed").map(Self)
    }

    /// The number of partitions of a topic. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer or the topic is missing.
    pub fn of(&self, topic: &str) -> Result<i32, ReadError> {
        partition_count(&self.0, topic)
    }
}

/// How far a partition was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadTo {
    /// The topic.
    pub topic: TopicId,
    /// The next offset to read.
    pub offset: i64,
}

/// Reads topics up to their current end, as a read_committed consumer. Each call continues where the previous one ended.
pub struct TopicReader {
    settings: KafkaSettings,
    committed: EndConsumer,
    uncommitted: EndConsumer,
    topics: BTreeMap<String, Arc<str>>,
    positions: BTreeMap<(String, i32), Offset>,
    /// See [`TopicReader::expect_id`].
    ids: BTreeMap<String, TopicId>,
}

impl TopicReader {
    /// A reader that begins at the beginning of these topics.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing.
    pub fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let committed = create_consumer(settings, "read_committed")?;
        let mut positions = BTreeMap::new();
        for topic in topics {
            for partition in 0..partition_count(&committed, topic)? {
                positions.insert((topic.to_string(), partition), Offset::Beginning);
            }
        }
        Ok(Self {
            settings: settings.clone(),
            committed,
            uncommitted: create_consumer(settings, "read_uncommitted")?,
            topics: topics
                .iter()
                .map(|topic| (topic.to_string(), topic.clone()))
                .collect(),
            positions,
            ids: BTreeMap::new(),
        })
    }

    /// A reader of one partition that begins at an offset; `None` means the beginning.
    ///
    /// # Errors
    /// If the broker does not answer or the partition does not exist.
    pub fn of_partition(
        settings: &KafkaSettings,
        topic: &Arc<str>,
        partition: i32,
        from: Option<i64>,
    ) -> Result<Self, ReadError> {
        let committed = create_consumer(settings, "read_committed")?;
        if partition >= partition_count(&committed, topic)? {
            return Err(ReadError::Missing(format!("{topic}` partition `{partition}")));
        }
        let from = from.map_or(Offset::Beginning, Offset::Offset);
        Ok(Self {
            settings: settings.clone(),
            committed,
            uncommitted: create_consumer(settings, "read_uncommitted")?,
            topics: [(topic.to_string(), topic.clone())].into(),
            positions: [((topic.to_string(), partition), from)].into(),
            ids: BTreeMap::new(),
        })
    }

    /// A reader of one partition that continues where another one ended: the result is true. If it cannot, it begins at the beginning: the topic is or may be
    /// another one, or Kafka does not have the records from there on any more.
    ///
    /// # Errors
    /// If the broker does not answer or the partition does not exist.
    pub fn continuing(
        settings: &KafkaSettings,
        topic: &Arc<str>,
        partition: i32,
        from: Option<ReadTo>,
    ) -> Result<(Self, bool), ReadError> {
        let mut reader = Self::of_partition(settings, topic, partition, None)?;
        let Some(from) = from else {
            return Ok((reader, false));
        };
        let watermarks = reader.uncommitted.fetch_watermarks(topic, partition, CALL);
        let (low, high) = watermarks.map_err(kafka("requesting the ends of a partition"))?;
        let continues = (low..=high).contains(&from.offset) && reader.known_id(topic) == Some(from.topic);
        if continues {
            reader.expect_id(topic, Some(from.topic));
            reader.seek(topic, partition, from.offset);
        }
        Ok((reader, continues))
    }

    /// A reader of one partition that begins at the first record with this timestamp or a later one, and not before an offset.
    ///
    /// # Errors
    /// If the broker does not answer or the partition does not exist.
    pub fn of_partition_since(
        settings: &KafkaSettings,
        topic: &Arc<str>,
        partition: i32,
        since: Timestamp,
        from: i64,
    ) -> Result<Self, ReadError> {
        let mut reader = Self::of_partition(settings, topic, partition, Some(from))?;
        let watermarks = reader.committed.fetch_watermarks(topic, partition, CALL);
        let (low, high) = watermarks.map_err(kafka("requesting the ends of a partition"))?;
        let found = offsets_since(&reader.committed, topic, [partition], since)?;
        let since = found.get(&partition).copied().unwrap_or(high);
        reader.seek(topic, partition, since.max(from).max(low));
        Ok(reader)
    }

    /// The offset of the first record with this timestamp or a later one; `None` if there is none yet.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn offset_of_time(
        &self,
        topic: &str,
        partition: i32,
        time: Timestamp,
    ) -> Result<Option<i64>, ReadError> {
        let found = offsets_since(&self.committed, topic, [partition], time)?;
        Ok(found.get(&partition).copied())
    }

    /// A reader of existing partitions that begins at offsets that are in range.
    ///
    /// # Errors
    /// If a client cannot be created.
    pub(crate) fn from_offsets(
        settings: &KafkaSettings,
        from: impl IntoIterator<Item = ((String, i32), i64)>,
    ) -> Result<Self, ReadError> {
        let positions: BTreeMap<_, _> = from
            .into_iter()
            .map(|(partition, offset)| (partition, Offset::Offset(offset)))
            .collect();
        let topics = positions
            .keys()
            .map(|(topic, _)| (topic.clone(), topic.as_str().into()));
        Ok(Self {
            settings: settings.clone(),
            committed: create_consumer(settings, "read_committed")?,
            uncommitted: create_consumer(settings, "read_uncommitted")?,
            topics: topics.collect(),
            positions,
            ids: BTreeMap::new(),
        })
    }

    /// Reads also the partitions that its topics have got since it was created, from their beginning. It goes on reading those that it knows, also if a broker
    /// with old metadata does not know them.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing. The partitions are then looked up by the next call.
    pub fn follow_partitions(&mut self) -> Result<(), ReadError> {
        for topic in self.topics.keys() {
            for partition in 0..partition_count(&self.committed, topic)? {
                let position = self.positions.entry((topic.clone(), partition));
                position.or_insert(Offset::Beginning);
            }
        }
        Ok(())
    }

    /// The id of the cluster; `None` if no broker tells it in time.
    #[must_use]
    pub fn cluster_id(&self) -> Option<String> {
        self.committed.client().fetch_cluster_id(CALL)
    }

    /// The id of a topic; `None` if the broker does not know the topic, or does not support ids (before Kafka 2.8).
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn topic_id(&self, topic: &str) -> Result<Option<TopicId>, ReadError> {
        // The embedded broker answers no administrative requests, and its topics are never deleted.
        if self.settings.takes_all_partitions {
            return Ok(None);
        }
        let failed = |code| kafka("requesting the id of a topic")(KafkaError::AdminOp(code));
        let described = describe_topics(self.committed.client(), &[topic], CALL).map_err(failed)?;
        let described = described.into_values().next().transpose().map_err(failed)?;
        Ok(described.and_then(|described| described.id))
    }

    /// The id of a topic; `None` if it is unknown, also because the broker does not tell it: nobody is kept from reading by that.
    #[must_use]
    pub fn known_id(&self, topic: &str) -> Option<TopicId> {
        self.topic_id(topic).unwrap_or_else(|error| {
            tracing::debug!(topic, %error, "cannot read the id of a topic");
            None
        })
    }

    /// From now on, reads fail with [`ReadError::Recreated`] unless the topic has this id after them: what was read is then of another topic, at least in part, although
    /// the client has noticed nothing. `None`: the id is unknown, and nothing is compared.
    pub fn expect_id(&mut self, topic: &str, id: Option<TopicId>) {
        match id {
            Some(id) => drop(self.ids.insert(topic.to_owned(), id)),
            None => drop(self.ids.remove(topic)),
        }
    }

    /// Compares the topics with what [`TopicReader::expect_id`] says about them.
    ///
    /// # Errors
    /// If the broker does not answer, or a topic is missing or another one.
    pub fn check_ids(&self) -> Result<(), ReadError> {
        self.ids
            .iter()
            .try_for_each(|(topic, expected)| match self.topic_id(topic)? {
                Some(id) if id == *expected => Ok(()),
                Some(_) => Err(ReadError::Recreated(topic.clone())),
                None => Err(ReadError::Missing(topic.clone())),
            })
    }

    /// The number of partitions of a topic that it reads.
    #[must_use]
    pub fn partitions(&self, topic: &str) -> i32 {
        let of_topic = self.positions.keys().filter(|(name, _)| name == topic);
        i32::try_from(of_topic.count()).unwrap_or(i32::MAX)
    }

    /// Reads also the partitions of a topic with lower numbers than this one, from their beginning. A broker with old metadata may not know them yet: reading then
    /// fails.
    pub fn expect_partitions(&mut self, topic: &str, count: i32) {
        for partition in 0..count {
            let position = self.positions.entry((topic.to_owned(), partition));
            position.or_insert(Offset::Beginning);
        }
    }

    /// From now on, reads only this partition of one of its topics, beginning at an offset.
    pub fn seek(&mut self, topic: &str, partition: i32, from: i64) {
        self.positions = [((topic.to_owned(), partition), Offset::Offset(from))].into();
    }

    /// The end of a partition, including open transactions.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn high_watermark(&self, topic: &str, partition: i32) -> Result<i64, ReadError> {
        let watermarks = self.uncommitted.fetch_watermarks(topic, partition, CALL);
        let (_, end) = watermarks.map_err(kafka("requesting the end of a partition"))?;
        Ok(end)
    }

    /// The next offset to read of a partition; `None` before its first record was read.
    #[must_use]
    pub fn position(&self, topic: &str, partition: i32) -> Option<i64> {
        let position = self.positions.get(&(topic.to_owned(), partition))?;
        match position {
            Offset::Offset(offset) => Some(*offset),
            _ => None,
        }
    }

    /// Reads everything that was written before this call. Partitions are read in no particular order. Waits for
    /// transactions that are open now.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached within `timeout`.
    pub fn read_to_end(&mut self, timeout: Duration, mut visit: impl FnMut(Record)) -> Result<(), ReadError> {
        self.read_while(timeout, |record| {
            visit(record);
            ControlFlow::Continue(())
        })
    }

    /// As [`TopicReader::read_to_end`], but for topics of any size: each time, the timeout only limits how long the reader may make no
    /// progress. Returns [`ReadError::Late`] early if `stop` says so between two parts.
    ///
    /// # Errors
    /// If the broker returns an error, or if the reader makes no progress within `timeout`.
    pub fn read_to_end_in_parts(
        &mut self,
        timeout: Duration,
        stop: impl Fn() -> bool,
        mut visit: impl FnMut(Record),
    ) -> Result<(), ReadError> {
        loop {
            let before = self.positions.clone();
            match self.read_to_end(timeout, &mut visit) {
                Err(ReadError::Late { .. }) if self.positions != before && !stop() => {}
                read => return read,
            }
        }
    }

    /// As [`TopicReader::read_to_end`], but ends when the visitor breaks.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached within `timeout`.
    pub fn read_while(
        &mut self,
        timeout: Duration,
        mut visit: impl FnMut(Record) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let deadline = Instant::now() + timeout;
        let ends = self.stable_ends(deadline)?;
        let visit = |record: Option<Record>| record.map_or(ControlFlow::Continue(()), &mut visit);
        self.read_up_to(ends, false, deadline, visit)
    }

    /// As [`TopicReader::read_while`], but does not wait for open transactions, and reads each partition up to this offset at most. One record after it
    /// may be visited. Returns whether a transaction that is open now hides records before it.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached within `timeout`.
    pub fn read_stable(
        &mut self,
        limit: Option<i64>,
        timeout: Duration,
        mut visit: impl FnMut(Record) -> ControlFlow<()>,
    ) -> Result<bool, ReadError> {
        let deadline = Instant::now() + timeout;
        let limit = limit.unwrap_or(i64::MAX);
        let (mut ends, mut are_hidden) = (BTreeMap::new(), false);
        for ((topic, partition), position) in self.positions.clone() {
            let (low, end) = watermarks(&self.uncommitted, &topic, partition, deadline)?;
            // For a read_committed client, the broker returns the last stable offset instead of the high watermark.
            let (_, stable) = watermarks(&self.committed, &topic, partition, deadline)?;
            are_hidden |= stable < end.min(limit);
            let end = stable.min(limit);
            if end > low && position.to_raw().is_none_or(|at| at < end) {
                ends.insert((topic, partition), end);
            }
        }
        let visit = |record: Option<Record>| record.map_or(ControlFlow::Continue(()), &mut visit);
        self.read_up_to(ends, true, deadline, visit)?;
        Ok(are_hidden)
    }

    /// Reads a part of each partition, up to these ends, which are at most the ends of the partitions. One record after the
    /// part may be visited. Does not wait for open transactions. Visits `None` while no record arrives, so that a visitor can give
    /// up.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached within `timeout`.
    pub(crate) fn read_parts(
        &mut self,
        ends: BTreeMap<(String, i32), i64>,
        timeout: Duration,
        visit: impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.read_up_to(ends, true, Instant::now() + timeout, visit)
    }

    /// Reads partitions up to these ends. `are_parts`: the ends may be before those of the partitions.
    fn read_up_to(
        &mut self,
        ends: BTreeMap<(String, i32), i64>,
        are_parts: bool,
        deadline: Instant,
        mut visit: impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let unread = ends.into_iter().map(|((topic, partition), end)| Unread {
            topic,
            partition,
            end,
            is_part: are_parts,
            queue: None,
        });
        let mut unread: Vec<Unread> = unread.collect();
        while !unread.is_empty() {
            if Instant::now() > deadline {
                let Unread {
                    topic,
                    partition,
                    end,
                    ..
                } = unread.swap_remove(0);
                return Err(ReadError::Late {
                    topic,
                    partition,
                    end,
                });
            }
            if self
                .read_until_stalled(&mut unread, deadline, &mut visit)?
                .is_break()
            {
                break;
            }
        }
        self.check_ids()
    }

    /// Reads until all ends are reached or no record has arrived for a while. In the latter case it replaces the consumer:
    /// after a restart of the broker, a fetch may hang forever.
    fn read_until_stalled(
        &mut self,
        unread: &mut Vec<Unread>,
        deadline: Instant,
        visit: &mut impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, ReadError> {
        let consumer = self.committed.clone();
        let mut list = TopicPartitionList::new();
        for partition in &mut *unread {
            let position = self.positions[&partition.key()];
            list.add_partition_offset(&partition.topic, partition.partition, position)
                .map_err(kafka("assigning"))?;
            // With a separate queue, an end-of-partition event can be attributed to its partition.
            let queue = consumer.split_partition_queue(&partition.topic, partition.partition);
            partition.queue = Some(queue.ok_or_else(|| kafka("splitting a queue")(KafkaError::Canceled))?);
        }
        consumer.assign(&list).map_err(kafka("assigning"))?;
        let mut last_progress = Instant::now();
        let mut flow = ControlFlow::Continue(());
        while !unread.is_empty()
            && flow.is_continue()
            && last_progress.elapsed() < STALL
            && Instant::now() < deadline
        {
            if let Some(Err(source)) = consumer.poll(Duration::ZERO) {
                ignore_transient(source)?;
            }
            let mut progress = false;
            let mut index = 0;
            while index < unread.len() && flow.is_continue() {
                match self.drain(&unread[index], &mut progress, visit)? {
                    Drained::Partly => index += 1,
                    Drained::ToEnd => drop(unread.swap_remove(index)),
                    Drained::Stopped => flow = ControlFlow::Break(()),
                }
            }
            if progress {
                last_progress = Instant::now();
            } else if visit(None).is_break() {
                flow = ControlFlow::Break(());
            } else {
                std::thread::park_timeout(Duration::from_millis(2));
            }
        }
        consumer.unassign().map_err(kafka("unassigning"))?;
        for partition in &mut *unread {
            partition.queue = None;
        }
        if last_progress.elapsed() >= STALL {
            self.committed = create_consumer(&self.settings, "read_committed")?;
        }
        Ok(flow)
    }

    /// Visits the records in the queue of a partition.
    fn drain(
        &mut self,
        unread: &Unread,
        progress: &mut bool,
        visit: &mut impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<Drained, ReadError> {
        let Some(queue) = &unread.queue else {
            return Ok(Drained::Partly);
        };
        let shared = self.topics[&unread.topic].clone();
        let mut next = self.positions[&unread.key()];
        let mut drained = Drained::Partly;
        for _ in 0..5000 {
            match queue.poll(Duration::ZERO) {
                Some(Ok(message)) => {
                    next = Offset::Offset(message.offset() + 1);
                    if visit(Some(convert::record(&message, &shared))).is_break() {
                        drained = Drained::Stopped;
                        break;
                    }
                    if unread.is_part && message.offset() + 1 >= unread.end {
                        // The partition remains assigned, so the client would fetch more of it.
                        let mut read = TopicPartitionList::new();
                        read.add_partition(&unread.topic, unread.partition);
                        self.committed.pause(&read).map_err(kafka("pausing"))?;
                        drained = Drained::ToEnd;
                        break;
                    }
                }
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    let read = match next {
                        Offset::Offset(next) => Some(next),
                        _ => None,
                    };
                    match at_end(read, self.committed.context().take_end(), unread.end) {
                        AtEnd::Reached { next: end } => {
                            next = Offset::Offset(end);
                            drained = Drained::ToEnd;
                            break;
                        }
                        AtEnd::ReadOn { next: read } => {
                            next = read.map_or(next, Offset::Offset);
                            tracing::debug!(
                                topic = unread.topic,
                                partition = unread.partition,
                                position = read,
                                end = unread.end,
                                "broker does not know the end of the partition yet; waiting for more"
                            );
                        }
                    }
                }
                Some(Err(source)) => ignore_transient(source)?,
                None => break,
            }
        }
        *progress |= next != self.positions[&unread.key()] || drained == Drained::ToEnd;
        self.positions.insert(unread.key(), next);
        Ok(drained)
    }

    /// Waits until no transaction before the current ends of the partitions is open, and returns the ends of those that have records to read.
    fn stable_ends(&self, deadline: Instant) -> Result<BTreeMap<TopicPartition, i64>, ReadError> {
        let all: Vec<&TopicPartition> = self.positions.keys().collect();
        let mut ends = bounds(&self.uncommitted, &all, Offset::End, deadline)?;
        let is_before = |partition: &TopicPartition, end: i64| {
            let position = self.positions.get(partition).and_then(|offset| offset.to_raw());
            position.is_none_or(|position| position < end)
        };
        ends.retain(|partition, end| is_before(partition, *end));
        let unread: Vec<&TopicPartition> = self
            .positions
            .keys()
            .filter(|key| ends.contains_key(*key))
            .collect();
        let lows = bounds(&self.uncommitted, &unread, Offset::Beginning, deadline)?;
        ends.retain(|partition, end| lows.get(partition).is_some_and(|low| low < end));
        let mut stable_ends = BTreeMap::new();
        let mut pause = FIRST_PAUSE;
        loop {
            let open: Vec<&TopicPartition> = ends
                .keys()
                .filter(|key| !stable_ends.contains_key(*key))
                .collect();
            // For a read_committed client, the broker returns the last stable offset instead of the high watermark.
            let found = bounds(&self.committed, &open, Offset::End, deadline)?;
            let reached = found.into_iter();
            stable_ends.extend(reached.filter(|(partition, stable)| stable >= &ends[partition]));
            let Some(open) = ends.keys().find(|key| !stable_ends.contains_key(*key)) else {
                return Ok(stable_ends);
            };
            if Instant::now() > deadline {
                let (topic, partition) = open.clone();
                return Err(ReadError::Late {
                    topic,
                    partition,
                    end: ends[open],
                });
            }
            // The markers of a transaction that was just committed arrive within a few milliseconds.
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

/// The offsets at one end of partitions: for [`Offset::End`], a read_committed client gets the last stable offsets. One request for each leader. Retries
/// transient errors, such as a change of the leader, until the deadline.
pub(crate) fn bounds<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[&TopicPartition],
    end: Offset,
    deadline: Instant,
) -> Result<BTreeMap<TopicPartition, i64>, ReadError> {
    let failed = kafka("requesting the ends of partitions");
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        // In the request, -2 and -1 in place of a timestamp mean the first offset and the end.
        list.add_partition_offset(topic, *partition, end)
            .map_err(&failed)?;
    }
    loop {
        if partitions.is_empty() {
            return Ok(BTreeMap::new());
        }
        let (topics, error) = match consumer.offsets_for_times(list.clone(), CALL / 5) {
            Ok(found) => match offsets_of(&found) {
                Ok(offsets) => return Ok(offsets),
                Err(failure) => failure,
            },
            Err(error) => (partitions.iter().map(|(topic, _)| topic.clone()).collect(), error),
        };
        if !is_temporary(&error) || Instant::now() >= deadline {
            return Err(failed(error));
        }
        tracing::debug!(%error, "cannot read the ends of partitions; retrying");
        std::thread::park_timeout(Duration::from_millis(50));
        // Without fetches in progress, the client does not look for new leaders by itself.
        for topic in &topics {
            if consumer.fetch_metadata(Some(topic), CALL / 5).is_err() || Instant::now() >= deadline {
                break;
            }
        }
    }
}

/// The offsets in a response; or, if some partitions have none, their topics and one of the errors: one that does not end by itself, if there is one.
fn offsets_of(
    found: &TopicPartitionList,
) -> Result<BTreeMap<TopicPartition, i64>, (BTreeSet<String>, KafkaError)> {
    let (mut offsets, mut topics, mut worst) = (BTreeMap::new(), BTreeSet::new(), None);
    for element in found.elements() {
        let offset = element.error().and_then(|()| match element.offset() {
            Offset::Offset(offset) => Ok(offset),
            _ => Err(KafkaError::OffsetFetch(RDKafkaErrorCode::OffsetNotAvailable)),
        });
        match offset {
            Ok(offset) => {
                offsets.insert((element.topic().to_owned(), element.partition()), offset);
            }
            Err(error) => {
                topics.insert(element.topic().to_owned());
                if worst.is_none() || !is_temporary(&error) {
                    worst = Some(error);
                }
            }
        }
    }
    worst.map_or(Ok(offsets), |error| Err((topics, error)))
}

/// Whether a request for an end can succeed later.
fn is_temporary(error: &KafkaError) -> bool {
    is_transient(error) || is_unknown(error)
}

/// The offsets of the first records with this timestamp or a later one. Leaves out partitions whose records are all older.
pub(crate) fn offsets_since<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partitions: impl IntoIterator<Item = i32>,
    since: Timestamp,
) -> Result<BTreeMap<i32, i64>, ReadError> {
    let failed = kafka("looking up an offset by time");
    let mut times = TopicPartitionList::new();
    for partition in partitions {
        // Negative times have other meanings.
        let since = Offset::Offset(since.as_millis().max(0));
        times
            .add_partition_offset(topic, partition, since)
            .map_err(&failed)?;
    }
    let found = consumer.offsets_for_times(times, CALL).map_err(&failed)?;
    let mut offsets = BTreeMap::new();
    for element in found.elements() {
        element.error().map_err(&failed)?;
        if let Offset::Offset(offset) = element.offset() {
            offsets.insert(element.partition(), offset);
        }
    }
    Ok(offsets)
}

/// The first and the end offset of a partition. Retries transient errors, such as a change of the leader, until the deadline.
pub(crate) fn watermarks<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
    deadline: Instant,
) -> Result<(i64, i64), ReadError> {
    loop {
        match consumer.fetch_watermarks(topic, partition, CALL / 5) {
            Ok(watermarks) => return Ok(watermarks),
            Err(error) if is_temporary(&error) && Instant::now() < deadline => {
                tracing::debug!(topic, partition, %error, "cannot read the end of a partition; retrying");
                std::thread::park_timeout(Duration::from_millis(50));
                // Without fetches in progress, the client does not look for a new leader by itself.
                let _ = consumer.fetch_metadata(Some(topic), CALL / 5);
            }
            Err(error) => return Err(kafka("requesting the end of a partition")(error)),
        }
    }
}

/// How far the queue of a partition was read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drained {
    Partly,
    ToEnd,
    /// The visitor broke.
    Stopped,
}

/// A partition that has not been read to its end.
struct Unread {
    topic: String,
    partition: i32,
    end: i64,
    /// The end may be before that of the partition.
    is_part: bool,
    queue: Option<PartitionQueue<EndContext>>,
}

impl Unread {
    fn key(&self) -> (String, i32) {
        (self.topic.clone(), self.partition)
    }
}

/// Reads topics continuously, in order of arrival.
pub struct TopicTail {
    config: ClientSettings,
    renewal: Renewal,
    consumer: KafkaClient<BaseConsumer>,
    topics: BTreeMap<String, Arc<str>>,
    /// The next offset to return of each partition.
    positions: BTreeMap<(String, i32), Offset>,
}

impl TopicTail {
    /// Begins at the beginning of these topics.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing.
    pub fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let config = Self::config(settings);
        Self::follow(settings, config, topics, |_, _, _| Ok(Offset::Beginning))
    }

    /// Begins at the current end of these topics. Returns all records written after this call returns, and possibly a few
    /// that were written during it.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing.
    pub fn from_end(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let mut config = Self::config(settings);
        // A tail is idle most of the time, so longer waits save requests. The broker answers at once when there are records.
        config.set("fetch.wait.max.ms", "500");
        // The end is requested here: the client would look it up after this call has returned, and miss records.
        Self::follow(settings, config, topics, |consumer, topic, partition| {
            let watermarks = consumer.fetch_watermarks(topic, partition, CALL);
            let (_, end) = watermarks.map_err(kafka("requesting the end of a partition"))?;
            Ok(Offset::Offset(end))
        })
    }

    fn config(settings: &KafkaSettings) -> ClientSettings {
        let mut config = settings.reader("read_committed");
        config.set("enable.partition.eof", "false");
        config
    }

    fn follow(
        settings: &KafkaSettings,
        config: ClientSettings,
        topics: &[Arc<str>],
        start: impl Fn(&BaseConsumer, &str, i32) -> Result<Offset, ReadError>,
    ) -> Result<Self, ReadError> {
        let renewal = Renewal::new(settings, "tail");
        let consumer: KafkaClient<BaseConsumer> = config.create().map_err(kafka("creating a consumer"))?;
        let mut positions = BTreeMap::new();
        for topic in topics {
            for partition in 0..partition_count(&consumer, topic)? {
                let start = start(&consumer, topic, partition)?;
                positions.insert((topic.to_string(), partition), start);
            }
        }
        let topics = topics
            .iter()
            .map(|topic| (topic.to_string(), topic.clone()))
            .collect();
        let tail = Self {
            config,
            renewal,
            consumer,
            topics,
            positions,
        };
        tail.assign(&tail.consumer)?;
        Ok(tail)
    }

    fn assign(&self, consumer: &BaseConsumer) -> Result<(), ReadError> {
        let mut list = TopicPartitionList::new();
        for ((topic, partition), position) in &self.positions {
            list.add_partition_offset(topic, *partition, *position)
                .map_err(kafka("assigning"))?;
        }
        consumer.assign(&list).map_err(kafka("assigning"))
    }

    /// Continues with a new client where the previous one was, or with the previous one if there can be no new one.
    fn renew(&mut self) {
        self.renewal.begin();
        match self.new_consumer() {
            Ok(consumer) => {
                self.consumer = consumer;
                self.renewal.end();
            }
            Err(error) => {
                self.renewal.failed();
                tracing::warn!(error = %error_chain(&error), "cannot replace the consumer of a tail; trying again later");
            }
        }
    }

    fn new_consumer(&self) -> Result<KafkaClient<BaseConsumer>, ReadError> {
        let consumer = self.config.create().map_err(kafka("creating a consumer"))?;
        self.assign(&consumer)?;
        Ok(consumer)
    }

    /// The next record; `None` if none arrives within `wait`.
    ///
    /// # Errors
    /// If the broker returns a permanent error.
    pub fn next(&mut self, wait: Duration) -> Result<Option<Record>, ReadError> {
        if self.renewal.is_due() {
            self.renew();
        }
        match self.consumer.poll(wait) {
            Some(Ok(message)) => {
                let topic = rdkafka::Message::topic(&message);
                if let Some(position) = self.positions.get_mut(&(topic.to_owned(), message.partition())) {
                    *position = Offset::Offset(message.offset() + 1);
                }
                let topic = self.topics.get(topic).cloned().unwrap_or_else(|| topic.into());
                Ok(Some(convert::record(&message, &topic)))
            }
            Some(Err(source)) => ignore_transient(source).map(|()| None),
            None => Ok(None),
        }
    }
}

/// A consumer that reads and writes the committed offsets of a group without joining it. With the isolation `read_committed`,
/// it waits for open transactions that commit offsets of the group.
pub(crate) fn group_consumer(
    settings: &KafkaSettings,
    group: &str,
    isolation: &str,
) -> Result<KafkaClient<BaseConsumer>, ReadError> {
    let mut config = settings.reader(isolation);
    config.set("group.id", group);
    config.create().map_err(kafka("creating a consumer"))
}

/// The committed offsets of the consumer's group.
pub(crate) fn committed_offsets(
    consumer: &BaseConsumer,
    topics: &[Arc<str>],
) -> Result<TopicPartitionList, ReadError> {
    let mut list = TopicPartitionList::new();
    for topic in topics {
        list.add_partition_range(topic, 0, partition_count(consumer, topic)? - 1);
    }
    let deadline = Instant::now() + 3 * CALL;
    loop {
        // While a transaction that commits an offset is open, the request for it fails.
        let committed = consumer.committed_offsets(list.clone(), CALL);
        let stable = committed.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(TopicPartitionListElem::error)?;
            Ok(list)
        });
        match stable {
            Ok(list) => return Ok(list),
            Err(error) if Instant::now() > deadline => {
                return Err(kafka("requesting committed offsets")(error));
            }
            Err(error) => tracing::debug!(%error, "cannot read committed offsets; retrying"),
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

/// The committed positions of a consumer group by topic and partition; `None` where it has committed nothing.
///
/// # Errors
/// If the broker does not answer or a topic is missing.
pub fn group_positions(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
) -> Result<BTreeMap<(String, i32), Option<Committed>>, ReadError> {
    positions(settings, group, topics, "read_committed")
}

/// As [`group_positions`]. With the isolation `read_uncommitted`, does not wait for the end of a transaction that commits others.
pub(crate) fn positions(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
    isolation: &str,
) -> Result<BTreeMap<(String, i32), Option<Committed>>, ReadError> {
    let consumer = group_consumer(settings, group, isolation)?;
    let list = committed_offsets(&consumer, topics)?;
    let mut positions = BTreeMap::new();
    for element in list.elements() {
        let position = match element.offset() {
            Offset::Offset(offset) => Some(committed(offset, &metadata(&element))),
            _ => None,
        };
        positions.insert((element.topic().to_owned(), element.partition()), position);
    }
    Ok(positions)
}

/// The metadata of a committed position.
pub(crate) fn metadata(element: &TopicPartitionListElem<'_>) -> String {
    // The client library panics on metadata that is not UTF-8.
    catch_unwind(AssertUnwindSafe(|| element.metadata().to_owned()))
        .unwrap_or_else(|_| "not UTF-8".to_owned())
}

/// Decodes a committed position. Metadata of other programs is ignored, with a log line.
pub(crate) fn committed(offset: i64, metadata: &str) -> Committed {
    Committed::decode(offset, metadata).unwrap_or_else(|error| {
        tracing::error!(
            offset, %error,
            "cannot decode the metadata of a committed offset; completed records after it may be processed again"
        );
        Committed::at(offset)
    })
}

/// Returns permanent errors. The client recovers from others by itself.
fn ignore_transient(error: KafkaError) -> Result<(), ReadError> {
    if is_transient(&error) {
        tracing::debug!(%error, "consumer error");
        Ok(())
    } else {
        Err(kafka("polling")(error))
    }
}

/// Whether the broker does not know the topic or partition. One that has just started may not know it yet.
pub(crate) fn is_unknown(error: &KafkaError) -> bool {
    matches!(
        error_code(error),
        Some(
            RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownTopicOrPartition
        )
    )
}

fn is_transient(error: &KafkaError) -> bool {
    matches!(
        error_code(error),
        Some(
            RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::RequestTimedOut
                | RDKafkaErrorCode::NotLeaderForPartition
                | RDKafkaErrorCode::LeaderNotAvailable
                | RDKafkaErrorCode::ReplicaNotAvailable
                | RDKafkaErrorCode::KafkaStorageError
                // The client and a broker do not know of the same change of the leader yet.
                | RDKafkaErrorCode::FencedLeaderEpoch
                | RDKafkaErrorCode::UnknownLeaderEpoch
                // A new leader does not know the end yet.
                | RDKafkaErrorCode::OffsetNotAvailable
                | RDKafkaErrorCode::DestroyBroker
                | RDKafkaErrorCode::Resolve
        )
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use bytes::Bytes;
    use redeliver_core::{Headers, Output};

    use super::*;
    use crate::embedded::EmbeddedBroker;
    use crate::producer::Producer;

    const DEADLINE: Duration = Duration::from_secs(30);

    fn write(settings: &KafkaSettings, topic: &Arc<str>, count: usize) {
        let producer = Producer::new(settings).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let output = Output {
            topic: topic.clone(),
            partition: Some(0),
            key: None,
            value: Some(Bytes::from_static(b"v")),
            headers: Headers::new(),
        };
        let sending = (0..count).map(|_| producer.send(&output));
        let written = runtime.block_on(futures::future::try_join_all(sending));
        assert_eq!(written.unwrap().len(), count);
    }

    /// A broker whose high watermark lags behind, as that of a new leader, reports an end of partition below the end that was
    /// looked up. Here the lookup is replaced: the partition ends at 5, and 10 is to be reached.
    #[test]
    fn requests_for_ends_are_repeated_after_a_change_of_the_leader_and_not_if_they_are_denied() {
        use RDKafkaErrorCode as Code;
        let is_temporary = |code| super::is_temporary(&KafkaError::MetadataFetch(code));
        for code in [
            Code::NotLeaderForPartition,
            Code::LeaderNotAvailable,
            Code::FencedLeaderEpoch,
            Code::UnknownLeaderEpoch,
            Code::OffsetNotAvailable,
        ] {
            assert!(is_temporary(code), "{code:?}");
        }
        assert!(!is_temporary(Code::TopicAuthorizationFailed));
    }

    #[test]
    fn an_end_of_partition_below_the_end_to_reach_is_not_taken_for_it() {
        let topic: Arc<str> = "lagging".into();
        let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
        let settings = KafkaSettings::new(broker.brokers(), "test");
        write(&settings, &topic, 5);
        let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
        let (reported, is_reported) = mpsc::sync_channel(16);
        reader.committed.context().report_ends_to(reported);
        let (mut offsets, mut ends) = (Vec::new(), Vec::new());
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                // The other records become visible after the first end of partition.
                let first = is_reported.recv_timeout(DEADLINE).unwrap();
                write(&settings, &topic, 5);
                (first, is_reported)
            });
            let end = BTreeMap::from([((topic.to_string(), 0), 10)]);
            let read = reader.read_up_to(end, false, Instant::now() + DEADLINE, |record| {
                offsets.extend(record.map(|record| record.position.offset));
                ControlFlow::Continue(())
            });
            read.unwrap();
            let (first, others) = writer.join().unwrap();
            ends.push(first);
            ends.extend(others.try_iter());
        });
        assert_eq!(offsets, (0..10).collect::<Vec<i64>>());
        assert_eq!((ends.first(), ends.last()), (Some(&5), Some(&10)), "{ends:?}");
        assert_eq!(reader.position(&topic, 0), Some(10));
    }

    #[test]
    fn a_reader_times_out_if_the_end_is_not_reached() {
        let topic: Arc<str> = "short".into();
        let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
        let settings = KafkaSettings::new(broker.brokers(), "test");
        write(&settings, &topic, 3);
        let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
        let end = BTreeMap::from([((topic.to_string(), 0), 4)]);
        let deadline = Instant::now() + Duration::from_secs(1);
        let read = reader.read_up_to(end, false, deadline, |_| ControlFlow::Continue(()));
        assert!(matches!(read, Err(ReadError::Late { end: 4, .. })), "{read:?}");
        // It continues where it stopped.
        assert_eq!(reader.position(&topic, 0), Some(3));
    }

    #[test]
    fn a_topic_that_takes_long_is_read_in_parts_as_long_as_there_is_progress() {
        let topic: Arc<str> = "large".into();
        let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
        let settings = KafkaSettings::new(broker.brokers(), "test");
        // More than the reader visits between two looks at the clock.
        let count = 5_500;
        write(&settings, &topic, count);
        let timeout = Duration::from_secs(2);
        let read = |is_stopped| {
            let mut reader = TopicReader::of_partition(&settings, &topic, 0, None).unwrap();
            let mut visited = 0;
            let read = reader.read_to_end_in_parts(
                timeout,
                || is_stopped,
                |_| {
                    visited += 1;
                    let began = Instant::now();
                    while visited == 1 && began.elapsed() <= timeout {
                        thread::park_timeout(timeout);
                    }
                },
            );
            (read, visited)
        };
        let (read_to_end, visited) = read(false);
        assert!(read_to_end.is_ok(), "{read_to_end:?}");
        assert_eq!(visited, count);
        let (stopped, visited) = read(true);
        assert!(matches!(stopped, Err(ReadError::Late { .. })), "{stopped:?}");
        assert!(visited < count);
    }

    #[test]
    fn a_reader_that_is_moved_reads_only_what_it_was_moved_to() {
        let topic: Arc<str> = "moved".into();
        let broker = EmbeddedBroker::start(&[(topic.to_string(), 2)]).unwrap();
        let settings = KafkaSettings::new(broker.brokers(), "test");
        write(&settings, &topic, 5);
        let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
        let mut read = |from: Option<(i32, i64)>| {
            if let Some((partition, offset)) = from {
                reader.seek(&topic, partition, offset);
            }
            let mut offsets = Vec::new();
            let visit = |record: Record| offsets.push(record.position.offset);
            reader.read_to_end(DEADLINE, visit).unwrap();
            offsets
        };
        assert_eq!(read(None), [0, 1, 2, 3, 4]);
        assert_eq!(read(Some((0, 3))), [3, 4]);
        assert_eq!(read(Some((1, 0))), [0_i64; 0]);
        assert_eq!(read(Some((0, 4))), [4]);
    }

    #[test]
    fn readers_fetch_from_leaders_only() {
        let mut settings = KafkaSettings::new("localhost:9092", "test");
        settings.properties.insert("client.rack".into(), "a".into());
        assert_eq!(
            leader_config(&settings, "read_committed").get("client.rack"),
            None
        );
        assert_eq!(settings.client().get("client.rack"), Some("a"));
    }
}
