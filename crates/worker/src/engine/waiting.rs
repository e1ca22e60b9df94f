//! Finished records that cannot be written because one of their topics is missing.
//!
//! They stay out of every transaction, and they count as in flight, which limits their number.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_kafka::AssignmentId;

use super::FinishedRecord;

/// Topics that are missing, and for how long that has been known.
pub(super) type MissingTopics = [(Arc<str>, Duration)];

/// Finished records by the missing topic.
#[derive(Default)]
pub(super) struct WaitingForTopic(BTreeMap<Arc<str>, Vec<FinishedRecord>>);

impl WaitingForTopic {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    pub(super) fn insert(&mut self, topic: Arc<str>, record: FinishedRecord) {
        self.0.entry(topic).or_default().push(record);
    }

    /// Removes the records of topics for which `is_released` returns true.
    pub(super) fn release(&mut self, is_released: impl Fn(&str) -> bool) -> Vec<FinishedRecord> {
        let mut released = Vec::new();
        self.0.retain(|topic, records| {
            let is_released = is_released(topic);
            if is_released {
                released.append(records);
            }
            !is_released
        });
        released
    }

    /// Removes the records of an assignment.
    pub(super) fn take(&mut self, assignment: AssignmentId) -> Vec<FinishedRecord> {
        let is_own = |record: &mut FinishedRecord| record.assignment == assignment;
        let taken = self
            .0
            .values_mut()
            .flat_map(|records| records.extract_if(.., is_own));
        let taken = taken.collect();
        self.0.retain(|_, records| !records.is_empty());
        taken
    }

    /// Number of records by topic.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&Arc<str>, usize)> {
        self.0.iter().map(|(topic, records)| (topic, records.len()))
    }
}

/// The first missing topic of a record's outputs.
pub(super) fn missing_topic<'m>(
    record: &FinishedRecord,
    missing: &'m MissingTopics,
) -> Option<&'m (Arc<str>, Duration)> {
    let mut outputs = record.routing.iter().flat_map(|routing| &routing.outputs);
    outputs.find_map(|output| missing.iter().find(|(topic, _)| *topic == output.topic))
}
