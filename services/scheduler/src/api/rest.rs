//! REST: `/v1/jobs` and `/v1/stats`. Errors are `application/problem+json` (RFC 9457).
//!
//! | request | answer |
//! |---|---|
//! | `POST /v1/jobs` | 201 scheduled, 200 the same request again, 409 another one has the key, 503 no room for far jobs; `?wait=false`: 202 |
//! | `GET /v1/jobs/{id}` | 200, 404 |
//! | `DELETE /v1/jobs/{id}` | 200 it will not be dispatched: cancelled now or before, or expired; 409 it has been, 404 |
//! | `PATCH /v1/jobs/{id}` | 200 it has a new time, 409 it has ended, 404 |
//! | `GET /v1/stats?minutes=60` | 200 |

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use redeliver_core::{Failure, Headers};
use redeliver_proto::auth::RequireToken;
use redeliver_proto::{error, v1};
use serde::{Deserialize, Serialize};

use super::Jobs;
use super::jobs::trace_of;
use super::refusal::Refusal;
use super::view::{JobView, StatsView, outcome};
use crate::index::Index;
use crate::job::JobId;
use crate::request::{Draft, Field, Format, ParsedRequest, read_id, read_json, read_json_time};

pub(crate) fn router<I: Index>(jobs: Arc<Jobs<I>>, require: RequireToken) -> Router {
    let limit = jobs.max_request();
    Router::new()
        .route("/v1/jobs", post(schedule::<I>))
        .route(
            "/v1/jobs/{id}",
            get(show::<I>).delete(cancel::<I>).patch(reschedule::<I>),
        )
        .route("/v1/stats", get(stats::<I>))
        .method_not_allowed_fallback(async || {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "method",
                "there is no such method here",
            )
        })
        .route_layer(middleware::from_fn_with_state(require, check_token))
        .layer(DefaultBodyLimit::max(limit))
        .with_state(jobs)
}

/// For paths that are none of ours.
pub(crate) fn nothing_there() -> Problem {
    let detail = "there is nothing here; there are /v1/jobs, /v1/jobs/{id} and /v1/stats";
    problem(StatusCode::NOT_FOUND, "path", detail)
}

async fn check_token(State(require): State<RequireToken>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION);
    match require.check(given.map(HeaderValue::as_bytes)) {
        Ok(()) => next.run(request).await,
        Err(status) => {
            let code = error::reason(&status).unwrap_or_default().to_lowercase();
            let detail = "this API asks for its token: send the header `authorization: Bearer <token>`";
            let refused = problem(StatusCode::UNAUTHORIZED, &code, detail);
            let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
            (challenge, refused).into_response()
        }
    }
}

/// What became of a command.
#[derive(Serialize)]
struct Answer {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScheduleQuery {
    wait: Option<bool>,
}

async fn schedule<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    query: Result<Query<ScheduleQuery>, QueryRejection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let wait = query.map_err(|error| wrong_query(&error))?.wait.unwrap_or(true);
    let mut draft = draft_of(&json_body(&headers, body)?, &jobs)?;
    take_key(&mut draft, &headers)?;
    let accepted = jobs.schedule(draft, Format::Json, wait, trace(&headers)).await?;
    let status = match &accepted.decided {
        None => StatusCode::ACCEPTED,
        Some((v1::Outcome::Duplicate, _)) => StatusCode::OK,
        Some(_) => StatusCode::CREATED,
    };
    let location = [(header::LOCATION, format!("/v1/jobs/{}", accepted.id))];
    let (decided, job) = accepted.decided.unzip();
    let answer = Answer {
        id: accepted.id.to_string(),
        outcome: decided.map(outcome),
        job: job.map(JobView::from),
    };
    Ok((status, location, Json(answer)).into_response())
}

async fn show<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    Path(id): Path<String>,
) -> Result<Json<JobView>, Problem> {
    let job = jobs.get(id_of(&id)?).await?;
    Ok(Json(job.into()))
}

async fn cancel<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Answer>, Problem> {
    let id = id_of(&id)?;
    let cancelled = jobs.cancel(id, trace(&headers)).await?;
    let has_effect = matches!(
        cancelled.outcome(),
        v1::Outcome::Cancelled | v1::Outcome::AlreadyCancelled | v1::Outcome::Expired
    );
    answer(id, cancelled, has_effect)
}

async fn reschedule<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Answer>, Problem> {
    let id = id_of(&id)?;
    let body = json_body(&headers, body)?;
    let when = read_json_time(&body, &jobs.rules.time_zone).map_err(Refusal::from)?;
    let rescheduled = jobs.reschedule(id, when, Format::Json, trace(&headers)).await?;
    let has_effect = rescheduled.outcome() == v1::Outcome::Rescheduled;
    answer(id, rescheduled, has_effect)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatsQuery {
    minutes: Option<u32>,
}

async fn stats<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    query: Result<Query<StatsQuery>, QueryRejection>,
) -> Result<Json<StatsView>, Problem> {
    let minutes = query.map_err(|error| wrong_query(&error))?.minutes.unwrap_or(0);
    let stats = jobs.stats(minutes, Format::Json).await?;
    Ok(Json(stats.into()))
}

/// A command that came too late, or for a job that is not known, is a problem.
fn answer(id: JobId, told: v1::CommandOutcome, has_effect: bool) -> Result<Json<Answer>, Problem> {
    let name = outcome(told.outcome());
    if told.outcome() == v1::Outcome::Unknown {
        return Err(Refusal::UnknownJob(id).into());
    }
    if has_effect {
        return Ok(Json(Answer {
            id: id.to_string(),
            outcome: Some(name),
            job: told.job.map(JobView::from),
        }));
    }
    Err(Problem {
        retry_after: None,
        status: StatusCode::CONFLICT,
        code: name.clone(),
        detail: format!("job {id} has ended before the command came: {name}"),
        field: None,
        job_id: Some(id.to_string()),
        outcome: Some(told.outcome()),
        job: told.job.map(Box::new),
    })
}

/// The body, if it is said to be JSON. Web pages of others cannot say so without being asked first.
fn json_body(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Bytes, Problem> {
    let given = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let given = given
        .and_then(|given| std::str::from_utf8(given).ok())
        .unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let detail = "send the body with the header `content-type: application/json`";
        return Err(problem(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "request.contentType",
            detail,
        ));
    }
    body.map_err(|error| match error.status() {
        status @ StatusCode::PAYLOAD_TOO_LARGE => {
            let detail =
                "the body is longer than any job may be; scheduler.max_data is the limit of a job's data";
            problem(status, "body", detail)
        }
        status => problem(status, "body", &error.body_text()),
    })
}

fn draft_of<I: Index>(body: &Bytes, jobs: &Jobs<I>) -> Result<Draft, Refusal> {
    let told = |field: Field, instead: &str| {
        let problem = format!("is not for this request; use {instead}");
        Err(Refusal::Wrong(field.malformed(Format::Json, &problem)))
    };
    match read_json(body, &jobs.rules.time_zone)? {
        ParsedRequest::Schedule(draft) => Ok(*draft),
        ParsedRequest::Cancel(_) => told(Field::Cancel, "DELETE /v1/jobs/{id}"),
        ParsedRequest::Reschedule { .. } => told(Field::Reschedule, "PATCH /v1/jobs/{id}"),
        ParsedRequest::LongWait(_) => told(Field::Pipeline, "the ingest topic"),
    }
}

/// The idempotency key may also stand in the header of that name.
fn take_key(draft: &mut Draft, headers: &HeaderMap) -> Result<(), Refusal> {
    const NAME: &str = "idempotency-key";
    let mut values = headers.get_all(NAME).iter();
    let Some(value) = values.next() else {
        return Ok(());
    };
    let wrong = |problem: &str| {
        Err(Refusal::Wrong(
            Field::IdempotencyKey.malformed(Format::Json, problem),
        ))
    };
    let Ok(key) = std::str::from_utf8(value.as_bytes()) else {
        return wrong("in the header is not UTF-8");
    };
    if values.next().is_some() {
        return wrong("stands in more than one header");
    }
    match &draft.idempotency_key {
        Some(other) if other != key => wrong("differs from the one in the header"),
        _ => {
            draft.idempotency_key = Some(key.to_owned());
            Ok(())
        }
    }
}

fn id_of(text: &str) -> Result<JobId, Refusal> {
    Ok(read_id(Field::Id, Format::Json, text)?)
}

fn trace(headers: &HeaderMap) -> Headers {
    trace_of(|name| headers.get(name).map(HeaderValue::as_bytes))
}

fn wrong_query(error: &QueryRejection) -> Problem {
    let failure = Failure::malformed("request.query", error.body_text());
    Refusal::Wrong(failure).into()
}

/// An error as RFC 9457 has it.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    /// Stable, for programs.
    pub(crate) code: String,
    /// For people.
    pub(crate) detail: String,
    /// The field at fault.
    pub(crate) field: Option<&'static str>,
    /// The job that it is about.
    pub(crate) job_id: Option<String>,
    pub(crate) job: Option<Box<v1::Job>>,
    /// What a command found.
    pub(crate) outcome: Option<v1::Outcome>,
    /// When to come again.
    pub(crate) retry_after: Option<Duration>,
}

fn problem(status: StatusCode, code: &str, detail: &str) -> Problem {
    Problem {
        status,
        code: code.to_owned(),
        detail: detail.to_owned(),
        field: None,
        job_id: None,
        job: None,
        outcome: None,
        retry_after: None,
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        refusal.into_problem()
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Body {
            title: &'static str,
            status: u16,
            code: String,
            detail: String,
            #[serde(skip_serializing_if = "Option::is_none")]
            field: Option<&'static str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            outcome: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            job_id: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            job: Option<JobView>,
        }

        let body = Body {
            title: self.status.canonical_reason().unwrap_or("error"),
            status: self.status.as_u16(),
            code: self.code,
            detail: self.detail,
            field: self.field,
            outcome: self.outcome.map(outcome),
            job_id: self.job_id,
            job: self.job.map(|job| JobView::from(*job)),
        };
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let later = self.retry_after.map(|after| after.as_secs().to_string());
        let later = later.map(|seconds| [(header::RETRY_AFTER, seconds)]);
        match later {
            Some(later) => (self.status, kind, later, Json(body)).into_response(),
            None => (self.status, kind, Json(body)).into_response(),
        }
    }
}
