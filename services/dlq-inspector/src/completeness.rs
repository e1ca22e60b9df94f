//! Whether an answer contains everything that it should: only then is it certain that a dead letter does not exist, and only then is a
//! list or a count complete.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;

use crate::ledger;

/// An answer is complete only if the index was complete this long ago or later.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(30);
/// Maximum number of missing partitions in an answer.
const LISTED: usize = 20;

/// Why a partition is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It has no leader, or its leader does not answer.
    NoLeader,
    /// Kafka does not let it be read, with this error.
    Refused(Arc<str>),
    /// It was not read to its end yet.
    NotRead,
    /// It was deleted, or Kafka has removed records, and the index may still contain them.
    NotRemoved,
}

/// A topic, and one of its partitions; without a partition, all of the topic.
pub(crate) type Place = (Arc<str>, Option<i32>);

/// What the index contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Completeness {
    /// The index contains everything that Kafka contained at this time, except for what is missing. `None` until it has caught up.
    pub(crate) as_of: Option<Timestamp>,
    pub(crate) missing: BTreeMap<Place, Reason>,
    /// How often the ledger has become missing. States that were read while it was missing look known if it is there before and
    /// after, so the numbers before and after must be equal.
    pub(crate) ledger_losses: u64,
    /// Whether the ledger was missing between the times that an answer compares.
    pub(crate) has_lost_ledger: bool,
}

impl Completeness {
    /// Whether the states of dead letters are known: the ledger is not missing.
    pub(crate) fn are_states_known(&self) -> bool {
        !self.has_lost_ledger && !self.missing.keys().any(|(topic, _)| &**topic == ledger::TOPIC)
    }

    /// Whether a dead letter of this partition that is not in the index does not exist.
    pub(crate) fn covers(&self, topic: &str, partition: i32, now: Timestamp) -> bool {
        let is_missing = |partition| self.missing.contains_key(&(Arc::from(topic), partition));
        self.is_recent(now) && !is_missing(Some(partition)) && !is_missing(None)
    }

    /// Whether the index contains everything that Kafka had in these topics at a time.
    ///
    /// # Errors
    /// A topic of which a partition is missing; `None` if the index is older.
    pub(crate) fn check(&self, topics: &BTreeSet<String>, at: Timestamp) -> Result<(), Option<Arc<str>>> {
        let mut missing = self.missing.keys().map(|(topic, _)| topic);
        if let Some(topic) = missing.find(|topic| topics.contains(&***topic)) {
            return Err(Some(topic.clone()));
        }
        self.as_of.filter(|as_of| *as_of >= at).map(|_| ()).ok_or(None)
    }

    /// Whether the index may have only a part of this topic, because it is being read or removed. What cannot be read is not.
    pub(crate) fn is_being_read(&self, topic: &str) -> bool {
        let mut missing = self.missing.iter().filter(|((name, _), _)| &**name == topic);
        missing.any(|(_, reason)| matches!(reason, Reason::NotRead | Reason::NotRemoved))
    }

    fn is_recent(&self, now: Timestamp) -> bool {
        self.as_of.is_some_and(|as_of| now.since(as_of) <= MAX_AGE)
    }

    /// The number of missing partitions by topic.
    pub(crate) fn missing_by_topic(&self) -> BTreeMap<&str, u64> {
        let mut counts = BTreeMap::new();
        for (topic, _) in self.missing.keys() {
            *counts.entry(&**topic).or_default() += 1;
        }
        counts
    }

    /// What an answer contains that was read from the index between the times of `self` and `later`.
    pub(crate) fn and(&self, later: &Self) -> Self {
        let mut missing = self.missing.clone();
        missing.extend(later.missing.clone());
        Self {
            // A rebuild may have begun in between.
            as_of: later.as_of.and(self.as_of),
            missing,
            ledger_losses: later.ledger_losses,
            has_lost_ledger: self.has_lost_ledger || self.ledger_losses != later.ledger_losses,
        }
    }

    /// What it says about the topics for which a condition holds, and about the ledger.
    pub(crate) fn of_topics(&self, includes: impl Fn(&str) -> bool) -> Self {
        let mut limited = self.clone();
        limited
            .missing
            .retain(|(topic, _), _| &**topic == ledger::TOPIC || includes(topic));
        limited
    }

    pub(crate) fn to_message(&self, now: Timestamp) -> v1::Completeness {
        let listed = self.missing.iter().take(LISTED);
        v1::Completeness {
            complete: self.missing.is_empty() && self.is_recent(now),
            as_of: self.as_of.map(to_timestamp),
            missing: listed.map(|(place, reason)| missing(place, reason)).collect(),
            missing_count: u32::try_from(self.missing.len()).unwrap_or(u32::MAX),
            states_known: self.are_states_known(),
            group_states_problem: String::new(),
        }
    }
}

fn missing((topic, partition): &Place, reason: &Reason) -> v1::MissingPartition {
    let (reason, error) = match reason {
        Reason::NoLeader => (v1::MissingReason::NoLeader, ""),
        Reason::Refused(error) => (v1::MissingReason::Refused, &**error),
        Reason::NotRead => (v1::MissingReason::NotRead, ""),
        Reason::NotRemoved => (v1::MissingReason::NotRemoved, ""),
    };
    v1::MissingPartition {
        topic: topic.to_string(),
        partition: *partition,
        reason: reason.into(),
        error: error.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn with(places: &[(&str, Option<i32>)]) -> Completeness {
        let missing = places
            .iter()
            .map(|(topic, partition)| ((Arc::from(*topic), *partition), Reason::NoLeader));
        Completeness {
            as_of: Some(at(1_000_000)),
            missing: missing.collect(),
            ..Completeness::default()
        }
    }

    #[test]
    fn lost_ledger_makes_states_unknown() {
        let before = with(&[]);
        let after = Completeness {
            ledger_losses: 1,
            ..with(&[])
        };
        assert!(after.are_states_known());
        let both = before.and(&after);
        assert!(!both.are_states_known() && !both.to_message(at(1_000_000)).states_known);
        // It stays so for what is read later.
        assert!(!both.and(&after).are_states_known());
        assert!(after.and(&after).are_states_known());
    }

    #[test]
    fn recent_index_without_gaps_is_complete() {
        let recent = at(1_030_000);
        assert!(with(&[]).to_message(recent).complete);
        // The clock of this machine may go back.
        assert!(with(&[]).to_message(at(0)).complete);
        assert!(!with(&[]).to_message(at(1_030_001)).complete);
        assert!(!Completeness::default().to_message(recent).complete);
        let partial = with(&[("a-dlq", Some(1))]).to_message(recent);
        assert!(!partial.complete && partial.states_known);
        assert_eq!(partial.missing[0].reason(), v1::MissingReason::NoLeader);
        assert!(!with(&[(ledger::TOPIC, None)]).to_message(recent).states_known);
    }

    #[test]
    fn list_of_missing_partitions_is_bounded() {
        let places: Vec<_> = (0..5_000).map(|partition| ("a-dlq", Some(partition))).collect();
        let message = with(&places).to_message(at(1_000_000));
        assert_eq!((message.missing.len(), message.missing_count), (20, 5_000));
    }

    #[test]
    fn missing_partitions_of_others_are_hidden() {
        let all = with(&[("a-dlq", Some(1)), ("b-dlq", None), (ledger::TOPIC, None)]);
        let some = all.of_topics(|topic| topic == "a-dlq").to_message(at(1_000_000));
        let topics: Vec<&str> = some
            .missing
            .iter()
            .map(|missing| missing.topic.as_str())
            .collect();
        assert_eq!((topics, some.missing_count), (vec!["a-dlq", ledger::TOPIC], 2));
        let none = with(&[("b-dlq", None)])
            .of_topics(|_| false)
            .to_message(at(1_000_000));
        assert!(none.complete && none.missing_count == 0);
    }

    #[test]
    fn missing_partition_is_not_covered() {
        let some = with(&[("a-dlq", Some(1)), ("b-dlq", None)]);
        let now = at(1_000_000);
        assert!(some.covers("a-dlq", 0, now) && some.covers("c-dlq", 0, now));
        assert!(!some.covers("a-dlq", 1, now) && !some.covers("b-dlq", 7, now));
        assert!(!some.covers("a-dlq", 0, at(2_000_000)));
    }

    #[test]
    fn topics_are_known_until_last_survey() {
        let topics = |topic: &str| BTreeSet::from([topic.to_owned(), "b-dlq".to_owned()]);
        let some = with(&[("a-dlq", Some(1))]);
        assert_eq!(some.check(&topics("c-dlq"), at(1_000_000)), Ok(()));
        assert_eq!(some.check(&topics("c-dlq"), at(1_000_001)), Err(None));
        assert_eq!(some.check(&topics("a-dlq"), at(0)), Err(Some(Arc::from("a-dlq"))));
        assert_eq!(Completeness::default().check(&topics("c-dlq"), at(0)), Err(None));
    }

    #[test]
    fn missing_before_or_after_is_missing() {
        let later = Completeness {
            as_of: Some(at(1_005_000)),
            ..with(&[("b-dlq", Some(0))])
        };
        let both = with(&[("a-dlq", Some(0))]).and(&later);
        assert_eq!(both.as_of, Some(at(1_000_000)));
        assert_eq!(with(&[]).and(&Completeness::default()).as_of, None);
        assert_eq!(
            both.missing_by_topic(),
            BTreeMap::from([("a-dlq", 1), ("b-dlq", 1)])
        );
    }
}
