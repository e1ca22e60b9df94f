//! What the configuration says about applications, and what follows from it and from what operators want.

use std::collections::BTreeMap;

use redeliver_runtime::Config;

use super::value::{ApplicationControl, RateLimit, Run};

/// What applies to one application.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AppState {
    /// None of its jobs is dispatched.
    pub is_paused: bool,
    /// How many of its jobs are dispatched per second, by all shards together.
    pub rate: Option<f64>,
}

impl AppState {
    /// What an operator wants comes first.
    #[must_use]
    pub fn controlled_by(self, control: &ApplicationControl) -> Self {
        Self {
            is_paused: match control.run {
                None => self.is_paused,
                Some(Run::Running) => false,
                Some(Run::Paused) => true,
            },
            rate: control.rate.map_or(self.rate, RateLimit::per_second),
        }
    }
}

/// The settings of applications, by name.
#[derive(Clone, Debug, Default)]
pub struct AppSettings(BTreeMap<String, AppState>);

impl AppSettings {
    /// Those of a configuration.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let apps = config.scheduler.apps.iter().map(|(name, app)| {
            let state = AppState {
                is_paused: app.paused,
                rate: app.rate,
            };
            (name.clone(), state)
        });
        Self(apps.collect())
    }

    /// The setting of an application; `None` if it is not in the configuration.
    #[must_use]
    pub fn get(&self, app: &str) -> Option<AppState> {
        self.0.get(app).copied()
    }

    /// All settings, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, AppState)> {
        self.0.iter().map(|(app, state)| (app.as_str(), *state))
    }

    /// The applications that are paused or limited.
    pub fn restricted(&self) -> impl Iterator<Item = &str> {
        let restricted = self.0.iter().filter(|(_, state)| **state != AppState::default());
        restricted.map(|(app, _)| app.as_str())
    }
}

impl FromIterator<(String, AppState)> for AppSettings {
    fn from_iter<T: IntoIterator<Item = (String, AppState)>>(settings: T) -> Self {
        Self(settings.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_takes_precedence_over_settings() {
        let setting = AppState {
            is_paused: true,
            rate: Some(5.0),
        };
        let state = |is_paused, rate| AppState { is_paused, rate };
        for (run, rate, expected) in [
            (None, None, setting),
            (Some(Run::Running), None, state(false, Some(5.0))),
            (Some(Run::Paused), Some(RateLimit::Unlimited), state(true, None)),
            (None, Some(RateLimit::PerSecond(0.5)), state(true, Some(0.5))),
        ] {
            let control = ApplicationControl { run, rate };
            assert_eq!(setting.controlled_by(&control), expected, "{control:?}");
        }
    }
}
