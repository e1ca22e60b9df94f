//! What the API says while it cannot serve all requests.

use redeliver_core::{JobId, Output, Timestamp};
use redeliver_testkit::{LocalRedis, eventually_async};
use tonic::Streaming;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::server::Server;
use super::state_records::{state_record, waiting_job};
use crate::env::DEADLINE;
use crate::requests::{in_millis, now};

const SERVICE: &str = "redeliver.v1.JobService";

async fn watch(server: &Server, service: &str) -> Streaming<HealthCheckResponse> {
    let service = service.to_owned();
    let mut client = HealthClient::new(server.channel().await);
    client
        .watch(HealthCheckRequest { service })
        .await
        .unwrap()
        .into_inner()
}

/// The next status; `None` if the stream has ended.
async fn next(watch: &mut Streaming<HealthCheckResponse>) -> Option<ServingStatus> {
    let next = tokio::time::timeout(DEADLINE, watch.message());
    Some(next.await.expect("a status").unwrap()?.status())
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_health_is_the_readiness_of_the_process() {
    let mut redis = LocalRedis::start().unwrap();
    redis.stop().unwrap();
    let mut server = Server::starting(|builder| builder.redis(redis.url()), |_| {});
    for service in ["", SERVICE] {
        let mut watch = watch(&server, service).await;
        assert_eq!(next(&mut watch).await, Some(ServingStatus::NotServing));
    }
    let mut whole = watch(&server, "").await;
    let mut service = watch(&server, SERVICE).await;
    for watch in [&mut whole, &mut service] {
        assert_eq!(next(watch).await, Some(ServingStatus::NotServing));
    }
    redis.start_again().unwrap();
    for watch in [&mut whole, &mut service] {
        assert_eq!(next(watch).await, Some(ServingStatus::Serving));
    }
    redis.stop().unwrap();
    // It notices that with the next job.
    let body = r#"{"appName":"sms","delay":"1h","jobData":1}"#;
    server.json(reqwest::Method::POST, "/v1/jobs", body).await.is(201);
    assert_eq!(next(&mut service).await, Some(ServingStatus::NotServing));
    redis.start_again().unwrap();
    assert_eq!(next(&mut service).await, Some(ServingStatus::Serving));

    server.process().process().terminate();
    assert_eq!(next(&mut service).await, Some(ServingStatus::NotServing));
    // The stream ends, so that it does not delay the end of the process.
    assert_eq!(next(&mut service).await, None);
    let status = tokio::task::block_in_place(|| server.process().wait(DEADLINE));
    assert_eq!(status.code(), Some(0));
    let output = server.output();
    assert!(
        !output.contains("closing connections with requests in progress"),
        "{output}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_watch_the_health_lock_nobody_out() {
    let server = Server::start_with(|builder| builder.set("scheduler.limits.connections", "2"));
    let mut watches = Vec::new();
    for _ in 0..2 {
        let mut watch = watch(&server, "").await;
        next(&mut watch).await.unwrap();
        watches.push(watch);
    }
    server.get("/v1/stats").await.is(200);
}

/// A state record of a job that is due in an hour.
pub(super) fn state(server: &Server, number: i64) -> (JobId, Output) {
    let an_hour_ago = Timestamp::from_millis(now().as_millis() - 3_600_000);
    let id = JobId::new(an_hour_ago, 0, number);
    let job = waiting_job(server, id, "sms", in_millis(3_600_000));
    (id, state_record(server, &job))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_not_unknown_while_the_index_is_rebuilt() {
    const JOBS: i64 = 60_000;
    let mut server = Server::start();
    let (ids, outputs): (Vec<JobId>, Vec<Output>) = (0..JOBS).map(|number| state(&server, number)).unzip();
    let handle = tokio::runtime::Handle::current();
    tokio::task::block_in_place(|| {
        server.restart(|server| handle.block_on(server.write(&outputs)));
    });
    // The last one in the topic is the last one in the index.
    let path = format!("/v1/jobs/{}", ids[ids.len() - 1]);
    let mut early = 0;
    eventually_async("the job is in the index", DEADLINE, async || {
        let answer = server.get(&path).await;
        match answer.status.as_u16() {
            200 => Ok(()),
            503 => {
                early += 1;
                assert_eq!(answer.text_of("code"), "index_incomplete");
                Err(answer.text)
            }
            _ => panic!("{answer:?}"),
        }
    })
    .await;
    println!("{early} early answers");
    // A job that never existed is unknown, although transaction markers can follow the last record of the state topic.
    let never = JobId::new(Timestamp::from_millis(1_763_722_800_000), 0, JOBS);
    server
        .get(&format!("/v1/jobs/{never}"))
        .await
        .problem(404, "job_unknown", "no such job");
}
