//! Tests of the scheduler on real Kafka and Redis.

mod api;
mod burst;
mod chaos;
mod e2e;
mod house;
mod index;
mod oracle;
mod rebuild;
mod requests;
mod startup;
mod tls;
