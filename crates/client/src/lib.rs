//! Clients for programs that use Redeliver.
//!
//! | type | use |
//! |---|---|
//! | [`JobClient`] | schedules, looks up, lists, cancels and reschedules jobs over gRPC; every answer is final |
//! | [`ScheduleClient`] | creates, looks up, lists and changes recurring schedules over gRPC |
//! | [`ControlClient`] | pauses, resumes and limits applications, pipelines and tiers at run time over gRPC |
//! | [`JobProducer`] | schedules and cancels jobs by writing to the ingest topic; only Kafka has to be available |
//! | [`IngestTopic`] | builds the records of [`JobProducer`] for a producer of your own, for example in a transaction |
//! | [`DeadLetterClient`] | lists, reads and watches the dead letters of all pipelines over gRPC |
//! | [`RedriveClient`] | redrives, discards and restores dead letters over gRPC |
//! | [`WaitingClient`] | lists and counts records that wait for their next attempt, and traces single records, over gRPC |
//! | [`AuditClient`] | lists who has changed or seen what over gRPC |
//!
//! Schedule a job, and list the dead letters of a pipeline:
//!
//! ```rust,no_run
//! use std::time::Duration;
//!
//! use redeliver_client::{DeadLetterClient, Endpoint, JobClient, JobRequest, ListDeadLetters};
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
//!     let request = ListDeadLetters {
//!         filter: r#"pipeline = "crawl-jobs""#.to_owned(),
//!         ..ListDeadLetters::default()
//!     };
//!     for letter in inspector.list(&request).await?.dead_letters {
//!         println!("{} {}", letter.position, letter.error_message.unwrap_or_default());
//!     }
//!     Ok(())
//! }
//! ```

mod audit;
mod controls;
mod dead_letters;
mod endpoint;
mod error;
pub mod export;
#[cfg(test)]
mod extremes;
mod ingest;
mod jobs;
mod producer;
mod redrives;
mod request;
mod schedules;
mod scheme;
mod waiting;

pub use audit::{AuditClient, AuditEntry, AuditPage, DisclosedRange, ListAuditEntries};
pub use controls::{ControlChange, ControlClient, RateLimit, TierReleases};
pub use dead_letters::{
    Completeness, DeadLetter, DeadLetterClient, DeadLetterState, DeadLetterStats, DecodedValue, Dialect,
    FoundDeadLetter, FoundGroup, Group, GroupChange, GroupOrder, GroupPage, GroupState, ListDeadLetters,
    ListGroups, Masked, MissingPartition, MissingReason, Page, Payload, RedrivenAs, Removal, SchemaFormat,
    TopicStats, Watch, WatchDeadLetters, WatchEvent,
};
pub use endpoint::Endpoint;
pub use error::{ClientError, ErrorDetails};
pub use ingest::{IngestTopic, InvalidCommand};
pub use jobs::{Answer, Job, JobClient, JobOutcome, JobPage, JobStats, ListJobs, Scheduled};
pub use producer::{JobProducer, ScheduleError};
pub use redeliver_core::headers::TraceContext;
pub use redeliver_core::job::{InvalidJobId, JobId, JobState, Priority};
pub use redeliver_core::{Headers, Output, Position, Timestamp, TimestampType};
pub use redeliver_kafka::KafkaSettings;
pub use redeliver_proto::v1 as messages;
pub use redrives::{
    PlanEdit, PlanRedrive, Redrive, RedriveChange, RedriveClient, RedriveItem, RedriveKind, RedriveSelection,
    RedriveState,
};
pub use request::{InvalidRequest, JobRequest, When};
pub use schedules::{ListSchedules, PreviewOf, Resumed, ScheduleClient, SchedulePage};
pub use tonic::Code;
pub use waiting::{
    RecordTrace, ScanProgress, TraceEvent, TraceOutcome, TraceRecord, TraceStep, WaitingClient,
    WaitingCounts, WaitingCoverage, WaitingFilter, WaitingList, WaitingPlace, WaitingRecord, WaitingStats,
};

/// The default ingest topic of the scheduler.
pub const INGEST_TOPIC: &str = "scheduler.jobs.ingest";
