//! Pins: jobs that are not dispatched until commands that name them have had their turn in the ingest topic.
//!
//! A pin decides nothing: it only makes a job late, which is allowed at any time. The command that it announces takes effect in its
//! order, from the ingest topic. So the result is always one that the ingest topic alone gives, whatever the urgent topic contains,
//! and whichever pins are lost.
//!
//! A pin ends by offsets only: once the shard has decided all commands up to the original that name jobs, or has read the ingest topic
//! to an end behind the original. In the latter case, the transaction of the original was aborted.
//!
//! A pinned job that is due leaves the window. If a command changes it, it is where all changed jobs are. Otherwise the look-ahead
//! reads it again when its pin ends.

use std::collections::{BTreeSet, HashMap, HashSet};

use redeliver_core::{Timestamp, mutant};

use super::Shard;
use crate::index::Cursor;
use crate::job::{Flow, Job, JobId, KeyHash, Kind};
use crate::request::{JobRef, key_hash};

/// The maximum number of pins of a shard.
pub(super) const MAX_PINS: usize = 10_000;
/// The maximum number of due jobs whose positions a shard keeps. Of further ones, only the first and the last of each flow are known.
const MAX_DUE: usize = 10_000;

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
    /// The jobs in [`Pins::due`].
    due: HashSet<JobId>,
}

/// A pinned job that is due and has left the window.
#[derive(Debug)]
struct DueJob {
    pin: NamedBy,
    flow: Flow,
    cursor: Cursor,
}

/// The pins of a shard.
#[derive(Debug, Default)]
pub(super) struct Pins {
    /// Every command before this offset that names a job has had its turn, or will never come.
    passed: i64,
    /// Every command before this offset was accepted, or will never come.
    read: i64,
    /// The number of accepted commands that are decided in the order of their offsets and have not had their turn.
    undecided: usize,
    pins: HashMap<NamedBy, Pin>,
    by_offset: BTreeSet<(i64, NamedBy)>,
    due: HashMap<JobId, DueJob>,
    /// The first and the last pinned job of each flow for which `due` had no room.
    others: HashMap<Flow, (Cursor, Cursor)>,
    /// When the pins of due jobs have ended that are to be dispatched now.
    released: HashMap<JobId, Timestamp>,
    /// Whether the urgent topic is still to be read up to its end.
    are_incomplete: bool,
}

impl Pins {
    /// The approximate size in memory.
    pub(super) fn bytes(&self) -> usize {
        200 * (self.pins.len() + self.due.len() + self.others.len() + self.released.len())
    }

    /// Accepts a command of the ingest topic. One that names a job or uses a key `is_in_order`.
    pub(super) fn accepted(&mut self, offset: i64, is_in_order: bool) {
        self.undecided += usize::from(is_in_order);
        self.reached(offset + 1);
    }

    /// Whether every command before this offset was accepted, or will never come.
    pub(super) fn has_read(&self, offset: i64) -> bool {
        self.read >= offset || mutant!("shard-finishes-releases-before-their-commands")
    }

    /// Every command before this offset was accepted, or will never come.
    fn reached(&mut self, offset: i64) {
        self.read = self.read.max(offset);
        self.pass_what_is_read();
    }

    /// A command has had its turn.
    fn decided(&mut self, offset: i64, is_in_order: bool) {
        if is_in_order {
            self.undecided -= 1;
            self.passed = self.passed.max(offset + 1);
        }
        self.pass_what_is_read();
    }

    /// Other commands have their turn before earlier ones that name jobs.
    fn pass_what_is_read(&mut self) {
        if self.undecided == 0 || mutant!("shard-unpins-too-early") {
            self.passed = self.passed.max(self.read);
        }
    }

    fn take(&mut self, copy: &UrgentCopy) -> Taken {
        let UrgentCopy { names, original } = *copy;
        if mutant!(
            "shard-pins-jobs-for-former-commands",
            original < self.passed,
            false
        ) {
            return Taken::Late;
        }
        let is_full = self.pins.len() >= MAX_PINS;
        match self.pins.get_mut(&names) {
            Some(pin) if pin.until >= original => {}
            Some(pin) => {
                self.by_offset.remove(&(pin.until, names));
                self.by_offset.insert((original, names));
                pin.until = original;
            }
            None if is_full => return Taken::NoRoom,
            None => {
                let due = HashSet::new();
                self.pins.insert(names, Pin { until: original, due });
                self.by_offset.insert((original, names));
            }
        }
        Taken::Pins
    }

    /// The pin of a job that ends last. One with a key and a pin for each can be in both.
    pub(super) fn pin_of(&self, job: &Job) -> Option<NamedBy> {
        if self.pins.is_empty() || mutant!("shard-dispatches-pinned-jobs") {
            return None;
        }
        let pinned = NamedBy::all_of(job).filter_map(|name| Some((self.pins.get(&name)?.until, name)));
        let (until, name) = pinned.max_by_key(|(until, _)| *until)?;
        // The turn that ends a pin may accept jobs after that.
        (until >= self.passed).then_some(name)
    }

    /// Keeps a due job that has left the window, until its pin ends.
    fn keep(&mut self, job: &Job, name: NamedBy) {
        self.forget(job.id);
        let (flow, cursor) = (Flow::of(job), Cursor::of(job));
        if mutant!("shard-loses-pinned-jobs") {
            return;
        }
        if self.due.len() >= MAX_DUE {
            let (first, last) = self.others.entry(flow).or_insert((cursor, cursor));
            (*first, *last) = ((*first).min(cursor), (*last).max(cursor));
            return;
        }
        if let Some(pin) = self.pins.get_mut(&name) {
            pin.due.insert(job.id);
            let pin = name;
            self.due.insert(job.id, DueJob { pin, flow, cursor });
        }
    }

    /// A job is not where it was when it left the window.
    pub(super) fn forget(&mut self, id: JobId) {
        self.released.remove(&id);
        if let Some(job) = self.due.remove(&id)
            && let Some(pin) = self.pins.get_mut(&job.pin)
        {
            pin.due.remove(&id);
        }
    }

    /// Ends pins whose commands have had their turn, or will never come. Returns where the due jobs are that no command has changed.
    fn end(&mut self, now: Timestamp) -> Vec<(Flow, Cursor)> {
        let mut released = Vec::new();
        let mut has_ended = false;
        while let Some((until, name)) = self.by_offset.first().copied()
            && until < self.passed
        {
            has_ended = true;
            self.by_offset.remove(&(until, name));
            let pin = self.pins.remove(&name);
            for id in pin.into_iter().flat_map(|pin| pin.due) {
                if self.released.len() < MAX_DUE {
                    self.released.insert(id, now);
                }
                let job = self.due.remove(&id);
                released.extend(job.map(|job| (job.flow, job.cursor)));
            }
        }
        // Not after each pin: those that are still pinned are read again, too.
        if has_ended && self.due.len() <= MAX_DUE / 2 {
            for (flow, (first, last)) in self.others.drain() {
                released.push((flow.clone(), first));
                released.push((flow, last));
            }
        }
        released
    }
}

impl Shard {
    /// The shard reads the ingest topic from this offset on.
    pub(crate) fn start_at(&mut self, offset: i64) {
        self.pins.reached(offset);
    }

    /// The shard has read the ingest topic up to an end at this offset.
    pub(crate) fn reached_end(&mut self, offset: i64) {
        if !mutant!("shard-ignores-the-end-of-the-ingest-topic") {
            self.pins.reached(offset);
        }
    }

    /// The offset before which all commands that name jobs have had their turn.
    pub(crate) fn passed(&self) -> i64 {
        self.pins.passed
    }

    /// Sets whether the urgent topic has been read up to its end. Until then, no job is dispatched.
    pub(crate) fn set_pins_complete(&mut self, are_complete: bool) {
        self.pins.are_incomplete = !are_complete;
    }

    /// The number of due jobs that are pinned, as far as they are known.
    pub(crate) fn pinned(&self) -> usize {
        self.pins.due.len()
    }

    /// The approximate size of the pins.
    pub(crate) fn pins_memory(&self) -> usize {
        self.pins.bytes()
    }

    /// Pins the job that a copy names, until the original has had its turn.
    pub(crate) fn take_copy(&mut self, copy: &UrgentCopy) -> Taken {
        self.pins.take(copy)
    }

    /// Whether jobs may be dispatched.
    pub(super) fn may_dispatch(&self) -> bool {
        !self.pins.are_incomplete || mutant!("shard-dispatches-before-its-pins-are-read")
    }

    /// Keeps a due job out of the window if it is pinned, until its pin ends. Returns whether it is.
    pub(super) fn keep_if_pinned(&mut self, job: &Job) -> bool {
        let name = self.pins.pin_of(job);
        if let Some(name) = name {
            self.pins.keep(job, name);
        }
        name.is_some()
    }

    /// A command has had its turn.
    pub(super) fn note_decided(&mut self, offset: i64, is_in_order: bool) {
        self.pins.decided(offset, is_in_order);
    }

    /// Ends pins whose commands have had their turn, or will never come.
    pub(super) fn end_pins(&mut self, now: Timestamp) {
        for (flow, cursor) in self.pins.end(now) {
            self.look_ahead.read_again(&flow, cursor);
        }
    }

    /// Since when a due job can be dispatched, as far as pins are concerned.
    pub(super) fn unpinned_since(&self, job: &Job) -> Timestamp {
        let released = self.pins.released.get(&job.id);
        released.map_or(job.due, |released| job.due.max(*released))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobState, Payload, Priority};

    const START: Timestamp = Timestamp::from_millis(1_763_722_800_000);

    fn copy(original: i64) -> UrgentCopy {
        UrgentCopy {
            names: NamedBy::Key([7; 16]),
            original,
        }
    }

    #[test]
    fn what_was_read_is_passed_when_no_command_that_names_a_job_is_undecided() {
        let mut pins = Pins::default();
        pins.accepted(10, true);
        pins.accepted(11, false);
        pins.accepted(12, true);
        pins.decided(11, false);
        pins.reached(20);
        assert_eq!(pins.passed, 0);
        pins.decided(10, true);
        assert_eq!(pins.passed, 11);
        pins.decided(12, true);
        assert_eq!(pins.passed, 20);
        // A broker may report a former end.
        pins.reached(15);
        assert_eq!(pins.passed, 20);
    }

    #[test]
    fn a_pin_lasts_until_the_last_command_that_names_its_job() {
        for originals in [[5, 9], [9, 5]] {
            let mut pins = Pins::default();
            for original in originals {
                assert_eq!(pins.take(&copy(original)), Taken::Pins);
            }
            pins.reached(9);
            pins.end(START);
            assert_eq!(pins.pins.len(), 1);
            pins.reached(10);
            pins.end(START);
            assert_eq!((pins.pins.len(), pins.by_offset.len()), (0, 0));
            assert_eq!(pins.take(&copy(9)), Taken::Late);
        }
    }

    fn job(offset: u64) -> Job {
        Job {
            kind: Kind::App,
            app: "app".into(),
            topic: "jobs".into(),
            payload: Payload::default(),
            id: JobId::new(START, 0, i64::try_from(offset).unwrap()),
            state: JobState::Scheduled,
            priority: Priority::Normal,
            due: START,
            accepted: START,
            revision: 1,
            idempotency_key: Some("key".into()),
            request_hash: [0; 16],
            request_id: None,
            ended: None,
            expires: None,
            occurrence: None,
            released: None,
        }
    }

    #[test]
    fn of_too_many_due_jobs_the_first_and_the_last_are_known() {
        let mut pins = Pins::default();
        let key = NamedBy::Key(key_hash("app", "key"));
        for (names, original) in [(key, 5), (NamedBy::Id(job(0).id), 9)] {
            assert_eq!(pins.take(&UrgentCopy { names, original }), Taken::Pins);
        }
        for offset in 0..MAX_DUE as u64 + 5 {
            let job = job(offset);
            let name = pins.pin_of(&job).unwrap();
            pins.keep(&job, name);
        }
        assert_eq!((pins.due.len(), pins.others.len()), (MAX_DUE, 1));
        // One that a command has changed.
        pins.forget(job(3).id);
        pins.reached(6);
        let mut released: Vec<Cursor> = pins.end(START).into_iter().map(|(_, cursor)| cursor).collect();
        released.sort_unstable();
        let expected = (1..MAX_DUE as u64).filter(|offset| *offset != 3);
        let others = [MAX_DUE as u64, MAX_DUE as u64 + 4];
        let expected = expected.chain(others).map(|offset| Cursor::of(&job(offset)));
        assert!(released.into_iter().eq(expected));
        assert_eq!((pins.due.len(), pins.others.len()), (1, 0));
    }
}
