//! Calls for several records.

#![expect(clippy::disallowed_types, reason = "bodies of the endpoint in these tests")]

use futures::future::join_all;
use redeliver_runtime::config::{BatchConfig, BatchValues};
use serde_json::{Value, json};

use super::*;

fn batches(url: impl Into<String>, records: u32) -> HttpSettings {
    HttpSettings {
        batch: Some(BatchConfig {
            records,
            bytes: 1_000_000,
            wait: HumanDuration::from_millis(20),
            values: BatchValues::Json,
        }),
        ..settings(url)
    }
}

/// A first attempt whose origin has this offset.
fn record(offset: i64, value: Option<&[u8]>) -> Attempt {
    let mut attempt = attempt(value, &[]);
    attempt.origin.offset = offset;
    attempt
}

/// Attempts with these values, at the same time.
async fn run_all(handler: &HttpHandler, values: &[&[u8]]) -> Vec<Result<Produced, Failure>> {
    let attempts = (0..)
        .zip(values)
        .map(|(offset, value)| record(offset, Some(value)));
    join_all(attempts.map(|attempt| run(handler, attempt))).await
}

/// The records of a request.
fn records(request: &redeliver_testkit::Request) -> Vec<Value> {
    let body: Value = serde_json::from_slice(&request.body).unwrap();
    body["records"].as_array().unwrap().clone()
}

/// Answers each record with what `result` adds to its id.
fn per_record(result: impl Fn(&Value) -> Value + Send + Sync + 'static) -> FakeEndpoint {
    FakeEndpoint::start(move |request| {
        results(records(request).iter().map(|record| {
            let mut object = result(record);
            object["id"] = record["id"].clone();
            object
        }))
    })
}

fn results(results: impl IntoIterator<Item = Value>) -> Reply {
    let results: Vec<Value> = results.into_iter().collect();
    Reply::ok(json!({ "results": results }).to_string())
}

#[tokio::test]
async fn records_share_a_call() {
    let endpoint = FakeEndpoint::start(|request| {
        assert_eq!(request.headers["content-type"], "application/json");
        assert_eq!(request.key, None);
        let mut results = Vec::new();
        for record in records(request) {
            let n = record["value"]["n"].as_i64().unwrap();
            results.push(json!({ "id": record["id"], "value": { "n": n * 2 } }));
        }
        // In any order.
        results.reverse();
        super::batches::results(results)
    });
    let values: Vec<String> = (0..6).map(|n| format!("{{\"n\": {n}}}")).collect();
    let values: Vec<&[u8]> = values.iter().map(String::as_bytes).collect();
    let handler = handler(batches(endpoint.url(), 3));
    for (n, result) in (0..).zip(run_all(&handler, &values).await) {
        let produced = result.unwrap();
        assert_eq!(value(&produced), format!("{{\"n\":{}}}", n * 2).as_bytes());
        let content_type: Vec<_> = produced.headers.iter().collect();
        assert_eq!(content_type, [("content-type", Some(&b"application/json"[..]))]);
    }
    assert_eq!(endpoint.calls(), 2);
}

#[tokio::test]
async fn request_contains_origin_and_trace() {
    let endpoint = FakeEndpoint::start(|request| {
        let expected = format!(
            "{{\"records\":[{{\"id\":\"docs-3-7\",\"value\":{{ \"n\" : 1.000000000000000000001 }},\
             \"content_type\":\"application/json\",\"traceparent\":\"{TRACE}\"}},{{\"id\":\"docs-3-8\",\"value\":null}}]}}"
        );
        assert_eq!(request.body, expected);
        results([
            json!({ "id": "docs-3-7" }),
            json!({ "id": "docs-3-8", "value": null }),
        ])
    });
    let with_headers = attempt(
        Some(b"{ \"n\" : 1.000000000000000000001 }"),
        &[("content-type", "application/json"), ("traceparent", TRACE)],
    );
    let origin = Origin {
        offset: 7,
        ..with_headers.origin
    };
    let first = Attempt {
        origin,
        ..with_headers
    };
    let handler = handler(batches(endpoint.url(), 2));
    let (first, second) = tokio::join!(run(&handler, first), run(&handler, record(8, None)));
    assert_eq!(value(&first.unwrap()), b"");
    assert_eq!(value(&second.unwrap()), b"null");
}

#[tokio::test]
async fn results_are_classified_separately() {
    let endpoint = per_record(|record| match record["value"].as_u64().unwrap() {
        0 => json!({ "status": 201, "value": "made" }),
        1 => json!({ "status": 422, "value": { "code": "closed" } }),
        2 => json!({ "status": 503, "retry_after": 29.001 }),
        3 => json!({ "status": 500 }),
        _ => json!({ "status": 429, "retry_after": 1_000_000 }),
    });
    let handler = handler(batches(endpoint.url(), 5));
    let ended = run_all(&handler, &[b"0", b"1", b"2", b"3", b"4"]).await;
    assert_eq!(value(ended[0].as_ref().unwrap()), b"\"made\"");
    assert_eq!(said(ended[1].as_ref().unwrap_err()), Some(r#"{"code":"closed"}"#));
    let failures: Vec<_> = ended[1..]
        .iter()
        .map(|ended| {
            let failure = ended.as_ref().unwrap_err();
            (failure.code.as_str(), failure.class, failure.retry_after)
        })
        .collect();
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let expected = [
        ("http.422", ErrorClass::Permanent, None),
        ("http.503", ErrorClass::Throttled, seconds(30)),
        ("http.500", ErrorClass::Transient, None),
        ("http.429", ErrorClass::Throttled, seconds(3_600)),
    ];
    assert_eq!(failures, expected);
    assert_eq!(endpoint.calls(), 1);
}

#[tokio::test]
async fn failure_is_shared_by_its_call() {
    let endpoint = FakeEndpoint::start(|_| Reply::status(503));
    let handler = handler(batches(endpoint.url(), 2));
    let ended = run_all(&handler, &[b"0", b"1", b"2", b"3"]).await;
    let calls: Vec<_> = ended
        .iter()
        .map(|ended| {
            let failure = ended.as_ref().unwrap_err();
            assert_scope(failure, "http.503", FailureScope::Endpoint);
            failure.shared_call.unwrap()
        })
        .collect();
    assert_eq!((calls[0], calls[2]), (calls[1], calls[3]));
    assert_ne!(calls[0], calls[2]);
    assert_eq!(endpoint.calls(), 2);
}

#[tokio::test]
async fn failing_record_is_found() {
    let endpoint = FakeEndpoint::start(|request| {
        let records = records(request);
        if records.iter().any(|record| record["value"] == 13) {
            return Reply::status(400);
        }
        results(
            records
                .iter()
                .map(|record| json!({ "id": record["id"], "value": 1 })),
        )
    });
    let values: Vec<String> = (0..64).map(|n| n.to_string()).collect();
    let values: Vec<&[u8]> = values.iter().map(String::as_bytes).collect();
    let ended = run_all(&handler(batches(endpoint.url(), 64)), &values).await;
    for (n, ended) in ended.iter().enumerate() {
        let code = ended.as_ref().map_err(|failure| failure.code.as_str()).map(drop);
        assert_eq!(code, if n == 13 { Err("http.400") } else { Ok(()) }, "{n}");
    }
    // 64, and two halves for each of 32, 16, 8, 4, 2 and 1.
    assert_eq!(endpoint.calls(), 13);
}

#[tokio::test]
async fn repeated_record_is_called_alone() {
    let endpoint = per_record(|_| json!({}));
    let handler = handler(batches(endpoint.url(), 8));
    let retry = Attempt {
        failed_attempts: 1,
        ..record(9, Some(b"9"))
    };
    let (retry, new) = tokio::join!(run(&handler, retry), run_all(&handler, &[b"0", b"1"]));
    assert!(retry.is_ok() && new.iter().all(Result::is_ok));
    assert_eq!(endpoint.calls(), 2);
}

#[tokio::test]
async fn invalid_json_fails_without_call() {
    let endpoint = per_record(|record| json!({ "value": record["value"] }));
    let ended = run_all(&handler(batches(endpoint.url(), 2)), &[b"1", b"\xff"]).await;
    assert!(ended[0].is_ok());
    let failure = ended[1].as_ref().unwrap_err();
    assert_scope(failure, "http.invalid-request", FailureScope::NotCalled);
    let mut base64 = batches(endpoint.url(), 2);
    base64.batch.as_mut().unwrap().values = BatchValues::Base64;
    let ended = run_all(&handler(base64), &[b"1", b"\xff\x00"]).await;
    for (ended, expected) in ended.iter().zip([&b"1"[..], b"\xff\x00"]) {
        let produced = ended.as_ref().unwrap();
        assert_eq!((value(produced), produced.headers.len()), (expected, 0));
    }
}

#[tokio::test]
async fn mismatched_response_is_invalid() {
    let secret = "hunter2";
    for (body, problem) in [
        ("ok".to_owned(), "is not {\"results\""),
        (
            format!("{{\"results\": [{{\"id\": \"docs-3-0\", \"status\": \"{secret}\"}}]}}"),
            "is not {\"results\"",
        ),
        (
            "{\"results\": [{\"id\": \"docs-3-0\", \"status\": 7}]}".to_owned(),
            "has a result with the status 7",
        ),
        (
            "{\"results\": [{\"id\": \"docs-3-0\"}, {\"id\": \"docs-3-0\"}]}".to_owned(),
            "has two results",
        ),
        (
            format!("{{\"results\": [{{\"id\": \"{secret}\"}}]}}"),
            "has a result whose id",
        ),
    ] {
        let endpoint = FakeEndpoint::start(move |_| Reply::ok(body.clone()));
        let ended = run_all(&handler(batches(endpoint.url(), 2)), &[b"0", b"1"]).await;
        for ended in ended {
            let failure = ended.unwrap_err();
            assert_scope(&failure, "http.invalid-response", FailureScope::Endpoint);
            assert!(failure.message.contains(problem), "{failure}");
            assert!(!failure.message.contains(secret), "{failure}");
        }
    }
    let endpoint = FakeEndpoint::start(|_| results([json!({ "id": "docs-3-1" })]));
    let ended = run_all(&handler(batches(endpoint.url(), 2)), &[b"0", b"1"]).await;
    let failure = ended[0].as_ref().unwrap_err();
    assert_eq!(
        (failure.code.as_str(), failure.class),
        ("http.missing-result", ErrorClass::Transient)
    );
    assert!(ended[1].is_ok());
}

#[tokio::test]
async fn reread_record_is_sent_once() {
    let endpoint = per_record(|record| json!({ "value": record["value"] }));
    let handler = handler(batches(endpoint.url(), 3));
    let (previous, other, current) = tokio::join!(
        run(&handler, record(1, Some(b"1"))),
        run(&handler, record(2, Some(b"2"))),
        run(&handler, record(1, Some(b"1"))),
    );
    for (ended, expected) in [(previous, b"1"), (other, b"2"), (current, b"1")] {
        assert_eq!(value(&ended.unwrap()), expected);
    }
    assert_eq!(endpoint.calls(), 1);
}

#[tokio::test]
async fn too_large_call_is_split() {
    let endpoint = per_record(|_| json!({ "value": "x".repeat(1_000) }));
    let large = HttpSettings {
        max_response_bytes: 3_000,
        response: ResponseUse::Keep,
        ..batches(endpoint.url(), 4)
    };
    let ended = run_all(&handler(large), &[b"0", b"1", b"2", b"3"]).await;
    assert!(ended.iter().all(Result::is_ok));
    assert_eq!(endpoint.calls(), 3);
}

#[tokio::test]
async fn concurrent_calls_are_limited() {
    let endpoint = FakeEndpoint::start(|request| {
        let ids = records(request);
        let reply = results(ids.iter().map(|record| json!({ "id": record["id"] })));
        Reply::Delay(Duration::from_millis(20), Box::new(reply))
    });
    let limited = HttpSettings {
        concurrency: 2,
        ..batches(endpoint.url(), 2)
    };
    let values = vec![&b"1"[..]; 20];
    let ended = run_all(&handler(limited), &values).await;
    assert!(ended.iter().all(Result::is_ok));
    assert_eq!((endpoint.calls(), endpoint.max_concurrency()), (10, 2));
}
