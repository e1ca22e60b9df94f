//! Everything that talks to Kafka. With `redeliver-kafka-ffi`, the only product crate that uses `rdkafka`.
//!
//! | module | content |
//! |---|---|
//! | [`client`] | settings of all clients |
//! | [`login`] | tokens with which all clients log in |
//! | [`credentials`] | certificates and passwords in files, and replacing all clients when they change |
//! | `probe` | whether Kafka accepts a client, and if not, why |
//! | [`lane`] | the loop of every service: consume, process, write in transactions |
//! | [`processor`] | the interface between a lane and a service |
//! | [`transaction`] | exactly-once writes of outputs and offsets |
//! | [`recovery`] | how to recover from each error of a client |
//! | [`tracker`] | the completed offsets of a partition, in any order |
//! | [`convert`] | conversion of records between the client's types and ours |
//! | [`reader`] | reading topics outside of a group up to their ends, and what all such readers have in common |
//! | `partition_end` | where a consumer reached the end of a partition |
//! | [`groups`] | the consumer groups of the cluster, and copying their committed offsets |
//! | [`exclusive`] | changes of a topic that other processes cannot overlap |
//! | [`follow`] | following partitions from given offsets |
//! | [`lookup`] | reading single records by offset |
//! | [`survey`] | listing topics with their offsets and retention |
//! | [`backlog`] | the number of records that a group has not completed |
//! | `unfinished` | what groups have not completed of the partitions |
//! | [`ends`] | where the partitions of topics end now |
//! | [`scan`] | reading what groups have not completed, or topics since a time, with progress |
//! | `shared_prefetch` | how much clients of many partitions prefetch |
//! | [`producer`] | an idempotent producer without transactions |
//! | [`topology`] | checking and creating topics |
//! | [`topic_watch`] | which topics exist, and which were created again |
//! | [`murmur2`] | the partitioner of Kafka's Java clients |
//! | [`fault`] | fault injection for crash tests |
//! | [`embedded`] | a broker inside this process |

pub mod backlog;
pub mod client;
pub mod convert;
pub mod credentials;
mod describe;
pub mod embedded;
pub mod ends;
pub mod exclusive;
mod extents;
pub mod fault;
pub mod follow;
pub mod group_client;
pub mod groups;
pub mod lane;
mod log_timestamps;
pub mod login;
pub mod lookup;
pub mod murmur2;
mod partition_end;
mod probe;
pub mod processor;
pub mod producer;
pub mod reader;
pub mod recovery;
pub mod scan;
mod shared_prefetch;
pub mod survey;
pub mod topic_watch;
pub mod topology;
pub mod tracker;
pub mod transaction;
mod unfinished;

pub use credentials::{CredentialObserver, CredentialSource, Credentials, SecretProperties};

pub use client::{ClientSettings, KafkaSettings, Prefetch, WITHOUT_TLS};
pub use lane::{IfFenced, IfRecreated, Lane, LaneContext, LaneError, LaneObserver, LaneSpec};

pub use login::{Login, LoginObserver, TokenError, TokenSource};
pub use processor::{AssignmentId, Delivered, FollowUp, Processor, Refused, TransactionBatch, Waker};
pub use redeliver_kafka_ffi::{InvalidToken, KafkaClient, Token, TopicId};
pub use topic_watch::{Presence, TopicState, TopicWatch, Unwritable};
