//! The worker on a real Kafka.

mod batches;
mod greeter;
mod handler;
mod missing_output;
mod sharing;
