//! Spans that are exported to a real OTLP receiver.

use opentelemetry::trace::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use redeliver_core::headers::{TRACEPARENT, user_headers};
use redeliver_core::{Headers, Timestamp};
use redeliver_runtime::config::{OtlpConfig, Url};
use redeliver_runtime::telemetry::{Identity, TelemetryGuard, traces};
use redeliver_runtime::trace_context::span_context;
use redeliver_testkit::OtlpReceiver;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const IDENTITY: Identity<'_> = Identity {
    service: "enricher",
    instance: "enricher-0",
};

fn to(receiver: &OtlpReceiver, sample_ratio: f64) -> TelemetryGuard {
    let config = OtlpConfig {
        endpoint: Some(Url::new(receiver.endpoint())),
        sample_ratio,
        service_name: None,
    };
    traces(&config, IDENTITY).unwrap()
}

fn headers(parent: &str) -> Headers {
    [(TRACEPARENT, Some(parent.as_bytes()))].into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_continues_and_propagates_the_trace_of_its_record() {
    let receiver = OtlpReceiver::start();
    let telemetry = to(&receiver, 1.0);
    let parent = span_context(&headers(PARENT)).unwrap();
    let (start, end) = (
        Timestamp::from_millis(1_800_000_000_000),
        Timestamp::from_millis(1_800_000_000_250),
    );
    let mut attempt = telemetry
        .tracer()
        .start("attempt", SpanKind::Consumer, Some(&parent), Some(start));
    attempt.set("messaging.destination.name", "crawl-jobs");
    attempt.fail("http.503");
    let request = telemetry
        .tracer()
        .start("request", SpanKind::Client, attempt.context().as_ref(), None);
    drop(request);
    let propagated = user_headers(&headers(PARENT), attempt.trace().as_ref());
    attempt.end_at(end);

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
    assert_eq!(attempt.span.start_time_unix_nano, 1_800_000_000_000_000_000);
    assert_eq!(attempt.span.end_time_unix_nano, 1_800_000_000_250_000_000);
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
async fn remaining_spans_are_flushed_on_shutdown_and_drop() {
    let receiver = OtlpReceiver::start();
    let telemetry = to(&receiver, 1.0);
    drop(telemetry.tracer().start("relay", SpanKind::Producer, None, None));
    telemetry.shutdown().await;
    assert_eq!(receiver.spans().len(), 1);

    let telemetry = to(&receiver, 1.0);
    drop(telemetry.tracer().start("relay", SpanKind::Producer, None, None));
    drop(telemetry);
    assert_eq!(receiver.spans().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sampling_decision_of_a_trace_is_kept() {
    let receiver = OtlpReceiver::start();
    let telemetry = to(&receiver, 0.0);
    drop(telemetry.tracer().start("new", SpanKind::Consumer, None, None));
    let kept = span_context(&headers(PARENT)).unwrap();
    drop(
        telemetry
            .tracer()
            .start("kept", SpanKind::Consumer, Some(&kept), None),
    );
    let dropped = span_context(&headers(&PARENT.replace("-01", "-00"))).unwrap();
    let span = telemetry
        .tracer()
        .start("dropped", SpanKind::Consumer, Some(&dropped), None);
    assert!(span.trace().unwrap().traceparent.ends_with("-00"));
    drop(span);
    telemetry.shutdown().await;
    let names: Vec<String> = receiver
        .spans()
        .into_iter()
        .map(|received| received.span.name)
        .collect();
    assert_eq!(names, ["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_collector_does_not_delay_shutdown() {
    let config = OtlpConfig {
        endpoint: Some(Url::new("http://127.0.0.1:1")),
        ..OtlpConfig::default()
    };
    let telemetry = traces(&config, IDENTITY).unwrap();
    for _ in 0..100_000 {
        drop(
            telemetry
                .tracer()
                .start("attempt", SpanKind::Consumer, None, None),
        );
    }
    let result = tokio::time::timeout(std::time::Duration::from_secs(10), telemetry.shutdown()).await;
    assert!(result.is_ok());
}
