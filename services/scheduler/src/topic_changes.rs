//! Detects changes of topics after which the shards of a process must not act until it is restarted.
//!
//! *The ingest topic has got more partitions.* Their number decides which shard owns an idempotency key. Processes that disagree about it would forward a
//! command to each other without end, and could accept two jobs with the same key. A process that starts later knows the new number, and is safe beside one
//! that has stopped.
//!
//! *The state topic was created again.* Its offsets begin again at 0, so the index is complete up to an
//! offset of the previous topic. What the index has is lost in any case, and the next process rebuilds it.
//! Until then, commands wait in the ingest topic.

use std::sync::Arc;

use redeliver_kafka::TopicId;

/// The topics as they were at the start of the process, and what has changed since.
#[derive(Debug)]
pub(crate) struct TopicChanges {
    ingest: Arc<str>,
    state: Arc<str>,
    partitions: i32,
    grown_to: Option<i32>,
    /// `None`: it is unknown.
    state_id: Option<TopicId>,
    has_other_state: bool,
}

impl TopicChanges {
    pub(crate) fn new(ingest: Arc<str>, state: Arc<str>, partitions: i32, state_id: Option<TopicId>) -> Self {
        Self {
            ingest,
            state,
            partitions,
            grown_to: None,
            state_id,
            has_other_state: false,
        }
    }

    /// Takes note of an observed number of partitions of the ingest topic. A lower number is ignored: Kafka cannot remove partitions, so it comes
    /// from a broker that has not heard of the growth yet.
    pub(crate) fn observe_partitions(&mut self, partitions: i32) {
        if partitions > self.partitions {
            self.grown_to = self.grown_to.max(Some(partitions));
        }
    }

    /// Takes note of the observed id of the state topic. An id that was seen before comes back if a broker had not heard of the new topic yet.
    pub(crate) fn observe_state(&mut self, id: TopicId) {
        self.has_other_state = self.state_id.is_some_and(|known| known != id);
    }

    /// Whether the shards must not act.
    pub(crate) fn must_stop(&self) -> bool {
        self.grown_to.is_some() || self.has_other_state
    }

    /// What happened and what to do; `None` if the shards may act.
    pub(crate) fn problem(&self) -> Option<String> {
        let Self {
            ingest,
            state,
            partitions,
            ..
        } = self;
        if self.has_other_state {
            return Some(format!(
                "topic `{state}` was deleted and created again, and with the previous topic the jobs and schedules in it are lost; requests \
                 wait in `{ingest}`; to continue with the new topic, stop all schedulers, and start them again"
            ));
        }
        let now = self.grown_to?;
        Some(format!(
            "topic `{ingest}` has {now} partitions; it had {partitions} when this process started, and shards of processes with \
             different numbers must not run together; stop all schedulers, give `{state}` {now} partitions too, and start them again"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(state_id: Option<u128>) -> TopicChanges {
        TopicChanges::new("jobs".into(), "state".into(), 4, state_id.map(TopicId::from_bits))
    }

    #[test]
    fn only_more_partitions_are_a_growth() {
        let mut changes = changes(None);
        for observed in [4, 2, 0] {
            changes.observe_partitions(observed);
            assert!(!changes.must_stop(), "{observed}");
        }
        assert_eq!(changes.problem(), None);
        // An outdated answer does not undo it.
        for observed in [6, 4, 5] {
            changes.observe_partitions(observed);
            let problem = changes.problem().unwrap();
            assert!(
                problem.starts_with("topic `jobs` has 6 partitions; it had 4 when this process started"),
                "{problem}"
            );
            assert!(problem.contains("give `state` 6 partitions too"), "{problem}");
        }
    }

    #[test]
    fn another_state_topic_stops_shards() {
        for (known, observed, expected) in [
            (Some(1), 1, false),
            (Some(1), 2, true),
            // Before Kafka 2.8, and with the embedded broker.
            (None, 2, false),
        ] {
            let mut changes = changes(known);
            changes.observe_state(TopicId::from_bits(observed));
            assert_eq!(changes.must_stop(), expected);
            let problem = changes.problem().unwrap_or_default();
            assert_eq!(
                problem.contains("topic `state` was deleted and created again"),
                expected
            );
        }
    }
}
