//! A router whose routes are added together with the descriptions of their operations, and descriptions that operations share.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::middleware;
use axum::routing::{MethodFilter, MethodRouter, on};
use utoipa::openapi::path::{HttpMethod, Paths};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, Path};

use super::body_budget::{BodyBudget, reserve_body};

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

    /// The router, and the descriptions.
    pub(super) fn split(self) -> (Router<S>, Paths) {
        (self.router, self.paths)
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
