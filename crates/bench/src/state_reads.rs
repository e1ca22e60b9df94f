//! `bench state-reads`: how fast single records of a topic can be read by their offsets, as a scheduler would whose index holds
//! offsets instead of payloads.
//!
//! The look-ahead wants the jobs that are due next. Their offsets are anywhere in the state topic, because jobs are written in the order of
//! their requests. A group is what one scan of the look-ahead returns, and it is sorted by offset.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::util::Timeout;
use rdkafka::{Offset, TopicPartitionList};
use redeliver_core::{Headers, Output};

use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;

/// The time after which a measurement ends, however much is left.
const TIME: Duration = Duration::from_secs(20);
/// The number of records that one scan of the look-ahead returns at most.
const GROUP: usize = 5_000;
/// Size of a record's value in bytes.
const VALUE: usize = 274;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Records in the topic
    #[arg(long, default_value_t = 1_000_000)]
    records: usize,
    /// Offsets to read
    #[arg(long, default_value_t = 50_000)]
    reads: usize,
    /// Partitions of the topic
    #[arg(long, default_value_t = 8)]
    partitions: i32,
    /// Number of rounds; each round measures everything once
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// A way to read.
struct Way {
    name: &'static str,
    consumers: usize,
    /// The maximum number of records between two wanted ones that are read, and not skipped by a seek.
    max_gap: i64,
    /// The number of records of a group.
    group: usize,
    /// The size in bytes of what one fetch returns of a partition. A fetch returns at least one batch of records.
    fetch_bytes: &'static str,
}

const WAYS: [Way; 5] = [
    Way {
        name: "a seek for each record, 1 consumer",
        consumers: 1,
        max_gap: 0,
        group: GROUP,
        fetch_bytes: "1000",
    },
    Way {
        name: "a seek for each record, 4 consumers",
        consumers: 4,
        max_gap: 0,
        group: GROUP,
        fetch_bytes: "1000",
    },
    Way {
        name: "a seek over more than 500 records, 4 consumers",
        consumers: 4,
        max_gap: 500,
        group: GROUP,
        fetch_bytes: "100000",
    },
    Way {
        name: "reading everything between, 1 consumer",
        consumers: 1,
        max_gap: i64::MAX,
        group: GROUP,
        fetch_bytes: "1048576",
    },
    Way {
        name: "reading everything once for all offsets, 1 consumer",
        consumers: 1,
        max_gap: i64::MAX,
        group: usize::MAX,
        fetch_bytes: "1048576",
    },
];

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let topic = broker.name("state-reads");
    broker.create(&[&topic], options.partitions).await?;
    let partitions = usize::try_from(options.partitions)?;
    let name: std::sync::Arc<str> = topic.as_str().into();
    broker.fill(options.records, |index| Output {
        topic: name.clone(),
        partition: i32::try_from(index % partitions).ok(),
        key: Some(format!("{index:026}").into()),
        value: Some(
            std::iter::repeat_with(|| fastrand::u8(..))
                .take(VALUE)
                .collect::<Vec<u8>>()
                .into(),
        ),
        headers: Headers::new(),
    })?;
    let per_partition = i64::try_from(options.records / partitions)?;
    let mut rates = vec![Vec::new(); WAYS.len()];
    for _ in 0..options.rounds {
        for (way, rates) in WAYS.iter().zip(&mut rates) {
            let wanted: Vec<Vec<i64>> = (0..partitions)
                .map(|_| wanted(options.reads / partitions, way.group / partitions, per_partition))
                .collect();
            let started = Instant::now();
            let read = read_all(broker, &topic, way, &wanted)?;
            rates.push(rate(read, started.elapsed()));
        }
    }
    for (way, rates) in WAYS.iter().zip(&rates) {
        figures.add(way.name, per_second(median(rates)));
    }
    broker.delete(&[&topic]).await
}

/// Random offsets of one partition, in groups that are sorted.
fn wanted(reads: usize, group: usize, end: i64) -> Vec<i64> {
    let mut offsets: Vec<i64> = std::iter::repeat_with(|| fastrand::i64(..end))
        .take(reads)
        .collect();
    for group in offsets.chunks_mut(group.max(1)) {
        group.sort_unstable();
    }
    offsets.dedup();
    offsets
}

/// Reads with several consumers, each of which has some of the partitions. Returns the number of wanted records that were read.
fn read_all(broker: &Broker, topic: &str, way: &Way, wanted: &[Vec<i64>]) -> anyhow::Result<usize> {
    std::thread::scope(|scope| {
        let readers = (0..way.consumers).map(|number| {
            let own = wanted.iter().enumerate().skip(number).step_by(way.consumers);
            let own: Vec<(usize, &[i64])> = own.map(|(partition, wanted)| (partition, &wanted[..])).collect();
            scope.spawn(move || read(broker, topic, way, own))
        });
        let readers: Vec<_> = readers.collect();
        readers
            .into_iter()
            .try_fold(0, |sum, reader| match reader.join() {
                Ok(read) => Ok(sum + read?),
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })
}

fn read(broker: &Broker, topic: &str, way: &Way, own: Vec<(usize, &[i64])>) -> anyhow::Result<usize> {
    let consumer: BaseConsumer = broker
        .client()
        .set("group.id", broker.name("reads"))
        .set("enable.auto.commit", "false")
        .set("fetch.wait.max.ms", "5")
        .set("fetch.queue.backoff.ms", "0")
        .set("fetch.message.max.bytes", way.fetch_bytes)
        .create()?;
    let mut list = TopicPartitionList::new();
    let mut left = std::collections::HashMap::new();
    for (partition, wanted) in own {
        let partition = i32::try_from(partition)?;
        if let Some(first) = wanted.first() {
            list.add_partition_offset(topic, partition, Offset::Offset(*first))?;
            left.insert(partition, wanted);
        }
    }
    consumer.assign(&list)?;
    let (started, mut read) = (Instant::now(), 0);
    while !left.is_empty() && started.elapsed() < TIME {
        let Some(record) = consumer.poll(Duration::from_millis(100)) else {
            continue;
        };
        let record = record.context("reading a wanted record")?;
        let (partition, offset) = (record.partition(), record.offset());
        let Some(wanted) = left.get_mut(&partition) else {
            continue;
        };
        match wanted.split_first() {
            Some((first, rest)) if *first == offset => {
                read += 1;
                *wanted = rest;
                match rest.first() {
                    // The next group begins before this record.
                    Some(next) if *next <= offset || next - offset - 1 > way.max_gap => {
                        consumer.seek(
                            topic,
                            partition,
                            Offset::Offset(*next),
                            Timeout::After(Duration::ZERO),
                        )?;
                    }
                    Some(_) => {}
                    None => drop(left.remove(&partition)),
                }
            }
            Some((first, _)) if *first > offset => {}
            _ => bail!("the record at offset {offset} of partition {partition} was not read"),
        }
    }
    Ok(read)
}
