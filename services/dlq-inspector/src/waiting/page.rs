//! The first waiting records in an order, up to a number.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use bytes::Bytes;
use redeliver_core::{JobId, Position, Timestamp};

use super::Place;
use super::facts::Facts;

/// Which records come first. Records without this value are last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// Those that are due first.
    #[default]
    Due,
    /// Those with the most failed attempts.
    Attempts,
    /// Those that entered their pipeline first.
    Age,
}

impl Order {
    /// The place of a record in the order: the smallest one is first.
    pub(crate) fn rank(self, facts: &Facts) -> i64 {
        let time = |time: Option<Timestamp>| time.map_or(i64::MAX, Timestamp::as_millis);
        match self {
            Self::Due => time(facts.due),
            Self::Attempts => facts.attempts.map_or(i64::MAX, |attempts| -i64::from(attempts)),
            Self::Age => time(facts.entered()),
        }
    }
}

/// A position in an order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cursor {
    pub(crate) rank: i64,
    pub(crate) position: Position,
}

/// Which records to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) order: Order,
    /// Only those after this one.
    pub(crate) after: Option<Cursor>,
    pub(crate) limit: usize,
    /// Whether keys are shown, by the number of the pipeline.
    pub(crate) keys: Vec<bool>,
}

/// A waiting record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The number of its pipeline among those that are scanned.
    pub(crate) pipeline: usize,
    pub(crate) place: Place,
    pub(crate) position: Position,
    /// Its job, if it waits with the scheduler.
    pub(crate) job: Option<JobId>,
    pub(crate) facts: Facts,
    /// See [`Order::rank`].
    pub(crate) rank: i64,
    pub(crate) details: Details,
}

/// What is only known of the records of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Details {
    pub(crate) message: Option<String>,
    /// The beginning of its key, if it is shown, and whether that is all.
    pub(crate) key: Option<(Bytes, bool)>,
}

impl Row {
    fn key(&self) -> (i64, &Position) {
        (self.rank, &self.position)
    }
}

impl Ord for Row {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for Row {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Keeps the first rows.
#[derive(Debug)]
pub(crate) struct Page {
    rows: BinaryHeap<Row>,
    limit: usize,
    after: Option<Cursor>,
    has_more: bool,
}

impl Page {
    /// A page of the rows after this one.
    pub(crate) fn new(limit: usize, after: Option<Cursor>) -> Self {
        Self {
            rows: BinaryHeap::new(),
            limit,
            after,
            has_more: false,
        }
    }

    /// Adds a row if it is among the first ones. Only then, its details are needed.
    pub(crate) fn offer(&mut self, mut row: Row, details: impl FnOnce() -> Details) {
        let is_before = |after: &Cursor| row.key() <= (after.rank, &after.position);
        if self.after.as_ref().is_some_and(is_before) {
            return;
        }
        let is_full = self.rows.len() >= self.limit;
        self.has_more |= is_full;
        if is_full && self.rows.peek().is_none_or(|last| row >= *last) {
            return;
        }
        row.details = details();
        self.rows.push(row);
        if is_full {
            self.rows.pop();
        }
    }

    /// The rows in their order, and where the next page begins, if there is one.
    pub(crate) fn into_rows(self) -> (Vec<Row>, Option<Cursor>) {
        let rows = self.rows.into_sorted_vec();
        let last = rows.last().filter(|_| self.has_more);
        let next = last.map(|last| Cursor {
            rank: last.rank,
            position: last.position.clone(),
        });
        (rows, next)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(due: Option<i64>, offset: usize) -> Row {
        let facts = Facts {
            due: due.map(Timestamp::from_millis),
            ..Facts::default()
        };
        Row {
            pipeline: 0,
            place: Place::Due,
            position: Position {
                topic: "t".into(),
                partition: 0,
                offset: i64::try_from(offset).unwrap(),
            },
            job: None,
            rank: Order::Due.rank(&facts),
            facts,
            details: Details::default(),
        }
    }

    proptest! {
        #[test]
        fn pages_have_all_rows_in_order(
            dues in prop::collection::vec(prop::option::of(0_i64..20), 0..50), limit in 1_usize..20
        ) {
            let rows: Vec<Row> = dues.iter().enumerate().map(|(offset, due)| row(*due, offset)).collect();
            let (mut listed, mut after) = (Vec::new(), None);
            loop {
                let mut page = Page::new(limit, after.clone());
                for row in &rows {
                    page.offer(row.clone(), Details::default);
                }
                let (page, next) = page.into_rows();
                prop_assert!(page.len() == limit || next.is_none());
                listed.extend(page);
                after = next;
                if after.is_none() {
                    break;
                }
            }
            let mut sorted = rows;
            sorted.sort();
            prop_assert_eq!(listed, sorted);
        }
    }
}
