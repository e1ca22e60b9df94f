//! Writes the records that a pipeline processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::{Failure, Output};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{ProduceError, Producer, Written};
use redeliver_schema::Schema;

/// Writes records with an idempotent producer, which chooses partitions as Java clients do. Clones share it.
///
/// While Kafka is unavailable, the producer retries after a growing delay (`retry.backoff.ms`, `retry.backoff.max.ms`) until its
/// `message.timeout.ms`, which is 5 minutes by default. After a timeout it is unknown whether the record was written.
///
/// ```rust,no_run
/// # async fn write() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use redeliver_client::{Headers, KafkaSettings, Output, RecordProducer, Schema};
///
/// let schema = Schema::from_file("order.schema.json".as_ref())?;
/// let kafka = KafkaSettings::new("localhost:9092", "shop");
/// let producer = RecordProducer::new(&kafka)?.with_schema(schema);
/// let order = Output {
///     topic: "orders".into(),
///     partition: None,
///     key: Some("ada".into()),
///     value: Some(r#"{"item":"book","quantity":2}"#.into()),
///     headers: Headers::new(),
/// };
/// producer.send(&order).await?;
/// println!("{}", producer.close(Duration::from_secs(30)).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RecordProducer {
    producer: Producer,
    schema: Option<Schema>,
    metrics: Arc<Metrics>,
}

/// Why a record was not written, or may not have been written.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Its value violates the schema. The message names the field and the rule.
    #[error("{}", .0.message)]
    Invalid(Failure),
    /// Kafka did not confirm it.
    #[error(transparent)]
    Kafka(#[from] ProduceError),
}

struct Metrics {
    records: Counter,
    bytes: Counter,
    invalid: Counter,
    failed: Counter,
    seconds: Histogram,
}

/// What a producer has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Records that Kafka has confirmed while their callers waited.
    pub records: u64,
    /// The bytes of their keys and values.
    pub bytes: u64,
    /// Records that violate the schema, and were not sent.
    pub invalid: u64,
    /// Records that Kafka did not confirm.
    pub failed: u64,
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            records,
            bytes,
            invalid,
            failed,
        } = self;
        write!(
            f,
            "records={records} bytes={bytes} invalid={invalid} failed={failed}"
        )
    }
}

impl RecordProducer {
    /// A producer without a schema. Does not wait for a connection.
    ///
    /// # Errors
    /// If the settings are invalid.
    pub fn new(kafka: &KafkaSettings) -> Result<Self, ProduceError> {
        let metrics = Metrics {
            records: Counter::default(),
            bytes: Counter::default(),
            invalid: Counter::default(),
            failed: Counter::default(),
            // 1 ms to 65 s.
            seconds: Histogram::new(exponential_buckets(0.001, 2.0, 17)),
        };
        Ok(Self {
            producer: Producer::new(kafka)?,
            schema: None,
            metrics: Arc::new(metrics),
        })
    }

    /// Checks the value of each record, and refuses those that violate the schema, of which the `schema` of a pipeline makes dead letters.
    #[must_use]
    pub fn with_schema(mut self, schema: Schema) -> Self {
        self.schema = Some(schema);
        self
    }

    /// Adds `producer_records_total`, `producer_bytes_total`, `producer_invalid_total`, `producer_failed_total` and `producer_send_seconds`.
    pub fn register(&self, registry: &mut Registry) {
        let metrics = &self.metrics;
        let counters = [
            ("records", "Records that Kafka has confirmed", &metrics.records),
            ("bytes", "Bytes of their keys and values", &metrics.bytes),
            (
                "invalid",
                "Records that violate the schema, and were not sent",
                &metrics.invalid,
            ),
            ("failed", "Records that Kafka did not confirm", &metrics.failed),
        ];
        for (name, help, counter) in counters {
            registry.register(format!("producer_{name}"), help, counter.clone());
        }
        let help = "Duration from a record to its confirmation";
        registry.register_with_unit("producer_send", help, Unit::Seconds, metrics.seconds.clone());
    }

    /// Writes a record, and waits until Kafka has confirmed it (`acks=all`). Concurrent calls share batches.
    ///
    /// # Errors
    /// If the value violates the schema, or Kafka does not confirm the record.
    pub async fn send(&self, record: &Output) -> Result<Written, SendError> {
        let metrics = &self.metrics;
        if let Some(schema) = &self.schema {
            schema.check(record.value.as_deref()).map_err(|failure| {
                metrics.invalid.inc();
                SendError::Invalid(failure)
            })?;
        }
        let start = Instant::now();
        let written = self.producer.send(record).await.inspect_err(|_| {
            metrics.failed.inc();
        })?;
        metrics.seconds.observe(start.elapsed().as_secs_f64());
        metrics.records.inc();
        let bytes =
            [&record.key, &record.value].map(|part| part.as_ref().map_or(0, |part| part.len() as u64));
        metrics.bytes.inc_by(bytes.iter().sum());
        Ok(written)
    }

    /// What happened so far, over all clones.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let metrics = &self.metrics;
        Totals {
            records: metrics.records.get(),
            bytes: metrics.bytes.get(),
            invalid: metrics.invalid.get(),
            failed: metrics.failed.get(),
        }
    }

    /// Waits until Kafka has confirmed all records, also those whose calls of [`RecordProducer::send`] were dropped, and logs the totals.
    ///
    /// # Errors
    /// If that takes longer than `timeout`: the rest may not be written.
    pub async fn close(self, timeout: Duration) -> Result<Totals, ProduceError> {
        let producer = self.producer.clone();
        let flushed = tokio::task::spawn_blocking(move || producer.flush(timeout)).await;
        let totals = self.totals();
        tracing::info!(%totals, "totals since the start");
        match flushed {
            Ok(flushed) => flushed.map(|()| totals),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}
