//! Failed records that wait for their next attempt. Each look reads topics, so it happens on request only.

use askama::Template;
use axum::response::Response;
use redeliver_client::messages::{
    GetWaitingStatsRequest, ListWaitingRequest, WaitingActions, WaitingFilter, WaitingOrder, WaitingPlace,
    WaitingRecords, WaitingStats,
};
use serde::Deserialize;

use crate::backend::Backend;
use crate::command::Command;
use crate::html;
use crate::page::{Frame, Part, Problem, address, respond};
use crate::parameters::Query;

const SECTION: &str = "/waiting";
const LIMIT: i32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    pipeline: String,
    place: String,
    code: String,
    /// `counts`, `records`, or empty before the first scan.
    scan: String,
    /// `attempts`, `age`, or another text for the due time.
    order: String,
    page: String,
    /// The id of a request to act on records.
    request: String,
}

#[derive(Template)]
#[template(path = "waiting.html")]
struct Page {
    frame: Frame,
    parameters: Parameters,
    stats: Option<Part<WaitingStats>>,
    records: Option<Part<WaitingRecords>>,
    next: Option<String>,
    actions: Option<Part<WaitingActions>>,
}

impl Page {
    fn is_filtered(&self) -> bool {
        let Parameters {
            pipeline,
            place,
            code,
            ..
        } = &self.parameters;
        ![pipeline, place, code].into_iter().all(String::is_empty)
    }

    fn is_truncated(&self) -> bool {
        let stats = self
            .stats
            .iter()
            .flatten()
            .filter_map(|stats| stats.coverage.as_ref());
        let records = self
            .records
            .iter()
            .flatten()
            .filter_map(|records| records.coverage.as_ref());
        stats.chain(records).any(|coverage| coverage.scheduler_truncated)
    }

    /// The records of one place.
    fn records_of(&self, place: &WaitingPlace) -> String {
        address(
            SECTION,
            &[
                ("pipeline", &place.pipeline),
                ("place", &place.place),
                ("scan", "records"),
            ],
        )
    }

    fn trace(&self, position: &redeliver_client::messages::Position) -> String {
        address("/trace", &[("position", &html::position(position))])
    }
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let parameters = Parameters {
        pipeline: parameters.pipeline.trim().to_owned(),
        place: parameters.place.trim().to_owned(),
        code: parameters.code.trim().to_owned(),
        ..parameters
    };
    let filter = WaitingFilter {
        pipeline: parameters.pipeline.clone(),
        place: parameters.place.clone(),
        error_code: parameters.code.clone(),
        ..WaitingFilter::default()
    };
    let order = match parameters.order.as_str() {
        "attempts" => WaitingOrder::Attempts,
        "age" => WaitingOrder::Age,
        _ => WaitingOrder::Unspecified,
    };
    let client = backend.waiting();
    let actions = match parameters.request.as_str() {
        "" => None,
        id => Some(client.actions(id).await.map_err(Problem::from)),
    };
    let actions = match parameters.scan.as_str() {
        "" => actions,
        // The page would repeat the scan with it.
        _ => actions.map(|actions| actions.map_err(Problem::of_scan)),
    };
    let (stats, records) = match parameters.scan.as_str() {
        "records" => {
            let request = ListWaitingRequest {
                filter: Some(filter),
                limit: LIMIT,
                order: order.into(),
                page_token: parameters.page.clone(),
            };
            let records = client.list(request, |_| {}).await;
            (
                None,
                Some(records.map_err(|error| Problem::from(error).of_scan())),
            )
        }
        "" => (None, None),
        _ => {
            let request = GetWaitingStatsRequest {
                filter: Some(filter),
                minutes: 0,
            };
            let stats = client.stats(request, |_| {}).await;
            (Some(stats.map_err(|error| Problem::from(error).of_scan())), None)
        }
    };
    let command = match parameters.scan.as_str() {
        "" if actions.is_some() => Command::new("waiting actions").argument(&parameters.request),
        "records" => Command::new("waiting ls")
            .option("--limit", LIMIT)
            .option("--sort", order.name().unwrap_or_default()),
        _ => Command::new("waiting stats"),
    };
    let command = command
        .option("--pipeline", &parameters.pipeline)
        .option("--place", &parameters.place)
        .option("--error-code", &parameters.code);
    let mut tokens = records
        .iter()
        .flatten()
        .map(|records| records.next_page_token.as_str());
    let next = tokens.find(|token| !token.is_empty()).map(|token| {
        let Parameters {
            pipeline,
            place,
            code,
            scan,
            order,
            ..
        } = &parameters;
        address(
            SECTION,
            &[
                ("pipeline", pipeline),
                ("place", place),
                ("code", code),
                ("scan", scan),
                ("order", order),
                ("page", token),
            ],
        )
    });
    let page = Page {
        next,
        frame: Frame::new(SECTION, "Waiting").command(command),
        parameters,
        stats,
        records,
        actions,
    };
    respond(&page, axum::http::StatusCode::OK)
}
