//! What is due in the next hour.

use askama::Template;
use axum::response::Response;
use redeliver_client::messages::{
    GetWaitingStatsRequest, ListSchedulesRequest, Schedule, Stats, WaitingCounts,
};
use serde::Deserialize;

use crate::backend::Backend;
use crate::page::{Frame, Part, Problem, respond, status};
use crate::parameters::Query;

const SECTION: &str = "/due";
const MINUTES: u32 = 60;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    /// Set to read the retry topics, too.
    waiting: String,
}

#[derive(Template)]
#[template(path = "due.html")]
struct Page {
    frame: Frame,
    stats: Part<Stats>,
    schedules: Part<Vec<Schedule>>,
    /// `None` before they were asked for.
    waits: Option<Part<WaitingCounts>>,
}

impl Page {
    /// The minutes in which something is due: the minute from now, and the number.
    fn minutes(&self, per_minute: &[u64]) -> Vec<(usize, u64)> {
        let minutes = per_minute.iter().copied().enumerate();
        minutes.filter(|(_, due)| *due > 0).collect()
    }
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let (jobs, schedules) = (backend.jobs(), backend.schedules());
    let reads_waits = !parameters.waiting.is_empty();
    let request = ListSchedulesRequest {
        page_size: 20,
        ..ListSchedulesRequest::default()
    };
    let waits = async {
        if reads_waits {
            Some(forecast(&backend).await)
        } else {
            None
        }
    };
    let (stats, schedules, waits) = tokio::join!(jobs.stats(None, MINUTES), schedules.list(request), waits);
    let frame = Frame::new(SECTION, "Due").command(format!("redeliver jobs stats --minutes {MINUTES}"));
    let page = Page {
        frame,
        waits,
        stats: stats.map_err(Problem::from),
        schedules: schedules.map(|answer| answer.schedules).map_err(Problem::from),
    };
    let status = status(&page.stats);
    respond(&page, status)
}

/// When the records that wait in retry topics are due.
async fn forecast(backend: &Backend) -> Part<WaitingCounts> {
    let request = GetWaitingStatsRequest {
        minutes: MINUTES,
        ..GetWaitingStatsRequest::default()
    };
    let stats = backend.waiting().stats(request, |_| {}).await?;
    Ok(stats.total.unwrap_or_default())
}
