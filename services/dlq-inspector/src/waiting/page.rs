//! The waiting records that are due first, up to a number.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use redeliver_core::{Position, Timestamp};

use super::Place;
use super::facts::Facts;

/// A waiting record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The number of its pipeline among those that are scanned.
    pub(crate) pipeline: usize,
    pub(crate) place: Place,
    pub(crate) position: Position,
    pub(crate) facts: Facts,
    pub(crate) message: Option<String>,
}

impl Row {
    /// Without a due time, it is last.
    fn key(&self) -> (Timestamp, &Position) {
        let last = Timestamp::from_millis(i64::MAX);
        (self.facts.due.unwrap_or(last), &self.position)
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
}

impl Page {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            rows: BinaryHeap::new(),
            limit,
        }
    }

    /// Adds a row if it is among the first ones. Only then, its message is needed.
    pub(crate) fn offer(&mut self, mut row: Row, message: impl FnOnce() -> Option<String>) {
        let is_full = self.rows.len() >= self.limit;
        if is_full && self.rows.peek().is_none_or(|last| row >= *last) {
            return;
        }
        row.message = message();
        self.rows.push(row);
        if is_full {
            self.rows.pop();
        }
    }

    /// The rows, those first that are due first.
    pub(crate) fn into_rows(self) -> Vec<Row> {
        self.rows.into_sorted_vec()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(due: Option<i64>, offset: usize) -> Row {
        Row {
            pipeline: 0,
            place: Place::Due,
            position: Position {
                topic: "t".into(),
                partition: 0,
                offset: i64::try_from(offset).unwrap(),
            },
            facts: Facts {
                due: due.map(Timestamp::from_millis),
                ..Facts::default()
            },
            message: None,
        }
    }

    proptest! {
        #[test]
        fn page_has_first_rows_in_order(
            dues in prop::collection::vec(prop::option::of(0_i64..20), 0..50), limit in 0_usize..20
        ) {
            let rows: Vec<Row> = dues.iter().enumerate().map(|(offset, due)| row(*due, offset)).collect();
            let mut page = Page::new(limit);
            for row in &rows {
                page.offer(row.clone(), || None);
            }
            let mut sorted = rows;
            sorted.sort();
            sorted.truncate(limit);
            prop_assert_eq!(page.into_rows(), sorted);
        }
    }
}
