//! Everything that touches Kafka. The only crate that names `rdkafka`.
//!
//! | module | idea |
//! |---|---|
//! | [`client`] | settings of all clients; what correctness needs is set last |
//! | [`lane`] | consume, process, produce in transactions: the loop of every service |
//! | [`processor`] | what a service plugs into a lane |
//! | [`transaction`] | one exactly-once write: outputs and offsets |
//! | [`remedy`] | which error calls for which step, in one function |
//! | [`tracker`] | which offsets of a partition are done, in any order |
//! | [`convert`] | records between Kafka's client and ours, byte-exact |
//! | [`reader`] | reading topics from start to end, for audits and narration |
//! | [`follow`] | following partitions from given offsets on, for as long as a process lives |
//! | [`lookup`] | single records by their offsets |
//! | [`survey`] | which topics there are, what they hold, how long they keep it |
//! | [`backlog`] | what a group has yet to finish, counted from outside |
//! | [`producer`] | a plain idempotent producer |
//! | [`topology`] | creating and checking topics |
//! | [`topic_watch`] | which topics exist, and which were deleted and created again, while a process runs |
//! | [`murmur2`] | Java's partitioner |
//! | [`fault`] | points at which tests make a process die |
//! | [`embedded`] | a broker in this process, in memory, for trials |

pub mod backlog;
pub mod client;
pub mod convert;
pub mod embedded;
pub mod fault;
pub mod follow;
pub mod lane;
pub mod lookup;
pub mod murmur2;
pub mod processor;
pub mod producer;
pub mod reader;
pub mod remedy;
pub mod survey;
pub mod topic_watch;
pub mod topology;
pub mod tracker;
pub mod transaction;

pub use client::{KafkaSettings, Prefetch};
pub use lane::{IfRecreated, Lane, LaneContext, LaneError, LaneObserver, LaneSpec};

pub use processor::{AssignmentId, Processor, Refused, TransactionBatch, Waker};
pub use redeliver_kafka_ffi::TopicId;
pub use topic_watch::{TopicState, TopicWatch};
