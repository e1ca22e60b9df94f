//! What the topic of group states contains.

use redeliver_core::{Record, Timestamp};
use redeliver_store::{State, Table};

use super::state::{Decision, GroupState};
use super::value::Value;
use crate::fingerprint::GroupId;

/// The values of the topic, and what follows from them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupStates {
    /// The values, by group.
    pub table: Table<Value>,
}

/// Why a value is not, or not completely, shown as it was written.
pub type GroupProblem = redeliver_store::DocumentProblem<Value>;

impl GroupStates {
    /// The decision about a group.
    #[must_use]
    pub fn decision(&self, id: GroupId) -> Option<&Decision> {
        self.table.get(&id)?.decision.as_ref()
    }

    /// Whether a group is open, which does not depend on its dead letters.
    #[must_use]
    pub fn is_open(&self, id: GroupId, now: Timestamp) -> bool {
        let decision = self.decision(id);
        decision.is_none_or(|decision| decision.state(None, now) == GroupState::Open)
    }
}

impl State for GroupStates {
    type Document = Value;

    const TOPIC: &'static str = "topic of group states";
    const NAME: &'static str = "dlq_group_states";
    // Like the ledger: without it, there are no decisions.
    const IS_OPTIONAL: bool = true;

    fn table(&self) -> &Table<Value> {
        &self.table
    }

    fn apply(&mut self, record: &Record) {
        self.table.apply_record(record);
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        // A value that has said something for long is removed one by one. All at once means that the topic was deleted.
        let lost = self
            .table
            .lost(&before.table)
            .filter(|(_, value)| !value.says_nothing());
        let groups = lost.count();
        if groups > 0 {
            tracing::warn!(
                topic,
                groups,
                "group states and notes lost, or reset to older ones"
            );
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use bytes::Bytes;
    use redeliver_store::Document as _;
    use redeliver_testkit::record;

    use super::super::state::Decided;
    use super::*;

    pub(crate) fn decided(decided: Decided, time: i64, revision: u64) -> Value {
        Value {
            revision,
            decision: Some(Decision {
                decided,
                time: Timestamp::from_millis(time),
                resolved_until: None,
                by: "ann".to_owned(),
                reason: "known".to_owned(),
            }),
            ..Value::default()
        }
    }

    const ID: GroupId = GroupId::from_number(0x1f);
    const NOW: Timestamp = Timestamp::from_millis(50);

    #[test]
    fn group_with_unreadable_value_is_open() {
        let mut states = GroupStates::default();
        let muted = decided(Decided::Muted(None), 1, 1).encode();
        let broken = Bytes::from_static(b"\xff");
        for (value, is_open) in [(&muted, false), (&broken, true), (&muted, false)] {
            states.apply(&record("group/000000000000001f", Some(value.clone())));
            assert_eq!(states.is_open(ID, NOW), is_open);
            assert_eq!(states.table.problem(&ID).is_some(), is_open);
        }
        // Keys of other kinds.
        for key in ["group/1F", "planet/mars"] {
            states.apply(&record(key, Some(broken.clone())));
        }
        assert_eq!((states.table.count(), states.problems().len()), (1, 2));
        assert_eq!(Value::record_key(&ID), "group/000000000000001f");
    }

    #[test]
    fn group_without_applicable_decision_is_open() {
        let later = Timestamp::from_millis(60);
        for (value, expected) in [
            (decided(Decided::Open, 1, 1), true),
            (decided(Decided::Resolved, 1, 1), false),
            (decided(Decided::Muted(None), 1, 1), false),
            (decided(Decided::Muted(Some(later)), 1, 1), false),
            (decided(Decided::Muted(Some(NOW)), 1, 1), true),
            (Value::default(), true),
        ] {
            let mut states = GroupStates::default();
            states.table.insert(ID, value.clone());
            assert_eq!(states.is_open(ID, NOW), expected, "{value:?}");
        }
    }
}
