//! What clients of the API may use.

use std::time::Instant;

use redeliver_core::JobId;
use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_testkit::{LocalRedis, eventually_async};
use reqwest::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

use super::health::{next, watch};
use super::server::{Server, send};
use super::state_records::{state_record, waiting_job};
use crate::env::DEADLINE;
use crate::requests::in_millis;

const JOB: &str = r#"{"appName":"sms","delay":"1h","jobData":1}"#;

/// What the server answers before it closes a connection on which this is sent.
async fn answer_to(server: &Server, sent: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(sent.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut answer));
    // A connection that is reset is closed, too.
    drop(read.await.expect("the connection is closed"));
    String::from_utf8(answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_server_checks_hosts() {
    let server = Server::start();
    let with_host = async |server: &Server, host: &str| {
        send(server.request(Method::GET, "/v1/stats").header("host", host)).await
    };
    with_host(&server, "rebound.example")
        .await
        .problem(421, "host", "scheduler.allowed_hosts");
    // Unit tests are about other spellings.
    for host in ["localhost:1", "[::1]:50052"] {
        with_host(&server, host).await.is(200);
    }
    with_host(&server, "127.0.0.2").await.is(421);
    let rebound = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address())).unwrap();
    let rebound = rebound.origin("http://rebound.example".parse().unwrap());
    let mut client = v1::job_service_client::JobServiceClient::new(rebound.connect().await.unwrap());
    let refused = client
        .get_stats(v1::GetStatsRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);

    let allowed = "[jobs.example, \"2001:db8:0::a\"]";
    let chosen = Server::start_with(|builder| builder.set("scheduler.allowed_hosts", allowed));
    with_host(&chosen, "jobs.example:80").await.is(200);
    with_host(&chosen, "[2001:DB8::A]:80").await.is(200);
    with_host(&chosen, "localhost").await.is(421);
    // The kubelet names the address of the pod.
    for server in [&server, &chosen] {
        let probe = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address())).unwrap();
        let probe = probe.origin("http://10.1.2.3:50052".parse().unwrap());
        let mut health = HealthClient::new(probe.connect().await.unwrap());
        health.check(HealthCheckRequest::default()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_beyond_their_rate_are_refused() {
    let mut server = Server::start_with(|builder| builder.set("scheduler.limits.requests_per_second", "1"));
    let requests = [
        (Method::GET, "/v1/stats", ""),
        // Invalid ones count.
        (Method::POST, "/v1/jobs", "{"),
        (Method::POST, "/v1/jobs:batch", r#"{"jobs":[]}"#),
        (Method::PATCH, "/v1/jobs/x", r#"{"delay":"1h"}"#),
        (Method::GET, "/v1/jobs/x", ""),
        (Method::DELETE, "/v1/jobs/x", ""),
        (Method::GET, "/v1/stats?minutes=x", ""),
    ];
    let count = requests.len() as u64;
    for (method, path, body) in requests {
        eventually_async(path, DEADLINE, async || {
            let answer = server.json(method.clone(), path, body).await;
            match answer.status.as_u16() {
                429 => {
                    assert_eq!(answer.retry_after.as_deref(), Some("1"));
                    answer.problem(429, "rate_limited", "requests_per_second");
                    Ok(())
                }
                _ => Err(answer.text),
            }
        })
        .await;
    }
    let client = server.grpc().await;
    eventually_async("an invalid call is refused", DEADLINE, async || {
        let request = v1::GetJobRequest { id: "x".to_owned() };
        match client.clone().get_job(request).await.unwrap_err() {
            status if status.code() == Code::ResourceExhausted => {
                assert!(status.get_details_retry_info().is_some());
                Ok(())
            }
            status => Err(status.to_string()),
        }
    })
    .await;
    assert!(server.metric("redeliver_scheduler_api_limited_total{limit=\"rate\"}") > count);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_and_idle_connections_are_closed() {
    let mut server = Server::start_with(|builder| {
        let builder = builder.set("scheduler.limits.body_timeout", "1s");
        builder.set("scheduler.limits.idle_timeout", "1s")
    });
    let slow = |method: &str, path: &str, kind: &str| {
        format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 100\r\n\r\n\0"
        )
    };
    let health = answer_to(
        &server,
        &slow("POST", "/grpc.health.v1.Health/Check", "application/grpc"),
    )
    .await;
    let deadline_exceeded = "grpc-status: 4\r\n";
    assert!(health.contains(deadline_exceeded), "{health}");
    let job = answer_to(&server, &slow("POST", "/v1/jobs", "application/json")).await;
    assert!(job.starts_with("HTTP/1.1 408 "), "{job}");
    assert!(job.contains("\"code\":\"body_timeout\""), "{job}");
    let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let reflection = answer_to(&server, &slow("POST", path, "application/grpc")).await;
    assert!(reflection.starts_with("HTTP/1.1 200 "), "{reflection}");
    assert_eq!(
        server.metric("redeliver_scheduler_api_limited_total{limit=\"body_timeout\"}"),
        3
    );
    for path in ["/v1/openapi.json", "/v1/docs", "/v1/stats"] {
        let answer = answer_to(&server, &slow("GET", path, "text/plain")).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let mut client = server.grpc().await;
    let stats = v1::GetStatsRequest::default();
    client.get_stats(stats.clone()).await.unwrap();
    let idle = answer_to(&server, "GET /v1/stats HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert!(idle.starts_with("HTTP/1.1 200 "), "{idle}");
    // The connection of the client was closed before, or is closed now. It opens another one.
    eventually_async("another connection", DEADLINE, async || {
        client.get_stats(stats.clone()).await
    })
    .await;
}

/// A request whose body takes 8 MiB, without that.
fn large_head(token: &str) -> String {
    format!(
        "POST /v1/jobs:batch HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: 8388608\r\n\r\n"
    )
}

/// Connections of a client with this address whose requests reserve as much memory as the client may use, and as many which wait for it
/// until they are refused. Their bodies do not arrive.
async fn hold_memory(server: &mut Server, address: &str, token: &str) -> Vec<TcpStream> {
    const CONNECTIONS: u64 = 16;
    // Three of them have at most 30 MiB, a quarter of 120 MiB.
    const HOLD: u64 = 3;
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
        let mut stream = socket.connect(server.address().parse().unwrap()).await.unwrap();
        let sent = large_head(token) + "{";
        stream.write_all(sent.as_bytes()).await.unwrap();
        held.push(stream);
    }
    let refused = "redeliver_scheduler_api_limited_total{limit=\"request_bytes\"}";
    let deadline = Instant::now() + DEADLINE;
    while server.metric(refused) < CONNECTIONS - HOLD {
        assert!(Instant::now() < deadline, "{} refused", server.metric(refused));
    }
    assert_eq!(server.metric(refused), CONNECTIONS - HOLD);
    held
}

/// A call with a message of 7 MiB, of which the server refuses only the job.
async fn large_call(server: &Server, token: Option<&str>) -> Result<(), Status> {
    let spec = v1::JobSpec {
        app: "sms".to_owned(),
        data: vec![b'1'; 7 << 20].into(),
        ..v1::JobSpec::default()
    };
    let request = v1::BatchScheduleJobsRequest {
        jobs: vec![spec],
        no_wait: false,
    };
    let token = SendToken::new(token).unwrap();
    let mut client =
        v1::job_service_client::JobServiceClient::with_interceptor(server.channel().await, token);
    client.batch_schedule_jobs(request).await.map(drop)
}

fn is_overloaded(status: &Status) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_eq!(
        redeliver_proto::error::reason(status).as_deref(),
        Some("OVERLOADED")
    );
    assert!(status.get_details_retry_info().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_bodies_lock_nobody_out() {
    let callers: [(&str, &[&str]); 2] = [("slow", &["jobs:*"]), ("other", &["jobs:*"])];
    let (mut server, tokens) = Server::for_callers(callers, |builder| {
        builder.set("scheduler.limits.body_timeout", "1h")
    });
    let [slow, other] = tokens.each_ref().map(|token| token.token.as_str());
    let held = hold_memory(&mut server, "127.0.0.1", slow).await;
    let small = async |token: &str| server.ask(token, Method::POST, "/v1/jobs", JOB).await;
    small(other).await.is(201);
    large_call(&server, Some(other)).await.unwrap();
    // Its own small requests, and those without a body, are served as well.
    small(slow).await.is(201);
    server.ask(slow, Method::GET, "/v1/stats", "").await.is(200);
    // A large one waits with HTTP/1.1, and not with HTTP/2.
    let refused = answer_to(&server, &(large_head(slow) + "{")).await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(refused.contains("retry-after: 1\r\n"), "{refused}");
    for says in ["\"code\":\"overloaded\"", "scheduler.limits.request_bytes"] {
        assert!(refused.contains(says), "{refused}");
    }
    is_overloaded(&large_call(&server, Some(slow)).await.unwrap_err());
    // The memory is free again when the clients are gone.
    drop(held);
    eventually_async("there is room again", DEADLINE, async || {
        large_call(&server, Some(slow)).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_memory_is_shared_by_address() {
    let mut server = Server::start_with(|builder| builder.set("scheduler.limits.body_timeout", "1h"));
    let held = hold_memory(&mut server, "127.0.0.2", "").await;
    large_call(&server, None).await.unwrap();
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_clients_lock_nobody_out() {
    let server = Server::start_with(|builder| {
        let builder = builder.set("scheduler.token_file", "{dir}/token");
        builder.set("scheduler.limits.connections", "2")
    });
    let mut watches = Vec::new();
    for _ in 0..2 {
        let mut watch = watch(&server, "").await;
        next(&mut watch).await.unwrap();
        watches.push(watch);
    }
    let authenticated = server.request(Method::GET, "/v1/stats").bearer_auth("s3cret");
    send(authenticated).await.is(200);
}

/// The id of a job whose request came from a producer with a clock that is 2 hours fast.
fn future_id(offset: i64) -> JobId {
    JobId::new(in_millis(2 * 3_600_000), 0, offset)
}

#[tokio::test(flavor = "multi_thread")]
async fn future_ids_are_looked_up_first() {
    let redis = LocalRedis::start().unwrap();
    let mut server = Server::start_with(|builder| builder.redis(redis.url()));
    let id = future_id(1);
    let path = format!("/v1/jobs/{id}");
    let ask = async |server: &Server| {
        let (found, moved, cancelled) = tokio::join!(
            server.get(&path),
            server.json(Method::PATCH, &path, r#"{"delay":"2h"}"#),
            server.delete(&path),
        );
        [found, moved, cancelled]
    };
    for answer in ask(&server).await {
        answer.problem(404, "job_unknown", "no such job");
    }
    // Without the index, it is not known whether a job has the id.
    redis.process().stop();
    for answer in ask(&server).await {
        answer.is(503);
    }
    redis.process().cont();
    assert!(server.records("jobs-ingest").is_empty());

    let job = waiting_job(&server, id, "sms", in_millis(3_600_000));
    let record = state_record(&server, &job);
    let handle = tokio::runtime::Handle::current();
    tokio::task::block_in_place(|| server.restart(|server| handle.block_on(server.write(&[record]))));
    tokio::task::block_in_place(|| server.process().until_ready());
    let found = server.get(&path).await.is(200);
    assert_eq!(found.text_of("id"), id.to_string());
    let moved = server
        .json(Method::PATCH, &path, r#"{"delay":"2h"}"#)
        .await
        .is(200);
    assert_eq!(moved.text_of("outcome"), "rescheduled");
    let cancelled = server.delete(&path).await.is(200);
    assert_eq!(cancelled.text_of("outcome"), "cancelled");
}
