//! The worker on a real Kafka, with handlers of these tests.

mod handler;
mod missing_output;
