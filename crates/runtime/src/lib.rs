//! What every service of Redeliver needs around its own work: configuration, telemetry, supervised tasks,
//! shutdown and the admin port.
//!
//! | module | idea |
//! |---|---|
//! | [`config`] | one file for all services; every problem is named with its place |
//! | [`cli`] | the shape of every `main`: parse, load, telemetry, run, exit code |
//! | [`tasks`] | named tasks and threads; the first failure ends the process in order |
//! | [`shutdown`] | signals become a token |
//! | [`admin`] | `/livez`, `/readyz`, `/metrics`, `/config` |
//! | [`listen`] | listening sockets, and what accepted connections are set to |
//! | [`health`] | the parts that must be ready before the process is |
//! | [`panics`] | where a panic happened, in the log |
//! | [`metrics`] | the registry and what every process says of itself |
//! | [`telemetry`] | logs to stderr, spans to an OTLP collector |
//! | [`trace_context`] | W3C trace context in record headers |

pub mod admin;
pub mod cli;
pub mod config;
pub mod health;
pub mod listen;
pub mod metrics;
pub mod panics;
pub mod shutdown;
pub mod tasks;
pub mod telemetry;
pub mod trace_context;

pub use config::Config;
pub use redeliver_core::error_chain;
