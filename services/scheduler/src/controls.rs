//! The effective state of applications: the controls and, for the rest, the settings.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use redeliver_service::control::settings::{AppSettings, AppState};
use redeliver_service::control::value::Release;
use redeliver_service::control::{Control, Snapshot};

use crate::job::{Job, Kind};

/// The effective state of all applications. Those that are neither paused nor limited are not in here.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AppStates {
    /// The applications of which no job is dispatched.
    pub(crate) paused: BTreeSet<String>,
    /// How many jobs are dispatched per second, by all shards together.
    pub(crate) rates: BTreeMap<String, f64>,
    /// Which long waits do not wait until they are due, by pipeline.
    pub(crate) released_waits: BTreeMap<Arc<str>, Arc<Release>>,
}

impl AppStates {
    /// What follows from the settings and from what operators want. That also counts for applications that are not in the
    /// configuration any more: their jobs may still wait.
    pub(crate) fn combine(settings: &AppSettings, control: &Snapshot) -> Self {
        let mut states: BTreeMap<String, AppState> = settings
            .iter()
            .map(|(app, state)| (app.to_owned(), state))
            .collect();
        for (app, control) in control.applications() {
            let state = states.entry(app.to_owned()).or_default();
            *state = state.controlled_by(&control);
        }
        let paused = states.iter().filter(|(_, state)| state.is_paused);
        Self {
            paused: paused.map(|(app, _)| app.clone()).collect(),
            rates: states
                .iter()
                .filter_map(|(app, state)| Some((app.clone(), state.rate?)))
                .collect(),
            released_waits: control
                .released_long_waits()
                .map(|(pipeline, release)| (pipeline.clone(), release))
                .collect(),
        }
    }

    pub(crate) fn is_paused(&self, app: &str) -> bool {
        self.paused.contains(app)
    }

    /// Whether the application of a job is paused. A pipeline can have the name of an application.
    pub(crate) fn pauses(&self, job: &Job) -> bool {
        job.kind == Kind::App && self.is_paused(&job.app)
    }
}

/// The effective state of all applications, which changes over time.
#[derive(Debug)]
pub(crate) struct LiveAppStates {
    settings: AppSettings,
    /// `None`: only the settings count.
    control: Option<Control>,
    /// The last result, and what it was computed from.
    last: Mutex<(Arc<Snapshot>, Arc<AppStates>)>,
}

impl LiveAppStates {
    pub(crate) fn new(settings: AppSettings, control: Option<Control>) -> Self {
        let nothing = Arc::<Snapshot>::default();
        let states = Arc::new(AppStates::combine(&settings, &nothing));
        Self {
            settings,
            control,
            last: Mutex::new((nothing, states)),
        }
    }

    /// The current state. The same [`Arc`] is returned until something changes.
    pub(crate) fn current(&self) -> Arc<AppStates> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(control) = &self.control {
            let snapshot = control.snapshot();
            if !Arc::ptr_eq(&snapshot, &last.0) {
                let states = Arc::new(AppStates::combine(&self.settings, &snapshot));
                *last = (snapshot, states);
            }
        }
        last.1.clone()
    }
}

#[cfg(test)]
impl LiveAppStates {
    /// States that do not change.
    pub(crate) fn fixed(states: AppStates) -> Self {
        Self {
            settings: AppSettings::default(),
            control: None,
            last: Mutex::new((Arc::default(), Arc::new(states))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unrestricted_applications_are_left_out() {
        let settings: AppSettings = [
            ("free".to_owned(), AppState::default()),
            (
                "paused".to_owned(),
                AppState {
                    is_paused: true,
                    rate: None,
                },
            ),
            (
                "slow".to_owned(),
                AppState {
                    is_paused: false,
                    rate: Some(2.0),
                },
            ),
        ]
        .into_iter()
        .collect();
        assert_eq!(settings.restricted().collect::<Vec<_>>(), ["paused", "slow"]);
        let states = AppStates::combine(&settings, &Snapshot::default());
        assert!(states.is_paused("paused") && !states.is_paused("free"));
        assert_eq!(states.rates, [("slow".to_owned(), 2.0)].into());
    }
}
