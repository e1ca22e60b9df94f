//! The real binaries as processes on a real broker.

#![expect(
    clippy::disallowed_types,
    reason = "what Redeliver has written, which the tests compare"
)]

mod acls;
mod applications;
mod batches;
mod breaker;
mod changes;
mod chaos;
mod cli;
mod cli_schedules;
mod client;
mod clock;
mod console;
mod control;
mod demo;
mod deployment;
mod dlq_export;
mod dlq_redrive;
mod docs;
mod e2e;
mod environment;
mod foreign;
mod forged;
mod fuzz;
mod golden;
mod golden_cli;
mod hang;
mod health;
mod http_credentials;
mod id_prefix;
mod kafka_credentials;
mod long_wait;
mod metrics;
mod msk_iam;
mod obstacles;
mod ordering;
mod outcomes;
mod polyglot;
mod quickstart;
mod raw;
mod recreated;
mod refused_pipeline;
mod render;
mod retries;
mod second_day;
mod secured;
mod services;
mod shutdown;
mod status;
mod support;
mod ten_tasks;
mod tls;
mod tokens;
mod too_large;
mod totals;
mod traces;
mod transactional;
mod until_idle;
mod waiting;
mod waiting_actions;
mod waits;
