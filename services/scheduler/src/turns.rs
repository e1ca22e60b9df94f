//! The turns of a lane: what its shards add to one transaction, and what becomes of it. The processor and the model of a shard both drive their shards
//! with [`Turns`].
//!
//! A turn begins with [`Turns::collect`], which asks a shard more than once for what it writes, and ends with [`Turns::committed`] or with the shard.

use std::collections::HashMap;

use redeliver_core::{Output, Timestamp, mutant};
use redeliver_kafka::{AssignmentId, Refused, TransactionBatch};

use crate::job::JobId;
use crate::refused::{self, Replacement};
use crate::settings::Settings;
use crate::shard::{RefusedJob, Room, Shard, Tally, Writes};
use crate::window::Backlog;

/// The maximum number of records of a transaction while there is a backlog of due jobs or commands, and jobs of an application without one are
/// due or become due soon. The fewer records, the sooner these jobs are dispatched, and the more transactions a backlog takes.
pub(crate) const SHORT_TURN: usize = 1_000;
/// The maximum size of the records that a shard writes in one turn.
const MAX_TURN_BYTES: usize = 8 << 20;

/// The state topic ends before the shard's last record: it was truncated, or created again, or the broker has
/// not told the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("partition {partition} of the state topic ends at {end}, not at {expected} or later")]
pub(crate) struct LostRecords {
    partition: i32,
    end: i64,
    expected: i64,
}

/// A shard with the assignment of its partition.
pub(crate) type AssignedShard<'a> = (AssignmentId, &'a mut Shard);

/// The current turns of the shards of a lane.
#[derive(Default)]
pub(crate) struct Turns {
    /// The shard with which the next transaction begins, modulo their number.
    next: usize,
    /// Of each call of [`Shard::finish`].
    pub(crate) tallies: Vec<(AssignmentId, Tally)>,
    /// The end of the state topic after the current turn, by partition.
    changelog_ends: HashMap<i32, i64>,
}

impl Turns {
    /// Collects the writes of the shards: each shard up to its share first, then each up to the remaining room. All writes
    /// together, including dead letters, are one transaction, so they share its maximum size.
    pub(crate) fn collect(
        &mut self,
        shards: &mut [AssignedShard<'_>],
        now: Timestamp,
        limit: usize,
        batch: &mut TransactionBatch,
    ) {
        let backlogs = shards.iter().map(|(_, shard)| shard.backlog(now));
        let backlog = backlogs.fold(Backlog::default(), Backlog::merge);
        let limit = if backlog.is_long && backlog.has_others {
            limit.min(SHORT_TURN)
        } else {
            limit
        };
        let count = shards.len().max(1);
        let share = (limit / count).max(limit.min(64));
        let mut bytes = vec![0_usize; shards.len()];
        for max_per_shard in [share, limit] {
            for step in 0..shards.len() {
                let index = (self.next + step) % count;
                let all = bytes.iter().sum();
                let room = Room {
                    records: limit.saturating_sub(batch.outputs.len()).min(max_per_shard),
                    bytes: TransactionBatch::BYTES
                        .saturating_sub(all)
                        .min(MAX_TURN_BYTES.saturating_sub(bytes[index])),
                };
                if room.is_empty() {
                    continue;
                }
                let (id, shard) = &mut shards[index];
                let writes = shard.finish(now, room);
                bytes[index] += writes.bytes();
                self.add(*id, writes, batch);
            }
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Adds what a shard writes.
    pub(crate) fn add(&mut self, id: AssignmentId, writes: Writes, batch: &mut TransactionBatch) {
        let Writes {
            outputs,
            completed,
            tally,
            ..
        } = writes;
        if outputs.is_empty() && completed.is_empty() {
            return;
        }
        if !batch.owners.contains(&id) && !mutant!("scheduler-forgets-the-owner") {
            batch.owners.push(id);
        }
        batch.outputs.extend(outputs);
        batch
            .completed
            .extend(completed.into_iter().map(|offset| (id, offset)));
        self.tallies.push((id, tally));
    }

    /// Replaces what topics have refused. False if something cannot be replaced.
    pub(crate) fn refused(
        &mut self,
        shards: &mut [AssignedShard<'_>],
        settings: &Settings,
        refused: &[Refused],
        batch: &mut TransactionBatch,
        now: Timestamp,
    ) -> bool {
        refused.iter().all(|Refused { index, failure }| {
            match refused::replace(settings, &mut batch.outputs[*index], failure, now) {
                Replacement::Nothing => return false,
                Replacement::DeadLetter => {}
                Replacement::OfJob(id) => self.refuse_dispatch(shards, id, settings, batch),
            }
            true
        })
    }

    /// The topic of a job has refused it: the turn must not say that the job was dispatched.
    fn refuse_dispatch(
        &mut self,
        shards: &mut [AssignedShard<'_>],
        id: JobId,
        settings: &Settings,
        batch: &mut TransactionBatch,
    ) {
        let mut shards = shards.iter_mut();
        let Some((assignment, shard)) = shards.find(|(_, shard)| shard.number() == id.shard()) else {
            return;
        };
        let Some(RefusedJob { record, due }) = shard.refuse_dispatch(id) else {
            return;
        };
        let key = id.to_string();
        let is_its_state = |output: &&mut Output| {
            let is_tombstone = output.value.is_none();
            output.topic == settings.state && output.key.as_deref() == Some(key.as_bytes()) && !is_tombstone
        };
        if let Some(output) = batch.outputs.iter_mut().rfind(is_its_state) {
            output.value = Some(record);
        }
        let mut tallies = self.tallies.iter_mut().filter(|(id, _)| id == assignment);
        tallies.any(|(_, tally)| tally.refuse_dispatch(due));
    }

    /// The transaction has written to this partition of the state topic, which now ends at `end`.
    ///
    /// # Errors
    /// If the topic has lost what the shard knows of it, or its end is unknown. The turn is then not confirmed, and the shard must be replaced: its index may
    /// contain what the topic does not, and the other way around.
    pub(crate) fn changelog_written(
        &mut self,
        shards: &[AssignedShard<'_>],
        partition: i32,
        end: i64,
    ) -> Result<(), LostRecords> {
        let mut shards = shards.iter().filter(|(_, shard)| shard.number() == partition);
        let expected = shards.next().map_or(end, |(_, shard)| shard.least_end());
        if end < expected {
            return Err(LostRecords {
                partition,
                end,
                expected,
            });
        }
        self.changelog_ends.insert(partition, end);
        Ok(())
    }

    /// The transaction is committed. Returns what it contained.
    pub(crate) fn committed(&mut self, shards: &mut [AssignedShard<'_>]) -> Vec<Tally> {
        for (_, shard) in shards {
            if let Some(end) = self.changelog_ends.remove(&shard.number()) {
                shard.committed(end);
            }
        }
        let tallies = std::mem::take(&mut self.tallies).into_iter();
        tallies.map(|(_, tally)| tally).collect()
    }

    /// Forgets the tallies of a shard that the lane does not own any more.
    pub(crate) fn revoked(&mut self, assignment: AssignmentId) {
        self.tallies.retain(|(id, _)| *id != assignment);
    }

    /// Forgets what is not committed.
    pub(crate) fn clear(&mut self) {
        self.tallies.clear();
        self.changelog_ends.clear();
    }
}
