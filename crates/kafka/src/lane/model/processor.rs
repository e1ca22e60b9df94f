//! A processor whose attempts finish when the history says so, and which may return results of earlier assignments.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::{Headers, Output, Record, Timestamp};

use crate::processor::{AssignmentId, Processor, Refused, TransactionBatch};

/// A record and the number that identifies it.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) id: AssignmentId,
    pub(super) offset: i64,
    pub(super) value: Vec<u8>,
}

#[derive(Default)]
pub(super) struct ModelProcessor {
    live: BTreeMap<AssignmentId, i32>,
    /// Where the lane reads each assignment from.
    starts: BTreeMap<AssignmentId, i64>,
    running: Vec<Taken>,
    finished: Vec<Taken>,
    in_batch: Vec<Taken>,
    /// Work of earlier assignments whose results may still arrive.
    stale: Vec<Taken>,
    /// Stale results that the next call of `finish` returns, as a faulty processor would.
    late: Vec<Taken>,
    /// Partitions on whose behalf something is written, with a number.
    owned: Vec<(i32, u64)>,
    last_owned: u64,
    owned_in_batch: Vec<(i32, u64)>,
    /// Whether results of aborted transactions are taken back.
    pub(super) takes_back: bool,
    /// Whether a batch is outdated once a record was accepted.
    outdates: bool,
    /// `calls` when the last batch was finished.
    calls_at_finish: u64,
    /// How often each record was given to the handler, per assignment.
    pub(super) calls: u64,
}

impl ModelProcessor {
    pub(super) fn new(takes_back: bool, outdates: bool) -> Self {
        Self {
            takes_back,
            outdates,
            ..Self::default()
        }
    }

    pub(super) fn finish_attempts(&mut self, count: usize, latest_first: bool) {
        for _ in 0..count {
            let next = if latest_first {
                self.running.pop()
            } else {
                (!self.running.is_empty()).then(|| self.running.remove(0))
            };
            self.finished.extend(next);
        }
    }

    pub(super) fn return_late_result(&mut self) {
        self.late.extend(self.stale.pop());
    }

    pub(super) fn write_as_owner(&mut self, partition: i32) {
        self.last_owned += 1;
        self.owned.push((partition, self.last_owned));
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.finished.is_empty() && self.owned.is_empty()
    }
}

/// The beginning of values that complete no record.
pub(super) const OWNED: &str = "owned";

fn output(value: Vec<u8>) -> Output {
    Output {
        topic: "to".into(),
        partition: None,
        key: None,
        value: Some(value.into()),
        headers: Headers::new(),
    }
}

impl Processor for ModelProcessor {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, partition: i32) {
        let earlier = self.live.insert(assignment, partition);
        assert!(earlier.is_none(), "{assignment:?} was assigned twice");
    }

    fn starts_at(&mut self, assignment: AssignmentId, offset: i64) {
        assert!(self.live.contains_key(&assignment));
        self.starts.insert(assignment, offset);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        let known = self.live.remove(&assignment);
        assert!(known.is_some(), "{assignment:?} was revoked but is not assigned");
        for queue in [&mut self.running, &mut self.finished] {
            let (stale, live) = std::mem::take(queue)
                .into_iter()
                .partition(|taken| taken.id == assignment);
            *queue = live;
            self.stale.extend::<Vec<Taken>>(stale);
        }
    }

    fn capacity(&self, assignment: AssignmentId) -> usize {
        assert!(self.live.contains_key(&assignment));
        60_usize.saturating_sub(self.running.len() + self.finished.len())
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.calls += 1;
        let start = self.starts.get(&assignment).expect("a known start");
        assert!(record.position.offset >= *start, "a record before the start");
        self.running.push(Taken {
            id: assignment,
            offset: record.position.offset,
            value: record.value.unwrap().to_vec(),
        });
    }

    fn finish(&mut self, _now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        assert!(batch.outputs.is_empty() && batch.completed.is_empty() && batch.owners.is_empty());
        self.calls_at_finish = self.calls;
        let count = self.finished.len().min(limit);
        self.in_batch = self.finished.drain(..count).collect();
        for taken in self.in_batch.iter().chain(&self.late) {
            batch.completed.push((taken.id, taken.offset));
            batch.outputs.push(output(taken.value.clone()));
        }
        self.late.clear();
        self.owned_in_batch.clear();
        for (partition, number) in std::mem::take(&mut self.owned) {
            if let Some((id, _)) = self.live.iter().find(|(_, owned)| **owned == partition) {
                batch.owners.push(*id);
                batch
                    .outputs
                    .push(output(format!("{OWNED}-{number}").into_bytes()));
                self.owned_in_batch.push((partition, number));
            }
        }
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        // The dead letter of a record has its value too, so that it counts as its output.
        refused.iter().all(|refused| refused.index < batch.outputs.len())
    }

    fn denied(&mut self, denied: &[Refused], batch: &mut TransactionBatch, now: Timestamp) -> bool {
        // Some are replaced, others wait.
        batch.outputs.len().is_multiple_of(2) && self.refused(denied, batch, now)
    }

    fn is_outdated(&self, _batch: &TransactionBatch) -> bool {
        self.outdates && self.calls > self.calls_at_finish
    }

    fn take_back(&mut self, batch: &mut TransactionBatch) -> bool {
        if !self.takes_back {
            return false;
        }
        batch.owners.clear();
        self.owned.append(&mut self.owned_in_batch);
        self.finished.splice(0..0, self.in_batch.drain(..));
        true
    }

    fn committed(&mut self, _now: Timestamp) {
        self.in_batch.clear();
    }

    fn aborted(&mut self) {
        self.in_batch.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        !self.is_idle()
    }
}
