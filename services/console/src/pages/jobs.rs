//! Scheduled jobs.

use askama::Template;
use axum::response::Response;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::{
    Application, Job, JobOutcome, JobOutcomeState, JobState, ListJobsRequest, Stats,
};
use redeliver_client::{JobId, Timestamp};
use redeliver_core::HumanDuration;
use serde::Deserialize;

use crate::access::{Access, Actions};
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::html::Shown;
use crate::page::{Failed, Frame, Part, Problem, address, respond, segment, status};
use crate::parameters::{Path, Query};

const SECTION: &str = "/jobs";
const PAGE_SIZE: i32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    app: String,
    /// When its jobs are due: a time, or a delay from now.
    from: String,
    until: String,
    page: String,
    /// The id of a job to go to.
    id: String,
}

#[derive(Template)]
#[template(path = "jobs.html")]
struct Jobs {
    frame: Frame,
    parameters: Parameters,
    /// Empty in the list of one application.
    apps: Part<Vec<AppRow>>,
    jobs: Part<Vec<Row>>,
    stats: Part<Stats>,
    next: Option<String>,
    buttons: Actions,
}

impl Jobs {
    fn is_filtered(&self) -> bool {
        let Parameters { from, until, .. } = &self.parameters;
        !from.is_empty() || !until.is_empty()
    }

    /// Whether the list of jobs has the same problem, which is said once.
    fn is_said(&self, problem: &Problem) -> bool {
        let is_same =
            |said: &Problem| said.title == problem.title && (problem.passes || said.detail == problem.detail);
        self.jobs.as_ref().is_err_and(is_same)
    }
}

struct Row {
    job: Job,
    link: String,
}

struct AppRow {
    app: Application,
    link: String,
}

impl AppRow {
    fn state(&self) -> &'static str {
        match self.app.paused {
            Some(true) => "paused",
            Some(false) => "running",
            // Only for those who may see controls.
            None => "not shown",
        }
    }
}

/// A time, or a delay from now, in the words of the API.
fn due(name: &str, text: &str, now: Timestamp) -> Part<Option<Timestamp>> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let time = text.parse().ok();
    let delay = || text.parse::<HumanDuration>().ok();
    match time.or_else(|| Some(now.after(delay()?.duration()))) {
        Some(time) => Ok(Some(time)),
        None => Err(Problem::invalid(format!(
            "`{name}` must be a time, such as 2026-11-30T08:00:00Z, or a delay from now, such as 10m; it is `{text}`."
        ))),
    }
}

pub(crate) async fn list(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let frame = Frame::new(SECTION, "Jobs");
    let times = due("from", &parameters.from, frame.now)
        .and_then(|from| Ok((from, due("until", &parameters.until, frame.now)?)));
    let (from, until) = match times {
        Ok(times) => times,
        Err(problem) => return Failed::respond(SECTION, problem),
    };
    let id = parameters.id.trim();
    if !id.is_empty() {
        return show(&backend, id).await;
    }
    let client = backend.jobs();
    let app = parameters.app.trim();
    let request = ListJobsRequest {
        app: app.to_owned(),
        page_size: PAGE_SIZE,
        page_token: parameters.page.clone(),
        due_from: from.map(to_timestamp),
        due_until: until.map(to_timestamp),
        ..ListJobsRequest::default()
    };
    let apps = async {
        if app.is_empty() {
            client.applications().await
        } else {
            Ok(Vec::new())
        }
    };
    let (jobs, stats, apps) = tokio::join!(
        client.list(request),
        client.stats((!app.is_empty()).then_some(app), 60),
        apps
    );
    let access = match &jobs {
        Err(error) if error.is_transient() => Access::default(),
        _ => backend.access(Service::Scheduler).await,
    };
    let command = Command::new("jobs ls --api")
        .option("--app", app)
        .option("--from", parameters.from.trim())
        .option("--until", parameters.until.trim())
        .option("--limit", PAGE_SIZE);
    let (jobs, next) = match jobs {
        Ok(answer) => {
            let token = answer.next_page_token;
            // The next page is of the same times.
            let [from, until] =
                [from, until].map(|time| time.and_then(Timestamp::to_rfc3339).unwrap_or_default());
            let same = [
                ("app", app),
                ("from", &*from),
                ("until", &*until),
                ("page", &*token),
            ];
            let next = (!token.is_empty()).then(|| address(SECTION, &same));
            let row = |job: Job| Row {
                link: segment(SECTION, &job.id),
                job,
            };
            (Ok(answer.jobs.into_iter().map(row).collect()), next)
        }
        Err(error) => (Err(error.into()), None),
    };
    let row = |app: Application| AppRow {
        link: address(SECTION, &[("app", &app.name)]),
        app,
    };
    let apps = apps.map(|apps| apps.into_iter().map(row).collect());
    let page = Jobs {
        frame: frame.command(command),
        apps: apps.map_err(Problem::from),
        jobs,
        stats: stats.map_err(Problem::from),
        next,
        buttons: access.actions(super::act::jobs(app)),
        parameters,
    };
    let status = status(&page.jobs);
    respond(&page, status)
}

#[derive(Template)]
#[template(path = "job.html")]
struct One {
    frame: Frame,
    id: String,
    job: Job,
    data: Option<Shown>,
    /// What has become of a job that was dispatched, from the inspector.
    outcomes: Part<Vec<JobOutcome>>,
    buttons: Actions,
}

impl One {
    fn state(&self) -> String {
        self.job.state().name().unwrap_or_default()
    }
}

/// The page about the newest record of a job: that of the dead letter, or the trace.
fn link(outcome: &JobOutcome, id: &str) -> String {
    match outcome.state() {
        JobOutcomeState::Dead => super::letters::link(outcome.position.as_ref()),
        _ => address("/trace", &[("position", id)]),
    }
}

/// A job that the scheduler does not know any more.
#[derive(Template)]
#[template(path = "ended_job.html")]
struct Ended {
    frame: Frame,
    id: String,
    outcomes: Vec<JobOutcome>,
}

async fn outcomes(backend: &Backend, job: &Job, id: JobId) -> Part<Vec<JobOutcome>> {
    if job.state() != JobState::Dispatched {
        return Ok(Vec::new());
    }
    Ok(backend.waiting().job_outcomes(id, &job.topic).await?)
}

pub(crate) async fn one(backend: Backend, Path(id): Path<String>) -> Response {
    show(&backend, &id).await
}

fn job_frame(id: &str) -> Frame {
    Frame::new(SECTION, format!("Job {id}")).command(Command::new("jobs get").argument(id))
}

async fn show(backend: &Backend, id: &str) -> Response {
    let Ok(parsed) = id.parse::<JobId>() else {
        let problem = format!("`{id}` is not the id of a job.");
        return Failed::respond(SECTION, Problem::invalid(problem));
    };
    match backend.jobs().get(parsed).await {
        Ok(Some(job)) => {
            let (access, outcomes) = tokio::join!(
                backend.access(Service::Scheduler),
                outcomes(backend, &job, parsed)
            );
            let page = One {
                frame: job_frame(id),
                id: id.to_owned(),
                data: (!job.data.is_empty()).then(|| Shown::of(&job.data)),
                outcomes,
                buttons: access.actions(super::act::job(&job)),
                job,
            };
            respond(&page, axum::http::StatusCode::OK)
        }
        // The inspector can remember it for longer.
        Ok(None) => match backend.waiting().job_outcomes(parsed, "").await {
            Ok(outcomes) if !outcomes.is_empty() => {
                let page = Ended {
                    frame: job_frame(id),
                    id: id.to_owned(),
                    outcomes,
                };
                respond(&page, axum::http::StatusCode::OK)
            }
            Ok(_) => Failed::respond(SECTION, Problem::not_found("Job")),
            Err(error) => {
                let problem = Problem::not_found("Job");
                let asked = Problem::from(error).detail;
                let detail = format!(
                    "{} The inspector cannot tell what became of it: {asked}",
                    problem.detail
                );
                Failed::respond(SECTION, Problem { detail, ..problem })
            }
        },
        Err(error) => Failed::respond(SECTION, error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_times_are_absolute_or_relative() {
        let now = Timestamp::from_millis(1_000_000);
        let due = |text| due("from", text, now).map(|time| time.map(Timestamp::as_millis));
        assert_eq!(due(" ").unwrap(), None);
        assert_eq!(due("10m").unwrap(), Some(1_600_000));
        assert_eq!(due("1970-01-01T00:00:02Z").unwrap(), Some(2_000));
        assert!(due("soon").unwrap_err().detail.contains("it is `soon`"));
    }
}
