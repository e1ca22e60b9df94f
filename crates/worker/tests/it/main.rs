//! The worker on a real Kafka.

mod batches;
mod handler;
mod missing_output;
mod sharing;
