//! What the consumer reports to a lane besides records.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext, ConsumerGroupMetadata};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::statistics::{Statistics, Topic};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, TopicPartitionList};
use redeliver_kafka_ffi::{TopicId, member_id};

use crate::client::ClientLog;
use crate::partition_end::LastEnd;
use crate::processor::Waker;
use crate::recovery::error_code;

/// Collects rebalances, errors and statistics from the client's callbacks, which all run inside `poll` on the lane's
/// thread.
pub(crate) struct Events {
    queue: Mutex<Vec<Event>>,
    served: AtomicU64,
    /// The member and generation of the last rebalance that was served.
    member: Mutex<Option<Arc<ConsumerGroupMetadata>>>,
    member_id: Mutex<Option<String>>,
    waker: Waker,
    log: ClientLog,
    end: LastEnd,
}

pub(super) enum Event {
    Assigned(Vec<(String, i32)>),
    Revoked(Vec<(String, i32)>),
    /// The coordinator had removed the member from the group, and it has joined again as another member. Partitions that it
    /// got back may have had another owner meanwhile, and the client does not report them as revoked (error
    /// `UNKNOWN_MEMBER_ID` in `rd_kafka_cgrp_handle_JoinGroup`, librdkafka 2.12).
    MemberReplaced,
    /// The client fetches the topic under this id from now on.
    TopicIdChanged(String, TopicId),
    Unreachable,
    Lag(Vec<PartitionLag>),
}

pub(super) struct PartitionLag {
    pub(super) topic: String,
    pub(super) partition: i32,
    /// The number of records that the lane has not read.
    pub(super) unread: u64,
}

/// The unread records of each partition: those between the next offset to fetch and the last stable offset, and those
/// fetched but not yet read by the lane. Transaction markers that were not fetched yet count as records.
fn lags(statistics: Statistics) -> Vec<PartitionLag> {
    let mut lags = Vec::new();
    for (topic, Topic { partitions, .. }) in statistics.topics {
        for partition in partitions.into_values() {
            // Negative values mean that the client does not know the offset.
            if partition.ls_offset < 0 || partition.next_offset < 0 {
                continue;
            }
            let unread = (partition.ls_offset - partition.next_offset).max(0) + partition.fetchq_cnt.max(0);
            lags.push(PartitionLag {
                topic: topic.clone(),
                partition: partition.partition,
                unread: unread.unsigned_abs(),
            });
        }
    }
    lags
}

/// Parses a log line of the client (librdkafka 2.12, `debug=metadata`) that reports a changed topic id. The client reports
/// it only there, and continues in the new topic at the old offset.
fn changed_topic_id<'a>(facility: &str, message: &'a str) -> Option<(&'a str, TopicId)> {
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
            member: Mutex::default(),
            member_id: Mutex::default(),
            waker,
            log: ClientLog::default(),
            end: LastEnd::default(),
        }
    }

    /// See [`LastEnd::take`].
    pub(super) fn take_end(&self) -> Option<i64> {
        self.end.take()
    }

    fn push(&self, event: Event) {
        lock(&self.queue).push(event);
        self.waker.wake();
    }

    pub(super) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *lock(&self.queue))
    }

    /// The number of callbacks so far.
    pub(super) fn served(&self) -> u64 {
        self.served.load(Ordering::SeqCst)
    }

    fn count(&self) {
        self.served.fetch_add(1, Ordering::SeqCst);
    }

    /// Remembers the member and the generation under which offsets are committed until the next rebalance.
    pub(super) fn capture_member(&self, consumer: &BaseConsumer<Self>) {
        *lock(&self.member) = consumer.group_metadata().map(Arc::new);
    }

    /// The member and the generation that the lane knows. The client learns a new generation before it reports what that
    /// generation revokes. With the new one, the broker would accept offsets of a partition that the lane has lost; with
    /// this one, it refuses them.
    pub(super) fn member(&self) -> Option<Arc<ConsumerGroupMetadata>> {
        lock(&self.member).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClientContext for Events {
    fn stats(&self, statistics: Statistics) {
        self.count();
        self.push(Event::Lag(lags(statistics)));
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.count();
        if let Some((topic, id)) = changed_topic_id(facility, message) {
            self.push(Event::TopicIdChanged(topic.to_owned(), id));
        }
        self.log.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if self.end.note(&error, reason, &self.log) {
            return;
        }
        self.count();
        if matches!(
            error_code(&error),
            Some(RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure)
        ) {
            self.push(Event::Unreachable);
        }
        if self.log.should_log("error") {
            tracing::warn!(%error, reason, "consumer error");
        }
    }
}

impl ConsumerContext for Events {
    /// Answers at once, so that the lane never holds up a rebalance. The lane starts assigned partitions once it has read
    /// their committed offsets, and forgets revoked ones before it writes anything else.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, list: &mut TopicPartitionList) {
        self.count();
        self.capture_member(consumer);
        let id = member_id(consumer.client());
        if lock(&self.member_id)
            .replace(id.clone().unwrap_or_default())
            .is_some_and(|known| Some(known) != id)
        {
            self.push(Event::MemberReplaced);
        }
        let partitions: Vec<(String, i32)> = list
            .elements()
            .iter()
            .map(|element| (element.topic().to_owned(), element.partition()))
            .collect();
        let result = if error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            self.push(Event::Assigned(partitions));
            consumer.incremental_assign(&TopicPartitionList::new())
        } else {
            self.push(Event::Revoked(partitions));
            // Partitions that were not started yet are not part of the consumer's assignment, and unassigning
            // them would fail.
            consumer.assignment().and_then(|assignment| {
                let mut revoked = TopicPartitionList::new();
                for element in list.elements() {
                    if assignment
                        .find_partition(element.topic(), element.partition())
                        .is_some()
                    {
                        revoked.add_partition(element.topic(), element.partition());
                    }
                }
                consumer.incremental_unassign(&revoked)
            })
        };
        if let Err(error) = result {
            tracing::warn!(%error, "rebalance failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_topic_id_is_parsed() {
        let line = "[thrd:main]: Topic docs changed id from AAAAAAAAAAAAAAAAAAAAAA to ASNFZ4mrze8AAAAAAAAABw";
        let id = TopicId::from_bits(0x0123_4567_89ab_cdef_0000_0000_0000_0007);
        assert_eq!(changed_topic_id("METADATA", line), Some(("docs", id)));
        assert_eq!(changed_topic_id("TOPIC", line), None);
        let other = "[thrd:main]: Topic docs partition 0 Leader 1 Epoch 0";
        assert_eq!(changed_topic_id("METADATA", other), None);
    }
}
