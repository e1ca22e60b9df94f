//! The gRPC and REST APIs of the real binary, with real Kafka and Redis.

mod batch;
mod control;
mod forgetting;
mod health;
mod identity;
mod incomplete;
mod keys;
mod limits;
mod list;
mod openapi;
mod rolling;
mod schedules;
mod server;
mod state_records;

use redeliver_core::Record;
use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_testkit::{LocalRedis, ensure, eventually_async};
use reqwest::Method;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use self::server::{Server, send, with_json};
use crate::env::DEADLINE;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn header<'a>(record: &'a Record, name: &str) -> Option<&'a str> {
    record
        .headers
        .last(name)
        .map(|value| std::str::from_utf8(value).unwrap())
}

/// Waits for the only record of a topic.
async fn only_record(server: &Server, topic: &str) -> Record {
    eventually_async("a record", DEADLINE, async || {
        let mut records = tokio::task::block_in_place(|| server.records(topic));
        match records.pop() {
            Some(record) if records.is_empty() => Ok(record),
            found => Err(format!("{found:?} and {records:?}")),
        }
    })
    .await
}

/// They share a server, whose start takes longer than all of them.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_managed_over_both_protocols() {
    let server = Server::start();
    reject_invalid_requests(&server).await;
    support_reflection(&server).await;
    manage_over_rest(&server).await;
    manage_over_grpc(&server).await;
    dispatch_once(&server).await;
    server.shut_down();
}

async fn manage_over_rest(server: &Server) {
    let job = r#"{"appName":"sms","delay":"1h","idempotencyKey":"k-1","requestId":"r-1","key":"kk",
                  "priority":"high","headers":{"h":"v"},"expireAfter":"5m","jobData":{"a": 1.50}}"#;
    let scheduled = server.json(Method::POST, "/v1/jobs", job).await.is(201);
    assert_eq!(scheduled.text_of("outcome"), "scheduled");
    let path = format!("/v1/jobs/{}", scheduled.text_of("id"));
    assert_eq!(scheduled.location.as_deref(), Some(path.as_str()));

    let known = server.get(&path).await.is(200);
    assert!(known.text.contains(r#""jobData":{"a": 1.50}"#), "{known:?}");
    for (field, value) in [
        ("state", "scheduled"),
        ("priority", "high"),
        ("idempotencyKey", "k-1"),
        ("requestId", "r-1"),
        ("key", "kk"),
    ] {
        assert_eq!(known.text_of(field), value);
    }
    assert_eq!(known.body["headers"][0]["value"], "v");

    let again = server.json(Method::POST, "/v1/jobs", job).await.is(200);
    assert_eq!(
        (again.text_of("outcome"), again.text_of("id")),
        ("duplicate", scheduled.text_of("id"))
    );
    let other = r#"{"appName":"sms","delay":"1h","jobData":2}"#;
    let other = with_json(server.request(Method::POST, "/v1/jobs"), other).header("idempotency-key", "k-1");
    let conflict = send(other).await;
    assert_eq!(conflict.text_of("jobId"), scheduled.text_of("id"));
    conflict.problem(409, "idempotency_conflict", "different content");

    let moved = server
        .json(Method::PATCH, &path, r#"{"delay":"2h"}"#)
        .await
        .is(200);
    assert_eq!(moved.text_of("outcome"), "rescheduled");
    assert_eq!(moved.body["job"]["revision"], 2);

    let stats = server
        .get_until("/v1/stats?minutes=180", |stats| {
            stats.body["nextDue"] == moved.body["job"]["scheduledTime"]
        })
        .await;
    assert_eq!(
        (&stats.body["scheduled"], &stats.body["later"]),
        (&1.into(), &0.into())
    );
    let minutes = stats.body["perMinute"].as_array().unwrap();
    assert_eq!(minutes.len(), 180);
    assert_eq!(
        minutes[110..130]
            .iter()
            .filter_map(serde_json::Value::as_u64)
            .sum::<u64>(),
        1
    );

    assert_eq!(server.delete(&path).await.is(200).text_of("outcome"), "cancelled");
    assert_eq!(
        server.delete(&path).await.is(200).text_of("outcome"),
        "already_cancelled"
    );
    let late = server.json(Method::PATCH, &path, r#"{"delay":"2h"}"#).await;
    late.problem(409, "already_cancelled", "ended before the request");
    let cancelled = server
        .get_until(&path, |job| job.text_of("state") == "cancelled")
        .await;
    // The data of an ended job is not kept.
    assert!(cancelled.body.get("jobData").is_none());
}

async fn manage_over_grpc(server: &Server) {
    let mut client = server.grpc().await;
    let spec = v1::JobSpec {
        app: "sms".to_owned(),
        when: Some(v1::job_spec::When::Delay(prost_types::Duration {
            seconds: 3600,
            nanos: 0,
        })),
        idempotency_key: Some("k-2".to_owned()),
        data: vec![0xff, 0].into(),
        ..v1::JobSpec::default()
    };
    let ask = |job: &v1::JobSpec| v1::ScheduleJobRequest {
        job: Some(job.clone()),
        no_wait: false,
    };
    let scheduled = client.schedule_job(ask(&spec)).await.unwrap().into_inner();
    assert_eq!(scheduled.outcome(), v1::Outcome::Scheduled);
    let id = scheduled.id;
    let known = client
        .get_job(v1::GetJobRequest { id: id.clone() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (known.state(), &known.data[..]),
        (v1::JobState::Scheduled, &[0xff, 0][..])
    );

    let again = client.schedule_job(ask(&spec)).await.unwrap().into_inner();
    assert_eq!((again.outcome(), &again.id), (v1::Outcome::Duplicate, &id));
    let other = v1::JobSpec {
        data: "other".into(),
        ..spec.clone()
    };
    let conflict = client.schedule_job(ask(&other)).await.unwrap_err();
    assert_eq!(conflict.code(), Code::AlreadyExists);
    assert_eq!(
        redeliver_proto::error::reason(&conflict).as_deref(),
        Some("IDEMPOTENCY_CONFLICT")
    );

    let moved = v1::RescheduleJobRequest {
        id: id.clone(),
        when: Some(v1::reschedule_job_request::When::Delay(prost_types::Duration {
            seconds: 7200,
            nanos: 0,
        })),
        ..v1::RescheduleJobRequest::default()
    };
    let moved = client.reschedule_job(moved).await.unwrap().into_inner();
    assert_eq!(
        (moved.outcome(), moved.job.unwrap().revision),
        (v1::Outcome::Rescheduled, 2)
    );

    let mut cancel = async || {
        let request = v1::CancelJobRequest {
            id: id.clone(),
            ..v1::CancelJobRequest::default()
        };
        client.cancel_job(request).await.unwrap().into_inner().outcome()
    };
    assert_eq!(cancel().await, v1::Outcome::Cancelled);
    assert_eq!(cancel().await, v1::Outcome::AlreadyCancelled);
    let never = "01KAJQ6Z2B0001G00000000A7X".to_owned();
    let unknown = client
        .cancel_job(v1::CancelJobRequest {
            id: never.clone(),
            ..v1::CancelJobRequest::default()
        })
        .await
        .unwrap();
    assert_eq!(unknown.into_inner().outcome(), v1::Outcome::Unknown);
    let unknown = client.get_job(v1::GetJobRequest { id: never }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);

    let stats = eventually_async("statistics", DEADLINE, async || {
        let stats = client
            .get_stats(v1::GetStatsRequest::default())
            .await
            .unwrap()
            .into_inner();
        ensure(stats.scheduled == 0, format!("{stats:?}")).map(|()| stats)
    })
    .await;
    assert_eq!((stats.per_minute.len(), stats.next_due), (60, None));
}

async fn dispatch_once(server: &Server) {
    let body = r#"{"appName":"sms","delay":"50ms","key":"kk","headers":{"h":"v"},"jobData":[ 1 ]}"#;
    let request = with_json(server.request(Method::POST, "/v1/jobs?wait=false"), body);
    let accepted = send(request.header("traceparent", TRACE)).await.is(202);
    let id = accepted.text_of("id").to_owned();
    // The id was returned before the job was accepted, and is the id of the job.
    let path = format!("/v1/jobs/{id}");
    server.get_until(&path, |job| job.status.is_success()).await;

    let record = only_record(server, "sms").await;
    assert_eq!(record.value.as_deref(), Some(&b"[ 1 ]"[..]));
    assert_eq!(record.key.as_deref(), Some(&b"kk"[..]));
    assert_eq!(
        (header(&record, "h"), header(&record, "job-id")),
        (Some("v"), Some(id.as_str()))
    );
    let trace = header(&record, "traceparent").unwrap();
    assert_eq!(trace[..35], TRACE[..35], "{trace}");
    let ingest = server.records("jobs-ingest");
    let is_traced = |command: &Record| header(command, "traceparent") == Some(TRACE);
    assert!(ingest.iter().any(is_traced), "{ingest:?}");

    let late = server.delete(&path).await;
    assert_eq!(late.text_of("outcome"), "already_dispatched");
    assert_eq!(late.body["job"]["topic"], server.topic("sms"));
    late.problem(409, "already_dispatched", "ended before the request");
}

async fn reject_invalid_requests(server: &Server) {
    for (body, status, code, says) in [
        (
            r#"{"appName":"fax","delay":"1h","jobData":1}"#,
            422,
            "request.appName",
            "expected one of sms",
        ),
        (
            r#"{"cancel":"01KAJQ6Z2B0001G00000000A7X"}"#,
            422,
            "request.cancel",
            "use DELETE",
        ),
        (r#"{"appName":"#, 400, "request.json", "EOF"),
    ] {
        server
            .json(Method::POST, "/v1/jobs", body)
            .await
            .problem(status, code, says);
    }
    let large = format!(
        r#"{{"appName":"sms","delay":"1h","jobData":"{}"}}"#,
        "x".repeat(900_001)
    );
    server.json(Method::POST, "/v1/jobs", &large).await.problem(
        422,
        "request.jobData",
        "the maximum is 900000",
    );
    let larger = format!(
        r#"{{"appName":"sms","delay":"1h","jobData":"{}"}}"#,
        "x".repeat(2_000_000)
    );
    server
        .json(Method::POST, "/v1/jobs", &larger)
        .await
        .problem(413, "body", "limit");
    let untyped = server
        .request(Method::POST, "/v1/jobs")
        .body(r#"{"appName":"sms","delay":"1h","jobData":1}"#);
    send(untyped)
        .await
        .problem(415, "request.contentType", "content-type: application/json");
    server
        .get("/v1/jobs/7")
        .await
        .problem(422, "request.id", "is not a job id");
    server
        .get("/v1/jobs/01KAJQ6Z2B0001G00000000A7X")
        .await
        .problem(404, "job_unknown", "no such job");
    server
        .get("/v1/stats?minutes=2000")
        .await
        .problem(422, "request.minutes", "the maximum is 1440");
    server.get("/v2").await.problem(404, "path", "/v1/jobs");
    server
        .request(Method::PUT, "/v1/jobs")
        .send()
        .await
        .unwrap()
        .error_for_status()
        .unwrap_err();

    let mut client = server.grpc().await;
    let mut refused = async |job: Option<v1::JobSpec>| {
        let request = v1::ScheduleJobRequest { job, no_wait: true };
        client.schedule_job(request).await.unwrap_err()
    };
    let delay = Some(v1::job_spec::When::Delay(prost_types::Duration {
        seconds: 1,
        nanos: 0,
    }));
    let unknown = v1::JobSpec {
        app: "fax".to_owned(),
        when: delay,
        ..v1::JobSpec::default()
    };
    assert_eq!(refused(Some(unknown.clone())).await.code(), Code::NotFound);
    let timeless = refused(Some(v1::JobSpec {
        when: None,
        ..unknown
    }))
    .await;
    assert_eq!(timeless.code(), Code::InvalidArgument);
    assert!(
        timeless.message().starts_with("scheduled_time: is missing"),
        "{timeless:?}"
    );
    assert_eq!(refused(None).await.code(), Code::InvalidArgument);
    assert!(server.records("jobs-ingest").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_token_only_probes_work() {
    let server = Server::start_with(|builder| builder.set("scheduler.token_file", "{dir}/token"));
    server
        .get("/v1/stats")
        .await
        .problem(401, "token_missing", "authorization: Bearer");
    let wrong = server.request(Method::GET, "/v1/stats").bearer_auth("s3cre");
    send(wrong)
        .await
        .problem(401, "token_wrong", "the token is wrong");
    let body = r#"{"appName":"sms","delay":"1h","jobData":1}"#;
    server.json(Method::POST, "/v1/jobs", body).await.is(401);
    send(server.request(Method::GET, "/v1/stats").bearer_auth("s3cret"))
        .await
        .is(200);

    let refused = server
        .grpc()
        .await
        .get_stats(v1::GetStatsRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let token = SendToken::new(Some("s3cret")).unwrap();
    let mut client = JobServiceClient::with_interceptor(server.channel().await, token);
    client.get_stats(v1::GetStatsRequest::default()).await.unwrap();

    let health = HealthClient::new(server.channel().await);
    let request = || HealthCheckRequest {
        service: "redeliver.v1.JobService".to_owned(),
    };
    eventually_async("health says that it serves", DEADLINE, async || {
        let answer = health.clone().check(request()).await.unwrap().into_inner();
        match answer.status() {
            ServingStatus::Serving => Ok(()),
            status => Err(status.as_str_name()),
        }
    })
    .await;
    assert!(server.records("jobs-ingest").is_empty());
}

/// The services that one version of the reflection service lists.
macro_rules! services_by_reflection {
    ($version:ident, $channel:expr) => {{
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;

        let ask = tonic_reflection::pb::$version::ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let asks = futures::stream::iter([ask]);
        let mut client = ServerReflectionClient::new($channel);
        let mut answers = client
            .server_reflection_info(Request::new(asks))
            .await
            .unwrap()
            .into_inner();
        match answers.message().await.unwrap().unwrap().message_response {
            Some(MessageResponse::ListServicesResponse(list)) => list
                .service
                .into_iter()
                .map(|service| service.name)
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        }
    }};
}

async fn support_reflection(server: &Server) {
    let served = ["redeliver.v1.JobService", "grpc.health.v1.Health"];
    for services in [
        services_by_reflection!(v1, server.channel().await),
        services_by_reflection!(v1alpha, server.channel().await),
    ] {
        assert!(
            served
                .iter()
                .all(|name| services.iter().any(|found| found == name)),
            "{services:?}"
        );
        // Other services of the same schemas are not served here.
        assert!(
            !services.iter().any(|name| name.contains("DeadLetter")),
            "{services:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn late_commands_are_answered_with_positions() {
    let redis = LocalRedis::start().unwrap();
    let server = Server::start_with(|builder| builder.redis(redis.url()));
    // Without the index it is unknown whether the key is used.
    redis.process().stop();
    let body = r#"{"appName":"sms","delay":"1h","idempotencyKey":"k","jobData":1}"#;
    let late = server.json(Method::POST, "/v1/jobs", body).await;
    let id = late.text_of("jobId").to_owned();
    let command = &server.records("jobs-ingest")[0].position;
    assert_eq!(late.text_of("position"), command.to_string());
    late.problem(424, "pending", "and will take effect");
    redis.process().cont();
    let job = server
        .get_until(&format!("/v1/jobs/{id}"), |job| job.status.is_success())
        .await;
    assert_eq!(job.text_of("idempotencyKey"), "k");
}
