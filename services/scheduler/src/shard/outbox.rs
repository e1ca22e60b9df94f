//! The committed changes of a shard on their way to the index: one batch after the other, in the order of the turns.
//!
//! A full index refuses a batch as a whole. The batch is sent again every second, or an empty one if there is none. Changes that end jobs
//! do not wait for that: while the queue contains any, batches are forced. The end of a job that the index has as waiting frees memory. That of another one would
//! add to the index, so a shard forgets jobs as they end while the index is full: then it leaves nothing.
//!
//! A forced batch includes the changes that were committed before. What they add is limited: it was committed before the shard noticed that the index is full, or
//! belongs to jobs that are due within [`Settings::window`](crate::settings::Settings::window), because a shard accepts no others meanwhile.

use std::collections::VecDeque;
use std::time::Duration;

use redeliver_core::{Timestamp, mutant};

use crate::index::{Batch, Change, Effect};
use crate::index_messages::IndexRequest;

/// The maximum number of changes per batch.
const MAX_BATCH: usize = 10_000;
/// The time between two attempts to apply changes to a full index without force.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The queue of committed changes.
#[derive(Debug)]
pub(super) struct Outbox {
    /// The maximum size of the changes per batch.
    max_bytes: usize,
    queue: VecDeque<PendingBatch>,
    /// The number of queued changes that end jobs.
    freeing: usize,
    /// The size of the queued changes.
    bytes: usize,
    is_applying: bool,
    /// Set while the index is full: when to send a batch without force again.
    next_probe: Option<Timestamp>,
    /// The last turn, and the end of the state topic after it.
    last: (u64, i64),
}

/// A batch that waits for the index.
#[derive(Debug)]
struct PendingBatch {
    /// Once the index contains the batch, it contains everything that was committed up to this turn.
    turn: u64,
    batch: Batch,
    bytes: usize,
    freeing: usize,
}

impl PendingBatch {
    fn new(turn: u64, batch: Batch) -> Self {
        Self {
            turn,
            bytes: batch.changes.iter().map(Change::size).sum(),
            freeing: batch.changes.iter().filter(|change| frees(change)).count(),
            batch,
        }
    }
}

/// Whether a change frees memory of the index.
fn frees(change: &Change) -> bool {
    match change.effect {
        Effect::Waits { .. } => false,
        Effect::Ended { .. } | Effect::Forgotten => true,
    }
}

impl Outbox {
    /// An empty queue whose batches have at most this size in bytes, or one change.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            queue: VecDeque::new(),
            freeing: 0,
            bytes: 0,
            is_applying: false,
            next_probe: None,
            last: (0, 0),
        }
    }

    /// Whether the index has refused a batch, and has accepted none since except by force.
    pub(super) fn is_index_full(&self) -> bool {
        self.next_probe.is_some()
    }

    /// The approximate size of the queued changes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds the changes of a turn, which the state topic contains between `from` and `end`.
    pub(super) fn push(&mut self, turn: u64, mut from: i64, end: i64, mut changes: Vec<Change>) {
        self.last = (turn, end);
        let last_record = changes.last().map(|last| last.digest(end - 1));
        loop {
            let count = self.first_batch_len(&changes);
            let rest = changes.split_off(count);
            let is_last = rest.is_empty();
            // Other records can precede those of the turn, such as the transaction marker of the turn before. So the record
            // after this part is at this offset or later, and a batch that starts here leaves out no change.
            let to = if is_last { end } else { from + signed(count) };
            let batch = Batch {
                from,
                to,
                changes,
                last_record: last_record.filter(|_| is_last),
                force: false,
            };
            // The last part completes the turn. Until it is applied, the overlay entries of the turn are still needed. Those of the turn before are not:
            // its changes precede these.
            let pending = PendingBatch::new(if is_last { turn } else { turn - 1 }, batch);
            self.freeing += pending.freeing;
            self.bytes += pending.bytes;
            self.queue.push_back(pending);
            if is_last {
                break;
            }
            (from, changes) = (to, rest);
        }
    }

    /// The next batch for the index.
    pub(super) fn next(&mut self, now: Timestamp) -> Option<IndexRequest> {
        if self.is_applying {
            return None;
        }
        let is_probe_due = |probe: Timestamp| now >= probe || probe > now.after(PROBE_INTERVAL);
        if self.queue.is_empty() && self.next_probe.is_some_and(is_probe_due) {
            let (turn, end) = self.last;
            self.queue.push_back(PendingBatch::new(turn, Batch::renewal(end)));
        }
        let force = match self.next_probe {
            None => false,
            Some(probe) if is_probe_due(probe) => false,
            Some(_) if self.freeing > 0 => true,
            Some(_) => return None,
        };
        let mut first = self.queue.pop_front()?;
        while first.batch.changes.len() < MAX_BATCH
            && self
                .queue
                .front()
                .is_some_and(|next| first.bytes + next.bytes <= self.max_bytes)
            && let Some(next) = self.queue.pop_front()
        {
            first.bytes += next.bytes;
            first.freeing += next.freeing;
            first.turn = next.turn;
            first.batch.to = next.batch.to;
            first.batch.last_record = next.batch.last_record.or(first.batch.last_record);
            first.batch.changes.extend(next.batch.changes);
        }
        self.freeing -= first.freeing;
        self.bytes -= first.bytes;
        self.is_applying = true;
        let PendingBatch { turn, mut batch, .. } = first;
        batch.force = force;
        Some(IndexRequest::Apply { turn, batch })
    }

    /// The index has applied the last batch. A forced batch does not prove that the index has free memory.
    pub(super) fn applied(&mut self, forced: bool) {
        self.is_applying = false;
        if !forced {
            self.next_probe = None;
        }
    }

    /// The index is full and has refused a batch, which goes back to the front of the queue.
    pub(super) fn refused(&mut self, turn: u64, batch: Batch, now: Timestamp) {
        self.is_applying = false;
        self.next_probe = Some(now.after(PROBE_INTERVAL));
        let refused = PendingBatch::new(turn, batch);
        self.freeing += refused.freeing;
        self.bytes += refused.bytes;
        if !mutant!("outbox-drops-refused-batches") {
            self.queue.push_front(refused);
        }
    }

    /// How many of these changes fit into one batch; at least one.
    fn first_batch_len(&self, changes: &[Change]) -> usize {
        let mut bytes = 0;
        for (count, change) in changes.iter().enumerate() {
            bytes += change.size();
            if count > 0 && bytes > self.max_bytes {
                return count;
            }
        }
        changes.len()
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::job::{Flow, JobId, Priority};

    const MAX_BYTES: usize = 4_000;

    fn flow() -> Flow {
        Flow {
            app: "app".into(),
            topic: "jobs".into(),
            priority: Priority::Normal,
        }
    }

    fn waits(number: i64) -> Change {
        let effect = Effect::Waits {
            flow: flow(),
            due: Timestamp::from_millis(0),
            record: Bytes::from_static(b"record"),
            key: None,
        };
        let id = JobId::new(Timestamp::from_millis(0), 0, number);
        Change::of_job(id, effect)
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
    fn full_index_is_forced_to_free() {
        let mut outbox = Outbox::new(MAX_BYTES);
        outbox.push(1, 0, 2, vec![waits(1)]);
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        assert!(!batch.force);
        outbox.refused(turn, batch, Timestamp::from_millis(0));
        assert!(outbox.is_index_full());
        outbox.push(2, 2, 4, vec![waits(2)]);
        assert!(next(&mut outbox, 999).is_none(), "the batch frees no memory");
        // A probe contains all queued changes.
        let (turn, batch) = next(&mut outbox, 1_000).unwrap();
        assert_eq!((turn, batch.from, batch.to, batch.force), (2, 0, 4, false));
        outbox.refused(turn, batch, Timestamp::from_millis(1_000));
        outbox.push(3, 4, 6, vec![forgotten(1)]);
        let (turn, batch) = next(&mut outbox, 1_001).unwrap();
        assert_eq!((turn, batch.from, batch.to, batch.force), (3, 0, 6, true));
        outbox.applied(true);
        assert!(
            outbox.is_index_full(),
            "a forced batch does not prove free memory"
        );
        outbox.push(4, 6, 8, vec![waits(3)]);
        assert!(next(&mut outbox, 1_500).is_none());
        let (_, batch) = next(&mut outbox, 2_000).unwrap();
        assert!(!batch.force);
        outbox.applied(false);
        assert!(!outbox.is_index_full());
        assert_eq!((outbox.freeing, outbox.queue.len()), (0, 0));
    }

    #[test]
    fn last_batch_confirms_the_turn() {
        let large = |number| {
            let effect = Effect::Waits {
                flow: flow(),
                due: Timestamp::from_millis(0),
                record: vec![0; MAX_BYTES / 2 + 1].into(),
                key: None,
            };
            Change {
                effect,
                ..waits(number)
            }
        };
        let mut outbox = Outbox::new(MAX_BYTES);
        outbox.push(7, 10, 12, vec![large(1), large(2)]);
        // The index confirms the turn before: the shard still needs what this turn decided.
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        assert_eq!((turn, batch.from, batch.to), (6, 10, 11));
        assert!(batch.last_record.is_none());
        outbox.applied(false);
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        assert_eq!((turn, batch.from, batch.to), (7, 11, 12));
        assert!(batch.last_record.is_some());
    }

    #[test]
    fn full_index_is_probed_without_changes() {
        let mut outbox = Outbox::new(MAX_BYTES);
        outbox.push(1, 0, 2, vec![forgotten(1)]);
        let (turn, batch) = next(&mut outbox, 0).unwrap();
        outbox.refused(turn, batch, Timestamp::from_millis(0));
        assert!(next(&mut outbox, 1).unwrap().1.force);
        outbox.applied(true);
        for now in [1_000, 2_000] {
            assert!(next(&mut outbox, now - 1).is_none());
            let (turn, batch) = next(&mut outbox, now).unwrap();
            assert_eq!((turn, &batch), (1, &Batch::renewal(2)));
            outbox.refused(turn, batch, Timestamp::from_millis(now));
            assert!(outbox.is_index_full());
        }
        // The next changes join the probe.
        outbox.push(2, 2, 4, vec![waits(1)]);
        let (turn, batch) = next(&mut outbox, 3_000).unwrap();
        assert_eq!((turn, batch.from, batch.to, batch.force), (2, 2, 4, false));
        assert!(batch.last_record.is_some());
        outbox.applied(false);
        assert!(!outbox.is_index_full());
    }

    #[test]
    fn backward_clock_delays_no_probe() {
        let mut outbox = Outbox::new(MAX_BYTES);
        outbox.push(1, 0, 2, vec![waits(1)]);
        let (turn, batch) = next(&mut outbox, 100_000).unwrap();
        outbox.refused(turn, batch, Timestamp::from_millis(100_000));
        assert!(next(&mut outbox, 0).is_some());
    }
}
