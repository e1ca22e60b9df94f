//! Jobs whose topic refuses them when they are dispatched.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;

use super::Shard;
use crate::codec;
use crate::index::{Change, Effect};
use crate::job::{Job, JobId, JobState};

/// A job that was not dispatched after all.
pub(crate) struct RefusedJob {
    /// The value of its state record, in place of the one that the turn contains.
    pub(crate) record: Bytes,
    pub(crate) due: Timestamp,
}

impl Shard {
    /// Changes the state of a job that the current turn dispatched: a dead letter replaces its record, so it was not
    /// dispatched. It has the same state as a job whose topic does not exist for too long. `None` if the turn did not dispatch the job.
    pub(crate) fn refuse_dispatch(&mut self, id: JobId) -> Option<RefusedJob> {
        let dispatched = self.overlay.job(id)??;
        // The turn can also forget the job.
        let is_its_end = |change: &&mut Change| change.id == id && change.effect != Effect::Forgotten;
        let change = self.changes.iter_mut().rfind(is_its_end)?;
        if dispatched.state != JobState::Dispatched {
            return None;
        }
        let job = Arc::new(Job {
            state: JobState::Expired,
            ..(**dispatched).clone()
        });
        let record = codec::encode(&job);
        *change = codec::change(&job, record.clone(), self.settings.retention);
        let due = job.due;
        self.overlay.set(self.turn, id, Some(job));
        Some(RefusedJob { record, due })
    }
}
