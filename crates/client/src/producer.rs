//! Writes commands to the ingest topic, to the partition in which the scheduler expects them.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE, TraceContext};
use redeliver_core::job::JobId;
use redeliver_core::{Headers, Output};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::murmur2::shard_of;
use redeliver_kafka::producer::{ProduceError, Producer, Written};
use redeliver_kafka::reader::{self, ReadError};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};
use tokio::sync::OnceCell;

use crate::request::{InvalidRequest, JobRequest, When};

/// Schedules and cancels jobs by writing to the ingest topic. Clones share one producer.
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
    partitions: Arc<OnceCell<i32>>,
}

/// Why a command was not written, or may not have been written.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// The request is invalid.
    #[error("the request is not valid")]
    Invalid(#[from] InvalidRequest),
    /// The id belongs to a shard that the ingest topic does not have.
    #[error("job {id} belongs to partition {}, and topic `{topic}` has {partitions} partitions", id.shard())]
    ForeignJob {
        /// The id.
        id: JobId,
        /// The ingest topic.
        topic: Arc<str>,
        /// The number of its partitions.
        partitions: i32,
    },
    /// The broker returned no timestamp, so the id of the job is unknown. Kafka 0.10 and later always return one.
    #[error("the broker returned no timestamp for the request: {written:?}")]
    NoTimestamp {
        /// The position of the request.
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
            partitions: Arc::new(OnceCell::new()),
        })
    }

    /// Requests a job and returns its id. If the request is a duplicate, or takes the place of another one, no job has this id:
    /// the job is that of the first request with the same idempotency key.
    ///
    /// # Errors
    /// If the request is invalid or cannot be written.
    pub async fn schedule(&self, job: &JobRequest) -> Result<JobId, ScheduleError> {
        let spec = job.to_spec()?;
        let partitions = self.partitions().await?;
        let shard = match job.idempotency() {
            Some(key) => shard_of(job.app(), key, partitions),
            None => fastrand::i32(0..partitions),
        };
        let key = job.target_key().cloned();
        let written = self
            .write(shard, key, Command::Schedule(spec), job.trace_context())
            .await?;
        match written.timestamp {
            Some(timestamp) => {
                let position = &written.position;
                Ok(JobId::new(timestamp, position.partition, position.offset))
            }
            None => Err(ScheduleError::NoTimestamp { written }),
        }
    }

    /// Requests the cancellation of a job, without waiting for the outcome. To learn the outcome, use
    /// [`JobClient::cancel`](crate::JobClient::cancel).
    ///
    /// # Errors
    /// If the ingest topic does not have the shard of the job, or the request cannot be written.
    pub async fn cancel(&self, id: JobId) -> Result<(), ScheduleError> {
        let command = v1::CancelJob {
            id: id.to_string(),
            ..v1::CancelJob::default()
        };
        self.command(id, Command::Cancel(command)).await
    }

    /// Requests a new due time for a job, without waiting for the outcome. To learn the outcome, use
    /// [`JobClient::reschedule`](crate::JobClient::reschedule).
    ///
    /// # Errors
    /// If the time is out of range, the ingest topic does not have the shard of the job, or the request cannot be
    /// written.
    pub async fn reschedule(&self, id: JobId, when: When) -> Result<(), ScheduleError> {
        let command = v1::RescheduleJob {
            id: id.to_string(),
            when: Some(when.to_command()?),
            ..v1::RescheduleJob::default()
        };
        self.command(id, Command::Reschedule(command)).await
    }

    /// Like [`JobProducer::cancel`], for the newest job of an application with this idempotency key, as long as the key is in use: by
    /// default for 24 hours after its newest request was accepted. The command is written to the partition of requests with
    /// this key, so they have an order.
    ///
    /// # Errors
    /// If the command cannot be written.
    pub async fn cancel_by_key(&self, app: &str, key: &str) -> Result<(), ScheduleError> {
        let command = v1::CancelJob {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            ..v1::CancelJob::default()
        };
        self.command_by_key(app, key, Command::Cancel(command)).await
    }

    /// Like [`JobProducer::reschedule`], for the job that [`JobProducer::cancel_by_key`] would cancel.
    ///
    /// # Errors
    /// If the time is out of range, or the command cannot be written.
    pub async fn reschedule_by_key(&self, app: &str, key: &str, when: When) -> Result<(), ScheduleError> {
        let command = v1::RescheduleJob {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            when: Some(when.to_command()?),
            ..v1::RescheduleJob::default()
        };
        self.command_by_key(app, key, Command::Reschedule(command)).await
    }

    async fn command_by_key(&self, app: &str, key: &str, command: Command) -> Result<(), ScheduleError> {
        let shard = shard_of(app, key, self.partitions().await?);
        self.write(shard, None, command, None).await?;
        Ok(())
    }

    async fn command(&self, id: JobId, command: Command) -> Result<(), ScheduleError> {
        let partitions = self.partitions().await?;
        if id.shard() >= partitions {
            return Err(ScheduleError::ForeignJob {
                id,
                topic: self.topic.clone(),
                partitions,
            });
        }
        let key = Bytes::from(id.to_string());
        self.write(id.shard(), Some(key), command, None).await?;
        Ok(())
    }

    async fn write(
        &self,
        partition: i32,
        key: Option<Bytes>,
        command: Command,
        trace: Option<&TraceContext>,
    ) -> Result<Written, ScheduleError> {
        let command = v1::JobCommand {
            command: Some(command),
            answer_to: String::new(),
        };
        let mut headers = Headers::new();
        headers.push_text("content-type", CONTENT_TYPE);
        if let Some(trace) = trace {
            headers.push_text(TRACEPARENT, &trace.traceparent);
            if let Some(state) = &trace.tracestate {
                headers.push_text(TRACESTATE, state);
            }
        }
        let output = Output {
            topic: self.topic.clone(),
            partition: Some(partition),
            key,
            value: Some(command.encode_to_vec().into()),
            headers,
        };
        Ok(self.producer.send(&output).await?)
    }

    /// Read once: the number of partitions must never change, because job ids contain the partition.
    async fn partitions(&self) -> Result<i32, ScheduleError> {
        let read = || async {
            let (kafka, topic) = (self.kafka.clone(), self.topic.clone());
            tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
                .await
                .map_err(|_| ScheduleError::ShuttingDown)?
                .map_err(ScheduleError::Ingest)
        };
        self.partitions.get_or_try_init(read).await.copied()
    }
}
