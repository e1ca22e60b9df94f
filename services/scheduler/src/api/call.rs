//! What all operations need of a request, whatever its protocol.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use redeliver_core::Headers;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE};
use redeliver_proto::auth;
use redeliver_service::identity::{self, Identity};
use tonic::metadata::MetadataValue;
use tonic::{Request, Status};

use super::changes::read_reason;
use super::error::RequestError;
use super::problem::Problem;
use crate::request::Format;

/// What all operations need of a request.
pub(crate) struct Call {
    pub(crate) caller: Identity,
    /// The protocol, whose names of fields are those of problems.
    pub(crate) format: Format,
    /// The caller's trace context. It is validated where it is used.
    pub(crate) trace: Headers,
    /// Why something is changed, in the words of the caller.
    pub(crate) reason: String,
}

impl Call {
    fn new<'a>(
        caller: Identity,
        format: Format,
        header: impl Fn(&str) -> Option<&'a [u8]>,
    ) -> Result<Self, RequestError> {
        let reason = read_reason(header(auth::REASON).unwrap_or_default())?;
        let mut trace = Headers::new();
        if let Some(parent) = header(TRACEPARENT) {
            trace.push(TRACEPARENT, Some(parent));
            if let Some(state) = header(TRACESTATE) {
                trace.push(TRACESTATE, Some(state));
            }
        }
        Ok(Self {
            caller,
            format,
            trace,
            reason,
        })
    }

    /// Takes a request of gRPC apart.
    pub(super) fn of<T>(request: Request<T>) -> Result<(Self, T), Status> {
        let caller = identity::grpc::caller(&request)?;
        let metadata = request.metadata();
        let call = Self::new(caller, Format::Protobuf, |name| {
            metadata.get(name).map(MetadataValue::as_bytes)
        })?;
        Ok((call, request.into_inner()))
    }
}

/// Of a request of REST.
impl<S: Send + Sync> FromRequestParts<S> for Call {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get::<Identity>().cloned().ok_or_else(|| {
            let detail = "the request was not authenticated";
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
        })?;
        let header = |name: &str| parts.headers.get(name).map(HeaderValue::as_bytes);
        Ok(Self::new(caller, Format::Json, header)?)
    }
}
