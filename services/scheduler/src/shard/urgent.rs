//! Pins: jobs that are not dispatched until commands that name them have had their turn in the ingest topic.
//!
//! A pin decides nothing: it only makes a job late, which is allowed at any time. The command that it announces takes effect in its
//! order, from the ingest topic. So the result is always one that the ingest topic alone gives, whatever the urgent topic contains,
//! and whichever pins are lost.
//!
//! A pinned job that is due leaves the window. When its pin ends, the look-ahead reads it again, in the state that the commands
//! before have left it in.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use redeliver_core::{Timestamp, mutant};

use super::Shard;
use crate::index::Cursor;
use crate::job::{Flow, Job, JobId, KeyHash, Kind};
use crate::request::{JobRef, key_hash};

/// The maximum number of pins of a shard.
pub(super) const MAX_PINS: usize = 10_000;
/// The maximum number of due jobs that one pin keeps. Several jobs have one key only after its retention.
const MAX_DUE: usize = 16;
/// A command that was written to the ingest topic so long after a copy was certainly written after the original of that copy, as far as
/// the clocks of producers are right. So the pin of a copy that names an offset that will not come for long ends.
pub(super) const MAX_CLOCK_SKEW: Duration = Duration::from_secs(600);
/// If a shard that accepts commands gets none for so long, it has read all: the commands that the pins wait for are not visible, for
/// example because their transaction was aborted. Open transactions, which commands wait behind, time out after a minute by default.
pub(super) const QUIET: Duration = Duration::from_secs(90);

/// What a command names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum NamedBy {
    Id(JobId),
    Key(KeyHash),
}

impl NamedBy {
    pub(crate) fn of(job: &JobRef) -> Self {
        match job {
            JobRef::Id(id) => Self::Id(*id),
            JobRef::Key { app, key } => Self::Key(key_hash(app, key)),
        }
    }

    /// All that a command can name a job by. Clients cannot name the record of a pipeline.
    fn all_of(job: &Job) -> impl Iterator<Item = Self> {
        let key = job.idempotency_key.as_deref();
        let key = key.map(|key| Self::Key(key_hash(&job.app, key)));
        let is_named = job.kind == Kind::App;
        [Some(Self::Id(job.id)), key]
            .into_iter()
            .flatten()
            .filter(move |_| is_named)
    }
}

/// The copy of a command that names a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UrgentCopy {
    pub(crate) names: NamedBy,
    /// The offset of the original in the ingest topic.
    pub(crate) original: i64,
    /// When the copy was written, and no later than it was read.
    pub(crate) written: Timestamp,
}

/// What becomes of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It pins what it names.
    Pins,
    /// The original has had its turn.
    Late,
    /// There are too many pins.
    NoRoom,
}

#[derive(Debug)]
struct Pin {
    /// The offset of the last command that names the job.
    until: i64,
    written: Timestamp,
    /// The due jobs, and where the look-ahead reads them again.
    due: BTreeMap<JobId, (Flow, Cursor)>,
}

/// The pins of a shard.
#[derive(Debug, Default)]
pub(super) struct Pins {
    /// Every command before this offset that names a job has had its turn.
    passed: i64,
    /// The number of accepted commands that are decided in the order of their offsets and have not had their turn.
    undecided: usize,
    pins: HashMap<NamedBy, Pin>,
    by_offset: BTreeSet<(i64, NamedBy)>,
    /// The number of due jobs of all pins.
    due: usize,
    /// When a command was last accepted, or none could be. `None` before the shard has read any.
    last_command: Option<Timestamp>,
    /// When something was last pinned that was not pinned before.
    last_pin: Option<Timestamp>,
    /// Whether the urgent topic is still to be read up to its end.
    are_incomplete: bool,
}

impl Pins {
    /// The approximate size in memory.
    pub(super) fn bytes(&self) -> usize {
        200 * (self.pins.len() + self.due)
    }

    /// Accepts a command of the ingest topic. One that names a job or uses a key `is_in_order`.
    pub(super) fn accepted(&mut self, is_in_order: bool, now: Timestamp) {
        self.undecided += usize::from(is_in_order);
        self.last_command = Some(now);
    }

    fn take(&mut self, copy: &UrgentCopy, now: Timestamp) -> Taken {
        let UrgentCopy {
            names,
            original,
            written,
        } = *copy;
        if mutant!(
            "shard-pins-jobs-for-former-commands",
            original < self.passed,
            false
        ) {
            return Taken::Late;
        }
        let is_full = self.pins.len() >= MAX_PINS;
        match self.pins.get_mut(&names) {
            Some(pin) if pin.until >= original => pin.written = pin.written.max(written),
            Some(pin) => {
                self.by_offset.remove(&(pin.until, names));
                self.by_offset.insert((original, names));
                (pin.until, pin.written) = (original, pin.written.max(written));
            }
            None if is_full => return Taken::NoRoom,
            None => {
                let due = BTreeMap::new();
                let pin = Pin {
                    until: original,
                    written,
                    due,
                };
                self.pins.insert(names, pin);
                // The command may still be on its way.
                self.last_pin = Some(now);
                self.by_offset.insert((original, names));
            }
        }
        Taken::Pins
    }

    /// Whether a job is pinned. One with a key and a pin for each can be in both.
    pub(super) fn is_pinned(&self, job: &Job) -> bool {
        self.pin_of(job).is_some() && !mutant!("shard-dispatches-pinned-jobs")
    }

    /// The pin of a job that ends last.
    fn pin_of(&self, job: &Job) -> Option<NamedBy> {
        if self.pins.is_empty() {
            return None;
        }
        let pinned = NamedBy::all_of(job).filter_map(|name| Some((self.pins.get(&name)?, name)));
        let pinned = pinned.max_by_key(|(pin, _)| pin.until);
        let has_room = |pin: &Pin| pin.due.len() < MAX_DUE || pin.due.contains_key(&job.id);
        pinned.filter(|(pin, _)| has_room(pin)).map(|(_, name)| name)
    }

    /// Keeps a pinned job that has left the window.
    fn keep(&mut self, job: &Job) {
        let name = self.pin_of(job);
        if let Some(pin) = name.and_then(|name| self.pins.get_mut(&name)) {
            let place = (Flow::of(job), Cursor::of(job));
            self.due += usize::from(pin.due.insert(job.id, place).is_none());
        }
    }

    /// A command has had its turn. Returns where the jobs are whose pins have ended.
    fn decided(&mut self, offset: i64, written: Option<Timestamp>, is_in_order: bool) -> Vec<(Flow, Cursor)> {
        self.undecided -= usize::from(is_in_order);
        // Other commands have their turn before earlier ones that name jobs.
        if !is_in_order && self.undecided > 0 && !mutant!("shard-unpins-too-early") {
            return Vec::new();
        }
        self.passed = self.passed.max(offset + 1);
        let mut released = Vec::new();
        while let Some((until, name)) = self.by_offset.first().copied()
            && until < self.passed
        {
            self.end((until, name), &mut released);
        }
        while let Some((until, name)) = self.by_offset.last().copied()
            && let Some(pin) = self.pins.get(&name)
            && written.is_some_and(|written| written > pin.written.after(MAX_CLOCK_SKEW))
        {
            self.end((until, name), &mut released);
        }
        released
    }

    fn end(&mut self, pin: (i64, NamedBy), released: &mut Vec<(Flow, Cursor)>) {
        self.by_offset.remove(&pin);
        if let Some(pin) = self.pins.remove(&pin.1) {
            self.due -= pin.due.len();
            released.extend(pin.due.into_values());
        }
    }

    /// Ends all pins if the shard has had no commands for a while. `is_reading`: it accepts some.
    fn quiet(&mut self, is_reading: bool, now: Timestamp) -> Vec<(Flow, Cursor)> {
        // The clock may have been set back.
        let is_later = |last: Timestamp| last > now;
        if !is_reading || self.undecided > 0 || self.last_command.is_none_or(is_later) {
            self.last_command = Some(now);
        }
        self.last_pin = self.last_pin.map(|last| last.min(now));
        let mut released = Vec::new();
        if self.quiet_at().is_some_and(|quiet_at| now >= quiet_at) {
            while let Some(last) = self.by_offset.last().copied() {
                self.end(last, &mut released);
            }
        }
        released
    }

    /// When the next pin may end although no command comes.
    fn next_quiet(&self) -> Option<Timestamp> {
        self.quiet_at().filter(|_| self.due > 0)
    }

    fn quiet_at(&self) -> Option<Timestamp> {
        let last = self.last_command?;
        Some(self.last_pin.map_or(last, |pin| pin.max(last)).after(QUIET))
    }
}

impl Shard {
    /// The shard reads the ingest topic from this offset on.
    pub(crate) fn start_at(&mut self, offset: i64) {
        self.pins.passed = offset;
    }

    /// The offset before which all commands that name jobs have had their turn.
    pub(crate) fn passed(&self) -> i64 {
        self.pins.passed
    }

    /// Sets whether the urgent topic has been read up to its end. Until then, no job is dispatched.
    pub(crate) fn set_pins_complete(&mut self, are_complete: bool) {
        self.pins.are_incomplete = !are_complete;
    }

    /// The number of due jobs that are pinned.
    pub(crate) fn pinned(&self) -> usize {
        self.pins.due
    }

    /// Pins the job that a copy names, until the original has had its turn.
    pub(crate) fn take_copy(&mut self, copy: &UrgentCopy, now: Timestamp) -> Taken {
        self.pins.take(copy, now)
    }

    /// Whether jobs may be dispatched.
    pub(super) fn may_dispatch(&self) -> bool {
        !self.pins.are_incomplete || mutant!("shard-dispatches-before-its-pins-are-read")
    }

    /// Keeps a pinned job out of the window until its pin ends.
    pub(super) fn keep_pinned(&mut self, job: &Job) {
        self.pins.keep(job);
    }

    /// Ends the pins that wait for this command, or for earlier ones.
    pub(super) fn end_pins(&mut self, offset: i64, written: Option<Timestamp>, is_in_order: bool) {
        let released = self.pins.decided(offset, written, is_in_order);
        self.read_again(released);
    }

    /// Ends all pins if the shard has read the ingest topic up to its end.
    pub(super) fn end_quiet_pins(&mut self, now: Timestamp) {
        let released = self.pins.quiet(self.capacity() > 0, now);
        self.read_again(released);
    }

    fn read_again(&mut self, released: Vec<(Flow, Cursor)>) {
        for (flow, cursor) in released {
            self.look_ahead.rewind(&flow, cursor);
        }
    }

    /// When a due job can be dispatched.
    pub(super) fn next_dispatch(&self) -> Option<Timestamp> {
        if !self.may_dispatch() {
            return None;
        }
        let times = [self.window.next_due(), self.pins.next_quiet()];
        times.into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_of_an_idle_shard_outlasts_the_turn_that_takes_it() {
        let start = Timestamp::from_millis(0);
        let mut pins = Pins::default();
        pins.accepted(false, start);
        pins.decided(0, Some(start), false);
        // The original is not visible yet, such as behind an open transaction.
        let now = start.after(2 * QUIET);
        let copy = UrgentCopy {
            names: NamedBy::Key([7; 16]),
            original: 100,
            written: now,
        };
        assert_eq!(pins.take(&copy, now), Taken::Pins);
        pins.quiet(true, now.after(QUIET / 2));
        assert_eq!(pins.pins.len(), 1);
        pins.quiet(true, now.after(QUIET));
        assert_eq!(pins.pins.len(), 0);
    }
}
