//! The scheduler: jobs are accepted from a topic and go to their application's topic when they are due,
//! exactly once and never early.
//!
//! | module | idea |
//! |---|---|
//! | [`request`] | records of the ingest topic, checked |
//! | `shard` | what becomes of commands and due jobs, decided without IO |
//! | `window`, `overlay` | what a shard holds: jobs that are due soon, and what the index does not show yet |
//! | [`index`] | the time index, in Redis or in memory |
//! | `state_topic` | records of the state topic, understood or not |
//! | `room` | which jobs are accepted while the index is full |
//! | `indexer` | brings a shard's index up to date and asks it |
//! | `topics` | whether the topics of jobs exist |
//! | `processor` | the shards of a lane |
//! | `readiness` | what readiness says of them |
//! | [`codec`] | jobs in the state topic |
//! | [`api`] | gRPC and REST |
//! | `answers` | outcomes of commands, for those who wait to hear them |

mod answers;
pub mod api;
pub mod codec;
pub mod index;
mod indexer;
pub mod job;
mod metrics;
mod overlay;
mod processor;
mod readiness;
mod refused;
pub mod request;
mod room;
mod service;
mod shard;
mod spans;
mod state_topic;
mod topics;
mod window;

pub use service::{check, mount, rules, run};
