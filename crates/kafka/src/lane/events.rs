//! What the client tells a lane beside records.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::statistics::{Statistics, Topic};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, TopicPartitionList};
use redeliver_kafka_ffi::TopicId;

use crate::client::ClientLog;
use crate::processor::Waker;

/// Rebalances and errors, collected by the client's callbacks, which all run inside of `poll` on the
/// lane's thread.
pub(crate) struct Events {
    queue: Mutex<Vec<Event>>,
    served: AtomicU64,
    /// What is assigned is not taken: the member is about to leave, or the consumer to close.
    declining: AtomicBool,
    waker: Waker,
    log: ClientLog,
}

pub(super) enum Event {
    Assigned(Vec<(String, i32)>),
    Revoked(Vec<(String, i32)>),
    /// The client reads the topic under this id from now on.
    Identified(String, TopicId),
    Unreachable,
    Unread(Vec<Unread>),
}

/// What of a partition the lane has not read yet.
pub(super) struct Unread {
    pub(super) topic: String,
    pub(super) partition: i32,
    pub(super) records: u64,
}

/// Behind the next offset that is fetched, up to the end for read_committed readers; and what was fetched and not
/// taken. The markers of transactions that were not fetched yet are counted with the records.
fn unread(statistics: Statistics) -> Vec<Unread> {
    let mut unread = Vec::new();
    for (topic, Topic { partitions, .. }) in statistics.topics {
        for partition in partitions.into_values() {
            // Negative while the client does not know.
            if partition.ls_offset < 0 || partition.next_offset < 0 {
                continue;
            }
            let behind = (partition.ls_offset - partition.next_offset).max(0) + partition.fetchq_cnt.max(0);
            unread.push(Unread {
                topic: topic.clone(),
                partition: partition.partition,
                records: behind.unsigned_abs(),
            });
        }
    }
    unread
}

/// The topic and its new id, if a line of the client's log (librdkafka 2.12, `debug=metadata`) says that the id has changed.
/// There is no other way to hear of it: the client reads on at the old offset.
fn identified<'a>(facility: &str, message: &'a str) -> Option<(&'a str, TopicId)> {
    if facility != "METADATA" {
        return None;
    }
    let (before, ids) = message.split_once(" changed id from ")?;
    let (_, topic) = before.rsplit_once("Topic ")?;
    let (_, id) = ids.split_once(" to ")?;
    let bytes = STANDARD_NO_PAD.decode(id.trim()).ok()?;
    let id = u128::from_be_bytes(bytes.try_into().ok()?);
    Some((topic, TopicId::from_bits(id)))
}

impl Events {
    pub(super) fn new(waker: Waker) -> Self {
        Self {
            queue: Mutex::default(),
            served: 0.into(),
            declining: false.into(),
            waker,
            log: ClientLog::default(),
        }
    }

    fn push(&self, event: Event) {
        self.queue
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push(event);
        self.waker.wake();
    }

    pub(super) fn take(&self) -> Vec<Event> {
        std::mem::take(
            &mut *self
                .queue
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    /// How many events have been served in all.
    pub(super) fn served(&self) -> u64 {
        self.served.load(Ordering::SeqCst)
    }

    fn count(&self) {
        self.served.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether assignments are declined from now on, so that the member can leave or the consumer close.
    pub(super) fn decline(&self, declining: bool) {
        self.declining.store(declining, Ordering::SeqCst);
    }
}

impl ClientContext for Events {
    fn stats(&self, statistics: Statistics) {
        self.count();
        self.push(Event::Unread(unread(statistics)));
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.count();
        if let Some((topic, id)) = identified(facility, message) {
            self.push(Event::Identified(topic.to_owned(), id));
        }
        self.log.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.count();
        if matches!(
            error.rdkafka_error_code(),
            Some(RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure)
        ) {
            self.push(Event::Unreachable);
        }
        if self.log.is_time("error") {
            tracing::warn!(%error, reason, "kafka consumer");
        }
    }
}

impl ConsumerContext for Events {
    /// An assignment is only noted: the lane starts it, with the committed offsets it has read. A revoked
    /// partition is given up here, and forgotten by the lane before it does anything else.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, list: &mut TopicPartitionList) {
        self.count();
        let partitions: Vec<(String, i32)> = list
            .elements()
            .iter()
            .map(|element| (element.topic().to_owned(), element.partition()))
            .collect();
        let result = if error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            let is_declined = self.declining.load(Ordering::SeqCst) || partitions.is_empty();
            self.push(Event::Assigned(partitions));
            if is_declined {
                consumer.incremental_assign(&TopicPartitionList::new())
            } else {
                Ok(())
            }
        } else {
            self.push(Event::Revoked(partitions));
            // What was declined, or not started yet, is not part of the consumer's assignment.
            consumer.assignment().and_then(|held| {
                let mut given_up = TopicPartitionList::new();
                for element in list.elements() {
                    if held
                        .find_partition(element.topic(), element.partition())
                        .is_some()
                    {
                        given_up.add_partition(element.topic(), element.partition());
                    }
                }
                consumer.incremental_unassign(&given_up)
            })
        };
        if let Err(error) = result {
            tracing::warn!(%error, "rebalance");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_about_a_topic_with_another_id_names_both_and_other_lines_name_nothing() {
        let line = "[thrd:main]: Topic docs changed id from AAAAAAAAAAAAAAAAAAAAAA to ASNFZ4mrze8AAAAAAAAABw";
        let id = TopicId::from_bits(0x0123_4567_89ab_cdef_0000_0000_0000_0007);
        assert_eq!(identified("METADATA", line), Some(("docs", id)));
        assert_eq!(identified("TOPIC", line), None);
        let other = "[thrd:main]: Topic docs partition 0 Leader 1 Epoch 0";
        assert_eq!(identified("METADATA", other), None);
    }
}
