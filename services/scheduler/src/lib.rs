//! The scheduler: accepts jobs from a topic and writes each to its application's topic when it is due, exactly once and
//! never early.
//!
//! | module | purpose |
//! |---|---|
//! | [`request`] | parses and checks the records of the ingest topic |
//! | `shard` | decides what happens to commands and due jobs, without IO |
//! | `controls` | which applications are paused or limited: settings, and what operators want |
//! | `quota` | how many jobs of an application may wait |
//! | `rate` | how many jobs of an application may be dispatched per second |
//! | `window`, `overlay` | what a shard holds in memory: jobs that are due soon, and changes that the index does not contain yet |
//! | [`index`] | the index by due time, in Redis or in memory |
//! | `index_messages` | the messages between a shard and its indexer |
//! | `checkpoint_age` | which checkpoints are recent enough to continue from |
//! | `indexer` | brings a shard's index up to date, applies changes and serves queries |
//! | `lookups` | reads what a shard needs of its index: to decide its commands, and the jobs that are due next |
//! | `limits` | what the shards of a process share: memory, and take-overs at the same time |
//! | `state_topic` | checks the records of the state topic |
//! | `admission` | which jobs are accepted while the index is full |
//! | `topics` | which topics exist, and can be written |
//! | `topic_changes` | changes of topics after which the shards stop until a restart |
//! | `refused` | replaces records that their topic refuses |
//! | `processor` | the shards of a lane |
//! | `readiness` | the readiness of the shards |
//! | [`codec`] | the format of jobs in the state topic |
//! | [`schedules`], `schedule_key` | the format of schedules in the state topic and the API, and the keys of their records |
//! | [`api`] | gRPC and REST |
//! | `answers` | delivers the outcomes of commands to the requests that wait for them |
//! | `config` | the section `redis`, and the rules for requests |

mod admission;
mod answers;
pub mod api;
mod checkpoint_age;
pub mod codec;
mod config;
mod controls;
pub mod index;
mod index_messages;
mod indexer;
pub mod job;
mod limits;
mod lookups;
mod metrics;
mod overlay;
mod processor;
mod quota;
mod rate;
mod readiness;
mod refused;
pub mod request;
mod schedule_key;
pub mod schedules;
mod service;
mod settings;
mod shard;
mod spans;
mod state_topic;
mod topic_changes;
mod topics;
mod turns;
mod window;

pub use config::{Sections, rules};
pub use service::{check, mount, run};
