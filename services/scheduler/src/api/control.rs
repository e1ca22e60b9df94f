//! The operations on control, independent of the protocol. What they do with the topic is in [`redeliver_service::control`].
//!
//! | operation | scope |
//! |---|---|
//! | get | `control:read` for the application |
//! | list | `control:read` for some application; the list contains those for which the caller has it |
//! | pause, resume, set the rate, reset | `control:write` for the application |

use std::collections::BTreeSet;

use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_runtime::config::{Area, Verb};
use redeliver_service::audit::Author;
use redeliver_service::control::change::{Change, ChangeRequest, ControlWriter};
use redeliver_service::control::snapshot::Problem;
use redeliver_service::control::value::{
    ApplicationControl, Desired, RATES, RateLimit, Run, Value, read_rate, write_application,
};
use redeliver_service::control::{Control, ControlName, Snapshot};
use redeliver_service::identity::Identity;

use super::error::RequestError;
use super::jobs::Jobs;
use crate::controls::AppSettings;
use crate::index::Index;
use crate::request::{Field, Format};

mod error;
pub(super) mod grpc;
pub(super) mod rest;
mod view;

pub(super) use error::ControlError;
pub(super) use view::{ControlView, StateView};

/// The maximum size of a reason, in bytes.
const MAX_WHY: usize = 1_000;

/// What the operations need.
pub(crate) struct Controls {
    pub(crate) control: Control,
    pub(crate) writer: ControlWriter,
    pub(crate) settings: AppSettings,
}

/// A request to change an application.
pub(crate) struct ChangeControl {
    pub(crate) app: String,
    pub(crate) change: Change,
    pub(crate) why: String,
    pub(crate) expected_revision: Option<u64>,
}

impl Controls {
    /// What is wanted of an application, and what applies, as a process has read it.
    fn show(&self, app: &str, snapshot: &Snapshot) -> v1::Control {
        let name = ControlName::application(app);
        let (obeyed, problem) = (snapshot.application(&name), snapshot.problem(&name));
        let shown = self.show_value(app, snapshot.get(&name), obeyed.unwrap_or_default());
        v1::Control {
            // What cannot be read is not known to be as the configuration says.
            desired: shown
                .desired
                .filter(|_| !matches!(problem, Some(Problem::Unreadable(_)))),
            problem: problem.map(|problem| problem.to_string()).unwrap_or_default(),
            ..shown
        }
    }

    fn show_value(&self, app: &str, value: Option<&Value>, obeyed: ApplicationControl) -> v1::Control {
        let desired = value.map(|value| match value.desired {
            Desired::Application(app) => app,
        });
        let setting = self.settings.get(app).unwrap_or_default();
        let effective = setting.controlled_by(&obeyed);
        let effective = ApplicationControl {
            run: Some(if effective.is_paused {
                Run::Paused
            } else {
                Run::Running
            }),
            rate: effective.rate.map(RateLimit::PerSecond),
        };
        v1::Control {
            name: ControlName::application(app).to_string(),
            revision: value.map_or(0, |value| value.revision),
            changed_at: value.and_then(|value| value.changed_at).map(to_timestamp),
            changed_by: value.map(|value| value.changed_by.clone()).unwrap_or_default(),
            why: value.map(|value| value.why.clone()).unwrap_or_default(),
            desired: Some(v1::control::Desired::Application(write_application(
                &desired.unwrap_or_default(),
            ))),
            effective: Some(v1::control::Effective::EffectiveApplication(write_application(
                &effective,
            ))),
            problem: String::new(),
        }
    }
}

impl<I: Index> Jobs<I> {
    /// What is wanted of an application, and what applies.
    pub(crate) fn get_control(&self, caller: &Identity, app: &str) -> Result<v1::Control, RequestError> {
        self.require_in(Area::Control, caller, Verb::Read, Some(app), "get_control")?;
        let snapshot = self.controls.control.snapshot();
        self.known_app(app, &snapshot)?;
        Ok(self.controls.show(app, &snapshot))
    }

    /// The applications that somebody has changed or that the settings restrict, by name.
    pub(crate) fn list_controls(&self, caller: &Identity) -> Result<Vec<v1::Control>, RequestError> {
        if !caller.may_some(Area::Control, Verb::Read) {
            self.require_in(Area::Control, caller, Verb::Read, None, "list_controls")?;
        }
        let snapshot = self.controls.control.snapshot();
        let changed = snapshot.applications().map(|(app, _)| app);
        let apps: BTreeSet<&str> = changed.chain(self.controls.settings.restricted()).collect();
        let visible = apps
            .into_iter()
            .filter(|app| caller.may(Area::Control, Verb::Read, Some(app)));
        Ok(visible.map(|app| self.controls.show(app, &snapshot)).collect())
    }

    /// Changes what is wanted of an application.
    pub(crate) async fn change_control(
        &self,
        caller: &Identity,
        request: ChangeControl,
        format: Format,
    ) -> Result<v1::Control, RequestError> {
        let operation = match request.change {
            Change::Run(Run::Paused) => "pause_control",
            Change::Run(Run::Running) => "resume_control",
            Change::Rate(_) => "set_control_rate",
            Change::Reset => "reset_control",
        };
        let ChangeControl {
            app,
            change,
            why,
            expected_revision,
        } = request;
        // Before the application is looked up, so that the answer does not reveal which applications exist.
        self.require_in(Area::Control, caller, Verb::Write, Some(&app), operation)?;
        if why.len() > MAX_WHY || why.contains(|c: char| c.is_control() && c != '\n') {
            let problem = format!("must have at most {MAX_WHY} bytes, without control characters");
            return Err(Field::Why.malformed(format, &problem).into());
        }
        self.known_app(&app, &self.controls.control.snapshot())?;
        let change = self.controls.writer.change(ChangeRequest {
            name: ControlName::application(&app),
            change,
            by: Author::of(caller),
            why,
            expected_revision,
        });
        let changed = tokio::select! {
            biased;
            changed = change => changed,
            () = self.gave_up.cancelled() => {
                return Err(ControlError::Unconfirmed("this scheduler is shutting down".to_owned()).into());
            }
        };
        let value = changed.map_err(|error| ControlError::of(&app, error))?;
        let obeyed = value.as_ref().map(|value| match value.desired {
            Desired::Application(app) => app,
        });
        let control = &self.controls;
        Ok(control.show_value(&app, value.as_ref(), obeyed.unwrap_or_default()))
    }

    /// Refuses an application that neither the configuration nor control knows: a name with a mistake would pause nothing.
    fn known_app(&self, app: &str, snapshot: &Snapshot) -> Result<(), RequestError> {
        if snapshot.contains(&ControlName::application(app)) || self.controls.settings.get(app).is_some() {
            return Ok(());
        }
        Err(ControlError::Unknown(app.to_owned()).into())
    }
}

/// The application of a name such as `app/sms`.
pub(super) fn app_of(name: &str, format: Format) -> Result<String, RequestError> {
    match name.parse() {
        Ok(ControlName::Application(app)) => Ok(app.to_string()),
        Err(error) => Err(Field::Name.malformed(format, &error.to_string()).into()),
    }
}

/// Reads a limit of a rate; `None` means as the settings say.
pub(super) fn read_limit(rate: Option<&v1::RateLimit>, format: Format) -> Result<Change, RequestError> {
    let rate = rate.map(read_rate).transpose().map_err(|_| {
        let (least, most) = (RATES.start(), RATES.end());
        let problem = format!("must be from {least} to {most} per second, or unlimited");
        Field::Rate.malformed(format, &problem)
    })?;
    Ok(Change::Rate(rate))
}
