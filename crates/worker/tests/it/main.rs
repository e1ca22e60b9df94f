//! The worker on a real Kafka.

mod clock;
mod handler;
mod missing_output;
mod sharing;
