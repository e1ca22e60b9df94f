//! Tests of the client with a real Kafka.

mod producer;
mod records;
