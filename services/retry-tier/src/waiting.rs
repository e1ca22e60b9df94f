//! The look-ahead of a partition: waiting records by due time.
//!
//! Records of a tier are nearly in the order of their due times, so most are kept in a queue. A record that is due
//! before the last one in the queue (because of jitter, `Retry-After` or different clocks) goes into a heap.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use redeliver_core::{HumanDuration, Record, Timestamp, mutant};

/// A record that waits for its due time.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) due: Timestamp,
    pub(crate) return_topic: Arc<str>,
    pub(crate) record: Record,
    /// An operator wants that it does not wait any longer. It is due since then.
    pub(crate) is_released_early: bool,
}

impl Waiting {
    /// Makes a record due now that is before this offset and not due yet.
    pub(crate) fn release_before(&mut self, offset: i64, now: Timestamp) {
        if self.record.position.offset < offset && self.due > now {
            self.due = now;
            self.is_released_early = true;
        }
    }

    /// Whether the record was written at least this long ago. True if its timestamp is missing or in the future, and so
    /// cannot be trusted.
    pub(crate) fn has_waited(&self, duration: HumanDuration, now: Timestamp) -> bool {
        let written = self.record.timestamp;
        written.is_none_or(|written| written > now || now.since(written) >= duration.duration())
    }
}

/// Waiting records of a partition.
#[derive(Debug, Default)]
pub(crate) struct WaitingRecords {
    in_order: VecDeque<Waiting>,
    stragglers: BinaryHeap<Straggler>,
    bytes: usize,
}

#[derive(Debug)]
struct Straggler(Waiting);

impl Straggler {
    fn key(&self) -> (Timestamp, i64) {
        (self.0.due, self.0.record.position.offset)
    }
}

impl PartialEq for Straggler {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Straggler {}

impl PartialOrd for Straggler {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Straggler {
    /// Reversed, because a `BinaryHeap` returns the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl WaitingRecords {
    pub(crate) fn push(&mut self, waiting: Waiting) {
        self.bytes += size(&waiting.record);
        let is_straggler = self.in_order.back().is_some_and(|last| waiting.due < last.due);
        if is_straggler && !mutant!("relay-ignores-the-order-of-due-times") {
            self.stragglers.push(Straggler(waiting));
        } else {
            self.in_order.push_back(waiting);
        }
    }

    /// Makes the records before this offset due now, unless they are due.
    pub(crate) fn release_before(&mut self, offset: i64, now: Timestamp) {
        let stragglers = self.stragglers.drain().map(|straggler| straggler.0);
        let mut all: Vec<Waiting> = self.in_order.drain(..).chain(stragglers).collect();
        for waiting in &mut all {
            waiting.release_before(offset, now);
        }
        all.sort_by_key(|waiting| (waiting.due, waiting.record.position.offset));
        self.in_order = all.into();
    }

    /// The record that is due first.
    pub(crate) fn next(&self) -> Option<&Waiting> {
        let ordered = self.in_order.front();
        let straggler = self.stragglers.peek().map(|straggler| &straggler.0);
        match (ordered, straggler) {
            (Some(ordered), Some(straggler)) if straggler.due < ordered.due => Some(straggler),
            (ordered, straggler) => ordered.or(straggler),
        }
    }

    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        self.next().map(|waiting| waiting.due)
    }

    /// How many records are due at `now`.
    pub(crate) fn count_due(&self, now: Timestamp) -> usize {
        let in_order = self.in_order.partition_point(|waiting| waiting.due <= now);
        let stragglers = self.stragglers.iter();
        in_order + stragglers.filter(|straggler| straggler.0.due <= now).count()
    }

    /// Removes the record that is due first, if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<Waiting> {
        let due = self.next_due().filter(|due| *due <= now)?;
        let from_queue = self.in_order.front().is_some_and(|front| front.due == due);
        let waiting = if from_queue {
            self.in_order.pop_front()
        } else {
            self.stragglers.pop().map(|straggler| straggler.0)
        }?;
        self.bytes -= size(&waiting.record);
        Some(waiting)
    }

    /// Removes at most `limit` records for which `is_taken` returns true. Their size exceeds `bytes` by one record at most.
    pub(crate) fn take(
        &mut self,
        limit: usize,
        bytes: usize,
        is_taken: impl Fn(&Waiting) -> bool,
    ) -> Vec<Waiting> {
        let mut taken = Vec::new();
        let mut taken_bytes = 0;
        let mut kept = Vec::with_capacity(self.len());
        let all = self
            .in_order
            .drain(..)
            .chain(self.stragglers.drain().map(|straggler| straggler.0));
        for waiting in all {
            if taken.len() < limit && taken_bytes < bytes && is_taken(&waiting) {
                taken_bytes += size(&waiting.record);
                taken.push(waiting);
            } else {
                kept.push(waiting);
            }
        }
        kept.sort_by_key(|waiting| (waiting.due, waiting.record.position.offset));
        self.in_order = kept.into();
        self.bytes -= taken_bytes;
        taken
    }

    pub(crate) fn len(&self) -> usize {
        self.in_order.len() + self.stragglers.len()
    }

    /// Approximate size of the records in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

fn size(record: &Record) -> usize {
    let payload = |bytes: &Option<_>| bytes.as_ref().map_or(0, |bytes: &bytes::Bytes| bytes.len());
    size_of::<Waiting>() + payload(&record.key) + payload(&record.value) + record.headers.byte_len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redeliver_core::{Headers, Position};

    use super::*;

    fn waiting(due: i64, offset: i64) -> Waiting {
        let record = Record {
            position: Position {
                topic: "t".into(),
                partition: 0,
                offset,
            },
            timestamp: None,
            key: None,
            value: Some(vec![0; 10].into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        Waiting {
            due: Timestamp::from_millis(due),
            return_topic: "due".into(),
            record,
            is_released_early: false,
        }
    }

    proptest! {
        #[test]
        fn records_are_released_when_due_and_earliest_first(
            dues in proptest::collection::vec(0_i64..1000, 0..200), steps in proptest::collection::vec(0_i64..1000, 1..20),
        ) {
            let mut records = WaitingRecords::default();
            let mut left = 0;
            let mut times = steps.clone();
            times.sort_unstable();
            let mut arrivals = dues.iter().enumerate();
            for now in times.into_iter().chain([1000]) {
                for (offset, due) in arrivals.by_ref().take(dues.len() / steps.len() + 1) {
                    records.push(waiting(*due, i64::try_from(offset).unwrap()));
                }
                let mut last = None;
                while let Some(released) = records.pop_due(Timestamp::from_millis(now)) {
                    prop_assert!(released.due.as_millis() <= now, "never early");
                    prop_assert!(last <= Some(released.due), "earliest first");
                    last = Some(released.due);
                    left += 1;
                }
                prop_assert!(records.next_due().is_none_or(|due| due.as_millis() > now));
            }
            prop_assert_eq!(left + records.len() + arrivals.len(), dues.len(), "no record is lost");
            if records.len() == 0 {
                prop_assert_eq!(records.bytes(), 0);
            }
        }

        #[test]
        fn only_records_before_the_offset_of_a_release_are_due_at_once(
            dues in proptest::collection::vec(0_i64..100, 0..50), before in 0_i64..60, now in 0_i64..100,
        ) {
            let mut records = WaitingRecords::default();
            for (offset, due) in dues.iter().enumerate() {
                records.push(waiting(*due, i64::try_from(offset).unwrap()));
            }
            let now = Timestamp::from_millis(now);
            records.release_before(before, now);
            let mut released = Vec::new();
            while let Some(waiting) = records.pop_due(now) {
                let due = dues[usize::try_from(waiting.record.position.offset).unwrap()];
                prop_assert_eq!(waiting.is_released_early, due > now.as_millis());
                prop_assert!(waiting.due <= now);
                released.push(waiting.record.position.offset);
            }
            let expected = (0..).zip(&dues).filter(|(offset, due)| *offset < before || **due <= now.as_millis());
            let expected: Vec<i64> = expected.map(|(offset, _)| offset).collect();
            released.sort_unstable();
            prop_assert_eq!(released, expected);
            // The others wait as before.
            while let Some(waiting) = records.pop_due(Timestamp::from_millis(100)) {
                let due = dues[usize::try_from(waiting.record.position.offset).unwrap()];
                prop_assert_eq!((waiting.due.as_millis(), waiting.is_released_early), (due, false));
            }
            prop_assert_eq!(records.bytes(), 0);
        }

        #[test]
        fn taking_records_leaves_the_rest_in_order(
            dues in proptest::collection::vec(0_i64..100, 0..50), limit in 0_usize..60, fitting in 0_usize..60,
        ) {
            let mut records = WaitingRecords::default();
            for (offset, due) in dues.iter().enumerate() {
                records.push(waiting(*due, i64::try_from(offset).unwrap()));
            }
            let bytes = fitting * size(&waiting(0, 0).record);
            let taken = records.take(limit, bytes, |waiting| waiting.due.as_millis() >= 50);
            let far = dues.iter().filter(|due| **due >= 50).count();
            prop_assert_eq!(taken.len(), far.min(limit).min(fitting));
            let mut last = None;
            let mut popped = 0;
            while let Some(released) = records.pop_due(Timestamp::from_millis(100)) {
                prop_assert!(last <= Some(released.due));
                last = Some(released.due);
                popped += 1;
            }
            prop_assert_eq!(popped, dues.len() - taken.len());
            prop_assert_eq!(records.bytes(), 0);
        }
    }
}
