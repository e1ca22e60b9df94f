//! Tests of the scheduler with real Kafka and Redis.

mod api;
mod audit;
mod burst;
mod chaos;
mod checkpoint_age;
mod clock;
mod cluster;
mod control;
mod daylight_saving;
mod e2e;
mod env;
mod full_redis;
mod growth;
mod index;
mod metrics;
mod missing_topic;
mod oracle;
mod quota;
mod rate;
mod rebuild;
mod recurring;
mod requests;
mod startup;
mod tls;
mod upgrade;
mod urgent;
