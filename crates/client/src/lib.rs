//! What programs use to talk to Redeliver.
//!
//! | type | idea |
//! |---|---|
//! | [`JobRequest`] | what a job is to do, and when |
//! | [`JobProducer`] | schedules and cancels jobs by writing to the ingest topic: no service needs to be up but Kafka |
//! | [`JobClient`] | schedules, looks up, cancels and reschedules jobs over gRPC, with certain answers |
//! | [`DeadLetterClient`] | lists, reads and watches the dead letters of all pipelines over gRPC |
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use redeliver_client::{Endpoint, JobClient, JobProducer, JobRequest, KafkaSettings};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let reminder = JobRequest::after("sms", Duration::from_secs(90))
//!     .data(r#"{"to":"+491700000000"}"#)
//!     .idempotency_key("reminder-17");
//!
//! // Over Kafka: the request is safe when this returns, and many at once are cheap.
//! let kafka = KafkaSettings::new("localhost:9092", "my-program");
//! let producer = JobProducer::new(&kafka, redeliver_client::INGEST_TOPIC)?;
//! let id = producer.schedule(&reminder).await?;
//!
//! // Over gRPC: the answer says what became of it.
//! let jobs = JobClient::connect(&Endpoint::new("http://127.0.0.1:50052")).await?;
//! let cancelled = jobs.cancel(id).await?;
//! println!("{:?}", cancelled.outcome);
//! # Ok(())
//! # }
//! ```

mod dead_letters;
mod endpoint;
mod error;
mod jobs;
mod producer;
mod request;

pub use dead_letters::{
    DeadLetter, DeadLetterClient, DeadLetterState, Dialect, ListDeadLetters, Page, Payload, TopicStats,
    Watch, WatchDeadLetters, WatchEvent,
};
pub use endpoint::Endpoint;
pub use error::ClientError;
pub use jobs::{Answer, Job, JobClient, JobOutcome, JobStats, Scheduled};
pub use producer::{JobProducer, ScheduleError};
pub use redeliver_core::headers::TraceContext;
pub use redeliver_core::job::{JobId, NotAnId, Priority, State};
pub use redeliver_core::{Headers, Position, Timestamp};
pub use redeliver_kafka::KafkaSettings;
pub use request::{InvalidRequest, JobRequest, When};
pub use tonic::Code;

/// The ingest topic, unless the scheduler is configured otherwise.
pub const INGEST_TOPIC: &str = "scheduler.jobs.ingest";
