//! Changes of the states and notes of groups.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{Decide, ExclusiveError};
use redeliver_service::audit::{Action, AuditLog, Entry};
use redeliver_service::followed::{Contents as _, Followed, FollowedWriter, change_id};
use redeliver_service::identity::CallerName;

use super::contents::{GroupStates, Problem, key};
use super::state::{Decided, Decision, GroupState};
use super::value::{Note, Value};
use super::{TOPIC, TRANSACTIONAL_ID};
use crate::fingerprint::GroupId;

/// The maximum number of groups with a value: each inspector holds all of them in memory.
pub const MAX_GROUPS: usize = 10_000;
/// A value that says nothing is removed when it has not changed for this long, or earlier if there is no room.
pub const KEPT: Duration = Duration::from_secs(90 * 86_400);
/// The maximum number of values that one change removes.
const MAX_REMOVED: usize = 100;

/// A request to change a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeRequest {
    /// The group.
    pub group: GroupId,
    /// How to change it.
    pub change: Change,
    /// Who wants it.
    pub by: CallerName,
    /// Why, unless it is a note.
    pub why: String,
    /// The revision that the value must have; 0: there must be none.
    pub expected_revision: Option<u64>,
    /// When it was requested. A dead letter that is written between the request and the commit is later than the resolution.
    pub at: Timestamp,
    /// The time of the last dead letter of the group.
    pub last: Option<Timestamp>,
    /// Dead letters up to this time are indexed.
    pub as_of: Option<Timestamp>,
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

/// Why a change is refused. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedChange {
    /// The value has another revision than the expected one.
    #[error("has revision {0}")]
    Revised(u64),
    /// This version would lose something of the value.
    #[error("has a value that this version cannot change: it {0}")]
    Unknown(Problem),
    /// [`MAX_GROUPS`] have a value.
    #[error("would be one of more than {MAX_GROUPS} groups with a state or a note")]
    TooMany,
}

/// Why a change has failed.
pub type ChangeError = ExclusiveError<RefusedChange>;

/// Changes the topic that `states` follows. Cheap to clone.
#[derive(Clone)]
pub struct GroupWriter {
    writer: FollowedWriter<GroupStates>,
    audit: AuditLog,
    states: Followed<GroupStates>,
}

impl GroupWriter {
    /// A writer. Each change is recorded in the audit log, in the same transaction.
    #[must_use]
    pub fn new(kafka: &KafkaSettings, audit: AuditLog, states: Followed<GroupStates>) -> Self {
        Self {
            writer: FollowedWriter::new(kafka, TRANSACTIONAL_ID, TOPIC, &states),
            audit,
            states,
        }
    }

    /// Makes a change, and returns the value that follows from it; `None` if there is none. When this returns, the change is durable, and
    /// this process has read it. A change without an effect writes nothing.
    ///
    /// # Errors
    /// [`ChangeError`] says whether something may have been written.
    pub async fn change(&self, request: ChangeRequest) -> Result<Option<Value>, ChangeError> {
        let request = Arc::new(request);
        let ChangeRequest {
            group,
            change,
            by,
            why,
            ..
        } = &*request;
        let (pending, audit) = (request.clone(), self.audit.clone());
        let changing = self.writer.write(move |topic, id, states| PendingChange {
            request: pending.clone(),
            audit: audit.clone(),
            id,
            change_id: change_id(id),
            topic: topic.clone(),
            states,
            own: None,
        });
        let Changed { value, is_written } = changing.await?;
        if let Some(value) = &value {
            if is_written {
                let decided = match change {
                    Change::Decide(decided) => Some(decided),
                    // A note may be long.
                    Change::Annotate(_) => None,
                };
                tracing::info!(%group, revision = value.revision, %by, why, ?decided, "group changed");
            }
            let has_read = |states: &GroupStates| {
                let known = states.get(*group);
                known.is_some_and(|known| known.revision >= value.revision)
            };
            self.states.until_read(has_read).await;
        }
        Ok(value)
    }
}

/// What has changed.
#[derive(Debug, PartialEq)]
struct Changed {
    /// The value that applies.
    value: Option<Value>,
    /// Whether this change has written it.
    is_written: bool,
}

/// A change that is being decided.
struct PendingChange {
    request: Arc<ChangeRequest>,
    audit: AuditLog,
    id: u128,
    change_id: Bytes,
    topic: Arc<str>,
    states: GroupStates,
    /// What a previous attempt has written, whose outcome was unknown.
    own: Option<Value>,
}

impl Decide for PendingChange {
    type Decision = Changed;
    type Error = RefusedChange;

    fn read(&mut self, record: Record) {
        self.states.apply(&record);
        if let Some(value) = self.states.get(self.request.group)
            && value.change_id == self.change_id
        {
            self.own = Some(Value::clone(value));
        }
    }

    fn decide(self) -> Result<(Changed, Vec<Output>), RefusedChange> {
        let changed = |value, is_written| Changed { value, is_written };
        if self.own.is_some() {
            return Ok((changed(self.own, true), Vec::new()));
        }
        let (group, states) = (self.request.group, &self.states);
        if let Some(problem) = states.problem(group) {
            return Err(RefusedChange::Unknown(problem));
        }
        let current = states.get(group).map(|value| &**value);
        let Some(value) = next(current, &self.request, &self.change_id)? else {
            return Ok((changed(current.cloned(), false), Vec::new()));
        };
        let is_full = current.is_none() && states.count() >= MAX_GROUPS;
        let removed = forgotten(states, &self.request, is_full);
        if current.is_none() && states.count() - removed.len() >= MAX_GROUPS {
            return Err(RefusedChange::TooMany);
        }
        let output = |id: GroupId, value: Option<Bytes>| Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some(key(id).into()),
            value,
            headers: Headers::new(),
        };
        let mut outputs = vec![output(group, Some(value.encode()))];
        outputs.extend(removed.into_iter().map(|id| output(id, None)));
        let entry = entry(&self.request, &value, self.id);
        outputs.push(self.audit.record(entry, self.request.at));
        Ok((changed(Some(value), true), outputs))
    }
}

/// The entry of the audit log about a change. Notes may be long, and can be read where they are.
fn entry(request: &ChangeRequest, value: &Value, id: u128) -> Entry {
    let (action, what) = match request.change {
        Change::Decide(Decided::Resolved) => (Action::ResolveGroup, "resolved".to_owned()),
        Change::Decide(Decided::Muted(None)) => (Action::MuteGroup, "muted".to_owned()),
        Change::Decide(Decided::Muted(Some(until))) => (Action::MuteGroup, format!("muted until {until}")),
        Change::Decide(Decided::Open) => (Action::ReopenGroup, "open".to_owned()),
        Change::Annotate(_) => (Action::AnnotateGroup, "another note".to_owned()),
    };
    Entry {
        target: request.group.to_string(),
        why: request.why.clone(),
        details: format!("revision {}: {what}", value.revision),
        id,
        ..Entry::new(request.by.clone(), action)
    }
}

/// The value that follows from a change; `None` if the change has no effect.
fn next(
    current: Option<&Value>,
    request: &ChangeRequest,
    change_id: &Bytes,
) -> Result<Option<Value>, RefusedChange> {
    let revision = current.map_or(0, |value| value.revision);
    let expected = request.expected_revision;
    if expected.is_some_and(|expected| expected != revision) {
        return Err(RefusedChange::Revised(revision));
    }
    let decision = current.and_then(|value| value.decision.as_ref());
    let note = current.and_then(|value| value.note.as_ref());
    let (mut decision_after, mut note_after) = (decision.cloned(), note.cloned());
    match &request.change {
        Change::Decide(decided) => {
            if has_no_effect(*decided, decision, request) {
                return Ok(None);
            }
            decision_after = Some(Decision {
                decided: *decided,
                time: request.at,
                resolved_until: (*decided == Decided::Resolved).then(|| resolved_until(request)),
                by: request.by.to_string(),
                why: request.why.clone(),
            });
        }
        Change::Annotate(text) => {
            if note.map_or("", |note| &note.text) == text {
                return Ok(None);
            }
            note_after = (!text.is_empty()).then(|| Note {
                text: text.clone(),
                time: Some(request.at),
                by: request.by.to_string(),
            });
        }
    }
    Ok(Some(Value {
        revision: revision + 1,
        change_id: change_id.clone(),
        decision: decision_after,
        note: note_after,
        is_newer: false,
    }))
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
    is_same && (request.why.is_empty() || current.why == request.why)
}

/// The groups whose values say nothing and have not changed for long, or, if there is no room for another one, whose values say nothing; those
/// that have not changed for longest, up to [`MAX_REMOVED`].
/// Whether a group has dead letters does not matter: those of other topics may be known to another inspector only.
fn forgotten(states: &GroupStates, request: &ChangeRequest, is_full: bool) -> Vec<GroupId> {
    let is_old = |value: &Value| value.last_time().is_none_or(|time| request.at.since(time) > KEPT);
    let others = states.values().filter(|(id, _)| *id != request.group);
    let forgotten =
        others.filter(|(_, value)| !value.is_newer && value.says_nothing() && (is_full || is_old(value)));
    let mut forgotten: Vec<_> = forgotten.map(|(id, value)| (value.last_time(), id)).collect();
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

    use super::super::contents::tests::{decided, record};
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
            why: String::new(),
            expected_revision: None,
            at: at(100),
            last: Some(at(50)),
            as_of: Some(at(1_000)),
        }
    }

    /// The written keys, each with whether it has a value.
    type Written = Vec<(String, bool)>;

    /// The value that applies, and what is written.
    fn decide(
        records: &[(GroupId, Value)],
        request: ChangeRequest,
    ) -> Result<(Option<Value>, Written), RefusedChange> {
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let mut pending = PendingChange {
            request: Arc::new(request),
            audit: audit.clone(),
            id: 7,
            change_id: Bytes::from_static(b"own"),
            topic: TOPIC.into(),
            states: GroupStates::default(),
            own: None,
        };
        for (id, value) in records {
            pending.read(record(&key(*id), Some(value.encode())));
        }
        let (changed, mut outputs) = pending.decide()?;
        let all = outputs.len();
        outputs.retain(|output| output.topic != *audit.topic());
        assert_eq!(
            all - outputs.len(),
            usize::from(all > 0),
            "each change has an entry"
        );
        let outputs = outputs.into_iter().map(|output| {
            let key = String::from_utf8(output.key.unwrap().to_vec()).unwrap();
            (key, output.value.is_some())
        });
        Ok((changed.value, outputs.collect()))
    }

    const RESOLVE: Change = Change::Decide(Decided::Resolved);
    const REOPEN: Change = Change::Decide(Decided::Open);

    #[test]
    fn a_change_keeps_what_it_does_not_change() {
        let noted = Value {
            note: Some(Note {
                text: "runbook".to_owned(),
                time: Some(at(1)),
                by: "ann".to_owned(),
            }),
            ..decided(Decided::Muted(None), 60, 4)
        };
        let before = [(ID, noted.clone())];
        let (value, outputs) = decide(&before, request(RESOLVE)).unwrap();
        let value = value.unwrap();
        assert_eq!((value.revision, outputs.len(), &value.note), (5, 1, &noted.note));
        let decision = value.decision.unwrap();
        assert_eq!(
            (decision.decided, decision.time, &*decision.by),
            (Decided::Resolved, at(100), "bob")
        );
        let (value, _) = decide(&before, request(Change::Annotate(String::new()))).unwrap();
        let value = value.unwrap();
        assert_eq!(
            (value.revision, &value.decision, &value.note),
            (5, &noted.decision, &None)
        );
        // The revision goes on, so that no later value has one that was used before.
        let (value, _) = decide(&before, request(REOPEN)).unwrap();
        assert_eq!(value.unwrap().revision, 5);
    }

    #[test]
    fn another_revision_than_the_expected_one_is_refused_also_if_nothing_would_change() {
        let expecting = |change: &Change, revision| ChangeRequest {
            expected_revision: Some(revision),
            ..request(change.clone())
        };
        let before = [(ID, decided(Decided::Resolved, 60, 4))];
        assert!(decide(&before, expecting(&REOPEN, 4)).is_ok());
        for change in [REOPEN, RESOLVE, Change::Annotate(String::new())] {
            assert_eq!(
                decide(&before, expecting(&change, 3)),
                Err(RefusedChange::Revised(4))
            );
            assert_eq!(decide(&[], expecting(&change, 1)), Err(RefusedChange::Revised(0)));
            assert!(decide(&[], expecting(&change, 0)).is_ok());
        }
    }

    #[test]
    fn a_change_without_an_effect_can_be_repeated() {
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
            for why in ["known", ""] {
                let request = ChangeRequest {
                    why: why.to_owned(),
                    ..request(change.clone())
                };
                let (value, outputs) = decide(&before, request).unwrap();
                assert_eq!(
                    value,
                    before.first().map(|(_, value)| value.clone()),
                    "{change:?}"
                );
                assert_eq!(outputs, []);
            }
            if !before.is_empty() {
                let request = ChangeRequest {
                    why: "another reason".to_owned(),
                    ..request(change.clone())
                };
                assert_eq!(decide(&before, request).unwrap().1.len(), 1, "{change:?}");
            }
        }
    }

    #[test]
    fn a_regressed_group_is_resolved_again_with_the_new_time() {
        let before = [(ID, decided(Decided::Resolved, 60, 4))];
        let regressed = ChangeRequest {
            last: Some(at(61)),
            ..request(RESOLVE)
        };
        let (value, _) = decide(&before, regressed).unwrap();
        assert_eq!(value.unwrap().decision.unwrap().time, at(100));
        // A group that is not muted any more can be muted until the same time only if that is in the future, which the API requires.
        let before = [(ID, decided(Decided::Muted(Some(at(90))), 60, 4))];
        assert_eq!(decide(&before, request(REOPEN)).unwrap().1.len(), 1);
    }

    #[test]
    fn a_change_that_was_written_with_an_unknown_outcome_is_not_written_again() {
        let own = Value {
            change_id: Bytes::from_static(b"own"),
            ..decided(Decided::Resolved, 60, 4)
        };
        // Another change came right after it.
        let records = [(ID, own.clone()), (ID, decided(Decided::Open, 70, 5))];
        let again = ChangeRequest {
            expected_revision: Some(3),
            ..request(RESOLVE)
        };
        assert_eq!(decide(&records, again), Ok((Some(own), Vec::new())));
    }

    #[test]
    fn what_a_newer_version_has_written_is_not_changed() {
        let mut pending = PendingChange {
            request: Arc::new(request(RESOLVE)),
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
            id: 7,
            change_id: Bytes::new(),
            topic: TOPIC.into(),
            states: GroupStates::default(),
            own: None,
        };
        pending.read(record(&key(ID), Some(Bytes::from_static(b"\xff"))));
        let refused = pending.decide().unwrap_err();
        assert!(matches!(refused, RefusedChange::Unknown(_)), "{refused:?}");
    }

    #[test]
    fn values_are_forgotten_after_long_if_they_say_nothing() {
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
            let (_, outputs) = decide(&records, request).unwrap();
            assert_eq!(outputs[0], (key(ID), true));
            outputs[1..].to_vec()
        };
        let removals = |ids: &[GroupId]| ids.iter().map(|id| (key(*id), false)).collect::<Vec<_>>();
        assert_eq!(removed(at(kept)), []);
        assert_eq!(removed(at(kept + 1)), removals(&[open]));
        assert_eq!(removed(at(kept + 3)), removals(&[open, recent]));
    }

    #[test]
    fn the_number_of_values_is_bounded_and_those_that_say_nothing_make_room() {
        let count = i64::try_from(MAX_GROUPS).unwrap();
        let mut full: Vec<_> = (100..100 + count)
            .map(|number| (GroupId::from_number(number), decided(Decided::Resolved, 60, 1)))
            .collect();
        assert_eq!(decide(&full, request(RESOLVE)), Err(RefusedChange::TooMany));
        let known = ChangeRequest {
            group: full[0].0,
            ..request(REOPEN)
        };
        assert_eq!(decide(&full, known).unwrap().1.len(), 1);
        full[1].1 = decided(Decided::Open, 60, 2);
        let (_, written) = decide(&full, request(RESOLVE)).unwrap();
        assert_eq!(written, [(key(ID), true), (key(full[1].0), false)]);
        // Those that have not changed for longest go first.
        let removed = i64::try_from(MAX_REMOVED).unwrap();
        for (index, time) in (0..2 * removed).rev().enumerate() {
            full[index].1 = decided(Decided::Open, time, 2);
        }
        let (_, written) = decide(&full, request(RESOLVE)).unwrap();
        let mut expected: Vec<_> = full[MAX_REMOVED..2 * MAX_REMOVED].iter().collect();
        expected.reverse();
        let expected = expected.into_iter().map(|(id, _)| (key(*id), false));
        assert_eq!(written[1..], expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_resolution_is_of_the_dead_letters_that_were_known() {
        let state = |last, as_of, later| {
            let request = ChangeRequest {
                at: at(100),
                last,
                as_of,
                ..request(RESOLVE)
            };
            let value = decide(&[], request).unwrap().0.unwrap();
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
