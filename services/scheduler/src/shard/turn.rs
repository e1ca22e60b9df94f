//! What a shard writes in one turn, and how much it may write.

use redeliver_core::{Output, Timestamp};

/// The records that a shard writes in one turn.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub(crate) outputs: Vec<Output>,
    /// Offsets of the commands that the turn decides.
    pub(crate) completed: Vec<i64>,
    pub(crate) tally: Tally,
    /// The approximate size of the outputs.
    bytes: usize,
}

impl Writes {
    pub(super) fn push(&mut self, output: Output) {
        // Rejected and forwarded commands keep their keys and headers, which can be larger than their values.
        self.bytes += output.size();
        self.outputs.push(output);
    }

    /// Whether another output fits.
    pub(super) fn fits_into(&self, room: Room) -> bool {
        self.outputs.len() < room.records && self.bytes < room.bytes
    }

    /// The approximate size of the outputs.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// How much a turn may write. One command or one job may exceed it, so that each makes progress however large it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

impl Room {
    /// This many quarters of the room, rounded up: at least one record of a room that is not empty.
    pub(super) fn quarters(self, count: usize) -> Self {
        let part = |whole: usize| whole / 4 * count + (whole % 4 * count).div_ceil(4);
        Self {
            records: part(self.records),
            bytes: part(self.bytes),
        }
    }

    pub(crate) fn is_empty(self) -> bool {
        self.records == 0 || self.bytes == 0
    }
}

/// Counts of one turn, for metrics.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) duplicates: u64,
    pub(crate) conflicts: u64,
    pub(crate) rejected: u64,
    pub(crate) no_room: u64,
    pub(crate) over_quota: u64,
    pub(crate) forwarded: u64,
    /// Requests with a timestamp that is too old to be their time.
    pub(crate) too_old_timestamps: u64,
    pub(crate) cancelled: u64,
    pub(crate) rescheduled: u64,
    /// Long waits that an operator has released before they were due.
    pub(crate) released_early: u64,
    pub(crate) replaced: u64,
    pub(crate) refused: u64,
    pub(crate) expired: u64,
    pub(crate) forgotten: u64,
    /// Jobs whose topic was missing for too long, or refused them.
    pub(crate) dead: u64,
    /// Long waits that an operator has moved to the dead letters.
    pub(crate) given_up: u64,
    /// Schedules that were created, changed or deleted.
    pub(crate) schedules_changed: u64,
    /// Occurrences of schedules for which a job was created, that were skipped, and whose job could not be created yet.
    pub(crate) occurrences: u64,
    pub(crate) skipped_occurrences: u64,
    pub(crate) postponed_occurrences: u64,
    pub(crate) dispatched: Vec<Dispatched>,
}

/// A dispatched job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dispatched {
    pub(super) due: Timestamp,
    /// Since when it could be dispatched: since its due time or, if its application was rate-limited, later.
    pub(crate) ready: Timestamp,
}

impl Tally {
    /// Counts a dispatched job with this due time as dead. False if there is none.
    pub(crate) fn refuse_dispatch(&mut self, due: Timestamp) -> bool {
        let Some(index) = self.dispatched.iter().position(|job| job.due == due) else {
            return false;
        };
        self.dispatched.swap_remove(index);
        self.dead += 1;
        true
    }
}
