//! Changes of the control topic. No change can overlap another one, see [`redeliver_kafka::exclusive`].

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Clock, Headers, Output, Record, Timestamp};
use redeliver_kafka::exclusive::{Decide, ExclusiveError};

use super::name::ControlName;
use super::snapshot::{Problem, Snapshot};
use super::value::{
    ApplicationControl, Desired, PipelineControl, RateLimit, Release, Run, TierControl, Value,
};
use super::{Control, transactional_id};
use crate::audit::{Action, AuditLog, Entry};
use crate::followed::{Contents as _, FollowedWriter, change_id};
use crate::host::Host;
use crate::identity::CallerName;

/// A request to change something.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangeRequest {
    /// What to change.
    pub name: ControlName,
    /// How.
    pub change: Change,
    /// Who wants it.
    pub by: CallerName,
    /// Why.
    pub why: String,
    /// The revision that the value must have; 0: there must be none.
    pub expected_revision: Option<u64>,
}

/// What to change.
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
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RefusedChange {
    /// The value has another revision than the expected one.
    #[error("has revision {}", .0.as_ref().map_or(0, |value| value.revision))]
    Revised(Option<Box<Value>>),
    /// This version would lose something of the value.
    #[error("has a value that this version cannot change: it {0}")]
    Unknown(Problem),
    /// It has nothing that can be released, or can only be released.
    #[error("cannot be changed like this")]
    Impossible,
    /// Since it was looked up what waits, a value with this revision was written, which is about another topic of the same name. What waits
    /// is to be looked up again.
    #[error("has a release of another topic of the same name")]
    Overtaken(u64),
}

/// Why a change has failed.
pub type ChangeError = ExclusiveError<RefusedChange>;

/// Changes the control topic. Cheap to clone.
#[derive(Clone)]
pub struct ControlWriter {
    writer: FollowedWriter<Snapshot>,
    audit: AuditLog,
    clock: Arc<dyn Clock>,
    control: Control,
}

impl ControlWriter {
    /// A writer for the topic that `control` follows. Each change is recorded in the audit log, in the same transaction.
    #[must_use]
    pub fn new(host: &Host, control: Control, audit: AuditLog) -> Self {
        let topic = host.config.control_topic();
        Self {
            writer: FollowedWriter::new(&host.kafka, &transactional_id(&topic), &topic, control.followed()),
            audit,
            clock: host.clock.clone(),
            control,
        }
    }

    /// Makes a change, and returns the value that follows from it; `None` if there is none. When this returns, the change is durable, and
    /// this process has read it. A change without an effect writes nothing.
    ///
    /// # Errors
    /// [`ChangeError`] says whether something may have been written.
    pub async fn change(&self, request: ChangeRequest) -> Result<Option<Value>, ChangeError> {
        let name = request.name.clone();
        let (clock, audit, request) = (self.clock.clone(), self.audit.clone(), Arc::new(request));
        let changing = self.writer.write(move |topic, id, snapshot| PendingChange {
            request: request.clone(),
            id,
            change_id: change_id(id),
            topic: topic.clone(),
            audit: audit.clone(),
            now: clock.now(),
            snapshot,
            own: None,
        });
        let Decided { value, is_written } = changing.await?;
        if let Some(value) = &value {
            if is_written {
                tracing::info!(
                    %name, revision = value.revision, by = value.changed_by, why = value.why, desired = ?value.desired,
                    "control changed"
                );
            }
            self.control.until_read(&name, value.revision).await;
        }
        Ok(value)
    }
}

/// What was decided.
#[derive(Debug, PartialEq)]
struct Decided {
    /// The value that applies.
    value: Option<Value>,
    /// Whether this change has written it.
    is_written: bool,
}

/// A change that is being decided.
struct PendingChange {
    request: Arc<ChangeRequest>,
    id: u128,
    change_id: Bytes,
    topic: Arc<str>,
    audit: AuditLog,
    now: Timestamp,
    snapshot: Snapshot,
    /// What a previous attempt has written, whose outcome was unknown.
    own: Option<Value>,
}

impl Decide for PendingChange {
    type Decision = Decided;
    type Error = RefusedChange;

    fn read(&mut self, record: Record) {
        self.snapshot.apply(&record);
        if let Some(value) = self.snapshot.get(&self.request.name)
            && value.change_id == self.change_id
        {
            self.own = Some(value.clone());
        }
    }

    fn decide(self) -> Result<(Decided, Vec<Output>), RefusedChange> {
        let decided = |value, is_written| Decided { value, is_written };
        if self.own.is_some() {
            return Ok((decided(self.own, true), Vec::new()));
        }
        let ChangeRequest { name, .. } = &*self.request;
        if let Some(problem) = self.snapshot.problem(name) {
            return Err(RefusedChange::Unknown(problem));
        }
        let current = self.snapshot.get(name).cloned();
        let Some(value) = next(current.as_ref(), &self.request, self.now, &self.change_id)? else {
            return Ok((decided(current, false), Vec::new()));
        };
        let output = Output {
            topic: self.topic,
            partition: Some(0),
            key: Some(name.to_string().into()),
            value: Some(value.encode()),
            headers: Headers::new(),
        };
        let entry = self.audit.record(entry(&self.request, &value, self.id), self.now);
        Ok((decided(Some(value), true), vec![output, entry]))
    }
}

/// The entry of the audit log about a change.
fn entry(request: &ChangeRequest, value: &Value, id: u128) -> Entry {
    let action = match request.change {
        Change::Run(Run::Paused) => Action::PauseControl,
        Change::Run(Run::Running) => Action::ResumeControl,
        Change::Rate(_) => Action::SetControlRate,
        Change::Release(_) => Action::ReleaseTier,
        Change::Reset => Action::ResetControl,
    };
    Entry {
        target: request.name.to_string(),
        why: request.why.clone(),
        details: format!("revision {}: {}", value.revision, value.desired),
        id,
        ..Entry::new(request.by.clone(), action)
    }
}

/// The value that follows from a change; `None` if the change has no effect.
fn next(
    current: Option<&Value>,
    request: &ChangeRequest,
    now: Timestamp,
    change_id: &Bytes,
) -> Result<Option<Value>, RefusedChange> {
    let before = current.map_or_else(
        || Desired::default_of(&request.name),
        |value| value.desired.clone(),
    );
    let revision = current.map_or(0, |value| value.revision);
    if !is_possible(&request.name, &request.change) {
        return Err(RefusedChange::Impossible);
    }
    if request
        .expected_revision
        .is_some_and(|expected| expected != revision)
    {
        return Err(RefusedChange::Revised(current.cloned().map(Box::new)));
    }
    let desired = changed(&before, &request.change, revision)?;
    // Another reason is a change, and a missing one is none. Without a value, nothing was changed that has a reason.
    let is_same_reason = request.why.is_empty() || current.is_none_or(|value| value.why == request.why);
    if !has_effect(&before, &desired) && is_same_reason {
        return Ok(None);
    }
    let why = match current {
        // The reason is that of the rate, which stays.
        Some(current)
            if request.why.is_empty()
                && matches!(request.change, Change::Run(_))
                && before.run() != Some(Run::Paused)
                && before.rate().is_some() =>
        {
            current.why.clone()
        }
        _ => request.why.clone(),
    };
    Ok(Some(Value {
        // A reset is a value too, so that no revision occurs twice.
        revision: revision + 1,
        changed_at: Some(now),
        changed_by: request.by.to_string(),
        why,
        change_id: change_id.clone(),
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

    use super::super::snapshot::tests::{paused, record};
    use super::*;

    fn request(change: Change, why: &str, expected_revision: Option<u64>) -> ChangeRequest {
        ChangeRequest {
            name: ControlName::application("sms"),
            change,
            by: CallerName::recorded("bob"),
            why: why.to_owned(),
            expected_revision,
        }
    }

    fn decide(
        records: &[Record],
        change: Change,
        expected: Option<u64>,
    ) -> Result<(Option<Value>, usize), RefusedChange> {
        decide_because(records, change, "test", expected)
    }

    fn decide_because(
        records: &[Record],
        change: Change,
        why: &str,
        expected: Option<u64>,
    ) -> Result<(Option<Value>, usize), RefusedChange> {
        let audit = AuditLog::new(&Config::default(), "scheduler");
        let mut pending = PendingChange {
            request: Arc::new(request(change, why, expected)),
            id: 7,
            audit: audit.clone(),
            change_id: Bytes::from_static(b"own"),
            topic: "control".into(),
            now: Timestamp::from_millis(7),
            snapshot: Snapshot::default(),
            own: None,
        };
        for record in records {
            pending.read(record.clone());
        }
        let (decided, outputs) = pending.decide()?;
        let is_entry = |output: &&Output| output.topic == *audit.topic();
        let entries = outputs.iter().filter(is_entry).count();
        assert_eq!(outputs.len(), 2 * entries, "each change has an entry");
        Ok((decided.value, entries))
    }

    fn desired(value: Option<Value>) -> (u64, ApplicationControl) {
        let value = value.unwrap();
        let Desired::Application(app) = value.desired else {
            panic!("{value:?}");
        };
        (value.revision, app)
    }

    #[test]
    fn a_change_keeps_what_it_does_not_change() {
        let before = [record(0, "app/sms", Some(paused(4).encode()))];
        let rate = Some(RateLimit::PerSecond(5.0));
        let (value, written) = decide(&before, Change::Rate(rate), None).unwrap();
        assert_eq!(written, 1);
        let run = Some(Run::Paused);
        assert_eq!(desired(value.clone()), (5, ApplicationControl { run, rate }));
        let value = value.unwrap();
        assert_eq!((value.changed_by.as_str(), value.why.as_str()), ("bob", "test"));
        let (value, _) = decide(&before, Change::Run(Run::Running), None).unwrap();
        let run = Some(Run::Running);
        assert_eq!(desired(value), (5, ApplicationControl { run, rate: None }));
        // The revision goes on, so that no later value has one that was used before.
        let (value, _) = decide(&before, Change::Reset, None).unwrap();
        assert_eq!(desired(value), (5, ApplicationControl::default()));
    }

    #[test]
    fn the_entry_of_a_change_says_who_has_changed_what_to_what() {
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
            let request = request(change, "outage", None);
            let before = Value {
                desired: Desired::Application(ApplicationControl::default()),
                why: String::new(),
                ..paused(3)
            };
            let id = Bytes::from_static(b"own");
            let value = next(Some(&before), &request, Timestamp::from_millis(7), &id);
            let entry = entry(&request, &value.unwrap().unwrap(), 7);
            let log = AuditLog::new(&Config::default(), "scheduler");
            let record = log.record(entry, Timestamp::from_millis(7)).value.unwrap();
            let entry = v1::AuditEntry::decode(record).unwrap();
            assert_eq!(
                (
                    &*entry.by,
                    &*entry.action,
                    &*entry.target,
                    &*entry.why,
                    &*entry.details
                ),
                ("bob", action, "app/sms", "outage", details)
            );
        }
    }

    #[test]
    fn another_revision_than_the_expected_one_is_refused() {
        let before = [record(0, "app/sms", Some(paused(4).encode()))];
        let resume = || Change::Run(Run::Running);
        assert_eq!(decide(&before, resume(), Some(4)).unwrap().1, 1);
        assert_eq!(
            decide(&before, resume(), Some(3)),
            Err(RefusedChange::Revised(Some(Box::new(paused(4)))))
        );
        assert_eq!(decide(&[], resume(), Some(0)).unwrap().1, 1);
        assert_eq!(decide(&[], resume(), Some(1)), Err(RefusedChange::Revised(None)));
    }

    #[test]
    fn a_change_without_an_effect_can_be_repeated() {
        let before = [record(0, "app/sms", Some(paused(4).encode()))];
        let pause = || Change::Run(Run::Paused);
        // With its reason, or without one.
        for why in ["outage", ""] {
            for expected in [None, Some(4)] {
                let (value, written) = decide_because(&before, pause(), why, expected).unwrap();
                assert_eq!((value, written), (Some(paused(4)), 0));
            }
        }
        assert_eq!(decide(&[], Change::Reset, None), Ok((None, 0)));
        assert_eq!(decide(&[], Change::Rate(None), None), Ok((None, 0)));
    }

    #[test]
    fn a_resumption_keeps_the_reason_of_a_rate() {
        let before = |run| {
            let limited = ApplicationControl {
                run,
                rate: Some(RateLimit::PerSecond(5.0)),
            };
            let value = Value {
                desired: Desired::Application(limited),
                ..paused(4)
            };
            [record(0, "app/sms", Some(value.encode()))]
        };
        let resume = |run, why: &str| {
            let resumed = decide_because(&before(run), Change::Run(Run::Running), why, None);
            resumed.unwrap().0.unwrap().why
        };
        assert_eq!(resume(None, ""), "outage");
        assert_eq!(resume(None, "works"), "works");
        // This is the reason of the pause.
        assert_eq!(resume(Some(Run::Paused), ""), "");
    }

    #[test]
    fn another_reason_is_a_change() {
        let before = [record(0, "app/sms", Some(paused(4).encode()))];
        let (value, written) = decide_because(&before, Change::Run(Run::Paused), "later", None).unwrap();
        let value = value.unwrap();
        assert_eq!((value.revision, value.why.as_str(), written), (5, "later", 1));
    }

    #[test]
    fn a_wrong_revision_is_refused_also_if_nothing_would_change() {
        let before = [record(0, "app/sms", Some(paused(4).encode()))];
        let refused = decide_because(&before, Change::Run(Run::Paused), "outage", Some(3));
        assert_eq!(refused, Err(RefusedChange::Revised(Some(Box::new(paused(4))))));
        let refused = decide(&[], Change::Reset, Some(1));
        assert_eq!(refused, Err(RefusedChange::Revised(None)));
    }

    #[test]
    fn a_change_that_was_written_with_an_unknown_outcome_is_not_written_again() {
        let own = Value {
            change_id: Bytes::from_static(b"own"),
            ..paused(4)
        };
        // Another change came right after it.
        let records = [
            record(0, "app/sms", Some(own.encode())),
            record(1, "app/sms", Some(paused(5).encode())),
        ];
        let (value, written) = decide(&records, Change::Run(Run::Running), Some(3)).unwrap();
        assert_eq!((value, written), (Some(own), 0));
    }

    #[test]
    fn unreadable_values_are_not_changed() {
        let broken = [record(0, "app/sms", Some(Bytes::from_static(b"\xff")))];
        let refused = decide(&broken, Change::Reset, None);
        assert!(matches!(refused, Err(RefusedChange::Unknown(_))), "{refused:?}");
        // Of others, it does not matter.
        let other = [record(0, "app/mail", Some(Bytes::from_static(b"\xff")))];
        assert_eq!(decide(&other, Change::Run(Run::Paused), None).unwrap().1, 1);
    }

    fn decide_about(
        name: &str,
        current: Option<&Value>,
        change: Change,
    ) -> Result<Option<Value>, RefusedChange> {
        let request = ChangeRequest {
            name: name.parse().unwrap(),
            ..request(change, "test", None)
        };
        next(
            current,
            &request,
            Timestamp::from_millis(7),
            &Bytes::from_static(b"own"),
        )
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
    fn a_release_that_was_looked_up_before_another_one_does_not_replace_that_of_a_newer_topic() {
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
    fn a_release_is_kept_by_every_other_change_and_takes_back_nothing() {
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
    fn what_a_kind_cannot_do_is_refused() {
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
