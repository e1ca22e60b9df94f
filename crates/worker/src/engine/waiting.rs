//! Finished records that cannot be written because one of their topics is unavailable.
//!
//! They stay out of every transaction, and they count as in flight, which limits their number.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_kafka::{AssignmentId, Presence};

use super::FinishedRecord;

/// Topics that are missing or cannot be written.
pub(super) type UnavailableTopics = [(Arc<str>, Presence)];

/// Finished records, oldest first, with the first of their topics that is unavailable; with that of an earlier record if only their
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

/// The first unavailable topic of a record's outputs.
pub(super) fn unavailable_topic<'m>(
    record: &FinishedRecord,
    unavailable: &'m UnavailableTopics,
) -> Option<&'m (Arc<str>, Presence)> {
    let mut outputs = record.routing.iter().flat_map(|routing| &routing.outputs);
    outputs.find_map(|output| unavailable.iter().find(|(topic, _)| *topic == output.topic))
}
