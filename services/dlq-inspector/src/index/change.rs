//! The changes of the index.

use std::sync::Arc;

use redeliver_kafka::TopicId;

use crate::ledger::Update;
use crate::letter::Letter;

/// A change of the index.
#[derive(Clone, Debug)]
pub enum Change {
    /// Adds dead letters. One whose position is indexed already is ignored.
    Letters(Vec<Letter>),
    /// Applies updates of the ledger. Those of one partition are in the order of their records.
    Ledger(Vec<Update>),
    /// Stores the read position of a partition.
    Position {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The next offset to read.
        next: i64,
    },
    /// Stores the id of a topic, by which another topic of the same name is recognised later.
    Identify {
        /// The topic.
        topic: Arc<str>,
        /// Its id.
        id: TopicId,
    },
    /// Stores the id of a topic that has the payloads of dead letters that follow.
    Source {
        /// The topic.
        topic: String,
        /// Its id; `None` if it does not exist.
        id: Option<TopicId>,
    },
    /// Removes the dead letters below an offset, which Kafka's retention has deleted. They are removed bit by bit, see
    /// [`Writer::remove_slice`](super::Writer::remove_slice).
    Trim {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The low watermark: the first offset that Kafka still has.
        low: i64,
    },
    /// Removes everything of a topic that was deleted, or deleted and created again, bit by bit. Changes of the topic that follow
    /// wait until it is removed.
    Forget {
        /// The topic.
        topic: Arc<str>,
    },
    /// Sets all dead letters back to open, because the ledger was deleted, bit by bit. Changes of the ledger that follow wait.
    ForgetLedger,
}
