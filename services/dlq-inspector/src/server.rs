//! The gRPC server: dead letters, health, reflection.

use std::time::Duration;

use redeliver_proto::auth::RequireToken;
use redeliver_proto::v1::dead_letter_service_server::{DeadLetterServiceServer, SERVICE_NAME};
use redeliver_runtime::listen::Listener;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::api::Api;
use crate::shared::Shared;

/// How often a silent connection is asked whether it lives.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

const HEALTH: &str = "grpc.health.v1.Health";
const REFLECTION: &str = "grpc.reflection.v1.ServerReflection";
const OLD_REFLECTION: &str = "grpc.reflection.v1alpha.ServerReflection";

/// The API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The schemas that reflection tells are broken.
    #[error("reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The server failed.
    #[error("serving the inspector's API")]
    Serve(#[from] tonic::transport::Error),
}

/// Serves until it is told to stop, then lets calls end for up to `patience`. Health and reflection ask for no
/// token.
pub(crate) async fn serve(
    listener: Listener,
    api: Api,
    token: RequireToken,
    patience: Duration,
) -> Result<(), ServerError> {
    let (health, health_service) = health_reporter();
    set_health(&health, ServingStatus::NotServing).await;
    // The schemas have services that are served elsewhere: only those of this server are named.
    let reflection = |own: &str| {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(redeliver_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(redeliver_proto::error::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        let names = [SERVICE_NAME, HEALTH, own];
        names
            .into_iter()
            .fold(builder, tonic_reflection::server::Builder::with_service_name)
    };
    let (shared, stop, watchers) = (api.shared.clone(), api.stop.clone(), api.watchers.clone());
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .add_service(health_service)
        .add_service(reflection(REFLECTION).build_v1()?)
        .add_service(reflection(OLD_REFLECTION).build_v1alpha()?)
        .add_service(InterceptedService::new(DeadLetterServiceServer::new(api), token))
        .serve_with_incoming_shutdown(listener.incoming(), stop.clone().cancelled_owned());
    let server = async {
        let (served, ()) = tokio::join!(server, tell_health(&health, &shared, &stop));
        watchers.close();
        watchers.wait().await;
        served
    };
    let too_late = async {
        stop.cancelled().await;
        tokio::time::sleep(patience).await;
    };
    tokio::select! {
        served = server => Ok(served?),
        () = too_late => {
            tracing::warn!("calls that did not end are cut off");
            Ok(())
        }
    }
}

/// Serving once the index has caught up, and no longer when the process ends.
async fn tell_health(health: &HealthReporter, shared: &Shared, stop: &CancellationToken) {
    let mut caught_up = shared.caught_up.subscribe();
    let is_serving = tokio::select! {
        waited = caught_up.wait_for(|caught_up| *caught_up) => waited.is_ok(),
        () = stop.cancelled() => false,
    };
    if is_serving {
        set_health(health, ServingStatus::Serving).await;
        stop.cancelled().await;
    }
    set_health(health, ServingStatus::NotServing).await;
    // Whoever watches the health has been told; without this the server would wait for them.
    let mut health = health.clone();
    for name in NAMES {
        health.clear_service_status(name).await;
    }
}

/// The whole server, and its one service.
const NAMES: [&str; 2] = ["", SERVICE_NAME];

async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for name in NAMES {
        health.set_service_status(name, status).await;
    }
}
