//! The worker on a real Kafka.

mod handler;
mod missing_output;
mod sharing;
