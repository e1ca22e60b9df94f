//! Reads the dead-letter topics into the index. These parts run independently:
//!
//! - [`survey`], a task: every few seconds, finds the topics, their offsets, and topics that were created again;
//! - [`reader`], a thread: follows the partitions, and parses headers;
//! - [`writer`], a thread: applies all changes of the index, in large transactions if many are queued.
//!
//! The reader decides in [`topics`] and [`partition`], without IO: which partitions to follow, and what the index contains.
//! It sends its changes to the writer in order, through a bounded channel, so that a topic that
//! is read faster than it is indexed does not use up the memory.

pub(crate) mod contents;
mod partition;
pub(crate) mod reader;
pub(crate) mod survey;
mod topics;
pub(crate) mod writer;

pub(crate) use survey::Survey;
pub(crate) use topics::Indexed;
pub(crate) use writer::{Message, Work};
