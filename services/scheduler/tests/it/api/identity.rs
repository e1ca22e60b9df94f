//! Who may call the API: tokens with scopes, JWTs, and what refused callers see.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redeliver_core::{Clock as _, Headers, Output, Record, SystemClock};
use redeliver_proto::auth::SendToken;
use redeliver_proto::v1::access_service_client::AccessServiceClient;
use redeliver_proto::v1::batch_schedule_result::Result as OfJob;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_proto::{long_wait, v1};
use redeliver_runtime::tls;
use redeliver_service::identity::NewToken;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::jwt::{Issuer, jwks};
use redeliver_testkit::{FakeEndpoint, Reply, ensure, eventually_async};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt as _;

use super::hours;
use super::server::{Answer, Server, send, with_json};
use crate::env::DEADLINE;

const JOB: &str = r#"{"appName":"sms","delay":"1h","jobData":1}"#;

async fn schedule(server: &Server, token: &str) -> Answer {
    server.ask(token, Method::POST, "/v1/jobs", JOB).await
}

async fn read(server: &Server, token: &str, path: &str) -> Answer {
    server.ask(token, Method::GET, path, "").await
}

#[track_caller]
fn denied(answer: Answer, says: &str) {
    answer.problem(403, "permission_denied", says);
}

/// Writes a tokens file as Kubernetes does: the new file replaces the old one at once.
pub(crate) fn write_tokens(path: &Path, entries: &[(&str, &NewToken, &[&str])]) {
    let entries = entries.iter().map(
        |(name, token, scopes)| json!({"name": name, "sha256": token.sha256.to_string(), "scopes": scopes}),
    );
    let text = json!({"tokens": entries.collect::<Vec<_>>()}).to_string();
    std::fs::write(path.with_extension("new"), text).unwrap();
    std::fs::rename(path.with_extension("new"), path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_permit_what_scopes_say() {
    let callers: [(&str, &[&str]); 5] = [
        ("all", &["jobs:*"]),
        ("sms", &["jobs:write:sms*", "jobs:read:sms*"]),
        ("reader", &["jobs:read"]),
        ("billing", &["jobs:*:billing-*"]),
        ("nothing", &["dead-letters:read"]),
    ];
    let (mut server, tokens) = Server::for_callers(callers, |builder| builder);
    let [all, sms, reader, billing, nothing] = tokens.each_ref().map(|token| token.token.as_str());

    let scheduled = schedule(&server, sms).await.is(201);
    let path = format!("/v1/jobs/{}", scheduled.text_of("id"));
    let job = eventually_async("the job", DEADLINE, async || {
        let job = read(&server, reader, &path).await;
        ensure(job.status == 200, job.text.clone()).map(|()| job)
    })
    .await;
    assert_eq!(job.text_of("appName"), "sms");
    let mut access =
        AccessServiceClient::with_interceptor(server.channel().await, SendToken::new(Some(sms)).unwrap());
    let access = access.get_access(v1::GetAccessRequest {}).await.unwrap();
    assert_eq!(access.into_inner().scopes, ["jobs:write:sms*", "jobs:read:sms*"]);

    // Too small a scope: the answer names the verb and the application.
    let of_sms = "jobs of the application `sms`";
    let says = format!("`token:reader` may not write {of_sms}; it needs the scope jobs:write:sms");
    denied(schedule(&server, reader).await, &says);
    let says = format!("`token:billing` may not write {of_sms}");
    denied(schedule(&server, billing).await, &says);
    let deleted = server.ask(reader, Method::DELETE, &path, "").await;
    denied(deleted, "it needs the scope jobs:write");
    let nothing_at_all = "`token:nothing` may not read jobs of all applications";
    denied(read(&server, nothing, &path).await, nothing_at_all);
    let refused = send(server.request(Method::POST, "/v1/jobs").bearer_auth(reader)).await;
    assert_eq!(refused.status, 415, "an unreadable request has no application");

    // A job of an application that the caller may not see is unknown to it.
    for (method, body) in [
        (Method::GET, ""),
        (Method::DELETE, ""),
        (Method::PATCH, r#"{"delay":"2h"}"#),
    ] {
        let unknown = server.ask(billing, method, &path, body).await;
        unknown.problem(404, "job_unknown", "no such job");
    }
    assert_eq!(read(&server, reader, &path).await.text_of("state"), "scheduled");
    let mut client =
        JobServiceClient::with_interceptor(server.channel().await, SendToken::new(Some(billing)).unwrap());
    let cancel = v1::CancelJobRequest {
        id: scheduled.text_of("id").to_owned(),
        ..v1::CancelJobRequest::default()
    };
    let unknown = client.cancel_job(cancel).await.unwrap().into_inner();
    assert_eq!(unknown.outcome(), v1::Outcome::Unknown);
    let request = v1::GetStatsRequest::default();
    let refused = client.get_stats(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let info = refused.get_details_error_info().unwrap();
    assert_eq!(
        (info.reason.as_str(), info.metadata["scope"].as_str()),
        ("PERMISSION_DENIED", "jobs:read")
    );

    // Statistics count the jobs of all applications.
    let all_of_them = "`token:sms` may not read jobs of all applications; it needs the scope jobs:read";
    denied(read(&server, sms, "/v1/stats").await, all_of_them);
    read(&server, reader, "/v1/stats").await.is(200);

    // Lists and statistics of one application need only its scope.
    for path in ["/v1/jobs", "/v1/stats"] {
        read(&server, reader, path).await.is(200);
        read(&server, sms, &format!("{path}?app=sms")).await.is(200);
        denied(read(&server, sms, &format!("{path}?app=")).await, all_of_them);
        let says = format!("`token:billing` may not read {of_sms}; it needs the scope jobs:read:sms");
        denied(read(&server, billing, &format!("{path}?app=sms")).await, &says);
    }
    // The list of applications has those that the caller may read.
    for (token, expected) in [(sms, &["sms"][..]), (billing, &[])] {
        let listed = read(&server, token, "/v1/applications").await.is(200);
        let names = listed.body["applications"].as_array().unwrap().iter();
        let names: Vec<&str> = names.map(|app| app["name"].as_str().unwrap()).collect();
        assert_eq!(names, expected);
    }
    denied(read(&server, nothing, "/v1/applications").await, nothing_at_all);
    let request = v1::ListJobsRequest::default();
    let refused = client.list_jobs(request).await.unwrap_err();
    let info = refused.get_details_error_info().unwrap();
    assert_eq!(info.metadata["scope"], "jobs:read");

    let delay = r#"{"delay":"2h"}"#;
    let moved = server.ask(sms, Method::PATCH, &path, delay).await.is(200);
    assert_eq!(moved.text_of("outcome"), "rescheduled");
    assert!(server.metric("redeliver_api_requests_refused_total{reason=\"permission_denied\"}") >= 9);
    assert_eq!(
        server.metric("redeliver_api_requests_refused_total{reason=\"token_wrong\"}"),
        0
    );

    batch_with_scopes(&server, sms).await;

    // A token that is no longer listed is refused.
    write_tokens(&server.file("tokens"), &[("all", &tokens[0], &["jobs:*"])]);
    eventually_async("the revocation", DEADLINE, async || {
        let answer = read(&server, sms, &path).await;
        ensure(answer.status == 401, answer.text)
    })
    .await;
    let revoked = schedule(&server, sms).await;
    revoked.problem(401, "token_wrong", "it was revoked");
    let cancelled = server.ask(all, Method::DELETE, &path, "").await.is(200);
    assert_eq!(cancelled.text_of("outcome"), "cancelled");

    let output = server.output();
    assert!(
        output.contains("request refused") && output.contains("jobs:write:sms"),
        "{output}"
    );
    for token in [all, sms, reader, billing, nothing] {
        assert!(!output.contains(token), "{output}");
    }
    server.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn acts_need_scope_of_pipeline() {
    let of_docs = ["dead-letters:read:*-docs-dlq", "dead-letters:operate:*-docs-dlq"];
    let callers: [(&str, &[&str]); 4] = [
        ("operator", &of_docs),
        ("other", &["dead-letters:read", "dead-letters:operate:*-mail-dlq"]),
        ("blind", &["dead-letters:operate"]),
        ("jobs", &["jobs:*"]),
    ];
    let (server, tokens) = Server::for_callers(callers, |builder| builder);
    let [operator, other, blind, jobs] = &tokens;
    let channel = server.channel().await;
    let client = |token: &NewToken| {
        let token = SendToken::new(Some(&token.token)).unwrap();
        JobServiceClient::with_interceptor(channel.clone(), token)
    };
    let record = Output {
        topic: server.topic("jobs-ingest").into(),
        partition: None,
        key: None,
        value: Some("document".into()),
        headers: Headers::new(),
    };
    let due = SystemClock.now().after(Duration::from_secs(3_600));
    let wait = long_wait::wrap(&server.topic("docs"), due, record);
    server.write(&[wait]).await;
    let of_app = schedule(&server, &jobs.token).await.is(201);
    let listed = eventually_async("both wait", DEADLINE, async || {
        let listed = client(jobs).list_jobs(v1::ListJobsRequest::default()).await;
        let jobs = listed.map_err(|status| status.to_string())?.into_inner().jobs;
        ensure(jobs.len() == 2, format!("{jobs:?}")).map(|()| jobs)
    })
    .await;
    let id = listed.into_iter().find(|job| job.long_wait).unwrap().id;
    let act = async |token: &NewToken, id: &str, action: i32| {
        let id = id.to_owned();
        let request = v1::ActOnLongWaitRequest { id, action };
        let acted = client(token).act_on_long_wait(request).await;
        let acted = acted.map_err(|status| status.code())?;
        Ok(acted.into_inner().outcome())
    };
    let retry = v1::LongWaitAction::Retry.into();
    assert_eq!(act(jobs, &id, retry).await, Err(Code::PermissionDenied));
    assert_eq!(act(other, &id, retry).await, Ok(v1::Outcome::Unknown));
    assert_eq!(act(blind, &id, retry).await, Ok(v1::Outcome::Unknown));
    assert_eq!(act(operator, &id, 0).await, Err(Code::InvalidArgument));
    let app_id = of_app.text_of("id");
    assert_eq!(act(operator, app_id, retry).await, Ok(v1::Outcome::Unknown));
    let is_recorded = |record: &Record| {
        let value = record.value.as_deref().unwrap_or_default();
        value.windows(13).any(|part| part == b"waiting.retry")
    };
    let recorded = || {
        server
            .records("audit")
            .iter()
            .filter(|record| is_recorded(record))
            .count()
    };
    assert_eq!(recorded(), 0);
    assert_eq!(act(operator, &id, retry).await, Ok(v1::Outcome::Rescheduled));
    assert_eq!(recorded(), 1);
    let cancel = v1::CancelJobRequest {
        id,
        ..v1::CancelJobRequest::default()
    };
    let cancelled = client(jobs).cancel_job(cancel).await.unwrap().into_inner();
    assert_eq!(cancelled.outcome(), v1::Outcome::Unknown);
    server.shut_down();
}

/// Each job of a batch needs a scope of its own.
async fn batch_with_scopes(server: &Server, token: &str) {
    let token = SendToken::new(Some(token)).unwrap();
    let mut client = JobServiceClient::with_interceptor(server.channel().await, token);
    let spec = |app: &str| v1::JobSpec {
        app: app.to_owned(),
        when: Some(v1::job_spec::When::Delay(hours(1))),
        ..v1::JobSpec::default()
    };
    let request = v1::BatchScheduleJobsRequest {
        jobs: ["sms", "fax", "sms"].map(spec).into(),
        no_wait: false,
    };
    let answer = client.batch_schedule_jobs(request).await.unwrap().into_inner();
    let codes: Vec<_> = answer
        .results
        .into_iter()
        .map(|result| match result.result.unwrap() {
            OfJob::Scheduled(_) => Code::Ok,
            OfJob::Error(error) => Code::from(error.code),
        })
        .collect();
    assert_eq!(codes, [Code::Ok, Code::PermissionDenied, Code::Ok]);
}

#[expect(
    clippy::disallowed_methods,
    reason = "the times in tokens are compared with the clock of the system"
)]
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn claims(audience: &str, expires: u64) -> Value {
    json!({"iss": "https://login.test", "aud": audience, "sub": "sms-team", "exp": expires,
           "scope": "openid jobs:read jobs:write:sms"})
}

#[tokio::test(flavor = "multi_thread")]
async fn issued_jwts_are_accepted() {
    let issuer = Issuer::new("k1").unwrap();
    let keys = jwks(&[&issuer]);
    let endpoint = FakeEndpoint::start(move |_| Reply::ok(keys.clone()));
    let url = format!("http://{}/keys", endpoint.address());
    let server = Server::start_with(|builder| {
        builder
            .set("scheduler.auth.jwt.issuer", "https://login.test")
            .set("scheduler.auth.jwt.audience", "redeliver")
            .set("scheduler.auth.jwt.jwks_url", &url)
    });
    let valid = issuer.sign(&claims("redeliver", now() + 600)).unwrap();
    let scheduled = schedule(&server, &valid).await.is(201);
    assert_eq!(scheduled.text_of("outcome"), "scheduled");
    read(&server, &valid, "/v1/stats").await.is(200);
    let other_app = JOB.replace("sms", "other");
    let refused = server.ask(&valid, Method::POST, "/v1/jobs", &other_app).await;
    let says = "`jwt:https://login.test#sms-team` may not write jobs of the application `other`";
    denied(refused, says);

    let expired = issuer.sign(&claims("redeliver", now() - 600)).unwrap();
    let refused = schedule(&server, &expired).await;
    refused.problem(401, "token_expired", "has expired");
    let output = server.output();
    assert!(!output.contains(&valid) && !output.contains(&expired), "{output}");
    server.shut_down();
}

/// A client that trusts the authority of the file `ca`, with the certificate `name` or without one.
fn https(directory: &Path, name: Option<&str>) -> reqwest::Client {
    let at = |file: String| directory.join(file);
    let roots = tls::trusted_roots(Some(&at("ca".to_owned()))).unwrap();
    let builder = tls::client_builder().unwrap().with_root_certificates(roots);
    let config = match name {
        Some(name) => {
            let certificates = tls::certificates(&at(format!("{name}.crt"))).unwrap();
            let key = tls::private_key(&at(format!("{name}.key"))).unwrap();
            builder.with_client_auth_cert(certificates, key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(config)
        .no_proxy();
    client.build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_permit_what_is_configured() {
    let authority = Authority::new().unwrap();
    let server = Server::start_prepared(
        |builder| {
            builder
                .set("scheduler.tls.cert_file", "{dir}/server.crt")
                .set("scheduler.tls.key_file", "{dir}/server.key")
                .set("scheduler.tls.client_ca_file", "{dir}/ca")
                .set("scheduler.token_file", "{dir}/token")
                .set(
                    "scheduler.auth.client_certificates",
                    "[{ uri: 'spiffe://prod/ns/sms/*', scopes: ['jobs:*:sms'] }]",
                )
        },
        |directory| {
            authority.write(directory, "ca").unwrap();
            let client = |name, uri| authority.sign_client(name, uri).unwrap();
            for (name, signed) in [
                ("server", authority.sign().unwrap()),
                ("sms", client("x", "spiffe://prod/ns/sms/api")),
                ("other", client("sms", "spiffe://prod/ns/other/api")),
            ] {
                std::fs::write(directory.join(format!("{name}.crt")), signed.certificate).unwrap();
                std::fs::write(directory.join(format!("{name}.key")), signed.key).unwrap();
            }
        },
    );
    let directory = server.file("");
    let (jobs, stats) = (server.https("/v1/jobs"), server.https("/v1/stats"));
    let sms = https(&directory, Some("sms"));
    let scheduled = send(with_json(sms.post(&jobs), JOB)).await.is(201);
    assert_eq!(scheduled.text_of("outcome"), "scheduled");
    let says = "`certificate:URI=spiffe://prod/ns/sms/api` may not read jobs of all applications";
    denied(send(sms.get(&stats)).await, says);
    let unknown = send(https(&directory, Some("other")).get(&stats)).await;
    unknown.problem(401, "certificate_unknown", "URI=spiffe://prod/ns/other/api");
    // A client without a certificate needs a token.
    let none = https(&directory, None);
    let missing = send(none.get(&stats)).await;
    missing.problem(401, "token_missing", "authorization: Bearer");
    send(none.get(&stats).bearer_auth("s3cret")).await.is(200);
    server.shut_down();
}
