//! Tests of the scheduler with real Kafka and Redis.

mod api;
mod burst;
mod chaos;
mod checkpoint_age;
mod clock;
mod e2e;
mod env;
mod full_redis;
mod growth;
mod index;
mod missing_topic;
mod oracle;
mod rebuild;
mod requests;
mod startup;
mod tls;
mod upgrade;
