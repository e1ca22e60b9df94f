//! Clients for programs that use Redeliver.
//!
//! | type | use |
//! |---|---|
//! | [`JobClient`] | schedules, looks up, lists, cancels and reschedules jobs over gRPC; every answer is final |
//! | [`ScheduleClient`] | creates, looks up, lists and changes recurring schedules over gRPC |
//! | [`ControlClient`] | pauses, resumes and limits applications, pipelines and tiers at run time over gRPC |
//! | [`JobProducer`] | schedules and cancels jobs by writing to the ingest topic; only Kafka has to be available |
//! | [`RecordProducer`] | writes the records that a pipeline processes, and checks them against a JSON Schema before |
//! | [`IngestTopic`] | builds the records of [`JobProducer`] for a producer of your own, for example in a transaction |
//! | [`DeadLetterClient`] | lists, reads and watches the dead letters of all pipelines over gRPC |
//! | [`RedriveClient`] | redrives, discards and restores dead letters over gRPC |
//! | [`WaitingClient`] | lists and counts records that wait for their next attempt, and traces single records, over gRPC |
//! | [`OverviewClient`] | what happens in all pipelines now, and what is wrong, over gRPC |
//! | [`AuditClient`] | lists who has changed or seen what over gRPC |
//! | [`AccessClient`] | what its caller may do in a service, over gRPC |
//!
//! Requests and answers are the [`messages`] of the protocol. A text that is not set is empty. A value of
//! an enumeration is read with the function of its name, such as `letter.state()`; one of a newer version is the default value. Those that commands show have
//! a [name](messages::DeadLetterState::name). [`convert`] has functions for times, durations and headers.
//!
//! Schedule a job, and list the dead letters of a pipeline:
//!
//! ```rust,no_run
//! use std::time::Duration;
//!
//! use redeliver_client::messages::ListDeadLettersRequest;
//! use redeliver_client::{DeadLetterClient, Endpoint, JobClient, JobRequest};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let jobs = JobClient::connect(&Endpoint::new("http://127.0.0.1:50052")).await?;
//!     let reminder = JobRequest::after("sms", Duration::from_secs(90))
//!         .data(r#"{"to":"+491700000000"}"#)
//!         .idempotency_key("reminder-17");
//!     let scheduled = jobs.schedule(&reminder).await?;
//!     println!("scheduled job {}", scheduled.id);
//!
//!     let inspector = DeadLetterClient::connect(&Endpoint::new("http://127.0.0.1:50051")).await?;
//!     let request = ListDeadLettersRequest {
//!         filter: r#"pipeline = "crawl-jobs""#.to_owned(),
//!         ..ListDeadLettersRequest::default()
//!     };
//!     for letter in inspector.list(request).await?.dead_letters {
//!         println!("{} {}", letter.id, letter.error_message);
//!     }
//!     Ok(())
//! }
//! ```

mod access;
mod audit;
mod caller;
mod controls;
mod dead_letters;
mod endpoint;
mod error;
pub mod export;
mod ingest;
mod jobs;
mod overview;
mod producer;
#[cfg(feature = "records")]
mod records;
mod redrives;
mod request;
mod schedules;
mod scheme;
mod stream;
mod waiting;

pub use access::AccessClient;
pub use audit::AuditClient;
pub use controls::{ControlClient, TierReleases};
pub use dead_letters::{DeadLetterClient, Payload, Watch};
pub use endpoint::{Connection, Endpoint};
pub use error::{ClientError, ErrorDetails};
pub use ingest::{IngestTopic, InvalidCommand};
pub use jobs::{Answer, JobClient, Scheduled};
pub use overview::{OverviewClient, OverviewWatch};
pub use producer::{JobProducer, ScheduleError};
#[cfg(feature = "records")]
pub use records::{RecordProducer, SendError, Totals};
pub use redeliver_core::headers::TraceContext;
pub use redeliver_core::job::{InvalidJobId, JobId, Priority};
pub use redeliver_core::{Headers, Output, Position, Timestamp, TimestampType};
pub use redeliver_kafka::KafkaSettings;
pub use redeliver_proto::{convert, v1 as messages};
#[cfg(feature = "records")]
pub use redeliver_schema::Schema;
pub use redrives::RedriveClient;
pub use request::{InvalidRequest, JobRequest, When};
pub use schedules::ScheduleClient;
pub use tonic::Code;
pub use waiting::{WaitingClient, named_text, unknown_outcome};

/// The default ingest topic of the scheduler.
pub const INGEST_TOPIC: &str = "scheduler.jobs.ingest";
