//! Detects that the ingest topic has got more partitions than when the process started.
//!
//! The number of partitions decides which shard owns an idempotency key. Processes that disagree about it would forward a
//! command to each other without end, and could accept two jobs with the same key. So a process whose number is outdated stops
//! its shards until it is restarted. A process that starts later knows the new number, and is safe beside one that has stopped.

use std::sync::Arc;

/// The ingest topic with its number of partitions at the start of the process.
#[derive(Debug)]
pub(crate) struct IngestSize {
    topic: Arc<str>,
    state: Arc<str>,
    partitions: i32,
    grown_to: Option<i32>,
}

impl IngestSize {
    pub(crate) fn new(topic: Arc<str>, state: Arc<str>, partitions: i32) -> Self {
        Self {
            topic,
            state,
            partitions,
            grown_to: None,
        }
    }

    /// Takes note of an observed number of partitions. A lower number is ignored: Kafka cannot remove partitions, so it comes
    /// from a broker that has not heard of the growth yet.
    pub(crate) fn observe(&mut self, partitions: i32) {
        if partitions > self.partitions {
            self.grown_to = self.grown_to.max(Some(partitions));
        }
    }

    /// Whether the shards must not act any more.
    pub(crate) fn has_grown(&self) -> bool {
        self.grown_to.is_some()
    }

    /// What happened and what to do; `None` if the topic has not grown.
    pub(crate) fn problem(&self) -> Option<String> {
        let Self {
            topic,
            state,
            partitions,
            ..
        } = self;
        let now = self.grown_to?;
        Some(format!(
            "topic `{topic}` has {now} partitions; it had {partitions} when this process started, and shards of processes with \
             different numbers must not run together; stop all schedulers, give `{state}` {now} partitions too, and start them again"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::IngestSize;

    #[test]
    fn only_a_higher_number_of_partitions_is_a_growth() {
        let mut size = IngestSize::new("jobs".into(), "state".into(), 4);
        for observed in [4, 2, 0] {
            size.observe(observed);
            assert!(!size.has_grown(), "{observed}");
        }
        assert_eq!(size.problem(), None);
        // An outdated answer does not undo it.
        for observed in [6, 4, 5] {
            size.observe(observed);
            let problem = size.problem().unwrap();
            assert!(
                problem.starts_with("topic `jobs` has 6 partitions; it had 4 when this process started"),
                "{problem}"
            );
            assert!(problem.contains("give `state` 6 partitions too"), "{problem}");
        }
    }
}
