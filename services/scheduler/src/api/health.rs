//! gRPC health: the readiness of the process, as `/readyz` reports it.

use redeliver_proto::v1::{job_service_server, schedule_service_server};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// The server as a whole, and its services.
const SERVICES: [&str; 3] = [
    "",
    job_service_server::SERVICE_NAME,
    schedule_service_server::SERVICE_NAME,
];

/// Reports whether the process is ready, until it shuts down. From then on, nothing is served.
pub(super) async fn report(
    reporter: &HealthReporter,
    mut ready: watch::Receiver<bool>,
    shutdown: &CancellationToken,
) {
    loop {
        let is_ready = *ready.borrow_and_update() && !shutdown.is_cancelled();
        set(reporter, is_ready).await;
        if shutdown.is_cancelled() {
            return;
        }
        tokio::select! {
            Ok(()) = ready.changed() => {}
            () = shutdown.cancelled() => {}
        }
    }
}

/// Sets the status of all services.
pub(super) async fn set(reporter: &HealthReporter, is_serving: bool) {
    let status = if is_serving {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    for service in SERVICES {
        reporter.set_service_status(service, status).await;
    }
}

/// Ends the streams of clients that watch the status. They would keep their connections open.
pub(super) async fn end_watches(mut reporter: HealthReporter) {
    for service in SERVICES {
        reporter.clear_service_status(service).await;
    }
}
