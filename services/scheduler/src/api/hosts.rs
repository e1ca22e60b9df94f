//! The hosts that requests may name.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use prometheus_client::metrics::counter::Counter;
use redeliver_proto::error;
use redeliver_runtime::hosts::Host;
use redeliver_service::grpc::is_grpc;
use tonic::Code;

use super::problem::Problem;

/// Refuses requests that name another host than these.
pub(crate) async fn check_host(
    accepted: Arc<[Host]>,
    refused: Counter,
    request: Request<Body>,
    next: Next,
) -> Response {
    if let Some(Ok(host)) = Host::of_request(&request)
        && accepted.contains(&host)
    {
        return next.run(request).await;
    }
    refused.inc();
    let problem = "this server does not accept requests for this host; see scheduler.allowed_hosts";
    if is_grpc(request.headers()) {
        return error::status(Code::PermissionDenied, problem, "HOST", []).into_http();
    }
    Problem::new(StatusCode::MISDIRECTED_REQUEST, "host", problem).into_response()
}
