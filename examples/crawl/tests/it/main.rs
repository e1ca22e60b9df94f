//! The crawl on a real Kafka and a real Redis, with the real binaries.

mod crawl;
mod demo;
mod python;
mod support;
