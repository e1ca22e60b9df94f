//! The urgent topic: copies of commands that name a job, which overtake the backlog of the ingest topic.
//!
//! A copy is written after its original, to the same partition, with the lineage of the original: a forwarded command has the same
//! headers. A thread per lane reads the partitions of the lane's shards, outside of the consumer group. There is no committed
//! position: a shard that moves reads the last copies, before it dispatches jobs, and ignores those whose originals have had their turn.
//! If the topic cannot be read, commands wait for their turn in the ingest topic, and a metric tells that jobs are not protected.

mod copy;
mod inbox;
mod partition;
mod reader;

pub(crate) use self::copy::copy_of;
#[cfg(test)]
pub(crate) use self::copy::read_copy;
#[cfg(test)]
pub(crate) use self::inbox::Pushed;
pub(crate) use self::inbox::UrgentCopies;
pub(crate) use self::reader::Reader;
