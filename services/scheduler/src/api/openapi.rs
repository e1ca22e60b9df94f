//! The OpenAPI 3.1 document of REST, and a page that shows it.
//!
//! A route is added together with the description of its operation, from which come its path and its method. So the document
//! contains exactly the routes that are served. Neither the document nor the page requires an identity: they contain no data. The
//! page and its files are part of the program, and load nothing from elsewhere.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::http::{HeaderValue, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, get, on};
use bytes::Bytes;
use utoipa::openapi::path::{HttpMethod, Paths};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, OpenApi as _, Path, ToSchema};

use super::body_budget::{BodyBudget, reserve_body};
use super::control::rest::{ControlChange, ControlRate, ControlsResponse};
use super::control::{ControlView, StateView};
use super::problem::ProblemBody;
use super::rest::{BatchResponse, BatchResult, CommandResponse, ListResponse};
use super::schedules::rest::{
    DeletedSchedule, NoOptions, PreviewResponse, ResumedSchedule, SchedulesResponse, TriggeredSchedule,
};
use super::schedules::{ScheduleView, UnreadableView};
use super::view::{HeaderView, JobView, StatsView};

/// The path of the document.
pub(super) const DOCUMENT: &str = "/v1/openapi.json";
/// The path of the page.
const PAGE: &str = "/v1/docs";

/// A router, and the descriptions of its operations.
pub(super) struct DocumentedRouter<S> {
    router: Router<S>,
    paths: Paths,
    bodies: BodyBudget,
}

impl<S: Clone + Send + Sync + 'static> DocumentedRouter<S> {
    /// A router whose operations share the memory for the bodies of their requests.
    pub(super) fn new(bodies: BodyBudget) -> Self {
        Self {
            router: Router::new(),
            paths: Paths::new(),
            bodies,
        }
    }

    /// A route for bodies of at most `max_body` bytes.
    fn route<T: 'static>(
        &self,
        method: MethodFilter,
        handler: &impl Handler<T, S>,
        max_body: usize,
    ) -> MethodRouter<S> {
        let bodies = self.bodies.clone();
        on(method, handler.clone())
            .layer(DefaultBodyLimit::max(max_body))
            .layer(middleware::from_fn(move |caller, request, next| {
                reserve_body(bodies.clone(), max_body, caller, request, next)
            }))
    }

    /// Adds an operation. A body has at most `max_body` bytes.
    pub(super) fn with<P: Path, T: 'static>(
        mut self,
        _description: P,
        handler: &impl Handler<T, S>,
        max_body: usize,
    ) -> Self {
        let (path, methods) = (P::path(), P::methods());
        for method in &methods {
            let route = self.route(filter(method), handler, max_body);
            self.router = self.router.route(&path, route);
        }
        self.paths.add_path_operation(path, methods, P::operation());
        self
    }

    /// Adds a route for operations whose paths differ only in a part of a segment, which the router cannot match.
    /// [`DocumentedRouter::describe`] adds their descriptions.
    pub(super) fn with_verbs<T: 'static>(
        mut self,
        route: &str,
        handler: &impl Handler<T, S>,
        max_body: usize,
    ) -> Self {
        let handler = self.route(MethodFilter::POST, handler, max_body);
        self.router = self.router.route(route, handler);
        self
    }

    /// Adds the description of an operation that a route of [`DocumentedRouter::with_verbs`] serves.
    pub(super) fn describe<P: Path>(mut self, _description: P) -> Self {
        self.paths
            .add_path_operation(P::path(), P::methods(), P::operation());
        self
    }

    /// The router, and the document.
    pub(super) fn split(self) -> (Router<S>, OpenApi) {
        let mut document = Description::openapi();
        document.paths = self.paths;
        let token = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", token);
        (self.router, document)
    }
}

fn filter(method: &HttpMethod) -> MethodFilter {
    match method {
        HttpMethod::Post => MethodFilter::POST,
        HttpMethod::Put => MethodFilter::PUT,
        HttpMethod::Delete => MethodFilter::DELETE,
        HttpMethod::Options => MethodFilter::OPTIONS,
        HttpMethod::Head => MethodFilter::HEAD,
        HttpMethod::Patch => MethodFilter::PATCH,
        HttpMethod::Trace => MethodFilter::TRACE,
        HttpMethod::Get => MethodFilter::GET,
    }
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
        BatchRequest, BatchResponse, BatchResult, CommandResponse, ControlChange, ControlRate, ControlView,
        ControlsResponse, DeletedSchedule, DueRequest, Gap, HeaderView, JobRequest, JobView, ListResponse,
        MisfirePolicy, NoOptions, OnConflict, Overlap, PreviewDefinition, PreviewResponse, Priority, ProblemBody,
        ResumeRequest, ResumedSchedule, ScheduleRequest, ScheduleState, ScheduleView, SchedulesResponse, StateView,
        StatsView, TriggeredSchedule, UnreadableView,
    ))
)]
struct Description;

/// A job to schedule. Exactly one of `scheduledTime` and `delay` is required.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) struct JobRequest {
    /// The name of an application in the configuration of the scheduler.
    #[schema(min_length = 1)]
    app_name: String,
    /// The due time, such as `2026-11-22T08:00:00Z`.
    #[schema(format = DateTime)]
    scheduled_time: Option<String>,
    /// A delay from now on, such as `90s`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    delay: Option<String>,
    priority: Option<Priority>,
    /// Requests of one application with the same key create one job.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
    /// What happens if the key is in use. `reject`, the default: the same request is a duplicate, another one a conflict (409).
    /// `replace`: the request takes the place of a job that waits, with a new due time and data; if the job has ended, it gets a
    /// new one. A request has no effect if it repeats the newest one of the key: same content, same `requestId`, and a
    /// `scheduledTime` or a `requestId`.
    on_conflict: Option<OnConflict>,
    /// The value of the record to dispatch.
    #[schema(value_type = serde_json::Value)]
    job_data: (),
    /// The key of the record to dispatch.
    key: Option<String>,
    /// The headers of the record to dispatch: an object, or an array of objects with `name` and `value`.
    #[schema(value_type = Option<serde_json::Value>)]
    headers: (),
    /// How long after its due time the job can still be dispatched, such as `5m`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    expire_after: Option<String>,
    /// An id that the client chooses; it is stored with the job.
    #[schema(min_length = 1, max_length = 512)]
    request_id: Option<String>,
}

/// A new due time. Exactly one of the two is required.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) struct DueRequest {
    /// The due time, such as `2026-11-22T08:00:00Z`.
    #[schema(format = DateTime)]
    scheduled_time: Option<String>,
    /// A delay from now on, such as `90s`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    delay: Option<String>,
}

/// Jobs to schedule.
#[derive(ToSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "describes what the handler parses")]
pub(crate) struct BatchRequest {
    #[schema(min_items = 1, max_items = 1000)]
    jobs: Vec<JobRequest>,
}

/// The definition of a recurring schedule, or a schedule as `GET` returns it, of which all but `state` and `revision` is ignored besides the
/// definition. Exactly one of `cron` and `every` is required.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) struct ScheduleRequest {
    /// 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`. Required to create a schedule.
    id: Option<String>,
    #[schema(inline)]
    cron: Option<CronRequest>,
    /// With `cron` as a string: the name of an IANA time zone, `scheduler.default_time_zone` by default.
    zone: Option<String>,
    #[schema(inline)]
    every: Option<EveryRequest>,
    /// No nominal time is before this one.
    #[schema(format = DateTime)]
    start: Option<String>,
    /// No nominal time is after this one.
    #[schema(format = DateTime)]
    end: Option<String>,
    /// How many occurrences are dispatched; without a limit by default. Skipped and triggered ones do not count.
    #[schema(minimum = 1)]
    max_count: Option<u64>,
    /// How much later than its nominal time an occurrence may be due, such as `90s`: at most 1 day.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    jitter: Option<String>,
    #[schema(inline)]
    misfire: Option<MisfireRequest>,
    /// The name of an application in the configuration of the scheduler.
    #[schema(min_length = 1)]
    app_name: String,
    priority: Option<Priority>,
    /// The value of the record to dispatch. Either this or `jobDataBase64` is required.
    #[schema(value_type = Option<serde_json::Value>)]
    job_data: (),
    /// The value of the record to dispatch, in Base64.
    job_data_base64: Option<String>,
    /// The key of the record to dispatch.
    key: Option<String>,
    /// The key of the record to dispatch, in Base64.
    key_base64: Option<String>,
    /// The headers of the record to dispatch: an object, or an array of objects with `name` and `value` or `valueBase64`.
    #[schema(value_type = Option<serde_json::Value>)]
    headers: (),
    /// How long after its due time a job can still be dispatched, such as `5m`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    expire_after: Option<String>,
    /// What the state of the schedule will be. Another state is an error, because a definition does not
    /// change it.
    state: Option<ScheduleState>,
    /// In an update: the revision that the schedule has before it. Another one is a conflict (409). Ignored in a creation.
    #[schema(minimum = 1)]
    revision: Option<u32>,
}

/// The definition of a recurring schedule, which may lack `appName` and the other fields of its job.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) struct PreviewDefinition {
    #[schema(inline)]
    cron: Option<CronRequest>,
    /// With `cron` as a string: the name of an IANA time zone, `scheduler.default_time_zone` by default.
    zone: Option<String>,
    #[schema(inline)]
    every: Option<EveryRequest>,
    /// No nominal time is before this one.
    #[schema(format = DateTime)]
    start: Option<String>,
    /// No nominal time is after this one.
    #[schema(format = DateTime)]
    end: Option<String>,
    #[schema(minimum = 1)]
    max_count: Option<u64>,
    /// How much later than its nominal time an occurrence may be due, such as `90s`: at most 1 day.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    jitter: Option<String>,
}

/// An expression, such as `30 2 * * *`, or an object.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum CronRequest {
    Expression(String),
    Object {
        /// Five fields, or six with the second in front; or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.
        expression: String,
        /// The name of an IANA time zone, `scheduler.default_time_zone` by default.
        zone: Option<String>,
        /// What happens to a missing local time: `shift` (default) or `skip`.
        gap: Option<Gap>,
        /// What happens to a local time that occurs twice: `first` or `both`.
        overlap: Option<Overlap>,
    },
}

/// An interval, such as `5m`, or an object.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum EveryRequest {
    Interval(String),
    Object {
        /// From 1 second to 366 days.
        interval: String,
        /// One of the times, which decides the phase.
        #[schema(format = DateTime)]
        anchor: Option<String>,
    },
}

/// What happens to occurrences that are missed.
#[derive(ToSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) struct MisfireRequest {
    /// `once` by default.
    policy: Option<MisfirePolicy>,
    /// With `all`.
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// How late an occurrence can be without being missed, such as `60s` (default).
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    grace: Option<String>,
}

/// How to resume a schedule.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "describes what the handler parses")]
pub(crate) struct ResumeRequest {
    /// Whether what fell due during the pause is subject to the misfire policy. Otherwise, it is skipped.
    catch_up: Option<bool>,
}

/// A priority.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum Priority {
    High,
    Normal,
    Low,
}

/// What happens if an idempotency key is in use.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum OnConflict {
    Reject,
    Replace,
}

/// What happens to a missing local time.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum Gap {
    Shift,
    Skip,
}

/// What happens to a local time that occurs twice.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum Overlap {
    First,
    Both,
}

/// Which missed occurrences are dispatched late.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum MisfirePolicy {
    Skip,
    Once,
    All,
}

/// The state of a schedule.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes what request::json parses")]
pub(crate) enum ScheduleState {
    Active,
    Paused,
    Finished,
}

fn problems(problems: &[(u16, &str)]) -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
    let problem = |(status, description): &(u16, &str)| {
        let schema = Ref::from_schema_name("ProblemBody");
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let response = ResponseBuilder::new()
            .description(*description)
            .content("application/problem+json", content)
            .build();
        (status.to_string(), RefOr::T(response))
    };
    problems.iter().map(problem).collect()
}

/// The responses that any request can get.
pub(super) struct Problems;

impl IntoResponses for Problems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[
            (401, "No valid token or certificate"),
            (403, "The scope is missing"),
            (421, "The server does not accept requests for this host"),
            (422, "A field is invalid"),
            (429, "Too many requests; nothing was written"),
            (
                503,
                "The scheduler cannot serve this request now; nothing was written",
            ),
        ])
    }
}

/// The responses that requests with a body can get.
pub(super) struct BodyProblems;

impl IntoResponses for BodyProblems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[
            (400, "The body is not JSON"),
            (408, "The body did not arrive in time"),
            (413, "The body is too large"),
            (415, "The content type is not application/json"),
        ])
    }
}

/// The responses that requests for an existing job can get.
pub(super) struct JobProblems;

impl IntoResponses for JobProblems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[(404, "The job is unknown")])
    }
}

/// What commands can be answered.
pub(super) struct CommandProblems;

impl IntoResponses for CommandProblems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[
            (
                409,
                "Another request used the idempotency key, or the job ended before",
            ),
            (424, "The outcome is unknown"),
        ])
    }
}

/// The responses that requests for control can get.
pub(super) struct ControlProblems;

impl IntoResponses for ControlProblems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[
            (404, "The application is unknown"),
            (
                409,
                "The application has another revision, or its value has an unknown format",
            ),
            (424, "The outcome is unknown"),
        ])
    }
}

/// The responses that requests for a schedule can get.
pub(super) struct ScheduleProblems;

impl IntoResponses for ScheduleProblems {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        problems(&[
            (404, "The schedule is unknown"),
            (
                409,
                "Another schedule has the id, or the schedule has another revision",
            ),
            (424, "The outcome is unknown"),
        ])
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::*;
    use crate::request::{Field, read_schedule_json};

    #[test]
    fn the_document_describes_the_fields_that_requests_have() {
        let document = serde_json::to_value(Description::openapi()).unwrap();
        assert_eq!(document["openapi"], "3.1.0");
        let described = document["components"]["schemas"]["JobRequest"]["properties"]
            .as_object()
            .unwrap();
        let mut described: Vec<&str> = described.keys().map(String::as_str).collect();
        let commands = [Field::Cancel, Field::Reschedule, Field::Cron, Field::TimeZone];
        let fields = Field::IN_JSON
            .into_iter()
            .filter(|field| !commands.contains(field));
        let mut fields: Vec<&str> = fields.map(Field::json).collect();
        described.sort_unstable();
        fields.sort_unstable();
        assert_eq!(described, fields);
    }

    #[test]
    fn the_document_describes_only_fields_that_definitions_of_schedules_have() {
        let document = serde_json::to_value(Description::openapi()).unwrap();
        for schema in ["ScheduleRequest", "PreviewDefinition"] {
            let fields = &document["components"]["schemas"][schema]["properties"];
            let fields = fields.as_object().unwrap();
            assert!(!fields.is_empty());
            for field in fields.keys() {
                let text = Bytes::from(format!("{{\"{field}\":null}}"));
                if let Err(failure) = read_schedule_json(&text, &TimeZone::UTC) {
                    assert_ne!(failure.code, "request.unknownField", "{field}");
                }
            }
        }
    }

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
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
