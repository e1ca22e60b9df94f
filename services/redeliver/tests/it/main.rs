//! The real binaries as processes on a real broker.

mod chaos;
mod e2e;
mod support;
