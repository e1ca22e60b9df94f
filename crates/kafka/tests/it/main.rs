//! Integration tests on a real broker, and on the mock cluster for injected errors.

mod changelog;
mod copy;
mod ends;
mod errors;
mod exclusive;
#[cfg(feature = "kafka-tls")]
mod exit;
mod follow;
mod groups;
mod lane;
mod membership;
mod producer;
mod reader;
mod recreated;
mod refused;
mod support;
mod topology;
mod unavailable;
