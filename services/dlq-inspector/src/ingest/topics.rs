//! Which partitions are read, how far, and what a survey changes about that. No IO.
//!
//! What the index contains is described as of the beginning of a survey: the *target*. Once every partition is read up to the end
//! that this survey has found, or is missing, the next survey becomes the target. A busy topic does not move a target away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use redeliver_kafka::follow::Start;
use redeliver_kafka::survey::SurveyedTopic;

use super::partition::{Observation, Partition};
use super::survey::Survey;
use crate::completeness::{Completeness, Reason};
use crate::index::Change;
use crate::ledger;

/// A topic is deleted once this many surveys in a row miss it. One survey is not enough, because a broker that is
/// starting may return incomplete metadata.
const SURVEYS_UNTIL_DELETED: u32 = 2;

/// A topic with the same id as before has lost records if this many surveys in a row find older offsets. Before that, a broker may just lag
/// behind, such as one that has become the leader.
const SURVEYS_UNTIL_TRUNCATED: u32 = 5;

/// The dead-letter topics and the ledger, with the read position of each partition.
#[derive(Debug, Default)]
pub(super) struct Topics {
    topics: BTreeMap<Arc<str>, Topic>,
    is_surveyed: bool,
    /// When the survey began that is the target; `None` if it is reached, so that the next one is the target.
    target: Option<Timestamp>,
    /// The last target that was reached, see [`Completeness::as_of`].
    as_of: Option<Timestamp>,
    /// Whether it may have changed which partitions are missing.
    is_changed: bool,
}

#[derive(Debug, Default)]
struct Topic {
    /// `None` if it is unknown, as with brokers that do not support topic ids.
    id: Option<TopicId>,
    partitions: BTreeMap<i32, Partition>,
    /// Why Kafka does not describe the topic.
    refusal: Option<Arc<str>>,
    /// Surveys in a row that missed the topic.
    missed: u32,
    /// Surveys in a row that found older offsets although the topic has the same id.
    older: u32,
    /// The batch of changes that last removed the topic from the index. A survey that read the index before this batch
    /// was applied says nothing about the topic as it is now.
    forgotten_in: u64,
}

/// What the index knows of the topics.
#[derive(Debug, Default)]
pub(crate) struct Indexed {
    /// The next offset to read of each partition.
    pub(crate) positions: Vec<(Arc<str>, i32, i64)>,
    /// The ids of the topics that were read.
    pub(crate) ids: Vec<(Arc<str>, TopicId)>,
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
    /// Begins with what the index knows.
    pub(super) fn new(indexed: Indexed) -> Self {
        let mut topics = Self::default();
        for (name, partition, next) in indexed.positions {
            let topic = topics.topics.entry(name).or_default();
            topic.partitions.insert(partition, Partition::new(Some(next)));
        }
        for (name, id) in indexed.ids {
            topics.topics.entry(name).or_default().id = Some(id);
        }
        topics
    }

    /// Applies a survey. The resulting changes are to be sent as batch number `batch`. `had_turn`: whether each partition had its
    /// turn to return records since the last survey.
    pub(super) fn survey(&mut self, survey: &Survey, batch: u64, had_turn: bool) -> Actions {
        let mut actions = Actions::default();
        self.drop_missing(survey, &mut actions);
        // Until everything was read once, the newest survey is the target.
        let sets_target = self.target.is_none() || self.as_of.is_none();
        for found in &survey.topics {
            let topic = self.topics.entry(found.name.clone()).or_default();
            topic.missed = 0;
            // It may be about the previous topic: with the low watermark of that one, records of this one would look removed.
            if survey.as_of < topic.forgotten_in {
                continue;
            }
            topic.refusal = found.refusal.as_deref().map(Arc::from);
            if topic.refusal.is_some() {
                // Nothing is known about them either, so that they neither hold back the target nor reach it.
                for partition in topic.partitions.values_mut() {
                    partition.observe(Observation {
                        extent: None,
                        sets_target,
                        had_turn,
                    });
                }
                continue;
            }
            let has_other_records = survey.recreated.contains(&found.name);
            let is_truncated = topic.is_started_over(found.id, has_other_records);
            if topic.has_other_id(found.id) || is_truncated {
                tracing::warn!(
                    topic = &*found.name,
                    has_other_id = topic.has_other_id(found.id),
                    "topic was deleted and created again, or has lost records; reading it from the beginning"
                );
                topic.forget(&found.name, batch, &mut actions);
            }
            topic.identify(&found.name, found.id, &mut actions);
            topic.update(found, sets_target, had_turn, &mut actions);
        }
        if sets_target {
            self.target = Some(survey.began_at);
        }
        self.is_surveyed = true;
        self.is_changed = true;
        actions
    }

    fn drop_missing(&mut self, survey: &Survey, actions: &mut Actions) {
        let found: BTreeSet<&Arc<str>> = survey.topics.iter().map(|found| &found.name).collect();
        self.topics.retain(|name, topic| {
            if found.contains(name) {
                return true;
            }
            topic.missed += 1;
            if topic.missed < SURVEYS_UNTIL_DELETED {
                return true;
            }
            tracing::info!(topic = &**name, "topic was deleted");
            actions.changes.push(forget(name));
            actions.unfollow.push(name.clone());
            false
        });
    }

    /// Whether the id of a topic is known.
    pub(super) fn has_id(&self, topic: &str) -> bool {
        self.topics.get(topic).is_some_and(|topic| topic.id.is_some())
    }

    /// Those of these topics that had another id before: they were deleted and created again.
    pub(super) fn with_other_id(&self, ids: &BTreeMap<String, TopicId>) -> Vec<Arc<str>> {
        let known = self.topics.iter();
        let other = known.filter(|(name, topic)| topic.has_other_id(ids.get(&***name).copied()));
        other.map(|(name, _)| name.clone()).collect()
    }

    /// Starts a topic from the beginning, because a record arrived at an offset before the position, or the topic has another id. `id`: its current one. The
    /// resulting changes are to be sent as batch number `batch`.
    pub(super) fn recreated(&mut self, name: &Arc<str>, id: Option<TopicId>, batch: u64) -> Actions {
        let mut actions = Actions::default();
        let topic = self.topics.entry(name.clone()).or_default();
        tracing::warn!(
            topic = &**name,
            "topic was deleted and created again; reading it from the beginning"
        );
        let followed: Vec<i32> = topic
            .partitions
            .iter()
            .filter(|(_, partition)| partition.is_followed())
            .map(|(number, _)| *number)
            .collect();
        topic.forget(name, batch, &mut actions);
        topic.identify(name, id, &mut actions);
        for number in followed {
            topic.partitions.insert(number, Partition::started_over());
            actions.follow.push(Start {
                topic: name.clone(),
                partition: number,
                from: None,
            });
        }
        self.is_changed = true;
        actions
    }

    /// Advances a partition past a record.
    pub(super) fn arrived(&mut self, topic: &Arc<str>, partition: i32, offset: i64) -> Arrival {
        match self.change(topic, partition, |partition| partition.arrived(offset)) {
            None => Arrival::Stale,
            Some(false) => Arrival::Backwards,
            Some(true) => Arrival::Next,
        }
    }

    /// Records that everything before an offset is read, which is the end of the partition as far as its broker knows.
    pub(super) fn reached_end(&mut self, topic: &Arc<str>, partition: i32, offset: i64) {
        self.change(topic, partition, |partition| partition.reached_end(offset));
    }

    /// Records that a partition cannot be read. It does not keep the other partitions from being served.
    pub(super) fn refused(&mut self, topic: &Arc<str>, partition: i32, error: &str) {
        self.change(topic, partition, |partition| partition.refused(error));
    }

    fn change<T>(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        change: impl FnOnce(&mut Partition) -> T,
    ) -> Option<T> {
        let partition = self.topics.get_mut(topic)?.partitions.get_mut(&partition)?;
        let before = partition.missing();
        let result = change(partition);
        self.is_changed |= partition.missing() != before;
        Some(result)
    }

    /// What the index contains once it has applied all changes so far; `None` if that is the same as before.
    pub(super) fn completeness(&mut self) -> Option<Completeness> {
        let has_advanced = self.advance();
        if !self.is_changed && !has_advanced {
            return None;
        }
        self.is_changed = false;
        let missing = self.topics.iter().flat_map(|(name, topic)| {
            let refusal = topic.refusal.iter();
            let whole = refusal.map(|error| ((name.clone(), None), Reason::Refused(error.clone())));
            let is_whole = topic.refusal.is_some();
            let partitions = topic.partitions.iter().filter(move |_| !is_whole);
            let single = partitions.filter_map(|(number, partition)| {
                Some(((name.clone(), Some(*number)), partition.missing()?))
            });
            whole.chain(single)
        });
        Some(Completeness {
            as_of: self.as_of,
            missing: missing.collect(),
            ..Completeness::default()
        })
    }

    /// Whether the target is reached now.
    fn advance(&mut self) -> bool {
        let mut partitions = self.topics.values().flat_map(|topic| topic.partitions.values());
        let is_first = self.as_of.is_none();
        let is_reached = self.is_surveyed
            && self.target.is_some()
            && partitions.all(|partition| partition.is_at_target() && !(is_first && partition.is_reading()));
        if is_reached {
            self.as_of = self.target.take();
        }
        is_reached
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

    /// Whether retention has removed the record.
    pub(super) fn is_removed(&self, topic: &str, partition: i32, offset: i64) -> bool {
        let topic = self.topics.get(topic);
        let partition = topic.and_then(|topic| topic.partitions.get(&partition));
        partition.is_some_and(|partition| offset < partition.low_watermark())
    }
}

impl Topic {
    fn has_other_id(&self, id: Option<TopicId>) -> bool {
        matches!((self.id, id), (Some(known), Some(found)) if known != found)
    }

    /// Whether other records than before mean that the topic was created again.
    fn is_started_over(&mut self, id: Option<TopicId>, has_other_records: bool) -> bool {
        let has_same_id = id.is_some() && self.id == id;
        if !(has_other_records && has_same_id) {
            self.older = 0;
            return has_other_records;
        }
        self.older += 1;
        self.older >= SURVEYS_UNTIL_TRUNCATED
    }

    fn forget(&mut self, name: &Arc<str>, batch: u64, actions: &mut Actions) {
        self.partitions.clear();
        self.forgotten_in = batch;
        self.id = None;
        self.older = 0;
        actions.changes.push(forget(name));
        actions.unfollow.push(name.clone());
    }

    fn identify(&mut self, name: &Arc<str>, id: Option<TopicId>, actions: &mut Actions) {
        if let Some(id) = id.filter(|id| self.id != Some(*id)) {
            self.id = Some(id);
            actions.changes.push(Change::Identify {
                topic: name.clone(),
                id,
            });
        }
    }

    fn update(&mut self, found: &SurveyedTopic, sets_target: bool, had_turn: bool, actions: &mut Actions) {
        // A topic that was created again can have fewer partitions.
        self.partitions.retain(|number, partition| {
            usize::try_from(*number).is_ok_and(|number| number < found.partitions.len())
                || partition.has_read()
        });
        for (number, extent) in (0..).zip(&found.partitions) {
            let partition = self
                .partitions
                .entry(number)
                .or_insert_with(|| Partition::new(None));
            let step = partition.observe(Observation {
                extent: *extent,
                sets_target,
                had_turn,
            });
            if let Some(from) = step.follow {
                actions.follow.push(Start {
                    topic: found.name.clone(),
                    partition: number,
                    from,
                });
            }
            // Of the ledger, the index has no records that a trim could remove.
            if let Some(low) = step.trim
                && &*found.name != ledger::TOPIC
            {
                actions.changes.push(Change::Trim {
                    topic: found.name.clone(),
                    partition: number,
                    low,
                });
            }
            actions.recreate_consumer |= step.is_stalled;
        }
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

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn found(name: &str, partitions: &[Option<Extent>]) -> SurveyedTopic {
        SurveyedTopic {
            name: name.into(),
            id: None,
            partitions: partitions.to_vec(),
            refusal: None,
        }
    }

    fn survey_of(topics: Vec<SurveyedTopic>) -> Survey {
        Survey {
            topics,
            recreated: Vec::new(),
            as_of: 0,
            began_at: at(0),
        }
    }

    fn survey(partitions: &[Option<Extent>]) -> Survey {
        survey_of(vec![found(&name(), partitions)])
    }

    fn no_topics() -> Survey {
        survey_of(Vec::new())
    }

    fn indexed(partition: i32, next: i64) -> Topics {
        Topics::new(Indexed {
            positions: vec![(name(), partition, next)],
            ids: Vec::new(),
        })
    }

    fn apply(topics: &mut Topics, survey: &Survey, batch: u64) -> Actions {
        topics.survey(survey, batch, true)
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
            Change::Identify { .. } => "identify",
            Change::Letters(_) | Change::Ledger(_) | Change::Position { .. } | Change::Source { .. } => {
                "other"
            }
        };
        actions.changes.iter().map(kind).collect()
    }

    fn missing(topics: &mut Topics) -> Vec<(Option<i32>, Reason)> {
        topics.is_changed = true;
        let completeness = topics.completeness().unwrap();
        let missing = completeness.missing.into_iter();
        missing
            .map(|((_, partition), reason)| (partition, reason))
            .collect()
    }

    #[test]
    fn partitions_are_followed_from_their_positions() {
        let mut topics = indexed(1, 7);
        let actions = apply(&mut topics, &survey(&[extent(0, 3), extent(0, 9), None]), 1);
        assert_eq!(followed(&actions), [(0, None), (1, Some(7))]);
        let actions = apply(
            &mut topics,
            &survey(&[extent(0, 3), extent(0, 9), extent(0, 0)]),
            2,
        );
        assert_eq!(followed(&actions), [(2, None)]);
    }

    #[test]
    fn index_is_complete_as_of_survey() {
        let mut topics = Topics::default();
        assert_eq!(topics.completeness(), None);
        let mut first = survey(&[extent(0, 3), extent(0, 0)]);
        first.began_at = at(10);
        apply(&mut topics, &first, 1);
        assert_eq!(topics.completeness().unwrap().as_of, None);
        topics.reached_end(&name(), 1, 0);
        topics.reached_end(&name(), 0, 3);
        let completeness = topics.completeness().unwrap();
        assert_eq!(
            (completeness.as_of, completeness.missing.len()),
            (Some(at(10)), 0)
        );
        assert_eq!(topics.completeness(), None);

        // Later surveys do not move the target.
        for (time, end) in [(20, 5), (30, 9)] {
            let mut later = survey(&[extent(0, end), extent(0, 0)]);
            later.began_at = at(time);
            apply(&mut topics, &later, 2);
            assert_eq!(topics.completeness().unwrap().as_of, Some(at(10)));
        }
        topics.arrived(&name(), 0, 4);
        assert_eq!(topics.completeness().unwrap().as_of, Some(at(20)));
    }

    #[test]
    fn newest_survey_is_first_target() {
        let mut topics = Topics::default();
        for time in [10, 20] {
            let mut survey = survey(&[extent(0, time)]);
            survey.began_at = at(time);
            apply(&mut topics, &survey, 1);
        }
        topics.reached_end(&name(), 0, 10);
        assert_eq!(topics.completeness().unwrap().as_of, None);
        topics.reached_end(&name(), 0, 20);
        assert_eq!(topics.completeness().unwrap().as_of, Some(at(20)));
    }

    #[test]
    fn unreadable_partitions_do_not_delay_others() {
        let mut topics = Topics::default();
        apply(&mut topics, &survey(&[extent(0, 3), extent(0, 2), None]), 1);
        topics.reached_end(&name(), 0, 3);
        topics.refused(&name(), 1, "denied");
        let completeness = topics.completeness().unwrap();
        assert_eq!(completeness.as_of, Some(at(0)));
        let denied = Reason::Refused("denied".into());
        assert_eq!(
            missing(&mut topics),
            [(Some(1), denied.clone()), (Some(2), Reason::NoLeader)]
        );
        // A topic that Kafka does not even describe to this client was not deleted.
        let mut invisible = found(&name(), &[]);
        invisible.refusal = Some("denied".to_owned());
        for batch in 2..6 {
            assert_eq!(
                kinds(&apply(&mut topics, &survey_of(vec![invisible.clone()]), batch)),
                [""; 0]
            );
        }
        assert_eq!(missing(&mut topics), [(None, denied)]);
        let visible = survey(&[extent(0, 3), extent(0, 2), extent(0, 0)]);
        assert_eq!(followed(&apply(&mut topics, &visible, 6)), [(2, None)]);
    }

    #[test]
    fn refused_topic_is_read_again() {
        let mut topics = Topics::default();
        let with = |time, refusal: Option<&str>, end| {
            let mut refused = found("refused-dlq", &[extent(0, end)]);
            refused.refusal = refusal.map(str::to_owned);
            let mut survey = survey_of(vec![refused, found(&name(), &[extent(0, 1)])]);
            survey.began_at = at(time);
            survey
        };
        let refused: Arc<str> = "refused-dlq".into();
        apply(&mut topics, &with(10, None, 3), 1);
        topics.reached_end(&refused, 0, 3);
        topics.reached_end(&name(), 0, 1);
        assert_eq!(topics.completeness().unwrap().as_of, Some(at(10)));
        // This survey is the target, and the topic has records that are not read.
        apply(&mut topics, &with(20, None, 5), 2);
        assert_eq!(topics.completeness().unwrap().as_of, Some(at(10)));
        apply(&mut topics, &with(30, Some("denied"), 0), 3);
        let completeness = topics.completeness().unwrap();
        assert_eq!(
            (completeness.as_of, completeness.missing.len()),
            (Some(at(20)), 1)
        );
        // It is missing until it was read to the end that a survey has found since.
        apply(&mut topics, &with(40, None, 5), 4);
        let not_read = |completeness: Completeness| {
            let key = (refused.clone(), Some(0));
            completeness.missing.get(&key) == Some(&Reason::NotRead)
        };
        assert!(not_read(topics.completeness().unwrap()));
        topics.reached_end(&refused, 0, 5);
        assert_eq!(topics.completeness().unwrap().missing.len(), 0);
    }

    #[test]
    fn undescribed_ledger_leaves_states_unknown() {
        let mut topics = Topics::default();
        let mut ledger = found(ledger::TOPIC, &[]);
        ledger.refusal = Some("denied".to_owned());
        apply(&mut topics, &survey_of(vec![ledger]), 1);
        assert!(!topics.completeness().unwrap().are_states_known());
        // Without a ledger, nothing was done with any dead letter.
        let mut topics = Topics::default();
        apply(&mut topics, &survey(&[]), 1);
        assert!(topics.completeness().unwrap().are_states_known());
    }

    #[test]
    fn topic_missed_twice_is_forgotten() {
        let mut topics = indexed(0, 7);
        apply(&mut topics, &survey(&[extent(0, 9)]), 2);
        assert_eq!(kinds(&apply(&mut topics, &no_topics(), 3)), [""; 0]);
        let actions = apply(&mut topics, &no_topics(), 4);
        assert_eq!(
            (kinds(&actions), actions.unfollow),
            (vec!["forget"], vec![name()])
        );
        let actions = apply(&mut topics, &survey(&[extent(0, 9)]), 5);
        assert_eq!(followed(&actions), [(0, None)]);
        // One that was deleted before the process started is missing until then, and does not hold back the others.
        let mut before = indexed(0, 7);
        assert_eq!(kinds(&apply(&mut before, &no_topics(), 1)), [""; 0]);
        assert_eq!(before.completeness().unwrap().as_of, Some(at(0)));
        assert_eq!(missing(&mut before), [(Some(0), Reason::NoLeader)]);
        assert_eq!(kinds(&apply(&mut before, &no_topics(), 2)), ["forget"]);
        assert_eq!(missing(&mut before), []);
    }

    #[test]
    fn ledger_missed_twice_is_forgotten() {
        let mut topics = Topics::new(Indexed {
            positions: vec![(ledger::TOPIC.into(), 0, 7)],
            ids: Vec::new(),
        });
        assert_eq!(kinds(&apply(&mut topics, &no_topics(), 1)), [""; 0]);
        assert!(!topics.completeness().unwrap().are_states_known());
        assert_eq!(kinds(&apply(&mut topics, &no_topics(), 2)), ["forget ledger"]);
        assert!(topics.completeness().unwrap().are_states_known());
    }

    #[test]
    fn recreated_topic_is_reread_once() {
        let mut topics = indexed(0, 7);
        let mut recreated = survey(&[extent(0, 9)]);
        apply(&mut topics, &recreated, 1);
        recreated.recreated.push(name());
        let actions = apply(&mut topics, &recreated, 2);
        assert_eq!(
            (kinds(&actions), followed(&actions)),
            (vec!["forget"], vec![(0, None)])
        );
        // This survey read the index before the writer had applied the removal.
        recreated.as_of = 1;
        let actions = apply(&mut topics, &recreated, 3);
        assert_eq!((kinds(&actions), followed(&actions)), (vec![], vec![]));
        recreated.as_of = 2;
        assert_eq!(kinds(&apply(&mut topics, &recreated, 4)), ["forget"]);
    }

    #[test]
    fn another_id_reveals_recreated_topic() {
        for topic in [&*name(), ledger::TOPIC] {
            let [first, second] = [1, 2].map(TopicId::from_bits);
            let mut topics = Topics::new(Indexed {
                positions: vec![(topic.into(), 0, 7)],
                ids: vec![(topic.into(), first)],
            });
            // The new topic has as many records as the old one.
            let with = |id| {
                let mut found = found(topic, &[extent(0, 7)]);
                found.id = id;
                survey_of(vec![found])
            };
            assert_eq!(kinds(&apply(&mut topics, &with(Some(first)), 1)), [""; 0]);
            assert_eq!(kinds(&apply(&mut topics, &with(None), 2)), [""; 0]);
            let actions = apply(&mut topics, &with(Some(second)), 3);
            let forget = if topic == ledger::TOPIC {
                "forget ledger"
            } else {
                "forget"
            };
            assert_eq!(
                (kinds(&actions), followed(&actions)),
                (vec![forget, "identify"], vec![(0, None)])
            );
            assert_eq!(kinds(&apply(&mut topics, &with(Some(second)), 4)), [""; 0]);
        }
    }

    #[test]
    fn lagging_broker_does_not_recreate_topic() {
        let id = TopicId::from_bits(1);
        let mut topics = Topics::new(Indexed {
            positions: vec![(name(), 0, 7)],
            ids: vec![(name(), id)],
        });
        let mut found = found(&name(), &[extent(0, 6)]);
        found.id = Some(id);
        let current = survey_of(vec![found]);
        let lagging = Survey {
            recreated: vec![name()],
            ..current.clone()
        };
        let mut is_forgotten =
            |survey: &Survey, batch| kinds(&apply(&mut topics, survey, batch)).contains(&"forget");
        for batch in 1..u64::from(SURVEYS_UNTIL_TRUNCATED) {
            assert!(!is_forgotten(&lagging, batch), "{batch}");
        }
        assert!(!is_forgotten(&current, 5));
        // A partition that has lost records for good is read again.
        let surveys = 10..20;
        let first = surveys.clone().find(|batch| is_forgotten(&lagging, *batch));
        assert_eq!(
            first,
            Some(surveys.start + u64::from(SURVEYS_UNTIL_TRUNCATED) - 1)
        );
    }

    #[test]
    fn recreated_topic_loses_surplus_partitions() {
        let mut topics = Topics::new(Indexed::default());
        let current = |partitions: &[Option<Extent>]| Survey {
            as_of: 2,
            ..survey(partitions)
        };
        apply(&mut topics, &survey(&[extent(0, 1), extent(0, 0)]), 1);
        topics.recreated(&name(), None, 2);
        apply(&mut topics, &current(&[extent(0, 1)]), 3);
        topics.arrived(&name(), 0, 0);
        topics.reached_end(&name(), 0, 1);
        apply(&mut topics, &current(&[extent(0, 1)]), 4);
        let missing = topics.completeness().unwrap().missing;
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn backward_offsets_reveal_recreated_topic() {
        let mut topics = Topics::default();
        apply(&mut topics, &survey(&[extent(0, 9), extent(0, 9), None]), 1);
        assert_eq!(topics.arrived(&name(), 0, 5), Arrival::Next);
        // Retention and transaction markers leave gaps.
        assert_eq!(topics.arrived(&name(), 0, 8), Arrival::Next);
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Backwards);
        let actions = topics.recreated(&name(), None, 2);
        assert_eq!(
            (kinds(&actions), followed(&actions)),
            (vec!["forget"], vec![(0, None), (1, None)])
        );
        let not_read = |partition| (Some(partition), Reason::NotRead);
        assert_eq!(missing(&mut topics), [not_read(0), not_read(1)]);
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Next);
        assert_eq!(topics.arrived(&"other".into(), 0, 0), Arrival::Stale);
    }

    #[test]
    fn batch_with_other_id_begins_again() {
        let [first, second] = [1, 2].map(TopicId::from_bits);
        let mut topics = Topics::new(Indexed {
            positions: vec![(name(), 0, 7)],
            ids: vec![(name(), first)],
        });
        let with = |id, as_of| {
            let mut found = found(&name(), &[extent(5, 9)]);
            found.id = Some(id);
            Survey {
                as_of,
                ..survey_of(vec![found])
            }
        };
        apply(&mut topics, &with(first, 0), 1);
        let ids = |id| BTreeMap::from([(name().to_string(), id), ("other".to_owned(), second)]);
        assert!(topics.has_id(&name()) && !topics.has_id("other"));
        assert_eq!(topics.with_other_id(&ids(first)), []);
        assert_eq!(topics.with_other_id(&BTreeMap::new()), []);
        assert_eq!(topics.with_other_id(&ids(second)), [name()]);
        let actions = topics.recreated(&name(), Some(second), 2);
        assert_eq!(
            (kinds(&actions), followed(&actions)),
            (vec!["forget", "identify"], vec![(0, None)])
        );
        assert_eq!(topics.with_other_id(&ids(second)), []);
        // A survey that began before says nothing about the new topic.
        let actions = apply(&mut topics, &with(first, 1), 3);
        assert_eq!((kinds(&actions), followed(&actions)), (vec![], vec![]));
        assert!(!topics.is_removed(&name(), 0, 4));
        assert_eq!(topics.arrived(&name(), 0, 0), Arrival::Next);
    }

    #[test]
    fn a_new_low_watermark_trims_once() {
        let mut topics = Topics::default();
        assert_eq!(kinds(&apply(&mut topics, &survey(&[extent(4, 9)]), 1)), ["trim"]);
        assert_eq!(kinds(&apply(&mut topics, &survey(&[extent(4, 9)]), 2)), [""; 0]);
        assert_eq!(kinds(&apply(&mut topics, &survey(&[extent(5, 9)]), 3)), ["trim"]);
        let removed = [3, 4, 5].map(|offset| topics.is_removed("t-dlq", 0, offset));
        assert_eq!(removed, [true, true, false]);
        assert!(!topics.is_removed("t-dlq", 1, 0));
    }

    #[test]
    fn the_ledger_is_not_trimmed() {
        let mut topics = Topics::default();
        let mut survey = survey(&[extent(4, 9)]);
        survey.topics[0].name = ledger::TOPIC.into();
        assert_eq!(kinds(&apply(&mut topics, &survey, 1)), [""; 0]);
    }

    #[test]
    fn transaction_markers_are_no_lag() {
        let mut topics = Topics::default();
        let surveyed = survey(&[extent(0, 10)]);
        apply(&mut topics, &surveyed, 1);
        assert_eq!(topics.lag(&surveyed.topics[0]), 10);
        topics.arrived(&name(), 0, 8);
        assert_eq!(topics.lag(&surveyed.topics[0]), 1);
        topics.reached_end(&name(), 0, 10);
        assert_eq!(topics.lag(&surveyed.topics[0]), 0);
        let more = survey(&[extent(0, 12)]);
        let stalled = (20..30).position(|number| apply(&mut topics, &more, number).recreate_consumer);
        assert!(stalled.is_some());
        assert_eq!(topics.lag(&more.topics[0]), 2);
    }
}
