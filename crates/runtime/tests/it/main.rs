//! Tests of the runtime through files, sockets, processes and an OTLP collector.

#![expect(
    clippy::disallowed_types,
    reason = "what Redeliver has written, which the tests compare"
)]

mod admin;
mod config;
mod config_errors;
mod http_server;
mod listen;
mod otlp;
mod process;
mod tls;
