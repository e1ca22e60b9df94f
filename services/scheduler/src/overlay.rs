//! The overlay of a shard: changes that are committed, or in the current turn, and not in the index yet.
//!
//! The overlay is newer than the index and takes precedence over it. An entry stays until the index has confirmed the
//! change. Results of lookups that the index served before the change have been handled by then, because a shard's lookups
//! and changes go through one queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::codec::KeyValue;
use crate::job::{Job, JobId, JobState, KeyHash};

/// Changes by the turn that made them.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    /// `None` for a job that is forgotten.
    jobs: HashMap<JobId, (u64, Option<Arc<Job>>)>,
    keys: HashMap<KeyHash, (u64, KeyValue)>,
    log: VecDeque<(u64, LogEntry)>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum LogEntry {
    Job(JobId),
    Key(KeyHash),
}

impl Overlay {
    /// Sets the state of a job; `None` if it is forgotten.
    pub(crate) fn set(&mut self, turn: u64, id: JobId, job: Option<Arc<Job>>) {
        self.bytes += size(job.as_ref());
        if let Some((_, old)) = self.jobs.insert(id, (turn, job)) {
            self.bytes -= size(old.as_ref());
        }
        self.log.push_back((turn, LogEntry::Job(id)));
    }

    /// Records that an idempotency key is in use.
    pub(crate) fn set_key(&mut self, turn: u64, hash: KeyHash, value: KeyValue) {
        self.keys.insert(hash, (turn, value));
        self.log.push_back((turn, LogEntry::Key(hash)));
    }

    /// The state of a job: `None` if the index is up to date, `Some(None)` if the job is forgotten.
    pub(crate) fn job(&self, id: JobId) -> Option<Option<&Arc<Job>>> {
        self.jobs.get(&id).map(|(_, job)| job.as_ref())
    }

    /// The job that uses a key, if the index may not know it yet.
    pub(crate) fn key(&self, hash: &KeyHash) -> Option<KeyValue> {
        self.keys.get(hash).map(|(_, value)| *value)
    }

    /// The scheduled jobs.
    pub(crate) fn scheduled(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs
            .values()
            .filter_map(|(_, job)| job.as_ref())
            .filter(|job| job.state == JobState::Scheduled)
    }

    /// Removes the changes up to this turn, which the index contains now.
    pub(crate) fn remove_applied(&mut self, turn: u64) {
        while let Some((logged_turn, entry)) = self
            .log
            .front()
            .copied()
            .filter(|(logged_turn, _)| *logged_turn <= turn)
        {
            self.log.pop_front();
            match entry {
                LogEntry::Job(id) => {
                    // A later turn may have changed the job again.
                    if self
                        .jobs
                        .get(&id)
                        .is_some_and(|(newest, _)| *newest == logged_turn)
                        && let Some((_, job)) = self.jobs.remove(&id)
                    {
                        self.bytes -= size(job.as_ref());
                    }
                }
                LogEntry::Key(hash) => {
                    if self
                        .keys
                        .get(&hash)
                        .is_some_and(|(newest, _)| *newest == logged_turn)
                    {
                        self.keys.remove(&hash);
                    }
                }
            }
        }
    }

    /// The number of changes.
    pub(crate) fn len(&self) -> usize {
        self.log.len()
    }

    /// The approximate size in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

fn size(job: Option<&Arc<Job>>) -> usize {
    job.map_or(0, |job| job.size())
}
