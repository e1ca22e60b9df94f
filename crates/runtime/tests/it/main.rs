//! The runtime seen from outside: files, sockets, processes, a collector.

mod admin;
mod config;
mod config_errors;
mod default_file;
mod listen;
mod otlp;
mod process;
