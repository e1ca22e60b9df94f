//! Reads single records by offset.

use std::collections::HashSet;
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

use crate::client::{KafkaSettings, QUEUED_RECORDS};
use crate::convert;
use crate::partition_end::EndContext;
use crate::reader::{At, ReadError, is_unknown, kafka, offset};
use crate::recovery::error_code;

/// Reads records by offset, one lookup at a time.
pub struct Lookup {
    consumer: KafkaClient<BaseConsumer<EndContext>>,
    /// The topics whose metadata the client has requested.
    known: HashSet<Arc<str>>,
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

/// What [`Lookup::find`] knows of a position.
#[derive(Clone, Debug)]
pub enum Found {
    /// Its record.
    Record(StoredRecord),
    /// Kafka has deleted its record with all before it, and will not return it any more.
    Deleted,
    /// Kafka has no record there, but those around it: it was compacted, or its transaction was aborted.
    Compacted,
    /// The broker does not know the partition, or one that ends before the position. Its metadata may be old, or the topic another one by now.
    Unknown,
}

/// Why the consumer sees no record at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    /// The consumer has read what follows the position.
    Passed,
    /// The position is before the first record of the partition, or after its end.
    OutOfRange,
    /// The partition ends before the position, or the broker does not know it.
    Unknown,
}

type Sought = Result<StoredRecord, Missing>;

/// For a distance up to this many offsets, reading on is faster than a new assignment.
const NEAR: i64 = 50;

impl Lookup {
    /// A read_committed consumer. Does not wait for a connection.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        // Prefetch little. The broker returns a larger record nevertheless.
        Self::with("read_committed", "262144", 1, "65536", settings)
    }

    /// Also sees records of transactions that are open or aborted, so it does not wait for the end of a transaction.
    ///
    /// # Errors
    /// As for [`Lookup::new`].
    pub fn uncommitted(settings: &KafkaSettings) -> Result<Self, ReadError> {
        Self::with("read_uncommitted", "262144", 1, "65536", settings)
    }

    /// A read_committed consumer for long runs of records, which it fetches while the previous ones are processed: up to about 8 MiB.
    ///
    /// # Errors
    /// As for [`Lookup::new`].
    pub fn for_runs(settings: &KafkaSettings) -> Result<Self, ReadError> {
        Self::with("read_committed", "1048576", QUEUED_RECORDS, "8192", settings)
    }

    fn with(
        isolation: &str,
        fetch_bytes: &str,
        records: u32,
        kibibytes: &str,
        settings: &KafkaSettings,
    ) -> Result<Self, ReadError> {
        let mut config = settings.reader(isolation);
        config
            // The default waits longer for a missing topic, in case it was just created.
            .set("topic.metadata.propagation.max.ms", "1000")
            .set("fetch.message.max.bytes", fetch_bytes)
            .set("queued.min.messages", records.to_string())
            .set("queued.max.messages.kbytes", kibibytes);
        Ok(Self {
            consumer: config
                .create_with_context(EndContext::default())
                .map_err(kafka("creating a consumer"))?,
            known: HashSet::new(),
            reading: Reading::default(),
        })
    }

    /// The records at these positions, in the same order; `None` where the consumer sees no record. Blocks.
    ///
    /// # Errors
    /// If they cannot be read within `timeout`.
    pub fn get(
        &mut self,
        positions: &[Position],
        timeout: Duration,
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let mut found: Vec<Option<StoredRecord>> = positions.iter().map(|_| None).collect();
        let mut sorted: Vec<(&Position, &mut Option<StoredRecord>)> =
            positions.iter().zip(&mut found).collect();
        sorted.sort_unstable_by_key(|(position, _)| *position);
        let visited = self.visit(sorted, Instant::now() + timeout, |found, sought| {
            *found = sought.ok();
            ControlFlow::Continue(())
        });
        self.stop_fetching()?;
        visited.map(|()| found)
    }

    /// What is known of these positions, which must be of one partition and in the order of their offsets. Returns that of the first ones, at least
    /// one: ends early when the time is over, so that a caller who goes on with the next ones always makes progress, and after a position that is
    /// [`Found::Unknown`]. Blocks.
    ///
    /// # Errors
    /// If nothing can be read within `timeout`.
    pub fn find(&mut self, positions: &[Position], timeout: Duration) -> Result<Vec<Found>, ReadError> {
        self.find_within(positions, usize::MAX, timeout)
    }

    /// As [`Lookup::find`], but ends once the records have this size together, in bytes.
    ///
    /// # Errors
    /// As for [`Lookup::find`].
    pub fn find_within(
        &mut self,
        positions: &[Position],
        bytes: usize,
        timeout: Duration,
    ) -> Result<Vec<Found>, ReadError> {
        let (mut sought, mut size) = (Vec::<Sought>::new(), 0);
        let all = positions.iter().map(|position| (position, ()));
        let visited = self.visit(all, Instant::now() + timeout, |(), found| {
            size += found.as_ref().map_or(0, |stored| stored.record.size());
            let is_last = matches!(found, Err(Missing::Unknown)) || size >= bytes;
            sought.push(found);
            if is_last {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        self.stop_fetching()?;
        if let (Err(error), true) = (visited, sought.is_empty()) {
            return Err(error);
        }
        let is_out_of_range = |found: &Sought| matches!(found, Err(Missing::OutOfRange));
        let low = match positions.first() {
            Some(Position { topic, partition, .. }) if sought.iter().any(is_out_of_range) => {
                let deadline = Instant::now() + timeout;
                offset(
                    &self.consumer,
                    (topic.clone(), *partition),
                    At::Beginning,
                    deadline,
                )?
            }
            _ => None,
        };
        let found = sought.into_iter().zip(positions);
        Ok(found
            .map(|(found, position)| found_at(found, position.offset, low))
            .collect())
    }

    /// As [`Lookup::get`], but ends once the records have this size together, in bytes: returns those at the first positions, at least one. Only
    /// one record more than fits is in memory, apart from what the client prefetches. Fast if positions in the same partition follow each other in the order of their
    /// offsets, also those of the next call: the client goes on fetching until [`Lookup::stop_fetching`].
    ///
    /// # Errors
    /// As for [`Lookup::get`].
    pub fn get_first(
        &mut self,
        positions: &[Position],
        bytes: usize,
        timeout: Duration,
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let (mut found, mut size) = (Vec::new(), 0);
        let all = positions.iter().map(|position| (position, ()));
        let visited = self.visit(all, Instant::now() + timeout, |(), sought| {
            let stored = sought.ok();
            size += stored.as_ref().map_or(0, |stored| stored.record.size());
            found.push(stored);
            if size < bytes {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        if let Err(error) = visited {
            self.stop_fetching()?;
            return Err(error);
        }
        Ok(found)
    }

    /// Stops fetching.
    ///
    /// # Errors
    /// If the client refuses.
    pub fn stop_fetching(&mut self) -> Result<(), ReadError> {
        self.reading = Reading::default();
        self.consumer.unassign().map_err(kafka("unassigning"))
    }

    /// Visits the records at these positions, until the visitor breaks.
    fn visit<'p, T>(
        &mut self,
        positions: impl IntoIterator<Item = (&'p Position, T)>,
        deadline: Instant,
        mut visit: impl FnMut(T, Sought) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let offset = |ahead: &StoredRecord| ahead.record.position.offset;
        for (position, tag) in positions {
            let is_assigned = |(topic, partition): &(Arc<str>, i32)| {
                *topic == position.topic && *partition == position.partition
            };
            if !self.reading.partition.as_ref().is_some_and(is_assigned) {
                self.reading = Reading {
                    partition: Some((position.topic.clone(), position.partition)),
                    ..Reading::default()
                };
            }
            let from = self.reading.from;
            let is_usable = |ahead: &StoredRecord| (from..=offset(ahead)).contains(&position.offset);
            // Unless it turns out that there is none, a record at or after the position is read.
            let mut missing = Missing::Passed;
            if !self.reading.ahead.as_ref().is_some_and(is_usable) {
                self.reading.ahead = None;
                let distance = self.reading.next.map(|next| position.offset - next);
                if !distance.is_some_and(|distance| (0..NEAR).contains(&distance)) {
                    self.assign(position, deadline)?;
                }
                self.reading.from = position.offset;
                match self.read_up_to(position, deadline)? {
                    Ok(ahead) => self.reading.ahead = Some(ahead),
                    Err(reason) => missing = reason,
                }
                self.reading.next = self.reading.ahead.as_ref().map(|ahead| offset(ahead) + 1);
            }
            let mut ahead = self.reading.ahead.iter();
            let stored = ahead.find(|ahead| offset(ahead) == position.offset);
            if visit(tag, stored.cloned().ok_or(missing)).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn assign(&mut self, position: &Position, deadline: Instant) -> Result<(), ReadError> {
        // The client looks for the leader of an assigned partition only once a second if it does not know the topic.
        if !self.known.contains(&position.topic) {
            let left = deadline.saturating_duration_since(Instant::now());
            let requested = self.consumer.fetch_metadata(Some(&position.topic), left);
            requested.map_err(kafka("requesting metadata"))?;
            self.known.insert(position.topic.clone());
        }
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

    /// The first record at or after a position, or why there is none.
    fn read_up_to(&self, position: &Position, deadline: Instant) -> Result<Sought, ReadError> {
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
                    return Ok(Ok(StoredRecord {
                        timestamp_type: convert::timestamp_type(message.timestamp()),
                        record: convert::record(&message, topic),
                    }));
                }
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    if let Some(missing) = self.at_end(position, deadline)? {
                        return Ok(Err(missing));
                    }
                }
                Some(Err(error)) => match error_code(&error) {
                    Some(RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::OffsetOutOfRange) => {
                        return Ok(Err(Missing::OutOfRange));
                    }
                    _ if is_unknown(&error) => return Ok(Err(Missing::Unknown)),
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

    /// What an end of partition says of a position; `None` if its record may still arrive.
    fn at_end(&self, position: &Position, deadline: Instant) -> Result<Option<Missing>, ReadError> {
        let after = position.offset.saturating_add(1);
        if self.consumer.context().take_end() >= Some(after) {
            return Ok(Some(Missing::Passed));
        }
        // The broker that served the fetch may not know all records yet. The leader knows the end, and so do later fetches.
        let partition = (position.topic.clone(), position.partition);
        match offset(&self.consumer, partition, At::End, deadline) {
            Ok(end) => Ok((end < Some(after)).then_some(Missing::Unknown)),
            Err(ReadError::Kafka { source, .. }) if is_unknown(&source) => Ok(Some(Missing::Unknown)),
            Err(error) => Err(error),
        }
    }
}

/// What is known of an offset. `low` is the first offset of the partition, if it was asked for.
fn found_at(sought: Sought, offset: i64, low: Option<i64>) -> Found {
    match sought {
        Ok(stored) => Found::Record(stored),
        Err(Missing::Passed) => Found::Compacted,
        Err(Missing::OutOfRange) if low.is_some_and(|low| offset < low) => Found::Deleted,
        Err(Missing::OutOfRange | Missing::Unknown) => Found::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_records_before_first_are_deleted() {
        for (missing, low, is_deleted) in [
            (Missing::Passed, None, false),
            (Missing::OutOfRange, Some(8), true),
            // After the end.
            (Missing::OutOfRange, Some(7), false),
            (Missing::OutOfRange, None, false),
            (Missing::Unknown, None, false),
            // The broker has learned of the partition since.
            (Missing::Unknown, Some(8), false),
        ] {
            let found = found_at(Err(missing), 7, low);
            assert_eq!(matches!(found, Found::Deleted), is_deleted, "{missing:?} {low:?}");
        }
    }
}
