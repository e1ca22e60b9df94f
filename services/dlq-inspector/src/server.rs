//! The gRPC server: dead letters, redrives, waiting records, the overview, control, access, the audit log, health, reflection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use axum::{Router, middleware};
use http_body_util::BodyExt as _;
use redeliver_proto::v1::access_service_server::SERVICE_NAME as ACCESS_SERVICE_NAME;
use redeliver_proto::v1::audit_service_server::{AuditServiceServer, SERVICE_NAME as AUDIT_SERVICE_NAME};
use redeliver_proto::v1::control_service_server::{
    ControlServiceServer, SERVICE_NAME as CONTROL_SERVICE_NAME,
};
use redeliver_proto::v1::dead_letter_service_server::{DeadLetterServiceServer, SERVICE_NAME};
use redeliver_proto::v1::overview_service_server::{
    OverviewServiceServer, SERVICE_NAME as OVERVIEW_SERVICE_NAME,
};
use redeliver_proto::v1::redrive_service_server::{
    RedriveServiceServer, SERVICE_NAME as REDRIVE_SERVICE_NAME,
};
use redeliver_proto::v1::waiting_service_server::{
    SERVICE_NAME as WAITING_SERVICE_NAME, WaitingServiceServer,
};
use redeliver_runtime::http_server::{self, HttpLimits};
use redeliver_runtime::listen::Listener;
use redeliver_service::control::{self, Controls};
use redeliver_service::grpc::with_status_of_timeout;
use redeliver_service::identity::{self, Authentication, Authenticator, authenticate};
use redeliver_service::installation::Installation;
use redeliver_service::memory_budget::Reservation;
use redeliver_store::Replica;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::access;
use crate::api::{Api, SEND_TIMEOUT};
use crate::group_states::GroupStates;
use crate::shared::SharedState;

/// How long a client may read nothing of an answer. Longer than a watch waits, so that its client can learn that it was too slow.
const WRITE_TIMEOUT: Duration = SEND_TIMEOUT.saturating_mul(2);

/// The maximum size of a message for control, health and reflection, in bytes. It contains a name, and a reason.
const SMALL_MESSAGE: usize = 4 << 10;

const HEALTH: &str = "grpc.health.v1.Health";
const REFLECTION: &str = "grpc.reflection.v1.ServerReflection";
const REFLECTION_V1ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";

/// Why serving the API failed.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The embedded schemas are invalid.
    #[error("building the reflection service")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The server failed.
    #[error("serving the inspector's API")]
    Serve(#[source] io::Error),
}

/// Serves until `api.stop` is cancelled, then waits up to `grace` for calls in progress. Health and reflection require no
/// identity.
pub(crate) async fn serve(
    listener: Listener,
    api: Api,
    controls: Controls,
    authenticator: Authenticator,
    installation: Installation,
    limits: HttpLimits,
    grace: Duration,
) -> Result<(), ServerError> {
    let (health, health_service) = health_reporter();
    set_health(&health, ServingStatus::NotServing).await;
    // The schemas contain services of other servers. Reflection lists only the services that this one provides.
    let reflection = |version: &str| {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(redeliver_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(redeliver_proto::error::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        let names = [
            SERVICE_NAME,
            REDRIVE_SERVICE_NAME,
            WAITING_SERVICE_NAME,
            OVERVIEW_SERVICE_NAME,
            AUDIT_SERVICE_NAME,
            CONTROL_SERVICE_NAME,
            ACCESS_SERVICE_NAME,
            HEALTH,
            version,
        ];
        names
            .into_iter()
            .fold(builder, tonic_reflection::server::Builder::with_service_name)
    };
    let (shared, stop, watchers) = (api.shared.clone(), api.stop.clone(), api.watchers.clone());
    let states = api.groups.states.clone();
    let authentication = Authentication {
        authenticator,
        required: Some(access::required),
        refuse: |refusal| identity::grpc::status(refusal).into_http(),
    };
    let controls = control::grpc::Service::new(Arc::new(controls));
    let controls = ControlServiceServer::new(controls).max_decoding_message_size(SMALL_MESSAGE);
    let authenticated = Routes::new(controls)
        .add_service(identity::grpc::access_service(installation))
        .add_service(AuditServiceServer::new(api.clone()))
        .add_service(RedriveServiceServer::new(api.clone()))
        .add_service(WaitingServiceServer::new(api.clone()))
        .add_service(OverviewServiceServer::new(api.clone()))
        .add_service(DeadLetterServiceServer::new(api))
        .into_axum_router()
        .reset_fallback()
        .layer(middleware::map_response(async |response| {
            reserved_until_sent(response)
        }))
        .route_layer(middleware::from_fn_with_state(authentication, authenticate));
    let v1 = reflection(REFLECTION).build_v1()?;
    let v1alpha = reflection(REFLECTION_V1ALPHA).build_v1alpha()?;
    let routes = Routes::new(health_service.max_decoding_message_size(SMALL_MESSAGE))
        .add_service(v1.max_decoding_message_size(SMALL_MESSAGE))
        .add_service(v1alpha.max_decoding_message_size(SMALL_MESSAGE))
        .into_axum_router()
        .merge(authenticated);
    let server = serve_routes(listener, routes, limits, stop.clone().cancelled_owned());
    let server = async {
        let (served, ()) = tokio::join!(server, report_health(&health, &shared, &states, &stop));
        // Watchers outlive their calls. They end with `stop`, after their last message.
        watchers.close();
        watchers.wait().await;
        served
    };
    let timeout = async {
        stop.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        served = server => served.map_err(ServerError::Serve),
        () = timeout => {
            tracing::warn!("grace period exceeded; dropping calls in progress");
            Ok(())
        }
    }
}

/// Serves calls with the limits of this server.
async fn serve_routes(
    listener: Listener,
    routes: Router,
    limits: HttpLimits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let limits = HttpLimits {
        write_timeout: WRITE_TIMEOUT,
        http2_only: true,
        ..limits
    };
    let routes = routes.layer(middleware::map_request(async |request| {
        with_status_of_timeout(request)
    }));
    http_server::serve(listener, routes, limits, shutdown).await
}

/// The memory that a call has reserved for its answer is free once the answer is sent, or its client has gone.
fn reserved_until_sent(mut response: Response) -> Response {
    match response.extensions_mut().remove::<Reservation>() {
        None => response,
        Some(memory) => response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _until_dropped = &memory;
                frame
            }))
        }),
    }
}

/// Reports SERVING while the index has caught up, once the states of groups are known, until shutdown.
async fn report_health(
    health: &HealthReporter,
    shared: &SharedState,
    states: &Replica<GroupStates>,
    stop: &CancellationToken,
) {
    let mut caught_up = shared.caught_up.subscribe();
    while states.wait_known(stop).await {
        let status = if *caught_up.borrow_and_update() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        set_health(health, status).await;
        tokio::select! {
            changed = caught_up.changed() => if changed.is_err() { break },
            () = stop.cancelled() => break,
        }
    }
    set_health(health, ServingStatus::NotServing).await;
    // Ends the streams of health watchers after their last update. Otherwise, the server would wait for these calls.
    let mut health = health.clone();
    for name in NAMES {
        health.clear_service_status(name).await;
    }
}

/// The names of the whole server and of its service in health checks.
const NAMES: [&str; 2] = ["", SERVICE_NAME];

async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for name in NAMES {
        health.set_service_status(name, status).await;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::Bytes;
    use redeliver_proto::error::reason;
    use tokio::task::JoinSet;
    use tonic::codegen::{Service as _, http};
    use tonic::transport::Endpoint;
    use tonic::{Code, Status};

    use super::*;

    #[tokio::test]
    async fn a_slow_request_exceeds_its_deadline() {
        let listener = Listener::bind("dlq_inspector.listen", "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let (_health, service) = health_reporter();
        let routes = Routes::new(service).into_axum_router();
        let limits = HttpLimits {
            body_timeout: Duration::from_millis(100),
            ..HttpLimits::default()
        };
        let mut server = JoinSet::new();
        server.spawn(serve_routes(listener, routes, limits, std::future::pending()));
        let endpoint = Endpoint::try_from(format!("http://{address}")).unwrap();
        let mut channel = endpoint.connect().await.unwrap();
        let never = Body::from_stream(futures::stream::pending::<Result<Bytes, Infallible>>());
        let request = http::Request::post("/grpc.health.v1.Health/Check")
            .header("content-type", "application/grpc")
            .body(tonic::body::Body::new(never))
            .unwrap();
        std::future::poll_fn(|context| channel.poll_ready(context))
            .await
            .unwrap();
        let answer = channel.call(request).await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_eq!(
            (status.code(), reason(&status).as_deref()),
            (Code::DeadlineExceeded, Some("BODY_TIMEOUT"))
        );
    }
}
