//! Pauses, resumes, triggers and deletes a schedule.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use redeliver_client::messages::{PauseScheduleRequest, ResumeScheduleRequest, ScheduleState};
use redeliver_client::{ClientError, Code, JobId, ScheduleClient};
use serde::Deserialize;
use tokio::sync::OnceCell;
use tokio_util::task::TaskTracker;

use super::{Act, Sheet, fact};
use crate::access::Need;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::form::{self, Field, Fields};
use crate::html;
use crate::page::{Button, Frame, Part, Problem, address, segment};
use crate::pages::schedules;

/// The requests that have triggered a schedule, and their jobs: the API would create another job for a repeated one. Those of other replicas are not known.
static TRIGGERED: Mutex<VecDeque<(String, Triggered)>> = Mutex::new(VecDeque::new());
const REMEMBERED: usize = 1_000;

/// The job, once the call has ended. `None`: it is not known whether there is one.
type Triggered = Arc<OnceCell<Option<JobId>>>;

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Verb {
    #[default]
    Pause,
    Resume,
    Trigger,
    Delete,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Trigger => "trigger",
            Self::Delete => "delete",
        }
    }
}

/// What can be done with a schedule now.
pub(crate) fn buttons(row: &schedules::Row) -> Vec<Button> {
    let button = |label: &str, verb: Verb| {
        let link = address(
            "/act/schedule",
            &[("id", &row.schedule.id), ("verb", verb.name())],
        );
        Button::new(label, link).needs(vec![Need::jobs(row.app())])
    };
    let run = match row.schedule.state() {
        ScheduleState::Paused => Some(button("Resume", Verb::Resume).next()),
        ScheduleState::Active => Some(button("Pause", Verb::Pause)),
        ScheduleState::Finished | ScheduleState::Unspecified => None,
    };
    let others = [button("Trigger", Verb::Trigger), button("Delete", Verb::Delete)];
    run.into_iter().chain(others).collect()
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    id: String,
    verb: Verb,
    catch_up: String,
    reason: String,
}

impl Fields for Change {}

impl Act for Change {
    const SECTION: &'static str = "/schedules";

    fn service(&self) -> Service {
        Service::Scheduler
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let schedule = backend.schedules().get(&self.id).await?;
        let row = schedule.map(schedules::Row::of);
        let row = row.ok_or_else(|| Problem::not_found("Schedule"))?;
        let mut fields = vec![
            Field::hidden("id", &self.id),
            Field::hidden("verb", self.verb.name()),
            Field::reason(&self.reason),
        ];
        let (title, button) = match self.verb {
            Verb::Pause => ("Pause the schedule", "Pause; no more jobs are created"),
            Verb::Resume => ("Resume the schedule", "Resume"),
            Verb::Trigger => ("Trigger the schedule", "Create 1 job now"),
            Verb::Delete => ("Delete the schedule", "Delete for good; its jobs stay"),
        };
        if self.verb == Verb::Resume {
            let label = "Apply the misfire policy to what fell due during the pause, instead of skipping it";
            fields.push(Field::check("catch_up", label, &self.catch_up));
        }
        let command = Command::new(&format!("schedules {}", self.verb.name()))
            .flag("--catch-up", !self.catch_up.is_empty())
            .option("--reason", &self.reason)
            .argument(&self.id);
        let schedule = &row.schedule;
        Ok(Sheet {
            facts: vec![
                fact("Schedule", &self.id),
                fact("State", row.state()),
                fact("When", row.timing()),
                fact("Application", row.app()),
                ("Next", html::time(schedule.next_due_time, frame.now)),
                fact("Dispatched", html::number(schedule.dispatched)),
            ],
            fields,
            ..Sheet::new(
                vec![Need::jobs(row.app())],
                title,
                button,
                command,
                row.link.clone(),
            )
        })
    }

    async fn run(&self, backend: &Backend, request_id: &str) -> Part<Option<String>> {
        let client = backend.with_reason(form::reason(&self.reason)?)?.schedules();
        let id = self.id.clone();
        match self.verb {
            Verb::Pause => {
                client.pause(PauseScheduleRequest { id }).await?;
            }
            Verb::Resume => {
                let catch_up = !self.catch_up.is_empty();
                client.resume(ResumeScheduleRequest { id, catch_up }).await?;
            }
            Verb::Trigger => {
                // It does not end with this request: a browser that sends the form twice drops the first one.
                let triggering = TaskTracker::new().spawn(trigger(client, id, request_id.to_owned()));
                let job = triggering.await.map_err(|_| Problem::conflict(UNKNOWN))??;
                return Ok(Some(segment("/jobs", job.to_string())));
            }
            Verb::Delete => {
                // It is gone after a repeated request, too.
                client.delete(&id).await?;
                return Ok(Some("/schedules".to_owned()));
            }
        }
        Ok(Some(schedules::link(&self.id)))
    }
}

const UNKNOWN: &str = "It is not known whether this form has created a job: look at the jobs, and open the form again for another one.";

/// Creates one job for a request, however often it comes.
async fn trigger(client: ScheduleClient, id: String, request_id: String) -> Part<JobId> {
    let triggered = {
        let mut requests = TRIGGERED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = requests.iter().find(|(known, _)| *known == request_id);
        known.map(|(_, triggered)| triggered.clone()).unwrap_or_else(|| {
            if requests.len() == REMEMBERED {
                requests.pop_front();
            }
            let triggered = Triggered::default();
            requests.push_back((request_id, triggered.clone()));
            triggered
        })
    };
    let mut failure = None;
    let call = async || match client.trigger(&id).await {
        Ok(job) => Ok(Some(job)),
        // The same form can be sent again.
        Err(error) if is_refused(&error) => Err(error),
        Err(error) => {
            failure = Some(error);
            Ok(None)
        }
    };
    let job = *triggered.get_or_try_init(call).await?;
    job.ok_or_else(|| failure.map_or_else(|| Problem::conflict(UNKNOWN), Problem::from))
}

/// Whether a call has certainly done nothing.
fn is_refused(error: &ClientError) -> bool {
    use Code::{InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, Unauthenticated};
    match error {
        ClientError::Unreachable { is_refused, .. } => *is_refused,
        ClientError::Refused { code, .. } => {
            error.retry_after().is_some()
                || matches!(
                    code,
                    InvalidArgument | NotFound | PermissionDenied | ResourceExhausted | Unauthenticated
                )
        }
        _ => false,
    }
}
