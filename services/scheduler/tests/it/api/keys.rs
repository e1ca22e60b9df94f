//! Requests that replace others with their idempotency key, and commands that name a job by its key.

use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_service::identity::{NewToken, new_token};
use reqwest::Method;
use tonic::Code;

use super::identity::write_tokens;
use super::only_record;
use super::server::{Answer, Server, send, with_json};

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
    assert_eq!(
        (second.text_of("outcome"), second.text_of("id")),
        ("replaced", id)
    );
    assert_eq!(second.body["job"]["revision"], 2);
    assert_ne!(
        first.body["job"]["scheduledTime"],
        second.body["job"]["scheduledTime"]
    );
    let path = format!("/v1/jobs/{id}");
    server.get_until(&path, |job| job.body["jobData"] == 2).await;
    // Without the policy, the first request counts.
    let other = event("3h", 3, "").replace("replace", "reject");
    schedule(&server, &other)
        .await
        .problem(409, "idempotency_conflict", "different content");
    // Another priority needs another job.
    let urgent = schedule(&server, &event("2h", 2, r#","priority":"high""#))
        .await
        .is(200);
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
    assert_eq!(
        (again.text_of("outcome"), again.text_of("id")),
        ("duplicate", due.text_of("id"))
    );
    let next = event("1h", 7, &named.replace('7', "8"));
    assert_eq!(
        schedule(&server, &next).await.is(201).text_of("outcome"),
        "scheduled"
    );

    schedule(
        &server,
        &event("1h", 1, "").replace(r#""idempotencyKey":"k","#, ""),
    )
    .await
    .problem(422, "request.onConflict", "which needs an `idempotencyKey`");
    change_by_key(&server).await;
    server.shut_down();
}

async fn change_by_key(server: &Server) {
    let query = "/v1/jobs?appName=sms&idempotencyKey=by-key";
    server.delete(query).await.problem(
        404,
        "job_unknown",
        "no job of the application uses this idempotency key, or",
    );
    let event = event("1h", 1, "").replace(r#""k""#, r#""by-key""#);
    let id = schedule(server, &event).await.is(201);
    let id = id.text_of("id");
    let moved = server
        .json(Method::PATCH, query, r#"{"delay":"2h"}"#)
        .await
        .is(200);
    assert_eq!(
        (moved.text_of("outcome"), moved.text_of("id")),
        ("rescheduled", id)
    );
    let mut client = server.grpc().await;
    let by_key = |app: &str, key: &str| v1::CancelJobRequest {
        app: app.to_owned(),
        idempotency_key: key.to_owned(),
        ..v1::CancelJobRequest::default()
    };
    let cancelled = client
        .cancel_job(by_key("sms", "by-key"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (cancelled.outcome(), cancelled.job.unwrap().id.as_str()),
        (v1::Outcome::Cancelled, id)
    );
    let again = server.delete(query).await.is(200);
    assert_eq!(
        (again.text_of("outcome"), again.text_of("id")),
        ("already_cancelled", id)
    );
    server
        .json(Method::PATCH, query, r#"{"delay":"2h"}"#)
        .await
        .problem(409, "already_cancelled", id);
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
        server
            .delete(&format!("/v1/jobs{query}"))
            .await
            .problem(422, code, says);
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
    let tokens: [NewToken; 3] = std::array::from_fn(|_| new_token().unwrap());
    let [sms, reader, billing] = &tokens;
    let entries: [(&str, &NewToken, &[&str]); 3] = [
        ("sms", sms, &["jobs:write:sms"]),
        ("reader", reader, &["jobs:read"]),
        ("billing", billing, &["jobs:*:billing"]),
    ];
    let server = Server::start_prepared(
        |builder| builder.set("scheduler.auth.tokens_file", "{dir}/tokens"),
        |directory| write_tokens(&directory.join("tokens"), &entries),
    );
    let [sms, reader, billing] = tokens.each_ref().map(|token| token.token.as_str());
    let ask = async |token: &str, method: Method, path: &str, body: &str| {
        send(with_json(server.request(method, path), body).bearer_auth(token)).await
    };
    ask(sms, Method::POST, "/v1/jobs", &event("1h", 1, ""))
        .await
        .is(201);
    for app in ["sms", "unknown"] {
        let path = format!("/v1/jobs?appName={app}&idempotencyKey=k");
        for token in [reader, billing] {
            for (method, body) in [(Method::DELETE, ""), (Method::PATCH, r#"{"delay":"2h"}"#)] {
                ask(token, method, &path, body).await.problem(
                    403,
                    "permission_denied",
                    &format!("jobs:write:{app}"),
                );
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
