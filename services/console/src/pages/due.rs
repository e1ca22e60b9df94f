//! What is due in the next hour.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use redeliver_client::messages::{ListSchedulesRequest, Schedule, Stats};

use crate::backend::Backend;
use crate::page::{Frame, Part, Problem, respond, status};

const SECTION: &str = "/due";
const MINUTES: u32 = 60;

#[derive(Template)]
#[template(path = "due.html")]
struct Page {
    frame: Frame,
    stats: Part<Stats>,
    schedules: Part<Vec<Schedule>>,
}

impl Page {
    /// The minutes with jobs: the minute from now, and the number.
    fn minutes(&self, stats: &Stats) -> Vec<(usize, u64)> {
        let minutes = stats.per_minute.iter().copied().enumerate();
        minutes.filter(|(_, jobs)| *jobs > 0).collect()
    }
}

pub(crate) async fn page(State(backend): State<Backend>) -> Response {
    let (jobs, schedules) = (backend.jobs(), backend.schedules());
    let request = ListSchedulesRequest {
        page_size: 20,
        ..ListSchedulesRequest::default()
    };
    let (stats, schedules) = tokio::join!(jobs.stats(None, MINUTES), schedules.list(request));
    let page = Page {
        frame: Frame::new(SECTION, "Due")
            .command(format!("redeliver jobs stats --minutes {MINUTES}"))
            .live(),
        stats: stats.map_err(Problem::from),
        schedules: schedules.map(|answer| answer.schedules).map_err(Problem::from),
    };
    let status = status(&page.stats);
    respond(&page, status)
}
