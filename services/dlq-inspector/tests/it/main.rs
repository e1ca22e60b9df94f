//! Tests of the `dlq-inspector` binary on a real Kafka, through its API.

#![expect(
    clippy::disallowed_types,
    reason = "what Redeliver has written, which the tests compare"
)]

mod access;
mod api;
mod completeness;
mod dialects;
mod fuzz;
mod golden;
mod group_states;
mod groups;
mod job_outcomes;
mod ledger_removal;
mod lifecycle;
mod limits;
mod overview;
mod pipeline_audit;
mod rebuild;
mod redrive;
mod redrive_brokers;
mod replicas;
mod server;
mod support;
mod waiting;
mod watch;
mod webhook;
