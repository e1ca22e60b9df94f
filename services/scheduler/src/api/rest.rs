//! REST: `/v1/jobs`, `/v1/stats` and `/v1/applications`. Errors are `application/problem+json` (RFC 9457).
//!
//! | request | answer |
//! |---|---|
//! | `POST /v1/jobs` | 201 scheduled, 200 duplicate or replaced, 409 conflict of idempotency keys, 503 index full; `?wait=false`: 202 |
//! | `POST /v1/jobs:batch` | 200 with a result for each job, which has the status that `POST /v1/jobs` would answer |
//! | `GET /v1/jobs` | 200 with a page of the jobs that wait |
//! | `GET /v1/jobs/{id}` | 200, 404 |
//! | `DELETE /v1/jobs/{id}` | 200 cancelled, cancelled before, or expired; 409 dispatched before; 404 |
//! | `PATCH /v1/jobs/{id}` | 200 rescheduled, 409 ended before, 404 |
//! | `DELETE`, `PATCH /v1/jobs?appName=..&idempotencyKey=..` | the same for the job with this key |
//! | `GET /v1/stats?minutes=60` | 200 |
//! | `GET /v1/applications` | 200 |
//! | any | 401 without a valid token or certificate, 403 without the scope; see [`Jobs`] |

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{AppendHeaders, IntoResponse as _, Response};
use axum::{Json, Router, middleware};
use jiff::tz::TimeZone;
use redeliver_core::Failure;
use redeliver_core::failure::bounded_text;
use redeliver_proto::v1;
use redeliver_proto::v1::job_command::Command as Message;
use redeliver_runtime::http_server::BodyTimeout;
use redeliver_service::identity::{Authentication, Authenticator, authenticate};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::openapi::path::Paths;
use utoipa::{IntoParams, ToSchema};

use super::body_budget::BodyBudget;
use super::call::Call;
use super::control;
use super::documented::{BodyProblems, CommandProblems, DocumentedRouter, JobProblems, Problems};
use super::error::RequestError;
use super::jobs::{Accepted, Jobs};
use super::list::{JobPage, ListJobs};
use super::problem::{Problem, ProblemBody};
use super::rates::limit_rate;
use super::schedules;
use super::view::{ApplicationView, JobView, StatsView};
use crate::index::Index;
use crate::job::JobId;
use crate::request::{
    CONTENT_TYPE, DueRequest, Field, Format, JobRef, JobRequest, NOT_JSON, read_due, read_id, read_instant,
    read_job_ref, read_json,
};

/// The routes, with the maximum size of a body and of a batch in bytes.
fn routes<I: Index>(bodies: BodyBudget, limit: usize, batch_limit: usize) -> DocumentedRouter<Arc<Jobs<I>>> {
    let router = DocumentedRouter::new(bodies)
        .with(__path_schedule, &schedule::<I>, limit)
        .with(__path_schedule_batch, &schedule_batch::<I>, batch_limit)
        .with(__path_list, &list::<I>, limit)
        .with(__path_show, &show::<I>, limit)
        .with(__path_cancel, &cancel::<I>, limit)
        .with(__path_reschedule, &reschedule::<I>, limit)
        .with(__path_cancel_by_key, &cancel_by_key::<I>, limit)
        .with(__path_reschedule_by_key, &reschedule_by_key::<I>, limit)
        .with(__path_stats, &stats::<I>, limit)
        .with(__path_applications, &applications::<I>, limit);
    let router = schedules::rest::add(router, limit);
    control::rest::add(router, limit)
}

pub(crate) fn router<I: Index>(jobs: Arc<Jobs<I>>, authenticator: Authenticator) -> (Router, Paths) {
    let rates = jobs.rates.clone();
    let authentication = Authentication {
        authenticator,
        required: None,
        refuse: |refusal| Problem::from(RequestError::Refused(refusal.clone())).into_response(),
    };
    let (router, paths) = routes(jobs.bodies.clone(), jobs.max_request(), jobs.max_batch).split();
    let router = router
        .method_not_allowed_fallback(async || not_allowed())
        .route_layer(middleware::from_fn(move |caller, request, next| {
            limit_rate(rates.clone(), caller, request, next)
        }))
        .route_layer(middleware::from_fn_with_state(authentication, authenticate))
        .with_state(jobs);
    (router, paths)
}

/// The problem of a method that a path does not support. The router adds the header `Allow`.
fn not_allowed() -> Problem {
    let detail = "this path does not support the method";
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method", detail)
}

/// Makes a verb, such as that of `/v1/schedules/nightly:pause`, a segment of its own: the router cannot match a part of a segment. (matchit 0.8.4,
/// which axum 0.8 pins, has no suffixes of parameters.) Ids contain no colon.
pub(crate) async fn split_verb(mut request: Request) -> Request {
    const SCHEDULES: &str = "/v1/schedules/";
    const VERBS: [&str; 3] = ["pause", "resume", "trigger"];
    let uri = request.uri();
    let segment = uri.path().strip_prefix(SCHEDULES);
    let split = segment.and_then(|segment| {
        VERBS.into_iter().find_map(|verb| {
            let rest = segment.strip_suffix(verb)?;
            let id = [":", "%3A", "%3a"]
                .into_iter()
                .find_map(|colon| rest.strip_suffix(colon))?;
            Some((id, verb))
        })
    });
    if let Some((id, verb)) = split {
        let query = uri.query().map_or_else(String::new, |query| format!("?{query}"));
        let path = format!("{SCHEDULES}{id}/:{verb}{query}").parse();
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = path.ok();
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    }
    request
}

/// The problem of an unknown path.
pub(crate) fn not_found() -> Problem {
    let detail = "no such path; use /v1/jobs, /v1/jobs:batch, /v1/jobs/{id}, /v1/schedules, /v1/schedules/{id}, /v1/stats, \
                  /v1/applications, /v1/controls or /v1/applications/{app}/control; /v1/docs describes them";
    Problem::new(StatusCode::NOT_FOUND, "path", detail)
}

/// Jobs to schedule.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BatchRequest<'a> {
    #[serde(borrow)]
    #[schema(value_type = Vec<JobRequest>, min_items = 1, max_items = 1000)]
    jobs: Vec<&'a RawValue>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ScheduleQuery {
    /// `false`: answer as soon as the request is in Kafka, without waiting for outcomes
    wait: Option<bool>,
}

/// The results of a batch, in the order of the jobs.
#[derive(Serialize, ToSchema)]
pub(super) struct BatchResponse {
    results: Vec<BatchResult>,
}

/// The result of one job: what `POST /v1/jobs` would answer.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct BatchResult {
    status: u16,
    /// As in the response to one job. Missing if there is an `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ProblemBody>,
}

// The path is that of a custom method of the collection. Below `/v1/jobs/`, `batch` would be the id of a job.
/// Schedules several jobs
///
/// Each job succeeds or fails on its own, and needs the scope `jobs:write` for its application.
#[utoipa::path(
    post,
    path = "/v1/jobs:batch",
    operation_id = "batchScheduleJobs",
    params(ScheduleQuery),
    request_body = BatchRequest,
    responses(
        (status = 200, description = "A result for each job, in the order of the jobs", body = BatchResponse),
        Problems, BodyProblems,
    ),
)]
async fn schedule_batch<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<ScheduleQuery>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Json<BatchResponse>, Problem> {
    let wait = query.wait.unwrap_or(true);
    if headers.contains_key(KEY_HEADER) {
        let problem = "belongs in each job of a batch, not in the header `Idempotency-Key`";
        return Err(Field("idempotencyKey").malformed(Format::Json, problem).into());
    }
    let not_batch = |problem: &str| {
        let problem = bounded_text(problem, 200);
        Failure::malformed(NOT_JSON, format!("not a batch `{{\"jobs\": [...]}}`: {problem}"))
    };
    // An array would be read as the values of the fields.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(not_batch("it does not begin with `{`").into());
    }
    let batch: BatchRequest<'_> =
        serde_json::from_slice(&body).map_err(|error| not_batch(&error.to_string()))?;
    jobs.check_batch(&call, batch.jobs.len())?;
    let read = |job: &RawValue| read_spec(&body.slice_ref(job.get().as_bytes()), &jobs);
    let specs = batch.jobs.into_iter().map(read).collect();
    let results = jobs.schedule_batch(&call, specs, wait).await.into_iter();
    Ok(Json(BatchResponse {
        results: results.map(BatchResult::from).collect(),
    }))
}

impl From<Result<Accepted, RequestError>> for BatchResult {
    fn from(result: Result<Accepted, RequestError>) -> Self {
        match result {
            Ok(accepted) => {
                let status = status_of(&accepted).as_u16();
                let CommandResponse { id, outcome, job } = accepted.into();
                Self {
                    status,
                    id: Some(id),
                    outcome,
                    job,
                    error: None,
                }
            }
            Err(error) => {
                let problem = error.into_problem();
                Self {
                    status: problem.status.as_u16(),
                    error: Some(*problem.body),
                    ..Self::default()
                }
            }
        }
    }
}

fn status_of(accepted: &Accepted) -> StatusCode {
    match &accepted.result {
        None => StatusCode::ACCEPTED,
        Some((v1::Outcome::Duplicate | v1::Outcome::Replaced, _)) => StatusCode::OK,
        Some(_) => StatusCode::CREATED,
    }
}

impl From<Accepted> for CommandResponse {
    fn from(accepted: Accepted) -> Self {
        let (result, job) = accepted.result.unzip();
        Self {
            id: accepted.id.to_string(),
            outcome: result.and_then(v1::Outcome::name),
            job: job.map(JobView::from),
        }
    }
}

/// The response to a command.
#[derive(Serialize, ToSchema)]
pub(super) struct CommandResponse {
    /// The id of the job. With 202 it is certain only without an idempotency key: if the key was in use, the job of the key keeps its id,
    /// and no job has this one.
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
}

/// Schedules a job
///
/// Needs the scope `jobs:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/jobs",
    operation_id = "scheduleJob",
    params(
        ScheduleQuery,
        ("Idempotency-Key" = Option<String>, Header, description = "The idempotency key, if the body contains none; quotes around it are not part of it"),
    ),
    request_body = JobRequest,
    responses(
        (status = 201, description = "A new job", body = CommandResponse),
        (status = 200, description = "The same request was accepted before (`duplicate`), or this one took the place of a \
            job that waited (`replaced`)", body = CommandResponse),
        (status = 202, description = "The request is in Kafka, with `wait=false`", body = CommandResponse),
        Problems, BodyProblems, CommandProblems,
    ),
)]
async fn schedule<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<ScheduleQuery>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Response, Problem> {
    let wait = query.wait.unwrap_or(true);
    let mut spec = read_spec(&body, &jobs)?;
    read_key_header(&mut spec, &headers)?;
    let has_key = spec.idempotency_key.is_some();
    let accepted = jobs.schedule(&call, spec, wait).await?;
    let status = status_of(&accepted);
    // If the key was in use, no job has the id.
    let is_certain = accepted.result.is_some() || !has_key;
    let location =
        is_certain.then(|| AppendHeaders([(header::LOCATION, format!("/v1/jobs/{}", accepted.id))]));
    Ok((status, location, Json(CommandResponse::from(accepted))).into_response())
}

/// A page of the jobs that wait.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListResponse {
    /// In the order of their due times, without key, data and headers.
    jobs: Vec<JobView>,
    /// The `pageToken` of the next page; missing on the last page.
    #[serde(skip_serializing_if = "String::is_empty")]
    next_page_token: String,
}

#[derive(Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only jobs of this application, or long waits of this pipeline
    app: Option<String>,
    /// Only jobs that are due at or after this time, such as `2026-11-22T08:00:00Z`
    #[param(format = DateTime)]
    due_from: Option<String>,
    /// Only jobs that are due before this time
    #[param(format = DateTime)]
    due_until: Option<String>,
    /// `scheduled`; other jobs are not listed
    state: Option<String>,
    /// The maximum number of jobs, 100 by default, at most 1000
    #[param(minimum = 0)]
    page_size: Option<i32>,
    /// `nextPageToken` of the previous page, which had the same `app`, `dueFrom` and `dueUntil`
    page_token: Option<String>,
}

impl ListQuery {
    fn read(self, zone: &TimeZone) -> Result<ListJobs, Failure> {
        let time =
            |field, text: Option<String>| text.map(|text| read_instant(field, &text, zone)).transpose();
        let state = self.state.filter(|state| !state.is_empty()).map(|state| {
            let shown = bounded_text(&state, 60);
            let invalid =
                |error| Field("state").malformed(Format::Json, &format!("is `{shown}`, which {error}"));
            state.parse().map_err(invalid)
        });
        Ok(ListJobs {
            app: named(self.app),
            due_from: time(Field("dueFrom"), self.due_from)?,
            due_until: time(Field("dueUntil"), self.due_until)?,
            state: state.transpose()?,
            page_size: self.page_size.unwrap_or(0),
            page_token: self.page_token.unwrap_or_default(),
        })
    }
}

/// The application of a request; `None` if it names none. An empty name counts as none, as in gRPC.
fn named(app: Option<String>) -> Option<String> {
    app.filter(|app| !app.is_empty())
}

/// Lists the jobs that wait
///
/// Those that are due next come first. The list also contains the long waits of pipelines, with `longWait`. A
/// page can contain fewer jobs than `pageSize`, even if it is not the last one. Needs the scope `jobs:read`
/// for the application, or for all applications if the request names none.
#[utoipa::path(
    get,
    path = "/v1/jobs",
    operation_id = "listJobs",
    params(ListQuery),
    responses((status = 200, description = "A page of jobs", body = ListResponse), Problems),
)]
async fn list<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<ListQuery>,
) -> Result<Json<ListResponse>, Problem> {
    let request = query.read(&jobs.rules.time_zone)?;
    let JobPage {
        jobs,
        next_page_token,
    } = jobs.list(&call, &request).await?;
    Ok(Json(ListResponse {
        jobs: jobs.into_iter().map(JobView::from).collect(),
        next_page_token,
    }))
}

/// The job of a request.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct JobPath {
    /// The id of the job
    #[param(pattern = "^[0-9A-HJKMNP-TV-Z]{26}$")]
    id: String,
}

/// Gets a job
///
/// Needs the scope `jobs:read` for the application of the job.
#[utoipa::path(
    get,
    path = "/v1/jobs/{id}",
    operation_id = "getJob",
    params(JobPath),
    responses((status = 200, description = "The job", body = JobView), Problems, JobProblems),
)]
async fn show<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(JobPath { id }): Path<JobPath>,
) -> Result<Json<JobView>, Problem> {
    let job = jobs.get(&call, parse_id(&id)?).await?;
    Ok(Json(job.into()))
}

/// Cancels a job
///
/// Needs the scope `jobs:write` for the application of the job.
#[utoipa::path(
    delete,
    path = "/v1/jobs/{id}",
    operation_id = "cancelJob",
    params(JobPath, ReasonHeader),
    responses(
        (status = 200, description = "Cancelled now or before, or expired", body = CommandResponse),
        Problems, JobProblems, CommandProblems,
    ),
)]
async fn cancel<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(JobPath { id }): Path<JobPath>,
) -> Result<Json<CommandResponse>, Problem> {
    cancel_job(&jobs, &call, JobRef::Id(parse_id(&id)?)).await
}

/// The query of a command that names its job by its idempotency key.
#[derive(Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct KeyQuery {
    /// The name of the application
    #[serde(default)]
    #[param(required, min_length = 1)]
    app_name: String,
    /// The idempotency key of the job
    #[serde(default)]
    #[param(required, min_length = 1)]
    idempotency_key: String,
}

impl KeyQuery {
    fn job(&self) -> Result<JobRef, Failure> {
        let (app, key) = (&self.app_name, &self.idempotency_key);
        if app.is_empty() && key.is_empty() {
            let problem = "is missing; set `appName` and `idempotencyKey`";
            return Err(Field("appName").malformed(Format::Json, problem));
        }
        read_job_ref(Field("id"), Format::Json, "", app, key)
    }
}

/// Cancels the job with an idempotency key
///
/// The newest one, as long as the key is in use. Needs the scope `jobs:write` for the application.
#[utoipa::path(
    delete,
    path = "/v1/jobs",
    operation_id = "cancelJobByKey",
    params(KeyQuery, ReasonHeader),
    responses(
        (status = 200, description = "Cancelled now or before, or expired", body = CommandResponse),
        Problems, JobProblems, CommandProblems,
    ),
)]
async fn cancel_by_key<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<KeyQuery>,
) -> Result<Json<CommandResponse>, Problem> {
    cancel_job(&jobs, &call, query.job()?).await
}

async fn cancel_job<I: Index>(
    jobs: &Jobs<I>,
    call: &Call,
    job: JobRef,
) -> Result<Json<CommandResponse>, Problem> {
    let cancelled = jobs.cancel(call, &job).await?;
    let has_effect = matches!(
        cancelled.outcome(),
        v1::Outcome::Cancelled | v1::Outcome::AlreadyCancelled | v1::Outcome::Expired
    );
    command_response(&job, cancelled, has_effect)
}

/// Gives a job a new due time
///
/// Needs the scope `jobs:write` for the application of the job.
#[utoipa::path(
    patch,
    path = "/v1/jobs/{id}",
    operation_id = "rescheduleJob",
    params(JobPath, ReasonHeader),
    request_body = DueRequest,
    responses(
        (status = 200, description = "The job has the new due time", body = CommandResponse),
        Problems, BodyProblems, JobProblems, CommandProblems,
    ),
)]
async fn reschedule<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(JobPath { id }): Path<JobPath>,
    JsonBody(body): JsonBody,
) -> Result<Json<CommandResponse>, Problem> {
    reschedule_job(&jobs, &call, JobRef::Id(parse_id(&id)?), &body).await
}

/// Gives the job with an idempotency key a new due time
///
/// The newest one, as long as the key is in use. Needs the scope `jobs:write` for the application.
#[utoipa::path(
    patch,
    path = "/v1/jobs",
    operation_id = "rescheduleJobByKey",
    params(KeyQuery, ReasonHeader),
    request_body = DueRequest,
    responses(
        (status = 200, description = "The job has the new due time", body = CommandResponse),
        Problems, BodyProblems, JobProblems, CommandProblems,
    ),
)]
async fn reschedule_by_key<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<KeyQuery>,
    JsonBody(body): JsonBody,
) -> Result<Json<CommandResponse>, Problem> {
    reschedule_job(&jobs, &call, query.job()?, &body).await
}

async fn reschedule_job<I: Index>(
    jobs: &Jobs<I>,
    call: &Call,
    job: JobRef,
    body: &[u8],
) -> Result<Json<CommandResponse>, Problem> {
    let when = read_due(body, &jobs.rules.time_zone)?;
    let rescheduled = jobs.reschedule(call, &job, when).await?;
    let has_effect = rescheduled.outcome() == v1::Outcome::Rescheduled;
    command_response(&job, rescheduled, has_effect)
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StatsQuery {
    /// The number of minutes, 60 by default, at most 1440
    #[param(maximum = 1440)]
    minutes: Option<u32>,
    /// Only jobs of this application, or long waits of this pipeline
    app: Option<String>,
}

/// Counts scheduled jobs by due time
///
/// Counts what `GET /v1/jobs` lists. Needs the scope `jobs:read` for the application, or for all applications if the request names none.
#[utoipa::path(
    get,
    path = "/v1/stats",
    operation_id = "getStats",
    params(StatsQuery),
    responses((status = 200, description = "The numbers of jobs", body = StatsView), Problems),
)]
async fn stats<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<StatsQuery>,
) -> Result<Json<StatsView>, Problem> {
    let (app, minutes) = (named(query.app), query.minutes.unwrap_or(0));
    let stats = jobs.stats(&call, app.as_deref(), minutes).await?;
    Ok(Json(stats.into()))
}

/// The applications.
#[derive(Serialize, ToSchema)]
pub(super) struct ApplicationsResponse {
    /// By name. Only those that the caller may read.
    applications: Vec<ApplicationView>,
}

/// Lists the applications of the configuration
///
/// Needs the scope `jobs:read` for some application.
#[utoipa::path(
    get,
    path = "/v1/applications",
    operation_id = "listApplications",
    responses((status = 200, description = "The applications", body = ApplicationsResponse), Problems),
)]
async fn applications<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
) -> Result<Json<ApplicationsResponse>, Problem> {
    let applications = jobs.applications(&call).await?.into_iter();
    Ok(Json(ApplicationsResponse {
        applications: applications.map(ApplicationView::from).collect(),
    }))
}

/// The response to a cancellation or a rescheduling: a problem if the job is unknown or had ended before.
fn command_response(
    job: &JobRef,
    result: v1::CommandOutcome,
    has_effect: bool,
) -> Result<Json<CommandResponse>, Problem> {
    let name = result.outcome().name().unwrap_or_default();
    if result.outcome() == v1::Outcome::Unknown {
        let id = match job {
            JobRef::Id(id) => Some(*id),
            JobRef::Key { .. } => None,
        };
        return Err(RequestError::UnknownJob(id).into());
    }
    let id = match (job, &result.job) {
        (JobRef::Key { .. }, Some(job)) => job.id.clone(),
        (JobRef::Key { .. }, None) => String::new(),
        (JobRef::Id(id), _) => id.to_string(),
    };
    if has_effect {
        return Ok(Json(CommandResponse {
            id,
            outcome: Some(name),
            job: result.job.map(JobView::from),
        }));
    }
    let detail = format!("job {id} ended before the request: {name}");
    let mut problem = Problem::new(StatusCode::CONFLICT, &name, &detail);
    problem.body.job_id = Some(id);
    problem.body.job = result.job.map(JobView::from);
    problem.body.outcome = Some(name);
    Err(problem)
}

/// The body of a request with the content type of JSON. A web page of another origin cannot send that content type without a
/// preflight request, which fails, so no such page can schedule jobs in a browser.
pub(super) struct JsonBody(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let given = request.headers().get(header::CONTENT_TYPE);
        let given = given.and_then(|given| std::str::from_utf8(given.as_bytes()).ok());
        let essence = given
            .unwrap_or_default()
            .split(';')
            .next()
            .unwrap_or_default()
            .trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            let detail = "unsupported content type; set the header `content-type: application/json`";
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Err(Problem::new(status, CONTENT_TYPE, detail));
        }
        let body = Bytes::from_request(request, state).await;
        body.map(Self).map_err(|error| {
            if let Some(timeout) = BodyTimeout::in_chain(&error) {
                return Problem::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", &timeout.to_string());
            }
            match error.status() {
                status @ StatusCode::PAYLOAD_TOO_LARGE => {
                    let detail = "the body is too large; scheduler.max_data limits its size, and \
                                  scheduler.limits.batch_bytes that of a batch";
                    Problem::new(status, "body", detail)
                }
                status => Problem::new(status, "body", &error.body_text()),
            }
        })
    }
}

/// The options of a command; a missing body has none. The content type is required even then, for the reason that [`JsonBody`] has.
pub(super) struct Options<T>(pub(super) T);

impl<S: Send + Sync, T: Default + DeserializeOwned> FromRequest<S> for Options<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let JsonBody(body) = JsonBody::from_request(request, state).await?;
        if body.is_empty() {
            return Ok(Self(T::default()));
        }
        let invalid = |problem: &str| {
            let detail = format!("not the options of this command: {problem}");
            Failure::malformed(NOT_JSON, detail)
        };
        // An array would be read as the values of the fields.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Err(invalid("it does not begin with `{`").into());
        }
        let options = serde_json::from_slice(&body);
        Ok(Self(options.map_err(|error| invalid(&error.to_string()))?))
    }
}

fn read_spec<I: Index>(body: &Bytes, jobs: &Jobs<I>) -> Result<v1::JobSpec, RequestError> {
    let (field, method) = match read_json(body, &jobs.rules.time_zone)? {
        Message::Schedule(spec) => return Ok(spec),
        Message::Reschedule(_) => (Field("reschedule"), "PATCH"),
        _ => (Field("cancel"), "DELETE"),
    };
    let problem = format!("is not supported in this request; use {method} /v1/jobs/{{id}}");
    Err(field.malformed(Format::Json, &problem).into())
}

const KEY_HEADER: &str = "idempotency-key";

/// Reads the idempotency key from the header `Idempotency-Key`, if there is one.
fn read_key_header(spec: &mut v1::JobSpec, headers: &HeaderMap) -> Result<(), RequestError> {
    let mut values = headers.get_all(KEY_HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(());
    };
    let invalid = |problem: &str| {
        Err(RequestError::Invalid(
            Field("idempotencyKey").malformed(Format::Json, problem),
        ))
    };
    let Ok(key) = std::str::from_utf8(value.as_bytes()) else {
        return invalid("in the header `Idempotency-Key` is not UTF-8");
    };
    if values.next().is_some() {
        return invalid("is set in more than one header `Idempotency-Key`");
    }
    let Some(key) = unquoted(key) else {
        return invalid("in the header `Idempotency-Key` begins with a quote, but is not a quoted string");
    };
    match &spec.idempotency_key {
        Some(other) if *other != *key => invalid("differs from the header `Idempotency-Key`"),
        _ => {
            spec.idempotency_key = Some(key.into_owned());
            Ok(())
        }
    }
}

/// A key as it is, or without quotes if it is written as the string of a structured field (RFC 9651, section 3.3.3), as the draft of the
/// header has it; `None` if the string is invalid.
fn unquoted(key: &str) -> Option<Cow<'_, str>> {
    let Some(quoted) = key.strip_prefix('"') else {
        return Some(key.into());
    };
    let mut rest = quoted.strip_suffix('"')?.chars();
    let mut text = String::new();
    while let Some(char) = rest.next() {
        match char {
            '\\' => text.push(rest.next().filter(|escaped| ['"', '\\'].contains(escaped))?),
            ' '..='~' if char != '"' => text.push(char),
            _ => return None,
        }
    }
    Some(text.into())
}

fn parse_id(text: &str) -> Result<JobId, RequestError> {
    Ok(read_id(Field("id"), Format::Json, text)?)
}

/// The header with the reason of a change.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes the header in the OpenAPI document")]
pub(super) struct ReasonHeader {
    /// Why, for the audit log: percent-encoded UTF-8, at most 1000 bytes.
    #[param(rename = "redeliver-reason")]
    reason: Option<String>,
}

/// The parameters in the query of a request.
pub(super) struct Params<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let query = Query::from_request_parts(parts, state).await;
        let Query(query) = query.map_err(|error| Failure::malformed("request.query", error.body_text()))?;
        Ok(Self(query))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn batch_result_says_when_to_retry() {
        let result = |error| serde_json::to_value(BatchResult::from(Err(error))).unwrap();
        let busy = result(RequestError::RateLimited(Duration::from_millis(1_200)));
        assert_eq!(
            (&busy["status"], &busy["error"]["retryAfter"]),
            (&429.into(), &2.into())
        );
        let rejected = result(RequestError::Rejected("no".to_owned()));
        assert!(rejected["error"].get("retryAfter").is_none(), "{rejected}");
    }

    #[test]
    fn quoted_key_loses_quotes() {
        for (header, key) in [
            ("order-7", Some("order-7")),
            ("\"order-7\"", Some("order-7")),
            (r#""a\"b\\c""#, Some(r#"a"b\c"#)),
            ("\"\"", Some("")),
            ("a\"b", Some("a\"b")),
            ("\u{e9}", Some("\u{e9}")),
            ("\"", None),
            ("\"a", None),
            ("\"a\";p=1", None),
            ("\"a\"b\"", None),
            (r#""a\""#, None),
            (r#""\a""#, None),
            ("\"\u{e9}\"", None),
        ] {
            assert_eq!(unquoted(header).as_deref(), key, "{header}");
        }
    }

    #[test]
    fn empty_list_parameter_counts_as_missing() {
        let query = ListQuery {
            app: Some(String::new()),
            due_from: None,
            due_until: None,
            state: Some(String::new()),
            page_size: None,
            page_token: Some(String::new()),
        };
        let list = query.read(&TimeZone::UTC).unwrap();
        assert_eq!(
            (list.app, list.state, list.page_token),
            (None, None, String::new())
        );
    }
}
