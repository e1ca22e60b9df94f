//! Tests of the `redeliver-lake` binary on a real Kafka.

mod day;
mod deployment;
mod exactly_once;
mod merges;
mod readers;
mod s3;
mod support;
mod topics;
