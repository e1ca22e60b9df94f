//! What the topic of group states contains.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use redeliver_core::failure::bounded_text;
use redeliver_core::{Record, Timestamp};
use redeliver_service::followed::Contents;

use super::state::{Decision, GroupState};
use super::value::{InvalidValue, Value};
use crate::fingerprint::GroupId;

/// The beginning of the keys.
const KEY: &str = "group/";
/// Longer keys of other kinds stand for each other, so that the memory is bounded.
const MAX_KEY: usize = 300;

/// The values of the topic. The newest one of each key counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupStates {
    values: BTreeMap<GroupId, Result<Arc<Value>, InvalidValue>>,
    /// The keys of unknown kinds.
    unknown: BTreeSet<String>,
}

/// Why a value is not, or not completely, shown as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Its key is of an unknown kind.
    Key,
    /// It cannot be read. The group is open.
    Unreadable(InvalidValue),
    /// A newer version has written it, which may say more.
    Newer,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("is of an unknown kind, and ignored"),
            Self::Unreadable(invalid) => write!(f, "{invalid}, and the group is open until it can be read"),
            Self::Newer => {
                f.write_str("was written by a newer version, and shown as far as this one knows it")
            }
        }
    }
}

impl Problem {
    fn of(value: &Result<Arc<Value>, InvalidValue>) -> Option<Self> {
        match value {
            Ok(value) => value.is_newer.then_some(Self::Newer),
            Err(invalid) => Some(Self::Unreadable(*invalid)),
        }
    }
}

/// The key of a group.
#[must_use]
pub fn key(id: GroupId) -> String {
    format!("{KEY}{id}")
}

impl GroupStates {
    /// The value of a group; `None` also if it cannot be read, see [`GroupStates::problem`].
    #[must_use]
    pub fn get(&self, id: GroupId) -> Option<&Arc<Value>> {
        self.values.get(&id)?.as_ref().ok()
    }

    /// What somebody has decided about a group.
    #[must_use]
    pub fn decision(&self, id: GroupId) -> Option<&Decision> {
        self.get(id)?.decision.as_ref()
    }

    /// Whether a group is open, which does not depend on its dead letters.
    #[must_use]
    pub fn is_open(&self, id: GroupId, now: Timestamp) -> bool {
        let decision = self.decision(id);
        decision.is_none_or(|decision| decision.state(None, now) == GroupState::Open)
    }

    /// All values that can be read.
    pub fn values(&self) -> impl Iterator<Item = (GroupId, &Arc<Value>)> {
        self.values
            .iter()
            .filter_map(|(id, value)| Some((*id, value.as_ref().ok()?)))
    }

    /// The problem of a group, if there is one.
    #[must_use]
    pub fn problem(&self, id: GroupId) -> Option<Problem> {
        self.values.get(&id).and_then(Problem::of)
    }
}

impl Contents for GroupStates {
    type Problem = Problem;

    const TOPIC: &'static str = "topic of group states";
    const NAME: &'static str = "dlq_group_states";
    // Like the ledger. Nobody has decided anything then.
    const IS_OPTIONAL: bool = true;

    fn apply(&mut self, record: &Record) {
        let key = record.key.as_deref().unwrap_or_default();
        let id = std::str::from_utf8(key)
            .ok()
            .and_then(|key| key.strip_prefix(KEY));
        let id: Option<GroupId> = id.and_then(|id| id.parse().ok());
        match (id, record.value.as_ref()) {
            (Some(id), Some(value)) => drop(self.values.insert(id, Value::decode(value).map(Arc::new))),
            (Some(id), None) => drop(self.values.remove(&id)),
            (None, value) => {
                let key = bounded_text(&String::from_utf8_lossy(key), MAX_KEY);
                if value.is_some() {
                    self.unknown.insert(key);
                } else {
                    self.unknown.remove(&key);
                }
            }
        }
    }

    fn count(&self) -> usize {
        self.values().count()
    }

    fn problems(&self) -> BTreeMap<String, Problem> {
        let values = self.values.iter();
        let values = values.filter_map(|(id, value)| Some((key(*id), Problem::of(value)?)));
        let unknown = self.unknown.iter().map(|key| (key.clone(), Problem::Key));
        values.chain(unknown).collect()
    }

    fn is_unreadable(problem: &Problem) -> bool {
        matches!(problem, Problem::Unreadable(_))
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        // A value that has said something for long is removed one by one. All at once means that the topic was deleted.
        let gone = before.values().filter(|(id, value)| {
            let is_older = |now: &Arc<Value>| now.revision < value.revision;
            !value.says_nothing() && self.get(*id).map_or(!self.values.contains_key(id), is_older)
        });
        let gone = gone.count();
        if gone > 0 {
            tracing::warn!(
                topic,
                groups = gone,
                "states and notes of groups are gone or older than before"
            );
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Position};

    use super::super::state::Decided;
    use super::*;

    pub(crate) fn record(key: &str, value: Option<Bytes>) -> Record {
        Record {
            position: Position {
                topic: super::super::TOPIC.into(),
                partition: 0,
                offset: 0,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    pub(crate) fn decided(decided: Decided, time: i64, revision: u64) -> Value {
        Value {
            revision,
            decision: Some(Decision {
                decided,
                time: Timestamp::from_millis(time),
                resolved_until: None,
                by: "ann".to_owned(),
                why: "known".to_owned(),
            }),
            ..Value::default()
        }
    }

    fn broken() -> Option<Bytes> {
        Some(Bytes::from_static(b"\xff"))
    }

    const ID: GroupId = GroupId::from_number(0x1f);
    const NOW: Timestamp = Timestamp::from_millis(50);

    #[test]
    fn the_newest_value_of_a_group_counts_and_no_value_is_as_none() {
        let mut states = GroupStates::default();
        for revision in [1, 2] {
            let value = decided(Decided::Muted(None), 1, revision);
            states.apply(&record("group/000000000000001f", Some(value.encode())));
            assert_eq!(states.get(ID).unwrap().revision, revision);
        }
        assert!(!states.is_open(ID, NOW) && states.count() == 1);
        assert_eq!(key(ID), "group/000000000000001f");
        states.apply(&record(&key(ID), None));
        assert_eq!(states, GroupStates::default());
    }

    #[test]
    fn a_group_whose_value_cannot_be_read_is_open_and_other_keys_are_ignored() {
        let mut states = GroupStates::default();
        let muted = decided(Decided::Muted(None), 1, 1).encode();
        states.apply(&record(&key(ID), Some(muted.clone())));
        states.apply(&record(&key(ID), broken()));
        states.apply(&record("group/1F", broken()));
        states.apply(&record("planet/mars", broken()));
        let malformed = Problem::Unreadable(InvalidValue::Malformed);
        assert_eq!(states.problem(ID), Some(malformed));
        assert!(states.is_open(ID, NOW) && states.get(ID).is_none());
        // Keys of other kinds are expected while a newer version is being introduced.
        let of = |key: &str| GroupStates::is_unreadable(&states.problems()[key]);
        assert!(of(&key(ID)) && !of("planet/mars"));
        let problems: Vec<_> = states.problems().into_iter().collect();
        let expected = [
            (key(ID), malformed),
            ("group/1F".to_owned(), Problem::Key),
            ("planet/mars".to_owned(), Problem::Key),
        ];
        assert_eq!(problems, expected);
        // A value that can be read ends it.
        states.apply(&record(&key(ID), Some(muted)));
        for key in ["group/1F", "planet/mars"] {
            states.apply(&record(key, None));
        }
        assert!(states.problems().is_empty() && !states.is_open(ID, NOW));
    }

    #[test]
    fn only_a_group_about_which_nobody_has_decided_anything_that_still_applies_is_open() {
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
            states.apply(&record(&key(ID), Some(value.encode())));
            assert_eq!(states.is_open(ID, NOW), expected, "{value:?}");
        }
    }
}
