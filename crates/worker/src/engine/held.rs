//! Finished records that cannot be written, because a topic of theirs does not exist.
//!
//! A transaction with an output to a topic that is gone would keep all others waiting until it times out. So such a
//! record stays out of every transaction. It stays counted as one in hand, so what is held back is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_kafka::AssignmentId;

use super::Done;

/// Topics that do not exist, each with the time for which that has been known.
pub(super) type Missing = [(Arc<str>, Duration)];

/// Records that are held back, by the topic that is missing.
#[derive(Default)]
pub(super) struct Held(BTreeMap<Arc<str>, Vec<Done>>);

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    pub(super) fn hold(&mut self, topic: Arc<str>, done: Done) {
        self.0.entry(topic).or_default().push(done);
    }

    /// Takes out what does not have to wait any more, as this says of its topic.
    pub(super) fn release(&mut self, may_go: impl Fn(&str) -> bool) -> Vec<Done> {
        let mut free = Vec::new();
        self.0.retain(|topic, held| {
            let goes = may_go(topic);
            if goes {
                free.append(held);
            }
            !goes
        });
        free
    }

    /// Takes out what is of an assignment.
    pub(super) fn take(&mut self, assignment: AssignmentId) -> Vec<Done> {
        let is_of_it = |done: &mut Done| done.assignment == assignment;
        let taken = self.0.values_mut().flat_map(|held| held.extract_if(.., is_of_it));
        let taken = taken.collect();
        self.0.retain(|_, held| !held.is_empty());
        taken
    }

    /// How many wait for each topic.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&Arc<str>, usize)> {
        self.0.iter().map(|(topic, held)| (topic, held.len()))
    }
}

/// The first topic of a record's outputs that is missing.
pub(super) fn missing_of<'m>(done: &Done, missing: &'m Missing) -> Option<&'m (Arc<str>, Duration)> {
    let mut outputs = done.routing.iter().flat_map(|routing| &routing.outputs);
    outputs.find_map(|output| missing.iter().find(|(topic, _)| *topic == output.topic))
}
