//! What a shard has committed, on its way to the index: one batch after the other, in the order of the turns.
//!
//! A full index refuses a batch as a whole. It is then tried again every second, and what ends jobs, and so frees memory,
//! does not wait that long: while there is any of it, batches are forced in. That takes what was committed before it along,
//! which is little, because a shard accepts no far jobs while its index is full.

use std::collections::VecDeque;
use std::time::Duration;

use redeliver_core::Timestamp;

use super::IndexRequest;
use crate::index::{Batch, Change, Effect};

/// The most changes that are given to the index at once, and their bytes.
pub(super) const BATCH: usize = 10_000;
pub(super) const BATCH_BYTES: usize = 4 << 20;
/// Between two questions to a full index whether it has room again.
const PROBE: Duration = Duration::from_secs(1);

/// Changes on their way.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: VecDeque<Committed>,
    /// How many changes in the queue end jobs.
    freeing: usize,
    is_applying: bool,
    /// The index is full; when it is asked whether it still is.
    full: Option<Timestamp>,
}

/// What is to be given to the index.
#[derive(Debug)]
struct Committed {
    /// The index shows all that was committed up to this turn when it shows this.
    turn: u64,
    batch: Batch,
    bytes: usize,
    freeing: usize,
}

impl Committed {
    fn new(turn: u64, batch: Batch) -> Self {
        Self {
            turn,
            bytes: batch.changes.iter().map(Change::size).sum(),
            freeing: batch.changes.iter().filter(|change| frees(change)).count(),
            batch,
        }
    }
}

/// Whether a change leaves less to remember.
fn frees(change: &Change) -> bool {
    match change.effect {
        Effect::Waits { .. } => false,
        Effect::Ended { .. } | Effect::Forgotten => true,
    }
}

impl Outbox {
    /// Whether the index has refused changes and taken none since but by force.
    pub(super) fn is_refused(&self) -> bool {
        self.full.is_some()
    }

    /// Takes the changes of a turn, which stand in the state topic between `from` and `end`.
    pub(super) fn push(&mut self, turn: u64, mut from: i64, end: i64, mut changes: Vec<Change>) {
        let seal = changes.last().map(|last| last.seal(end - 1));
        loop {
            let count = first_part(&changes);
            let rest = changes.split_off(count);
            let is_last = rest.is_empty();
            // Between the records of a turn there may be others, such as the marker of the turn before, so the record
            // behind a part stands here or later.
            let to = if is_last { end } else { from + signed(count) };
            let batch = Batch {
                from,
                to,
                changes,
                seal: seal.filter(|_| is_last),
                force: false,
            };
            let committed = Committed::new(if is_last { turn } else { turn - 1 }, batch);
            self.freeing += committed.freeing;
            self.queue.push_back(committed);
            if is_last {
                break;
            }
            (from, changes) = (to, rest);
        }
    }

    /// What is to be given to the index now.
    pub(super) fn next(&mut self, now: Timestamp) -> Option<IndexRequest> {
        if self.is_applying {
            return None;
        }
        let is_time = |probe: Timestamp| now >= probe || probe > now.after(PROBE);
        if self.queue.is_empty() && self.full.is_some_and(is_time) {
            // With nothing to ask it with, only the next changes tell.
            self.full = None;
        }
        let force = match self.full {
            None => false,
            Some(probe) if is_time(probe) => false,
            Some(_) if self.freeing > 0 => true,
            Some(_) => return None,
        };
        let mut first = self.queue.pop_front()?;
        while first.batch.changes.len() < BATCH
            && self
                .queue
                .front()
                .is_some_and(|next| first.bytes + next.bytes <= BATCH_BYTES)
            && let Some(next) = self.queue.pop_front()
        {
            first.bytes += next.bytes;
            first.freeing += next.freeing;
            first.turn = next.turn;
            first.batch.to = next.batch.to;
            first.batch.seal = next.batch.seal.or(first.batch.seal);
            first.batch.changes.extend(next.batch.changes);
        }
        self.freeing -= first.freeing;
        self.is_applying = true;
        let Committed { turn, mut batch, .. } = first;
        batch.force = force;
        Some(IndexRequest::Apply { turn, batch })
    }

    /// The index has taken what it was given, `by_force` or because it has room.
    pub(super) fn applied(&mut self, by_force: bool) {
        self.is_applying = false;
        if !by_force {
            self.full = None;
        }
    }

    /// The index is full.
    pub(super) fn refused(&mut self, turn: u64, batch: Batch, now: Timestamp) {
        self.is_applying = false;
        self.full = Some(now.after(PROBE));
        let refused = Committed::new(turn, batch);
        self.freeing += refused.freeing;
        self.queue.push_front(refused);
    }
}

/// How many of these changes are given to the index at once, at least one of them.
fn first_part(changes: &[Change]) -> usize {
    let mut bytes = 0;
    for (count, change) in changes.iter().enumerate() {
        bytes += change.size();
        if count > 0 && bytes > BATCH_BYTES {
            return count;
        }
    }
    changes.len()
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::job::JobId;

    fn waits(number: i64) -> Change {
        let effect = Effect::Waits {
            due: Timestamp::from_millis(0),
            record: Bytes::from_static(b"record"),
            key: None,
        };
        let id = JobId::new(Timestamp::from_millis(0), 0, number);
        Change { id, effect }
    }

    fn forgotten(number: i64) -> Change {
        let effect = Effect::Forgotten;
        Change {
            effect,
            ..waits(number)
        }
    }

    fn next(outbox: &mut Outbox, now: i64) -> Option<(u64, Batch)> {
        match outbox.next(Timestamp::from_millis(now))? {
            IndexRequest::Apply { turn, batch } => Some((turn, batch)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_full_index_is_asked_again_and_forced_only_to_free_memory() {
        let mut outbox = Outbox::default();
        outbox.push(1, 0, 2, vec![waits(1)]);
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        assert!(!batch.force);
        outbox.refused(turn, batch, Timestamp::from_millis(0));
        assert!(outbox.is_refused());
        outbox.push(2, 2, 4, vec![waits(2)]);
        assert!(next(&mut outbox, 999).is_none(), "only adds jobs");
        // The question whether it is still full comes with all there is.
        let (turn, batch) = next(&mut outbox, 1_000).unwrap();
        assert_eq!((turn, batch.from, batch.to, batch.force), (2, 0, 4, false));
        outbox.refused(turn, batch, Timestamp::from_millis(1_000));
        outbox.push(3, 4, 6, vec![forgotten(1)]);
        let (turn, batch) = next(&mut outbox, 1_001).unwrap();
        assert_eq!((turn, batch.from, batch.to, batch.force), (3, 0, 6, true));
        outbox.applied(true);
        assert!(outbox.is_refused(), "that proves no room");
        outbox.push(4, 6, 8, vec![waits(3)]);
        assert!(next(&mut outbox, 1_500).is_none());
        let (_, batch) = next(&mut outbox, 2_000).unwrap();
        assert!(!batch.force);
        outbox.applied(false);
        assert!(!outbox.is_refused());
        assert_eq!((outbox.freeing, outbox.queue.len()), (0, 0));
    }

    #[test]
    fn an_index_that_is_asked_nothing_more_is_not_full_for_ever() {
        let mut outbox = Outbox::default();
        outbox.push(1, 0, 2, vec![forgotten(1)]);
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        outbox.refused(turn, batch, Timestamp::from_millis(0));
        assert!(next(&mut outbox, 1).unwrap().1.force);
        outbox.applied(true);
        assert!(next(&mut outbox, 999).is_none() && outbox.is_refused());
        assert!(next(&mut outbox, 1_000).is_none() && !outbox.is_refused());
    }

    #[test]
    fn a_clock_that_was_set_back_delays_no_question() {
        let mut outbox = Outbox::default();
        outbox.push(1, 0, 2, vec![waits(1)]);
        let (turn, batch) = next(&mut outbox, 100_000).unwrap();
        outbox.refused(turn, batch, Timestamp::from_millis(100_000));
        assert!(next(&mut outbox, 0).is_some());
    }
}
