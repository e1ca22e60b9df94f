//! The records of a driver, by what they wait for.
//!
//! Between its arrival and its final result, a record is in exactly one of these places: with those that wait for others of
//! their order, in the queue, with those that wait for an attempt of their limited group to end, in a running attempt, held,
//! or blocking. It is in its order ([`GroupsOf::ordered`]) in all of them except the first, and in its limited group only
//! during an attempt.

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Called, Ended};
use crate::attempt_queue::{AttemptQueue, Order};
use crate::breaker::Provisional;
use crate::engine::{FinishedRecord, QueuedRecord};
use crate::groups::{Grouping, Groups, GroupsOf};
use crate::metrics::WaitingCounts;

/// Something of one of the driver's lanes.
pub(super) struct OfLane<T> {
    /// The index of the lane in [`Driver::lanes`](super::Driver::lanes).
    pub(super) lane: usize,
    pub(super) record: T,
}

/// A failed attempt that counts only if later calls show that the endpoint works.
pub(super) struct Held {
    pub(super) called: OfLane<Called>,
    pub(super) failure: Provisional,
}

pub(super) struct Work {
    pub(super) running: JoinSet<Ended>,
    /// How many of the driver's slots the running attempts use.
    pub(super) slots: usize,
    repeated_slots: usize,
    /// Whether the rate limit permits the next attempt already.
    pub(super) may_start: bool,
    ordered: Groups<OfLane<QueuedRecord>>,
    limited: Groups<OfLane<QueuedRecord>>,
    pub(super) queue: AttemptQueue<OfLane<QueuedRecord>>,
    /// Oldest first.
    pub(super) held: Vec<Held>,
    /// Records whose followers wait for them, and when their next attempts start.
    pub(super) blocking: Vec<(Instant, OfLane<QueuedRecord>)>,
    /// By lane.
    pub(super) finished: Vec<Vec<FinishedRecord>>,
}

impl Work {
    pub(super) fn new(lanes: usize, grouping: &Grouping, repeated_slots: usize) -> Self {
        let limit = grouping.limit.as_ref();
        Self {
            running: JoinSet::new(),
            slots: 0,
            repeated_slots,
            may_start: false,
            ordered: Groups::new(1),
            limited: Groups::new(limit.map_or(usize::MAX, |limit| limit.concurrency)),
            queue: AttemptQueue::default(),
            held: Vec::new(),
            blocking: Vec::new(),
            finished: std::iter::repeat_with(Vec::new).take(lanes).collect(),
        }
    }

    /// How many records have no attempt in progress, by what they wait for.
    pub(super) fn waiting(&self) -> WaitingCounts {
        WaitingCounts {
            attempt: self.queue.waiting(),
            order: self.ordered.waiting(),
            limit: self.limited.waiting(),
            held: self.held.len(),
            forgotten: self.queue.forgotten(),
            blocking: self.blocking.len(),
        }
    }

    pub(super) fn arrive(&mut self, queued: OfLane<QueuedRecord>) {
        let ordered = queued.record.groups.ordered.clone();
        if let Some(ready) = self.ordered.enter(ordered, queued) {
            self.push(ready);
        }
    }

    /// Puts a record last in the queue.
    pub(super) fn push(&mut self, queued: OfLane<QueuedRecord>) {
        let is_retry = queued.record.is_retry;
        self.queue.push(queued, is_retry);
    }

    /// Puts a record first in the queue that has been in it before.
    pub(super) fn repeat(&mut self, queued: OfLane<QueuedRecord>) {
        let is_retry = queued.record.is_retry;
        self.queue.push_first(queued, is_retry);
    }

    /// The record whose attempt starts now. The lane drops those of partitions that have just been revoked.
    pub(super) fn next(&mut self, order: Order) -> Option<OfLane<QueuedRecord>> {
        loop {
            let next = self.queue.pop(order)?;
            if !next.record.is_assigned() {
                self.release_limited(&next.record.groups);
                self.return_unprocessed(next);
                continue;
            }
            let limited = next.record.groups.limited.clone();
            if let Some(next) = self.limited.enter(limited, next) {
                self.slots += self.slots_of(&next.record);
                return Some(next);
            }
        }
    }

    /// The same before and after an attempt.
    fn slots_of(&self, queued: &QueuedRecord) -> usize {
        match queued.has_failed() {
            true => self.repeated_slots.max(1),
            false => 1,
        }
    }

    /// Takes note that an attempt of a record has ended.
    pub(super) fn end_attempt(&mut self, queued: &QueuedRecord) {
        self.slots -= self.slots_of(queued);
        if let Some(next) = self.limited.leave(queued.groups.limited.as_ref()) {
            self.repeat(next);
        }
    }

    /// Lets another record of the limited group have the place in the queue of one that has left it without an attempt.
    fn release_limited(&mut self, groups: &GroupsOf) {
        if let Some(next) = self.limited.next(groups.limited.as_ref()) {
            self.repeat(next);
        }
    }

    /// Takes note that the result of a record is final.
    pub(super) fn leave_order(&mut self, groups: &GroupsOf) {
        if let Some(next) = self.ordered.leave(groups.ordered.as_ref()) {
            self.arrive(next);
        }
    }

    /// Returns a record to its lane that has no attempt in progress and is nowhere else.
    pub(super) fn return_unprocessed(&mut self, queued: OfLane<QueuedRecord>) {
        self.leave_order(&queued.record.groups);
        self.finished[queued.lane].push(queued.record.into_unprocessed());
    }

    /// Returns records that have no attempt in progress to the lanes. `is_given_back` gets the lane and the record.
    pub(super) fn give_back(&mut self, is_given_back: impl Fn(usize, &QueuedRecord) -> bool) {
        let is_queued = |queued: &OfLane<QueuedRecord>| is_given_back(queued.lane, &queued.record);
        // First those that have not entered their order, so that none of them takes the place of another one.
        for queued in self.ordered.remove(is_queued) {
            self.finished[queued.lane].push(queued.record.into_unprocessed());
        }
        let mut entered = self.limited.remove(is_queued);
        let from_queue = self.queue.remove(is_queued);
        for queued in &from_queue {
            self.release_limited(&queued.record.groups);
        }
        entered.extend(from_queue);
        let blocking = self.blocking.extract_if(.., |(_, queued)| is_queued(queued));
        entered.extend(blocking.map(|(_, queued)| queued));
        let is_held = |Held { called, .. }: &mut Held| is_given_back(called.lane, &called.record.queued);
        let held = self.held.extract_if(.., is_held);
        entered.extend(held.map(|held| held.called.map(|called| called.queued)));
        for queued in entered {
            self.return_unprocessed(queued);
        }
    }
}

impl<T> OfLane<T> {
    pub(super) fn map<U>(self, map: impl FnOnce(T) -> U) -> OfLane<U> {
        OfLane {
            lane: self.lane,
            record: map(self.record),
        }
    }
}

#[cfg(test)]
mod tests;
