//! Errors as `application/problem+json` documents (RFC 9457).

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use redeliver_proto::v1;
use serde::Serialize;
use utoipa::ToSchema;

use super::schedules::view::ScheduleView;
use super::view::{JobView, outcome};

/// A problem document.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    /// Stable, for programs.
    pub(crate) code: Box<str>,
    /// For people.
    pub(crate) detail: Box<str>,
    /// The invalid field of the request.
    pub(crate) field: Option<Box<str>>,
    pub(crate) job_id: Option<Box<str>>,
    pub(crate) job: Option<Box<v1::Job>>,
    pub(crate) schedule: Option<Box<ConcernedSchedule>>,
    /// Where a pending command is.
    pub(crate) position: Option<Box<str>>,
    /// The outcome of a command that had no effect.
    pub(crate) outcome: Option<v1::Outcome>,
    /// When to send the same request again, in seconds. It is also in the header `Retry-After`.
    pub(crate) retry_after: Option<u32>,
    /// A header of the response: how to authenticate (`WWW-Authenticate`), or the methods that the path supports (`Allow`).
    pub(crate) header: Option<Box<(HeaderName, HeaderValue)>>,
}

/// The schedule that a problem is about.
#[derive(Debug)]
pub(crate) struct ConcernedSchedule {
    pub(crate) id: String,
    /// The schedule as it is, if the caller may know it.
    pub(crate) current: Option<v1::Schedule>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &str, detail: &str) -> Self {
        Self {
            status,
            code: code.into(),
            detail: detail.into(),
            field: None,
            job_id: None,
            job: None,
            schedule: None,
            position: None,
            outcome: None,
            retry_after: None,
            header: None,
        }
    }
}

/// A problem document (RFC 9457).
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProblemBody {
    title: &'static str,
    status: u16,
    code: Box<str>,
    detail: Box<str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<String>,
    /// The job that the problem is about. With `pending`, no job has this id if the idempotency key of the request was in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    job_id: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule: Option<ScheduleView>,
    /// With `pending`: where the command waits for its turn in the ingest topic, as `topic/partition/offset`.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<Box<str>>,
    /// When to send the same request again, in seconds; a response has it also in the header `Retry-After`. Nothing was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u32>,
}

impl From<Problem> for ProblemBody {
    fn from(problem: Problem) -> Self {
        let (schedule_id, schedule) = match problem.schedule {
            Some(schedule) => (Some(schedule.id), schedule.current),
            None => (None, None),
        };
        Self {
            title: problem.status.canonical_reason().unwrap_or("error"),
            status: problem.status.as_u16(),
            code: problem.code,
            detail: problem.detail,
            field: problem.field,
            outcome: problem.outcome.map(outcome),
            job_id: problem.job_id,
            job: problem.job.map(|job| JobView::from(*job)),
            schedule_id,
            schedule: schedule.map(ScheduleView::from),
            position: problem.position,
            retry_after: problem.retry_after,
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(mut self) -> Response {
        let (status, retry_after) = (self.status, self.retry_after);
        let header = self.header.take();
        let mut response = (status, Json(ProblemBody::from(self))).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if let Some((name, value)) = header.map(|header| *header) {
            headers.insert(name, value);
        }
        response
    }
}
