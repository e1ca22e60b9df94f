//! The infrastructure of every Redeliver service: configuration, telemetry, supervised tasks, shutdown and the admin
//! port.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the configuration: shared sections, loading, secrets |
//! | [`cli`] | the common part of every `main` |
//! | [`tasks`] | supervised tasks and threads |
//! | [`shutdown`] | signals that shut down the process |
//! | [`admin`] | `/livez`, `/readyz`, `/metrics`, `/config` |
//! | [`listen`] | listeners of all ports |
//! | [`hosts`] | the hosts that requests name |
//! | [`http_client`] | clients for HTTP requests of the services themselves |
//! | [`http_server`] | serves HTTP with limits for its clients |
//! | [`token_endpoint`] | requests tokens from an OAuth 2.0 issuer |
//! | [`tls`] | certificates, for servers and clients |
//! | [`health`] | readiness of the process and its parts |
//! | [`panics`] | locations of panics in the log |
//! | [`metrics`] | the metrics registry, and [`families!`] to declare what is in it |
//! | [`telemetry`] | logs to stderr, spans to an OTLP collector |
//! | [`trace_context`] | W3C trace context in record headers |
//! | [`watched_files`] | files whose contents are replaced while the process runs |

pub mod admin;
pub mod cli;
pub mod config;
pub mod health;
mod health_check;
pub mod hosts;
pub mod http_client;
pub mod http_server;
pub mod listen;
pub mod metrics;
pub mod panics;
pub mod shutdown;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod token_endpoint;
pub mod trace_context;
pub mod watched_files;

pub use config::{Config, ProgramConfig};
pub use redeliver_core::error_chain;
