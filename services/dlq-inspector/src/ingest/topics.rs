//! Which partitions are read, how far, and what a survey changes about that. No IO.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use redeliver_kafka::follow::Start;
use redeliver_kafka::survey::SurveyedTopic;

use super::survey::Survey;
use crate::index::Change;
use crate::ledger;

/// A topic is deleted once this many surveys in a row miss it. One survey is not enough, because a broker that is
/// starting may return incomplete metadata.
const SURVEYS_UNTIL_DELETED: u32 = 2;
/// The consumer is recreated after a partition with unread records made no progress for this many surveys.
const SURVEYS_UNTIL_STALLED: u32 = 4;

/// The dead-letter topics and the ledger, with the read position of each partition.
#[derive(Debug, Default)]
pub(super) struct Topics {
    topics: BTreeMap<Arc<str>, Topic>,
    is_surveyed: bool,
}

#[derive(Debug, Default)]
struct Topic {
    /// Partitions that are followed.
    partitions: BTreeMap<i32, Partition>,
    /// Positions of partitions that are in the index, but are not followed, because no survey has found a leader yet.
    indexed: BTreeMap<i32, i64>,
    /// Surveys in a row that missed the topic.
    missed: u32,
    /// The batch of changes that last removed the topic from the index. A survey that read the index before this batch
    /// was applied says nothing about the topic as it is now.
    forgotten_in: u64,
}

#[derive(Debug, Default)]
struct Partition {
    /// The next offset to read; `None` if nothing was read yet.
    next: Option<i64>,
    low_watermark: i64,
    /// The last end of the partition that the consumer has reported: everything before it is read. Transaction markers and
    /// aborted records, which the consumer does not return, can make it higher than `next`.
    reached: Option<i64>,
    /// The end that has to be reached for the partition to count as caught up. The consumer can report a lower end when a
    /// broker has just become the leader.
    target: i64,
    /// Whether the target was reached since the start of the process, or the partition cannot be read.
    is_caught_up: bool,
    stall: Stall,
}

/// Detects that a position does not advance.
#[derive(Debug, Default)]
struct Stall {
    /// The position at the last survey.
    next: Option<i64>,
    /// The number of surveys without progress.
    surveys: u32,
}

/// What the reader has to do.
#[derive(Debug, Default)]
pub(super) struct Actions {
    /// Changes of the index, in order.
    pub(super) changes: Vec<Change>,
    /// Topics to stop following.
    pub(super) unfollow: Vec<Arc<str>>,
    /// Partitions to follow.
    pub(super) follow: Vec<Start>,
    /// Whether reading has stalled, so that the consumer must be recreated.
    pub(super) recreate_consumer: bool,
}

/// How the offset of a record relates to the position of its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// At or after the position.
    Next,
    /// Before the position: the topic was deleted and created again.
    Backwards,
    /// The partition is not followed any more.
    Stale,
}

impl Topics {
    /// Begins with the positions of the index.
    pub(super) fn new(positions: impl IntoIterator<Item = (Arc<str>, i32, i64)>) -> Self {
        let mut topics = Self::default();
        for (topic, partition, next) in positions {
            let topic = topics.topics.entry(topic).or_default();
            topic.indexed.insert(partition, next);
        }
        topics
    }

    /// Applies a survey. The resulting changes are to be sent as batch number `batch`.
    pub(super) fn survey(&mut self, survey: &Survey, batch: u64) -> Actions {
        self.is_surveyed = true;
        let mut actions = Actions::default();
        self.drop_missing(survey, &mut actions);
        for found in &survey.topics {
            let topic = self.topics.entry(found.name.clone()).or_default();
            topic.missed = 0;
            if survey.recreated.contains(&found.name) && survey.as_of >= topic.forgotten_in {
                tracing::warn!(
                    topic = &*found.name,
                    "topic was deleted and created again; reading it from the beginning"
                );
                topic.forget(&found.name, batch, &mut actions);
            }
            topic.update(found, &mut actions);
        }
        actions
    }

    fn drop_missing(&mut self, survey: &Survey, actions: &mut Actions) {
        self.topics.retain(|name, topic| {
            if survey.topics.iter().any(|found| found.name == *name) {
                return true;
            }
            topic.missed += 1;
            // A topic that only the index knows was deleted before this process started.
            if !topic.partitions.is_empty() && topic.missed < SURVEYS_UNTIL_DELETED {
                return true;
            }
            tracing::info!(topic = &**name, "topic was deleted");
            actions.changes.push(forget(name));
            actions.unfollow.push(name.clone());
            false
        });
    }

    /// Starts a topic from the beginning, because a record arrived at an offset before the position. The resulting
    /// changes are to be sent as batch number `batch`.
    pub(super) fn recreated(&mut self, name: &Arc<str>, batch: u64) -> Actions {
        let mut actions = Actions::default();
        let topic = self.topics.entry(name.clone()).or_default();
        tracing::warn!(
            topic = &**name,
            "offsets went backwards: topic was deleted and created again; reading it from the beginning"
        );
        let partitions: BTreeSet<i32> = topic
            .partitions
            .keys()
            .chain(topic.indexed.keys())
            .copied()
            .collect();
        topic.forget(name, batch, &mut actions);
        for partition in partitions {
            topic.follow(name, partition, &mut actions);
        }
        actions
    }

    /// Advances a partition past a record.
    pub(super) fn arrived(&mut self, topic: &Arc<str>, partition: i32, offset: i64) -> Arrival {
        let Some(partition) = self.partition(topic, partition) else {
            return Arrival::Stale;
        };
        if partition.next.is_some_and(|next| offset < next) {
            return Arrival::Backwards;
        }
        partition.next = Some(offset + 1);
        Arrival::Next
    }

    /// Records that everything before an offset is read, which is the end of the partition as far as its broker knows.
    pub(super) fn reached_end(&mut self, topic: &Arc<str>, partition: i32, offset: i64) {
        if let Some(partition) = self.partition(topic, partition) {
            partition.reached = partition.reached.max(Some(offset));
            partition.update_caught_up();
        }
    }

    /// Records that a partition cannot be read. It then counts as caught up, so that it does not keep the other
    /// partitions from being served.
    pub(super) fn refused(&mut self, topic: &Arc<str>, partition: i32) {
        if let Some(partition) = self.partition(topic, partition) {
            partition.is_caught_up = true;
        }
    }

    /// Whether the end of each partition was reached since the start of the process.
    pub(super) fn is_caught_up(&self) -> bool {
        let mut partitions = self.topics.values().flat_map(|topic| topic.partitions.values());
        self.is_surveyed && partitions.all(|partition| partition.is_caught_up)
    }

    /// The number of offsets of a topic that are not read yet, as of a survey.
    pub(super) fn lag(&self, found: &SurveyedTopic) -> u64 {
        let Some(topic) = self.topics.get(&found.name) else {
            return 0;
        };
        let extents = (0..).zip(&found.partitions);
        extents
            .filter_map(|(number, extent)| Some(topic.partitions.get(&number)?.lag((*extent)?.end)))
            .sum()
    }

    fn partition(&mut self, topic: &Arc<str>, partition: i32) -> Option<&mut Partition> {
        self.topics.get_mut(topic)?.partitions.get_mut(&partition)
    }
}

impl Topic {
    fn forget(&mut self, name: &Arc<str>, batch: u64, actions: &mut Actions) {
        self.partitions.clear();
        self.indexed.clear();
        self.forgotten_in = batch;
        actions.changes.push(forget(name));
        actions.unfollow.push(name.clone());
    }

    fn follow(&mut self, name: &Arc<str>, number: i32, actions: &mut Actions) -> &mut Partition {
        self.partitions.entry(number).or_insert_with(|| {
            let next = self.indexed.remove(&number);
            actions.follow.push(Start {
                topic: name.clone(),
                partition: number,
                from: next,
            });
            Partition {
                next,
                target: i64::MAX,
                ..Partition::default()
            }
        })
    }

    fn update(&mut self, found: &SurveyedTopic, actions: &mut Actions) {
        for (number, extent) in (0..).zip(&found.partitions) {
            // A partition without a leader cannot be read. A later survey may find one.
            let Some(extent) = extent else { continue };
            let partition = self.follow(&found.name, number, actions);
            if extent.low > partition.low_watermark {
                partition.low_watermark = extent.low;
                actions.changes.push(Change::Trim {
                    topic: found.name.clone(),
                    partition: number,
                    low: extent.low,
                });
            }
            // The topic may have been created again, with fewer records.
            partition.target = partition.target.min(extent.end);
            partition.update_caught_up();
            actions.recreate_consumer |= partition.is_stalled(extent.end);
        }
    }
}

impl Partition {
    /// The offset up to which everything is read.
    fn read_up_to(&self) -> i64 {
        let next = self.next.unwrap_or(self.low_watermark).max(0);
        self.reached.map_or(next, |reached| next.max(reached))
    }

    fn update_caught_up(&mut self) {
        self.is_caught_up |= self.reached.is_some() && self.read_up_to() >= self.target;
    }

    fn lag(&self, end: i64) -> u64 {
        u64::try_from(end - self.read_up_to()).unwrap_or(0)
    }

    /// Compares the position with that of the last survey. After a stall, counting begins again.
    fn is_stalled(&mut self, end: i64) -> bool {
        let has_unread = self.read_up_to() < end;
        let stall = &mut self.stall;
        if stall.next == self.next && has_unread {
            stall.surveys += 1;
        } else {
            stall.surveys = 0;
        }
        stall.next = self.next;
        let is_stalled = stall.surveys >= SURVEYS_UNTIL_STALLED;
        if is_stalled {
            stall.surveys = 0;
        }
        is_stalled
    }
}

fn forget(topic: &Arc<str>) -> Change {
    if &**topic == ledger::TOPIC {
        Change::ForgetLedger
    } else {
        Change::Forget { topic: topic.clone() }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::survey::Extent;

    use super::*;

    fn name() -> Arc<str> {
        "t-dlq".into()
    }

    fn extent(low: i64, end: i64) -> Option<Extent> {
        Some(Extent { low, end })
    }

    fn survey(partitions: &[Option<Extent>]) -> Survey {
        Survey {
            topics: vec![SurveyedTopic {
                name: name(),
                partitions: partitions.to_vec(),
            }],
            recreated: Vec::new(),
            as_of: 0,
        }
    }

    fn no_topics() -> Survey {
        Survey {
            topics: Vec::new(),
            recreated: Vec::new(),
            as_of: 0,
        }
    }

    fn followed(actions: &Actions) -> Vec<(i32, Option<i64>)> {
        actions
            .follow
            .iter()
            .map(|start| (start.partition, start.from))
            .collect()
    }

    fn kinds(actions: &Actions) -> Vec<&'static str> {
        let kind = |change: &Change| match change {
            Change::Forget { .. } => "forget",
            Change::Trim { .. } => "trim",
            Change::ForgetLedger => "forget ledger",
            Change::Letters(_) | Change::Ledger(_) | Change::Position { .. } => "other",
        };
        actions.changes.iter().map(kind).collect()
    }

    #[test]
    fn each_partition_is_followed_once_from_its_position_in_the_index() {
        let mut topics = Topics::new([(name(), 1, 7)]);
        let actions = topics.survey(&survey(&[extent(0, 3), extent(0, 9), None]), 1);
        assert_eq!(followed(&actions), [(0, None), (1, Some(7))]);
        let actions = topics.survey(&survey(&[extent(0, 3), extent(0, 9), extent(0, 0)]), 2);
        assert_eq!(followed(&actions), [(2, None)]);
    }

    #[test]
    fn topics_are_caught_up_once_the_end_of_every_partition_was_reached() {
        let mut topics = Topics::default();
        assert!(!topics.is_caught_up());
        topics.survey(&survey(&[extent(0, 3), extent(0, 0), None]), 1);
        assert!(!topics.is_caught_up());
        // A broker that has just become the leader does not know the last records yet.
        topics.reached_end(&name(), 0, 2);
        topics.refused(&name(), 1);
        assert!(!topics.is_caught_up());
        topics.reached_end(&name(), 0, 3);
        assert!(topics.is_caught_up());
        topics.arrived(&name(), 0, 3);
        assert!(topics.is_caught_up());
        let mut deleted = Topics::new([(name(), 0, 7)]);
        deleted.survey(&no_topics(), 1);
        assert!(deleted.is_caught_up());
    }

    #[test]
    fn a_topic_that_became_shorter_is_caught_up_at_its_new_end() {
        let mut topics = Topics::default();
        topics.survey(&survey(&[extent(0, 9)]), 1);
        topics.reached_end(&name(), 0, 3);
        assert!(!topics.is_caught_up());
        topics.survey(&survey(&[extent(0, 3)]), 2);
        assert!(topics.is_caught_up());
    }

    #[test]
    fn a_topic_that_two_surveys_miss_is_forgotten() {
        let mut topics = Topics::new([(name(), 0, 7)]);
        topics.survey(&survey(&[extent(0, 9)]), 2);
        assert_eq!(kinds(&topics.survey(&no_topics(), 3)), [""; 0]);
        let actions = topics.survey(&no_topics(), 4);
        assert_eq!(
            (kinds(&actions), actions.unfollow),
            (vec!["forget"], vec![name()])
        );
        let actions = topics.survey(&survey(&[extent(0, 9)]), 5);
        assert_eq!(followed(&actions), [(0, None)]);
        // A topic that was deleted before the process started is forgotten at once.
        let mut before = Topics::new([(name(), 0, 7)]);
        assert_eq!(kinds(&before.survey(&no_topics(), 1)), ["forget"]);
    }

    #[test]
    fn a_recreated_topic_is_read_from_the_beginning_once() {
        let mut topics = Topics::new([(name(), 0, 7)]);
        let mut recreated = survey(&[extent(0, 9)]);
        topics.survey(&recreated, 1);
        recreated.recreated.push(name());
        let actions = topics.survey(&recreated, 2);
        assert_eq!(
            (kinds(&actions), followed(&actions)),
            (vec!["forget"], vec![(0, None)])
        );
        // This survey read the index before the writer had applied the removal.
        recreated.as_of = 1;
        let actions = topics.survey(&recreated, 3);
        assert_eq!((kinds(&actions), followed(&actions)), (vec![], vec![]));
        recreated.as_of = 2;
        assert_eq!(kinds(&topics.survey(&recreated, 4)), ["forget"]);
    }

    #[test]
    fn offsets_that_go_backwards_reveal_a_recreated_topic() {
        let mut topics = Topics::default();
        topics.survey(&survey(&[extent(0, 9), extent(0, 9)]), 1);
        assert_eq!(topics.arrived(&name(), 0, 5), Arrival::Next);
        // Retention and transaction markers leave gaps.
        assert_eq!(topics.arrived(&name(), 0, 8), Arrival::Next);
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Backwards);
        let actions = topics.recreated(&name(), 2);
        assert_eq!(
            (kinds(&actions), followed(&actions)),
            (vec!["forget"], vec![(0, None), (1, None)])
        );
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Next);
    }

    #[test]
    fn a_new_low_watermark_trims_once() {
        let mut topics = Topics::default();
        assert_eq!(kinds(&topics.survey(&survey(&[extent(4, 9)]), 1)), ["trim"]);
        assert_eq!(kinds(&topics.survey(&survey(&[extent(4, 9)]), 2)), [""; 0]);
        assert_eq!(kinds(&topics.survey(&survey(&[extent(5, 9)]), 3)), ["trim"]);
    }

    #[test]
    fn transaction_markers_after_the_last_record_are_neither_lag_nor_a_stall() {
        let mut topics = Topics::default();
        let surveyed = survey(&[extent(0, 10)]);
        topics.survey(&surveyed, 1);
        assert_eq!(topics.lag(&surveyed.topics[0]), 10);
        topics.arrived(&name(), 0, 8);
        assert_eq!(topics.lag(&surveyed.topics[0]), 1);
        topics.reached_end(&name(), 0, 10);
        for number in 2..20 {
            assert!(!topics.survey(&surveyed, number).recreate_consumer);
            assert_eq!(topics.lag(&surveyed.topics[0]), 0);
        }
        let more = survey(&[extent(0, 12)]);
        let stalled = (20..30).position(|number| topics.survey(&more, number).recreate_consumer);
        assert_eq!(stalled, Some(3));
        assert_eq!(topics.lag(&more.topics[0]), 2);
        topics.arrived(&name(), 0, 11);
        assert_eq!(topics.lag(&more.topics[0]), 0);
        // Only markers follow.
        let markers = survey(&[extent(0, 14)]);
        topics.reached_end(&name(), 0, 14);
        for number in 30..40 {
            assert!(!topics.survey(&markers, number).recreate_consumer);
        }
        assert_eq!(topics.lag(&markers.topics[0]), 0);
    }

    #[test]
    fn a_deleted_ledger_resets_all_states() {
        let ledger: Arc<str> = ledger::TOPIC.into();
        let mut topics = Topics::new([(ledger, 0, 7)]);
        assert_eq!(kinds(&topics.survey(&no_topics(), 1)), ["forget ledger"]);
    }
}
