//! How far each topic was read, and what a survey means for it. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_kafka::follow::Start;
use redeliver_kafka::survey::SurveyedTopic;

use super::survey::Survey;
use crate::index::Change;
use crate::ledger;

/// A topic that is missing from one survey may only be missing from the answer of a broker that is starting.
const SURVEYS_UNTIL_GONE: u32 = 2;
/// After how many surveys in which nothing came, though there is something, the client is replaced.
const SURVEYS_UNTIL_STALLED: u32 = 4;

/// The topics that are read.
#[derive(Debug, Default)]
pub(super) struct Topics {
    known: BTreeMap<Arc<str>, Topic>,
    /// Whether a survey has been seen.
    surveyed: bool,
}

#[derive(Debug, Default)]
struct Topic {
    partitions: BTreeMap<i32, Partition>,
    missing: u32,
    /// The work of the writer with which it was last forgotten. What was found out about an older index says
    /// nothing about the topic.
    forgotten_with: u64,
}

#[derive(Debug, Default)]
struct Partition {
    next: Option<i64>,
    is_followed: bool,
    /// Whether nothing has come since its end was reached.
    at_end: bool,
    /// Whether its end was reached since the start, or it cannot be read.
    was_at_end: bool,
    low: i64,
    /// The end, as the first survey after reaching it told: markers of transactions stand behind the last
    /// record and are never given.
    settled_end: Option<i64>,
    /// What `next` was at the last survey, and for how many surveys it has been that.
    waiting: (Option<i64>, u32),
}

/// What is to be done.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// For the index, in order.
    pub(super) changes: Vec<Change>,
    /// Topics that are not followed any longer.
    pub(super) remove: Vec<Arc<str>>,
    /// Partitions that are followed from now on.
    pub(super) follow: Vec<Start>,
    /// Whether reading has stalled.
    pub(super) renew: bool,
}

/// What a record means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The next one.
    Next,
    /// An offset that was passed already: the topic was made again.
    Backwards,
    /// Of a partition that is followed no longer.
    Stale,
}

impl Topics {
    /// As the index knows them.
    pub(super) fn new(positions: impl IntoIterator<Item = (Arc<str>, i32, i64)>) -> Self {
        let mut topics = Self::default();
        for (topic, partition, next) in positions {
            let topic = topics.known.entry(topic).or_default();
            let partition = topic.partitions.entry(partition).or_default();
            partition.next = Some(next);
        }
        topics
    }

    /// What a survey means. `number` is that of the work which the plan will be part of.
    pub(super) fn survey(&mut self, survey: &Survey, number: u64) -> Plan {
        self.surveyed = true;
        let mut plan = Plan::default();
        self.drop_missing(survey, &mut plan);
        for found in &survey.topics {
            let topic = self.known.entry(found.name.clone()).or_default();
            topic.missing = 0;
            let is_new_one = survey.changed.contains(&found.name) && survey.as_of >= topic.forgotten_with;
            if is_new_one {
                tracing::warn!(
                    topic = &*found.name,
                    "the topic was deleted and made again; it is read anew"
                );
                topic.forget(&found.name, number, &mut plan);
            }
            topic.update(found, &mut plan);
        }
        plan
    }

    fn drop_missing(&mut self, survey: &Survey, plan: &mut Plan) {
        self.known.retain(|name, topic| {
            if survey.topics.iter().any(|found| found.name == *name) {
                return true;
            }
            topic.missing += 1;
            // One that only the index knows was gone before this process began.
            let was_seen = topic.partitions.values().any(|partition| partition.is_followed);
            if was_seen && topic.missing < SURVEYS_UNTIL_GONE {
                return true;
            }
            tracing::info!(topic = &**name, "the topic is gone");
            plan.changes.push(forgotten(name));
            plan.remove.push(name.clone());
            false
        });
    }

    /// The topic shows itself that it was made again. `number` is that of the work which the plan will be part
    /// of.
    pub(super) fn made_again(&mut self, name: &Arc<str>, number: u64) -> Plan {
        let mut plan = Plan::default();
        let topic = self.known.entry(name.clone()).or_default();
        tracing::warn!(
            topic = &**name,
            "offsets begin again: the topic was deleted and made again; it is read anew"
        );
        let partitions: Vec<i32> = topic.partitions.keys().copied().collect();
        topic.forget(name, number, &mut plan);
        for partition in partitions {
            topic.follow(name, partition, &mut plan);
        }
        plan
    }

    /// A record has come.
    pub(super) fn arrived(&mut self, topic: &Arc<str>, partition: i32, offset: i64) -> Arrival {
        let Some(partition) = self.partition(topic, partition) else {
            return Arrival::Stale;
        };
        if partition.next.is_some_and(|next| offset < next) {
            return Arrival::Backwards;
        }
        partition.next = Some(offset + 1);
        partition.at_end = false;
        partition.settled_end = None;
        Arrival::Next
    }

    /// The end of a partition was reached.
    pub(super) fn ended(&mut self, topic: &Arc<str>, partition: i32) {
        if let Some(partition) = self.partition(topic, partition) {
            partition.at_end = true;
            partition.was_at_end = true;
        }
    }

    /// A partition cannot be read. Nothing waits for it.
    pub(super) fn refused(&mut self, topic: &Arc<str>, partition: i32) {
        if let Some(partition) = self.partition(topic, partition) {
            partition.was_at_end = true;
        }
    }

    /// Whether all that was there has been read.
    pub(super) fn caught_up(&self) -> bool {
        let mut partitions = self.known.values().flat_map(|topic| topic.partitions.values());
        self.surveyed && partitions.all(|partition| partition.was_at_end || !partition.is_followed)
    }

    /// How many records of a topic are not read yet, as far as the last survey knew.
    pub(super) fn lag(&self, found: &SurveyedTopic) -> u64 {
        let Some(topic) = self.known.get(&found.name) else {
            return 0;
        };
        let extents = (0..).zip(&found.partitions);
        extents
            .filter_map(|(number, extent)| Some(topic.partitions.get(&number)?.left((*extent)?.end)))
            .sum()
    }

    fn partition(&mut self, topic: &Arc<str>, partition: i32) -> Option<&mut Partition> {
        self.known.get_mut(topic)?.partitions.get_mut(&partition)
    }
}

impl Topic {
    fn forget(&mut self, name: &Arc<str>, number: u64, plan: &mut Plan) {
        self.partitions.clear();
        self.forgotten_with = number;
        plan.changes.push(forgotten(name));
        plan.remove.push(name.clone());
    }

    fn follow(&mut self, name: &Arc<str>, number: i32, plan: &mut Plan) {
        let partition = self.partitions.entry(number).or_default();
        if !partition.is_followed {
            partition.is_followed = true;
            plan.follow.push(Start {
                topic: name.clone(),
                partition: number,
                from: partition.next,
            });
        }
    }

    fn update(&mut self, found: &SurveyedTopic, plan: &mut Plan) {
        for (number, extent) in (0..).zip(&found.partitions) {
            // Without a leader there is nothing to read; the next survey may find one.
            let Some(extent) = extent else { continue };
            self.follow(&found.name, number, plan);
            let Some(partition) = self.partitions.get_mut(&number) else {
                continue;
            };
            if extent.low > partition.low {
                partition.low = extent.low;
                plan.changes.push(Change::Trim {
                    topic: found.name.clone(),
                    partition: number,
                    low: extent.low,
                });
            }
            if partition.at_end && partition.settled_end.is_none() {
                partition.settled_end = Some(extent.end);
            }
            plan.renew |= partition.is_stalled(extent.end);
        }
    }
}

impl Partition {
    fn left(&self, end: i64) -> u64 {
        let read = self.next.unwrap_or(self.low).max(self.settled_end.unwrap_or(0));
        u64::try_from(end - read).unwrap_or(0)
    }

    fn is_stalled(&mut self, end: i64) -> bool {
        let (next, surveys) = &mut self.waiting;
        if *next == self.next && self.next.unwrap_or(self.low).max(self.settled_end.unwrap_or(0)) < end {
            *surveys += 1;
        } else {
            *surveys = 0;
        }
        *next = self.next;
        let is_stalled = *surveys >= SURVEYS_UNTIL_STALLED;
        if is_stalled {
            *surveys = 0;
        }
        is_stalled
    }
}

fn forgotten(topic: &Arc<str>) -> Change {
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
            changed: Vec::new(),
            as_of: 0,
        }
    }

    fn nothing() -> Survey {
        Survey {
            topics: Vec::new(),
            changed: Vec::new(),
            as_of: 0,
        }
    }

    fn follows(plan: &Plan) -> Vec<(i32, Option<i64>)> {
        plan.follow
            .iter()
            .map(|start| (start.partition, start.from))
            .collect()
    }

    fn kinds(plan: &Plan) -> Vec<&'static str> {
        let kind = |change: &Change| match change {
            Change::Forget { .. } => "forget",
            Change::Trim { .. } => "trim",
            Change::ForgetLedger => "forget ledger",
            Change::Letters(_) | Change::Ledger(_) | Change::Position { .. } => "other",
        };
        plan.changes.iter().map(kind).collect()
    }

    #[test]
    fn partitions_are_followed_once_from_where_the_index_is() {
        let mut topics = Topics::new([(name(), 1, 7)]);
        let plan = topics.survey(&survey(&[extent(0, 3), extent(0, 9), None]), 1);
        assert_eq!(follows(&plan), [(0, None), (1, Some(7))]);
        let plan = topics.survey(&survey(&[extent(0, 3), extent(0, 9), extent(0, 0)]), 2);
        assert_eq!(follows(&plan), [(2, None)]);
    }

    #[test]
    fn all_is_read_when_every_partition_was_at_its_end_once() {
        let mut topics = Topics::default();
        assert!(!topics.caught_up());
        topics.survey(&survey(&[extent(0, 3), extent(0, 0), None]), 1);
        assert!(!topics.caught_up());
        topics.ended(&name(), 0);
        assert!(!topics.caught_up());
        topics.refused(&name(), 1);
        assert!(topics.caught_up());
        topics.arrived(&name(), 0, 3);
        assert!(topics.caught_up());
        let mut none = Topics::new([(name(), 0, 7)]);
        none.survey(&nothing(), 1);
        assert!(none.caught_up());
    }

    #[test]
    fn a_topic_that_stays_away_is_forgotten() {
        let mut topics = Topics::new([(name(), 0, 7)]);
        topics.survey(&survey(&[extent(0, 9)]), 2);
        assert_eq!(kinds(&topics.survey(&nothing(), 3)), [""; 0]);
        let plan = topics.survey(&nothing(), 4);
        assert_eq!((kinds(&plan), plan.remove), (vec!["forget"], vec![name()]));
        let plan = topics.survey(&survey(&[extent(0, 9)]), 5);
        assert_eq!(follows(&plan), [(0, None)]);
        // One that was gone when the process began is not waited for.
        let mut before = Topics::new([(name(), 0, 7)]);
        assert_eq!(kinds(&before.survey(&nothing(), 1)), ["forget"]);
    }

    #[test]
    fn a_topic_that_was_made_again_is_read_anew_once() {
        let mut topics = Topics::new([(name(), 0, 7)]);
        let mut changed = survey(&[extent(0, 9)]);
        topics.survey(&changed, 1);
        changed.changed.push(name());
        let plan = topics.survey(&changed, 2);
        assert_eq!((kinds(&plan), follows(&plan)), (vec!["forget"], vec![(0, None)]));
        // Found out before the writer had forgotten it.
        changed.as_of = 1;
        let plan = topics.survey(&changed, 3);
        assert_eq!((kinds(&plan), follows(&plan)), (vec![], vec![]));
        changed.as_of = 2;
        assert_eq!(kinds(&topics.survey(&changed, 4)), ["forget"]);
    }

    #[test]
    fn offsets_that_begin_again_show_a_topic_that_was_made_again() {
        let mut topics = Topics::default();
        topics.survey(&survey(&[extent(0, 9), extent(0, 9)]), 1);
        assert_eq!(topics.arrived(&name(), 0, 5), Arrival::Next);
        // Retention and transactions leave gaps.
        assert_eq!(topics.arrived(&name(), 0, 8), Arrival::Next);
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Backwards);
        let plan = topics.made_again(&name(), 2);
        assert_eq!(
            (kinds(&plan), follows(&plan)),
            (vec!["forget"], vec![(0, None), (1, None)])
        );
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Next);
    }

    #[test]
    fn what_retention_removed_is_trimmed_once() {
        let mut topics = Topics::default();
        assert_eq!(kinds(&topics.survey(&survey(&[extent(4, 9)]), 1)), ["trim"]);
        assert_eq!(kinds(&topics.survey(&survey(&[extent(4, 9)]), 2)), [""; 0]);
        assert_eq!(kinds(&topics.survey(&survey(&[extent(5, 9)]), 3)), ["trim"]);
    }

    #[test]
    fn markers_behind_the_last_record_are_no_lag_and_no_stall() {
        let mut topics = Topics::default();
        let looked = survey(&[extent(0, 10)]);
        topics.survey(&looked, 1);
        assert_eq!(topics.lag(&looked.topics[0]), 10);
        topics.arrived(&name(), 0, 8);
        assert_eq!(topics.lag(&looked.topics[0]), 1);
        topics.ended(&name(), 0);
        for number in 2..20 {
            assert!(!topics.survey(&looked, number).renew);
            assert_eq!(topics.lag(&looked.topics[0]), 0);
        }
        let more = survey(&[extent(0, 12)]);
        let renewed = (20..30).position(|number| topics.survey(&more, number).renew);
        assert_eq!(renewed, Some(3));
        assert_eq!(topics.lag(&more.topics[0]), 2);
        topics.arrived(&name(), 0, 11);
        assert_eq!(topics.lag(&more.topics[0]), 0);
    }

    #[test]
    fn the_ledger_is_forgotten_as_a_ledger() {
        let ledger: Arc<str> = ledger::TOPIC.into();
        let mut topics = Topics::new([(ledger, 0, 7)]);
        assert_eq!(kinds(&topics.survey(&nothing(), 1)), ["forget ledger"]);
    }
}
