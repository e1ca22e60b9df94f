//! What servers of gRPC have in common. Limits of connections, headers, bodies and responses are those of
//! [`redeliver_runtime::http_server`].

use axum::body::Body;
use axum::http::{HeaderMap, Request, header};
use http_body_util::BodyExt as _;
use redeliver_proto::error;
use redeliver_runtime::http_server::BodyTimeout;
use tonic::{Code, Response, Status};

/// What a method of a service returns.
pub type Reply<T> = Result<Response<T>, Status>;

/// Whether a request uses gRPC.
#[must_use]
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// Lets a call of gRPC whose message does not arrive in time fail with a status that says so.
pub fn with_status_of_timeout(request: Request<Body>) -> Request<Body> {
    if !is_grpc(request.headers()) {
        return request;
    }
    request.map(|body| {
        Body::new(body.map_err(|error| match BodyTimeout::in_chain(&error) {
            Some(timeout) => {
                // tonic looks for a status among the causes of an error.
                let status: Status =
                    error::status(Code::DeadlineExceeded, timeout.to_string(), "BODY_TIMEOUT", []);
                axum::Error::new(status)
            }
            None => error,
        }))
    })
}
