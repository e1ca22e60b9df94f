//! The baseline: a bare transactional consume-produce loop that uses only the client library, tuned as well as we know how.
//! It parses nothing, has no due times, and completes records in order.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, DeliveryResult, Message as _};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::topic_partition_list::Offset;
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{ClientContext, TopicPartitionList};

/// Counts delivery reports. `flush` would wait for them by polling, which costs more processor time than the rest of the loop.
struct Deliveries {
    reported: AtomicUsize,
    awaited: AtomicUsize,
    has_failed: AtomicBool,
    waiter: Thread,
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if result.is_err() {
            self.has_failed.store(true, Ordering::SeqCst);
        }
        let reported = self.reported.fetch_add(1, Ordering::SeqCst) + 1;
        if reported >= self.awaited.load(Ordering::SeqCst) {
            self.waiter.unpark();
        }
    }
}

/// Copies `count` records from one topic to another, and returns the time from the first record on.
pub(crate) fn copy(
    brokers: &str,
    group: &str,
    from: &str,
    to: &str,
    count: usize,
    batch: usize,
) -> anyhow::Result<Duration> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("isolation.level", "read_committed")
        .set("auto.offset.reset", "earliest")
        .set("fetch.queue.backoff.ms", "1")
        .set("queued.min.messages", "20000")
        .set("fetch.wait.max.ms", "5")
        .create()?;
    let producer: ThreadedProducer<Deliveries> = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("transactional.id", group)
        .set("linger.ms", "1")
        .set("batch.num.messages", "10000")
        .set("partitioner", "murmur2_random")
        .create_with_context(Deliveries {
            reported: AtomicUsize::new(0),
            awaited: AtomicUsize::new(usize::MAX),
            has_failed: AtomicBool::new(false),
            waiter: thread::current(),
        })?;
    producer.init_transactions(Duration::from_secs(30))?;
    consumer.subscribe(&[from])?;
    let mut copied = 0;
    let mut started = None;
    while copied < count {
        let mut messages: Vec<BorrowedMessage<'_>> = Vec::with_capacity(batch);
        let deadline = Instant::now() + Duration::from_millis(20);
        while messages.len() < batch {
            let remaining = deadline.saturating_duration_since(Instant::now());
            match consumer.poll(remaining) {
                Some(message) => messages.push(message?),
                None if remaining.is_zero() => break,
                None => {}
            }
        }
        if messages.is_empty() {
            continue;
        }
        // The clock starts with the first record, so that joining the group is not measured.
        started.get_or_insert_with(Instant::now);
        producer.begin_transaction()?;
        let mut offsets = std::collections::HashMap::new();
        for message in &messages {
            offsets.insert(message.partition(), message.offset() + 1);
            let mut record = BaseRecord::<[u8], [u8]>::to(to);
            record.key = message.key();
            record.payload = message.payload();
            record.headers = message.headers().map(rdkafka::message::BorrowedHeaders::detach);
            loop {
                match producer.send(record) {
                    Ok(()) => break,
                    Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), rejected)) => {
                        record = rejected;
                        thread::yield_now();
                    }
                    Err((error, _)) => return Err(error).context("sending"),
                }
            }
        }
        let deliveries = producer.context();
        let sent = copied + messages.len();
        deliveries.awaited.store(sent, Ordering::SeqCst);
        while deliveries.reported.load(Ordering::SeqCst) < sent {
            thread::park();
        }
        while producer.flush(Duration::from_millis(1)).is_err() {}
        if deliveries.has_failed.load(Ordering::SeqCst) {
            bail!("a delivery failed");
        }
        let mut list = TopicPartitionList::new();
        for (partition, offset) in offsets {
            list.add_partition_offset(from, partition, Offset::Offset(offset))?;
        }
        let group = consumer.group_metadata().context("group metadata")?;
        producer.send_offsets_to_transaction(&list, &group, Duration::from_secs(10))?;
        producer.commit_transaction(Duration::from_secs(10))?;
        copied += messages.len();
    }
    started
        .map(|started| started.elapsed())
        .context("nothing was copied")
}
