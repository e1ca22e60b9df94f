//! The states and notes that operators have given groups of dead letters.
//!
//! The truth is the topic [`TOPIC`]: compacted, with one partition. Each inspector follows it, and a change is a compare-and-set, see
//! [`redeliver_store`]. Nothing of it is in the index, so that a rebuilt index changes nothing.
//!
//! | module | contents |
//! |---|---|
//! | [`state`] | which state follows from a decision and the dead letters |
//! | [`value`] | values of the topic: reading and writing them |
//! | [`contents`] | what the topic contains |
//! | [`change`] | changes |

pub mod change;
pub mod contents;
pub mod state;
pub mod value;

pub use contents::GroupStates;
pub use state::{Decided, Decision, GroupState};

/// The name of the topic.
pub const TOPIC: &str = "redeliver.dlq.groups";

/// The transactional id of all writers of the topic. It does not depend on `kafka.id_prefix`: writers with different ids would not fence
/// each other.
pub const TRANSACTIONAL_ID: &str = "redeliver-dlq-groups";
