//! The admin port: liveness, readiness, metrics and configuration of a process.
//!
//! With `admin.tls.client_ca_file`, all paths but `/livez` and `/readyz` require a client certificate. These two do not,
//! because the kubelet has none.
//!
//! All paths but `/livez` require that the request names an address, a name without a dot, the name of this machine, or one of
//! `admin.allowed_hosts`, so that no web page can read them through a browser (see [`hosts`]). Probes and Prometheus name
//! addresses.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Extension, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus_client::registry::Registry;
use redeliver_core::wait::LogThrottle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::health::Health;
use crate::hosts::{self, Host};
use crate::http_server::{self, HttpLimits};
use crate::listen::{Listener, PeerCertificates};
use crate::metrics::{self, build_info};

/// The maximum number of open connections. Those of metrics and of probes are few. Together with half of the file descriptors for the
/// connections of an API, they leave some, even if the process may open no more than 1,024 files.
const MAX_CONNECTIONS: usize = 200;
/// The maximum number of requests in progress with HTTP/2. A page of metrics stays in memory until it is read.
const MAX_STREAMS: usize = 50;

/// Why the admin port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Connections cannot be accepted any more.
    #[error("the admin server failed")]
    Serve(#[source] io::Error),
}

/// The state that the admin port exposes.
#[derive(Clone, Debug)]
pub struct Admin {
    /// The parts that must be ready.
    pub health: Health,
    /// The metrics of the process.
    pub registry: Arc<Mutex<Registry>>,
    /// The sections of the configuration that programs share.
    pub config: Arc<Config>,
    /// The effective configuration of the program as JSON, without secrets.
    pub effective: Arc<str>,
    /// Cancelled when the process starts to shut down. From then on, it is not ready.
    pub shutdown: CancellationToken,
}

/// Serves requests until it is dropped. Run it with
/// [`Tasks::spawn_background`](crate::tasks::Tasks::spawn_background), so that a process can be observed while it shuts
/// down.
///
/// # Errors
/// When connections can no longer be accepted.
pub async fn serve(listener: Listener, admin: Admin) -> Result<(), AdminError> {
    let mut protected = Router::new()
        .route("/", get(index))
        .route("/metrics", get(scrape))
        .route("/config", get(config));
    if admin.config.admin.tls.requires_client_certificate() {
        protected = protected.layer(middleware::from_fn(require_certificate));
    }
    let allowed: Arc<[Host]> = allowed_hosts(&admin.config).into();
    let log_throttle = Arc::<Mutex<LogThrottle>>::default();
    let checked = protected
        .route("/readyz", get(ready))
        .layer(middleware::from_fn(move |request, next| {
            check_host(allowed.clone(), log_throttle.clone(), request, next)
        }));
    let routes = Router::new()
        .route("/livez", get(async || "alive\n"))
        .merge(checked)
        .with_state(admin);
    let limits = HttpLimits {
        connections: MAX_CONNECTIONS,
        unprotected_streams: MAX_STREAMS,
        ..HttpLimits::default()
    };
    let serving = http_server::serve(listener, routes, limits, std::future::pending());
    serving.await.map_err(AdminError::Serve)
}

fn allowed_hosts(config: &Config) -> Vec<Host> {
    let configured = config.admin.allowed_hosts.iter().map(|host| Host::new(host));
    configured.chain(Host::own()).collect()
}

/// Rejects requests that name a host which could be that of a web page.
async fn check_host(
    allowed: Arc<[Host]>,
    log_throttle: Arc<Mutex<LogThrottle>>,
    request: Request,
    next: Next,
) -> Response {
    let is_accepted = match Host::of_request(&request) {
        // No browser sends such a request.
        None => true,
        Some(Ok(host)) => host.is_private() || allowed.contains(&host),
        Some(Err(_)) => false,
    };
    if is_accepted {
        return next.run(request).await;
    }
    if log_throttle
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .should_log()
    {
        tracing::warn!(
            host = hosts::loggable_host(&request),
            "admin port refused a request for a foreign host; use an address, or add the host to admin.allowed_hosts; \
             if it was not sent from here, a web page may have tried to read the port"
        );
    }
    let problem = "this port does not accept requests for this host: use an address, or add the host to admin.allowed_hosts\n";
    (StatusCode::MISDIRECTED_REQUEST, problem).into_response()
}

/// Rejects requests on connections without a client certificate.
async fn require_certificate(
    Extension(PeerCertificates(peer)): Extension<PeerCertificates>,
    request: Request,
    next: Next,
) -> Response {
    if peer.is_empty() {
        let problem =
            "this path requires a client certificate that a CA in admin.tls.client_ca_file has signed\n";
        return (StatusCode::FORBIDDEN, problem).into_response();
    }
    next.run(request).await
}

async fn index(State(admin): State<Admin>) -> String {
    let build = build_info();
    format!(
        "redeliver {} ({}) {}\n\n\
         /livez    the process is alive\n\
         /readyz   all parts are ready, as JSON\n\
         /metrics  metrics in OpenMetrics format\n\
         /config   the effective configuration, without secrets\n",
        build.version, build.commit, admin.config.instance
    )
}

async fn ready(State(admin): State<Admin>) -> Response {
    let mut report = admin.health.report();
    if admin.shutdown.is_cancelled() {
        report.ready = false;
        report
            .parts
            .insert("process".to_owned(), "shutting down".to_owned());
    }
    let status = if report.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(report)).into_response()
}

async fn scrape(State(admin): State<Admin>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let registry = admin.registry.lock().unwrap_or_else(PoisonError::into_inner);
    match metrics::page(&registry) {
        Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn config(State(admin): State<Admin>) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    (json, admin.effective.to_string()).into_response()
}
