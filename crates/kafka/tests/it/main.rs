//! Tests of the Kafka crate on a real broker and, for error paths, on the mock cluster.

mod changelog;
mod errors;
mod follow;
mod gone_output;
mod lane;
mod late;
mod membership;
mod recreated;
mod refused;
mod support;
mod topology;
