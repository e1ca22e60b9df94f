//! Changes of the control topic.

use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_store::{ChangeId, Decision};

use super::name::ControlName;
use super::snapshot::Snapshot;
use super::value::{
    ApplicationControl, Desired, PipelineControl, RateLimit, Release, Run, TierControl, Value,
};
use crate::audit::{Action, AuditEntry, AuditLog};
use crate::identity::CallerName;

/// A request to change something.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// The target.
    pub name: ControlName,
    /// How.
    pub change: Change,
    /// The caller.
    pub by: CallerName,
    /// Why.
    pub reason: String,
    /// The revision that the value must have; 0: there must be none.
    pub expected_revision: Option<u64>,
    /// When it was requested.
    pub at: Timestamp,
    /// Where the change is recorded, in the same transaction.
    pub audit: AuditLog,
}

/// A change of a control.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Pauses it, or lets it run.
    Run(Run),
    /// Limits its rate. `None`: as the configuration says.
    Rate(Option<RateLimit>),
    /// Releases what waits in a tier of a pipeline.
    Release(WantedRelease),
    /// Everything is as the configuration says. A release goes on.
    Reset,
}

/// A release of what waits in a tier of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct WantedRelease {
    /// What waits.
    pub release: Arc<Release>,
    /// The revision of the value that was known before that was looked up; 0: none was known.
    pub known: u64,
}

impl WantedRelease {
    /// This release and the earlier one of a value with this revision. `None` if the earlier one is about another topic of the same name and
    /// may be the newer one of the two: it was written after this one was looked up.
    fn and(&self, earlier: Option<&Release>, revision: u64) -> Option<Release> {
        let is_of_another_topic = earlier.is_some_and(|earlier| earlier.topic != self.release.topic);
        let is_newer = revision <= self.known;
        (!is_of_another_topic || is_newer).then(|| (*self.release).clone().and(earlier))
    }
}

/// Why a change is refused. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedChange {
    /// It has nothing that can be released, or can only be released.
    #[error("cannot be changed like this")]
    Impossible,
    /// Since it was looked up what waits, a value with this revision was written, which is about another topic of the same name. What waits
    /// is to be looked up again.
    #[error("has a release of another topic of the same name")]
    Overtaken(u64),
}

/// Why a change has failed.
pub type ChangeError = redeliver_store::ChangeError<Value, RefusedChange>;

impl redeliver_store::Change for ChangeRequest {
    type State = Snapshot;
    type Refused = RefusedChange;

    fn key(&self, _id: ChangeId) -> ControlName {
        self.name.clone()
    }

    fn expected_revision(&self) -> Option<u64> {
        self.expected_revision
    }

    fn decide(&self, snapshot: &Snapshot, id: ChangeId) -> Result<Decision<Snapshot>, RefusedChange> {
        let current = snapshot.table.get(&self.name).map(|value| &**value);
        let Some(value) = next(current, self, id)? else {
            return Ok(Decision::Unchanged(self.name.clone()));
        };
        Ok(Decision::Write {
            records: vec![(self.name.to_string(), Some(value.encode()))],
            entry: self.audit.record(entry(self, &value, id), self.at),
            document: value,
        })
    }

    fn log(&self, value: &Value) {
        tracing::info!(
            name = %self.name, revision = value.revision, by = value.changed_by, reason = value.reason, desired = ?value.desired,
            "control changed"
        );
    }
}

/// The entry of the audit log about a change.
fn entry(request: &ChangeRequest, value: &Value, id: ChangeId) -> AuditEntry {
    let action = match request.change {
        Change::Run(Run::Paused) => Action::PauseControl,
        Change::Run(Run::Running) => Action::ResumeControl,
        Change::Rate(_) => Action::SetControlRate,
        Change::Release(_) => Action::ReleaseTier,
        Change::Reset => Action::ResetControl,
    };
    AuditEntry {
        target: request.name.to_string(),
        reason: request.reason.clone(),
        details: format!("revision {}: {}", value.revision, value.desired),
        id: id.0,
        ..AuditEntry::new(request.by.clone(), action)
    }
}

/// The value that follows from a change; `None` if the change has no effect.
fn next(
    current: Option<&Value>,
    request: &ChangeRequest,
    id: ChangeId,
) -> Result<Option<Value>, RefusedChange> {
    let before = current.map_or_else(
        || Desired::default_of(&request.name),
        |value| value.desired.clone(),
    );
    let revision = current.map_or(0, |value| value.revision);
    if !is_possible(&request.name, &request.change) {
        return Err(RefusedChange::Impossible);
    }
    let desired = changed(&before, &request.change, revision)?;
    // Another reason is a change, and a missing one is none. Without a value, nothing was changed that has a reason.
    let is_same_reason =
        request.reason.is_empty() || current.is_none_or(|value| value.reason == request.reason);
    if !has_effect(&before, &desired) && is_same_reason {
        return Ok(None);
    }
    let reason = match current {
        // The reason is that of the rate, which stays.
        Some(current)
            if request.reason.is_empty()
                && matches!(request.change, Change::Run(_))
                && before.run() != Some(Run::Paused)
                && before.rate().is_some() =>
        {
            current.reason.clone()
        }
        _ => request.reason.clone(),
    };
    Ok(Some(Value {
        // A reset is a value too, so that no revision occurs twice.
        revision: revision + 1,
        changed_at: Some(request.at),
        changed_by: request.by.to_string(),
        reason,
        change_id: id.bytes(),
        desired,
    }))
}

/// Whether a change can be made of what has this name.
fn is_possible(name: &ControlName, change: &Change) -> bool {
    match (name, change) {
        (ControlName::Tier(..), _) => true,
        // The scheduler dispatches jobs of all kinds with the same limits.
        (ControlName::LongWaits(_), change) => matches!(change, Change::Release(_) | Change::Reset),
        (_, change) => !matches!(change, Change::Release(_)),
    }
}

/// What follows from a change of what has this revision.
fn changed(before: &Desired, change: &Change, revision: u64) -> Result<Desired, RefusedChange> {
    Ok(match (before, change) {
        (Desired::Application(app), change) => Desired::Application(match change {
            Change::Run(run) => ApplicationControl {
                run: Some(*run),
                ..*app
            },
            Change::Rate(rate) => ApplicationControl { rate: *rate, ..*app },
            Change::Reset => ApplicationControl::default(),
            Change::Release(_) => return Err(RefusedChange::Impossible),
        }),
        (Desired::Pipeline(pipeline), change) => Desired::Pipeline(match change {
            Change::Run(run) => PipelineControl {
                run: Some(*run),
                ..*pipeline
            },
            Change::Rate(rate) => PipelineControl {
                rate: *rate,
                ..*pipeline
            },
            Change::Reset => PipelineControl::default(),
            Change::Release(_) => return Err(RefusedChange::Impossible),
        }),
        (Desired::Tier(tier), change) => {
            let tier = tier.clone();
            Desired::Tier(match change {
                Change::Run(run) => TierControl {
                    run: Some(*run),
                    ..tier
                },
                Change::Rate(rate) => TierControl { rate: *rate, ..tier },
                Change::Release(wanted) => {
                    let release = wanted.and(tier.release.as_deref(), revision);
                    TierControl {
                        release: Some(Arc::new(release.ok_or(RefusedChange::Overtaken(revision))?)),
                        ..tier
                    }
                }
                // Some of the records may have been released.
                Change::Reset => TierControl {
                    release: tier.release,
                    ..TierControl::default()
                },
            })
        }
    })
}

/// Whether something differs. A release of the same records has no effect, whenever it was wanted.
fn has_effect(before: &Desired, after: &Desired) -> bool {
    let without_time = |desired: &Desired| match desired {
        Desired::Tier(tier) => Desired::Tier(TierControl {
            release: tier.release.as_deref().map(|release| {
                Arc::new(Release {
                    at: None,
                    ..release.clone()
                })
            }),
            ..tier.clone()
        }),
        other => other.clone(),
    };
    without_time(before) != without_time(after)
}

#[cfg(test)]
mod tests {
    use redeliver_proto::{Message as _, v1};
    use redeliver_runtime::Config;

    use super::super::snapshot::tests::paused;
    use super::*;

    const ID: ChangeId = ChangeId(7);

    fn request(change: Change, reason: &str) -> ChangeRequest {
        ChangeRequest {
            name: ControlName::application("sms"),
            change,
            by: CallerName::recorded("bob"),
            reason: reason.to_owned(),
            expected_revision: None,
            at: Timestamp::from_millis(7),
            audit: AuditLog::new(&Config::default(), "scheduler"),
        }
    }

    fn decide(current: Option<&Value>, change: Change, reason: &str) -> Option<Value> {
        next(current, &request(change, reason), ID).unwrap()
    }

    fn desired(value: Option<Value>) -> (u64, ApplicationControl) {
        let value = value.unwrap();
        let Desired::Application(app) = value.desired else {
            panic!("{value:?}");
        };
        (value.revision, app)
    }

    #[test]
    fn change_keeps_the_rest() {
        let (before, rate) = (paused(4), Some(RateLimit::PerSecond(5.0)));
        let decide = |change| decide(Some(&before), change, "test");
        let value = decide(Change::Rate(rate));
        let run = Some(Run::Paused);
        assert_eq!(desired(value.clone()), (5, ApplicationControl { run, rate }));
        let value = value.unwrap();
        assert_eq!(
            (value.changed_by.as_str(), value.reason.as_str()),
            ("bob", "test")
        );
        assert_eq!(value.change_id, ID.bytes());
        let run = Some(Run::Running);
        let resumed = desired(decide(Change::Run(Run::Running)));
        assert_eq!(resumed, (5, ApplicationControl { run, rate: None }));
        // The revision goes on, so that no later value has one that was used before.
        assert_eq!(desired(decide(Change::Reset)), (5, ApplicationControl::default()));
    }

    #[test]
    fn entry_names_caller_and_change() {
        for (change, action, details) in [
            (
                Change::Run(Run::Paused),
                "control.pause",
                "revision 4: paused, rate as configured",
            ),
            (
                Change::Run(Run::Running),
                "control.resume",
                "revision 4: running, rate as configured",
            ),
            (
                Change::Rate(Some(RateLimit::PerSecond(5.0))),
                "control.rate",
                "revision 4: state as configured, rate 5/s",
            ),
            (
                Change::Reset,
                "control.reset",
                "revision 4: state as configured, rate as configured",
            ),
        ] {
            let mut snapshot = Snapshot::default();
            let before = Value {
                desired: Desired::Application(ApplicationControl::default()),
                reason: String::new(),
                ..paused(3)
            };
            snapshot.table.insert(ControlName::application("sms"), before);
            let change = request(change, "outage");
            let Ok(Decision::Write { entry, records, .. }) =
                redeliver_store::Change::decide(&change, &snapshot, ID)
            else {
                panic!("it has an effect");
            };
            assert_eq!((records.len(), &*records[0].0), (1, "app/sms"));
            let record = entry.value.unwrap();
            let entry = v1::AuditEntry::decode(record).unwrap();
            assert_eq!(
                (
                    &*entry.by,
                    &*entry.action,
                    &*entry.target,
                    &*entry.reason,
                    &*entry.details
                ),
                ("bob", action, "app/sms", "outage", details)
            );
        }
    }

    #[test]
    fn change_without_effect_writes_nothing() {
        // With its reason, or without one.
        for reason in ["outage", ""] {
            assert_eq!(decide(Some(&paused(4)), Change::Run(Run::Paused), reason), None);
        }
        for change in [Change::Reset, Change::Rate(None)] {
            assert_eq!(decide(None, change, "test"), None);
        }
    }

    #[test]
    fn resumption_keeps_reason_of_rate() {
        let before = |run| {
            let limited = ApplicationControl {
                run,
                rate: Some(RateLimit::PerSecond(5.0)),
            };
            Value {
                desired: Desired::Application(limited),
                ..paused(4)
            }
        };
        let resume = |run, reason| {
            let resumed = decide(Some(&before(run)), Change::Run(Run::Running), reason);
            resumed.unwrap().reason
        };
        assert_eq!(resume(None, ""), "outage");
        assert_eq!(resume(None, "works"), "works");
        // This is the reason of the pause.
        assert_eq!(resume(Some(Run::Paused), ""), "");
    }

    #[test]
    fn another_reason_is_a_change() {
        let value = decide(Some(&paused(4)), Change::Run(Run::Paused), "later").unwrap();
        assert_eq!((value.revision, value.reason.as_str()), (5, "later"));
    }

    fn decide_about(
        name: &str,
        current: Option<&Value>,
        change: Change,
    ) -> Result<Option<Value>, RefusedChange> {
        let request = ChangeRequest {
            name: name.parse().unwrap(),
            ..request(change, "test")
        };
        next(current, &request, ID)
    }

    fn release_of(topic: u128, ends: &[i64], at: i64, known: u64) -> Change {
        Change::Release(WantedRelease {
            release: Arc::new(Release {
                topic: redeliver_kafka::TopicId::from_bits(topic),
                ends: ends.to_vec(),
                at: Some(Timestamp::from_millis(at)),
            }),
            known,
        })
    }

    fn release(ends: &[i64], at: i64) -> Change {
        release_of(1, ends, at, 0)
    }

    #[test]
    fn late_release_keeps_newer_topic() {
        const NAME: &str = "tier/docs/30s";
        let change = |current: Option<&Value>, change| decide_about(NAME, current, change);
        let of_new = change(None, release_of(2, &[5], 2, 0)).unwrap().unwrap();
        // The topic was created again after the lookup.
        let late = change(Some(&of_new), release_of(1, &[90], 1, 0));
        assert_eq!(late, Err(RefusedChange::Overtaken(1)));
        // Its writer knew the release, so its topic is newer.
        let next = change(Some(&of_new), release_of(3, &[4], 3, 1)).unwrap().unwrap();
        let Desired::Tier(TierControl { release, .. }) = next.desired else {
            panic!("{next:?}");
        };
        assert_eq!(
            release.map(|release| (release.topic, release.ends.clone())),
            Some((redeliver_kafka::TopicId::from_bits(3), vec![4]))
        );
    }

    #[test]
    fn release_survives_other_changes() {
        const NAME: &str = "tier/docs/30s";
        let tier_of = |value: &Value| match &value.desired {
            Desired::Tier(tier) => tier.clone(),
            other => panic!("{other:?}"),
        };
        let ends = |value: &Value| tier_of(value).release.map(|release| release.ends.clone());
        let mut current = None;
        for (change, expected) in [
            (release(&[5, 0], 1), [5, 0]),
            (Change::Run(Run::Paused), [5, 0]),
            (release(&[4, 9], 2), [5, 9]),
            (Change::Rate(Some(RateLimit::PerSecond(2.0))), [5, 9]),
            (Change::Reset, [5, 9]),
        ] {
            let value = decide_about(NAME, current.as_ref(), change.clone())
                .unwrap()
                .unwrap();
            assert_eq!(ends(&value), Some(expected.to_vec()), "{change:?}");
            current = Some(value);
        }
        let current = current.unwrap();
        assert_eq!(
            (current.revision, tier_of(&current).run, tier_of(&current).rate),
            (5, None, None)
        );
        // Nothing has come since.
        assert_eq!(decide_about(NAME, Some(&current), release(&[5, 9], 3)), Ok(None));
    }

    #[test]
    fn impossible_changes_are_refused() {
        let rate = Change::Rate(Some(RateLimit::PerSecond(1.0)));
        for (name, change, is_possible) in [
            ("app/sms", rate.clone(), true),
            ("app/sms", release(&[1], 1), false),
            ("pipeline/docs", Change::Run(Run::Paused), true),
            ("pipeline/docs", rate.clone(), true),
            ("pipeline/docs", release(&[1], 1), false),
            ("tier/docs/30s", rate.clone(), true),
            ("tier/docs/30s", release(&[1], 1), true),
            ("tier/30s", Change::Run(Run::Paused), true),
            ("tier/30s", rate, true),
            ("tier/30s", release(&[1], 1), false),
            ("tier/docs/scheduler", Change::Run(Run::Paused), false),
            ("tier/docs/scheduler", Change::Rate(None), false),
            ("tier/docs/scheduler", release(&[1], 1), true),
        ] {
            let decided = decide_about(name, None, change.clone());
            assert_eq!(decided.is_ok(), is_possible, "{name} {change:?}");
            assert!(is_possible || decided == Err(RefusedChange::Impossible));
        }
    }
}
