//! Spans that are exported to a real OTLP receiver.

use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use redeliver_core::headers::{TRACEPARENT, user_headers};
use redeliver_core::{Headers, TRACE_TARGET};
use redeliver_runtime::config::{OtlpConfig, TelemetryConfig, Url};
use redeliver_runtime::telemetry::{self, Identity, TelemetryGuard};
use redeliver_runtime::trace_context::span_context;
use redeliver_testkit::{DEADLINE, OtlpReceiver};
use tracing::info_span;
use tracing::subscriber::DefaultGuard;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const IDENTITY: Identity<'_> = Identity {
    service: "enricher",
    instance: "enricher-0",
};

/// Exports the spans of this thread.
fn to(endpoint: &str, sample_ratio: f64) -> (TelemetryGuard, DefaultGuard) {
    let otlp = OtlpConfig {
        endpoint: Some(Url::new(endpoint)),
        sample_ratio,
        service_name: None,
    };
    let config = TelemetryConfig {
        otlp,
        ..TelemetryConfig::default()
    };
    let (subscriber, telemetry) = telemetry::build(&config, IDENTITY).unwrap();
    (telemetry, tracing::subscriber::set_default(subscriber))
}

fn headers(parent: &str) -> Headers {
    [(TRACEPARENT, Some(parent.as_bytes()))].into_iter().collect()
}

#[tokio::test]
async fn span_continues_the_trace() {
    let receiver = OtlpReceiver::start();
    let (_telemetry, _spans) = to(&receiver.endpoint(), 1.0);
    let attempt = info_span!(
        target: TRACE_TARGET,
        parent: None,
        "attempt",
        "messaging.destination.name" = "crawl-jobs"
    );
    telemetry::set_parent(&attempt, span_context(&headers(PARENT)));
    telemetry::fail(&attempt, "http.503");
    attempt.in_scope(|| {
        info_span!(target: TRACE_TARGET, "request").in_scope(|| {
            info_span!("no target").in_scope(|| tracing::info!("logs are no spans, and no events of spans"));
        });
    });
    let propagated = user_headers(&headers(PARENT), telemetry::trace(&attempt).as_ref());
    drop(attempt);

    let mut spans = receiver.wait_for(2).await;
    spans.sort_by_key(|received| received.span.name.clone());
    let (attempt, request) = (&spans[0], &spans[1]);
    assert_eq!(attempt.trace_id(), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(attempt.parent_id(), "b7ad6b7169203331");
    assert_eq!(request.parent_id(), attempt.span_id());
    assert_eq!(request.trace_id(), attempt.trace_id());
    assert_eq!(
        attempt.attribute("messaging.destination.name"),
        Some("crawl-jobs")
    );
    assert!(attempt.span.events.is_empty() && request.span.events.is_empty());
    let status = attempt.span.status.as_ref().unwrap();
    assert_eq!(
        (status.code(), status.message.as_str()),
        (StatusCode::Error, "http.503")
    );
    assert_eq!(attempt.resource("service.name"), Some("enricher"));
    assert_eq!(attempt.resource("service.instance.id"), Some("enricher-0"));
    let expected = format!("00-{}-{}-01", attempt.trace_id(), attempt.span_id());
    assert_eq!(propagated.last(TRACEPARENT), Some(expected.as_bytes()));
}

#[tokio::test(flavor = "multi_thread")]
async fn remaining_spans_are_flushed() {
    let receiver = OtlpReceiver::start();
    let (telemetry, spans) = to(&receiver.endpoint(), 1.0);
    drop(info_span!(target: TRACE_TARGET, "relay"));
    drop(spans);
    telemetry.shutdown().await;
    assert_eq!(receiver.spans().len(), 1);

    let (telemetry, _spans) = to(&receiver.endpoint(), 1.0);
    drop(info_span!(target: TRACE_TARGET, "relay"));
    drop(telemetry);
    assert_eq!(receiver.spans().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn sampling_decision_is_kept() {
    let receiver = OtlpReceiver::start();
    let (telemetry, spans) = to(&receiver.endpoint(), 0.0);
    drop(info_span!(target: TRACE_TARGET, "new"));
    let kept = info_span!(target: TRACE_TARGET, "kept");
    telemetry::set_parent(&kept, span_context(&headers(PARENT)));
    drop(kept);
    let dropped = info_span!(target: TRACE_TARGET, "dropped");
    telemetry::set_parent(&dropped, span_context(&headers(&PARENT.replace("-01", "-00"))));
    assert!(telemetry::trace(&dropped).unwrap().traceparent.ends_with("-00"));
    drop(dropped);
    drop(spans);
    telemetry.shutdown().await;
    let names: Vec<String> = receiver
        .spans()
        .into_iter()
        .map(|received| received.span.name)
        .collect();
    assert_eq!(names, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_collector_allows_shutdown() {
    let (telemetry, spans) = to("http://127.0.0.1:1", 1.0);
    for _ in 0..100_000 {
        drop(info_span!(target: TRACE_TARGET, "attempt"));
    }
    drop(spans);
    let result = tokio::time::timeout(DEADLINE, telemetry.shutdown()).await;
    assert!(result.is_ok());
}
