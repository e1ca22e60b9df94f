//! The domain model of Redeliver: records, headers, failures, retry policies and routing.
//!
//! This crate does no IO and does not depend on the Kafka client. Decisions take the current time as an argument. So
//! every decision of the services can be tested on its own, with arbitrary input.
//!
//! | module | contents |
//! |---|---|
//! | [`record`] | a Kafka record with its ordered headers |
//! | [`headers`] | reserved headers: names, validation, writing |
//! | [`time`] | timestamps in milliseconds, and clocks |
//! | [`clock_guard`] | detects steps of the wall clock |
//! | [`human_duration`] | durations such as `5s` and `2m` |
//! | [`error_chain`] | an error and its causes in one line |
//! | [`failure`] | failures, with failure class and error code |
//! | [`frameworks`] | the headers in which other frameworks describe a failure |
//! | [`outcome`] | the outcome of an attempt |
//! | [`classification`] | the failure class of an HTTP status |
//! | [`anchor`] | the time from which the first delay counts |
//! | [`backoff`] | retry policies: the delay before each retry |
//! | [`kept`] | what a record keeps in a pipeline, and what its handler may change |
//! | [`job`] | ids, priorities and states of scheduled jobs |
//! | [`json`] | JSON documents from untrusted records, read by field |
//! | [`pattern`] | patterns of names, with `*` |
//! | [`pipeline`] | a pipeline: its topics, tiers and settings |
//! | [`placeholders`] | what stands in templates of messages for what differs |
//! | [`content`] | a hash of what a record contains |
//! | [`redrive`] | the headers of redriven records |
//! | [`route`] | where a record goes after an attempt, and with which headers |
//! | [`scheduler`] | the topics of the scheduler |
//! | [`serde_as_text!`] | serde for types that are written as text |
//! | [`mutants`] | planted defects that the tests must catch; absent from normal builds |
//! | [`terminal`] | foreign text without control characters of terminals |
//! | [`token_bucket`] | how much may happen per second |
//! | [`wait`] | backoff and log throttling while something is unavailable |

pub mod anchor;
pub mod backoff;
pub mod classification;
pub mod clock_guard;
pub mod content;
pub mod delay;
pub mod error_chain;
pub mod failure;
pub mod frameworks;
pub mod headers;
pub mod human_duration;
pub mod job;
pub mod json;
pub mod kept;
pub mod mutants;
pub mod outcome;
pub mod pattern;
pub mod pipeline;
pub mod placeholders;
pub mod record;
pub mod redrive;
pub mod route;
pub mod scheduler;
mod serde_as_text;
pub mod terminal;
pub mod time;
pub mod token_bucket;
pub mod wait;

/// The target of the `tracing` spans that are exported, in all crates.
pub const TRACE_TARGET: &str = "redeliver_trace";

pub use backoff::{Jitter, RetryPolicy};
pub use clock_guard::{ClockLimits, GuardedClock};
pub use failure::{ErrorClass, Failure};
pub use human_duration::HumanDuration;
pub use job::JobId;
pub use kept::HandlerChanges;
pub use outcome::Outcome;
pub use pipeline::Pipeline;
pub use record::{Headers, Output, Position, Record, TimestampType};
pub use scheduler::SchedulerTopics;
pub use time::{AdjustableClock, Clock, ManualClock, SystemClock, Timestamp};
