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
use utoipa::openapi::{Components, ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{IntoResponses, OpenApi as _, PartialSchema, Path, ToSchema};

use super::body_budget::{BodyBudget, reserve_body};
use super::control::rest::{ControlChange, ControlRate, ControlsResponse};
use super::control::{ControlView, StateView};
use super::problem::ProblemBody;
use super::rest::{BatchRequest, BatchResponse, BatchResult, CommandResponse, ListResponse};
use super::schedules::rest::{
    DeletedSchedule, NoOptions, PreviewResponse, ResumeRequest, ResumedSchedule, SchedulesResponse,
    TriggeredSchedule,
};
use super::schedules::{ScheduleView, UnreadableView};
use super::view::{HeaderView, JobView, StatsView};
use crate::request::{
    ConflictPolicy, DueRequest, Gap, JobRequest, MisfirePolicy, Overlap, PriorityName as Priority,
    ScheduleRequest, ScheduleState,
};

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
            router: Router::new().without_v07_checks(),
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
            // See `split_verb`.
            self.router = self.router.route(&path.replace("}:", "}/:"), route);
        }
        self.paths.add_path_operation(path, methods, P::operation());
        self
    }

    /// The router, and the document.
    pub(super) fn split(self) -> (Router<S>, OpenApi) {
        let mut document = Description::openapi();
        document.paths = self.paths;
        let token = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", token);
        describe_definitions(components);
        (self.router, document)
    }
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

/// The body of a preview.
pub(super) struct PreviewDefinition;

impl ToSchema for PreviewDefinition {}

impl PartialSchema for PreviewDefinition {
    fn schema() -> RefOr<Schema> {
        let mut schema = ScheduleRequest::schema();
        if let RefOr::T(Schema::Object(preview)) = &mut schema {
            let description = "The definition of a recurring schedule, which may lack `appName` and the other fields of its job.";
            let times = ["cron", "zone", "every", "start", "end", "maxCount", "jitter"];
            preview.description = Some(description.to_owned());
            preview.additional_properties = None;
            preview.required.clear();
            preview
                .properties
                .retain(|field, _| times.contains(&field.as_str()));
        }
        schema
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
        BatchRequest, BatchResponse, BatchResult, CommandResponse, ConflictPolicy, ControlChange, ControlRate, ControlView,
        ControlsResponse, DeletedSchedule, DueRequest, Gap, HeaderView, JobRequest, JobView, ListResponse,
        MisfirePolicy, NoOptions, Overlap, PreviewDefinition, PreviewResponse, Priority, ProblemBody,
        ResumeRequest, ResumedSchedule, ScheduleRequest, ScheduleState, ScheduleView, SchedulesResponse, StateView,
        StatsView, TriggeredSchedule, UnreadableView,
    ))
)]
struct Description;

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

/// Defines groups of responses.
macro_rules! problems {
    ($(#[doc = $doc:literal] $name:ident { $($status:literal: $description:literal,)+ })+) => {$(
        #[doc = $doc]
        pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
                problems(&[$(($status, $description)),+])
            }
        }
    )+};
}

problems! {
    /// The responses that any request can get.
    Problems {
        401: "No valid token or certificate",
        403: "The scope is missing",
        421: "The server does not accept requests for this host",
        422: "A field is invalid",
        429: "Too many requests; nothing was written",
        503: "The scheduler cannot serve this request now; nothing was written",
    }
    /// The responses that requests with a body can get.
    BodyProblems {
        400: "The body is not JSON",
        408: "The body did not arrive in time",
        413: "The body is too large",
        415: "The content type is not application/json",
    }
    /// The responses that requests for an existing job can get.
    JobProblems {
        404: "The job is unknown",
    }
    /// What commands can be answered.
    CommandProblems {
        409: "Another request used the idempotency key, or the job ended before",
        424: "The outcome is unknown",
    }
    /// The responses that requests for control can get.
    ControlProblems {
        404: "The application is unknown",
        409: "The application has another revision, or its value has an unknown format",
        424: "The outcome is unknown",
    }
    /// The responses that requests for a schedule can get.
    ScheduleProblems {
        404: "The schedule is unknown",
        409: "Another schedule has the id, or the schedule has another revision",
        424: "The outcome is unknown",
    }
}

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
