//! REST: `/v1/controls` and `/v1/applications/{app}/control`.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/controls` | 200 |
//! | `GET /v1/applications/{app}/control` | 200, 404 |
//! | `POST /v1/applications/{app}/control:pause`, `:resume`, `:rate`, `:reset` | 200, 404, 409 another revision than `expectedRevision` |

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use redeliver_proto::v1;
use redeliver_proto::v1::rate_limit::Limit;
use redeliver_service::control::ControlName;
use redeliver_service::control::operations::{ChangeVerb, WantedChange, read_limit};
use redeliver_service::control::value::RateLimit;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::ControlView;
use crate::api::call::Call;
use crate::api::documented::{BodyProblems, ControlProblems, DocumentedRouter, Problems};
use crate::api::error::RequestError;
use crate::api::jobs::Jobs;
use crate::api::problem::Problem;
use crate::api::rest::{Options, Params};
use crate::index::Index;
use crate::request::{Field, Format};

const FORMAT: Format = Format::Json;

/// Adds the routes.
pub(in crate::api) fn add<I: Index>(
    router: DocumentedRouter<Arc<Jobs<I>>>,
    max_body: usize,
) -> DocumentedRouter<Arc<Jobs<I>>> {
    router
        .with(__path_list, &list::<I>, max_body)
        .with(__path_show, &show::<I>, max_body)
        .with(__path_pause, &pause::<I>, max_body)
        .with(__path_resume, &resume::<I>, max_body)
        .with(__path_set_rate, &set_rate::<I>, max_body)
        .with(__path_reset, &reset::<I>, max_body)
}

/// A page of the applications that were changed, and those that the configuration pauses or limits.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::api) struct ControlsResponse {
    /// By name. Only those that the caller may read.
    controls: Vec<ControlView>,
    /// The `pageToken` of the next page; missing on the last page.
    #[serde(skip_serializing_if = "String::is_empty")]
    next_page_token: String,
}

#[derive(Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `nextPageToken` of the previous page
    #[serde(default)]
    page_token: String,
}

/// Lists what is paused, limited or changed
///
/// Needs the scope `control:read` for some application. A page has as many as fit into 3 MiB: usually all.
#[utoipa::path(
    get,
    path = "/v1/controls",
    operation_id = "listControls",
    params(ListQuery),
    responses((status = 200, description = "A page of the applications", body = ControlsResponse), Problems),
)]
async fn list<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<ListQuery>,
) -> Result<Json<ControlsResponse>, Problem> {
    let is_application = |name: &ControlName| matches!(name, ControlName::Application(_));
    let page = jobs
        .controls
        .list(&call.caller, is_application, &query.page_token)?;
    Ok(Json(ControlsResponse {
        controls: page.controls.into_iter().map(ControlView::from).collect(),
        next_page_token: page.next_page_token,
    }))
}

/// The application of a request.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct ApplicationPath {
    /// The name of the application
    app: String,
}

/// Gets what is wanted of an application, and what applies
///
/// Needs the scope `control:read` for the application.
#[utoipa::path(
    get,
    path = "/v1/applications/{app}/control",
    operation_id = "getControl",
    params(ApplicationPath),
    responses((status = 200, description = "What is wanted, and what applies", body = ControlView), Problems, ControlProblems),
)]
async fn show<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(ApplicationPath { app }): Path<ApplicationPath>,
) -> Result<Json<ControlView>, Problem> {
    let control = jobs.controls.get(&call.caller, &ControlName::application(&app))?;
    Ok(Json(control.into()))
}

/// The options of a change; a body of length 0 has none.
#[derive(Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::api) struct ControlChange {
    /// The reason, for the audit log. At most 1000 bytes.
    #[serde(default)]
    reason: String,
    /// Answer 409 unless the application has this revision; 0: it was never changed.
    expected_revision: Option<u64>,
}

/// A limit of the rate. With neither of the first two, it is as the configuration says.
#[derive(Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::api) struct ControlRate {
    /// How many jobs are dispatched per second at most, by all schedulers together: from 0.001 to 1000000.
    rate_per_second: Option<f64>,
    /// `true`: there is no limit, whatever the configuration says.
    unlimited: Option<bool>,
    /// The reason, for the audit log. At most 1000 bytes.
    #[serde(default)]
    reason: String,
    /// Answer 409 unless the application has this revision; 0: it was never changed.
    expected_revision: Option<u64>,
}

impl ControlRate {
    fn limit(&self) -> Result<Option<RateLimit>, RequestError> {
        let limit = match (self.rate_per_second, self.unlimited) {
            (Some(_), Some(_)) => {
                let problem = "has both `ratePerSecond` and `unlimited`; write one of them";
                return Err(Field("rate").malformed(FORMAT, problem).into());
            }
            (Some(rate), None) => Some(Limit::PerSecond(rate)),
            (None, Some(unlimited)) => Some(Limit::Unlimited(unlimited)),
            (None, None) => None,
        };
        let rate = limit.map(|limit| v1::RateLimit { limit: Some(limit) });
        Ok(read_limit(rate.as_ref())?)
    }
}

/// Pauses an application
///
/// Its jobs are accepted, and none is dispatched. It stays paused over restarts. Needs the scope `control:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/applications/{app}/control:pause",
    operation_id = "pauseControl",
    params(ApplicationPath),
    request_body = ControlChange,
    responses(
        (status = 200, description = "The application is paused", body = ControlView),
        Problems, BodyProblems, ControlProblems,
    ),
)]
async fn pause<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(ApplicationPath { app }): Path<ApplicationPath>,
    Options(options): Options<ControlChange>,
) -> Result<Json<ControlView>, Problem> {
    change(&jobs, &call, app, ChangeVerb::Pause, options).await
}

/// Resumes an application
///
/// Even if the configuration pauses it. Needs the scope `control:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/applications/{app}/control:resume",
    operation_id = "resumeControl",
    params(ApplicationPath),
    request_body = ControlChange,
    responses(
        (status = 200, description = "The application runs", body = ControlView),
        Problems, BodyProblems, ControlProblems,
    ),
)]
async fn resume<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(ApplicationPath { app }): Path<ApplicationPath>,
    Options(options): Options<ControlChange>,
) -> Result<Json<ControlView>, Problem> {
    change(&jobs, &call, app, ChangeVerb::Resume, options).await
}

/// Sets or removes the limit of the rate of an application
///
/// Needs the scope `control:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/applications/{app}/control:rate",
    operation_id = "setControlRate",
    params(ApplicationPath),
    request_body = ControlRate,
    responses(
        (status = 200, description = "The application has this rate", body = ControlView),
        Problems, BodyProblems, ControlProblems,
    ),
)]
async fn set_rate<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(ApplicationPath { app }): Path<ApplicationPath>,
    Options(options): Options<ControlRate>,
) -> Result<Json<ControlView>, Problem> {
    let verb = ChangeVerb::Rate(options.limit()?);
    let options = ControlChange {
        reason: options.reason,
        expected_revision: options.expected_revision,
    };
    change(&jobs, &call, app, verb, options).await
}

/// Returns an application to the configuration
///
/// Its state and its rate are as the configuration says. Needs the scope `control:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/applications/{app}/control:reset",
    operation_id = "resetControl",
    params(ApplicationPath),
    request_body = ControlChange,
    responses(
        (status = 200, description = "The configuration applies", body = ControlView),
        Problems, BodyProblems, ControlProblems,
    ),
)]
async fn reset<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(ApplicationPath { app }): Path<ApplicationPath>,
    Options(options): Options<ControlChange>,
) -> Result<Json<ControlView>, Problem> {
    change(&jobs, &call, app, ChangeVerb::Reset, options).await
}

async fn change<I: Index>(
    jobs: &Jobs<I>,
    call: &Call,
    app: String,
    verb: ChangeVerb,
    options: ControlChange,
) -> Result<Json<ControlView>, Problem> {
    let wanted = WantedChange {
        name: ControlName::application(&app),
        verb,
        reason: options.reason,
        expected_revision: options.expected_revision,
    };
    Ok(Json(jobs.controls.change(&call.caller, wanted).await?.into()))
}
