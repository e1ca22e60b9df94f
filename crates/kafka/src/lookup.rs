//! Reads single records by offset.

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
    /// A read_committed consumer. Does not wait for a connection.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        Self::with_isolation(settings, "read_committed")
    }

    /// Also sees records of transactions that are open or aborted, so it does not wait for the end of a transaction.
    ///
    /// # Errors
    /// As for [`Lookup::new`].
    pub fn uncommitted(settings: &KafkaSettings) -> Result<Self, ReadError> {
        Self::with_isolation(settings, "read_uncommitted")
    }

    fn with_isolation(settings: &KafkaSettings, isolation: &str) -> Result<Self, ReadError> {
        let mut config = settings.reader(isolation);
        config
            // The default waits longer for a missing topic, in case it was just created.
            .set("topic.metadata.propagation.max.ms", "1000")
            // Prefetch little. The broker returns a larger record nevertheless.
            .set("fetch.message.max.bytes", "262144")
            .set("queued.min.messages", "1");
        Ok(Self {
            consumer: config
                .create_with_context(EndContext::default())
                .map_err(kafka("creating a consumer"))?,
        })
    }

    /// The records at these positions, in the same order; `None` where the consumer sees no record. Blocks.
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
        for indexes in partitions.values_mut() {
            indexes.sort_unstable_by_key(|index| positions[*index].offset);
            let visited = self.visit_partition(positions, indexes, deadline, |index, stored| {
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
    /// one record more than fits is in memory. Fast if positions in the same partition follow each other in the order of their offsets.
    ///
    /// # Errors
    /// As for [`Lookup::get`].
    pub fn get_first(
        &self,
        positions: &[Position],
        bytes: usize,
        timeout: Duration,
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let deadline = Instant::now() + timeout;
        let (mut found, mut size) = (Vec::new(), 0);
        let runs = positions.chunk_by(|one, next| {
            one.topic == next.topic && one.partition == next.partition && one.offset <= next.offset
        });
        let mut result = Ok(());
        for run in runs {
            let indexes: Vec<usize> = (0..run.len()).collect();
            let visited = self.visit_partition(run, &indexes, deadline, |_, stored| {
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
                    result = Err(error);
                    break;
                }
            }
        }
        self.consumer.unassign().map_err(kafka("unassigning"))?;
        result.map(|()| found)
    }

    /// Visits the records at these positions of one partition, in the order of `indexes`, which must be that of the offsets.
    fn visit_partition(
        &self,
        positions: &[Position],
        indexes: &[usize],
        deadline: Instant,
        mut visit: impl FnMut(usize, Option<StoredRecord>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, ReadError> {
        // The next offset that the client returns, once a partition is assigned.
        let mut next: Option<i64> = None;
        // The last record read, while its offset is at or after the current position.
        let mut ahead: Option<StoredRecord> = None;
        for index in indexes {
            let position = &positions[*index];
            if ahead
                .as_ref()
                .is_some_and(|ahead| ahead.record.position.offset < position.offset)
            {
                ahead = None;
            }
            if ahead.is_none() {
                let is_near = next.is_some_and(|next| (0..NEAR).contains(&(position.offset - next)));
                if !is_near {
                    self.assign(position)?;
                }
                ahead = self.read_up_to(position, deadline)?;
                next = ahead.as_ref().map(|ahead| ahead.record.position.offset + 1);
            }
            let stored = ahead
                .as_ref()
                .filter(|ahead| ahead.record.position.offset == position.offset);
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
