//! Requests that replace others with their idempotency key, and commands that name a job by its key.

use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use reqwest::Method;
use tonic::Code;

use super::only_record;
use super::server::{Answer, Server};

/// A request that replaces others.
fn event(delay: &str, number: u32, more: &str) -> String {
    format!(
        r#"{{"appName":"sms","delay":"{delay}","idempotencyKey":"k","onConflict":"replace","jobData":{number}{more}}}"#
    )
}

async fn schedule(server: &Server, job: &str) -> Answer {
    server.json(Method::POST, "/v1/jobs", job).await
}

#[tokio::test(flavor = "multi_thread")]
async fn newest_request_with_key_counts() {
    let server = Server::start();
    let first = schedule(&server, &event("1h", 1, "")).await.is(201);
    assert_eq!(first.text_of("outcome"), "scheduled");
    let id = first.text_of("id");
    let second = schedule(&server, &event("2h", 2, "")).await.is(200);
    second.has(&[("outcome", "replaced"), ("id", id)]);
    assert_eq!(second.body["job"]["revision"], 2);
    let [before, after] = [&first, &second].map(|answer| &answer.body["job"]["scheduledTime"]);
    assert_ne!(before, after);
    let path = format!("/v1/jobs/{id}");
    server.get_until(&path, |job| job.body["jobData"] == 2).await;
    // Without the policy, the first request counts.
    let other = event("3h", 3, "").replace("replace", "reject");
    let refused = schedule(&server, &other).await;
    refused.problem(409, "idempotency_conflict", "different content");
    // Another priority needs another job.
    let urgent = event("2h", 2, r#","priority":"high""#);
    let urgent = schedule(&server, &urgent).await.is(200);
    assert_eq!(urgent.text_of("outcome"), "replaced");
    assert_ne!(urgent.text_of("id"), id);
    let late = server.delete(&path).await.is(200);
    assert_eq!(late.text_of("outcome"), "already_cancelled");

    // An event after the dispatch gets a new job, and its repetition does not.
    let named = r#","priority":"high","requestId":"event 7""#;
    let due = schedule(&server, &event("0s", 7, named)).await.is(200);
    let record = only_record(&server, "sms").await;
    assert_eq!(record.value.as_deref(), Some(&b"7"[..]));
    let again = schedule(&server, &event("0s", 7, named)).await.is(200);
    again.has(&[("outcome", "duplicate"), ("id", due.text_of("id"))]);
    let next = event("1h", 7, &named.replace('7', "8"));
    let next = schedule(&server, &next).await.is(201);
    assert_eq!(next.text_of("outcome"), "scheduled");

    let keyless = event("1h", 1, "").replace(r#""idempotencyKey":"k","#, "");
    let refused = schedule(&server, &keyless).await;
    refused.problem(422, "request.onConflict", "which needs an `idempotencyKey`");
    change_by_key(&server).await;
    server.shut_down();
}

async fn change_by_key(server: &Server) {
    let query = "/v1/jobs?appName=sms&idempotencyKey=by-key";
    let unknown = server.delete(query).await;
    let says = "no job of the application uses this idempotency key, or";
    unknown.problem(404, "job_unknown", says);
    let event = event("1h", 1, "").replace(r#""k""#, r#""by-key""#);
    let id = schedule(server, &event).await.is(201);
    let id = id.text_of("id");
    let delay = r#"{"delay":"2h"}"#;
    let moved = server.json(Method::PATCH, query, delay).await.is(200);
    moved.has(&[("outcome", "rescheduled"), ("id", id)]);
    let mut client = server.grpc().await;
    let by_key = |app: &str, key: &str| v1::CancelJobRequest {
        app: app.to_owned(),
        idempotency_key: key.to_owned(),
        ..v1::CancelJobRequest::default()
    };
    let cancelled = client.cancel_job(by_key("sms", "by-key")).await;
    let cancelled = cancelled.unwrap().into_inner();
    assert_eq!(cancelled.outcome(), v1::Outcome::Cancelled);
    assert_eq!(cancelled.job.unwrap().id, id);
    let again = server.delete(query).await.is(200);
    again.has(&[("outcome", "already_cancelled"), ("id", id)]);
    let late = server.json(Method::PATCH, query, delay).await;
    late.problem(409, "already_cancelled", id);
    let when = v1::reschedule_job_request::When::Delay(prost_types::Duration::default());
    let reschedule = v1::RescheduleJobRequest {
        app: "sms".to_owned(),
        idempotency_key: "unused".to_owned(),
        when: Some(when),
        ..v1::RescheduleJobRequest::default()
    };
    let unknown = client.reschedule_job(reschedule).await.unwrap().into_inner();
    assert_eq!((unknown.outcome(), unknown.job), (v1::Outcome::Unknown, None));

    for (query, code, says) in [
        ("", "request.appName", "set `appName` and `idempotencyKey`"),
        ("?app=sms&idempotencyKey=k", "request.query", "unknown field"),
    ] {
        let refused = server.delete(&format!("/v1/jobs{query}")).await;
        refused.problem(422, code, says);
    }
    for (id, app, key, says) in [
        ("", "", "", "id: is missing"),
        (id, "sms", "k", "id: cannot be combined"),
        ("", "sms", "", "idempotency_key: is missing"),
    ] {
        let request = v1::CancelJobRequest {
            id: id.to_owned(),
            ..by_key(app, key)
        };
        let invalid = client.cancel_job(request).await.unwrap_err();
        assert_eq!(invalid.code(), Code::InvalidArgument);
        assert!(invalid.message().starts_with(says), "{invalid:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scope_of_named_application_counts() {
    let callers: [(&str, &[&str]); 3] = [
        ("sms", &["jobs:write:sms"]),
        ("reader", &["jobs:read"]),
        ("billing", &["jobs:*:billing"]),
    ];
    let (server, tokens) = Server::for_callers(callers, |builder| builder);
    let [sms, reader, billing] = tokens.each_ref().map(|token| token.token.as_str());
    let job = event("1h", 1, "");
    server.ask(sms, Method::POST, "/v1/jobs", &job).await.is(201);
    for app in ["sms", "unknown"] {
        let path = format!("/v1/jobs?appName={app}&idempotencyKey=k");
        for token in [reader, billing] {
            for (method, body) in [(Method::DELETE, ""), (Method::PATCH, r#"{"delay":"2h"}"#)] {
                let refused = server.ask(token, method, &path, body).await;
                refused.problem(403, "permission_denied", &format!("jobs:write:{app}"));
            }
        }
    }
    let mut client =
        JobServiceClient::with_interceptor(server.channel().await, SendToken::new(Some(sms)).unwrap());
    let request = v1::CancelJobRequest {
        app: "sms".to_owned(),
        idempotency_key: "k".to_owned(),
        ..v1::CancelJobRequest::default()
    };
    let cancelled = client.cancel_job(request).await.unwrap().into_inner();
    assert_eq!(cancelled.outcome(), v1::Outcome::Cancelled);
    server.shut_down();
}
