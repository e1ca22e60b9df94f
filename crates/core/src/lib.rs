//! The domain of Redeliver, pure: what a record is, what its headers promise, what a failure means,
//! when it comes back and by which way.
//!
//! Nothing here does IO, knows Kafka's client, or reads a clock by itself: time is handed in. That is
//! why every decision of the services can be tested on its own, with arbitrary input.
//!
//! | module | idea |
//! |---|---|
//! | [`record`] | a Kafka record and its ordered headers, byte-exact |
//! | [`headers`] | the names of our headers, reading them (untrusted) and writing them |
//! | [`time`] | instants in milliseconds, RFC 3339, clocks |
//! | [`span`] | durations as people write them: `5s`, `2m` |
//! | [`error_chain`] | an error with its causes in one line |
//! | [`failure`] | error classes and codes |
//! | [`outcome`] | what a handler says of a record |
//! | [`classification`] | which HTTP answer means which class |
//! | [`backoff`] | how long to wait before which attempt |
//! | [`job`] | names, priorities and states of scheduled jobs |
//! | [`pipeline`] | topics of a pipeline, its ladder of tiers |
//! | [`route`] | from an outcome to the topic and headers of what is written |
//! | [`scheduler`] | topics of the scheduler |

pub mod backoff;
pub mod classification;
pub mod error_chain;
pub mod failure;
pub mod headers;
pub mod job;
pub mod outcome;
pub mod pipeline;
pub mod record;
pub mod route;
pub mod scheduler;
pub mod span;
pub mod time;

pub use backoff::{Jitter, RetryPolicy};
pub use failure::{ErrorClass, Failure};
pub use job::JobId;
pub use outcome::Outcome;
pub use pipeline::Pipeline;
pub use record::{Headers, Output, Position, Record};
pub use scheduler::SchedulerTopics;
pub use span::Span;
pub use time::{Clock, ManualClock, SystemClock, Timestamp};
