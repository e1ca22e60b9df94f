//! What the API says while it cannot serve all requests.

use redeliver_testkit::LocalRedis;
use tonic::Streaming;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::server::Server;
use crate::env::DEADLINE;

const SERVICE: &str = "redeliver.v1.JobService";

pub(super) async fn watch(server: &Server, service: &str) -> Streaming<HealthCheckResponse> {
    let service = service.to_owned();
    let mut client = HealthClient::new(server.channel().await);
    client
        .watch(HealthCheckRequest { service })
        .await
        .unwrap()
        .into_inner()
}

/// The next status; `None` if the stream has ended.
pub(super) async fn next(watch: &mut Streaming<HealthCheckResponse>) -> Option<ServingStatus> {
    let next = tokio::time::timeout(DEADLINE, watch.message());
    Some(next.await.expect("a status").unwrap()?.status())
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_health_is_process_readiness() {
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
        !output.contains("grace period exceeded; dropping requests"),
        "{output}"
    );
}
