//! Spans of API requests. The parent is the trace context of the caller, and what a request writes continues the trace of its span.
//!
//! Names follow the semantic conventions of OpenTelemetry for HTTP servers
//! (<https://opentelemetry.io/docs/specs/semconv/http/http-spans/>) and for gRPC
//! (<https://opentelemetry.io/docs/specs/semconv/rpc/grpc/>). A span ends with the head of its response, also of a stream.

use axum::extract::{MatchedPath, Request};
use axum::response::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE};
use redeliver_core::{Headers, TRACE_TARGET};
use redeliver_runtime::telemetry::{self, OpenTelemetrySpanExt as _};
use redeliver_runtime::trace_context::span_context;
use tracing::{Instrument as _, Span, info_span};

use crate::grpc::is_grpc;

/// The name of what the conventions do not know, or of what no operation has.
const OTHER: &str = "_OTHER";
/// The maximum length of the name of a gRPC method, in bytes.
const MAX_METHOD: usize = 64;

/// Answers a request within its span.
pub(crate) async fn traced<F>(mut request: Request, answer: impl FnOnce(Request) -> F) -> Response
where
    F: Future<Output = Response>,
{
    if !telemetry::is_tracing() {
        return answer(request).await;
    }
    let is_grpc = is_grpc(request.headers());
    let span = if is_grpc { rpc(&request) } else { http(&request) };
    telemetry::set_parent(&span, span_context(&trace_headers(request.headers())));
    continue_trace(request.headers_mut(), &span);
    let response = answer(request).instrument(span.clone()).await;
    if is_grpc {
        let status = response.headers().get("grpc-status");
        let code = status.and_then(|status| status.to_str().ok()?.parse().ok());
        end_rpc(&span, code.unwrap_or(0));
    } else {
        end_http(&span, response.status().as_u16());
    }
    response
}

fn http(request: &Request) -> Span {
    let known = matches!(
        request.method().as_str(),
        "GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS"
    );
    let method = if known { request.method().as_str() } else { OTHER };
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or(OTHER, MatchedPath::as_str);
    info_span!(
        target: TRACE_TARGET,
        parent: None,
        "request",
        otel.name = format!("{method} {route}"),
        otel.kind = "server",
        "http.request.method" = method,
        "http.route" = route,
    )
}

fn rpc(request: &Request) -> Span {
    let path = request.uri().path_and_query().map_or("", PathAndQuery::path);
    let (service, method) = path
        .trim_start_matches('/')
        .split_once('/')
        .unwrap_or((OTHER, OTHER));
    // The service is that of a route; the method is any.
    let is_name = method.len() <= MAX_METHOD && method.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let method = if is_name { method } else { OTHER };
    info_span!(
        target: TRACE_TARGET,
        parent: None,
        "request",
        otel.name = format!("{service}/{method}"),
        otel.kind = "server",
        "rpc.system" = "grpc",
        "rpc.service" = service,
        "rpc.method" = method,
    )
}

/// The caller's trace context. It is validated where it is used.
fn trace_headers(headers: &HeaderMap) -> Headers {
    let of = |name: &'static str| {
        headers
            .get_all(name)
            .iter()
            .map(move |value| (name, Some(value.as_bytes())))
    };
    of(TRACEPARENT).chain(of(TRACESTATE)).collect()
}

/// Replaces the caller's trace context by that of the span.
fn continue_trace(headers: &mut HeaderMap, span: &Span) {
    let trace = telemetry::trace(span);
    let parent = trace.as_ref().map(|trace| trace.traceparent.as_str());
    let state = trace.as_ref().and_then(|trace| trace.tracestate.as_deref());
    for (name, value) in [(TRACEPARENT, parent), (TRACESTATE, state)] {
        headers.remove(name);
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

fn end_http(span: &Span, status: u16) {
    span.set_attribute("http.response.status_code", i64::from(status));
    if status >= 500 {
        span.set_attribute("error.type", status.to_string());
        telemetry::fail(span, "");
    }
}

fn end_rpc(span: &Span, code: i64) {
    span.set_attribute("rpc.grpc.status_code", code);
    // UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE and DATA_LOSS are errors of a server.
    if matches!(code, 2 | 4 | 12..=15) {
        span.set_attribute("error.type", code.to_string());
        telemetry::fail(span, "");
    }
}
