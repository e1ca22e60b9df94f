//! Changes of the states and notes of groups.

use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_service::audit::{Action, AuditEntry, AuditLog};
use redeliver_service::identity::CallerName;
use redeliver_store::{ChangeId, Decision as StoreDecision, Document as _};

use super::contents::GroupStates;
use super::state::{Decided, Decision, GroupState};
use super::value::{Note, Value};
use crate::fingerprint::GroupId;

/// The maximum number of groups with a value: each inspector holds all of them in memory.
pub const MAX_GROUPS: usize = 10_000;
/// A value that says nothing is removed when it has not changed for this long, or earlier if there is no room.
pub const KEPT: Duration = Duration::from_secs(90 * 86_400);
/// The maximum number of values that one change removes.
const MAX_REMOVED: usize = 100;

/// A request to change a group.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// The group.
    pub group: GroupId,
    /// How to change it.
    pub change: Change,
    /// Who wants it.
    pub by: CallerName,
    /// Why, unless it is a note.
    pub reason: String,
    /// The revision that the value must have; 0: there must be none.
    pub expected_revision: Option<u64>,
    /// When it was requested. A dead letter that is written between the request and the commit is later than the resolution.
    pub at: Timestamp,
    /// The time of the last dead letter of the group.
    pub last: Option<Timestamp>,
    /// Dead letters up to this time are indexed.
    pub as_of: Option<Timestamp>,
    /// Where the change is recorded, in the same transaction.
    pub audit: AuditLog,
}

/// How to change a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Sets its state.
    Decide(Decided),
    /// Sets its note; empty: there is none.
    Annotate(String),
}

impl Change {
    /// Whether it only takes something back.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        match self {
            Self::Decide(decided) => *decided == Decided::Open,
            Self::Annotate(note) => note.is_empty(),
        }
    }
}

/// Why a change is refused: [`MAX_GROUPS`] have a value. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("would be one of more than {MAX_GROUPS} groups with a state or a note")]
pub struct TooManyGroups;

/// Why a change has failed.
pub type ChangeError = redeliver_store::ChangeError<Value, TooManyGroups>;

impl redeliver_store::Change for ChangeRequest {
    type State = GroupStates;
    type Refused = TooManyGroups;

    fn key(&self, _id: ChangeId) -> GroupId {
        self.group
    }

    fn expected_revision(&self) -> Option<u64> {
        self.expected_revision
    }

    fn decide(
        &self,
        states: &GroupStates,
        id: ChangeId,
    ) -> Result<StoreDecision<GroupStates>, TooManyGroups> {
        let current = states.table.get(&self.group).map(|value| &**value);
        let Some(value) = next(current, self, id) else {
            return Ok(StoreDecision::Unchanged(self.group));
        };
        let is_full = current.is_none() && states.table.count() >= MAX_GROUPS;
        let removed = forgotten(states, self, is_full);
        if current.is_none() && states.table.count() - removed.len() >= MAX_GROUPS {
            return Err(TooManyGroups);
        }
        let mut records = vec![(Value::record_key(&self.group), Some(value.encode()))];
        records.extend(removed.iter().map(|id| (Value::record_key(id), None)));
        Ok(StoreDecision::Write {
            records,
            entry: self.audit.record(entry(self, &value, id), self.at),
            document: value,
        })
    }

    fn log(&self, value: &Value) {
        let (group, by, reason) = (self.group, &self.by, &self.reason);
        let decided = match self.change {
            Change::Decide(decided) => Some(decided),
            // A note may be long.
            Change::Annotate(_) => None,
        };
        tracing::info!(%group, revision = value.revision, %by, reason, ?decided, "group changed");
    }
}

/// The entry of the audit log about a change. Notes may be long, and can be read where they are.
fn entry(request: &ChangeRequest, value: &Value, id: ChangeId) -> AuditEntry {
    let (action, what) = match request.change {
        Change::Decide(Decided::Resolved) => (Action::ResolveGroup, "resolved".to_owned()),
        Change::Decide(Decided::Muted(None)) => (Action::MuteGroup, "muted".to_owned()),
        Change::Decide(Decided::Muted(Some(until))) => (Action::MuteGroup, format!("muted until {until}")),
        Change::Decide(Decided::Open) => (Action::ReopenGroup, "open".to_owned()),
        Change::Annotate(_) => (Action::AnnotateGroup, "another note".to_owned()),
    };
    AuditEntry {
        target: request.group.to_string(),
        reason: request.reason.clone(),
        details: format!("revision {}: {what}", value.revision),
        id: id.0,
        ..AuditEntry::new(request.by.clone(), action)
    }
}

/// The value that follows from a change; `None` if the change has no effect.
fn next(current: Option<&Value>, request: &ChangeRequest, id: ChangeId) -> Option<Value> {
    let decision = current.and_then(|value| value.decision.as_ref());
    let note = current.and_then(|value| value.note.as_ref());
    let (mut decision_after, mut note_after) = (decision.cloned(), note.cloned());
    match &request.change {
        Change::Decide(decided) => {
            if has_no_effect(*decided, decision, request) {
                return None;
            }
            decision_after = Some(Decision {
                decided: *decided,
                time: request.at,
                resolved_until: (*decided == Decided::Resolved).then(|| resolved_until(request)),
                by: request.by.to_string(),
                reason: request.reason.clone(),
            });
        }
        Change::Annotate(text) => {
            if note.map_or("", |note| &note.text) == text {
                return None;
            }
            note_after = (!text.is_empty()).then(|| Note {
                text: text.clone(),
                time: Some(request.at),
                by: request.by.to_string(),
            });
        }
    }
    Some(Value {
        revision: current.map_or(0, |value| value.revision) + 1,
        change_id: id.bytes(),
        decision: decision_after,
        note: note_after,
        is_newer: false,
    })
}

/// The time up to which dead letters are resolved: that of the request. A dead letter that was not indexed then shows that the reason is
/// still there. One whose time is in the future was there.
fn resolved_until(request: &ChangeRequest) -> Timestamp {
    let known = request.as_of.map_or(request.at, |as_of| as_of.min(request.at));
    request.last.map_or(known, |last| last.max(known))
}

/// Whether a group is in the wanted state already, for the same reason or without a new one.
fn has_no_effect(decided: Decided, current: Option<&Decision>, request: &ChangeRequest) -> bool {
    let Some(current) = current else {
        // Nothing was decided that has a reason.
        return decided == Decided::Open;
    };
    let state = current.state(request.last, request.at);
    let is_same = match decided {
        Decided::Open => current.decided == Decided::Open,
        Decided::Resolved => state == GroupState::Resolved,
        Decided::Muted(_) => state == GroupState::Muted && current.decided == decided,
    };
    is_same && (request.reason.is_empty() || current.reason == request.reason)
}

/// The groups whose values say nothing and have not changed for long, or, if there is no room for another one, whose values say nothing; those
/// that have not changed for longest, up to [`MAX_REMOVED`].
/// Whether a group has dead letters does not matter: those of other topics may be known to another inspector only.
fn forgotten(states: &GroupStates, request: &ChangeRequest, is_full: bool) -> Vec<GroupId> {
    let is_old = |value: &Value| value.last_time().is_none_or(|time| request.at.since(time) > KEPT);
    let others = states.table.documents().filter(|(id, _)| **id != request.group);
    let forgotten =
        others.filter(|(_, value)| !value.is_newer && value.says_nothing() && (is_full || is_old(value)));
    let mut forgotten: Vec<_> = forgotten.map(|(id, value)| (value.last_time(), *id)).collect();
    forgotten.sort_unstable();
    forgotten
        .into_iter()
        .take(MAX_REMOVED)
        .map(|(_, id)| id)
        .collect()
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::Config;

    use super::super::contents::tests::decided;
    use super::*;

    const ID: GroupId = GroupId::from_number(7);

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn request(change: Change) -> ChangeRequest {
        ChangeRequest {
            group: ID,
            change,
            by: CallerName::recorded("bob"),
            reason: String::new(),
            expected_revision: None,
            at: at(100),
            last: Some(at(50)),
            as_of: Some(at(1_000)),
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
        }
    }

    /// The written keys, each with whether it has a value.
    type Written = Vec<(String, bool)>;

    /// The value that applies, and what is written.
    fn decide(
        values: &[(GroupId, Value)],
        request: &ChangeRequest,
    ) -> Result<(Option<Value>, Written), TooManyGroups> {
        let mut states = GroupStates::default();
        for (id, value) in values {
            states.table.insert(*id, value.clone());
        }
        match redeliver_store::Change::decide(request, &states, ChangeId(7))? {
            StoreDecision::Unchanged(id) => {
                Ok((states.table.get(&id).map(|value| Value::clone(value)), Vec::new()))
            }
            StoreDecision::Write {
                document, records, ..
            } => {
                let keys = records.into_iter().map(|(key, value)| (key, value.is_some()));
                Ok((Some(document), keys.collect()))
            }
        }
    }

    fn key(id: GroupId) -> String {
        Value::record_key(&id)
    }

    const RESOLVE: Change = Change::Decide(Decided::Resolved);
    const REOPEN: Change = Change::Decide(Decided::Open);

    #[test]
    fn change_keeps_the_rest() {
        let noted = Value {
            note: Some(Note {
                text: "runbook".to_owned(),
                time: Some(at(1)),
                by: "ann".to_owned(),
            }),
            ..decided(Decided::Muted(None), 60, 4)
        };
        let before = [(ID, noted.clone())];
        let (value, outputs) = decide(&before, &request(RESOLVE)).unwrap();
        let value = value.unwrap();
        assert_eq!((value.revision, outputs.len(), &value.note), (5, 1, &noted.note));
        let decision = value.decision.unwrap();
        assert_eq!(
            (decision.decided, decision.time, &*decision.by),
            (Decided::Resolved, at(100), "bob")
        );
        let (value, _) = decide(&before, &request(Change::Annotate(String::new()))).unwrap();
        let value = value.unwrap();
        assert_eq!(
            (value.revision, &value.decision, &value.note),
            (5, &noted.decision, &None)
        );
        // The revision goes on, so that no later value has one that was used before.
        let (value, _) = decide(&before, &request(REOPEN)).unwrap();
        assert_eq!(value.unwrap().revision, 5);
    }

    #[test]
    fn change_without_effect_writes_nothing() {
        let muted = Decided::Muted(Some(at(200)));
        for (before, change) in [
            (Some(Decided::Resolved), RESOLVE),
            (Some(Decided::Open), REOPEN),
            (Some(muted), Change::Decide(muted)),
            (None, REOPEN),
            (None, Change::Annotate(String::new())),
        ] {
            let before: Vec<_> = before
                .into_iter()
                .map(|before| (ID, decided(before, 60, 4)))
                .collect();
            // With its reason, or without one.
            for reason in ["known", ""] {
                let request = ChangeRequest {
                    reason: reason.to_owned(),
                    ..request(change.clone())
                };
                let (value, outputs) = decide(&before, &request).unwrap();
                assert_eq!(
                    value,
                    before.first().map(|(_, value)| value.clone()),
                    "{change:?}"
                );
                assert_eq!(outputs, []);
            }
            if !before.is_empty() {
                let request = ChangeRequest {
                    reason: "another reason".to_owned(),
                    ..request(change.clone())
                };
                assert_eq!(decide(&before, &request).unwrap().1.len(), 1, "{change:?}");
            }
        }
    }

    #[test]
    fn regressed_group_is_resolved_again() {
        let before = [(ID, decided(Decided::Resolved, 60, 4))];
        let regressed = ChangeRequest {
            last: Some(at(61)),
            ..request(RESOLVE)
        };
        let (value, _) = decide(&before, &regressed).unwrap();
        assert_eq!(value.unwrap().decision.unwrap().time, at(100));
        // A group that is not muted any more can be muted until the same time only if that is in the future, which the API requires.
        let before = [(ID, decided(Decided::Muted(Some(at(90))), 60, 4))];
        assert_eq!(decide(&before, &request(REOPEN)).unwrap().1.len(), 1);
    }

    #[test]
    fn old_empty_values_are_removed() {
        let kept = i64::try_from(KEPT.as_millis()).unwrap();
        let [open, resolved, muted, recent] = [1, 2, 3, 4].map(GroupId::from_number);
        let records = [
            (open, decided(Decided::Open, 0, 1)),
            (resolved, decided(Decided::Resolved, 0, 1)),
            (muted, decided(Decided::Muted(None), 0, 1)),
            (recent, decided(Decided::Open, 2, 1)),
        ];
        let removed = |at| {
            let request = ChangeRequest {
                at,
                ..request(RESOLVE)
            };
            let (_, outputs) = decide(&records, &request).unwrap();
            assert_eq!(outputs[0], (key(ID), true));
            outputs[1..].to_vec()
        };
        let removals = |ids: &[GroupId]| ids.iter().map(|id| (key(*id), false)).collect::<Vec<_>>();
        assert_eq!(removed(at(kept)), []);
        assert_eq!(removed(at(kept + 1)), removals(&[open]));
        assert_eq!(removed(at(kept + 3)), removals(&[open, recent]));
    }

    #[test]
    fn empty_values_make_room() {
        let count = i64::try_from(MAX_GROUPS).unwrap();
        let mut full: Vec<_> = (100..100 + count)
            .map(|number| (GroupId::from_number(number), decided(Decided::Resolved, 60, 1)))
            .collect();
        assert_eq!(decide(&full, &request(RESOLVE)), Err(TooManyGroups));
        let known = ChangeRequest {
            group: full[0].0,
            ..request(REOPEN)
        };
        assert_eq!(decide(&full, &known).unwrap().1.len(), 1);
        full[1].1 = decided(Decided::Open, 60, 2);
        let (_, written) = decide(&full, &request(RESOLVE)).unwrap();
        assert_eq!(written, [(key(ID), true), (key(full[1].0), false)]);
        // Those that have not changed for longest go first.
        let removed = i64::try_from(MAX_REMOVED).unwrap();
        for (index, time) in (0..2 * removed).rev().enumerate() {
            full[index].1 = decided(Decided::Open, time, 2);
        }
        let (_, written) = decide(&full, &request(RESOLVE)).unwrap();
        let mut expected: Vec<_> = full[MAX_REMOVED..2 * MAX_REMOVED].iter().collect();
        expected.reverse();
        let expected = expected.into_iter().map(|(id, _)| (key(*id), false));
        assert_eq!(written[1..], expected.collect::<Vec<_>>());
    }

    #[test]
    fn resolution_covers_known_dead_letters() {
        let state = |last, as_of, later| {
            let request = ChangeRequest {
                at: at(100),
                last,
                as_of,
                ..request(RESOLVE)
            };
            let value = decide(&[], &request).unwrap().0.unwrap();
            let value = Value::decode(&value.encode()).unwrap();
            value.decision.unwrap().state(Some(later), at(200))
        };
        // The clock of a producer is ahead.
        assert_eq!(
            state(Some(at(5_000)), Some(at(100)), at(5_000)),
            GroupState::Resolved
        );
        assert_eq!(
            state(Some(at(5_000)), Some(at(100)), at(5_001)),
            GroupState::Regressed
        );
        // The index lags behind.
        assert_eq!(state(Some(at(10)), Some(at(40)), at(40)), GroupState::Resolved);
        assert_eq!(state(Some(at(10)), Some(at(40)), at(41)), GroupState::Regressed);
        assert_eq!(state(Some(at(10)), None, at(100)), GroupState::Resolved);
    }
}
