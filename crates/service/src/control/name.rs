//! The names of what can be controlled: the keys of the control topic.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use redeliver_core::HumanDuration;
use redeliver_core::pipeline::is_topic_name;

/// The maximum size of a name, in bytes. Names of topics have at most 249.
pub(super) const MAX_NAME: usize = 600;
const APPLICATION: &str = "app/";
const PIPELINE: &str = "pipeline/";
const TIER: &str = "tier/";
/// In place of a tier: the records of a pipeline that wait in the scheduler.
const SCHEDULER: &str = "scheduler";

/// What can be controlled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ControlName {
    /// An application of the scheduler: `app/<name>`.
    Application(Arc<str>),
    /// The workers of a pipeline: `pipeline/<name>`.
    Pipeline(Arc<str>),
    /// A tier of a pipeline: `tier/<pipeline>/<tier>`.
    Tier(Arc<str>, HumanDuration),
    /// A tier of all pipelines: `tier/<tier>`.
    WholeTier(HumanDuration),
    /// The records of a pipeline that wait in the scheduler: `tier/<pipeline>/scheduler`.
    LongWaits(Arc<str>),
}

/// A name of an unknown kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is not the name of something that can be controlled; write app/APPLICATION, pipeline/PIPELINE, tier/PIPELINE/TIER, tier/PIPELINE/scheduler or tier/TIER, such as tier/docs/30s"
)]
pub struct UnknownName;

impl ControlName {
    /// The application of this name.
    #[must_use]
    pub fn application(app: &str) -> Self {
        Self::Application(app.into())
    }

    /// The pipeline of this name.
    #[must_use]
    pub fn pipeline(pipeline: &str) -> Self {
        Self::Pipeline(pipeline.into())
    }

    /// The tier of the pipeline of this name.
    #[must_use]
    pub fn tier(pipeline: &str, tier: HumanDuration) -> Self {
        Self::Tier(pipeline.into(), tier)
    }

    /// The name that scopes contain: that of the application, and otherwise the whole name.
    #[must_use]
    pub fn in_scopes(&self) -> String {
        match self {
            Self::Application(app) => app.to_string(),
            other => other.to_string(),
        }
    }
}

impl FromStr for ControlName {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        if text.len() > MAX_NAME || text.contains(char::is_control) {
            return Err(UnknownName);
        }
        if let Some(app) = text.strip_prefix(APPLICATION).filter(|app| !app.is_empty()) {
            return Ok(Self::application(app));
        }
        if let Some(pipeline) = text.strip_prefix(PIPELINE) {
            return pipeline_of(pipeline).map(Self::Pipeline);
        }
        let tier = text.strip_prefix(TIER).ok_or(UnknownName)?;
        match tier.split_once('/') {
            Some((pipeline, SCHEDULER)) => pipeline_of(pipeline).map(Self::LongWaits),
            Some((pipeline, tier)) => Ok(Self::Tier(pipeline_of(pipeline)?, tier_of(tier)?)),
            None => tier_of(tier).map(Self::WholeTier),
        }
    }
}

fn pipeline_of(text: &str) -> Result<Arc<str>, UnknownName> {
    // The name of a pipeline is that of topics.
    is_topic_name(text).then(|| text.into()).ok_or(UnknownName)
}

fn tier_of(text: &str) -> Result<HumanDuration, UnknownName> {
    text.parse().map_err(|_| UnknownName)
}

impl fmt::Display for ControlName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Application(app) => write!(f, "{APPLICATION}{app}"),
            Self::Pipeline(pipeline) => write!(f, "{PIPELINE}{pipeline}"),
            Self::Tier(pipeline, tier) => write!(f, "{TIER}{pipeline}/{tier}"),
            Self::WholeTier(tier) => write!(f, "{TIER}{tier}"),
            Self::LongWaits(pipeline) => write!(f, "{TIER}{pipeline}/{SCHEDULER}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_kinds_round_trip() {
        for text in [
            "app/sms",
            "app/a/b",
            "app/pipeline: ä",
            "pipeline/docs.v2",
            "tier/docs/30s",
            "tier/docs/scheduler",
            "tier/1m",
        ] {
            assert_eq!(text.parse::<ControlName>().unwrap().to_string(), text);
        }
        // A tier has one name, however it is written.
        assert_eq!(
            "tier/docs/60s".parse::<ControlName>().unwrap().to_string(),
            "tier/docs/1m"
        );
        let long = format!("app/{}", "x".repeat(MAX_NAME));
        for text in [
            "",
            "app",
            "app/",
            "sms",
            "planet/mars",
            "app/\n",
            &long,
            "pipeline/",
            "pipeline/a/b",
            "pipeline/ä",
            "tier/",
            "tier/docs",
            "tier/docs/",
            "tier/docs/soon",
            "tier//30s",
            "tier/scheduler",
            "tier/a/b/30s",
        ] {
            assert_eq!(text.parse::<ControlName>(), Err(UnknownName), "{text}");
        }
    }

    #[test]
    fn only_applications_need_no_kind() {
        for (text, scope) in [
            ("app/sms", "sms"),
            ("pipeline/sms", "pipeline/sms"),
            ("tier/sms/30s", "tier/sms/30s"),
            ("tier/30s", "tier/30s"),
        ] {
            assert_eq!(text.parse::<ControlName>().unwrap().in_scopes(), scope);
        }
    }
}
