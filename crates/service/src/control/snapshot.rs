//! What the control topic contains.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use redeliver_core::failure::bounded_text;
use redeliver_core::{HumanDuration, Record};

use super::name::{ControlName, MAX_NAME};
use super::value::{
    ApplicationControl, Desired, InvalidValue, PipelineControl, RateLimit, Release, Run, TierControl, Value,
};
use crate::followed::Contents;

/// The values of the topic. The newest one of each key counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    values: BTreeMap<ControlName, Result<Value, InvalidValue>>,
    /// The keys of unknown kinds.
    unknown: BTreeSet<String>,
}

/// Why a value is not obeyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Its key is of an unknown kind.
    Name,
    /// It cannot be read. It may want a pause, so what it names is paused.
    Unreadable(InvalidValue),
}

/// What applies to the workers of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PipelineState {
    /// They read nothing and start no attempt.
    pub is_paused: bool,
    /// How many attempts they start per second, in all processes together. `None`: what the configuration of each process says.
    pub rate: Option<RateLimit>,
}

/// What applies to a tier of a pipeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierState {
    /// It releases nothing.
    pub is_paused: bool,
    /// How many records it releases per second, by all partitions together.
    pub rate: Option<f64>,
    /// What does not wait for its due time.
    pub release: Option<Arc<Release>>,
}

impl TierState {
    fn of(TierControl { run, rate, release }: TierControl) -> Self {
        Self {
            is_paused: run == Some(Run::Paused),
            rate: rate.and_then(RateLimit::per_second),
            release,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name => f.write_str("is of an unknown kind, and ignored"),
            Self::Unreadable(invalid) => write!(f, "{invalid}, and is paused until it can be read"),
        }
    }
}

impl Snapshot {
    /// The value of a name; `None` also if it cannot be read, see [`Snapshot::problem`].
    #[must_use]
    pub fn get(&self, name: &ControlName) -> Option<&Value> {
        self.values.get(name)?.as_ref().ok()
    }

    /// Adds a value, as if it had been read.
    pub fn insert(&mut self, name: ControlName, value: Value) {
        self.values.insert(name, Ok(value));
    }

    /// Whether there is a value of a name, also one that cannot be read.
    #[must_use]
    pub fn contains(&self, name: &ControlName) -> bool {
        self.values.contains_key(name)
    }

    /// All values that can be read, by name.
    pub fn values(&self) -> impl Iterator<Item = (&ControlName, &Value)> {
        self.values
            .iter()
            .filter_map(|(name, value)| Some((name, value.as_ref().ok()?)))
    }

    /// All names that have a value, also one that cannot be read.
    pub fn names(&self) -> impl Iterator<Item = &ControlName> {
        self.values.keys()
    }

    /// What applies to applications, by name. One whose value cannot be read is paused.
    pub fn applications(&self) -> impl Iterator<Item = (&str, ApplicationControl)> {
        self.values.iter().filter_map(|(name, value)| {
            let ControlName::Application(app) = name else {
                return None;
            };
            match obeyed(name, value) {
                Desired::Application(control) => Some((&**app, control)),
                Desired::Pipeline(_) | Desired::Tier(_) => None,
            }
        })
    }

    /// What applies to a name; `None`: what the configuration says.
    #[must_use]
    pub fn obeyed(&self, name: &ControlName) -> Option<Desired> {
        self.values.get(name).map(|value| obeyed(name, value))
    }

    /// What applies to the workers of a pipeline.
    #[must_use]
    pub fn pipeline(&self, pipeline: &str) -> PipelineState {
        let PipelineControl { run, rate } = match self.obeyed(&ControlName::pipeline(pipeline)) {
            Some(Desired::Pipeline(pipeline)) => pipeline,
            Some(Desired::Application(_) | Desired::Tier(_)) | None => PipelineControl::default(),
        };
        PipelineState {
            is_paused: run == Some(Run::Paused),
            rate,
        }
    }

    /// What applies to a tier of a pipeline.
    ///
    /// No configuration pauses or limits a tier. So one that was resumed, or has a high rate, must not go on like this while somebody
    /// restricts the tier of all pipelines: the stricter of the two counts.
    #[must_use]
    pub fn tier(&self, pipeline: &str, tier: HumanDuration) -> TierState {
        let own = TierState::of(self.tier_control(&ControlName::tier(pipeline, tier)));
        let whole = self.whole_tier(tier);
        TierState {
            is_paused: own.is_paused || whole.is_paused,
            rate: [own.rate, whole.rate].into_iter().flatten().reduce(f64::min),
            release: own.release,
        }
    }

    /// What somebody wants of a tier of all pipelines.
    #[must_use]
    pub fn whole_tier(&self, tier: HumanDuration) -> TierState {
        TierState::of(self.tier_control(&ControlName::WholeTier(tier)))
    }

    /// What somebody has released of the records that wait in the scheduler, by pipeline.
    pub fn released_long_waits(&self) -> impl Iterator<Item = (&Arc<str>, Arc<Release>)> {
        self.values()
            .filter_map(|(name, value)| match (name, &value.desired) {
                (ControlName::LongWaits(pipeline), Desired::Tier(tier)) => {
                    Some((pipeline, tier.release.clone()?))
                }
                _ => None,
            })
    }

    fn tier_control(&self, name: &ControlName) -> TierControl {
        match self.obeyed(name) {
            Some(Desired::Tier(tier)) => tier,
            Some(Desired::Application(_) | Desired::Pipeline(_)) | None => TierControl::default(),
        }
    }

    /// The problem of a name, if there is one.
    #[must_use]
    pub fn problem(&self, name: &ControlName) -> Option<Problem> {
        self.values
            .get(name)?
            .as_ref()
            .err()
            .copied()
            .map(Problem::Unreadable)
    }
}

impl Contents for Snapshot {
    type Problem = Problem;

    const TOPIC: &'static str = "control topic";
    const NAME: &'static str = "control";
    // A process must not run what is paused because nobody has created the topic again.
    const IS_OPTIONAL: bool = false;

    fn apply(&mut self, record: &Record) {
        let key = record.key.as_deref().unwrap_or_default();
        let name = std::str::from_utf8(key).ok().and_then(|key| key.parse().ok());
        match (name, record.value.as_ref()) {
            (Some(name), Some(value)) => {
                let value = Value::decode(value).and_then(|value| {
                    let fits = value.desired.fits(&name);
                    fits.then_some(value).ok_or(InvalidValue::Kind)
                });
                self.values.insert(name, value);
            }
            (Some(name), None) => {
                self.values.remove(&name);
            }
            // No name is longer. Keys that are stand for each other, so that the memory is bounded.
            (None, value) => {
                let key = bounded_text(&String::from_utf8_lossy(key), MAX_NAME);
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
        let values = values.filter_map(|(name, value)| {
            Some((name.to_string(), Problem::Unreadable(*value.as_ref().err()?)))
        });
        let unknown = self.unknown.iter().map(|key| (key.clone(), Problem::Name));
        values.chain(unknown).collect()
    }

    fn is_unreadable(problem: &Problem) -> bool {
        matches!(problem, Problem::Unreadable(_))
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        for (name, value) in self.values() {
            if before.get(name) != Some(value) {
                tracing::info!(
                    %name, revision = value.revision, by = value.changed_by, why = value.why, desired = ?value.desired,
                    "control value"
                );
            }
        }
        // What was paused by it runs again.
        for name in lost(before, self) {
            tracing::error!(topic, %name, "a control value is gone, and the configuration applies again");
        }
    }
}

/// The names whose values are gone or older than before. No change does that: a reset leaves a value. One that cannot be read is
/// a problem of its own.
fn lost(before: &Snapshot, now: &Snapshot) -> Vec<String> {
    let before = before.values();
    let lost = before.filter(|(name, value)| match now.get(name) {
        Some(now) => now.revision < value.revision,
        None => !now.contains(name),
    });
    lost.map(|(name, _)| name.to_string()).collect()
}

fn obeyed(name: &ControlName, value: &Result<Value, InvalidValue>) -> Desired {
    match value {
        Ok(value) => value.desired.clone(),
        Err(_) => Desired::fail_safe(name),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Position};
    use redeliver_proto::{Message as _, v1};

    use super::*;

    const FAIL_SAFE: ApplicationControl = ApplicationControl {
        run: Some(Run::Paused),
        rate: None,
    };

    pub(crate) fn record(offset: i64, key: &str, value: Option<Bytes>) -> Record {
        Record {
            position: Position {
                topic: "control".into(),
                partition: 0,
                offset,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    pub(crate) fn paused(revision: u64) -> Value {
        Value {
            revision,
            changed_at: None,
            changed_by: "ann".to_owned(),
            why: "outage".to_owned(),
            change_id: Bytes::new(),
            desired: Desired::Application(ApplicationControl {
                run: Some(Run::Paused),
                rate: None,
            }),
        }
    }

    fn running() -> Value {
        Value {
            desired: Desired::Application(ApplicationControl {
                run: Some(Run::Running),
                rate: None,
            }),
            ..paused(1)
        }
    }

    #[test]
    fn the_newest_value_of_a_name_counts() {
        let (mut snapshot, name) = (Snapshot::default(), ControlName::application("sms"));
        for revision in [1, 2] {
            snapshot.apply(&record(0, "app/sms", Some(paused(revision).encode())));
            assert_eq!(snapshot.get(&name), Some(&paused(revision)));
        }
        assert_eq!(snapshot.applications().count(), 1);
        snapshot.apply(&record(0, "app/sms", None));
        assert_eq!(snapshot, Snapshot::default());
    }

    fn broken() -> Option<Bytes> {
        Some(Bytes::from_static(b"\xff"))
    }

    #[test]
    fn unknown_kinds_are_reported_and_stop_nothing() {
        let mut snapshot = Snapshot::default();
        snapshot.apply(&record(0, "app/sms", Some(paused(1).encode())));
        // Not `app/` and a replacement character: the key is not text.
        let mut no_text = record(1, "", broken());
        no_text.key = Some(Bytes::from_static(b"app/\xff"));
        snapshot.apply(&no_text);
        snapshot.apply(&record(2, "planet/mars", broken()));
        let problems: Vec<_> = snapshot.problems().into_iter().collect();
        let unknown = ["app/\u{fffd}", "planet/mars"].map(|key| (key.to_owned(), Problem::Name));
        assert_eq!(problems, unknown);
        assert_eq!(snapshot.applications().count(), 1);
        no_text.value = None;
        snapshot.apply(&no_text);
        for key in ["app/sms", "planet/mars"] {
            snapshot.apply(&record(3, key, None));
        }
        assert_eq!(snapshot, Snapshot::default());
    }

    #[test]
    fn an_application_whose_value_cannot_be_read_is_paused() {
        let (mut snapshot, name) = (Snapshot::default(), ControlName::application("sms"));
        let unknown_state = Value {
            revision: 2,
            ..paused(1)
        };
        let mut unknown_state = v1::ControlRecord::decode(unknown_state.encode()).unwrap();
        unknown_state.desired = Some(v1::control_record::Desired::Application(v1::ApplicationControl {
            state: 9,
            rate: None,
        }));
        let unknown_state = Some(Bytes::from(unknown_state.encode_to_vec()));
        let unknown_kind = Some(Bytes::new());
        for (value, problem) in [
            (unknown_state, InvalidValue::State),
            (unknown_kind, InvalidValue::Kind),
            (broken(), InvalidValue::Malformed),
        ] {
            // Whatever it was before, and as after a restart.
            for before in [Some(running().encode()), Some(paused(1).encode()), None] {
                snapshot.apply(&record(0, "app/sms", before));
                snapshot.apply(&record(1, "app/sms", value.clone()));
                assert_eq!(
                    snapshot.obeyed(&name),
                    Some(Desired::Application(FAIL_SAFE)),
                    "{problem}"
                );
                assert_eq!(snapshot.applications().collect::<Vec<_>>(), [("sms", FAIL_SAFE)]);
                assert_eq!(snapshot.problem(&name), Some(Problem::Unreadable(problem)));
                assert!(snapshot.contains(&name) && snapshot.get(&name).is_none());
            }
        }
        // A value that can be read ends it.
        snapshot.apply(&record(2, "app/sms", Some(running().encode())));
        assert_eq!(snapshot.problems().len(), 0);
        assert_eq!(snapshot.obeyed(&name).unwrap().run(), Some(Run::Running));
    }

    fn with(values: &[(&str, Desired)]) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (name, desired) in values {
            let value = Value {
                desired: desired.clone(),
                ..paused(1)
            };
            snapshot.apply(&record(0, name, Some(value.encode())));
        }
        snapshot
    }

    fn tier(run: Run) -> Desired {
        Desired::Tier(TierControl {
            run: Some(run),
            ..TierControl::default()
        })
    }

    #[test]
    fn the_lower_rate_of_a_tier_and_of_that_of_all_pipelines_applies() {
        let limited = |rate| {
            Desired::Tier(TierControl {
                rate: Some(rate),
                ..TierControl::default()
            })
        };
        let (low, high) = (RateLimit::PerSecond(2.0), RateLimit::PerSecond(5.0));
        for (own, whole, expected) in [
            (None, None, None),
            (Some(high), None, Some(5.0)),
            (None, Some(high), Some(5.0)),
            (Some(low), Some(high), Some(2.0)),
            (Some(high), Some(low), Some(2.0)),
            (Some(RateLimit::Unlimited), Some(low), Some(2.0)),
            (Some(low), Some(RateLimit::Unlimited), Some(2.0)),
            (Some(RateLimit::Unlimited), Some(RateLimit::Unlimited), None),
        ] {
            let own = own.map(|rate| ("tier/docs/30s", limited(rate)));
            let whole = whole.map(|rate| ("tier/30s", limited(rate)));
            let values: Vec<_> = own.into_iter().chain(whole).collect();
            let state = with(&values).tier("docs", HumanDuration::from_secs(30));
            assert_eq!(state.rate, expected, "{values:?}");
        }
    }

    #[test]
    fn a_tier_is_paused_if_it_is_or_if_that_of_all_pipelines_is() {
        let of = |snapshot: &Snapshot, pipeline| {
            let tier = snapshot.tier(pipeline, HumanDuration::from_secs(30));
            tier.is_paused
        };
        let none = Snapshot::default();
        assert!(!of(&none, "docs"));
        let one = with(&[("tier/docs/30s", tier(Run::Paused))]);
        assert!(of(&one, "docs") && !of(&one, "mail"));
        let other = with(&[
            ("tier/docs/1m", tier(Run::Paused)),
            ("tier/5s", tier(Run::Paused)),
        ]);
        assert!(!of(&other, "docs"));
        let all = with(&[
            ("tier/30s", tier(Run::Paused)),
            ("tier/docs/30s", tier(Run::Running)),
        ]);
        assert!(of(&all, "docs") && of(&all, "mail"));
        let none = with(&[("tier/30s", tier(Run::Running))]);
        assert!(!of(&none, "docs"));
    }

    #[test]
    fn what_applies_to_a_pipeline_and_to_an_application_of_its_name_differs() {
        let run = Some(Run::Paused);
        let pipeline = Desired::Pipeline(super::super::value::PipelineControl { run, rate: None });
        let snapshot = with(&[("pipeline/sms", pipeline)]);
        assert!(snapshot.pipeline("sms").is_paused && !snapshot.pipeline("docs").is_paused);
        assert_eq!(snapshot.applications().count(), 0);
        let snapshot = with(&[("app/sms", Desired::Application(FAIL_SAFE))]);
        assert!(!snapshot.pipeline("sms").is_paused);
    }

    #[test]
    fn a_pipeline_or_a_tier_whose_value_cannot_be_read_is_paused() {
        // Also one of another kind.
        let of_another_kind = Some(paused(1).encode());
        for value in [broken(), of_another_kind] {
            let mut snapshot = Snapshot::default();
            for name in ["pipeline/docs", "tier/docs/30s", "tier/1m"] {
                snapshot.apply(&record(0, name, value.clone()));
            }
            let is_paused = |tier| snapshot.tier("docs", HumanDuration::from_secs(tier)).is_paused;
            assert!(snapshot.pipeline("docs").is_paused && is_paused(30) && is_paused(60));
            assert!(!is_paused(5) && snapshot.problems().len() == 3);
        }
    }

    #[test]
    fn the_problems_of_long_names_are_told_apart() {
        let mut snapshot = Snapshot::default();
        let long = |end: &str| format!("app/{}{end}", "x".repeat(200));
        snapshot.apply(&record(0, &long("a"), broken()));
        snapshot.apply(&record(1, &long("b"), broken()));
        assert_eq!(snapshot.problems().len(), 2);
        snapshot.apply(&record(2, &long("b"), Some(paused(1).encode())));
        let of = |end: &str| snapshot.problem(&long(end).parse().unwrap());
        assert!(of("a").is_some() && of("b").is_none());
    }
    #[test]
    fn a_value_that_is_gone_or_older_is_lost() {
        let with = |values: &[(&str, u64)]| {
            let mut snapshot = Snapshot::default();
            for (name, revision) in values {
                snapshot.apply(&record(0, name, Some(paused(*revision).encode())));
            }
            snapshot
        };
        let before = with(&[("app/a", 2), ("app/b", 2), ("app/c", 2)]);
        let now = with(&[("app/a", 2), ("app/b", 1), ("app/d", 1)]);
        assert_eq!(lost(&before, &now), ["app/b", "app/c"]);
        assert!(lost(&now, &with(&[("app/a", 3), ("app/b", 1), ("app/d", 2)])).is_empty());
        let mut unreadable = before.clone();
        unreadable.apply(&record(1, "app/a", Some(Bytes::from_static(b"\xff"))));
        assert!(lost(&before, &unreadable).is_empty());
    }
}
