//! What calls leave in metrics and traces.
//!
//! Each call is a span, and the endpoint gets the context of that span. It is a child of the attempt's span or, if the call is
//! for several records, the root of a trace, with links to the attempts. Names follow the semantic
//! conventions of OpenTelemetry for HTTP (<https://opentelemetry.io/docs/specs/semconv/http/http-spans/>). The URL lacks
//! credentials, query and fragment, which may be secrets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use redeliver_core::TRACE_TARGET;
use redeliver_core::headers::TraceContext;
use redeliver_runtime::telemetry::{self, Context, OpenTelemetrySpanExt as _, TraceContextExt as _};
use redeliver_runtime::trace_context::context_of;
use redeliver_service::Host;
use reqwest::header::HeaderMap;
use reqwest::{Method, Url};
use tokio::time::Instant;
use tracing::{Instrument as _, Span, info_span};

use super::metrics::{CallMetrics, HttpFamilies};
use super::settings::shown_url;
use super::{CallFailure, CallResult, request};

/// Observes the calls of a pipeline's endpoint. Cheap to clone.
#[derive(Clone)]
pub(super) struct CallTelemetry(Arc<Observed>);

struct Observed {
    metrics: CallMetrics,
    endpoint: EndpointAttributes,
}

/// What all spans of an endpoint have in common.
struct EndpointAttributes {
    method: Method,
    /// Without secrets.
    url: String,
    address: String,
    port: u16,
}

impl EndpointAttributes {
    fn new(method: &Method, url: &Url) -> Self {
        let host = url.host_str().unwrap_or_default();
        Self {
            method: method.clone(),
            url: shown_url(url),
            address: host.trim_matches(['[', ']']).to_owned(),
            port: url.port_or_known_default().unwrap_or_default(),
        }
    }

    /// The name of a span. A method that the conventions do not know would be one of unlimited names.
    fn name(&self) -> &'static str {
        match self.method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::DELETE => "DELETE",
            Method::OPTIONS => "OPTIONS",
            Method::TRACE => "TRACE",
            Method::PATCH => "PATCH",
            _ => "HTTP",
        }
    }

    /// A new span for a call.
    fn span(&self) -> Span {
        let (method, original) = match self.name() {
            "HTTP" => ("_OTHER", Some(self.method.as_str())),
            known => (known, None),
        };
        info_span!(
            target: TRACE_TARGET,
            parent: None,
            "call",
            otel.name = self.name(),
            otel.kind = "client",
            "http.request.method" = method,
            "http.request.method_original" = original,
            "url.full" = self.url,
            "server.address" = self.address,
            "server.port" = i64::from(self.port),
        )
    }
}

/// The calls of one attempt, or of several together.
pub(super) struct ObservedCalls<'a> {
    observed: &'a Observed,
    /// The spans of the attempts.
    attempts: Vec<Context>,
    /// How many there have been.
    sent: AtomicU32,
}

impl CallTelemetry {
    /// Counts calls in the metrics of this process.
    pub(super) fn of(host: &mut Host, pipeline: &str, method: &Method, url: &Url) -> Self {
        let families = host.metric_families(HttpFamilies::register);
        Self::with(&families, pipeline, method, url)
    }

    pub(super) fn with(families: &HttpFamilies, pipeline: &str, method: &Method, url: &Url) -> Self {
        Self(Arc::new(Observed {
            metrics: families.of(pipeline),
            endpoint: EndpointAttributes::new(method, url),
        }))
    }

    /// Its observations are not exported.
    pub(super) fn off(method: &Method, url: &Url) -> Self {
        Self::with(&HttpFamilies::default(), "", method, url)
    }

    /// Observes the calls of attempts with these trace contexts.
    pub(super) fn calls<'t>(&self, traces: impl Iterator<Item = &'t TraceContext>) -> ObservedCalls<'_> {
        let attempts = match telemetry::is_tracing() {
            true => traces.filter_map(context_of).collect(),
            false => Vec::new(),
        };
        ObservedCalls {
            observed: &self.0,
            attempts,
            sent: AtomicU32::new(0),
        }
    }
}

impl ObservedCalls<'_> {
    /// Observes a call that comes after this many quick retries of the same request, and gives the context of its span to
    /// the endpoint.
    pub(super) async fn observe<F>(
        &self,
        quick_retries: u32,
        mut headers: HeaderMap,
        call: impl FnOnce(HeaderMap) -> F,
    ) -> Result<CallResult, CallFailure>
    where
        F: Future<Output = Result<CallResult, CallFailure>>,
    {
        if quick_retries > 0 {
            self.observed.metrics.quick_retries.inc();
        }
        let span = self.start_span();
        if let Some(trace) = telemetry::trace(&span) {
            request::set_trace(&mut headers, &trace);
        }
        let began = Instant::now();
        let result = call(headers).instrument(span.clone()).await;
        let status = status_of(&result);
        self.observed.metrics.called(&status, began.elapsed());
        end_span(&span, status, result.is_err());
        result
    }

    fn start_span(&self) -> Span {
        let resent = self.sent.fetch_add(1, Ordering::Relaxed);
        let span = self.observed.endpoint.span();
        match &self.attempts[..] {
            [attempt] => telemetry::set_parent(&span, Some(attempt.clone())),
            attempts => {
                for attempt in attempts {
                    span.add_link(attempt.span().span_context().clone());
                }
            }
        }
        if resent > 0 {
            span.set_attribute("http.request.resend_count", i64::from(resent));
        }
        span
    }
}

/// Whether a status is an error is decided by the pipeline's classification, so a 404 may be none.
fn end_span(span: &Span, status: String, has_failed: bool) {
    if span.is_disabled() {
        return;
    }
    if let Ok(code) = status.parse::<i64>() {
        span.set_attribute("http.response.status_code", code);
    }
    if has_failed {
        span.set_attribute("error.type", status);
        // The reason is in the attributes.
        telemetry::fail(span, "");
    }
}

/// The status of the response, or the code of the error without its prefix.
fn status_of(result: &Result<CallResult, CallFailure>) -> String {
    match result {
        Ok(result) => result.status.to_string(),
        Err(failed) => {
            let code = &failed.failure.code;
            code.strip_prefix("http.").unwrap_or(code).to_owned()
        }
    }
}

#[cfg(test)]
mod tests;
