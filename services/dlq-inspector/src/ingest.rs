//! From the topics into the index, in three steps that each have their own pace:
//!
//! - [`survey`], a task: every few seconds, which topics there are, what they hold, and whether they are
//!   still those that were read;
//! - [`reader`], a thread: follows the partitions and reads what headers say;
//! - [`writer`], a thread: all changes of the index, in large transactions when there is much to do.
//!
//! Only the reader decides. What it decides goes to the writer in order, through a channel that is bounded,
//! so a fast topic cannot fill the memory.

pub(crate) mod reader;
pub(crate) mod survey;
mod topics;
pub(crate) mod writer;

pub(crate) use survey::Survey;
pub(crate) use writer::Work;
