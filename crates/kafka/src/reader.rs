//! Reading topics outside of any consumer group: whole topics for audits, new records for narration, and
//! the positions of other groups.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _, DefaultConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use rdkafka::{ClientConfig, TopicPartitionList};
use redeliver_core::Record;

use crate::client::KafkaSettings;
use crate::convert;
use crate::tracker::Committed;

/// Topics could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A topic is missing.
    #[error("topic `{0}` does not exist")]
    Missing(String),
    /// The broker or the client refused.
    #[error("{step}")]
    Kafka {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: KafkaError,
    },
    /// The end was not reached in time.
    #[error("the end of topic `{topic}` partition {partition} ({end}) was not reached in time")]
    Late {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The end that should have been reached.
        end: i64,
    },
}

/// How long one answer of the broker may take.
const CALL: Duration = Duration::from_secs(10);
/// How long a fetch may bring nothing before it is given up for a new one.
const STALL: Duration = Duration::from_secs(8);

pub(crate) fn kafka(step: &'static str) -> impl Fn(KafkaError) -> ReadError {
    move |source| ReadError::Kafka { step, source }
}

pub(crate) fn client(settings: &KafkaSettings, isolation: &str) -> ClientConfig {
    let mut config = settings.client();
    config
        .set("group.id", "redeliver-reader")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("isolation.level", isolation)
        // An offset that the log does not have is an error for whoever asked for it, never a silent jump.
        .set("auto.offset.reset", "error")
        .set("enable.partition.eof", "true")
        .set("allow.auto.create.topics", "false")
        .set("fetch.wait.max.ms", "10")
        .set("fetch.queue.backoff.ms", "1");
    config
}

fn make(settings: &KafkaSettings, isolation: &str) -> Result<BaseConsumer, ReadError> {
    client(settings, isolation)
        .create()
        .map_err(kafka("making a consumer"))
}

fn partition_count(consumer: &BaseConsumer, topic: &str) -> Result<i32, ReadError> {
    let metadata = consumer
        .fetch_metadata(Some(topic), CALL)
        .map_err(kafka("asking for the partitions of a topic"))?;
    let found = metadata
        .topics()
        .iter()
        .find(|found| found.name() == topic && !found.partitions().is_empty());
    let found = found.ok_or_else(|| ReadError::Missing(topic.to_owned()))?;
    Ok(i32::try_from(found.partitions().len()).unwrap_or(i32::MAX))
}

/// How many partitions a topic has. Blocks while the broker is asked.
///
/// # Errors
/// When the broker does not answer or the topic is missing.
pub fn partitions(settings: &KafkaSettings, topic: &str) -> Result<i32, ReadError> {
    partition_count(&make(settings, "read_committed")?, topic)
}

/// Reads topics to their present end, as a read_committed consumer sees them. Later calls go on where the
/// last one ended.
pub struct TopicReader {
    settings: KafkaSettings,
    committed: Arc<BaseConsumer>,
    uncommitted: BaseConsumer,
    topics: BTreeMap<String, Arc<str>>,
    positions: BTreeMap<(String, i32), Offset>,
}

impl TopicReader {
    /// A reader at the beginning of these topics.
    ///
    /// # Errors
    /// When the broker does not answer or a topic is missing.
    pub fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let committed = make(settings, "read_committed")?;
        let mut positions = BTreeMap::new();
        for topic in topics {
            for partition in 0..partition_count(&committed, topic)? {
                positions.insert((topic.to_string(), partition), Offset::Beginning);
            }
        }
        Ok(Self {
            settings: settings.clone(),
            committed: Arc::new(committed),
            uncommitted: make(settings, "read_uncommitted")?,
            topics: topics
                .iter()
                .map(|topic| (topic.to_string(), topic.clone()))
                .collect(),
            positions,
        })
    }

    /// A reader of one partition from an offset on; `None` is its beginning.
    ///
    /// # Errors
    /// When the broker does not answer or there is no such partition.
    pub fn of_partition(
        settings: &KafkaSettings,
        topic: &Arc<str>,
        partition: i32,
        from: Option<i64>,
    ) -> Result<Self, ReadError> {
        let committed = make(settings, "read_committed")?;
        if partition >= partition_count(&committed, topic)? {
            return Err(ReadError::Missing(format!("{topic}` partition `{partition}")));
        }
        let from = from.map_or(Offset::Beginning, Offset::Offset);
        Ok(Self {
            settings: settings.clone(),
            committed: Arc::new(committed),
            uncommitted: make(settings, "read_uncommitted")?,
            topics: [(topic.to_string(), topic.clone())].into(),
            positions: [((topic.to_string(), partition), from)].into(),
        })
    }

    /// A reader of partitions of existing topics, each from an offset on that is still there.
    ///
    /// # Errors
    /// When a client cannot be made.
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
            committed: Arc::new(make(settings, "read_committed")?),
            uncommitted: make(settings, "read_uncommitted")?,
            topics: topics.collect(),
            positions,
        })
    }

    /// The end of a partition, open transactions included.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub fn high_watermark(&self, topic: &str, partition: i32) -> Result<i64, ReadError> {
        let watermarks = self.uncommitted.fetch_watermarks(topic, partition, CALL);
        let (_, end) = watermarks.map_err(kafka("asking for the end of a partition"))?;
        Ok(end)
    }

    /// The next offset to be read of a partition; `None` before anything of it was read.
    #[must_use]
    pub fn position(&self, topic: &str, partition: i32) -> Option<i64> {
        let position = self.positions.get(&(topic.to_owned(), partition))?;
        match position {
            Offset::Offset(offset) => Some(*offset),
            _ => None,
        }
    }

    /// Reads everything that was written before this call, in no particular order between partitions.
    /// Transactions that are open now are waited for.
    ///
    /// # Errors
    /// When the broker refuses or the ends are not reached within `timeout`.
    pub fn read_to_end(&mut self, timeout: Duration, mut visit: impl FnMut(Record)) -> Result<(), ReadError> {
        self.read_while(timeout, |record| {
            visit(record);
            ControlFlow::Continue(())
        })
    }

    /// The same, as long as there is somebody to read for: a visitor that breaks has seen its last record.
    ///
    /// # Errors
    /// When the broker refuses or the ends are not reached within `timeout`.
    pub fn read_while(
        &mut self,
        timeout: Duration,
        mut visit: impl FnMut(Record) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let deadline = Instant::now() + timeout;
        let mut unread = Vec::new();
        for ((topic, partition), position) in self.positions.clone() {
            let end = self.stable_end(&topic, partition, deadline)?;
            if let Some(end) = end.filter(|end| position.to_raw().is_none_or(|at| at < *end)) {
                unread.push(Unread {
                    topic,
                    partition,
                    end,
                    queue: None,
                });
            }
        }
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
        Ok(())
    }

    /// Reads until nothing is left or nothing has come for a while. Then there is a new consumer: a fetch
    /// that a restart of the broker left behind may never end.
    fn read_until_stalled(
        &mut self,
        unread: &mut Vec<Unread>,
        deadline: Instant,
        visit: &mut impl FnMut(Record) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, ReadError> {
        let consumer = self.committed.clone();
        let mut list = TopicPartitionList::new();
        for partition in &mut *unread {
            let position = self.positions[&partition.key()];
            list.add_partition_offset(&partition.topic, partition.partition, position)
                .map_err(kafka("assigning"))?;
            // With a queue of its own, a partition's end-of-partition event says whose end it is.
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
                passing(source)?;
            }
            let mut progress = false;
            let mut index = 0;
            while index < unread.len() && flow.is_continue() {
                match self.drain(&unread[index], &mut progress, visit)? {
                    Drained::Partly => index += 1,
                    Drained::ToItsEnd => drop(unread.swap_remove(index)),
                    Drained::Unwanted => flow = ControlFlow::Break(()),
                }
            }
            if progress {
                last_progress = Instant::now();
            } else {
                std::thread::park_timeout(Duration::from_millis(2));
            }
        }
        consumer.unassign().map_err(kafka("unassigning"))?;
        for partition in &mut *unread {
            partition.queue = None;
        }
        if last_progress.elapsed() >= STALL {
            self.committed = Arc::new(make(&self.settings, "read_committed")?);
        }
        Ok(flow)
    }

    /// Visits what a partition's queue holds.
    fn drain(
        &mut self,
        unread: &Unread,
        progress: &mut bool,
        visit: &mut impl FnMut(Record) -> ControlFlow<()>,
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
                    if visit(convert::record(&message, &shared)).is_break() {
                        drained = Drained::Unwanted;
                        break;
                    }
                }
                // The end was known before the first fetch, so this end is that one or a later one; records
                // may end before it, as markers of transactions are not delivered.
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    next = Offset::Offset(next.to_raw().unwrap_or(0).max(unread.end));
                    drained = Drained::ToItsEnd;
                    break;
                }
                Some(Err(source)) => passing(source)?,
                None => break,
            }
        }
        *progress |= next != self.positions[&unread.key()] || drained == Drained::ToItsEnd;
        self.positions.insert(unread.key(), next);
        Ok(drained)
    }

    /// The end of a partition, once no transaction before it is open; nothing when it is empty.
    fn stable_end(&self, topic: &str, partition: i32, deadline: Instant) -> Result<Option<i64>, ReadError> {
        let (low, end) = watermarks(&self.uncommitted, topic, partition, deadline)?;
        if end <= low {
            return Ok(None);
        }
        loop {
            // A read_committed client is told the last stable offset instead of the high watermark.
            let (_, stable) = watermarks(&self.committed, topic, partition, deadline)?;
            if stable >= end {
                return Ok(Some(stable));
            }
            if Instant::now() > deadline {
                return Err(ReadError::Late {
                    topic: topic.to_owned(),
                    partition,
                    end,
                });
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
}

/// Beginning and end of a partition. A leader that does not answer is asked again, or another one in its place,
/// until the deadline.
fn watermarks(
    consumer: &BaseConsumer,
    topic: &str,
    partition: i32,
    deadline: Instant,
) -> Result<(i64, i64), ReadError> {
    loop {
        match consumer.fetch_watermarks(topic, partition, CALL / 5) {
            Ok(watermarks) => return Ok(watermarks),
            Err(error) if (passes(&error) || is_unknown(&error)) && Instant::now() < deadline => {
                tracing::debug!(topic, partition, %error, "asking for the end again");
                std::thread::park_timeout(Duration::from_millis(50));
                // A client that reads nothing at the moment does not look for a new leader by itself.
                let _ = consumer.fetch_metadata(Some(topic), CALL / 5);
            }
            Err(error) => return Err(kafka("asking for the end of a partition")(error)),
        }
    }
}

/// How far a partition's queue was emptied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drained {
    Partly,
    ToItsEnd,
    /// The visitor wants no more.
    Unwanted,
}

/// A partition that is being read.
struct Unread {
    topic: String,
    partition: i32,
    /// The end that was asked for.
    end: i64,
    queue: Option<PartitionQueue<DefaultConsumerContext>>,
}

impl Unread {
    fn key(&self) -> (String, i32) {
        (self.topic.clone(), self.partition)
    }
}

/// New records of topics, as they come, in the order in which they come in.
pub struct TopicTail {
    consumer: BaseConsumer,
    topics: BTreeMap<String, Arc<str>>,
}

impl TopicTail {
    /// Follows these topics from their beginning.
    ///
    /// # Errors
    /// When the broker does not answer or a topic is missing.
    pub fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let config = Self::config(settings);
        Self::follow(&config, topics, |_, _, _| Ok(Offset::Beginning))
    }

    /// Follows these topics from their present end: what is written after this call returns is seen, and of
    /// what was written before at most a few records.
    ///
    /// # Errors
    /// When the broker does not answer or a topic is missing.
    pub fn from_end(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let mut config = Self::config(settings);
        // A tail is idle most of the time, and an answer of the broker does not wait for this long when there
        // is something to tell.
        config.set("fetch.wait.max.ms", "500");
        // The end is asked for here: an end that the client looks up by itself would be a later one.
        Self::follow(&config, topics, |consumer, topic, partition| {
            let asked = consumer.fetch_watermarks(topic, partition, CALL);
            let (_, end) = asked.map_err(kafka("asking for the end of a partition"))?;
            Ok(Offset::Offset(end))
        })
    }

    fn config(settings: &KafkaSettings) -> ClientConfig {
        let mut config = client(settings, "read_committed");
        config.set("enable.partition.eof", "false");
        config
    }

    fn follow(
        config: &ClientConfig,
        topics: &[Arc<str>],
        start: impl Fn(&BaseConsumer, &str, i32) -> Result<Offset, ReadError>,
    ) -> Result<Self, ReadError> {
        let consumer: BaseConsumer = config.create().map_err(kafka("making a consumer"))?;
        let mut list = TopicPartitionList::new();
        for topic in topics {
            for partition in 0..partition_count(&consumer, topic)? {
                let start = start(&consumer, topic, partition)?;
                list.add_partition_offset(topic, partition, start)
                    .map_err(kafka("assigning"))?;
            }
        }
        consumer.assign(&list).map_err(kafka("assigning"))?;
        let topics = topics
            .iter()
            .map(|topic| (topic.to_string(), topic.clone()))
            .collect();
        Ok(Self { consumer, topics })
    }

    /// The next record, or nothing when none comes within `wait`.
    ///
    /// # Errors
    /// When the broker refuses.
    pub fn next(&mut self, wait: Duration) -> Result<Option<Record>, ReadError> {
        match self.consumer.poll(wait) {
            Some(Ok(message)) => {
                let topic = rdkafka::Message::topic(&message);
                let topic = self.topics.get(topic).cloned().unwrap_or_else(|| topic.into());
                Ok(Some(convert::record(&message, &topic)))
            }
            Some(Err(source)) => passing(source).map(|()| None),
            None => Ok(None),
        }
    }
}

/// Where a consumer group stands in topics: what it has committed, per topic and partition; `None` where it
/// has committed nothing.
///
/// # Errors
/// When the broker does not answer, a topic is missing, or an offset carries metadata that is not ours.
pub fn group_positions(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
) -> Result<BTreeMap<(String, i32), Option<Committed>>, ReadError> {
    let mut config = client(settings, "read_committed");
    config.set("group.id", group);
    let consumer: BaseConsumer = config.create().map_err(kafka("making a consumer"))?;
    let mut list = TopicPartitionList::new();
    for topic in topics {
        list.add_partition_range(topic, 0, partition_count(&consumer, topic)? - 1);
    }
    let asking = kafka("asking for committed offsets");
    let deadline = Instant::now() + 3 * CALL;
    let list = loop {
        // An offset whose transaction is open is not stable yet, which passes.
        let asked = consumer.committed_offsets(list.clone(), CALL);
        let settled = asked.and_then(|list| {
            list.elements()
                .iter()
                .try_for_each(rdkafka::topic_partition_list::TopicPartitionListElem::error)?;
            Ok(list)
        });
        match settled {
            Ok(list) => break list,
            Err(error) if Instant::now() > deadline => return Err(asking(error)),
            Err(error) => tracing::debug!(%error, "committed offsets are not known yet"),
        }
        std::thread::park_timeout(Duration::from_millis(50));
    };
    let mut positions = BTreeMap::new();
    for element in list.elements() {
        let position = match element.offset() {
            Offset::Offset(offset) => Some(committed(offset, || element.metadata().to_owned())),
            _ => None,
        };
        positions.insert((element.topic().to_owned(), element.partition()), position);
    }
    Ok(positions)
}

/// A committed position from its offset and metadata. Metadata that another tool wrote tells nothing about
/// records behind the offset. The client library panics on metadata that is not UTF-8.
pub(crate) fn committed(offset: i64, metadata: impl Fn() -> String) -> Committed {
    let metadata = catch_unwind(AssertUnwindSafe(metadata)).unwrap_or_else(|_| "not UTF-8".to_owned());
    Committed::decode(offset, &metadata).unwrap_or_else(|error| {
        tracing::error!(
            offset, %error,
            "the metadata of a committed offset was not written by redeliver; records behind it that are done may be done again"
        );
        Committed::at(offset)
    })
}

/// Errors that the client gets over by itself.
fn passing(error: KafkaError) -> Result<(), ReadError> {
    if passes(&error) {
        tracing::debug!(%error, "reader");
        Ok(())
    } else {
        Err(kafka("polling")(error))
    }
}

/// A broker that has just started may not know yet what it holds.
pub(crate) fn is_unknown(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownTopicOrPartition
        )
    )
}

fn passes(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::RequestTimedOut
                | RDKafkaErrorCode::NotLeaderForPartition
                | RDKafkaErrorCode::LeaderNotAvailable
                // A leader that is new does not know the end yet.
                | RDKafkaErrorCode::OffsetNotAvailable
                | RDKafkaErrorCode::DestroyBroker
                | RDKafkaErrorCode::Resolve
        )
    )
}
