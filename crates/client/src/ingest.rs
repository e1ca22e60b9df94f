//! Commands as records of the ingest topic, in the partition in which the scheduler expects them. There is no IO.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE, TraceContext};
use redeliver_core::job::JobId;
use redeliver_core::{Headers, Output};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};

use crate::request::{InvalidRequest, JobRequest, When};

/// Builds the records that schedule, cancel and reschedule jobs, for programs that write them with a producer of their own,
/// for example in a transaction with other records. [`JobProducer`](crate::JobProducer) writes the same records.
///
/// The id of a job consists of the timestamp, partition and offset with which its record was written: pass what Kafka has
/// confirmed to [`JobId::new`]. The offset must be known: clients report a negative one if a retry found that an earlier
/// attempt had succeeded.
///
/// ```rust
/// # fn records() -> Result<(), redeliver_client::InvalidCommand> {
/// use std::time::Duration;
///
/// use redeliver_client::{INGEST_TOPIC, IngestTopic, JobRequest};
///
/// let ingest = IngestTopic::new(INGEST_TOPIC, 12)?;
/// let reminder = JobRequest::after("sms", Duration::from_secs(90)).idempotency_key("reminder-17");
/// let record = ingest.schedule(&reminder)?;
/// assert_eq!((&*record.topic, record.partition), (INGEST_TOPIC, Some(4)));
/// # Ok(())
/// # }
/// # records().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct IngestTopic {
    name: Arc<str>,
    partitions: i32,
}

/// Why there is no record for a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCommand {
    /// The request is invalid.
    #[error("the request is not valid")]
    Request(#[from] InvalidRequest),
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
    /// The number of partitions is not valid.
    #[error("topic `{topic}` cannot have {partitions} partitions; expected 1 to 65536")]
    Partitions {
        /// The ingest topic.
        topic: Arc<str>,
        /// The number.
        partitions: i32,
    },
}

/// The ids of jobs have 16 bits for the partition.
const MAX_PARTITIONS: i32 = 1 << 16;

impl IngestTopic {
    /// An ingest topic, usually [`INGEST_TOPIC`](crate::INGEST_TOPIC), with the number of its partitions, which is the same for
    /// as long as a scheduler runs.
    ///
    /// # Errors
    /// [`InvalidCommand::Partitions`] if the number is not in 1 to 65,536.
    pub fn new(name: impl Into<Arc<str>>, partitions: i32) -> Result<Self, InvalidCommand> {
        let name = name.into();
        if (1..=MAX_PARTITIONS).contains(&partitions) {
            Ok(Self { name, partitions })
        } else {
            let topic = name;
            Err(InvalidCommand::Partitions { topic, partitions })
        }
    }

    /// The number of partitions.
    #[must_use]
    pub fn partitions(&self) -> i32 {
        self.partitions
    }

    /// The record that requests a job. Its partition is that of the idempotency key. Without one, the partition is `None`, and
    /// any will do.
    ///
    /// # Errors
    /// [`InvalidCommand::Request`] if the request is invalid.
    pub fn schedule(&self, job: &JobRequest) -> Result<Output, InvalidCommand> {
        let spec = job.to_spec()?;
        let partition = spec
            .idempotency_key
            .as_ref()
            .map(|key| shard_of(&spec.app, key, self.partitions));
        let (key, trace) = (spec.key.clone(), job.trace.as_ref());
        Ok(self.record(partition, key, Command::Schedule(spec), trace))
    }

    /// The record that requests the cancellation of a job.
    ///
    /// # Errors
    /// [`InvalidCommand::ForeignJob`] if the ingest topic does not have the shard of the job.
    pub fn cancel(&self, id: JobId) -> Result<Output, InvalidCommand> {
        let command = v1::CancelJob {
            id: id.to_string(),
            ..v1::CancelJob::default()
        };
        self.command(id, Command::Cancel(command))
    }

    /// The record that requests a new due time for a job.
    ///
    /// # Errors
    /// [`InvalidCommand::Request`] if the time is out of range; [`InvalidCommand::ForeignJob`] if the ingest topic does not have
    /// the shard of the job.
    pub fn reschedule(&self, id: JobId, when: When) -> Result<Output, InvalidCommand> {
        let command = v1::RescheduleJob {
            id: id.to_string(),
            when: Some(when.to_command()?),
            ..v1::RescheduleJob::default()
        };
        self.command(id, Command::Reschedule(command))
    }

    /// The record that requests the cancellation of the newest job of an application with this idempotency key, in the partition of
    /// requests with this key.
    #[must_use]
    pub fn cancel_by_key(&self, app: &str, key: &str) -> Output {
        let command = v1::CancelJob {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            ..v1::CancelJob::default()
        };
        self.command_by_key(app, key, Command::Cancel(command))
    }

    /// The record that requests a new due time for the job that [`IngestTopic::cancel_by_key`] would cancel.
    ///
    /// # Errors
    /// [`InvalidCommand::Request`] if the time is out of range.
    pub fn reschedule_by_key(&self, app: &str, key: &str, when: When) -> Result<Output, InvalidCommand> {
        let command = v1::RescheduleJob {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            when: Some(when.to_command()?),
            ..v1::RescheduleJob::default()
        };
        Ok(self.command_by_key(app, key, Command::Reschedule(command)))
    }

    fn command_by_key(&self, app: &str, key: &str, command: Command) -> Output {
        self.record(Some(shard_of(app, key, self.partitions)), None, command, None)
    }

    /// A command for an existing job: in the partition of the job, so that it has an order with all others for this job.
    fn command(&self, id: JobId, command: Command) -> Result<Output, InvalidCommand> {
        if id.shard() >= self.partitions {
            return Err(InvalidCommand::ForeignJob {
                id,
                topic: self.name.clone(),
                partitions: self.partitions,
            });
        }
        let key = Bytes::from(id.to_string());
        Ok(self.record(Some(id.shard()), Some(key), command, None))
    }

    fn record(
        &self,
        partition: Option<i32>,
        key: Option<Bytes>,
        command: Command,
        trace: Option<&TraceContext>,
    ) -> Output {
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
        Output {
            topic: self.name.clone(),
            partition,
            key,
            value: Some(command.encode_to_vec().into()),
            headers,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redeliver_core::Timestamp;
    use redeliver_kafka::murmur2::partition_for_key;

    use super::*;

    const PARTITIONS: i32 = 7;

    fn ingest() -> IngestTopic {
        IngestTopic::new("ingest", PARTITIONS).unwrap()
    }

    fn soon() -> JobRequest {
        JobRequest::after("sms", Duration::from_secs(5))
    }

    #[test]
    fn idempotency_key_determines_the_partition() {
        for key in ["a", "b", "sms-12345"] {
            let partition = partition_for_key(format!("sms\0{key}").as_bytes(), PARTITIONS);
            for request in [soon(), soon().key("x"), soon().key("y")] {
                let record = ingest().schedule(&request.idempotency_key(key)).unwrap();
                assert_eq!(record.partition, Some(partition), "{record:?}");
            }
        }
    }

    #[test]
    fn command_follows_its_idempotency_key() {
        let request = ingest().schedule(&soon().idempotency_key("order-7")).unwrap();
        let at = When::At(Timestamp::from_millis(1_763_722_800_123));
        for record in [
            ingest().cancel_by_key("sms", "order-7"),
            ingest().reschedule_by_key("sms", "order-7", at).unwrap(),
        ] {
            assert_eq!((record.partition, record.key), (request.partition, None));
        }
    }

    #[test]
    fn request_without_key_is_spread() {
        let record = ingest().schedule(&soon().key("x")).unwrap();
        assert_eq!((record.partition, record.key.as_deref()), (None, Some(&b"x"[..])));
    }

    #[test]
    fn command_for_foreign_job_is_refused() {
        let at = Timestamp::from_millis(1_763_722_800_123);
        let ours = JobId::new(at, PARTITIONS - 1, 9);
        for record in [
            ingest().cancel(ours).unwrap(),
            ingest().reschedule(ours, When::At(at)).unwrap(),
        ] {
            assert_eq!(record.partition, Some(PARTITIONS - 1));
            assert_eq!(record.key, Some(Bytes::from(ours.to_string())));
        }
        let foreign = JobId::new(at, PARTITIONS, 9);
        let refused = ingest().cancel(foreign).unwrap_err();
        let expected = format!("job {foreign} belongs to partition 7, and topic `ingest` has 7 partitions");
        assert_eq!(refused.to_string(), expected);
        assert_eq!(ingest().reschedule(foreign, When::At(at)).unwrap_err(), refused);
    }

    #[test]
    fn impossible_partition_count_is_refused() {
        for partitions in [1, MAX_PARTITIONS] {
            assert_eq!(
                IngestTopic::new("ingest", partitions).unwrap().partitions(),
                partitions
            );
        }
        for partitions in [-1, 0, MAX_PARTITIONS + 1] {
            let refused = IngestTopic::new("ingest", partitions).unwrap_err().to_string();
            let expected = format!("topic `ingest` cannot have {partitions} partitions; expected 1 to 65536");
            assert_eq!(refused, expected);
        }
    }
}
