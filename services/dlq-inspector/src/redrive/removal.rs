//! When the executor removes entries of the ledger whose dead letters are gone, and what it writes. No IO.

use std::time::Duration;

use redeliver_core::{Headers, Output, Timestamp};

use super::ledger_states::Removed;
use crate::ledger;

/// The maximum number of entries that a transaction removes.
pub(crate) const LIMIT: usize = 1_000;
/// The time between two of them.
const PAUSE: Duration = Duration::from_secs(1);
/// How long steps of jobs take precedence.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// The time between two looks if there was nothing to remove, at least and at most.
const IDLE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// The time before the next attempt after a failure. What is not removed does no harm.
const RETRY: Duration = Duration::from_secs(60);
/// A removal that could not be written for this long is decided again.
const OUTDATED: Duration = Duration::from_secs(30);

/// What is removed, and when.
#[derive(Debug, Default)]
pub(crate) struct Removals {
    /// How long a dead letter must be gone; `None`: nothing is removed.
    after: Option<Duration>,
    /// When to look for entries; `None` before the first look was planned.
    look_at: Option<Timestamp>,
    /// What to write next.
    ready: Vec<Removed>,
    /// What is being written.
    writing: Option<Writing>,
}

/// A removal that is being written.
#[derive(Clone, Copy, Debug)]
struct Writing {
    /// The index of its first output in the batch.
    first: usize,
    count: usize,
    since: Timestamp,
}

impl Removals {
    pub(crate) fn new(after: Option<Duration>) -> Self {
        Self {
            after,
            ..Self::default()
        }
    }

    /// Another process may own the partition.
    pub(crate) fn forget(&mut self) {
        *self = Self::new(self.after);
    }

    /// Whether to look for entries now. `has_turn`: a job can go on.
    pub(crate) fn is_due(&mut self, has_turn: bool, now: Timestamp) -> bool {
        let Some(after) = self.after else {
            return false;
        };
        let look_at = *self.look_at.get_or_insert_with(|| now.after(idle(after)));
        let look_at = if has_turn {
            look_at.after(MAX_WAIT)
        } else {
            look_at
        };
        look_at <= now
    }

    /// When to look again.
    pub(crate) fn look_at(&self) -> Option<Timestamp> {
        self.look_at
    }

    /// Whether there is something to write.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// These entries are to be removed.
    pub(crate) fn found(&mut self, removed: Vec<Removed>, now: Timestamp) {
        let idle = self.after.map_or(RETRY, idle);
        let pause = if removed.len() < LIMIT { idle } else { PAUSE };
        self.look_at = Some(now.after(pause));
        self.ready = removed;
    }

    /// Nothing is removed for a while.
    pub(crate) fn failed(&mut self, now: Timestamp) {
        (self.ready, self.writing) = (Vec::new(), None);
        self.look_at = Some(now.after(RETRY));
    }

    /// None of the found entries is removed: the lane stops.
    pub(crate) fn drop_ready(&mut self) {
        self.ready.clear();
    }

    /// Writes what is ready after these outputs.
    pub(crate) fn write(&mut self, outputs: &mut Vec<Output>, now: Timestamp) {
        let ready = std::mem::take(&mut self.ready);
        self.writing = Some(Writing {
            first: outputs.len(),
            count: ready.len(),
            since: now,
        });
        outputs.extend(ready.iter().map(tombstone));
    }

    /// Whether what is being written was decided too long ago.
    pub(crate) fn is_outdated(&self, now: Timestamp) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|writing| now >= writing.since.after(OUTDATED))
    }

    /// Takes what is being written back out of these outputs. Returns whether there was something.
    pub(crate) fn take_back(&mut self, outputs: &mut Vec<Output>, now: Timestamp) -> bool {
        let Some(writing) = self.writing else {
            return false;
        };
        outputs.truncate(writing.first);
        self.failed(now);
        true
    }

    /// The number of entries that were removed.
    pub(crate) fn committed(&mut self) -> usize {
        self.writing.take().map_or(0, |writing| writing.count)
    }
}

fn idle(after: Duration) -> Duration {
    (after / 10).clamp(IDLE[0], IDLE[1])
}

/// What compaction removes, together with the entry before it.
fn tombstone(removed: &Removed) -> Output {
    Output {
        topic: ledger::TOPIC.into(),
        // Compaction knows only one partition.
        partition: Some(removed.partition),
        key: Some(removed.id.to_string().into()),
        value: None,
        headers: Headers::new(),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Position;

    use super::*;

    fn found(count: usize) -> Vec<Removed> {
        let removed = Removed {
            id: Position {
                topic: "a-dlq".into(),
                partition: 1,
                offset: 7,
            },
            partition: 2,
        };
        vec![removed; count]
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    #[test]
    fn removals_wait_for_steps_and_pause() {
        let mut removals = Removals::new(Some(Duration::from_secs(600)));
        assert!(!removals.is_due(false, at(0)));
        assert!(!removals.is_due(false, at(59)) && !removals.is_due(true, at(69)));
        assert!(removals.is_due(false, at(60)) && removals.is_due(true, at(70)));
        removals.found(found(LIMIT), at(100));
        assert_eq!(removals.look_at(), Some(at(101)));
        removals.found(found(LIMIT - 1), at(100));
        assert_eq!(removals.look_at(), Some(at(160)));
        let mut never = Removals::new(None);
        assert!(!never.is_due(false, at(0)) && !never.is_due(false, at(1_000_000)));
    }

    #[test]
    fn removal_writes_tombstone_to_same_partition() {
        let mut removals = Removals::new(Some(Duration::from_secs(600)));
        removals.found(found(2), at(0));
        let mut outputs = vec![tombstone(&found(1)[0])];
        assert!(removals.is_ready());
        removals.write(&mut outputs, at(0));
        assert!(!removals.is_ready() && outputs.len() == 3);
        assert!(!removals.is_outdated(at(29)) && removals.is_outdated(at(30)));
        let output = &outputs[2];
        assert_eq!((&*output.topic, output.partition), (ledger::TOPIC, Some(2)));
        assert_eq!(output.key.as_deref(), Some(&b"a-dlq/1/7"[..]));
        assert_eq!(output.value, None);
        assert_eq!((removals.committed(), removals.committed()), (2, 0));
        removals.found(found(2), at(0));
        removals.write(&mut outputs, at(0));
        assert!(removals.take_back(&mut outputs, at(5)) && outputs.len() == 3);
        assert!(!removals.take_back(&mut outputs, at(5)) && removals.committed() == 0);
        assert_eq!(removals.look_at(), Some(at(65)));
    }
}
