//! Jobs over Kafka: commands on the ingest topic, in the partition where the scheduler expects them.

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

/// Schedules and cancels jobs by writing to the ingest topic. Cheap to clone.
///
/// A call returns once the request is safe in Kafka (`acks=all`); calls that are made at the same time share
/// batches. What became of the request the scheduler decides later: a wrong one goes to the dead letters, and
/// [`JobClient::get`](crate::JobClient::get) shows the job of a right one.
///
/// While Kafka does not answer, the idempotent producer tries again with backoff for as long as its
/// `message.timeout.ms` says, 5 minutes by default. After an error that came of a timeout it is not known
/// whether the request was written: send it again with the same idempotency key.
#[derive(Clone)]
pub struct JobProducer {
    kafka: KafkaSettings,
    producer: Producer,
    topic: Arc<str>,
    partitions: Arc<OnceCell<i32>>,
}

/// A command was not written, or not known to be.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// No scheduler would accept the request.
    #[error("the request is not valid")]
    Invalid(#[from] InvalidRequest),
    /// The id belongs to a partition that the ingest topic does not have.
    #[error("job {id} belongs to partition {}, and topic `{topic}` has {partitions} partitions", id.shard())]
    ForeignJob {
        /// The id.
        id: JobId,
        /// The ingest topic.
        topic: Arc<str>,
        /// How many partitions it has.
        partitions: i32,
    },
    /// The broker gave the record no timestamp, so the job's id is not known. Kafka since 0.10 always does.
    #[error("the broker gave the request no timestamp: {written:?}")]
    NoTimestamp {
        /// Where the request stands.
        written: Written,
    },
    /// The ingest topic is missing, or Kafka does not say how many partitions it has.
    #[error("looking at the ingest topic")]
    Ingest(#[from] ReadError),
    /// Kafka did not take it.
    #[error("writing to the ingest topic")]
    Kafka(#[from] ProduceError),
    /// The runtime is being shut down.
    #[error("the runtime is being shut down")]
    ShuttingDown,
}

impl JobProducer {
    /// A producer for this ingest topic, usually [`INGEST_TOPIC`](crate::INGEST_TOPIC). The broker is first asked
    /// when something is written.
    ///
    /// # Errors
    /// When the settings are not usable.
    pub fn new(kafka: &KafkaSettings, topic: impl Into<Arc<str>>) -> Result<Self, ScheduleError> {
        Ok(Self {
            kafka: kafka.clone(),
            producer: Producer::new(kafka)?,
            topic: topic.into(),
            partitions: Arc::new(OnceCell::new()),
        })
    }

    /// Requests a job, and gives the id that it has if it is accepted as a new one. A duplicate is the job of the
    /// first request with its idempotency key, under that one's id.
    ///
    /// # Errors
    /// When the request is not valid or Kafka does not take it.
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
                let place = &written.position;
                Ok(JobId::new(timestamp, place.partition, place.offset))
            }
            None => Err(ScheduleError::NoTimestamp { written }),
        }
    }

    /// Asks for a job not to be dispatched. Whether that came in time
    /// [`JobClient::cancel`](crate::JobClient::cancel) says, or the job itself.
    ///
    /// # Errors
    /// When the id cannot be of this topic or Kafka does not take the request.
    pub async fn cancel(&self, id: JobId) -> Result<(), ScheduleError> {
        self.command(id, Command::Cancel(v1::CancelJob { id: id.to_string() }))
            .await
    }

    /// Asks for a job to be due at another time. Whether that came in time
    /// [`JobClient::reschedule`](crate::JobClient::reschedule) says, or the job itself.
    ///
    /// # Errors
    /// When the time is not possible, the id cannot be of this topic or Kafka does not take the request.
    pub async fn reschedule(&self, id: JobId, when: When) -> Result<(), ScheduleError> {
        let command = v1::RescheduleJob {
            id: id.to_string(),
            when: Some(when.to_command()?),
        };
        self.command(id, Command::Reschedule(command)).await
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

    /// Asked once: the number must never change, as jobs are kept by partition.
    async fn partitions(&self) -> Result<i32, ScheduleError> {
        let ask = || async {
            let (kafka, topic) = (self.kafka.clone(), self.topic.clone());
            let asked = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic));
            asked
                .await
                .map_err(|_| ScheduleError::ShuttingDown)?
                .map_err(ScheduleError::Ingest)
        };
        self.partitions.get_or_try_init(ask).await.copied()
    }
}
