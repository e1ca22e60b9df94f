//! Tests of the scheduler on real Kafka and Redis.

mod api;
mod index;
