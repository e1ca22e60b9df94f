//! Cancels and reschedules a job, and schedules one.

use redeliver_client::messages::{Job, JobState, Outcome};
use redeliver_client::{JobId, JobRequest, Timestamp, When};
use redeliver_core::HumanDuration;
use serde::Deserialize;

use super::{Act, Sheet, fact, lines, when};
use crate::access::Need;
use crate::backend::{Backend, Service};
use crate::command::{Command, or};
use crate::form::{self, Field, Fields, Input, required};
use crate::page::{Button, Frame, Part, Problem, address, segment};

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Verb {
    #[default]
    Schedule,
    Cancel,
    Reschedule,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Cancel => "cancel",
            Self::Reschedule => "reschedule",
        }
    }
}

/// What can be done with a job now.
pub(crate) fn buttons(job: &Job) -> Vec<Button> {
    if job.state() != JobState::Scheduled {
        return Vec::new();
    }
    let button = |label: &str, verb: Verb| {
        let link = address("/act/job", &[("id", &job.id), ("verb", verb.name())]);
        Button::new(label, link).needs(vec![Need::jobs(&job.app)])
    };
    vec![
        button("Reschedule", Verb::Reschedule),
        button("Cancel", Verb::Cancel),
    ]
}

/// The form for a new job of an application.
pub(crate) fn schedule(app: &str) -> Button {
    Button::new(
        "Schedule a job",
        address("/act/job", &[("verb", Verb::Schedule.name()), ("app", app)]),
    )
    .needs(vec![Need::jobs(app)])
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    id: String,
    verb: Verb,
    due: String,
    reason: String,
    app: String,
    data: String,
}

impl Fields for Change {
    const MAX_BYTES: usize = 1 << 20;
}

impl Change {
    fn id(&self) -> Part<JobId> {
        let invalid = |_| Problem::invalid(format!("`{}` is not the id of a job.", self.id));
        self.id.parse().map_err(invalid)
    }

    fn due(&self) -> Part<When> {
        let due = required("due", &self.due)?;
        if let Ok(time) = due.parse::<Timestamp>() {
            return Ok(When::At(time));
        }
        match due.parse::<HumanDuration>() {
            Ok(delay) => Ok(When::After(delay.duration())),
            Err(_) => Err(Problem::invalid(format!(
                "`due` must be a time, such as 2026-11-30T08:00:00Z, or a delay from now, such as 90s; it is `{due}`."
            ))),
        }
    }

    /// The due time as an option of the command.
    fn with_due(&self, command: Command) -> Command {
        match self.due() {
            Ok(When::At(_)) => command.option("--at", self.due.trim()),
            Ok(When::After(_)) => command.option("--in", self.due.trim()),
            Err(_) => command.option("--at", or(&self.due, "DUE")),
        }
    }

    fn due_field(&self) -> Field {
        let field = Field::line("due", "Due", &self.due).required();
        field.help("A time, such as 2026-11-30T08:00:00Z, or a delay from now, such as 90s.")
    }

    /// The form for a new job.
    fn new_job(&self) -> Sheet {
        let command = Command::new("jobs schedule").option("--app", or(&self.app, "APPLICATION"));
        let command = self.with_due(command);
        let command = match lines(&self.data) {
            data if data.is_empty() => command,
            data => command.text("--data", &data),
        };
        Sheet {
            fields: vec![
                Field::hidden("verb", self.verb.name()),
                Field::line("app", "Application", &self.app).required(),
                self.due_field(),
                Field::new(Input::Lines(8), "data", "Data", &self.data)
                    .help("The value of the record that is written when the job is due."),
            ],
            ..Sheet::new(
                // The application can be changed in the form.
                vec![Need::jobs("")],
                "Schedule a job",
                "Schedule 1 job",
                command,
                "/jobs".to_owned(),
            )
        }
    }
}

impl Act for Change {
    const SECTION: &'static str = "/jobs";

    fn service(&self) -> Service {
        Service::Scheduler
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        if self.verb == Verb::Schedule {
            return Ok(self.new_job());
        }
        let job = backend.jobs().get(self.id()?).await?;
        let job = job.ok_or_else(|| Problem::not_found("Job"))?;
        let mut fields = vec![
            Field::hidden("id", &self.id),
            Field::hidden("verb", self.verb.name()),
            Field::reason(&self.reason),
        ];
        let command = Command::new(&format!("jobs {}", self.verb.name())).option("--reason", &self.reason);
        let (title, button, command) = if self.verb == Verb::Reschedule {
            fields.push(self.due_field());
            ("Reschedule the job", "Reschedule 1 job", self.with_due(command))
        } else {
            ("Cancel the job", "Cancel 1 job for good", command)
        };
        Ok(Sheet {
            facts: vec![
                fact("Job", &job.id),
                fact("State", job.state().name().unwrap_or_default()),
                fact("Application", &job.app),
                ("Due", when(job.scheduled_time, frame)),
                fact("Topic", &job.topic),
            ],
            fields,
            ..Sheet::new(
                vec![Need::jobs(&job.app)],
                title,
                button,
                command.argument(&job.id),
                segment("/jobs", &job.id),
            )
        })
    }

    async fn run(&self, backend: &Backend, request_id: &str) -> Part<Option<String>> {
        let client = backend.with_reason(form::reason(&self.reason)?)?.jobs();
        let answer = match self.verb {
            Verb::Schedule => {
                let job = JobRequest::new(required("app", &self.app)?, self.due()?)
                    .data(lines(&self.data))
                    .idempotency_key(request_id)
                    .request_id(request_id);
                let scheduled = client.schedule(&job).await?;
                return Ok(Some(segment("/jobs", scheduled.id.to_string())));
            }
            Verb::Cancel => client.cancel(self.id()?).await?,
            Verb::Reschedule => client.reschedule(self.id()?, self.due()?).await?,
        };
        match (self.verb, answer.outcome) {
            (Verb::Cancel, Outcome::Cancelled | Outcome::AlreadyCancelled | Outcome::Expired)
            | (Verb::Reschedule, Outcome::Rescheduled) => Ok(Some(segment("/jobs", &self.id))),
            (verb, outcome) => Err(Problem::conflict(format!(
                "The job is not {}: {}.",
                match verb {
                    Verb::Cancel => "cancelled",
                    Verb::Schedule | Verb::Reschedule => "rescheduled",
                },
                outcome.name().unwrap_or_default().replace('_', " ")
            ))),
        }
    }
}
