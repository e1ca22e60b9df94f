//! Measures the arrival of jobs at a read_committed consumer of their topic.

use redeliver_kafka::recovery::error_code;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rdkafka::consumer::BaseConsumer;
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::types::RDKafkaErrorCode;
use redeliver_core::Timestamp;

use super::PARTITIONS;
use super::env::TIMEOUT;
use crate::figures::millis_since;
use crate::kafka::Broker;
use crate::process::wait_until;

pub(crate) struct Arrival {
    pub(crate) number: u64,
    pub(crate) due: Timestamp,
    /// Arrival minus due time in milliseconds. A negative value would be early.
    pub(crate) lateness: f64,
}

/// A consumer on its own thread.
pub(crate) struct Arrivals {
    reader: JoinHandle<anyhow::Result<Vec<Arrival>>>,
    /// The number of jobs to wait for, once it is known.
    expected: Arc<AtomicU64>,
    /// The number of jobs that have arrived.
    arrived: Arc<AtomicU64>,
}

impl Arrivals {
    /// Of jobs whose data says which they are.
    pub(crate) fn at(broker: &Broker, topic: &str) -> anyhow::Result<Self> {
        Self::of(broker, topic, job)
    }

    /// Of jobs for which `identify` returns a unique number and the due time.
    pub(super) fn of(broker: &Broker, topic: &str, identify: Identify) -> anyhow::Result<Self> {
        let consumer = broker.tail(topic, PARTITIONS)?;
        let expected = Arc::new(AtomicU64::new(u64::MAX));
        let arrived = Arc::new(AtomicU64::new(0));
        let reader = std::thread::spawn({
            let (expected, arrived) = (expected.clone(), arrived.clone());
            move || read(&consumer, &expected, &arrived, identify)
        });
        Ok(Self {
            reader,
            expected,
            arrived,
        })
    }

    /// Waits until this many jobs have arrived.
    pub(super) fn wait_for(&self, count: usize) -> anyhow::Result<()> {
        wait_until(&format!("{count} jobs have arrived"), TIMEOUT, || {
            Ok(self.arrived.load(Ordering::SeqCst) >= count as u64)
        })
    }

    /// Waits for the expected number of jobs, and checks that each arrived once and none early.
    pub(crate) fn all(self, expected: usize) -> anyhow::Result<Vec<Arrival>> {
        let arrivals = self.all_once(expected)?;
        let early = arrivals.iter().filter(|arrival| arrival.lateness < 0.0).count();
        ensure!(early == 0, "{early} jobs were early");
        Ok(arrivals)
    }

    /// Waits for the expected number of jobs, and checks that each arrived once.
    fn all_once(self, expected: usize) -> anyhow::Result<Vec<Arrival>> {
        self.expected.store(expected as u64, Ordering::SeqCst);
        let arrivals = self
            .reader
            .join()
            .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
        let mut numbers: Vec<u64> = arrivals.iter().map(|arrival| arrival.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        ensure!(
            numbers.len() == expected && arrivals.len() == expected,
            "{} arrivals of {} distinct jobs; {expected} were scheduled",
            arrivals.len(),
            numbers.len()
        );
        Ok(arrivals)
    }
}

type Identify = fn(&BorrowedMessage<'_>) -> anyhow::Result<(u64, Timestamp)>;

fn read(
    consumer: &BaseConsumer,
    expected: &AtomicU64,
    arrived: &AtomicU64,
    identify: Identify,
) -> anyhow::Result<Vec<Arrival>> {
    let mut arrivals = Vec::new();
    let mut last = Instant::now();
    while (arrivals.len() as u64) < expected.load(Ordering::SeqCst) {
        ensure!(
            last.elapsed() < TIMEOUT,
            "only {} jobs arrived, the last one {} s ago",
            arrivals.len(),
            TIMEOUT.as_secs()
        );
        let Some(message) = consumer.poll(Duration::from_millis(100)) else {
            continue;
        };
        let message = match message {
            // One of several brokers is down.
            Err(error) if error_code(&error) == Some(RDKafkaErrorCode::BrokerTransportFailure) => {
                continue;
            }
            message => message?,
        };
        last = Instant::now();
        let (number, due) = identify(&message)?;
        arrivals.push(Arrival {
            number,
            due,
            lateness: millis_since(due),
        });
        arrived.store(arrivals.len() as u64, Ordering::SeqCst);
    }
    Ok(arrivals)
}

fn job(message: &BorrowedMessage<'_>) -> anyhow::Result<(u64, Timestamp)> {
    let data = message.payload().and_then(|data| std::str::from_utf8(data).ok());
    let data = data.context("data")?;
    let number = field(data, "\"n\":").context("number of the job")?;
    let due = field(data, "\"due\":").context("due time of the job")?;
    Ok((number, Timestamp::from_millis(i64::try_from(due)?)))
}

fn field(data: &str, name: &str) -> Option<u64> {
    let (_, rest) = data.split_once(name)?;
    let end = rest.find(|c: char| !c.is_ascii_digit())?;
    rest[..end].parse().ok()
}

pub(super) fn lateness(arrivals: &[Arrival]) -> Vec<f64> {
    arrivals.iter().map(|arrival| arrival.lateness).collect()
}

/// The greatest lateness.
pub(super) fn max_lateness(arrivals: &[Arrival]) -> f64 {
    arrivals
        .iter()
        .map(|arrival| arrival.lateness)
        .fold(0.0, f64::max)
}
