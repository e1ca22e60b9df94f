//! What a shard has committed, or is about to, and the index does not show yet.
//!
//! Whoever asks the index looks here first: what is known here is newer. An entry stays until the index has
//! confirmed that it holds the change; answers of the index that were asked for before that confirmation
//! have arrived by then, because a shard's questions and changes go through one queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::codec::KeyValue;
use crate::job::{Job, JobId, KeyHash, State};

/// Changes by the number of the turn that made them.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    /// A job that is forgotten is `None`.
    jobs: HashMap<JobId, (u64, Option<Arc<Job>>)>,
    keys: HashMap<KeyHash, (u64, KeyValue)>,
    log: VecDeque<(u64, Entry)>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Job(JobId),
    Key(KeyHash),
}

impl Overlay {
    /// Notes the newest state of a job.
    pub(crate) fn set(&mut self, turn: u64, id: JobId, job: Option<Arc<Job>>) {
        self.bytes += size(job.as_ref());
        if let Some((_, old)) = self.jobs.insert(id, (turn, job)) {
            self.bytes -= size(old.as_ref());
        }
        self.log.push_back((turn, Entry::Job(id)));
    }

    /// Notes that a key is taken.
    pub(crate) fn take_key(&mut self, turn: u64, hash: KeyHash, value: KeyValue) {
        self.keys.insert(hash, (turn, value));
        self.log.push_back((turn, Entry::Key(hash)));
    }

    /// The newest state of a job: `None` when the index knows best, `Some(None)` when it is forgotten.
    pub(crate) fn job(&self, id: JobId) -> Option<Option<&Arc<Job>>> {
        self.jobs.get(&id).map(|(_, job)| job.as_ref())
    }

    /// Who has taken a key, as far as the index may not know it.
    pub(crate) fn key(&self, hash: &KeyHash) -> Option<KeyValue> {
        self.keys.get(hash).map(|(_, value)| *value)
    }

    /// Jobs that wait.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs
            .values()
            .filter_map(|(_, job)| job.as_ref())
            .filter(|job| job.state == State::Scheduled)
    }

    /// Forgets what was changed up to this turn: the index shows it.
    pub(crate) fn confirm(&mut self, turn: u64) {
        while let Some((noted, entry)) = self.log.front().copied().filter(|(noted, _)| *noted <= turn) {
            self.log.pop_front();
            match entry {
                Entry::Job(id) => {
                    if self.jobs.get(&id).is_some_and(|(newest, _)| *newest == noted)
                        && let Some((_, job)) = self.jobs.remove(&id)
                    {
                        self.bytes -= size(job.as_ref());
                    }
                }
                Entry::Key(hash) => {
                    if self.keys.get(&hash).is_some_and(|(newest, _)| *newest == noted) {
                        self.keys.remove(&hash);
                    }
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.log.len()
    }

    /// About how many bytes it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

fn size(job: Option<&Arc<Job>>) -> usize {
    job.map_or(0, |job| job.size())
}
