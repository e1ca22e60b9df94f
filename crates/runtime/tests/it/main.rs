//! Tests of the runtime through files, sockets, processes and an OTLP collector.

mod admin;
mod config;
mod config_errors;
mod default_file;
mod http_server;
mod listen;
mod otlp;
mod process;
mod tls;
