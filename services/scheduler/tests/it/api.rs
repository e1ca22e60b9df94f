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

pub(crate) fn hours(count: i64) -> prost_types::Duration {
    prost_types::Duration {
        seconds: 3_600 * count,
        nanos: 0,
    }
}

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
    known.has(&[
        ("state", "scheduled"),
        ("priority", "high"),
        ("idempotencyKey", "k-1"),
        ("requestId", "r-1"),
        ("key", "kk"),
    ]);
    assert_eq!(known.body["headers"][0]["value"], "v");

    let again = server.json(Method::POST, "/v1/jobs", job).await.is(200);
    again.has(&[("outcome", "duplicate"), ("id", scheduled.text_of("id"))]);
    let other = r#"{"appName":"sms","delay":"1h","jobData":2}"#;
    let other = with_json(server.request(Method::POST, "/v1/jobs"), other).header("idempotency-key", "k-1");
    let conflict = send(other).await;
    assert_eq!(conflict.text_of("jobId"), scheduled.text_of("id"));
    conflict.problem(409, "idempotency_conflict", "different content");

    let delay = r#"{"delay":"2h"}"#;
    let moved = server.json(Method::PATCH, &path, delay).await.is(200);
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
    let counts = minutes[110..130].iter().filter_map(serde_json::Value::as_u64);
    assert_eq!(counts.sum::<u64>(), 1);

    for outcome in ["cancelled", "already_cancelled"] {
        assert_eq!(server.delete(&path).await.is(200).text_of("outcome"), outcome);
    }
    let late = server.json(Method::PATCH, &path, delay).await;
    late.problem(409, "already_cancelled", "ended before the request");
    let is_cancelled = |job: &server::Answer| job.text_of("state") == "cancelled";
    let cancelled = server.get_until(&path, is_cancelled).await;
    // The data of an ended job is not kept.
    assert!(cancelled.body.get("jobData").is_none());
}

async fn manage_over_grpc(server: &Server) {
    let mut client = server.grpc().await;
    let spec = v1::JobSpec {
        app: "sms".to_owned(),
        when: Some(v1::job_spec::When::Delay(hours(1))),
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
    let get = v1::GetJobRequest { id: id.clone() };
    let known = client.get_job(get).await.unwrap().into_inner();
    assert_eq!(known.state(), v1::JobState::Scheduled);
    assert_eq!(&known.data[..], [0xff, 0]);

    let again = client.schedule_job(ask(&spec)).await.unwrap().into_inner();
    assert_eq!((again.outcome(), &again.id), (v1::Outcome::Duplicate, &id));
    let other = v1::JobSpec {
        data: "other".into(),
        ..spec.clone()
    };
    let conflict = client.schedule_job(ask(&other)).await.unwrap_err();
    assert_eq!(conflict.code(), Code::AlreadyExists);
    let reason = redeliver_proto::error::reason(&conflict);
    assert_eq!(reason.as_deref(), Some("IDEMPOTENCY_CONFLICT"));

    let moved = v1::RescheduleJobRequest {
        id: id.clone(),
        when: Some(v1::reschedule_job_request::When::Delay(hours(2))),
        ..v1::RescheduleJobRequest::default()
    };
    let moved = client.reschedule_job(moved).await.unwrap().into_inner();
    assert_eq!(moved.outcome(), v1::Outcome::Rescheduled);
    assert_eq!(moved.job.unwrap().revision, 2);

    let never = "01KAJQ6Z2B0001G00000000A7X".to_owned();
    for (id, outcome) in [
        (&id, v1::Outcome::Cancelled),
        (&id, v1::Outcome::AlreadyCancelled),
        (&never, v1::Outcome::Unknown),
    ] {
        let request = v1::CancelJobRequest {
            id: id.clone(),
            ..v1::CancelJobRequest::default()
        };
        let cancelled = client.cancel_job(request).await.unwrap().into_inner();
        assert_eq!(cancelled.outcome(), outcome);
    }
    let unknown = client.get_job(v1::GetJobRequest { id: never }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);

    let stats = eventually_async("statistics", DEADLINE, async || {
        let request = v1::GetStatsRequest::default();
        let stats = client.get_stats(request).await.unwrap().into_inner();
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
    assert_eq!(header(&record, "h"), Some("v"));
    assert_eq!(header(&record, "job-id"), Some(id.as_str()));
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
    let of_size = |size| {
        format!(
            r#"{{"appName":"sms","delay":"1h","jobData":"{}"}}"#,
            "x".repeat(size)
        )
    };
    let (large, larger) = (of_size(900_001), of_size(2_000_000));
    let unknown = r#"{"appName":"fax","delay":"1h","jobData":1}"#;
    for (body, status, code, says) in [
        (unknown, 422, "request.appName", "expected one of sms"),
        (
            r#"{"cancel":"01KAJQ6Z2B0001G00000000A7X"}"#,
            422,
            "request.cancel",
            "use DELETE",
        ),
        (r#"{"appName":"#, 400, "request.json", "EOF"),
        (&large, 422, "request.jobData", "the maximum is 900000"),
        (&larger, 413, "body", "limit"),
    ] {
        let refused = server.json(Method::POST, "/v1/jobs", body).await;
        refused.problem(status, code, says);
    }
    let untyped = server.request(Method::POST, "/v1/jobs").body(unknown);
    let refused = send(untyped).await;
    refused.problem(415, "request.contentType", "content-type: application/json");
    for (path, status, code, says) in [
        ("/v1/jobs/7", 422, "request.id", "is not a job id"),
        (
            "/v1/jobs/01KAJQ6Z2B0001G00000000A7X",
            404,
            "job_unknown",
            "no such job",
        ),
        (
            "/v1/stats?minutes=2000",
            422,
            "request.minutes",
            "the maximum is 1440",
        ),
        ("/v2", 404, "path", "/v1/jobs"),
    ] {
        server.get(path).await.problem(status, code, says);
    }
    let unsupported = send(server.request(Method::PUT, "/v1/jobs")).await;
    assert!(unsupported.status.is_client_error(), "{unsupported:?}");

    let mut client = server.grpc().await;
    let mut refused = async |job: Option<v1::JobSpec>| {
        let request = v1::ScheduleJobRequest { job, no_wait: true };
        client.schedule_job(request).await.unwrap_err()
    };
    let unknown = v1::JobSpec {
        app: "fax".to_owned(),
        when: Some(v1::job_spec::When::Delay(hours(1))),
        ..v1::JobSpec::default()
    };
    assert_eq!(refused(Some(unknown.clone())).await.code(), Code::NotFound);
    let when = None;
    let timeless = refused(Some(v1::JobSpec { when, ..unknown })).await;
    assert_eq!(timeless.code(), Code::InvalidArgument);
    let says = "scheduled_time: is missing";
    assert!(timeless.message().starts_with(says), "{timeless:?}");
    assert_eq!(refused(None).await.code(), Code::InvalidArgument);
    assert!(server.records("jobs-ingest").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_token_only_probes_work() {
    let server = Server::start_with(|builder| builder.set("scheduler.token_file", "{dir}/token"));
    let missing = server.get("/v1/stats").await;
    missing.problem(401, "token_missing", "authorization: Bearer");
    let wrong = server.ask("s3cre", Method::GET, "/v1/stats", "").await;
    wrong.problem(401, "token_wrong", "the token is wrong");
    let body = r#"{"appName":"sms","delay":"1h","jobData":1}"#;
    server.json(Method::POST, "/v1/jobs", body).await.is(401);
    server.ask("s3cret", Method::GET, "/v1/stats", "").await.is(200);

    let request = v1::GetStatsRequest::default();
    let refused = server.grpc().await.get_stats(request).await.unwrap_err();
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
        let status = answer.status();
        ensure(status == ServingStatus::Serving, status.as_str_name())
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
        let answers = client.server_reflection_info(Request::new(asks)).await;
        let mut answers = answers.unwrap().into_inner();
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
        for name in served {
            assert!(services.iter().any(|found| found == name), "{services:?}");
        }
        // Other services of the same schemas are not served here.
        let is_other = |name: &String| name.contains("DeadLetter");
        assert!(!services.iter().any(is_other), "{services:?}");
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
    let path = format!("/v1/jobs/{id}");
    let job = server.get_until(&path, |job| job.status.is_success()).await;
    assert_eq!(job.text_of("idempotencyKey"), "k");
}
