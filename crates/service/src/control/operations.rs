//! The operations on control, independent of the protocol. Every service with an API can offer them.
//!
//! | operation | scope |
//! |---|---|
//! | get | `control:read` for the name |
//! | list | `control:read` for some name; the list contains those for which the caller has it |
//! | pause, resume, set the rate, release, reset | `control:write` for the name |
//!
//! The release of a tier of all pipelines is one release for each pipeline.

mod list;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::error_chain::error_chain;
use redeliver_core::token_bucket::RATES;
use redeliver_core::{Clock, HumanDuration, Pipeline};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::ends::topic_ends;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_runtime::config::{Area, Verb};
use redeliver_store::Writer;
use tokio_util::sync::CancellationToken;

use super::change::{Change, ChangeError, ChangeRequest, RefusedChange, WantedRelease};
use super::settings::AppSettings;
use super::snapshot::ControlProblem;
use super::value::{
    ApplicationControl, Desired, PipelineControl, RateLimit, Release, Run, TierControl, Value, read_rate,
    write_application, write_pipeline, write_tier,
};
use super::{Control, ControlError, ControlField, ControlName, Snapshot};
use crate::audit::AuditLog;
use crate::host::Host;
use crate::identity::{Authenticator, CallerName, Identity};
use crate::topics;

pub use list::ControlPage;

/// The maximum size of a reason, in bytes.
const MAX_REASON: usize = 1_000;
/// How long looking up what waits in a tier may take.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often what waits is looked up at most, if the releases of others overtake that.
const MAX_LOOKUPS: usize = 3;

/// The operations.
pub struct Controls {
    control: Control,
    writer: Writer<ChangeRequest>,
    audit: AuditLog,
    apps: AppSettings,
    pipelines: Vec<Pipeline>,
    kafka: KafkaSettings,
    clock: Arc<dyn Clock>,
    authenticator: Authenticator,
    /// Callers get no answer any more.
    gave_up: CancellationToken,
}

/// A change that a caller wants.
#[derive(Clone, Debug, PartialEq)]
pub struct WantedChange {
    /// What to change.
    pub name: ControlName,
    /// How.
    pub verb: ChangeVerb,
    /// Why.
    pub reason: String,
    /// The revision that it must have; 0: not changed yet.
    pub expected_revision: Option<u64>,
}

/// A release of a tier of all pipelines that its caller may make: one change after the other, with [`Controls::release_next`].
#[derive(Debug)]
pub struct TierReleases {
    by: CallerName,
    reason: String,
    /// Those that are left.
    tiers: BTreeSet<ControlName>,
}

/// What a caller can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChangeVerb {
    /// Pauses it.
    Pause,
    /// Lets it run.
    Resume,
    /// Limits its rate. `None`: as the configuration says.
    Rate(Option<RateLimit>),
    /// Releases what waits now.
    Release,
    /// Returns it to the configuration.
    Reset,
}

impl ChangeVerb {
    /// The name of the operation, for logs and metrics.
    const fn operation(self) -> &'static str {
        match self {
            Self::Pause => "pause_control",
            Self::Resume => "resume_control",
            Self::Rate(_) => "set_control_rate",
            Self::Release => "release_tier",
            Self::Reset => "reset_control",
        }
    }
}

impl Controls {
    /// The operations of a service with this name, whose callers this authenticates. When `gave_up` is cancelled, changes in progress
    /// are not waited for.
    #[must_use]
    pub fn new(
        host: &Host,
        service: &'static str,
        control: Control,
        authenticator: Authenticator,
        gave_up: CancellationToken,
    ) -> Self {
        Self {
            writer: control.writer(host),
            audit: AuditLog::new(&host.config, service),
            control,
            apps: AppSettings::of(&host.config),
            pipelines: topics::pipelines(&host.config),
            kafka: host.kafka.clone(),
            clock: host.clock.clone(),
            authenticator,
            gave_up,
        }
    }

    /// What is wanted, and what applies.
    ///
    /// # Errors
    /// When the caller may not see it, or nothing has this name.
    pub fn get(&self, caller: &Identity, name: &ControlName) -> Result<v1::Control, ControlError> {
        self.require(caller, Verb::Read, Some(name), "get_control")?;
        let snapshot = self.snapshot()?;
        self.known(name, &snapshot)?;
        Ok(self.show(name, &snapshot))
    }

    /// Changes what is wanted.
    ///
    /// # Errors
    /// [`ControlError`] says whether something may have been written.
    pub async fn change(&self, caller: &Identity, wanted: WantedChange) -> Result<v1::Control, ControlError> {
        // Before the name is looked up, so that the answer does not reveal what exists.
        self.require(caller, Verb::Write, Some(&wanted.name), wanted.verb.operation())?;
        check_reason(&wanted.reason)?;
        self.known(&wanted.name, &*self.snapshot()?)?;
        self.carry_out(caller.name().clone(), wanted).await
    }

    /// Begins a release of a tier of all pipelines.
    ///
    /// # Errors
    /// When the caller may not do this, or no pipeline has the tier.
    pub fn release_whole_tier(
        &self,
        caller: &Identity,
        name: &ControlName,
        reason: String,
    ) -> Result<TierReleases, ControlError> {
        self.require(caller, Verb::Write, Some(name), "release_whole_tier")?;
        check_reason(&reason)?;
        let ControlName::WholeTier(tier) = name else {
            let problem = "is not a tier of all pipelines; name one, such as tier/30s";
            return Err(invalid(ControlField::Name, problem));
        };
        self.snapshot()?;
        let pipelines = self.pipelines.iter().filter(|pipeline| has_tier(pipeline, *tier));
        let tiers: BTreeSet<_> = pipelines
            .map(|pipeline| ControlName::tier(&pipeline.name, *tier))
            .collect();
        if tiers.is_empty() {
            return Err(ControlError::Unknown(name.clone()));
        }
        Ok(TierReleases {
            by: caller.name().clone(),
            reason,
            tiers,
        })
    }

    /// Releases the tier of the next pipeline, and returns what became of it; `None` after the last one.
    pub async fn release_next(
        &self,
        releases: &mut TierReleases,
    ) -> Option<(ControlName, Result<v1::Control, ControlError>)> {
        let name = releases.tiers.pop_first()?;
        let wanted = WantedChange {
            name: name.clone(),
            verb: ChangeVerb::Release,
            reason: releases.reason.clone(),
            expected_revision: None,
        };
        let released = self.carry_out(releases.by.clone(), wanted).await;
        Some((name, released))
    }

    /// Makes a change that is permitted.
    async fn carry_out(&self, by: CallerName, wanted: WantedChange) -> Result<v1::Control, ControlError> {
        let name = wanted.name.clone();
        let value = tokio::select! {
            biased;
            value = self.write(by, wanted) => value?,
            () = self.gave_up.cancelled() => {
                return Err(ControlError::Unconfirmed("this process is shutting down".to_owned()));
            }
        };
        // It may not have read its own change yet.
        let mut snapshot = (*self.control.snapshot()).clone();
        if let Some(value) = value {
            snapshot.table.insert(name.clone(), value);
        }
        Ok(self.show(&name, &snapshot))
    }

    async fn write(&self, by: CallerName, wanted: WantedChange) -> Result<Option<Arc<Value>>, ControlError> {
        let WantedChange {
            name,
            verb,
            reason,
            expected_revision,
        } = wanted;
        let mut lookups = 1;
        loop {
            let request = ChangeRequest {
                name: name.clone(),
                change: self.change_of(&name, verb).await?,
                by: by.clone(),
                reason: reason.clone(),
                expected_revision,
                at: self.clock.now(),
                audit: self.audit.clone(),
            };
            match self.writer.change(request).await {
                Err(ChangeError::Refused(RefusedChange::Overtaken(revision))) if lookups < MAX_LOOKUPS => {
                    lookups += 1;
                    self.control.wait_applied(&name, revision).await;
                }
                changed => {
                    let changed = changed.map_err(|error| ControlError::of(&name, error))?;
                    return Ok(changed.document);
                }
            }
        }
    }

    async fn change_of(&self, name: &ControlName, verb: ChangeVerb) -> Result<Change, ControlError> {
        Ok(match verb {
            ChangeVerb::Pause | ChangeVerb::Resume | ChangeVerb::Rate(_)
                if matches!(name, ControlName::LongWaits(_)) =>
            {
                return Err(invalid(ControlField::Name, "can only be released"));
            }
            ChangeVerb::Pause => Change::Run(Run::Paused),
            ChangeVerb::Resume => Change::Run(Run::Running),
            ChangeVerb::Rate(rate) => Change::Rate(rate),
            ChangeVerb::Reset => Change::Reset,
            ChangeVerb::Release => Change::Release(self.release(name).await?),
        })
    }

    /// The release of what waits in a tier now.
    async fn release(&self, name: &ControlName) -> Result<WantedRelease, ControlError> {
        let pipeline = |name: &Arc<str>| self.pipelines.iter().find(|known| known.name == *name);
        let topic = match name {
            ControlName::Tier(name, tier) => pipeline(name).map(|pipeline| pipeline.tier_topic(*tier)),
            ControlName::LongWaits(name) => pipeline(name).and_then(|pipeline| pipeline.long_waits.clone()),
            ControlName::Application(_) | ControlName::Pipeline(_) | ControlName::WholeTier(_) => {
                let problem = "has nothing to release; name a tier, such as tier/docs/30s";
                return Err(invalid(ControlField::Name, problem));
            }
        };
        let topic = topic.ok_or_else(|| ControlError::Unknown(name.clone()))?;
        // Before the lookup: a release that is not known yet may be about a newer topic of the same name.
        let snapshot = self.control.snapshot();
        let known = snapshot.table.get(name).map_or(0, |value| value.revision);
        let (kafka, at) = (self.kafka.clone(), self.clock.now());
        let read = tokio::task::spawn_blocking(move || topic_ends(&kafka, &topic, LOOKUP_TIMEOUT)).await;
        let ends = match read {
            Ok(read) => read.map_err(|error| ControlError::Unavailable(error_chain(&error)))?,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(cancelled) => return Err(ControlError::Unavailable(cancelled.to_string())),
            },
        };
        let Some(topic) = ends.topic else {
            return Err(ControlError::NoTopicIds);
        };
        let release = Release {
            topic,
            ends: ends.ends,
            at: Some(at),
        };
        Ok(WantedRelease {
            release: Arc::new(release),
            known,
        })
    }

    fn require(
        &self,
        caller: &Identity,
        verb: Verb,
        name: Option<&ControlName>,
        operation: &str,
    ) -> Result<(), ControlError> {
        let name = name.map(ControlName::in_scopes);
        caller
            .require(Area::Control, verb, name.as_deref())
            .map_err(|refusal| {
                self.authenticator.refused(&refusal, operation);
                refusal.into()
            })
    }

    fn snapshot(&self) -> Result<Arc<Snapshot>, ControlError> {
        if self.control.is_known() {
            Ok(self.control.snapshot())
        } else {
            Err(ControlError::NotReady)
        }
    }

    /// Refuses what neither the configuration nor control knows: a name with a mistake would pause nothing.
    fn known(&self, name: &ControlName, snapshot: &Snapshot) -> Result<(), ControlError> {
        let mut pipelines = self.pipelines.iter();
        let is_configured = match name {
            ControlName::Application(app) => self.apps.get(app).is_some(),
            ControlName::Pipeline(name) => pipelines.any(|pipeline| pipeline.name == *name),
            ControlName::Tier(name, tier) => {
                pipelines.any(|pipeline| pipeline.name == *name && has_tier(pipeline, *tier))
            }
            ControlName::WholeTier(tier) => pipelines.any(|pipeline| has_tier(pipeline, *tier)),
            ControlName::LongWaits(name) => {
                pipelines.any(|pipeline| pipeline.name == *name && pipeline.long_waits.is_some())
            }
        };
        if is_configured || snapshot.table.entry(name).is_some() {
            return Ok(());
        }
        Err(ControlError::Unknown(name.clone()))
    }

    /// What is wanted, and what applies.
    fn show(&self, name: &ControlName, snapshot: &Snapshot) -> v1::Control {
        let (value, problem) = (snapshot.table.get(name), snapshot.table.problem(name));
        let desired = value.map_or_else(|| Desired::default_of(name), |value| value.desired.clone());
        // What cannot be read is not known to be as the configuration says.
        let is_unreadable = matches!(problem, Some(ControlProblem::Unreadable(_)));
        v1::Control {
            name: name.to_string(),
            revision: value.map_or(0, |value| value.revision),
            changed_at: value.and_then(|value| value.changed_at).map(to_timestamp),
            changed_by: value.map(|value| value.changed_by.clone()).unwrap_or_default(),
            reason: value.map(|value| value.reason.clone()).unwrap_or_default(),
            desired: (!is_unreadable).then(|| match &desired {
                Desired::Application(app) => v1::control::Desired::Application(write_application(app)),
                Desired::Pipeline(pipeline) => v1::control::Desired::Pipeline(write_pipeline(pipeline)),
                Desired::Tier(tier) => v1::control::Desired::Tier(write_tier(tier)),
            }),
            effective: Some(self.effective(name, snapshot)),
            problem: problem.map(|problem| problem.to_string()).unwrap_or_default(),
        }
    }

    /// What applies.
    fn effective(&self, name: &ControlName, snapshot: &Snapshot) -> v1::control::Effective {
        use v1::control::Effective;
        match name {
            ControlName::Application(app) => {
                let applied = match snapshot.applied(name) {
                    Some(Desired::Application(app)) => app,
                    Some(Desired::Pipeline(_) | Desired::Tier(_)) | None => ApplicationControl::default(),
                };
                let state = self.apps.get(app).unwrap_or_default().controlled_by(&applied);
                Effective::EffectiveApplication(write_application(&ApplicationControl {
                    run: Some(run(state.is_paused)),
                    rate: state.rate.map(RateLimit::PerSecond),
                }))
            }
            ControlName::Pipeline(pipeline) => {
                let state = snapshot.pipeline(pipeline);
                Effective::EffectivePipeline(write_pipeline(&PipelineControl {
                    run: Some(run(state.is_paused)),
                    rate: state.rate,
                }))
            }
            ControlName::Tier(pipeline, tier) => {
                let state = snapshot.tier(pipeline, *tier);
                Effective::EffectiveTier(write_tier(&TierControl {
                    run: Some(run(state.is_paused)),
                    rate: state.rate.map(RateLimit::PerSecond),
                    release: state.release,
                }))
            }
            ControlName::LongWaits(_) => {
                let release = match snapshot.table.get(name).map(|value| &value.desired) {
                    Some(Desired::Tier(tier)) => tier.release.clone(),
                    _ => None,
                };
                Effective::EffectiveTier(write_tier(&TierControl {
                    run: Some(Run::Running),
                    rate: None,
                    release,
                }))
            }
            ControlName::WholeTier(tier) => {
                let state = snapshot.whole_tier(*tier);
                Effective::EffectiveTier(write_tier(&TierControl {
                    run: Some(run(state.is_paused)),
                    rate: state.rate.map(RateLimit::PerSecond),
                    release: None,
                }))
            }
        }
    }
}

/// Whether a pipeline has a tier in the configuration.
fn has_tier(pipeline: &Pipeline, tier: HumanDuration) -> bool {
    pipeline.policy.tiers().contains(&tier)
}

fn check_reason(reason: &str) -> Result<(), ControlError> {
    if reason.len() <= MAX_REASON && !reason.contains(|c: char| c.is_control() && c != '\n') {
        return Ok(());
    }
    let problem = format!("must have at most {MAX_REASON} bytes, without control characters");
    Err(invalid(ControlField::Reason, problem))
}

const fn run(is_paused: bool) -> Run {
    if is_paused { Run::Paused } else { Run::Running }
}

/// An invalid field of a request.
pub(super) fn invalid(field: ControlField, problem: impl Into<String>) -> ControlError {
    ControlError::Invalid {
        field,
        problem: problem.into(),
    }
}

/// Reads a limit of a rate; `None` means as the settings say.
///
/// # Errors
/// When it is missing or out of range.
pub fn read_limit(rate: Option<&v1::RateLimit>) -> Result<Option<RateLimit>, ControlError> {
    rate.map(read_rate).transpose().map_err(|_| {
        let (least, most) = (RATES.start(), RATES.end());
        invalid(
            ControlField::Rate,
            format!("must be from {least} to {most} per second, or unlimited"),
        )
    })
}
