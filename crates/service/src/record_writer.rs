//! Writes records to a topic that exists, outside of transactions.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use redeliver_core::Output;
use redeliver_core::error_chain::error_chain;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{ProduceError, Producer};
use redeliver_kafka::reader::{ReadError, partitions};

/// How long a caller waits until its records are written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// That the topic exists is checked again after this time.
const CHECKED_FOR: Duration = Duration::from_secs(5);

/// Writes to one topic. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RecordWriter {
    pub(crate) topic: Arc<str>,
    producer: Producer,
    kafka: KafkaSettings,
    /// When the topic was found to exist.
    checked: Arc<Mutex<Option<Instant>>>,
}

/// Why records were not written, or may not have been.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotWritten(String);

impl RecordWriter {
    pub(crate) fn new(kafka: &KafkaSettings, topic: Arc<str>) -> Result<Self, ProduceError> {
        Ok(Self {
            topic,
            producer: Producer::new(kafka)?,
            kafka: kafka.clone(),
            checked: Arc::default(),
        })
    }

    /// Writes records of its topic, and waits until they are acknowledged.
    ///
    /// # Errors
    /// When the topic does not exist, or there is no acknowledgement within 10 seconds.
    pub(crate) async fn write(&self, records: &[Output]) -> Result<(), NotWritten> {
        if records.is_empty() {
            return Ok(());
        }
        let writing = async {
            self.check_topic().await.map_err(|error| error_chain(&error))?;
            let written = try_join_all(records.iter().map(|record| self.producer.send(record))).await;
            written.map(drop).map_err(|error| error_chain(&error))
        };
        let written = tokio::time::timeout(WRITE_TIMEOUT, writing).await;
        let written = written
            .unwrap_or_else(|_| Err(format!("no acknowledgement within {} s", WRITE_TIMEOUT.as_secs())));
        written.map_err(NotWritten)
    }

    /// Checks that the topic exists. If not, a write could make the broker create it, with unsuitable settings.
    async fn check_topic(&self) -> Result<(), ReadError> {
        let checked = || self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if checked().is_some_and(|at| at.elapsed() < CHECKED_FOR) {
            return Ok(());
        }
        let (kafka, topic) = (self.kafka.clone(), self.topic.clone());
        if let Some(found) = blocking(move || partitions(&kafka, &topic)).await {
            found?;
            *checked() = Some(Instant::now());
        }
        Ok(())
    }
}

/// Runs what blocks; `None` if the runtime is shutting down.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Some(result),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => None,
        },
    }
}
