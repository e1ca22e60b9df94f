//! The newest copy of each job, in bounded memory. No IO.
//!
//! Two generations: copies go to the newer one, and once it has half of the jobs, the older one is dropped as a whole. So the jobs that nothing
//! has happened to for the longest time are forgotten, and nothing has to remember their order.

use std::collections::HashMap;

use redeliver_core::JobId;

use super::copy::{JobCopy, Stage};

/// A job in a pipeline: the number of the pipeline, then the id. As bytes, it needs no padding.
type Key = [u8; 18];

/// The newest copy of a job. It is small, because there can be a million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) offset: i64,
    pub(crate) partition: i32,
    /// The number of the topic.
    pub(crate) topic: u16,
    /// Copies with different origins name this job: somebody has copied its record. A redrive to the source begins anew.
    pub(crate) is_ambiguous: bool,
    failed: i64,
    origin: u32,
    attempts: u16,
    redrives: u8,
    is_end: bool,
    rank: u8,
}

pub(crate) struct Table {
    newer: HashMap<Key, Entry>,
    older: HashMap<Key, Entry>,
    /// The size of a generation.
    half: usize,
}

impl Table {
    /// An empty table for about this many jobs.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            newer: HashMap::new(),
            older: HashMap::new(),
            half: max.div_ceil(2).max(1),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.newer.len() + self.older.len()
    }

    pub(crate) fn find(&self, pipeline: u16, id: JobId) -> Option<&Entry> {
        let key = key(pipeline, id);
        self.newer.get(&key).or_else(|| self.older.get(&key))
    }

    /// Adds a copy, in any order, that is in a topic with this number.
    pub(crate) fn add(&mut self, pipeline: u16, copy: &JobCopy, (topic, partition, offset): (u16, i32, i64)) {
        let key = key(pipeline, copy.id);
        let Stage {
            redrives,
            is_end,
            attempts,
            failed,
            rank,
        } = copy.stage;
        let added = Entry {
            offset,
            partition,
            topic,
            is_ambiguous: false,
            failed,
            origin: copy.origin,
            attempts,
            redrives,
            is_end,
            rank,
        };
        let known = self.older.remove(&key).or_else(|| self.newer.get(&key).copied());
        let entry = match known {
            None => added,
            Some(known) => Entry {
                is_ambiguous: known.is_ambiguous
                    || (known.origin != copy.origin && known.redrives == redrives),
                // Of equal ones, the last: its topic may have been created again.
                ..if copy.stage >= known.stage() { added } else { known }
            },
        };
        self.newer.insert(key, entry);
        if self.newer.len() >= self.half {
            self.older = std::mem::take(&mut self.newer);
        }
    }
}

impl Entry {
    fn stage(&self) -> Stage {
        Stage {
            redrives: self.redrives,
            is_end: self.is_end,
            attempts: self.attempts,
            failed: self.failed,
            rank: self.rank,
        }
    }
}

fn key(pipeline: u16, id: JobId) -> Key {
    let mut key = [0; 18];
    let (number, rest) = key.split_at_mut(2);
    number.copy_from_slice(&pipeline.to_be_bytes());
    rest.copy_from_slice(&id.to_bytes());
    key
}

#[cfg(test)]
mod tests {
    use redeliver_core::Timestamp;

    use super::*;

    fn copy(job: i64, attempts: u16, origin: u32) -> JobCopy {
        JobCopy {
            id: JobId::new(Timestamp::from_millis(1), 0, job),
            stage: Stage {
                redrives: 0,
                is_end: false,
                attempts,
                failed: 0,
                rank: 0,
            },
            due: None,
            origin,
        }
    }

    fn found(table: &Table, job: i64) -> Option<(i64, bool)> {
        let entry = table.find(3, copy(job, 0, 0).id)?;
        Some((entry.offset, entry.is_ambiguous))
    }

    #[test]
    fn newest_copy_counts_in_any_order() {
        let mut table = Table::new(100);
        for (attempts, offset) in [(1, 10), (3, 30), (2, 20)] {
            table.add(3, &copy(1, attempts, 7), (0, 0, offset));
        }
        assert_eq!(found(&table, 1), Some((30, false)));
        table.add(3, &copy(1, 3, 7), (0, 0, 2));
        assert_eq!(found(&table, 1), Some((2, false)), "written again");
        table.add(3, &copy(1, 0, 8), (0, 0, 40));
        assert_eq!(found(&table, 1), Some((2, true)), "two records have its id");
        assert_eq!(found(&table, 2), None);
        assert_eq!(table.find(4, copy(1, 0, 0).id), None, "of another pipeline");
        let mut redriven = copy(5, 0, 9);
        redriven.stage.redrives = 1;
        table.add(3, &copy(5, 1, 7), (0, 0, 10));
        table.add(3, &redriven, (0, 0, 50));
        assert_eq!(found(&table, 5), Some((50, false)), "redriven to the source");
    }

    #[test]
    fn idle_jobs_are_forgotten_first() {
        let mut table = Table::new(10);
        table.add(3, &copy(1_000, 0, 0), (0, 0, 0));
        for job in 0..100 {
            table.add(3, &copy(job, 0, 0), (0, 0, job));
            table.add(3, &copy(1_000, 0, 0), (0, 0, job));
            assert!(table.len() <= 10, "{}", table.len());
        }
        assert_eq!(found(&table, 1_000), Some((99, false)));
        assert_eq!(found(&table, 99), Some((99, false)));
        assert_eq!(found(&table, 50), None);
    }

    #[test]
    fn million_jobs_need_little_memory() {
        // A table has a byte more for each entry, and between 1/7 and 9/7 more room than entries.
        assert!(size_of::<(Key, Entry)>() <= 56, "{}", size_of::<(Key, Entry)>());
    }
}
