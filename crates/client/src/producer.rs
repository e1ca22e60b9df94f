//! Writes commands to the ingest topic.

use std::sync::Arc;

use redeliver_core::job::JobId;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{ProduceError, Producer, Written};
use redeliver_kafka::reader::{self, ReadError};
use tokio::sync::OnceCell;

use crate::ingest::{IngestTopic, InvalidCommand};
use crate::request::{JobRequest, When};

/// Schedules and cancels jobs by writing to the ingest topic. Clones share one producer. [`IngestTopic`] builds the same records
/// for a producer of your own.
///
/// A call returns after the request is written to Kafka (`acks=all`). Concurrent calls share batches. The scheduler
/// validates the request later: an invalid one becomes a dead letter, and [`JobClient::get`](crate::JobClient::get)
/// returns the job of a valid one.
///
/// While Kafka is unavailable, the idempotent producer retries until its `message.timeout.ms`, which is 5 minutes by
/// default. After a timeout it is unknown whether the request was written: send it again with the same idempotency key.
///
/// ```rust,no_run
/// # async fn schedule() -> Result<(), redeliver_client::ScheduleError> {
/// use std::time::Duration;
///
/// use redeliver_client::{INGEST_TOPIC, JobProducer, JobRequest, KafkaSettings};
///
/// let kafka = KafkaSettings::new("localhost:9092", "my-program");
/// let producer = JobProducer::new(&kafka, INGEST_TOPIC)?;
/// let reminder = JobRequest::after("sms", Duration::from_secs(90)).idempotency_key("reminder-17");
/// let id = producer.schedule(&reminder).await?;
/// producer.cancel(id).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct JobProducer {
    kafka: KafkaSettings,
    producer: Producer,
    topic: Arc<str>,
    ingest: Arc<OnceCell<IngestTopic>>,
}

/// Why a command was not written, or may not have been written.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// The command is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidCommand),
    /// The request was written, but the id of its job is unknown: Kafka confirmed it without its offset, because it was written by
    /// an attempt before the last one, or without a timestamp, which Kafka 0.10 and later always return.
    #[error("the request was written, but Kafka returned no offset or no timestamp: {written:?}")]
    UnknownId {
        /// What is known.
        written: Written,
    },
    /// The ingest topic does not exist, or its metadata cannot be read.
    #[error("cannot read the metadata of the ingest topic")]
    Ingest(#[from] ReadError),
    /// The request cannot be written.
    #[error("cannot write to the ingest topic")]
    Kafka(#[from] ProduceError),
    /// The Tokio runtime is shutting down.
    #[error("the runtime is shutting down")]
    ShuttingDown,
}

impl JobProducer {
    /// A producer for this ingest topic, usually [`INGEST_TOPIC`](crate::INGEST_TOPIC). Does not wait for a connection.
    ///
    /// # Errors
    /// If the settings are invalid.
    pub fn new(kafka: &KafkaSettings, topic: impl Into<Arc<str>>) -> Result<Self, ScheduleError> {
        Ok(Self {
            kafka: kafka.clone(),
            producer: Producer::new(kafka)?,
            topic: topic.into(),
            ingest: Arc::new(OnceCell::new()),
        })
    }

    /// Requests a job and returns its id. If the request is a duplicate, or takes the place of another one, no job has this id:
    /// the job is that of the first request with the same idempotency key.
    ///
    /// If Kafka did not answer and the request was written again, the id is read from the ingest topic. Without the right to read that topic,
    /// its time can be later by some milliseconds than that of the job, and then no job has this id.
    ///
    /// # Errors
    /// If the request is invalid or cannot be written.
    pub async fn schedule(&self, job: &JobRequest) -> Result<JobId, ScheduleError> {
        let ingest = self.ingest().await?;
        let mut record = ingest.schedule(job)?;
        // Jobs with the same key would otherwise all be in one shard.
        record
            .partition
            .get_or_insert_with(|| fastrand::i32(0..ingest.partitions()));
        let written = self.producer.send(&record).await?;
        id_of(&written).ok_or(ScheduleError::UnknownId { written })
    }

    /// Requests the cancellation of a job, without waiting for the outcome. To learn the outcome, use
    /// [`JobClient::cancel`](crate::JobClient::cancel).
    ///
    /// # Errors
    /// If the ingest topic does not have the shard of the job, or the request cannot be written.
    pub async fn cancel(&self, id: JobId) -> Result<(), ScheduleError> {
        let record = self.ingest().await?.cancel(id)?;
        self.producer.send(&record).await?;
        Ok(())
    }

    /// Requests a new due time for a job, without waiting for the outcome. To learn the outcome, use
    /// [`JobClient::reschedule`](crate::JobClient::reschedule).
    ///
    /// # Errors
    /// If the time is out of range, the ingest topic does not have the shard of the job, or the request cannot be
    /// written.
    pub async fn reschedule(&self, id: JobId, when: When) -> Result<(), ScheduleError> {
        let record = self.ingest().await?.reschedule(id, when)?;
        self.producer.send(&record).await?;
        Ok(())
    }

    /// Like [`JobProducer::cancel`], for the newest job of an application with this idempotency key, as long as the key is in use: by
    /// default for 24 hours after its newest request was accepted. The command is written to the partition of requests with
    /// this key, so they have an order.
    ///
    /// # Errors
    /// If the command cannot be written.
    pub async fn cancel_by_key(&self, app: &str, key: &str) -> Result<(), ScheduleError> {
        let record = self.ingest().await?.cancel_by_key(app, key);
        self.producer.send(&record).await?;
        Ok(())
    }

    /// Like [`JobProducer::reschedule`], for the job that [`JobProducer::cancel_by_key`] would cancel.
    ///
    /// # Errors
    /// If the time is out of range, or the command cannot be written.
    pub async fn reschedule_by_key(&self, app: &str, key: &str, when: When) -> Result<(), ScheduleError> {
        let record = self.ingest().await?.reschedule_by_key(app, key, when)?;
        self.producer.send(&record).await?;
        Ok(())
    }

    /// Read once: the number of partitions must never change, because job ids contain the partition.
    async fn ingest(&self) -> Result<&IngestTopic, ScheduleError> {
        let read = || async {
            let (kafka, topic) = (self.kafka.clone(), self.topic.clone());
            let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
                .await
                .map_err(|_| ScheduleError::ShuttingDown)?
                .map_err(ScheduleError::Ingest)?;
            Ok(IngestTopic::new(self.topic.clone(), partitions)?)
        };
        self.ingest.get_or_try_init(read).await
    }
}

/// The id of the job whose request was written like this.
fn id_of(written: &Written) -> Option<JobId> {
    let position = &written.position;
    let offset = Some(position.offset).filter(|offset| *offset >= 0)?;
    Some(JobId::new(written.timestamp?, position.partition, offset))
}

#[cfg(test)]
mod tests {
    use redeliver_core::{Position, Timestamp};

    use super::*;

    #[test]
    fn job_id_needs_place_and_time() {
        let at = Timestamp::from_millis(1_763_722_800_123);
        let written = |offset, timestamp| Written {
            position: Position {
                topic: "ingest".into(),
                partition: 3,
                offset,
            },
            timestamp,
        };
        assert_eq!(id_of(&written(0, Some(at))), Some(JobId::new(at, 3, 0)));
        // What librdkafka reports of a record that an earlier attempt has written.
        assert_eq!(id_of(&written(-1001, Some(at))), None);
        assert_eq!(id_of(&written(7, None)), None);
    }
}
