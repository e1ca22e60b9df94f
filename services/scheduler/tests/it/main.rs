//! Tests of the scheduler with real Kafka and Redis.

#![expect(
    clippy::disallowed_types,
    reason = "what Redeliver has written, which the tests compare"
)]

mod api;
mod audit;
mod chaos;
mod checkpoint_age;
mod clock;
mod cluster;
mod control;
mod e2e;
mod env;
mod full_redis;
mod growth;
mod index;
mod installations;
mod metrics;
mod missing_topic;
mod oracle;
mod quota;
mod rate;
mod recreated_state;
mod recurring;
mod repeats;
mod requests;
mod startup;
mod tls;
mod until_idle;
mod upgrade;
