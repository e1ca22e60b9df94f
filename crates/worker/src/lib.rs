//! Runs handlers: consumes the records of a pipeline, calls the handler for each, and writes each outcome exactly once.
//!
//! A handler is a function, or a [`tower::Service`], see [`handler`]. [`Worker`] is a whole program; [`spawn`] starts a handler in
//! a [`Host`](redeliver_service::Host) with other parts.
//! Records of the source topic and of the due topic are processed concurrently and may finish in any order. Each
//! result, retry or dead letter is written in the same transaction as the offset of its record.
//!
//! # Example
//!
//! ```rust,no_run
#![doc = include_str!("../examples/greeter.rs")]
//! ```

pub mod handler;
pub mod metrics;
pub mod test_kit;

mod app;
mod attempt;
mod attempt_queue;
mod batcher;
mod batches;
mod breaker;
mod budget;
mod controls;
mod dead_letter;
mod driver;
mod engine;
mod failure_log;
mod groups;
mod rate_limit;
mod served;
mod spans;
mod worker;

pub use redeliver_core::failure::FailureScope;
pub use redeliver_core::headers::RecordedFailure;
pub use redeliver_core::outcome::Produced;
pub use redeliver_core::{ErrorClass, Failure, Headers, Outcome, Record};

pub use app::Worker;
pub use batcher::{BatchLimits, Batcher};
pub use batches::in_batches;
pub use breaker::{BreakerSettings, FailureRate};
pub use dead_letter::{DeadLetter, OnDead};
pub use groups::{GroupBy, GroupLimit, Grouping, Ordering};
pub use handler::{Attempt, Handler};
pub use rate_limit::RateLimit;
pub use redeliver_schema::Schema;
pub use served::{Sections, ServedPipelines};
pub use worker::{WorkerSpec, spawn};

#[cfg(test)]
mod tests {
    #[test]
    fn the_guide_shows_the_example() {
        let guide = include_str!("../../../docs/worker.md");
        assert!(guide.contains(include_str!("../examples/greeter.rs")));
    }
}
