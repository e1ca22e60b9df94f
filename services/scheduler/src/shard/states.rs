//! The states of jobs: where the newest one is, and how it changes.

use std::sync::Arc;

use redeliver_core::{Headers, Output, Timestamp, mutant};

use super::{Shard, Writes};
use crate::codec;
use crate::index::{Change, Cursor, Effect};
use crate::job::{Flow, Job, JobId, JobState};

impl Shard {
    /// A job or a schedule in its newest state. `found` is its state in the index.
    pub(super) fn newest_job(&self, id: JobId, found: Option<&Arc<Job>>) -> Option<Arc<Job>> {
        if let Some(job) = mutant!("shard-trusts-the-index-too-early", self.overlay.job(id), None) {
            return job.cloned();
        }
        self.window.get(id).or(found).cloned()
    }

    /// Writes the state of a scheduled job, and keeps the job in the window if it is due soon.
    pub(super) fn save(&mut self, job: Arc<Job>, now: Timestamp, writes: &mut Writes) {
        self.write_state(&job, writes);
        let (flow, cursor) = (Flow::of(&job), Cursor::of(&job));
        let is_due_soon =
            job.due <= now.after(self.settings.window) || self.look_ahead.has_passed(&flow, cursor);
        // While earlier jobs of the flow are still to be read, this one is read after them.
        let is_next = self.look_ahead.is_next(&flow, cursor);
        let id = job.id;
        if !(is_due_soon && is_next && self.keep_in_window(job)) {
            self.window.remove(id);
            self.look_ahead.rewind(&flow, cursor);
        }
    }

    pub(super) fn end_job(
        &mut self,
        job: &Job,
        state: JobState,
        now: Timestamp,
        writes: &mut Writes,
    ) -> Arc<Job> {
        self.quotas.remove(job);
        let job = Arc::new(job.ended(state, now));
        self.write_state(&job, writes);
        if self.is_full() && job.idempotency_key.is_none() {
            // Its end would only fill the index, above all if the index has never had the job. So it is forgotten at once.
            self.write_tombstone(job.id, writes);
        }
        self.window.remove(job.id);
        job
    }

    /// Writes the state of a job to the state topic and to the overlay.
    pub(super) fn write_state(&mut self, job: &Arc<Job>, writes: &mut Writes) {
        let record = codec::encode(job);
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(codec::state_key(job).into()),
            value: Some(record.clone()),
            headers: Headers::new(),
        });
        if job.state == JobState::Dispatched && mutant!("shard-dispatches-without-a-state-record") {
            writes.outputs.pop();
        }
        self.changes
            .push(codec::change(job, record, self.settings.retention));
        self.overlay.set(self.turn, job.id, Some(job.clone()));
    }

    pub(super) fn forget(&mut self, id: JobId, writes: &mut Writes) {
        if self.overlay.job(id).is_some() {
            // The index listed the job before its last change.
            return;
        }
        writes.tally.forgotten += 1;
        self.write_tombstone(id, writes);
        self.overlay.set(self.turn, id, None);
    }

    /// Deletes the state of a job from the state topic.
    fn write_tombstone(&mut self, id: JobId, writes: &mut Writes) {
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(id.to_string().into()),
            value: None,
            headers: Headers::new(),
        });
        self.changes.push(Change::of_job(id, Effect::Forgotten));
    }
}
