//! The inspector's binary on a real Kafka, asked through its API.

mod api;
mod golden;
mod lifecycle;
mod rebuild;
mod server;
mod support;
mod watch;
