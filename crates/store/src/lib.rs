//! Versioned documents in small compacted topics with one partition.
//!
//! Each process keeps a [`Table`] of all documents in memory. A [`Follower`] reads the topic to its end and follows it; a [`Replica`] gives
//! access to what it has read. A [`Writer`] changes one document at a time by compare-and-set, with an audit entry in the same transaction.
//!
//! A user supplies a [`Document`] (the codec), a [`State`] (the table and views of it) and [`Change`]s (the decisions).

mod replica;
mod table;
mod writer;

pub use replica::{Follower, Replica, State, Topic};
pub use table::{Document, DocumentProblem, Table};
pub use writer::{Change, ChangeError, ChangeId, Changed, Decision, Writer};
