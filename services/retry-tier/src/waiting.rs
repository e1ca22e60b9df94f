//! The look-ahead of a partition: waiting records by due time.
//!
//! Records of a tier are nearly in the order of their due times, so most are kept in a queue. A record that is due
//! before the last one in the queue (because of jitter, `Retry-After` or different clocks) goes into a heap.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use redeliver_core::{HumanDuration, Record, Timestamp, mutant};

/// A record that waits for its due time.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) due: Timestamp,
    pub(crate) return_topic: Arc<str>,
    pub(crate) record: Record,
    /// When an operator has wanted that it does not wait any longer. From then on, no clock decides whether it does.
    pub(crate) released: Option<Timestamp>,
}

/// A release: records of a partition that do not wait until they are due, because an operator wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EarlyRelease {
    /// The offset before which they are.
    pub(crate) before: i64,
    /// When the operator has wanted it.
    pub(crate) at: Timestamp,
}

/// A time before all others.
const LONG_AGO: Timestamp = Timestamp::from_millis(0);

impl Waiting {
    /// Makes a record ready that is part of this release.
    pub(crate) fn release(&mut self, release: EarlyRelease) {
        if self.record.position.offset < release.before {
            self.released.get_or_insert(release.at);
        }
    }

    /// Whether it does not have to wait any longer.
    pub(crate) fn is_ready(&self, now: Timestamp) -> bool {
        self.released.is_some() || self.due <= now
    }

    /// Since when it is ready, or when it will be, for people.
    pub(crate) fn ready_at(&self) -> Timestamp {
        self.released.map_or(self.due, |at| at.min(self.due))
    }

    /// When to look at it. A released record does not wait for the time of its release: the clock may have been set back since.
    pub(crate) fn look_at(&self) -> Timestamp {
        self.released.map_or(self.due, |_| LONG_AGO)
    }

    /// Where it is in the order in which records leave: first those that are ready at any time.
    fn order(&self) -> (bool, Timestamp, i64) {
        let offset = self.record.position.offset;
        (self.released.is_none(), self.ready_at(), offset)
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

impl PartialEq for Straggler {
    fn eq(&self, other: &Self) -> bool {
        self.0.order() == other.0.order()
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
        other.0.order().cmp(&self.0.order())
    }
}

impl WaitingRecords {
    pub(crate) fn push(&mut self, waiting: Waiting) {
        self.bytes += size(&waiting.record);
        let is_straggler = self
            .in_order
            .back()
            .is_some_and(|last| waiting.order() < last.order());
        if is_straggler && !mutant!("relay-ignores-the-order-of-due-times") {
            self.stragglers.push(Straggler(waiting));
        } else {
            self.in_order.push_back(waiting);
        }
    }

    /// Makes the records ready that are part of this release.
    pub(crate) fn release(&mut self, release: EarlyRelease) {
        let mut all = self.take_all();
        for waiting in &mut all {
            waiting.release(release);
        }
        self.set_all(all);
    }

    fn take_all(&mut self) -> Vec<Waiting> {
        let stragglers = self.stragglers.drain().map(|straggler| straggler.0);
        self.in_order.drain(..).chain(stragglers).collect()
    }

    fn set_all(&mut self, mut all: Vec<Waiting>) {
        all.sort_by_key(Waiting::order);
        self.in_order = all.into();
    }

    /// The record that leaves first.
    pub(crate) fn next(&self) -> Option<&Waiting> {
        if self.is_straggler_next() {
            self.stragglers.peek().map(|straggler| &straggler.0)
        } else {
            self.in_order.front()
        }
    }

    fn is_straggler_next(&self) -> bool {
        match (self.in_order.front(), self.stragglers.peek()) {
            (Some(ordered), Some(straggler)) => straggler.0.order() < ordered.order(),
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }

    /// How many records are ready at `now`.
    pub(crate) fn count_ready(&self, now: Timestamp) -> usize {
        let in_order = self.in_order.partition_point(|waiting| waiting.is_ready(now));
        let stragglers = self.stragglers.iter();
        in_order + stragglers.filter(|straggler| straggler.0.is_ready(now)).count()
    }

    /// Removes the record that leaves first, if it is ready at `now`.
    pub(crate) fn pop_ready(&mut self, now: Timestamp) -> Option<Waiting> {
        self.next().filter(|next| next.is_ready(now))?;
        let waiting = if self.is_straggler_next() {
            self.stragglers.pop().map(|straggler| straggler.0)
        } else {
            self.in_order.pop_front()
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
        for waiting in self.take_all() {
            if taken.len() < limit && taken_bytes < bytes && is_taken(&waiting) {
                taken_bytes += size(&waiting.record);
                taken.push(waiting);
            } else {
                kept.push(waiting);
            }
        }
        self.set_all(kept);
        self.bytes -= taken_bytes;
        taken
    }

    /// The offsets of all records.
    pub(crate) fn offsets(&self) -> impl Iterator<Item = i64> {
        let stragglers = self.stragglers.iter().map(|straggler| &straggler.0);
        let all = self.in_order.iter().chain(stragglers);
        all.map(|waiting| waiting.record.position.offset)
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
            released: None,
        }
    }

    proptest! {
        #[test]
        fn due_records_leave_earliest_first(
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
                while let Some(released) = records.pop_ready(Timestamp::from_millis(now)) {
                    prop_assert!(released.due.as_millis() <= now, "never early");
                    prop_assert!(last <= Some(released.due), "earliest first");
                    last = Some(released.due);
                    left += 1;
                }
                prop_assert!(records.next().is_none_or(|next| next.due.as_millis() > now));
            }
            prop_assert_eq!(left + records.len() + arrivals.len(), dues.len(), "no record is lost");
            if records.len() == 0 {
                prop_assert_eq!(records.bytes(), 0);
            }
        }

        #[test]
        fn release_frees_records_before_offset(
            dues in proptest::collection::vec(0_i64..100, 0..50), before in 0_i64..60, at in 0_i64..100, now in 0_i64..100,
        ) {
            let mut records = WaitingRecords::default();
            for (offset, due) in dues.iter().enumerate() {
                records.push(waiting(*due, i64::try_from(offset).unwrap()));
            }
            // The clock may have been set back since.
            let (at, now) = (Timestamp::from_millis(at), Timestamp::from_millis(now));
            records.release(EarlyRelease { before, at });
            let mut released = Vec::new();
            let ready = records.count_ready(now);
            while let Some(waiting) = records.pop_ready(now) {
                prop_assert_eq!(waiting.released.is_some(), waiting.record.position.offset < before);
                released.push(waiting.record.position.offset);
            }
            prop_assert_eq!(released.len(), ready);
            let expected = (0..).zip(&dues).filter(|(offset, due)| *offset < before || **due <= now.as_millis());
            let expected: Vec<i64> = expected.map(|(offset, _)| offset).collect();
            released.sort_unstable();
            prop_assert_eq!(released, expected);
            // The others wait as before.
            while let Some(waiting) = records.pop_ready(Timestamp::from_millis(100)) {
                let due = dues[usize::try_from(waiting.record.position.offset).unwrap()];
                prop_assert_eq!((waiting.due.as_millis(), waiting.released), (due, None));
            }
            prop_assert_eq!(records.bytes(), 0);
        }

        #[test]
        fn taking_records_keeps_the_order(
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
            while let Some(released) = records.pop_ready(Timestamp::from_millis(100)) {
                prop_assert!(last <= Some(released.due));
                last = Some(released.due);
                popped += 1;
            }
            prop_assert_eq!(popped, dues.len() - taken.len());
            prop_assert_eq!(records.bytes(), 0);
        }
    }
}
