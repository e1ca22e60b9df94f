//! Recurring schedules, and their next occurrences.

use askama::Template;
use axum::response::Response;
use redeliver_client::convert::from_duration;
use redeliver_client::messages::preview_schedule_request::Schedule as Previewed;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{
    ListSchedulesRequest, OccurrencePreview, OccurrenceReason, PreviewScheduleRequest, Schedule,
    ScheduleState, UnreadableSchedule,
};
use serde::Deserialize;

use crate::access::Actions;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::page::{Failed, Frame, Part, Problem, address, respond, segment, status};
use crate::parameters::{Path, Query};

const SECTION: &str = "/schedules";
const PAGE_SIZE: u32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    app: String,
    page: String,
    /// The id of a schedule to go to.
    id: String,
}

#[derive(Template)]
#[template(path = "schedules.html")]
struct Schedules {
    frame: Frame,
    parameters: Parameters,
    schedules: Part<Vec<Row>>,
    unreadable: Vec<UnreadableSchedule>,
    next: Option<String>,
}

pub(super) struct Row {
    pub(super) schedule: Schedule,
    pub(super) link: String,
}

/// The page of a schedule. Browsers resolve `.` and `..` in paths, however they are encoded.
pub(super) fn link(id: &str) -> String {
    match id {
        "." | ".." => address(SECTION, &[("id", id)]),
        id => segment(SECTION, id),
    }
}

impl Row {
    pub(super) fn of(schedule: Schedule) -> Self {
        Self {
            link: link(&schedule.id),
            schedule,
        }
    }

    pub(super) fn app(&self) -> &str {
        let job = self.schedule.spec.as_ref().and_then(|spec| spec.job.as_ref());
        job.map_or("", |job| &job.app)
    }

    /// The cron expression with its zone, or the interval.
    pub(super) fn timing(&self) -> String {
        match self.schedule.spec.as_ref().and_then(|spec| spec.timing.as_ref()) {
            Some(Timing::Cron(cron)) => match &cron.zone {
                Some(zone) => format!("{} {zone}", cron.expression),
                None => cron.expression.clone(),
            },
            Some(Timing::Every(every)) => match every.interval.as_ref().and_then(from_duration) {
                Some(interval) => format!("every {interval}"),
                None => "every ?".to_owned(),
            },
            None => String::new(),
        }
    }

    pub(super) fn state(&self) -> String {
        self.schedule.state().name().unwrap_or_default()
    }

    fn class(&self) -> &'static str {
        match self.schedule.state() {
            _ if !self.schedule.problem.is_empty() => "regressed",
            ScheduleState::Active => "running",
            ScheduleState::Paused => "paused",
            ScheduleState::Finished | ScheduleState::Unspecified => "muted",
        }
    }
}

pub(crate) async fn list(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let id = parameters.id.trim();
    if !id.is_empty() {
        return show(&backend, id).await;
    }
    let app = parameters.app.trim();
    let request = ListSchedulesRequest {
        app: app.to_owned(),
        page_size: PAGE_SIZE,
        page_token: parameters.page.clone(),
    };
    let command = Command::new("schedules ls")
        .option("--app", app)
        .option("--limit", PAGE_SIZE);
    let frame = Frame::new(SECTION, "Schedules").command(command);
    let mut page = Schedules {
        frame,
        schedules: Ok(Vec::new()),
        unreadable: Vec::new(),
        next: None,
        parameters,
    };
    page.schedules = match backend.schedules().list(request).await {
        Ok(answer) => {
            let (app, token) = (&page.parameters.app, answer.next_page_token);
            page.next = (!token.is_empty()).then(|| address(SECTION, &[("app", app), ("page", &token)]));
            page.unreadable = answer.unreadable;
            Ok(answer.schedules.into_iter().map(Row::of).collect())
        }
        Err(error) => Err(error.into()),
    };
    let status = status(&page.schedules);
    respond(&page, status)
}

#[derive(Template)]
#[template(path = "schedule.html")]
struct One {
    frame: Frame,
    row: Row,
    occurrences: Part<Vec<OccurrencePreview>>,
    buttons: Actions,
}

/// Why an occurrence is not where a reader of the expression expects it.
fn remark(occurrence: &OccurrencePreview) -> String {
    match occurrence.reason() {
        OccurrenceReason::ShiftedByGap => format!(
            "{} does not exist, because the clock goes forward",
            occurrence.missing_local_time.replace('T', " ")
        ),
        OccurrenceReason::FirstOfOverlap => "the first of two, because the clock goes back".to_owned(),
        OccurrenceReason::SecondOfOverlap => "the second of two, because the clock goes back".to_owned(),
        OccurrenceReason::Anchor | OccurrenceReason::Regular | OccurrenceReason::Unspecified => String::new(),
    }
}

pub(crate) async fn one(backend: Backend, Path(id): Path<String>) -> Response {
    show(&backend, &id).await
}

async fn show(backend: &Backend, id: &str) -> Response {
    let client = backend.schedules();
    let preview = PreviewScheduleRequest {
        schedule: Some(Previewed::Id(id.to_owned())),
        count: 20,
        ..PreviewScheduleRequest::default()
    };
    let (schedule, preview) = tokio::join!(client.get(id), client.preview(preview));
    match schedule {
        Ok(Some(schedule)) => {
            let (access, row) = (backend.access(Service::Scheduler).await, Row::of(schedule));
            let page = One {
                frame: Frame::new(SECTION, format!("Schedule {id}"))
                    .command(Command::new("schedules get").argument(id)),
                buttons: access.actions(super::act::schedule(&row)),
                row,
                occurrences: preview.map(|preview| preview.occurrences).map_err(Problem::from),
            };
            respond(&page, axum::http::StatusCode::OK)
        }
        Ok(None) => Failed::respond(SECTION, Problem::not_found("Schedule")),
        Err(error) => Failed::respond(SECTION, error.into()),
    }
}
