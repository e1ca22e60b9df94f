//! Single records by their offsets, as a read_committed consumer sees them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_core::{Position, Record};

use crate::client::KafkaSettings;
use crate::convert;
use crate::reader::{ReadError, client, kafka};

/// Gets records by their offsets. One look at a time.
pub struct Lookup {
    consumer: BaseConsumer,
}

/// Records that are so near are read through rather than jumped over.
const NEAR: i64 = 50;

impl Lookup {
    /// Makes the client. The broker is not asked yet.
    ///
    /// # Errors
    /// When the client cannot be made from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ReadError> {
        let mut config = client(settings, "read_committed");
        config
            // A topic that is not there is not waited for as long as for one that was just made.
            .set("topic.metadata.propagation.max.ms", "1000")
            // Little is read ahead. A larger record is given nevertheless.
            .set("max.partition.fetch.bytes", "262144")
            .set("queued.min.messages", "1");
        Ok(Self {
            consumer: config.create().map_err(kafka("making a consumer"))?,
        })
    }

    /// The records at these positions, in their order; `None` where there is none that a read_committed
    /// consumer sees. Blocks while they are read.
    ///
    /// # Errors
    /// When they cannot be read within `timeout`.
    pub fn get(&self, wanted: &[Position], timeout: Duration) -> Result<Vec<Option<Record>>, ReadError> {
        let deadline = Instant::now() + timeout;
        let mut found: Vec<Option<Record>> = wanted.iter().map(|_| None).collect();
        let mut partitions: BTreeMap<(&str, i32), Vec<usize>> = BTreeMap::new();
        for (index, position) in wanted.iter().enumerate() {
            partitions
                .entry((&position.topic, position.partition))
                .or_default()
                .push(index);
        }
        let mut result = Ok(());
        for indexes in partitions.values_mut() {
            indexes.sort_unstable_by_key(|index| wanted[*index].offset);
            result = self.get_from_partition(wanted, indexes, deadline, &mut found);
            if result.is_err() {
                break;
            }
        }
        self.consumer.unassign().map_err(kafka("unassigning"))?;
        result.map(|()| found)
    }

    fn get_from_partition(
        &self,
        wanted: &[Position],
        indexes: &[usize],
        deadline: Instant,
        found: &mut [Option<Record>],
    ) -> Result<(), ReadError> {
        // The next offset that the client will give, once it is assigned.
        let mut next: Option<i64> = None;
        // A record that was read and lies beyond the one that was looked for.
        let mut ahead: Option<Record> = None;
        for index in indexes {
            let position = &wanted[*index];
            if ahead
                .as_ref()
                .is_some_and(|record| record.position.offset < position.offset)
            {
                ahead = None;
            }
            if ahead.is_none() {
                let is_near = next.is_some_and(|next| (0..NEAR).contains(&(position.offset - next)));
                if !is_near {
                    self.assign(position)?;
                }
                ahead = self.read_up_to(position, deadline)?;
                next = ahead.as_ref().map(|record| record.position.offset + 1);
            }
            if let Some(record) = ahead
                .as_ref()
                .filter(|record| record.position.offset == position.offset)
            {
                found[*index] = Some(record.clone());
            }
        }
        Ok(())
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

    /// The first record at an offset or behind it; nothing when the partition ends before, or has no such
    /// offset.
    fn read_up_to(&self, position: &Position, deadline: Instant) -> Result<Option<Record>, ReadError> {
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
                Some(Ok(message)) => return Ok(Some(convert::record(&message, topic))),
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
                    // The client gets over the rest by itself, or the time is over.
                    _ => tracing::debug!(%error, "lookup"),
                },
                None => {}
            }
        }
    }
}
