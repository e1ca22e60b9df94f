//! The real binaries as processes on a real broker.

mod all_services;
mod chaos;
mod cli;
mod client;
mod clock;
mod demo;
mod docs;
mod e2e;
mod forged;
mod golden;
mod golden_cli;
mod hang;
mod id_prefix;
mod long_wait;
mod polyglot;
mod raw;
mod recreated;
mod retries;
mod second_day;
mod secured;
mod services;
mod shutdown;
mod support;
mod too_large;
mod traces;
