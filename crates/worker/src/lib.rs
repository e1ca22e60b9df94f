//! Runs handlers: consumes the records of a pipeline, calls the handler for each, and writes each outcome exactly once.
//!
//! A handler is a [`tower::Service`], see [`handler`]. [`spawn`] starts it in a [`Host`](redeliver_service::Host).
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

mod attempt_queue;
mod breaker;
mod budget;
mod driver;
mod engine;
mod groups;
mod spans;
mod worker;

pub use breaker::BreakerSettings;
pub use groups::{GroupBy, GroupLimit, Grouping, Ordering};
pub use handler::{Attempt, Handler};
pub use worker::{WorkerSpec, spawn};

#[cfg(test)]
mod tests {
    #[test]
    fn the_guide_shows_the_example() {
        let guide = include_str!("../../../docs/worker.md");
        assert!(guide.contains(include_str!("../examples/greeter.rs")));
    }
}
