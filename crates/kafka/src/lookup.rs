//! Reads single records by offset, as a read_committed consumer.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_core::{Position, Record, TimestampType};
use redeliver_kafka_ffi::KafkaClient;

use crate::client::KafkaSettings;
use crate::convert;
use crate::partition_end::{AtEnd, EndContext, at_end};
use crate::reader::{ReadError, is_unknown, kafka, watermarks};

/// Reads records by offset, one lookup at a time.
pub struct Lookup {
    consumer: KafkaClient<BaseConsumer<EndContext>>,
    /// What the last [`Lookup::get_first`] has left.
    reading: Reading,
}

/// What is assigned, and how far it was read.
#[derive(Default)]
struct Reading {
    partition: Option<(Arc<str>, i32)>,
    /// The next offset that the client returns.
    next: Option<i64>,
    /// The last record read: the first one at or after `from`.
    ahead: Option<StoredRecord>,
    from: i64,
}

/// A record, with what most readers do not need.
#[derive(Clone, Debug)]
pub struct StoredRecord {
    /// The record.
    pub record: Record,
    /// Who has set its timestamp; `None` if it has none.
    pub timestamp_type: Option<TimestampType>,
}

/// For a distance up to this many offsets, reading on is faster than a new assignment.
const NEAR: i64 = 50;

impl Lookup {
    /// Creates the client without connecting to the broker.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        // Prefetch little. The broker returns a larger record nevertheless.
        Self::with_prefetch(settings, "262144", "1", "65536")
    }

    /// For long runs of records, which the client fetches while the former ones are processed: up to about 8 MiB.
    ///
    /// # Errors
    /// As for [`Lookup::new`].
    pub fn for_runs(settings: &KafkaSettings) -> Result<Self, ReadError> {
        Self::with_prefetch(settings, "1048576", "5000", "8192")
    }

    fn with_prefetch(
        settings: &KafkaSettings,
        fetch_bytes: &str,
        records: &str,
        kibibytes: &str,
    ) -> Result<Self, ReadError> {
        let mut config = settings.reader("read_committed");
        config
            // The default waits longer for a missing topic, in case it was just created.
            .set("topic.metadata.propagation.max.ms", "1000")
            .set("fetch.message.max.bytes", fetch_bytes)
            .set("queued.min.messages", records)
            .set("queued.max.messages.kbytes", kibibytes);
        Ok(Self {
            consumer: config
                .create_with_context(EndContext::default())
                .map_err(kafka("creating a consumer"))?,
            reading: Reading::default(),
        })
    }

    /// The records at these positions, in the same order; `None` where a read_committed consumer sees no record. Blocks.
    ///
    /// # Errors
    /// If they cannot be read within `timeout`.
    pub fn get(
        &self,
        positions: &[Position],
        timeout: Duration,
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let deadline = Instant::now() + timeout;
        let mut found: Vec<Option<StoredRecord>> = positions.iter().map(|_| None).collect();
        let mut partitions: BTreeMap<(&str, i32), Vec<usize>> = BTreeMap::new();
        for (index, position) in positions.iter().enumerate() {
            partitions
                .entry((&position.topic, position.partition))
                .or_default()
                .push(index);
        }
        let mut result = Ok(());
        let mut reading = Reading::default();
        for indexes in partitions.values_mut() {
            indexes.sort_unstable_by_key(|index| positions[*index].offset);
            let visited =
                self.visit_partition(&mut reading, positions, indexes, deadline, |index, stored| {
                    found[index] = stored;
                    ControlFlow::Continue(())
                });
            if let Err(error) = visited {
                result = Err(error);
                break;
            }
        }
        self.consumer.unassign().map_err(kafka("unassigning"))?;
        result.map(|()| found)
    }

    /// As [`Lookup::get`], but ends once the records have this size together, in bytes: returns those at the first positions, at least one. Only
    /// one record more than fits is in memory, apart from what the client prefetches. Fast if positions in the same partition follow each other in the order of their
    /// offsets, also those of the next call: the client goes on fetching until [`Lookup::rest`].
    ///
    /// # Errors
    /// As for [`Lookup::get`].
    pub fn get_first(
        &mut self,
        positions: &[Position],
        bytes: usize,
        timeout: Duration,
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let deadline = Instant::now() + timeout;
        let (mut found, mut size) = (Vec::new(), 0);
        let runs = positions.chunk_by(|one, next| {
            one.topic == next.topic && one.partition == next.partition && one.offset <= next.offset
        });
        let mut reading = std::mem::take(&mut self.reading);
        for run in runs {
            let indexes: Vec<usize> = (0..run.len()).collect();
            let visited = self.visit_partition(&mut reading, run, &indexes, deadline, |_, stored| {
                size += stored.as_ref().map_or(0, |stored| stored.record.size());
                found.push(stored);
                if size < bytes {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            });
            match visited {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => break,
                Err(error) => {
                    self.rest()?;
                    return Err(error);
                }
            }
        }
        self.reading = reading;
        Ok(found)
    }

    /// Stops fetching.
    ///
    /// # Errors
    /// If the client refuses.
    pub fn rest(&mut self) -> Result<(), ReadError> {
        self.reading = Reading::default();
        self.consumer.unassign().map_err(kafka("unassigning"))
    }

    /// Visits the records at these positions of one partition, in the order of `indexes`, which must be that of the offsets.
    fn visit_partition(
        &self,
        reading: &mut Reading,
        positions: &[Position],
        indexes: &[usize],
        deadline: Instant,
        mut visit: impl FnMut(usize, Option<StoredRecord>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, ReadError> {
        for index in indexes {
            let position = &positions[*index];
            let is_assigned = reading.partition.as_ref().is_some_and(|(topic, partition)| {
                *topic == position.topic && *partition == position.partition
            });
            if !is_assigned {
                *reading = Reading {
                    partition: Some((position.topic.clone(), position.partition)),
                    ..Reading::default()
                };
            }
            let offset = |ahead: &StoredRecord| ahead.record.position.offset;
            let is_usable = |ahead: &StoredRecord| (reading.from..=offset(ahead)).contains(&position.offset);
            if !reading.ahead.as_ref().is_some_and(is_usable) {
                reading.ahead = None;
                let is_near = reading
                    .next
                    .is_some_and(|next| (0..NEAR).contains(&(position.offset - next)));
                if !is_near {
                    self.assign(position)?;
                }
                reading.from = position.offset;
                reading.ahead = self.read_up_to(position, deadline)?;
                reading.next = reading.ahead.as_ref().map(|ahead| offset(ahead) + 1);
            }
            let stored = reading
                .ahead
                .as_ref()
                .filter(|ahead| offset(ahead) == position.offset);
            if visit(*index, stored.cloned()).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn assign(&self, position: &Position) -> Result<(), ReadError> {
        let assigning = kafka("assigning");
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(
            &position.topic,
            position.partition,
            Offset::Offset(position.offset),
        )
        .map_err(&assigning)?;
        self.consumer.assign(&list).map_err(assigning)
    }

    /// The first record at or after a position; `None` if the partition ends before it or does not exist.
    fn read_up_to(&self, position: &Position, deadline: Instant) -> Result<Option<StoredRecord>, ReadError> {
        let topic: &Arc<str> = &position.topic;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ReadError::Late {
                    topic: topic.to_string(),
                    partition: position.partition,
                    end: position.offset,
                });
            }
            match self.consumer.poll(left.min(Duration::from_millis(100))) {
                Some(Ok(message))
                    if message.topic() != &**topic || message.partition() != position.partition => {}
                Some(Ok(message)) if message.offset() < position.offset => {}
                Some(Ok(message)) => {
                    return Ok(Some(StoredRecord {
                        timestamp_type: convert::timestamp_type(message.timestamp()),
                        record: convert::record(&message, topic),
                    }));
                }
                Some(Err(KafkaError::PartitionEOF(_))) if self.has_more(position, deadline)? => {}
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(None),
                Some(Err(error)) => match error.rdkafka_error_code() {
                    Some(
                        RDKafkaErrorCode::AutoOffsetReset
                        | RDKafkaErrorCode::OffsetOutOfRange
                        | RDKafkaErrorCode::UnknownTopic
                        | RDKafkaErrorCode::UnknownPartition
                        | RDKafkaErrorCode::UnknownTopicOrPartition,
                    ) => return Ok(None),
                    Some(RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::Fatal) => {
                        return Err(kafka("reading a record")(error));
                    }
                    // The client recovers from all others by itself, or the deadline passes.
                    _ => tracing::debug!(%error, "consumer error"),
                },
                None => {}
            }
        }
    }

    /// Whether the record at a position may still arrive after an end of partition.
    fn has_more(&self, position: &Position, deadline: Instant) -> Result<bool, ReadError> {
        let after = position.offset.saturating_add(1);
        let reported = self.consumer.context().take_end();
        if let AtEnd::Reached { .. } = at_end(None, reported, after) {
            return Ok(false);
        }
        // The broker that served the fetch may not know all records yet. The leader knows the end, and so do later fetches.
        match watermarks(&self.consumer, &position.topic, position.partition, deadline) {
            Ok((_, end)) => Ok(end >= after),
            Err(ReadError::Kafka { source, .. }) if is_unknown(&source) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
