//! The handler with local servers.

mod batches;
mod certificates;
mod connections;
mod fuzz;
mod server;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Mutex;

use redeliver_core::classification::Verdict;
use redeliver_core::headers::{Origin, TraceContext};
use redeliver_core::{Headers, Position, Record, SystemClock, Timestamp};
use redeliver_testkit::eventually::eventually_async;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{FakeEndpoint, Reply, ensure};
use tower::ServiceExt as _;

use self::certificates::Authority;
use self::server::{Answer, Server};
use super::*;
use crate::output_choice::Subject;

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Fast quick retries, and a timeout that no test reaches.
pub(super) fn settings(url: impl Into<String>) -> HttpSettings {
    HttpSettings {
        timeout: Duration::from_secs(20),
        quick_retry_delay: Duration::from_millis(1),
        ..HttpSettings::new(url)
    }
}

pub(super) fn attempt(value: Option<&[u8]>, headers: &[(&str, &str)]) -> Attempt {
    let record = Record {
        position: Position {
            topic: "docs-retry-due".into(),
            partition: 0,
            offset: 77,
        },
        timestamp: None,
        key: None,
        value: value.map(Bytes::copy_from_slice),
        headers: headers
            .iter()
            .map(|(name, value)| (*name, Some(value.as_bytes())))
            .collect::<Headers>(),
        unreadable_headers: 0,
    };
    Attempt {
        record: Arc::new(record),
        origin: Origin {
            topic: "docs".into(),
            partition: 3,
            offset: 44,
            timestamp: Some(Timestamp::from_millis(5)),
        },
        failed_attempts: 0,
        is_repeated: false,
        is_last: false,
        trace: None,
    }
}

fn handler(settings: HttpSettings) -> HttpHandler {
    HttpHandler::new(settings, Arc::new(SystemClock)).unwrap()
}

#[track_caller]
fn assert_failed(failure: &Failure, class: ErrorClass, code: &str) {
    assert_eq!((failure.class, &*failure.code), (class, code), "{failure}");
}

#[track_caller]
fn assert_scope(failure: &Failure, code: &str, scope: FailureScope) {
    assert_eq!((&*failure.code, failure.scope), (code, scope), "{failure}");
}

async fn run(handler: &HttpHandler, attempt: Attempt) -> Result<Produced, Failure> {
    match handler.clone().oneshot(attempt).await.unwrap() {
        Outcome::Success(mut produced) => {
            assert_eq!(produced.len(), 1);
            Ok(produced.remove(0))
        }
        Outcome::Failed(failure) => Err(failure),
    }
}

async fn call(settings: HttpSettings) -> Result<Produced, Failure> {
    run(&handler(settings), attempt(Some(b"doc"), &[])).await
}

async fn failure(settings: HttpSettings) -> Failure {
    let failure = call(settings).await.unwrap_err();
    assert!(!failure.message.contains("doc"), "no payload: {failure}");
    assert!(failure.message.len() < 400, "short: {failure}");
    failure
}

/// What the failure says of the response.
fn said(failure: &Failure) -> Option<&str> {
    failure.response.as_ref().map(Excerpt::as_str)
}

fn value(produced: &Produced) -> &[u8] {
    produced.value.as_ref().unwrap().as_ref().unwrap()
}

fn header(name: &str, value: &str) -> Vec<(String, String)> {
    vec![(name.to_owned(), value.to_owned())]
}

#[tokio::test]
async fn bodies_are_byte_exact() {
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n * 31 % 251) as u8 ^ 0xff).collect();
    let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
    let sent = bytes.clone();
    let endpoint = FakeEndpoint::start(move |request| {
        assert_eq!(request.body, sent);
        Reply::ok(reversed.clone())
    });
    let handler = handler(settings(endpoint.url()));
    let produced = run(&handler, attempt(Some(&bytes), &[])).await.unwrap();
    assert!(value(&produced).iter().eq(bytes.iter().rev()));
    assert_eq!(
        (produced.topic, produced.key, produced.headers.len()),
        (None, None, 0)
    );
}

#[tokio::test]
async fn redriven_record_has_another_key() {
    let endpoint = FakeEndpoint::start(|request| {
        assert_eq!(request.headers["idempotency-key"], "docs-3-44-r2");
        Reply::ok("done")
    });
    let handler = handler(settings(endpoint.url()));
    let redriven = attempt(Some(b"doc"), &[("redrive-count", "2")]);
    assert_eq!(value(&run(&handler, redriven).await.unwrap()), b"done");
}

#[tokio::test]
async fn configured_request_is_sent() {
    let endpoint = FakeEndpoint::start(|request| {
        assert_eq!(
            (request.method.as_str(), request.path.as_str()),
            ("PUT", "/a/b?token=t")
        );
        assert_eq!(request.headers["x-tenant"], "a");
        assert_eq!(request.headers["content-type"], "application/octet-stream");
        assert_eq!(request.headers["idempotency-key"], "docs-3-44");
        assert!(
            request.headers["user-agent"]
                .to_str()
                .unwrap()
                .starts_with("redeliver-enricher/")
        );
        assert!(!request.headers.contains_key("cookie") && !request.headers.contains_key("traceparent"));
        Reply::ok("fine")
    });
    let settings = HttpSettings {
        method: "PUT".into(),
        headers: header("X-Tenant", "a"),
        ..settings(endpoint.url() + "/a/b?token=t#part")
    };
    let attempt = attempt(
        Some(b"x"),
        &[
            ("cookie", "c"),
            ("traceparent", "forged\r\n"),
            ("idempotency-key", "mine"),
        ],
    );
    let produced = run(&handler(settings), attempt).await.unwrap();
    assert_eq!(value(&produced), b"fine");
}

#[tokio::test]
async fn content_type_and_trace_are_forwarded() {
    let endpoint = FakeEndpoint::start(|request| {
        let shown = |name| {
            request
                .headers
                .get(name)
                .map_or("-", |value| value.to_str().unwrap())
        };
        Reply::ok(format!(
            "{} {} {}",
            shown("content-type"),
            shown("traceparent"),
            shown("tracestate")
        ))
    });
    let plain = handler(settings(endpoint.url()));
    let typed = HttpSettings {
        headers: header("content-type", "text/csv"),
        ..settings(endpoint.url())
    };
    let typed = handler(typed);
    let given = TraceContext {
        traceparent: TRACE.replace("80319c", "000001"),
        tracestate: Some("v=2".into()),
    };
    let own: &[(&str, &str)] = &[
        ("content-type", "application/json"),
        ("traceparent", TRACE),
        ("tracestate", "v=1"),
    ];
    let check = async |handler: &HttpHandler, headers, trace: Option<&TraceContext>, expected: &str| {
        let attempt = Attempt {
            trace: trace.cloned(),
            ..attempt(Some(b"x"), headers)
        };
        let produced = run(handler, attempt).await.unwrap();
        assert_eq!(std::str::from_utf8(value(&produced)).unwrap(), expected);
    };
    check(&plain, own, None, &format!("application/json {TRACE} v=1")).await;
    check(&typed, own, None, &format!("text/csv {TRACE} v=1")).await;
    check(&typed, &[], None, "text/csv - -").await;
    check(
        &plain,
        &[("content-type", "json"), ("tracestate", "v=1")],
        None,
        "application/octet-stream - -",
    )
    .await;
    check(
        &plain,
        own,
        Some(&given),
        &format!("application/json {} v=2", given.traceparent),
    )
    .await;
}

#[tokio::test]
async fn empty_bodies_are_empty_values() {
    let endpoint = FakeEndpoint::start(|request| {
        assert!(request.body.is_empty());
        assert_eq!(request.headers["content-length"], "0");
        Reply::status(204)
    });
    let handler = handler(settings(endpoint.url()));
    for value in [None, Some(&b""[..])] {
        let produced = run(&handler, attempt(value, &[])).await.unwrap();
        assert_eq!(produced.value, Some(Some(Bytes::new())));
    }
}

#[tokio::test]
async fn result_has_the_content_type() {
    let endpoint = FakeEndpoint::start(|_| {
        Reply::Status(
            200,
            header("content-type", "text/csv"),
            Bytes::from_static(b"a,b"),
        )
    });
    let produced = call(settings(endpoint.url())).await.unwrap();
    let headers: Vec<_> = produced.headers.iter().collect();
    assert_eq!(headers, [("content-type", Some(&b"text/csv"[..]))]);
    let kept = HttpSettings {
        response: ResponseUse::Keep,
        ..settings(endpoint.url())
    };
    assert!(call(kept).await.unwrap().headers.is_empty());
}

#[tokio::test]
async fn compressed_response_is_decoded() {
    let content = br#"{"score": 1}"#;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, content).unwrap();
    let body = Bytes::from(encoder.finish().unwrap());
    let endpoint_with = |encoding: &'static str| {
        let body = body.clone();
        FakeEndpoint::start(move |request| {
            assert_eq!(request.headers["accept-encoding"], "identity");
            Reply::Status(200, header("content-encoding", encoding), body.clone())
        })
    };
    let gzip = endpoint_with("gzip");
    assert_eq!(value(&call(settings(gzip.url())).await.unwrap()), content);
    let merge = HttpSettings {
        response: ResponseUse::Merge("/r".into()),
        ..settings(gzip.url())
    };
    let handler = handler(merge);
    let merged = run(&handler, attempt(Some(b"{}"), &[])).await.unwrap();
    assert_eq!(value(&merged), br#"{"r":{"score": 1}}"#);
    let limited = HttpSettings {
        max_response_bytes: body.len().min(content.len()) - 1,
        ..settings(gzip.url())
    };
    assert_eq!(failure(limited).await.code, "http.response-too-large");
    let brotli = endpoint_with("br");
    let found = failure(settings(brotli.url())).await;
    let expected = (
        "http.content-encoding",
        ErrorClass::Transient,
        FailureScope::Endpoint,
    );
    assert_eq!((&*found.code, found.class, found.scope), expected);
    let kept = HttpSettings {
        response: ResponseUse::Keep,
        ..settings(brotli.url())
    };
    assert_eq!(call(kept).await.unwrap().value, None);
}

#[tokio::test]
async fn kept_value_ignores_the_response() {
    for answer in ["", "short", &"long ".repeat(100_000)] {
        let answer = answer.to_owned();
        let endpoint = FakeEndpoint::start(move |_| Reply::ok(answer.clone()));
        let settings = HttpSettings {
            response: ResponseUse::Keep,
            max_response_bytes: 1_000,
            ..settings(endpoint.url())
        };
        assert_eq!(call(settings).await.unwrap().value, None);
    }
}

#[tokio::test]
async fn statuses_are_classified() {
    use ErrorClass::{Permanent, Throttled, Transient};
    for (status, class, calls) in [
        (500, Transient, 3),
        (429, Throttled, 1),
        // Others may be called meanwhile.
        (503, Transient, 1),
        (401, Transient, 1),
        (302, Permanent, 1),
        (404, Permanent, 1),
    ] {
        let endpoint = FakeEndpoint::start(move |_| {
            Reply::Status(
                status,
                header("location", "/elsewhere"),
                Bytes::from_static(b"a doc was wrong"),
            )
        });
        let failure = failure(settings(endpoint.url() + "/in?token=hunter2")).await;
        assert_eq!((failure.class, failure.code), (class, format!("http.{status}")));
        assert!(
            failure
                .message
                .starts_with(&format!("POST {}/in answered {status}", endpoint.url())),
            "{}",
            failure.message
        );
        assert_eq!(endpoint.calls(), calls, "{status}");
        assert_eq!(endpoint.calls_of_key("docs-3-44"), u32::try_from(calls).unwrap());
    }
}

#[tokio::test]
async fn classification_can_be_overridden() {
    let endpoint = FakeEndpoint::start(|_| Reply::Status(409, Vec::new(), Bytes::from_static(b"was there")));
    let settings = HttpSettings {
        classification: Classification::with_overrides(BTreeMap::from([(409, Verdict::Success)])),
        ..settings(endpoint.url())
    };
    assert_eq!(value(&call(settings).await.unwrap()), b"was there");
}

#[tokio::test]
async fn quick_retry_keeps_the_key() {
    let endpoint = FakeEndpoint::start(|request| match request.earlier_calls_of_key {
        0 => Reply::status(500),
        1 => Reply::Close,
        _ => Reply::ok("at last"),
    });
    let produced = call(settings(endpoint.url())).await.unwrap();
    assert_eq!(value(&produced), b"at last");
    assert_eq!(endpoint.calls_by_key(), [("docs-3-44".to_owned(), 3)].into());
    // A later attempt, after a wait in a tier, has the same key.
    call(settings(endpoint.url())).await.unwrap();
    assert_eq!(endpoint.calls_of_key("docs-3-44"), 4);
}

#[tokio::test]
async fn retry_after_throttles() {
    let in_a_minute = httpdate::fmt_http_date(
        std::time::UNIX_EPOCH + Duration::from_millis(SystemClock.now().as_millis().unsigned_abs() + 60_000),
    );
    for (status, retry_after, expected) in [
        (429, "7", 7..=7),
        (503, "7", 7..=7),
        (503, "99999999999", 3_600..=3_600),
        (429, &in_a_minute, 30..=60),
        (429, "Fri, 31 Dec 9999 23:59:59 GMT", 3_600..=3_600),
        // The pipeline determines the delay.
        (429, "0", 0..=0),
        (429, "Thu, 01 Jan 1970 00:00:00 GMT", 0..=0),
    ] {
        let headers = header("retry-after", retry_after);
        let endpoint = FakeEndpoint::start(move |_| Reply::Status(status, headers.clone(), Bytes::new()));
        let failure = failure(settings(endpoint.url())).await;
        assert_eq!(
            (failure.class, failure.code),
            (ErrorClass::Throttled, format!("http.{status}"))
        );
        let seconds = failure.retry_after.map_or(0, |delay| delay.as_secs());
        assert!(expected.contains(&seconds), "{retry_after}: {seconds}");
        assert_eq!(
            endpoint.calls(),
            1,
            "there is no quick retry before the requested delay"
        );
    }
}

#[tokio::test]
async fn hanging_endpoint_is_called_once() {
    let endpoint = FakeEndpoint::start(|_| Reply::Hang);
    let settings = HttpSettings {
        timeout: Duration::from_millis(200),
        ..settings(endpoint.url() + "/?token=hunter2")
    };
    let started = Instant::now();
    let failure = failure(settings).await;
    assert_failed(&failure, ErrorClass::Transient, "http.timeout");
    assert_eq!(
        failure.message,
        format!("POST {}/: no complete response within 200ms", endpoint.url())
    );
    assert!(started.elapsed() >= Duration::from_millis(200));
    assert_eq!(endpoint.calls(), 1);
}

#[tokio::test]
async fn endless_body_times_out() {
    for response in [ResponseUse::Replace, ResponseUse::Keep] {
        let server =
            Server::start(|_| Answer::Open(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart".to_vec()));
        let settings = HttpSettings {
            timeout: Duration::from_millis(200),
            response,
            ..settings(format!("http://{}", server.address))
        };
        assert_eq!(failure(settings).await.code, "http.timeout");
    }
}

#[tokio::test]
async fn error_status_precedes_its_body() {
    let server =
        Server::start(|_| Answer::Open(b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\npart".to_vec()));
    let failure = failure(settings(format!("http://{}", server.address))).await;
    assert_failed(&failure, ErrorClass::Permanent, "http.404");
    assert_eq!(said(&failure), Some("part…"));
}

#[tokio::test]
async fn failure_contains_the_response() {
    const JSON: &str = "application/json";
    let endpoint = FakeEndpoint::start(|_| Reply::status(422));
    assert_eq!(said(&failure(settings(endpoint.url())).await), None);
    let large = "x".repeat(1 << 20);
    for (status, content_type, body, expected) in [
        (
            422,
            JSON,
            r#"{"error":"tenant suspended"}"#,
            Some(r#"{"error":"tenant suspended"}"#),
        ),
        (500, "text/plain", "out of\nspace\n", Some("out of space")),
        (404, "image/png", "text", None),
        // Not JSON, so it cannot be inserted.
        (200, "text/html", "<h1>log in</h1>", Some("<h1>log in</h1>")),
        (422, "text/plain", &*large, Some(&*format!("{}…", &large[..509]))),
    ] {
        let (headers, answer) = (
            header("content-type", content_type),
            Bytes::copy_from_slice(body.as_bytes()),
        );
        endpoint.behave(move |_| Reply::Status(status, headers.clone(), answer.clone()));
        let merge = HttpSettings {
            response: ResponseUse::Merge("/r".into()),
            ..settings(endpoint.url())
        };
        assert_eq!(said(&failure(merge.clone()).await), expected, "{status}");
        let off = HttpSettings {
            error_response: false,
            ..merge
        };
        assert_eq!(said(&failure(off).await), None);
    }
}

#[tokio::test]
async fn early_closes_are_retried() {
    for answer in [
        &b""[..],
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\npart",
    ] {
        let server = Server::start(move |_| Answer::Last(answer.to_vec()));
        let failure = failure(settings(format!("http://{}", server.address))).await;
        assert_failed(&failure, ErrorClass::Transient, "http.closed");
        assert_eq!(server.connections(), 3, "{failure}");
    }
}

#[tokio::test]
async fn foreign_protocol_is_invalid() {
    for answer in [
        &b"220 mail.example ESMTP\r\n\r\n"[..],
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnine\r\n",
    ] {
        let server = Server::start(move |_| Answer::Last(answer.to_vec()));
        let failure = failure(settings(format!("http://{}", server.address))).await;
        assert_failed(&failure, ErrorClass::Transient, "http.invalid-response");
    }
}

#[tokio::test]
async fn unreachable_hosts_are_connect_failures() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for url in [
        format!("http://127.0.0.1:{port}/?token=hunter2"),
        "http://no-such-host.invalid/".to_owned(),
    ] {
        let failure = failure(settings(&url)).await;
        assert_failed(&failure, ErrorClass::Transient, "http.connect");
        assert!(failure.message.contains("cannot connect: "), "{failure}");
        assert!(!failure.message.contains("hunter2"), "{failure}");
    }
}

#[tokio::test]
async fn connect_timeout_is_not_retried() {
    // The system accepts the connection, but there is no TLS server.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let scratch = Scratch::new("http").unwrap();
    let mut settings = settings(format!("https://{}", listener.local_addr().unwrap()));
    settings.connect_timeout = Duration::from_millis(200);
    settings.tls.ca_file = Some(Authority::new().write(scratch.path().join("ca.crt")));
    let failure = failure(settings).await;
    assert_failed(&failure, ErrorClass::Transient, "http.connect");
    assert!(
        failure.message.ends_with("cannot connect within 200ms"),
        "{failure}"
    );
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_ok());
    assert!(listener.accept().is_err(), "there was one connection");
}

#[tokio::test]
async fn too_large_response_is_not_read() {
    // One announces its length and one does not. Neither sends its body.
    for answer in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n"[..],
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\n12345678\r\n",
    ] {
        let server = Server::start(move |_| Answer::Open(answer.to_vec()));
        let settings = HttpSettings {
            max_response_bytes: 7,
            ..settings(format!("http://{}", server.address))
        };
        let failure = failure(settings).await;
        assert_failed(&failure, ErrorClass::Permanent, "http.response-too-large");
        assert!(
            failure
                .message
                .ends_with("the response exceeds max_response_bytes (7)"),
            "{failure}"
        );
        assert_eq!(server.connections(), 1);
    }
    let endpoint = FakeEndpoint::start(|_| Reply::ok("1234567"));
    let exact = HttpSettings {
        max_response_bytes: 7,
        ..settings(endpoint.url())
    };
    assert_eq!(value(&call(exact).await.unwrap()), b"1234567");
}

#[tokio::test]
async fn connections_are_reused() {
    let page = "x".repeat(40_000);
    let answers = [
        (200, "fine"),
        (404, page.as_str()),
        (429, "slower"),
        (200, page.as_str()),
        (302, ""),
    ]
    .map(|(status, body)| {
        let length = body.len();
        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nretry-after: 1\r\n\r\n{body}")
            .into_bytes()
    });
    let next = Arc::new(Mutex::new(answers.into_iter().cycle()));
    let server = Server::start(move |_| Answer::Open(next.lock().unwrap().next().unwrap()));
    let handler = handler(settings(format!("http://{}", server.address)));
    let mut successes = 0;
    for _ in 0..20 {
        successes += usize::from(run(&handler, attempt(Some(b"doc"), &[])).await.is_ok());
    }
    assert_eq!((successes, server.connections()), (8, 1));
}

#[tokio::test]
async fn concurrent_calls_share_connections() {
    let server = Server::start(|_| Answer::Open(OK.to_vec()));
    let handler = handler(settings(format!("http://{}", server.address)));
    for _ in 0..10 {
        let calls = [(); 8].map(|()| run(&handler, attempt(Some(b"doc"), &[])));
        assert!(futures::future::join_all(calls).await.iter().all(Result::is_ok));
    }
    assert!(
        (1..=8).contains(&server.connections()),
        "{}",
        server.connections()
    );
    let endpoint = FakeEndpoint::start(|_| Reply::Delay(Duration::from_secs(1), Box::new(Reply::ok("late"))));
    let handler = super::tests::handler(settings(endpoint.url()));
    let (a, b, c) = tokio::join!(
        run(&handler, attempt(Some(b"a"), &[])),
        run(&handler, attempt(Some(b"b"), &[])),
        run(&handler, attempt(Some(b"c"), &[])),
    );
    assert!(a.is_ok() && b.is_ok() && c.is_ok());
    assert_eq!(endpoint.max_concurrency(), 3);
}

#[tokio::test]
async fn only_configured_ca_is_trusted() {
    let (scratch, ours, other) = (Scratch::new("http").unwrap(), Authority::new(), Authority::new());
    let server = Server::start_tls(ours.server(None), |_| Answer::Open(OK.to_vec()));
    let mut settings = settings(format!("https://{}", server.address));
    settings.tls.ca_file = Some(ours.write(scratch.path().join("ours.crt")));
    assert_eq!(value(&call(settings.clone()).await.unwrap()), b"ok");
    settings.tls.ca_file = Some(other.write(scratch.path().join("other.crt")));
    let untrusted = failure(settings.clone()).await;
    assert_failed(&untrusted, ErrorClass::Transient, "http.connect");
    assert!(untrusted.message.contains("certificate"), "{untrusted}");
    settings.tls.ca_file = Some(scratch.path().join("ours.crt"));
    settings.url = format!("https://localhost:{}", server.address.port());
    assert_eq!(failure(settings).await.code, "http.connect");
}

#[tokio::test]
async fn secrets_are_never_printed() {
    let scratch = Scratch::new("http").unwrap();
    let file = scratch.path().join("token");
    std::fs::write(&file, "Bearer hunter2\n").unwrap();
    let endpoint = FakeEndpoint::start(|request| {
        assert_eq!(request.headers["authorization"], "Bearer hunter2");
        assert_eq!(request.headers["x-api-key"], "hunter2");
        Reply::status(401)
    });
    let settings = HttpSettings {
        headers: header("x-api-key", "hunter2"),
        header_files: vec![("authorization".into(), file)],
        ..settings(endpoint.url() + "?key=hunter2")
    };
    let handler = handler(settings.clone());
    let failure = run(&handler, attempt(None, &[])).await.unwrap_err();
    assert_eq!(failure.code, "http.401");
    let shown = format!(
        "{settings:?} {handler:?} {failure:?} {:?}",
        handler.endpoint.credentials.in_use().headers
    );
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("authorization"), "{shown}");
}

/// A handler with the header `authorization` from a file that contains `old`, and an endpoint that accepts only the header
/// in `accepted`.
struct Rotation {
    scratch: Scratch,
    endpoint: FakeEndpoint,
    accepted: Arc<Mutex<&'static str>>,
    handler: HttpHandler,
}

impl Rotation {
    fn refusing_with(status: u16) -> Self {
        let scratch = Scratch::new("http").unwrap();
        let file = scratch.path().join("token");
        std::fs::write(&file, "old").unwrap();
        let accepted = Arc::new(Mutex::new("old"));
        let endpoint = FakeEndpoint::start({
            let accepted = accepted.clone();
            move |request| {
                let header = &request.headers["authorization"];
                if header == *accepted.lock().unwrap() {
                    Reply::ok(Bytes::copy_from_slice(header.as_bytes()))
                } else {
                    Reply::status(status)
                }
            }
        });
        let settings = HttpSettings {
            header_files: vec![("authorization".into(), file)],
            ..settings(endpoint.url())
        };
        let handler = handler(settings);
        Self {
            scratch,
            endpoint,
            accepted,
            handler,
        }
    }

    fn write(&self, text: &str) {
        std::fs::write(self.scratch.path().join("token"), text).unwrap();
    }

    fn accept(&self, header: &'static str) {
        *self.accepted.lock().unwrap() = header;
    }

    /// The header that the endpoint has accepted, or the error code of the failure.
    async fn call(&self) -> String {
        match run(&self.handler, attempt(Some(b"doc"), &[])).await {
            Ok(produced) => String::from_utf8_lossy(value(&produced)).into_owned(),
            Err(failure) => failure.code,
        }
    }
}

#[tokio::test]
async fn refused_attempt_uses_changed_header() {
    for status in [401, 403, 407] {
        let rotation = Rotation::refusing_with(status);
        assert_eq!(rotation.call().await, "old");
        rotation.write("new\n");
        rotation.accept("new");
        assert_eq!(rotation.call().await, "new", "{status}");
        // The refused call and its repetition.
        assert_eq!(rotation.endpoint.calls(), 3, "{status}");
        assert_eq!(rotation.call().await, "new");
        assert_eq!(rotation.endpoint.calls(), 4, "{status}");
    }
}

#[tokio::test]
async fn concurrent_refusals_use_changed_header() {
    let rotation = Rotation::refusing_with(401);
    rotation.write("new");
    rotation.accept("new");
    let calls = futures::future::join_all((0..20).map(|_| rotation.call())).await;
    assert!(calls.iter().all(|call| call == "new"), "{calls:?}");
}

#[tokio::test]
async fn refused_call_is_repeated_once() {
    let rotation = Rotation::refusing_with(401);
    rotation.accept("other");
    assert_eq!(rotation.call().await, "http.401");
    assert_eq!(rotation.endpoint.calls(), 1);
    rotation.write("new");
    assert_eq!(rotation.call().await, "http.401");
    assert_eq!(rotation.endpoint.calls(), 3);
    assert_eq!(rotation.call().await, "http.401");
    assert_eq!(rotation.endpoint.calls(), 4);
}

#[tokio::test]
async fn followed_files_need_no_refusal() {
    let rotation = Rotation::refusing_with(401);
    let credentials = rotation.handler.endpoint.credentials.clone();
    rotation.write("new");
    let used = || credentials.in_use().headers["authorization"].clone();
    for expected in ["old", "new"] {
        credentials.check();
        assert_eq!(used(), expected);
    }
    rotation.write("newest");
    let used_newest = eventually_async("the file is used", Duration::from_secs(60), async || {
        ensure(used() == "newest", "the previous header is used")
    });
    tokio::select! {
        () = used_newest => {}
        ended = credentials.clone().follow() => panic!("{ended:?}"),
    }
}

#[tokio::test]
async fn changed_certificates_replace_the_client() {
    let (scratch, servers, clients) = (Scratch::new("http").unwrap(), Authority::new(), Authority::new());
    let server = Server::start_tls(servers.server(Some(&clients)), |_| Answer::Open(OK.to_vec()));
    let mut settings = settings(format!("https://{}", server.address));
    let other = Authority::new();
    let ca = other.write(scratch.path().join("ca.crt"));
    let (certificate, key) = other.sign("enricher").write(scratch.path(), "enricher");
    settings.tls = TlsFiles {
        ca_file: Some(ca.clone()),
        cert_file: Some(certificate),
        key_file: Some(key.clone()),
    };
    let handler = handler(settings);
    let call = async || {
        run(&handler, attempt(None, &[]))
            .await
            .map_err(|failure| failure.code)
    };
    let check = || [(); 2].map(|()| handler.endpoint.credentials.check());
    let refused = Err("http.connect".to_owned());
    assert_eq!(call().await.map(drop), refused);
    servers.write(ca);
    check();
    // The server is trusted, but does not accept the client.
    assert_eq!(call().await.map(drop), refused);
    clients.sign("enricher").write(scratch.path(), "enricher");
    check();
    assert_eq!(value(&call().await.unwrap()), b"ok");
    // The previous client stays in use.
    std::fs::write(&key, "not a key").unwrap();
    check();
    assert_eq!(value(&call().await.unwrap()), b"ok");
}

#[tokio::test]
async fn record_and_response_choose_output() {
    let endpoint = FakeEndpoint::start(|request| match &*request.body {
        br#"{"queue":"later"}"# => Reply::Status(202, Vec::new(), r#"{"queue":"done"}"#.into()),
        _ => Reply::ok(r#"{"queue":"none"}"#),
    });
    let topics = [("done", Some("done")), ("none", None), ("202", Some("accepted"))];
    let topics = topics.map(|(value, topic)| (value.to_owned(), topic.map(Into::into)));
    let later = r#"{"queue":"later"}"#;
    let (payload, response) = (
        Subject::Payload("/queue".into()),
        Subject::Response("/queue".into()),
    );
    for (subject, value, expected) in [
        (payload, later, Some("rest")),
        (response, later, Some("done")),
        (Subject::Response("/queue".into()), "x", None),
        (Subject::Status, later, Some("accepted")),
    ] {
        for response in [ResponseUse::Replace, ResponseUse::Keep] {
            let settings = HttpSettings {
                response,
                output: OutputChoice::By {
                    subject: subject.clone(),
                    topics: topics.clone().into(),
                    otherwise: Some("rest".into()),
                },
                ..settings(endpoint.url())
            };
            let handler = handler(settings);
            let outcome = handler
                .oneshot(attempt(Some(value.as_bytes()), &[]))
                .await
                .unwrap();
            let Outcome::Success(results) = outcome else {
                panic!("{outcome:?}")
            };
            let topics: Vec<_> = results
                .iter()
                .filter_map(|result| result.topic.as_deref())
                .collect();
            assert_eq!(topics, Vec::from_iter(expected), "{subject:?} {value}");
            assert_eq!(results.len(), topics.len());
        }
    }
}

#[tokio::test]
async fn response_is_merged() {
    let endpoint = FakeEndpoint::start(|request| match &*request.body {
        b"{}" => Reply::ok("<html>"),
        b"[]" => Reply::ok(" "),
        b"7" => Reply::status(204),
        _ => Reply::ok(r#"{"score": 0.50}"#),
    });
    let settings = HttpSettings {
        response: ResponseUse::Merge("/meta/scored".into()),
        ..settings(endpoint.url())
    };
    let handler = handler(settings);
    let produced = run(&handler, attempt(Some(br#"{"id": 7, "meta": {}}"#), &[]))
        .await
        .unwrap();
    assert_eq!(value(&produced), br#"{"id":7,"meta":{"scored":{"score": 0.50}}}"#);
    for (value, problem) in [
        (&b"{}"[..], "the response is not JSON"),
        (b"[]", "the response is empty"),
    ] {
        let failure = run(&handler, attempt(Some(value), &[])).await.unwrap_err();
        let expected = ("http.merge", ErrorClass::Permanent);
        assert_eq!((&*failure.code, failure.class), expected);
        assert!(failure.message.starts_with(problem), "{failure}");
    }
    // Nothing is to be inserted.
    let unchanged = run(&handler, attempt(Some(b"7"), &[])).await.unwrap();
    assert_eq!((unchanged.value, unchanged.headers.len()), (None, 0));
}

#[test]
fn invalid_settings_name_the_field() {
    let scratch = Scratch::new("http").unwrap();
    let write = |name: &str, content: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let (empty, lines) = (write("empty", "\n"), write("lines", "hunter2\nhunter2"));
    let (certificate, _) = Authority::new().sign("a").write(scratch.path(), "a");
    let (_, other_key) = Authority::new().sign("b").write(scratch.path(), "b");
    let check = |change: &dyn Fn(&mut HttpSettings), field: &str, problem: &str| {
        let mut settings = settings("https://localhost");
        change(&mut settings);
        let error = HttpHandler::new(settings, Arc::new(SystemClock))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("http.{field}: ")) && error.contains(problem),
            "{error}"
        );
        assert!(!error.contains("hunter2"), "{error}");
    };
    let file = |path: &std::path::Path| vec![("authorization".to_owned(), path.to_owned())];
    // As the configuration checks them, and what only files show.
    check(&|s| s.url = "hunter2".into(), "url", "is not a URL");
    check(&|s| s.method = "post".into(), "method", "in upper case");
    let value = "hunter2\r\ny: z";
    check(&|s| s.headers = header("x", value), "headers.x", "one line");
    let field = "header_files.authorization";
    let none = scratch.path().join("none");
    check(&|s| s.header_files = file(&none), field, "cannot read ");
    check(&|s| s.header_files = file(&empty), field, "is empty");
    check(&|s| s.header_files = file(&lines), field, "one line of text");
    let pair = (Some(certificate), Some(other_key));
    check(
        &|s| (s.tls.cert_file, s.tls.key_file) = pair.clone(),
        "tls.key_file",
        "does not match",
    );
}
