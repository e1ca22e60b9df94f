//! Control as JSON.

use redeliver_proto::convert::from_timestamp;
use redeliver_proto::v1;
use redeliver_proto::v1::rate_limit::Limit;
use serde::Serialize;
use utoipa::ToSchema;

/// The desired state of an application that an operator has set, and the effective one.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ControlView {
    /// Such as `app/sms`.
    name: String,
    /// Increases with each change. 0: it was never changed.
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed_at: Option<String>,
    /// The name of the caller.
    #[serde(skip_serializing_if = "String::is_empty")]
    changed_by: String,
    /// Why, in the words of the caller.
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    /// The desired state. Missing fields are as the configuration says. Missing completely if it cannot be
    /// read.
    #[serde(skip_serializing_if = "Option::is_none")]
    desired: Option<StateView>,
    /// The effective state. Without a rate, there is no limit.
    effective: StateView,
    /// Why the stored value is not, or only partially, applied.
    #[serde(skip_serializing_if = "String::is_empty")]
    problem: String,
}

/// The state of an application.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StateView {
    /// `running` or `paused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    /// How many jobs are dispatched per second at most, by all schedulers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_per_second: Option<f64>,
    /// `true`: there is no limit, whatever the configuration says.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unlimited: bool,
}

impl From<v1::ApplicationControl> for StateView {
    fn from(app: v1::ApplicationControl) -> Self {
        let limit = app.rate.as_ref().and_then(|rate| rate.limit);
        Self {
            state: match app.state() {
                v1::RunState::Unspecified => None,
                v1::RunState::Running => Some("running"),
                v1::RunState::Paused => Some("paused"),
            },
            rate_per_second: match limit {
                Some(Limit::PerSecond(rate)) => Some(rate),
                Some(Limit::Unlimited(_)) | None => None,
            },
            unlimited: limit == Some(Limit::Unlimited(true)),
        }
    }
}

/// Of an application.
impl From<v1::Control> for ControlView {
    fn from(control: v1::Control) -> Self {
        let desired = match control.desired {
            Some(v1::control::Desired::Application(app)) => Some(StateView::from(app)),
            Some(v1::control::Desired::Pipeline(_) | v1::control::Desired::Tier(_)) | None => None,
        };
        let effective = match control.effective {
            Some(v1::control::Effective::EffectiveApplication(app)) => StateView::from(app),
            Some(v1::control::Effective::EffectivePipeline(_) | v1::control::Effective::EffectiveTier(_))
            | None => StateView::default(),
        };
        let changed_at = control.changed_at.as_ref().and_then(from_timestamp);
        Self {
            name: control.name,
            revision: control.revision,
            changed_at: changed_at.map(|time| time.to_string()),
            changed_by: control.changed_by,
            reason: control.reason,
            desired,
            effective,
            problem: control.problem,
        }
    }
}
