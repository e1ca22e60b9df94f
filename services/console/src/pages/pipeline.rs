//! One pipeline: from its source to its outputs and dead letters, with rates at the edges and what waits in the boxes.

use askama::Template;
use askama::filters::Safe;
use axum::response::Response;
use redeliver_client::ClientError;
use redeliver_client::messages::{
    BreakerState, IncompletePart, OverviewPart, OverviewSelection, PipelineOverview, RecordCount,
    RunOverview, WaitingOverview,
};

use super::groups;
use super::now::{Concern, overdue, rate, waiting};
use super::proof::Badge;
use crate::access::{Access, Actions};
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, address, gaps, literal, respond};
use crate::parameters::Path;

const SECTION: &str = "/";

#[derive(Template)]
#[template(path = "pipeline.html")]
struct Page {
    frame: Frame,
    pipeline: PipelineOverview,
    concerns: Vec<Concern>,
    badge: Badge,
    groups: Part<Vec<groups::Row>>,
    letters: String,
    gaps: Option<String>,
    incomplete: Vec<IncompletePart>,
    /// Why the circuit breaker is unknown.
    no_breaker: Option<String>,
    buttons: Actions,
    access: Access,
}

impl Page {
    /// Received, succeeded, retried and dead: the edges of the picture.
    fn rates(&self) -> (String, String, String, String) {
        let rates = self.pipeline.rates.unwrap_or_default();
        (
            rate(&rates.received),
            rate(&rates.succeeded),
            rate(&rates.retried),
            rate(&rates.dead),
        )
    }

    fn trend(&self) -> Option<Safe<String>> {
        let dead = self.pipeline.dead_letters.as_ref()?;
        (!dead.trend.is_empty()).then(|| html::trend(&dead.trend))
    }

    fn breaker(&self) -> (&'static str, &'static str) {
        match self.pipeline.breaker() {
            BreakerState::Closed => ("resolved", "closed"),
            BreakerState::Open => ("regressed", "open"),
            BreakerState::HalfOpen => ("open", "half open"),
            BreakerState::Unspecified => ("unknown", "unknown"),
        }
    }

    fn records(&self, place: &WaitingOverview) -> String {
        self.scan(&place.place, "records")
    }

    fn buttons_of(&self, place: &WaitingOverview) -> Actions {
        let buttons = super::act::tier(&self.pipeline.pipeline, place);
        self.access.actions(buttons)
    }

    fn long_waits(&self) -> String {
        self.scan("scheduler", "counts")
    }

    fn scan(&self, place: &str, scan: &str) -> String {
        let parameters = [
            ("pipeline", self.pipeline.pipeline.as_str()),
            ("place", place),
            ("scan", scan),
        ];
        address("/waiting", &parameters)
    }
}

/// A number of records, or that it is not known, or an upper bound.
pub(super) fn count(count: Option<&RecordCount>) -> String {
    let Some(count) = count else {
        return "unknown".to_owned();
    };
    match (
        count.records.map(html::number),
        count.unreachable_partitions,
        count.exact,
    ) {
        (None, ..) => "unknown".to_owned(),
        (Some(records), 1.., _) => format!("{records} without {} partitions", count.unreachable_partitions),
        (Some(records), 0, true) => records,
        (Some(records), 0, false) => format!("≤ {records}"),
    }
}

/// What an operator has set, or that it runs.
fn run(run: Option<&RunOverview>) -> (&'static str, String) {
    match run.and_then(|run| run.paused) {
        None => ("unknown", "unknown".to_owned()),
        Some(true) => ("paused", "paused".to_owned()),
        Some(false) => match run.and_then(|run| run.per_second) {
            Some(limit) => ("running", format!("at most {limit}/s")),
            None => ("running", "running".to_owned()),
        },
    }
}

pub(crate) async fn page(backend: Backend, Path(name): Path<String>) -> Response {
    let selection = OverviewSelection {
        pipeline: name.clone(),
        ..OverviewSelection::default()
    };
    let overview = match backend.overview().overview(selection).await {
        Ok(overview) => overview,
        Err(ClientError::Refused { reason, .. }) if reason.as_deref() == Some("PIPELINE_UNKNOWN") => {
            return Failed::respond(SECTION, Problem::not_found("Pipeline"));
        }
        Err(error) => return Failed::respond(SECTION, error.into()),
    };
    let filter = format!("pipeline = {} AND state = OPEN", literal(&name));
    let client = backend.dead_letters();
    let (groups, access) = tokio::join!(
        client.groups(groups::open(&filter, 10)),
        backend.access(Service::Inspector)
    );
    let Some(pipeline) = overview.pipelines.into_iter().next() else {
        return Failed::respond(SECTION, Problem::not_found("Pipeline"));
    };
    let frame = Frame::new(SECTION, name.clone())
        .command(Command::new("waiting stats").option("--pipeline", &name))
        .read_at(html::when(overview.as_of))
        .live();
    let of_groups = groups
        .as_ref()
        .ok()
        .and_then(|answer| answer.completeness.as_ref());
    let page = Page {
        gaps: gaps(overview.completeness.as_ref().or(of_groups), frame.now),
        no_breaker: overview
            .incomplete
            .iter()
            .find(|part| part.part() == OverviewPart::Breakers)
            .map(|part| part.problem.clone()),
        incomplete: overview
            .incomplete
            .into_iter()
            .filter(|part| part.since.is_some())
            .collect(),
        frame,
        concerns: overview
            .problems
            .iter()
            .map(|problem| Concern::of(problem, &access))
            .collect(),
        badge: Badge::of(pipeline.audit.as_ref()),
        groups: groups
            .map(|answer| answer.groups.into_iter().map(groups::Row::of).collect())
            .map_err(Problem::from),
        letters: address("/letters", &[("filter", &filter)]),
        buttons: access.actions(super::act::pipeline(&pipeline)),
        access,
        pipeline,
    };
    respond(&page, axum::http::StatusCode::OK)
}
