//! Pauses, resumes, limits and releases pipelines, tiers and applications.

use redeliver_client::messages::control::{Desired, Effective};
use redeliver_client::messages::rate_limit::Limit;
use redeliver_client::messages::{
    ApplicationControl, ChangeControlRequest, Control, GetControlRequest, OverviewSelection, PipelineControl,
    RateLimit, RunState, SetControlRateRequest,
};
use serde::Deserialize;

use super::{Act, Fact, Sheet, accept_repeated, by, fact, seen, shown};
use crate::backend::Backend;
use crate::command::{Command, or};
use crate::form::{self, Field, Fields, required};
use crate::html;
use crate::page::{Frame, Part, Problem, address, segment};
use crate::pages::pipeline;

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verb {
    #[default]
    Pause,
    Resume,
    /// Return to the configuration.
    Reset,
    Rate,
    Release,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Reset => "reset",
            Self::Rate => "rate",
            Self::Release => "release",
        }
    }
}

/// The form for what has this name, such as `pipeline/docs`.
pub(crate) fn link(name: &str, verb: Verb) -> String {
    address("/act/control", &[("name", name), ("verb", verb.name())])
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    name: String,
    verb: Verb,
    revision: String,
    /// When the last release that the caller has seen was wanted.
    released: String,
    rate: String,
    reason: String,
}

impl Fields for Change {}

impl Change {
    async fn control(&self, backend: &Backend) -> Part<Control> {
        let request = GetControlRequest {
            name: self.name.clone(),
        };
        Ok(backend.controls(&self.name).get(request).await?)
    }

    /// The pipeline that it is about, and the tier or `scheduler`.
    fn pipeline(&self) -> Option<(&str, Option<&str>)> {
        match self.name.split_once('/')? {
            ("pipeline", pipeline) => Some((pipeline, None)),
            ("tier", tier) => {
                let (pipeline, place) = tier.split_once('/')?;
                Some((pipeline, Some(place)))
            }
            _ => None,
        }
    }

    /// What waits there now.
    async fn affected(&self, backend: &Backend) -> Part<Vec<Fact>> {
        let Some((pipeline, place)) = self.pipeline() else {
            let Some(app) = self.name.strip_prefix("app/") else {
                return Ok(Vec::new());
            };
            let stats = backend.jobs().stats(Some(app), 60).await?;
            return Ok(vec![
                fact("Scheduled jobs", html::number(stats.scheduled)),
                fact("Due now", html::number(stats.due)),
            ]);
        };
        let selection = OverviewSelection {
            pipeline: pipeline.to_owned(),
            ..OverviewSelection::default()
        };
        let overview = backend.overview().overview(selection).await?;
        let Some(pipeline) = overview.pipelines.into_iter().next() else {
            return Ok(Vec::new());
        };
        let mut facts = Vec::new();
        if place.is_none() {
            facts.push(fact("Lag of the source", pipeline::count(pipeline.lag.as_ref())));
        }
        for waiting in &pipeline.waiting {
            if place.is_none_or(|place| place == waiting.place) {
                let records = pipeline::count(waiting.waiting.as_ref());
                facts.push(fact("Waiting", format!("{records} in {}", waiting.place)));
            }
        }
        if place == Some("scheduler") {
            facts.push(fact("Waiting", "see Waiting, place scheduler, for the number"));
        }
        Ok(facts)
    }

    fn rate(&self) -> Part<Option<Limit>> {
        match required("rate", &self.rate)? {
            "unlimited" => Ok(Some(Limit::Unlimited(true))),
            "configured" => Ok(None),
            rate => match rate.parse() {
                Ok(rate) if (0.001..=1_000_000.0).contains(&rate) => Ok(Some(Limit::PerSecond(rate))),
                _ => Err(Problem::invalid(format!(
                    "`rate` must be 0.001 to 1000000, `unlimited` or `configured`; it is `{rate}`."
                ))),
            },
        }
    }

    fn needs_reason(&self) -> bool {
        matches!(self.verb, Verb::Pause | Verb::Rate | Verb::Release)
    }

    /// Whether the last change of a control was this one.
    fn is_wanted(&self, control: &Control) -> Part<bool> {
        let (state, rate) = effective(control);
        let is_wanted = match self.verb {
            Verb::Pause => state == RunState::Paused,
            Verb::Resume => state == RunState::Running,
            Verb::Rate => self.rate()? == rate,
            Verb::Reset => is_as_configured(control),
            Verb::Release => released(control) != self.released,
        };
        let reason = self.reason.trim();
        Ok(is_wanted && (reason.is_empty() || reason == control.reason))
    }

    fn command(&self, revision: &str) -> Command {
        let verb = match self.verb {
            Verb::Reset => "resume --as-configured",
            verb => verb.name(),
        };
        let reason = if self.needs_reason() { "REASON" } else { "" };
        let command = Command::new(verb)
            .option("--expected-revision", revision)
            .option("--reason", or(&self.reason, reason))
            .argument(&self.name);
        match self.verb {
            Verb::Rate => command.argument(or(&self.rate, "RATE")),
            _ => command,
        }
    }

    fn back(&self) -> String {
        match (self.pipeline(), self.name.strip_prefix("app/")) {
            (Some((pipeline, _)), _) => segment("/pipelines", pipeline),
            (None, Some(app)) => address("/jobs", &[("app", app)]),
            (None, None) => "/".to_owned(),
        }
    }
}

impl Act for Change {
    const SECTION: &'static str = "/";

    fn forget(&mut self) {
        self.revision.clear();
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let control = self.control(backend).await?;
        let revision = shown(&self.revision, control.revision);
        let released = match self.revision.as_str() {
            "" => released(&control),
            _ => self.released.clone(),
        };
        let (state, rate) = effective(&control);
        let mut facts = vec![
            fact("Name", &self.name),
            fact("State", state.name().unwrap_or_else(|| "running".to_owned())),
            fact(
                "Rate",
                match rate {
                    Some(Limit::PerSecond(rate)) => format!("at most {rate}/s"),
                    Some(Limit::Unlimited(_)) => "unlimited".to_owned(),
                    None => "as configured".to_owned(),
                },
            ),
        ];
        if control.revision > 0 {
            let changed = by(&control.changed_by, control.changed_at, &control.reason, frame);
            facts.push(("Changed", changed));
        }
        match self.affected(backend).await {
            Ok(affected) => facts.extend(affected),
            Err(problem) => facts.push(fact("Waiting", format!("not known: {}", problem.detail))),
        }
        let mut warnings = Vec::new();
        if !control.problem.is_empty() {
            warnings.push(control.problem.clone());
        }
        if let Some(tier) = self.name.strip_prefix("tier/").filter(|tier| !tier.contains('/')) {
            warnings.push(format!("This is about the tier {tier} of all pipelines."));
        }
        let name = &self.name;
        let (title, button) = match self.verb {
            Verb::Pause => (format!("Pause {name}"), format!("Pause {name}")),
            Verb::Resume => (format!("Resume {name}"), format!("Resume {name}")),
            Verb::Reset => (
                format!("Return {name} to the configuration"),
                "Return to the pause and the rate of the configuration".to_owned(),
            ),
            Verb::Rate => (format!("Rate of {name}"), format!("Set the rate of {name}")),
            Verb::Release => (
                format!("Release {name}"),
                "Release what waits there now, without waiting for its due times".to_owned(),
            ),
        };
        let reason = Field::reason(&self.reason);
        let mut fields = vec![
            Field::hidden("name", name),
            Field::hidden("verb", self.verb.name()),
            Field::hidden("revision", &revision),
            Field::hidden("released", released),
            if self.needs_reason() {
                reason.required()
            } else {
                reason
            },
        ];
        if self.verb == Verb::Rate {
            let field = Field::line("rate", "At most per second", &self.rate).required();
            fields.push(
                field.help("In all processes together: 0.001 to 1000000, `unlimited` or `configured`."),
            );
        }
        Ok(Sheet {
            facts,
            warnings,
            fields,
            ..Sheet::new(title, button, self.command(&revision), self.back())
        })
    }

    async fn run(&self, backend: &Backend, _: &str) -> Part<Option<String>> {
        let client = backend.controls(&self.name);
        let expected_revision = seen(&self.revision)?;
        let reason = form::reason(&self.reason)?.to_owned();
        if self.needs_reason() {
            required("reason", &reason)?;
        }
        let change = ChangeControlRequest {
            name: self.name.clone(),
            reason: reason.clone(),
            expected_revision,
        };
        let changed = match self.verb {
            Verb::Pause => client.pause(change).await,
            Verb::Resume => client.resume(change).await,
            Verb::Reset => client.reset(change).await,
            Verb::Release => client.release(change).await,
            Verb::Rate => {
                let change = SetControlRateRequest {
                    name: self.name.clone(),
                    rate: self.rate()?.map(|limit| RateLimit { limit: Some(limit) }),
                    reason: reason.clone(),
                    expected_revision,
                };
                client.set_rate(change).await
            }
        };
        if let Err(error) = changed {
            let found = async {
                let control = self.control(backend).await?;
                Ok((control.revision, self.is_wanted(&control)?))
            };
            accept_repeated(error, expected_revision, found).await?;
        }
        Ok(Some(self.back()))
    }
}

/// Whether nothing is wanted that the configuration does not say.
fn is_as_configured(control: &Control) -> bool {
    match &control.desired {
        Some(Desired::Application(app)) => *app == ApplicationControl::default(),
        Some(Desired::Pipeline(pipeline)) => *pipeline == PipelineControl::default(),
        Some(Desired::Tier(tier)) => tier.state() == RunState::Unspecified && tier.rate.is_none(),
        None => false,
    }
}

/// When the last release was wanted; empty if there was none.
fn released(control: &Control) -> String {
    let release = match &control.desired {
        Some(Desired::Tier(tier)) => tier.release.as_ref(),
        _ => None,
    };
    let at = release.and_then(|release| release.released_at);
    at.map_or_else(String::new, |at| format!("{}.{:09}", at.seconds, at.nanos))
}

/// What applies now.
pub(in crate::pages) fn effective(control: &Control) -> (RunState, Option<Limit>) {
    let (state, rate) = match &control.effective {
        Some(Effective::EffectiveApplication(app)) => (app.state(), app.rate),
        Some(Effective::EffectivePipeline(pipeline)) => (pipeline.state(), pipeline.rate),
        Some(Effective::EffectiveTier(tier)) => (tier.state(), tier.rate),
        None => (RunState::Unspecified, None),
    };
    (state, rate.and_then(|rate| rate.limit))
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::{TierControl, TierRelease};

    use super::*;

    #[test]
    fn only_same_changes_are_repetitions() {
        let wanted = |verb, desired: &TierControl, released: &str| {
            let form = Change {
                verb,
                released: released.to_owned(),
                ..Change::default()
            };
            let control = Control {
                desired: Some(Desired::Tier(desired.clone())),
                ..Control::default()
            };
            form.is_wanted(&control).unwrap()
        };
        let mut tier = TierControl {
            release: Some(TierRelease {
                released_at: Some(prost_types::Timestamp { seconds: 7, nanos: 5 }),
                ..TierRelease::default()
            }),
            ..TierControl::default()
        };
        assert!(wanted(Verb::Release, &tier, "") && wanted(Verb::Release, &tier, "6.000000000"));
        assert!(
            !wanted(Verb::Release, &tier, "7.000000005"),
            "another change after it"
        );
        assert!(wanted(Verb::Reset, &tier, ""));
        tier.state = RunState::Paused.into();
        assert!(!wanted(Verb::Reset, &tier, ""));
    }
}
