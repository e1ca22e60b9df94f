//! Spans of API requests. The parent is the trace context of the caller, and what a request writes continues the trace of its span.
//!
//! Names follow the semantic conventions of OpenTelemetry for HTTP servers
//! (<https://opentelemetry.io/docs/specs/semconv/http/http-spans/>) and for gRPC
//! (<https://opentelemetry.io/docs/specs/semconv/rpc/grpc/>). A span ends with the head of its response, where a gRPC call has a status only if it
//! fails before its first message.

use axum::extract::{MatchedPath, Request};
use axum::response::Response;
use http::StatusCode;
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

/// Answers a request of a caller that has authenticated within its span: others do not decide which traces are sampled.
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
    if !is_grpc || response.status() != StatusCode::OK {
        end_http(&span, response.status().as_u16());
    } else if let Some(status) = response.headers().get("grpc-status")
        && let Some(code) = status.to_str().ok().and_then(|code| code.parse().ok())
    {
        end_rpc(&span, code);
    }
    response
}

fn http(request: &Request) -> Span {
    let known = matches!(
        request.method().as_str(),
        "GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS"
    );
    let method = if known { request.method().as_str() } else { OTHER };
    // The router matches the verb of `/v1/schedules/{id}:pause` as a segment of its own.
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| OTHER.to_owned(), |path| path.as_str().replace("}/:", "}:"));
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
    let parents = headers.get_all(TRACEPARENT).iter();
    let mut own: Headers = parents
        .map(|value| (TRACEPARENT, Some(value.as_bytes())))
        .collect();
    let states: Vec<&[u8]> = headers
        .get_all(TRACESTATE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if !states.is_empty() {
        own.push(TRACESTATE, Some(&states.join(&b',')));
    }
    own
}

/// Replaces the caller's trace context by that of the span.
fn continue_trace(headers: &mut HeaderMap, span: &Span) {
    let Some(trace) = telemetry::trace(span) else {
        return;
    };
    let values = [
        (TRACEPARENT, Some(trace.traceparent)),
        (TRACESTATE, trace.tracestate),
    ];
    for (name, value) in values {
        headers.remove(name);
        if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
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
