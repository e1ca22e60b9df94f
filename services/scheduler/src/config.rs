//! The section of the configuration that only the scheduler reads, and the rules for requests.

use std::sync::Arc;

use jiff::tz::TimeZone;
use redeliver_runtime::Config;
use redeliver_runtime::config::{ConfigError, Findings, OwnSections};
use redeliver_service::topics;
use serde::{Deserialize, Serialize};

use crate::index::redis::RedisConfig;
use crate::request::Rules;

/// The section that only the scheduler reads. All programs share the section `scheduler`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// The scheduler's index.
    pub redis: RedisConfig,
}

impl OwnSections for Sections {
    fn check(&self, _: &Config, findings: &mut Findings<'_>) {
        findings.inside("redis", |at| self.redis.check(at));
    }
}

/// The rules for requests.
///
/// # Errors
/// When the time zone is unknown.
pub fn rules(config: &Config) -> Result<Rules, ConfigError> {
    let scheduler = &config.scheduler;
    let time_zone = TimeZone::get(&scheduler.default_time_zone)
        .map_err(|error| ConfigError::of_field("scheduler.default_time_zone", error.to_string()))?;
    let apps = scheduler.apps.iter();
    Ok(Rules {
        apps: apps
            .map(|(name, app)| (name.clone(), app.topic.as_str().into()))
            .collect(),
        // Also those without long waits: while their configuration changes, workers can already send some.
        pipelines: topics::pipelines(config)
            .into_iter()
            .map(|pipeline| (pipeline.name.to_string(), Arc::new(pipeline)))
            .collect(),
        time_zone,
        max_ahead: scheduler.max_ahead,
        max_request_age: config.kafka.topics.retention,
        max_data: usize::try_from(scheduler.max_data).unwrap_or(usize::MAX),
    })
}
