use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use redeliver_core::SystemClock;
use redeliver_testkit::{FakeEndpoint, Reply};
use tower::ServiceExt as _;

use super::*;
use crate::http::tests::{attempt, settings};
use crate::http::{Endpoint, HttpHandler, HttpSettings};

/// The series of calls after an attempt for each of these bodies.
async fn series_after(bodies: &[&[u8]], settings: HttpSettings) -> Vec<String> {
    let mut registry = Registry::default();
    let handler = HttpHandler::new(settings, Arc::new(SystemClock)).unwrap();
    let families = HttpFamilies::register(&mut registry);
    let Endpoint { method, url, .. } = &*handler.endpoint;
    let telemetry = CallTelemetry::with(&families, "docs", method, url);
    assert!(handler.endpoint.telemetry.set(telemetry).is_ok());
    for body in bodies {
        let attempt = attempt(Some(body), &[]);
        handler.clone().oneshot(attempt).await.unwrap();
    }
    let mut page = String::new();
    text::encode(&mut page, &registry).unwrap();
    let series = page.lines().filter(|line| {
        ["http_calls", "http_call_seconds_count", "http_quick"]
            .iter()
            .any(|name| line.starts_with(name))
    });
    let mut series: Vec<String> = series.map(str::to_owned).collect();
    series.sort();
    series
}

#[tokio::test]
async fn calls_are_counted_by_status() {
    let endpoint = FakeEndpoint::start(|request| match (&*request.body, request.earlier_calls_of_body) {
        (b"broken", _) => Reply::status(500),
        (b"restarts", 0) => Reply::Close,
        (b"busy", _) => Reply::status(503),
        (b"strange", _) => Reply::status(777),
        (b"long", _) => Reply::ok([b'x'; 100].to_vec()),
        (b"wrong", _) => Reply::status(422),
        _ => Reply::ok("fine"),
    });
    let settings = HttpSettings {
        quick_retries: 2,
        max_response_bytes: 50,
        ..settings(endpoint.url())
    };
    let bodies: [&[u8]; 7] = [
        b"fine",
        b"broken",
        b"restarts",
        b"busy",
        b"strange",
        b"long",
        b"wrong",
    ];
    let counted = series_after(&bodies, settings).await;
    assert_eq!(
        counted,
        [
            r#"http_call_seconds_count{pipeline="docs"} 10"#,
            r#"http_calls_total{pipeline="docs",status="200"} 2"#,
            r#"http_calls_total{pipeline="docs",status="422"} 1"#,
            r#"http_calls_total{pipeline="docs",status="500"} 3"#,
            r#"http_calls_total{pipeline="docs",status="503"} 1"#,
            r#"http_calls_total{pipeline="docs",status="closed"} 1"#,
            r#"http_calls_total{pipeline="docs",status="other"} 1"#,
            r#"http_calls_total{pipeline="docs",status="response-too-large"} 1"#,
            r#"http_quick_retries_total{pipeline="docs"} 3"#,
        ]
    );
    assert_eq!(endpoint.calls(), 10);
}

#[test]
fn endpoint_is_described_without_secrets() {
    let url = Url::parse("https://user:secret@[2001:db8::1]/docs?token=secret#secret").unwrap();
    let endpoint = EndpointAttributes::new(&Method::PUT, &url);
    let EndpointAttributes {
        url, address, port, ..
    } = &endpoint;
    assert_eq!(
        (url.as_str(), address.as_str(), *port, endpoint.name()),
        ("https://[2001:db8::1]/docs", "2001:db8::1", 443, "PUT")
    );
    let purge = Method::from_bytes(b"PURGE").unwrap();
    let url = Url::parse("http://localhost:8080").unwrap();
    let endpoint = EndpointAttributes::new(&purge, &url);
    assert_eq!((endpoint.port, endpoint.name()), (8080, "HTTP"));
}
