//! What all readers have in common: partitions that are read outside of any consumer group, each from an offset and until an offset.
//!
//! Each partition has its own queue in the client, so that an end-of-partition event can be attributed to its partition, and an error of one partition does not
//! stop the others.

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
use redeliver_kafka_ffi::KafkaClient;

use super::error::{ReadError, kafka};
use super::offsets::TopicPartition;
use crate::client::ClientSettings;
use crate::convert;
use crate::partition_end::EndContext;
use crate::processor::Waker;

/// An event of a partition that is read.
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
    },
}

/// What an error means: it concerns only its partition and is an event, or the client recovers from it by itself (`None`), or reading fails.
pub(crate) type Judge = fn(KafkaError) -> Result<Option<RDKafkaErrorCode>, ReadError>;

/// Up to where a partition is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// To this offset, which is at most the end of the partition: one record after it may be returned.
    Offset(i64),
    /// To the end, which is this offset or a later one.
    End(i64),
    /// For ever.
    Never,
}

impl Until {
    pub(crate) fn offset(self) -> i64 {
        match self {
            Self::Offset(end) | Self::End(end) => end,
            Self::Never => i64::MAX,
        }
    }
}

/// A partition, and how far it was read.
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) number: i32,
    /// The next offset to read; `None`: the beginning.
    pub(crate) next: Option<i64>,
    /// `None` if it is not read now.
    pub(crate) until: Option<Until>,
    queue: Option<PartitionQueue<EndContext>>,
    is_paused: bool,
}

/// What happened in a poll.
#[derive(Default)]
pub(crate) struct Polled {
    /// The number of partitions that had their turn.
    pub(crate) turns: usize,
    /// Whether there were no events.
    pub(crate) is_idle: bool,
    /// Whether anything was read.
    pub(crate) has_progressed: bool,
    /// Whether the visitor has stopped.
    pub(crate) is_stopped: bool,
}

type EndConsumer = KafkaClient<Arc<BaseConsumer<EndContext>>>;

/// Reads partitions.
pub(crate) struct Reader {
    pub(crate) config: ClientSettings,
    judge: Judge,
    waker: Waker,
    // Declared before the consumer, so that the queues are dropped before it.
    pub(crate) partitions: Vec<Partition>,
    consumer: EndConsumer,
    /// The index of the partition that the next poll begins with, so that all get their share.
    first: usize,
}

/// The maximum number of events of one partition per poll.
const MAX_EVENTS: usize = 500;

impl Partition {
    pub(crate) fn new(topic: &Arc<str>, number: i32, next: Option<i64>) -> Self {
        Self {
            topic: topic.clone(),
            number,
            next,
            until: None,
            queue: None,
            is_paused: false,
        }
    }

    pub(crate) fn key(&self) -> TopicPartition {
        (self.topic.clone(), self.number)
    }

    pub(crate) fn is(&self, topic: &str, number: i32) -> bool {
        self.number == number && *self.topic == *topic
    }

    /// Visits events, and takes them into account in `polled`.
    fn drain(
        &mut self,
        consumer: &EndConsumer,
        judge: Judge,
        polled: &mut Polled,
        visit: &mut impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let (Some(queue), Some(until)) = (&self.queue, self.until) else {
            return Ok(());
        };
        let mut is_done = false;
        for _ in 0..MAX_EVENTS {
            let Some(polling) = queue.poll(Duration::ZERO) else {
                break;
            };
            polled.is_idle = false;
            let event = match polling {
                Ok(message) => {
                    let next = message.offset() + 1;
                    self.next = Some(next);
                    polled.has_progressed = true;
                    is_done = matches!(until, Until::Offset(end) if next >= end);
                    Some(Event::Record(convert::record(&message, &self.topic)))
                }
                Err(KafkaError::PartitionEOF(_)) => {
                    let reported = consumer.context().take_end();
                    let next = self.next.max(reported);
                    // Otherwise, the broker does not know of the whole partition yet. The client keeps fetching, and reports the next end.
                    is_done = next >= Some(until.offset());
                    polled.has_progressed |= is_done || next != self.next;
                    self.next = next;
                    // An end without an offset says nothing.
                    reported.filter(|_| !is_done).map(|offset| Event::End {
                        topic: self.topic.clone(),
                        partition: self.number,
                        offset,
                    })
                }
                Err(error) => judge(error)?.map(|error| Event::Refused {
                    topic: self.topic.clone(),
                    partition: self.number,
                    error,
                }),
            };
            polled.is_stopped = event.is_some_and(|event| visit(event).is_break());
            if is_done || polled.is_stopped {
                break;
            }
        }
        if is_done {
            (self.until, self.queue) = (None, None);
            if let Until::Offset(_) = until {
                // It remains assigned, so the client would fetch more of it.
                let mut read = TopicPartitionList::new();
                read.add_partition(&self.topic, self.number);
                consumer.pause(&read).map_err(kafka("pausing"))?;
                self.is_paused = true;
            }
        }
        Ok(())
    }
}

impl Reader {
    /// A reader of no partitions. `waker` is woken when there are events.
    pub(crate) fn new(config: ClientSettings, judge: Judge, waker: Waker) -> Result<Self, ReadError> {
        Ok(Self {
            consumer: connect(&config, &waker)?,
            config,
            judge,
            waker,
            partitions: Vec::new(),
            first: 0,
        })
    }

    pub(crate) fn consumer(&self) -> &BaseConsumer<EndContext> {
        &self.consumer
    }

    /// The first partition that is read now.
    pub(crate) fn reading(&self) -> Option<&Partition> {
        self.partitions.iter().find(|partition| partition.until.is_some())
    }

    /// Begins to read the partitions that are to be read.
    pub(crate) fn open(&mut self) -> Result<(), ReadError> {
        let assigning = kafka("assigning");
        let mut list = TopicPartitionList::new();
        for partition in &mut self.partitions {
            if partition.until.is_none() || partition.queue.is_some() {
                continue;
            }
            let next = partition.next.map_or(Offset::Beginning, Offset::Offset);
            list.add_partition_offset(&partition.topic, partition.number, next)
                .map_err(&assigning)?;
            // The queue is split before fetching begins, so that all records arrive in it.
            let queue = self
                .consumer
                .split_partition_queue(&partition.topic, partition.number);
            let mut queue = queue.ok_or_else(|| assigning(KafkaError::Canceled))?;
            let waker = self.waker.clone();
            queue.set_nonempty_callback(move || waker.wake());
            partition.queue = Some(queue);
        }
        if list.count() == 0 {
            return Ok(());
        }
        self.consumer.incremental_assign(&list).map_err(assigning)
    }

    /// Reads no partition any more.
    pub(crate) fn close(&mut self) -> Result<(), ReadError> {
        let mut paused = TopicPartitionList::new();
        for partition in &mut self.partitions {
            (partition.until, partition.queue) = (None, None);
            if std::mem::take(&mut partition.is_paused) {
                paused.add_partition(&partition.topic, partition.number);
            }
        }
        // Otherwise, the client would still not fetch them after the next assignment.
        self.consumer.resume(&paused).map_err(kafka("resuming"))?;
        self.consumer.unassign().map_err(kafka("unassigning"))
    }

    /// Forgets partitions.
    pub(crate) fn remove(&mut self, is_removed: impl Fn(&Partition) -> bool) -> Result<(), ReadError> {
        let mut list = TopicPartitionList::new();
        for removed in self.partitions.extract_if(.., |partition| is_removed(partition)) {
            list.add_partition(&removed.topic, removed.number);
        }
        if list.count() == 0 {
            return Ok(());
        }
        self.consumer
            .incremental_unassign(&list)
            .map_err(kafka("unassigning"))
    }

    /// Another client, for [`Reader::continue_with`].
    pub(crate) fn connect(&self) -> Result<EndConsumer, ReadError> {
        connect(&self.config, &self.waker)
    }

    /// Replaces the client and continues from the same offsets.
    pub(crate) fn continue_with(&mut self, consumer: EndConsumer) -> Result<(), ReadError> {
        for partition in &mut self.partitions {
            partition.queue = None;
        }
        self.consumer = consumer;
        self.open()
    }

    /// Visits the events that have arrived until the visitor breaks. Events that were not visited follow with the next call.
    pub(crate) fn poll(
        &mut self,
        mut visit: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Polled, ReadError> {
        // The main queue contains only callbacks and errors of the whole client.
        if let Some(Err(error)) = self.consumer.poll(Duration::ZERO) {
            (self.judge)(error)?;
        }
        let mut polled = Polled {
            is_idle: true,
            ..Polled::default()
        };
        let partitions = self.partitions.len();
        for step in 0..partitions {
            let index = (self.first + step) % partitions;
            self.partitions[index].drain(&self.consumer, self.judge, &mut polled, &mut visit)?;
            polled.turns += 1;
            if polled.is_stopped {
                self.first = index + 1;
                break;
            }
        }
        Ok(polled)
    }
}

fn connect(config: &ClientSettings, waker: &Waker) -> Result<EndConsumer, ReadError> {
    let waker = waker.clone();
    config
        .create_shared(EndContext::default(), |consumer| {
            consumer.set_nonempty_callback(move || waker.wake());
        })
        .map_err(kafka("creating a consumer"))
}
