//! The rules for requests, from the configuration.

use std::sync::Arc;

use jiff::tz::TimeZone;
use redeliver_runtime::Config;
use redeliver_runtime::config::ConfigError;
use redeliver_service::topics;

use crate::request::Rules;

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
