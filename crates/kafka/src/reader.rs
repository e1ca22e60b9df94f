//! Reads topics outside of any consumer group, up to their current ends.

mod error;
mod offsets;
mod partitions;
#[cfg(test)]
mod tests;
mod topics;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use redeliver_core::{Record, Timestamp};
use redeliver_kafka_ffi::TopicId;

use crate::client::{ClientSettings, KafkaSettings};
use crate::extents::Extent;
use crate::partition_end::EndContext;
use crate::processor::Waker;
use error::is_transient;

pub use error::ReadError;
pub(crate) use error::{admin, is_unknown, kafka};
pub(crate) use offsets::{At, CALL, TopicPartition, offset, offsets, request};
pub use partitions::Event;
pub(crate) use partitions::{Judge, Partition, Reader, Until};
pub use topics::{TopicClient, partitions};
pub(crate) use topics::{client, partition_count};

/// The first time between two looks whether a transaction is still open, which doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest one.
const LAST_PAUSE: Duration = Duration::from_millis(20);
/// After this time without records, the consumer is replaced.
const STALL: Duration = Duration::from_secs(8);

/// How far a partition was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadTo {
    /// The topic.
    pub topic: TopicId,
    /// The next offset to read.
    pub offset: i64,
}

/// Offsets of partitions.
type Offsets = BTreeMap<TopicPartition, i64>;

/// Reads topics up to their current end, as a read_committed consumer. Each call continues where the previous one ended.
pub struct TopicReader {
    reader: Reader,
    topics: TopicClient,
    /// See [`TopicReader::expect_id`].
    ids: BTreeMap<String, TopicId>,
}

impl TopicReader {
    /// A reader that begins at the beginning of these topics.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing.
    pub fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        let mut reader = Self::from_offsets(settings, [])?;
        for topic in topics {
            let count = reader.topics.partitions(topic)?;
            reader.expect_partitions(topic, count);
        }
        Ok(reader)
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
        let reader = Self::from_offsets(settings, [((topic.clone(), partition), from)])?;
        if partition >= reader.topics.partitions(topic)? {
            return Err(ReadError::Missing(format!("{topic}` partition `{partition}")));
        }
        Ok(reader)
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
        let (low, high) = reader.topics.watermarks(topic, partition)?;
        let id = reader.topics.known_id(topic);
        let continues = (low..=high).contains(&from.offset) && id == Some(from.topic);
        if continues {
            reader.expect_id(topic, id);
            reader.seek(topic, partition, from.offset);
        }
        Ok((reader, continues))
    }

    /// A reader of existing partitions that begins at offsets that are in range; `None` means the beginning.
    ///
    /// # Errors
    /// If a client cannot be created.
    pub(crate) fn from_offsets(
        settings: &KafkaSettings,
        from: impl IntoIterator<Item = (TopicPartition, Option<i64>)>,
    ) -> Result<Self, ReadError> {
        let config = leader_config(settings, "read_committed");
        let mut reader = Reader::new(config, judge, Waker::new())?;
        reader.partitions = from
            .into_iter()
            .map(|((topic, partition), next)| Partition::new(&topic, partition, next))
            .collect();
        Ok(Self {
            reader,
            topics: TopicClient::new(settings)?,
            ids: BTreeMap::new(),
        })
    }

    /// A client that asks about topics.
    #[must_use]
    pub fn topics(&self) -> &TopicClient {
        &self.topics
    }

    /// Reads also the partitions that its topics have got since it was created, from their beginning. It goes
    /// on reading those that it knows, even if a broker with old metadata does not know them.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing. The partitions are then looked up by the next call.
    pub fn follow_partitions(&mut self) -> Result<(), ReadError> {
        let topics: BTreeSet<Arc<str>> = self.keys().into_iter().map(|(topic, _)| topic).collect();
        for topic in topics {
            let count = self.topics.partitions(&topic)?;
            self.expect_partitions(&topic, count);
        }
        Ok(())
    }

    /// Reads also the partitions of a topic with lower numbers than this one, from their beginning. A broker with old metadata may not know them yet: reading then
    /// fails.
    pub fn expect_partitions(&mut self, topic: &Arc<str>, count: i32) {
        let known = self.of_topic(topic);
        let new = (0..count).filter(|number| !known.contains(number));
        let new = new.map(|number| Partition::new(topic, number, None));
        self.reader.partitions.extend(new);
    }

    /// The number of partitions of a topic that it reads.
    #[must_use]
    pub fn partitions(&self, topic: &str) -> i32 {
        i32::try_from(self.of_topic(topic).len()).unwrap_or(i32::MAX)
    }

    fn of_topic(&self, topic: &str) -> BTreeSet<i32> {
        let partitions = self.reader.partitions.iter();
        let of_topic = partitions.filter(|partition| *partition.topic == *topic);
        of_topic.map(|partition| partition.number).collect()
    }

    /// From now on, reads fail with [`ReadError::Recreated`] unless the topic has this id after them: the
    /// records are then of another topic, at least in part, although the client has noticed nothing. `None`:
    /// the id is unknown, and nothing is compared.
    pub fn expect_id(&mut self, topic: &str, id: Option<TopicId>) {
        match id {
            Some(id) => drop(self.ids.insert(topic.to_owned(), id)),
            None => drop(self.ids.remove(topic)),
        }
    }

    /// What [`TopicReader::expect_id`] was given.
    #[must_use]
    pub fn expected_id(&self, topic: &str) -> Option<TopicId> {
        self.ids.get(topic).copied()
    }

    /// Compares the topics with what [`TopicReader::expect_id`] says about them.
    ///
    /// # Errors
    /// If the broker does not answer, or a topic is missing or another one.
    pub fn check_ids(&self) -> Result<(), ReadError> {
        self.ids
            .iter()
            .try_for_each(|(topic, expected)| match self.topics.id(topic)? {
                Some(id) if id == *expected => Ok(()),
                Some(_) => Err(ReadError::Recreated(topic.clone())),
                None => Err(ReadError::Missing(topic.clone())),
            })
    }

    /// From now on, reads only this partition of one of its topics, beginning at an offset.
    pub fn seek(&mut self, topic: &Arc<str>, partition: i32, from: i64) {
        self.seek_all([((topic.clone(), partition), from)]);
    }

    /// From now on, reads only these partitions, which can be of other topics, each beginning at an offset.
    pub fn seek_all(&mut self, from: impl IntoIterator<Item = ((Arc<str>, i32), i64)>) {
        let from = from.into_iter();
        self.reader.partitions = from
            .map(|((topic, partition), next)| Partition::new(&topic, partition, Some(next)))
            .collect();
    }

    /// The bounds of all partitions of these topics.
    ///
    /// # Errors
    /// If the broker or a leader does not answer, or a topic is missing.
    pub fn extents(&self, topics: &[Arc<str>]) -> Result<BTreeMap<(Arc<str>, i32), Extent>, ReadError> {
        let mut keys = Vec::new();
        for topic in topics {
            let count = self.topics.partitions(topic)?;
            keys.extend((0..count).map(|partition| (topic.clone(), partition)));
        }
        let deadline = Instant::now() + CALL;
        // The first offsets are requested first, so that none is beyond the end.
        let lows = offsets(&self.topics.client, &keys, At::Beginning, deadline)?;
        let ends = offsets(self.consumer(), &keys, At::End, deadline)?;
        let bounds = lows.into_iter().filter_map(|(key, low)| {
            let end = *ends.get(&key)?;
            Some((key, Extent { low, end }))
        });
        Ok(bounds.collect())
    }

    /// As [`TopicReader::seek`], beginning at the first record with this timestamp or a later one, and not before an offset.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn seek_time(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        since: Timestamp,
        from: i64,
    ) -> Result<(), ReadError> {
        let watermarks = self.consumer().fetch_watermarks(topic, partition, CALL);
        let (low, stable) = watermarks.map_err(kafka("requesting the ends of a partition"))?;
        let since = match self.topics.knows_times {
            true => self.offset_of_time(topic, partition, since)?.unwrap_or(stable),
            false => low,
        };
        self.seek(topic, partition, since.max(from).max(low));
        Ok(())
    }

    /// The offset of the first record with this timestamp or a later one; `None` if there is none yet, or the embedded broker does not know.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn offset_of_time(
        &self,
        topic: &Arc<str>,
        partition: i32,
        time: Timestamp,
    ) -> Result<Option<i64>, ReadError> {
        let deadline = Instant::now() + CALL;
        offset(
            self.consumer(),
            (topic.clone(), partition),
            At::Time(time),
            deadline,
        )
    }

    /// The next offset to read of a partition; `None` before its first record was read.
    #[must_use]
    pub fn position(&self, topic: &str, partition: i32) -> Option<i64> {
        let mut partitions = self.reader.partitions.iter();
        partitions.find(|known| known.is(topic, partition))?.next
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
        visit: impl FnMut(Record),
    ) -> Result<(), ReadError> {
        let ends = self.settled_ends(Instant::now() + timeout)?;
        self.read_in_parts(&ends, Until::End, timeout, stop, visit)
    }

    /// As [`TopicReader::read_to_end_in_parts`], but reads each partition up to this offset, which is at most its last stable offset. Some records after it
    /// may be visited.
    ///
    /// # Errors
    /// As [`TopicReader::read_to_end_in_parts`].
    pub fn read_up_to(
        &mut self,
        ends: &BTreeMap<(Arc<str>, i32), i64>,
        timeout: Duration,
        stop: impl Fn() -> bool,
        visit: impl FnMut(Record),
    ) -> Result<(), ReadError> {
        self.read_in_parts(ends, Until::Offset, timeout, stop, visit)
    }

    /// Reads again after a timeout if there was progress.
    fn read_in_parts(
        &mut self,
        ends: &Offsets,
        until: fn(i64) -> Until,
        timeout: Duration,
        stop: impl Fn() -> bool,
        mut visit: impl FnMut(Record),
    ) -> Result<(), ReadError> {
        let positions = |reader: &Self| -> Vec<Option<i64>> {
            let partitions = reader.reader.partitions.iter();
            partitions.map(|partition| partition.next).collect()
        };
        loop {
            let before = positions(self);
            let deadline = Instant::now() + timeout;
            let ends = self.unread(ends.clone(), deadline)?;
            let read = self.read_until(&ends, until, deadline, |record| {
                record.into_iter().for_each(&mut visit);
                ControlFlow::Continue(())
            });
            match read {
                Err(ReadError::Late { .. }) if positions(self) != before && !stop() => {}
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
        let ends = self.settled_ends(deadline)?;
        self.read_until(&ends, Until::End, deadline, |record| {
            record.map_or(ControlFlow::Continue(()), &mut visit)
        })
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
        let keys = self.keys();
        let ends = offsets(&self.topics.client, &keys, At::End, deadline)?;
        let mut stable = offsets(self.consumer(), &keys, At::End, deadline)?;
        stable.values_mut().for_each(|end| *end = limit.min(*end));
        let are_hidden = stable.iter().any(|(key, stable)| *stable < limit.min(ends[key]));
        let ends = self.unread(stable, deadline)?;
        self.read_until(&ends, Until::Offset, deadline, |record| {
            record.map_or(ControlFlow::Continue(()), &mut visit)
        })?;
        Ok(are_hidden)
    }

    /// Reads partitions up to these offsets. Does not wait for open transactions. Visits `None` while no record arrives, so that a visitor can give up.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached before the deadline.
    pub(crate) fn read_until(
        &mut self,
        ends: &Offsets,
        until: fn(i64) -> Until,
        deadline: Instant,
        visit: impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        if !ends.is_empty() {
            for partition in &mut self.reader.partitions {
                partition.until = ends.get(&partition.key()).copied().map(until);
            }
            let read = self.reader.open().and_then(|()| self.read_open(deadline, visit));
            let closed = self.reader.close();
            read?;
            closed?;
        }
        self.check_ids()
    }

    /// Reads until all ends are reached.
    fn read_open(
        &mut self,
        deadline: Instant,
        mut visit: impl FnMut(Option<Record>) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let mut progress = Instant::now();
        while let Some(Partition {
            topic,
            number,
            until: Some(until),
            ..
        }) = self.reader.reading()
        {
            if Instant::now() > deadline {
                return Err(ReadError::Late {
                    topic: topic.to_string(),
                    partition: *number,
                    end: until.offset(),
                });
            }
            let polled = self.reader.poll(|event| match event {
                Event::Record(record) => visit(Some(record)),
                Event::End { .. } | Event::Refused { .. } => ControlFlow::Continue(()),
            })?;
            if polled.is_stopped {
                break;
            }
            if polled.has_progressed {
                progress = Instant::now();
            } else if visit(None).is_break() {
                break;
            } else if progress.elapsed() >= STALL {
                // After a restart of the broker, a fetch may hang forever.
                let consumer = self.reader.connect()?;
                self.reader.continue_with(consumer)?;
                progress = Instant::now();
            } else {
                std::thread::park_timeout(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    fn consumer(&self) -> &BaseConsumer<EndContext> {
        self.reader.consumer()
    }

    fn keys(&self) -> Vec<TopicPartition> {
        self.reader.partitions.iter().map(Partition::key).collect()
    }

    /// Those of these ends before which there are records to read.
    fn unread(&self, mut ends: Offsets, deadline: Instant) -> Result<Offsets, ReadError> {
        for partition in &self.reader.partitions {
            let key = partition.key();
            if partition.next >= ends.get(&key).copied() {
                ends.remove(&key);
            }
        }
        let keys: Vec<TopicPartition> = ends.keys().cloned().collect();
        let lows = offsets(&self.topics.client, &keys, At::Beginning, deadline)?;
        ends.retain(|key, end| lows.get(key).is_some_and(|low| low < end));
        Ok(ends)
    }

    /// Waits until no transaction before the current ends of the partitions is open, and returns the ends of those that have records to read.
    pub(crate) fn settled_ends(&self, deadline: Instant) -> Result<Offsets, ReadError> {
        let ends = offsets(&self.topics.client, &self.keys(), At::End, deadline)?;
        let mut open = self.unread(ends, deadline)?;
        let mut settled = BTreeMap::new();
        let mut pause = FIRST_PAUSE;
        loop {
            // For a read_committed client, the broker returns the last stable offset instead of the high watermark.
            let keys: Vec<TopicPartition> = open.keys().cloned().collect();
            let stable = offsets(self.consumer(), &keys, At::End, deadline)?;
            settled.extend(stable.into_iter().filter(|(key, stable)| stable >= &open[key]));
            open.retain(|key, _| !settled.contains_key(key));
            let Some(((topic, partition), end)) = open.first_key_value() else {
                return Ok(settled);
            };
            if Instant::now() > deadline {
                return Err(ReadError::Late {
                    topic: topic.to_string(),
                    partition: *partition,
                    end: *end,
                });
            }
            // The markers of a transaction that was just committed arrive within a few milliseconds.
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

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

/// Returns permanent errors. The client recovers from others by itself.
pub(crate) fn judge(error: KafkaError) -> Result<Option<RDKafkaErrorCode>, ReadError> {
    if is_transient(&error) {
        tracing::debug!(%error, "consumer error");
        Ok(None)
    } else {
        Err(kafka("polling")(error))
    }
}
