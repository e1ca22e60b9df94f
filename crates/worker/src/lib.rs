//! The engine of workers: consume, handle, and write what becomes of each record, exactly once.
//!
//! A user's worker is a [`tower::Service`] (see [`handler`]) and a call of [`spawn`]. Records of the
//! pipeline's source and of its due topic are handled concurrently and may finish in any order; each
//! result, retry or dead letter is written in one transaction with the offset of its record.

pub mod handler;
pub mod host;
pub mod leftovers;
pub mod metrics;
pub mod topics;

mod driver;
mod engine;
mod spans;
mod worker;

pub use handler::{Attempt, Handler};
pub use host::{Host, LaneStarter};
pub use worker::{WorkerSpec, spawn};
