//! The real binaries as processes on a real broker.

mod chaos;
mod e2e;
mod forged;
mod golden;
mod hang;
mod raw;
mod shutdown;
mod support;
mod traces;
