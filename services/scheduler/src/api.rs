//! The API: gRPC and REST on one port, with the same meaning.
//!
//! | module | idea |
//! |---|---|
//! | `jobs` | what is asked of the scheduler, whatever the protocol: commands through Kafka, reads from the index |
//! | `refusal` | why something is not done, in the words of gRPC and of HTTP |
//! | `grpc` | `redeliver.v1.JobService` |
//! | `rest` | `/v1/jobs` and `/v1/stats` |
//! | `view` | jobs as JSON |

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::{Request, header};
use axum::response::{IntoResponse as _, Response};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader;
use redeliver_proto::auth::RequireToken;
use redeliver_proto::v1::job_service_server::JobServiceServer;
use redeliver_runtime::config::Secret;
use redeliver_runtime::listen::Listener;
use redeliver_worker::host::Host;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;

use crate::answers::Waiting;
use crate::index::Index;
use crate::service::rules;

mod grpc;
mod jobs;
mod refusal;
mod rest;
mod view;

pub(crate) use jobs::Jobs;

/// How long requests may take to end once the process is ending.
const LAST_REQUESTS: Duration = Duration::from_secs(5);

/// The API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The server failed.
    #[error("the server of the API failed")]
    Serve(#[source] io::Error),
    /// The schemas that the server describes itself with cannot be read.
    #[error("gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Adds the API to a host, beside the lanes of [`crate::mount`] in this process or another. Requests are answered
/// from the moment on from which outcomes of commands are heard.
///
/// # Errors
/// When the token cannot be read, the ingest topic cannot be looked at, or the system gives no thread.
pub async fn mount<I: Index>(host: &mut Host, index: I, listener: Listener) -> anyhow::Result<()> {
    let config = host.config.clone();
    let scheduler = &config.scheduler;
    let ingest: Arc<str> = scheduler.topics.ingest.as_str().into();
    let (kafka, topic) = (host.kafka.clone(), ingest.clone());
    let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
        .await
        .context("looking at the ingest topic")??;
    let token = scheduler.api().token("scheduler")?;
    let require = RequireToken::new(token.as_ref().map(Secret::expose));
    let waiting = Waiting::new();
    let address = listener.local_addr().context("looking at the port of the API")?;
    let shutdown = host.tasks.shutdown().clone();
    let jobs = Arc::new(Jobs {
        index,
        producer: Producer::new(&host.kafka)?,
        ingest,
        partitions,
        rules: rules(&config)?,
        window: config.scheduler.window.duration(),
        waiting: waiting.clone(),
        clock: host.clock.clone(),
        shutdown: shutdown.clone(),
    });

    let part = host.health.part("scheduler-answers");
    let (started, hears) = oneshot::channel();
    let (kafka, topic) = (host.kafka.clone(), scheduler.topics.answers.as_str().into());
    host.tasks.spawn_thread("scheduler-answers", {
        let shutdown = shutdown.clone();
        move || {
            waiting.follow(&kafka, &topic, &part, started, &shutdown);
            Ok::<(), io::Error>(())
        }
    })?;
    host.tasks.spawn("scheduler-api", async move {
        if hears.await.is_err() {
            // The process is ending already.
            return Ok(());
        }
        tracing::info!(%address, "serving the job API, gRPC and REST");
        serve(listener, jobs, require, shutdown).await
    });
    Ok(())
}

/// Answers requests until `shutdown`, and those that are under way for a little longer.
async fn serve<I: Index>(
    listener: Listener,
    jobs: Arc<Jobs<I>>,
    require: RequireToken,
    shutdown: CancellationToken,
) -> Result<(), ApiError> {
    let router = router(jobs, require).await?;
    let serving = axum::serve(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    tokio::select! {
        ended = serving.into_future() => ended.map_err(ApiError::Serve),
        () = async { shutdown.cancelled().await; tokio::time::sleep(LAST_REQUESTS).await; } => {
            tracing::warn!("requests to the API were still under way; their connections are closed");
            Ok(())
        }
    }
}

async fn router<I: Index>(jobs: Arc<Jobs<I>>, require: RequireToken) -> Result<Router, ApiError> {
    type Served<I> = JobServiceServer<grpc::Service<I>>;

    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<Served<I>>().await;
    let service =
        JobServiceServer::new(grpc::Service::new(jobs.clone())).max_decoding_message_size(jobs.max_request());
    let mut routes = Routes::builder();
    routes
        .add_service(InterceptedService::new(service, require.clone()))
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    let grpc = routes.routes().into_axum_router().reset_fallback();
    Ok(rest::router(jobs, require).merge(grpc).fallback(not_found))
}

/// What is served here, of all schemas.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(redeliver_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name("redeliver.v1.JobService")
        .with_service_name("grpc.health.v1.Health")
}

async fn not_found(request: Request<axum::body::Body>) -> Response {
    let content_type = request.headers().get(header::CONTENT_TYPE);
    if content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc")) {
        let status = tonic::Status::unimplemented("there is no such method");
        return status.into_http::<axum::body::Body>();
    }
    rest::nothing_there().into_response()
}
