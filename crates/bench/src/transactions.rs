//! `bench transactions`: ways to write consecutive transactions with the client library alone.
//!
//! Each transaction writes records to all partitions of a topic, and an offset. Small transactions show the cost of the round
//! trips, which determines the lateness of records that become due one by one. Large ones show the throughput.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerGroupMetadata};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use redeliver_core::{Clock, HumanDuration, Output, Pipeline, SystemClock, Timestamp};
use redeliver_kafka::convert::native_headers;

use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;
use crate::records::waiting;

const PARTITIONS: i32 = 4;
const CALL: Duration = Duration::from_secs(10);

/// How transactions follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One producer.
    One,
    /// Two producers in turn; a transaction begins when the previous one has ended.
    InTurn,
    /// Two producers in turn; a transaction begins when the records of the previous one are delivered, and ends after it.
    Overlapping,
}

/// When the offset is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offsets {
    AfterDelivery,
    /// While all records but the first batches are in flight.
    AfterFirstDelivery,
}

struct Variant {
    name: &'static str,
    order: Order,
    offsets: Offsets,
    linger: &'static str,
}

/// As lanes write their transactions.
const AS_LANES: Variant = Variant {
    name: "in turn, offsets after the first delivery",
    order: Order::InTurn,
    offsets: Offsets::AfterFirstDelivery,
    linger: "1",
};

const VARIANTS: [Variant; 6] = [
    Variant {
        name: "one producer",
        order: Order::One,
        offsets: Offsets::AfterDelivery,
        linger: "1",
    },
    Variant {
        name: "two producers in turn",
        order: Order::InTurn,
        offsets: Offsets::AfterDelivery,
        linger: "1",
    },
    Variant {
        name: "in turn, no linger",
        order: Order::InTurn,
        offsets: Offsets::AfterDelivery,
        linger: "0",
    },
    AS_LANES,
    Variant {
        name: "in turn, both",
        order: Order::InTurn,
        offsets: Offsets::AfterFirstDelivery,
        linger: "0",
    },
    Variant {
        name: "overlapping, no linger",
        order: Order::Overlapping,
        offsets: Offsets::AfterDelivery,
        linger: "0",
    },
];

/// Records per transaction, and the number of transactions of one measurement.
const SIZES: [(usize, usize); 2] = [(10, 400), (5_000, 60)];

pub(crate) async fn run(broker: &Broker, rounds: usize, figures: &mut Figures) -> anyhow::Result<()> {
    for (size, count) in SIZES {
        let mut rates = vec![Vec::new(); VARIANTS.len()];
        for round in 0..rounds {
            for (number, variant) in VARIANTS.iter().enumerate() {
                let topic = broker.name(&format!("transactions-{size}-{round}-{number}"));
                broker.create(&[&topic], PARTITIONS).await?;
                let elapsed = measure(broker, variant, &topic, size, count)?;
                broker.delete(&[&topic]).await?;
                let rate = rate(count, elapsed);
                println!(
                    "round {round}: {size} records, {}: {}",
                    variant.name,
                    per_second(rate)
                );
                rates[number].push(rate);
            }
        }
        for (variant, rates) in VARIANTS.iter().zip(&rates) {
            let rate = median(rates);
            figures.add(
                format!("transactions of {size} records, {}", variant.name),
                format!(
                    "{} transactions, {} records",
                    per_second(rate),
                    per_second(rate * size as f64)
                ),
            );
        }
    }
    Ok(())
}

/// Counts delivered records.
#[derive(Default)]
struct Deliveries(AtomicUsize);

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Thread>;

    fn delivery(&self, result: &DeliveryResult<'_>, waiter: Box<Thread>) {
        assert!(result.is_ok(), "a delivery failed");
        self.0.fetch_add(1, Ordering::SeqCst);
        waiter.unpark();
    }
}

type Producer = Arc<ThreadedProducer<Deliveries>>;

/// Writes transactions with one or two producers.
struct Writer {
    producers: Vec<Producer>,
    offsets: Offsets,
    group: Arc<ConsumerGroupMetadata>,
    topic: String,
}

fn measure(
    broker: &Broker,
    variant: &Variant,
    topic: &str,
    size: usize,
    count: usize,
) -> anyhow::Result<Duration> {
    let pipeline = Pipeline::new(topic);
    let outputs = (0..size).map(|index| Output {
        topic: topic.into(),
        ..waiting(
            &pipeline,
            HumanDuration::from_secs(1),
            index,
            Timestamp::from_millis(0),
        )
    });
    let outputs: Vec<Output> = outputs.collect();
    let writer = Writer::new(broker, variant, topic)?;
    let started = Instant::now();
    match variant.order {
        Order::One | Order::InTurn => (0..count).try_for_each(|number| writer.write(number, &outputs))?,
        Order::Overlapping => writer.overlapping(count, &outputs)?,
    }
    Ok(started.elapsed())
}

/// Writes records when they are due, in one transaction after the other: what the fastest tier could do that did not have to
/// read them.
pub(crate) fn release(
    broker: &Broker,
    topic: &str,
    per_sec: u64,
    count: usize,
    output: impl Fn(usize, Timestamp) -> Output,
) -> anyhow::Result<()> {
    let writer = Writer::new(broker, &AS_LANES, topic)?;
    let first = SystemClock.now().after(Duration::from_secs(1));
    let due =
        |index: usize| first.after(Duration::from_secs(index as u64) / u32::try_from(per_sec).unwrap_or(1));
    let (mut next, mut number) = (0, 0);
    while next < count {
        let now = SystemClock.now();
        let from = next;
        while next < count && next - from < 5_000 && due(next) <= now {
            next += 1;
        }
        if from == next {
            thread::park_timeout(SystemClock.until(due(next)));
            continue;
        }
        let outputs = (from..next).map(|index| Output {
            topic: topic.into(),
            ..output(index, due(index))
        });
        writer.write(number, &outputs.collect::<Vec<_>>())?;
        number += 1;
    }
    Ok(())
}

impl Writer {
    fn new(broker: &Broker, variant: &Variant, topic: &str) -> anyhow::Result<Self> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &broker.address)
            .set("group.id", topic)
            .create()?;
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(topic, 0, Offset::Beginning)?;
        consumer.assign(&assignment)?;
        let count = if variant.order == Order::One { 1 } else { 2 };
        let producers = (0..count).map(|number| {
            let producer: ThreadedProducer<Deliveries> = ClientConfig::new()
                .set("bootstrap.servers", &broker.address)
                .set("transactional.id", format!("{topic}-{number}"))
                .set("linger.ms", variant.linger)
                .set("batch.num.messages", "10000")
                .set("partitioner", "murmur2_random")
                .create_with_context(Deliveries::default())?;
            producer.init_transactions(CALL)?;
            anyhow::Ok(Arc::new(producer))
        });
        let writer = Self {
            producers: producers.collect::<anyhow::Result<_>>()?,
            offsets: variant.offsets,
            group: Arc::new(consumer.group_metadata().context("group metadata")?),
            topic: topic.to_owned(),
        };
        // The first transactions look up coordinators.
        (0..4).try_for_each(|number| writer.write(number, &[]))?;
        Ok(writer)
    }

    /// Writes one transaction.
    fn write(&self, number: usize, outputs: &[Output]) -> anyhow::Result<()> {
        let producer = &self.producers[number % self.producers.len()];
        let is_offset_sent = self.produce(producer, outputs)?;
        self.end(producer, number, is_offset_sent)
    }

    fn overlapping(&self, count: usize, outputs: &[Output]) -> anyhow::Result<()> {
        let (delivered, to_end) = sync_channel::<usize>(1);
        let (ended, free) = sync_channel(self.producers.len());
        // As many transactions as there are producers may be open.
        for _ in &self.producers {
            ended.send(())?;
        }
        thread::scope(|scope| {
            let ending = scope.spawn(move || {
                for number in to_end {
                    self.end(&self.producers[number % self.producers.len()], number, false)?;
                    // The receiver is gone once the last transaction is produced.
                    let _ = ended.send(());
                }
                anyhow::Ok(())
            });
            for number in 0..count {
                free.recv()?;
                self.produce(&self.producers[number % self.producers.len()], outputs)?;
                delivered.send(number)?;
            }
            drop(delivered);
            ending.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    }

    /// Writes the records. Returns whether the offset was sent, too.
    fn produce(&self, producer: &Producer, outputs: &[Output]) -> anyhow::Result<bool> {
        let delivered = &producer.context().0;
        delivered.store(0, Ordering::SeqCst);
        producer.begin_transaction()?;
        for output in outputs {
            let mut record = BaseRecord::with_opaque_to(&output.topic, Box::new(thread::current()));
            record.key = output.key.as_deref();
            record.payload = output.value.as_deref();
            record.headers = Some(native_headers(&output.headers));
            producer
                .send::<[u8], [u8]>(record)
                .map_err(|(error, _)| error)
                .context("sending")?;
        }
        let is_early = self.offsets == Offsets::AfterFirstDelivery;
        if is_early {
            while delivered.load(Ordering::SeqCst) < outputs.len().min(1) {
                thread::park();
            }
            self.send_offset(producer, 0)?;
        }
        while delivered.load(Ordering::SeqCst) < outputs.len() {
            thread::park();
        }
        Ok(is_early)
    }

    fn send_offset(&self, producer: &Producer, number: usize) -> anyhow::Result<()> {
        let mut offsets = TopicPartitionList::new();
        let offset = Offset::Offset(i64::try_from(number)?);
        offsets.add_partition_offset(&self.topic, 0, offset)?;
        Ok(producer.send_offsets_to_transaction(&offsets, &self.group, CALL)?)
    }

    fn end(&self, producer: &Producer, number: usize, is_offset_sent: bool) -> anyhow::Result<()> {
        while producer.flush(Duration::from_millis(1)).is_err() {}
        if !is_offset_sent {
            self.send_offset(producer, number)?;
        }
        Ok(producer.commit_transaction(CALL)?)
    }
}
