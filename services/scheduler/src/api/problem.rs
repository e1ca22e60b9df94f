//! Errors as `application/problem+json` documents (RFC 9457).

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::schedules::view::ScheduleView;
use super::view::JobView;

/// An error response.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) body: Box<ProblemBody>,
    /// A header of the response: how to authenticate (`WWW-Authenticate`), or the methods that the path supports (`Allow`).
    pub(crate) header: Option<Box<(HeaderName, HeaderValue)>>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &str, detail: &str) -> Self {
        let body = ProblemBody {
            title: status.canonical_reason().unwrap_or("error"),
            status: status.as_u16(),
            code: code.into(),
            detail: detail.into(),
            ..ProblemBody::default()
        };
        Self {
            status,
            body: Box::new(body),
            header: None,
        }
    }
}

/// A problem document (RFC 9457).
#[derive(Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProblemBody {
    title: &'static str,
    status: u16,
    // Stable, for programs.
    pub(super) code: Box<str>,
    // For people.
    pub(super) detail: Box<str>,
    // The invalid field of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) field: Option<Box<str>>,
    // The outcome of a command that had no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) outcome: Option<String>,
    /// The job that the problem is about. With `pending`, no job has this id if the idempotency key of the request was in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) job_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) job: Option<JobView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) schedule_id: Option<String>,
    // The schedule as it is, if the caller may know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) schedule: Option<ScheduleView>,
    /// With `pending`: where the command waits for its turn in the ingest topic, as `topic/partition/offset`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) position: Option<String>,
    /// When to send the same request again, in seconds; a response has it also in the header `Retry-After`. Nothing was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) retry_after: Option<u32>,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let retry_after = self.body.retry_after;
        let mut response = (self.status, Json(self.body)).into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if let Some((name, value)) = self.header.map(|header| *header) {
            headers.insert(name, value);
        }
        response
    }
}
