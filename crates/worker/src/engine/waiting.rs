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

/// Finished records, oldest first, with the first of their topics that is missing; with that of an earlier record if only their
/// order keeps them waiting.
#[derive(Default)]
pub(super) struct WaitingForTopic(Vec<(Arc<str>, FinishedRecord)>);

impl WaitingForTopic {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn push(&mut self, topic: Arc<str>, record: FinishedRecord) {
        self.0.push((topic, record));
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = FinishedRecord> + use<> {
        std::mem::take(&mut self.0).into_iter().map(|(_, record)| record)
    }

    /// Removes the records of an assignment.
    pub(super) fn take(&mut self, assignment: AssignmentId) -> impl Iterator<Item = FinishedRecord> {
        let taken = self
            .0
            .extract_if(.., move |(_, record)| record.assignment == assignment);
        taken.map(|(_, record)| record)
    }

    /// Number of records by topic.
    pub(super) fn counts(&self) -> BTreeMap<&Arc<str>, usize> {
        let mut counts = BTreeMap::new();
        for (topic, _) in &self.0 {
            *counts.entry(topic).or_default() += 1;
        }
        counts
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
