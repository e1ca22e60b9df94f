//! What the control topic contains.

use std::sync::Arc;

use redeliver_core::{HumanDuration, Record};
use redeliver_store::{State, Table};

use super::name::ControlName;
use super::value::{
    ApplicationControl, Desired, InvalidValue, PipelineControl, RateLimit, Release, Run, TierControl, Value,
};

/// The values of the topic, and what applies because of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The values, by name.
    pub table: Table<Value>,
}

/// Why a value is not applied.
pub type ControlProblem = redeliver_store::DocumentProblem<Value>;

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

impl Snapshot {
    /// What applies to applications, by name. One whose value cannot be read is paused.
    pub fn applications(&self) -> impl Iterator<Item = (&str, ApplicationControl)> {
        self.table.entries().filter_map(|(name, value)| {
            let ControlName::Application(app) = name else {
                return None;
            };
            match applied(name, value) {
                Desired::Application(control) => Some((&**app, control)),
                Desired::Pipeline(_) | Desired::Tier(_) => None,
            }
        })
    }

    /// What applies to a name; `None`: what the configuration says.
    #[must_use]
    pub fn applied(&self, name: &ControlName) -> Option<Desired> {
        self.table.entry(name).map(|value| applied(name, value))
    }

    /// What applies to the workers of a pipeline.
    #[must_use]
    pub fn pipeline(&self, pipeline: &str) -> PipelineState {
        let PipelineControl { run, rate } = match self.applied(&ControlName::pipeline(pipeline)) {
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
    /// No configuration pauses or limits a tier. So a tier that was resumed, or has a high rate, must not
    /// ignore that an operator has restricted the tier of all pipelines: the stricter of the two counts.
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

    /// The desired state of a tier of all pipelines.
    #[must_use]
    pub fn whole_tier(&self, tier: HumanDuration) -> TierState {
        TierState::of(self.tier_control(&ControlName::WholeTier(tier)))
    }

    /// The releases of records that wait in the scheduler, by pipeline.
    pub fn released_long_waits(&self) -> impl Iterator<Item = (&Arc<str>, Arc<Release>)> {
        self.table
            .documents()
            .filter_map(|(name, value)| match (name, &value.desired) {
                (ControlName::LongWaits(pipeline), Desired::Tier(tier)) => {
                    Some((pipeline, tier.release.clone()?))
                }
                _ => None,
            })
    }

    fn tier_control(&self, name: &ControlName) -> TierControl {
        match self.applied(name) {
            Some(Desired::Tier(tier)) => tier,
            Some(Desired::Application(_) | Desired::Pipeline(_)) | None => TierControl::default(),
        }
    }
}

impl State for Snapshot {
    type Document = Value;

    const TOPIC: &'static str = "control topic";
    const NAME: &'static str = "control";
    // While the topic is missing, what it had paused must not run.
    const IS_OPTIONAL: bool = false;

    fn table(&self) -> &Table<Value> {
        &self.table
    }

    fn apply(&mut self, record: &Record) {
        self.table.apply_record(record);
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        for (name, value) in self.table.documents() {
            if before.table.get(name) != Some(value) {
                tracing::info!(
                    %name, revision = value.revision, by = value.changed_by, reason = value.reason, desired = ?value.desired,
                    "control applied"
                );
            }
        }
        // What was paused by it runs again. No change does that: a reset leaves a value.
        for (name, _) in self.table.lost(&before.table) {
            tracing::error!(topic, %name, "control override lost; using configuration");
        }
    }
}

fn applied(name: &ControlName, value: &Result<Arc<Value>, InvalidValue>) -> Desired {
    match value {
        Ok(value) => value.desired.clone(),
        Err(_) => Desired::fail_safe(name),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;
    use redeliver_proto::{Message as _, v1};
    use redeliver_testkit::record;

    use super::*;

    const FAIL_SAFE: ApplicationControl = ApplicationControl {
        run: Some(Run::Paused),
        rate: None,
    };

    pub(crate) fn paused(revision: u64) -> Value {
        Value {
            revision,
            changed_at: None,
            changed_by: "ann".to_owned(),
            reason: "outage".to_owned(),
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

    fn broken() -> Option<Bytes> {
        Some(Bytes::from_static(b"\xff"))
    }

    #[test]
    fn application_with_unreadable_value_is_paused() {
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
                snapshot.apply(&record("app/sms", before));
                snapshot.apply(&record("app/sms", value.clone()));
                assert_eq!(
                    snapshot.applied(&name),
                    Some(Desired::Application(FAIL_SAFE)),
                    "{problem}"
                );
                assert_eq!(snapshot.applications().collect::<Vec<_>>(), [("sms", FAIL_SAFE)]);
                assert_eq!(
                    snapshot.table.problem(&name),
                    Some(ControlProblem::Unreadable(problem))
                );
                assert_eq!(snapshot.table.get(&name), None);
            }
        }
        // A value that can be read ends it.
        snapshot.apply(&record("app/sms", Some(running().encode())));
        assert_eq!(snapshot.problems().len(), 0);
        assert_eq!(snapshot.applied(&name).unwrap().run(), Some(Run::Running));
    }

    fn with(values: &[(&str, Desired)]) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (name, desired) in values {
            let value = Value {
                desired: desired.clone(),
                ..paused(1)
            };
            snapshot.table.insert(name.parse().unwrap(), value);
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
    fn lower_rate_of_tier_applies() {
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
    fn tier_is_paused_for_all_pipelines() {
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
    fn pipeline_and_application_names_are_separate() {
        let run = Some(Run::Paused);
        let pipeline = Desired::Pipeline(super::super::value::PipelineControl { run, rate: None });
        let snapshot = with(&[("pipeline/sms", pipeline)]);
        assert!(snapshot.pipeline("sms").is_paused && !snapshot.pipeline("docs").is_paused);
        assert_eq!(snapshot.applications().count(), 0);
        let snapshot = with(&[("app/sms", Desired::Application(FAIL_SAFE))]);
        assert!(!snapshot.pipeline("sms").is_paused);
    }

    #[test]
    fn unreadable_pipelines_and_tiers_are_paused() {
        // Also one of another kind.
        let of_another_kind = Some(paused(1).encode());
        for value in [broken(), of_another_kind] {
            let mut snapshot = Snapshot::default();
            for name in ["pipeline/docs", "tier/docs/30s", "tier/1m"] {
                snapshot.apply(&record(name, value.clone()));
            }
            let is_paused = |tier| snapshot.tier("docs", HumanDuration::from_secs(tier)).is_paused;
            assert!(snapshot.pipeline("docs").is_paused && is_paused(30) && is_paused(60));
            assert!(!is_paused(5) && snapshot.problems().len() == 3);
        }
    }
}
