//! The API: gRPC and REST on one port, with the same operations.
//!
//! | module | purpose |
//! |---|---|
//! | `jobs` | the operations: commands through Kafka, queries of the index |
//! | `error` | errors of requests |
//! | `problem` | problem documents of REST |
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
use redeliver_proto::v1::job_service_server::JobServiceServer;
use redeliver_runtime::config::{ConfigError, SchedulerConfig};
use redeliver_runtime::listen::{self, Listener};
use redeliver_runtime::tls::Protocols;
use redeliver_service::host::{Host, api_tls};
use redeliver_service::identity::{self, AuthenticateLayer, Authenticator};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::answers::PendingOutcomes;
use crate::config::rules;
use crate::index::Index;

mod error;
mod grpc;
mod jobs;
mod problem;
mod rest;
mod view;

use jobs::Jobs;

/// How long requests in progress may take once the process shuts down.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// The section of the configuration.
const SECTION: &str = "scheduler";

/// A failure of the API server.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The server failed.
    #[error("serving the API")]
    Serve(#[source] io::Error),
    /// The descriptors for gRPC reflection are invalid.
    #[error("setting up gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Checks the files of the API: certificates, tokens, keys.
pub(crate) fn check(config: &SchedulerConfig) -> Result<(), ConfigError> {
    let api = config.api();
    api_tls(SECTION, &api, Protocols::Http)?;
    Authenticator::check(SECTION, &api)
}

/// Binds the listener of the API.
pub(crate) fn listen(host: &Host) -> anyhow::Result<Listener> {
    host.listen(SECTION, &host.config.scheduler.api(), Protocols::Http)
}

/// Adds the API to a host. The lanes of [`crate::mount`] can run in this process or in others. The API serves requests once
/// it follows the answers topic.
///
/// # Errors
/// When the token or the partitions of the ingest topic cannot be read, or a thread cannot be started.
pub async fn mount<I: Index>(host: &mut Host, index: I, listener: Listener) -> anyhow::Result<()> {
    let config = host.config.clone();
    let scheduler = &config.scheduler;
    let ingest: Arc<str> = scheduler.topics.ingest.as_str().into();
    let (kafka, topic) = (host.kafka.clone(), ingest.clone());
    let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
        .await
        .context("reading the partitions of the ingest topic")??;
    let authenticator = Authenticator::start(host, SECTION, &scheduler.api())?;
    let outcomes = PendingOutcomes::new();
    let address = listener.local_addr().context("reading the address of the API")?;
    let shutdown = host.tasks.shutdown().clone();
    let jobs = Arc::new(Jobs {
        index,
        producer: Producer::new(&host.kafka)?,
        ingest,
        partitions,
        rules: rules(&config)?,
        window: config.scheduler.window.duration(),
        outcomes: outcomes.clone(),
        clock: host.clock.clone(),
        shutdown: shutdown.clone(),
        authenticator: authenticator.clone(),
    });

    let part = host.health.part("scheduler-answers");
    let (started, follows) = oneshot::channel();
    let (kafka, topic) = (host.kafka.clone(), scheduler.topics.answers.as_str().into());
    host.tasks.spawn_thread("scheduler-answers", {
        let shutdown = shutdown.clone();
        move || {
            outcomes.follow(&kafka, &topic, &part, started, &shutdown);
            Ok::<(), io::Error>(())
        }
    })?;
    host.tasks.spawn("scheduler-api", async move {
        if follows.await.is_err() {
            // The process is shutting down.
            return Ok(());
        }
        tracing::info!(%address, "serving the job API (gRPC and REST)");
        serve(listener, jobs, authenticator, shutdown).await
    });
    Ok(())
}

/// Serves requests until `shutdown`, and gives those in progress some time to complete.
async fn serve<I: Index>(
    listener: Listener,
    jobs: Arc<Jobs<I>>,
    authenticator: Authenticator,
    shutdown: CancellationToken,
) -> Result<(), ApiError> {
    let router = router(jobs, authenticator).await?;
    let serving = listen::serve(listener, router, shutdown.clone().cancelled_owned());
    tokio::select! {
        result = serving => result.map_err(ApiError::Serve),
        () = async { shutdown.cancelled().await; tokio::time::sleep(SHUTDOWN_GRACE).await; } => {
            tracing::warn!("closing connections with requests in progress");
            Ok(())
        }
    }
}

async fn router<I: Index>(jobs: Arc<Jobs<I>>, authenticator: Authenticator) -> Result<Router, ApiError> {
    type Served<I> = JobServiceServer<grpc::Service<I>>;

    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<Served<I>>().await;
    let service =
        JobServiceServer::new(grpc::Service::new(jobs.clone())).max_decoding_message_size(jobs.max_request());
    let refuse = |refusal: &identity::Refusal| identity::grpc::status(refusal).into_http();
    let authenticated = Routes::new(service)
        .into_axum_router()
        .reset_fallback()
        .route_layer(AuthenticateLayer::new(authenticator.clone(), refuse));
    // Health and reflection require no identity, so that probes and tools work.
    let mut open = Routes::builder();
    open.add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    let open = open.routes().into_axum_router().reset_fallback();
    let rest = rest::router(jobs, authenticator);
    Ok(rest.merge(authenticated).merge(open).fallback(not_found))
}

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
        let status = tonic::Status::unimplemented("unknown service or method");
        return status.into_http::<axum::body::Body>();
    }
    rest::not_found().into_response()
}
