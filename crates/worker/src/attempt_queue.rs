//! The order in which records get their attempts.
//!
//! New records go first: most of them succeed, and those that fail again and again must not slow them down. But a backlog of new records must not stop
//! retries, which have already waited until their due time. So after three new records in a row, one retry goes first. While the circuit breaker is
//! near opening, it is the other way round: an endpoint that refuses new records can answer retries.

use std::collections::VecDeque;

/// While retries and new records wait, one of this many attempts is of those that are not first.
const OTHER_EVERY: usize = 4;

/// Which records are next, if there are any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    /// Those whose attempt was forgotten. Otherwise, they are last.
    pub(crate) forgotten_first: bool,
    /// Retries before new records.
    pub(crate) retries_first: bool,
}

/// Records that wait for an attempt: retries, new records, and those whose attempt was forgotten.
pub(crate) struct AttemptQueue<T> {
    retries: VecDeque<T>,
    new: VecDeque<T>,
    /// The one whose attempt is the longest ago is first.
    forgotten: VecDeque<T>,
    /// Whether the last attempts were retries, and how many there were in a row.
    in_a_row: (bool, usize),
}

impl<T> Default for AttemptQueue<T> {
    fn default() -> Self {
        Self {
            retries: VecDeque::new(),
            new: VecDeque::new(),
            forgotten: VecDeque::new(),
            in_a_row: (false, 0),
        }
    }
}

impl<T> AttemptQueue<T> {
    pub(crate) fn push(&mut self, record: T, is_retry: bool) {
        let queue = if is_retry {
            &mut self.retries
        } else {
            &mut self.new
        };
        queue.push_back(record);
    }

    /// Adds a record that is next among its kind.
    pub(crate) fn push_first(&mut self, record: T, is_retry: bool) {
        let queue = if is_retry {
            &mut self.retries
        } else {
            &mut self.new
        };
        queue.push_front(record);
    }

    /// Adds a record whose attempt does not count.
    pub(crate) fn push_forgotten(&mut self, record: T) {
        self.forgotten.push_back(record);
    }

    /// How many records wait, without those whose attempt was forgotten.
    pub(crate) fn waiting(&self) -> usize {
        self.retries.len() + self.new.len()
    }

    /// How many records wait whose attempt was forgotten.
    pub(crate) fn forgotten(&self) -> usize {
        self.forgotten.len()
    }

    pub(crate) fn has_forgotten(&self) -> bool {
        !self.forgotten.is_empty()
    }

    pub(crate) fn has_only_forgotten(&self) -> bool {
        self.retries.is_empty() && self.new.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.has_only_forgotten() && self.forgotten.is_empty()
    }

    /// The record whose attempt is next.
    pub(crate) fn pop(&mut self, order: Order) -> Option<T> {
        if order.forgotten_first
            && let Some(record) = self.forgotten.pop_front()
        {
            return Some(record);
        }
        let (was_retry, in_a_row) = self.in_a_row;
        let is_turn_of_other = was_retry == order.retries_first && in_a_row + 1 >= OTHER_EVERY;
        let wants_retry = order.retries_first != is_turn_of_other;
        let is_retry = if wants_retry {
            !self.retries.is_empty()
        } else {
            self.new.is_empty()
        };
        let queue = if is_retry {
            &mut self.retries
        } else {
            &mut self.new
        };
        let Some(next) = queue.pop_front() else {
            return self.forgotten.pop_front();
        };
        self.in_a_row = (is_retry, if is_retry == was_retry { in_a_row + 1 } else { 1 });
        Some(next)
    }

    /// Removes all records for which `is_removed` returns true, in their order.
    pub(crate) fn remove(&mut self, is_removed: impl Fn(&T) -> bool) -> Vec<T> {
        let mut removed = Vec::new();
        for queue in [&mut self.retries, &mut self.new, &mut self.forgotten] {
            let (gone, kept) = std::mem::take(queue).into_iter().partition(&is_removed);
            *queue = kept;
            removed.extend::<VecDeque<T>>(gone);
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Order = Order {
        forgotten_first: false,
        retries_first: false,
    };

    /// A queue of retries and new records, numbered in the order of their arrival.
    fn queue(retries: usize, new: usize) -> AttemptQueue<(&'static str, usize)> {
        let mut queue = AttemptQueue::default();
        (0..new).for_each(|number| queue.push(("new", number), false));
        (0..retries).for_each(|number| queue.push(("retry", number), true));
        queue
    }

    #[test]
    fn every_fourth_attempt_is_retry() {
        let mut queue = queue(3, 7);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(NEW)).collect();
        let expected = [
            ("new", 0),
            ("new", 1),
            ("new", 2),
            ("retry", 0),
            ("new", 3),
            ("new", 4),
            ("new", 5),
            ("retry", 1),
            ("new", 6),
            ("retry", 2),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn late_retry_is_next() {
        let mut queue = queue(0, 100);
        (0..50).for_each(|number| assert_eq!(queue.pop(NEW), Some(("new", number))));
        queue.push(("retry", 0), true);
        assert_eq!(queue.pop(NEW), Some(("retry", 0)));
        assert_eq!(queue.pop(NEW), Some(("new", 50)));
    }

    #[test]
    fn every_fourth_attempt_is_new() {
        let order = Order {
            retries_first: true,
            ..NEW
        };
        let mut queue = queue(4, 3);
        let kinds: Vec<_> = std::iter::from_fn(|| queue.pop(order).map(|(kind, _)| kind)).collect();
        assert_eq!(kinds, ["retry", "retry", "retry", "new", "retry", "new", "new"]);
    }

    #[test]
    fn forgotten_records_are_last_or_first() {
        let mut queue = queue(0, 3);
        let first = queue.pop(NEW).unwrap();
        queue.push_forgotten(first);
        let forgotten = Order {
            forgotten_first: true,
            ..NEW
        };
        assert_eq!(
            (queue.pop(NEW), queue.pop(forgotten)),
            (Some(("new", 1)), Some(("new", 0)))
        );
        queue.push_forgotten(("new", 1));
        assert_eq!(
            (queue.pop(NEW), queue.pop(NEW)),
            (Some(("new", 2)), Some(("new", 1)))
        );
        queue.push_forgotten(("new", 1));
        assert!(!queue.is_empty());
        assert_eq!(queue.remove(|_| true), [("new", 1)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn removal_keeps_the_order() {
        let mut queue = queue(3, 3);
        let removed = queue.remove(|(_, number)| *number == 1);
        assert_eq!(removed, [("retry", 1), ("new", 1)]);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(NEW)).collect();
        assert_eq!(order, [("new", 0), ("new", 2), ("retry", 0), ("retry", 2)]);
    }
}
