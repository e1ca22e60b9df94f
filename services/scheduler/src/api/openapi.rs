//! The OpenAPI 3.1 document of REST, and a page that shows it.
//!
//! A route is added together with the description of its operation, from which come its path and its method. So the document
//! contains exactly the routes that are served. Neither the document nor the page requires an identity: they contain no data. The
//! page and its files are part of the program, and load nothing from elsewhere.

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use utoipa::OpenApi as _;
use utoipa::openapi::path::Paths;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, OpenApi, RefOr, Schema};

use super::control::rest::{ControlChange, ControlRate, ControlsResponse};
use super::control::{ControlView, StateView};
use super::problem::ProblemBody;
use super::rest::{
    ApplicationsResponse, BatchRequest, BatchResponse, BatchResult, CommandResponse, ListResponse,
};
use super::schedules::rest::{
    DeletedSchedule, NoOptions, PreviewDefinition, PreviewResponse, ResumeRequest, ResumedSchedule,
    SchedulesResponse, TriggeredSchedule,
};
use super::schedules::{ScheduleView, UnreadableView};
use super::view::{ApplicationView, HeaderView, JobView, StatsView};
use crate::request::{
    ConflictPolicy, DueRequest, Gap, JobRequest, MisfirePolicy, Overlap, PriorityName as Priority,
    ScheduleRequest, ScheduleState,
};

/// The path of the document.
pub(super) const DOCUMENT: &str = "/v1/openapi.json";
/// The path of the page.
const PAGE: &str = "/v1/docs";

/// The document of these operations.
pub(super) fn document(paths: Paths) -> OpenApi {
    let mut document = Description::openapi();
    document.paths = paths;
    let token = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("token", token);
    describe_definitions(components);
    document
}

/// Describes that the definition of a schedule may have the other fields that `GET` returns.
fn describe_definitions(components: &mut Components) {
    if let Some(RefOr::T(Schema::Object(request))) = components.schemas.get_mut("ScheduleRequest") {
        request.additional_properties = None;
    }
    // Parts of it, which nothing refers to.
    components
        .schemas
        .retain(|name, _| name != "Cron" && name != "Every");
}

/// Serves the document and the page.
///
/// # Errors
/// When the document cannot be written as JSON.
pub(super) fn router(document: &OpenApi) -> serde_json::Result<Router> {
    // Serialized once, so that responses that are not read share its memory.
    let document = Bytes::from(serde_json::to_vec(document)?);
    let document =
        async move || ([(header::CONTENT_TYPE, "application/json")], document.clone()).into_response();
    Ok(Router::new()
        .route(DOCUMENT, get(document))
        .route(
            PAGE,
            get(async || file("text/html; charset=utf-8", include_str!("docs/index.html"))),
        )
        .route(
            "/v1/docs/page.js",
            get(async || file("text/javascript; charset=utf-8", include_str!("docs/page.js"))),
        )
        .route(
            "/v1/docs/page.css",
            get(async || file("text/css; charset=utf-8", include_str!("docs/page.css"))),
        ))
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    // The page can load only what this server serves.
    let policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
                  form-action 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy)),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (headers, text).into_response()
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Redeliver jobs",
        description = "Schedules jobs. Answers are final: they are sent after the outcome is committed to Kafka. \
            429 and 503 mean that nothing was written, and have Retry-After. 424 means that the outcome is unknown: repeat \
            the request only with the same idempotency key.",
    ),
    security((), ("token" = [])),
    components(schemas(
        ApplicationView, ApplicationsResponse, BatchRequest, BatchResponse, BatchResult, CommandResponse, ConflictPolicy, ControlChange, ControlRate, ControlView,
        ControlsResponse, DeletedSchedule, DueRequest, Gap, HeaderView, JobRequest, JobView, ListResponse,
        MisfirePolicy, NoOptions, Overlap, PreviewDefinition, PreviewResponse, Priority, ProblemBody,
        ResumeRequest, ResumedSchedule, ScheduleRequest, ScheduleState, ScheduleView, SchedulesResponse, StateView,
        StatsView, TriggeredSchedule, UnreadableView,
    ))
)]
struct Description;

#[cfg(test)]
mod tests {
    #[test]
    fn page_loads_nothing_from_elsewhere() {
        for text in [
            include_str!("docs/index.html"),
            include_str!("docs/page.js"),
            include_str!("docs/page.css"),
        ] {
            assert!(!text.contains("//") || !text.contains("http"), "{text}");
            assert!(!text.contains("url("), "{text}");
        }
    }
}
