//! Callers in gRPC: who calls, refusals as statuses, and `redeliver.v1.AccessService`.

use redeliver_proto::v1::access_service_server::{AccessService, AccessServiceServer};
use redeliver_proto::{error, v1};
use tonic::{Code, Request, Response, Status};

use super::{Identity, Reason, Refusal};
use crate::grpc::Reply;
use crate::installation::Installation;

/// The path of the call with which a caller asks what it may do. It needs no scope.
pub(super) const GET_ACCESS: &str = "/redeliver.v1.AccessService/GetAccess";

/// The caller of a request, whom the layer that authenticates requests has added.
///
/// # Errors
/// If there is no such layer.
pub fn caller<T>(request: &Request<T>) -> Result<Identity, Status> {
    let caller = request.extensions().get::<Identity>().cloned();
    caller.ok_or_else(|| Status::internal("the request was not authenticated"))
}

/// `redeliver.v1.AccessService`, for every service that authenticates its callers.
#[must_use]
pub fn access_service(installation: Installation) -> AccessServiceServer<impl AccessService> {
    // Its requests are empty.
    AccessServiceServer::new(OwnAccess(installation)).max_decoding_message_size(1 << 10)
}

struct OwnAccess(Installation);

#[tonic::async_trait]
impl AccessService for OwnAccess {
    async fn get_access(&self, request: Request<v1::GetAccessRequest>) -> Reply<v1::GetAccessResponse> {
        let scopes = caller(&request)?.scopes.iter().map(ToString::to_string).collect();
        Ok(Response::new(v1::GetAccessResponse {
            scopes,
            cluster_id: self.0.cluster_id().to_owned(),
            id_prefix: self.0.id_prefix().to_owned(),
        }))
    }
}

/// The status of a refused call: UNAUTHENTICATED, PERMISSION_DENIED, or UNAVAILABLE if a retry may succeed. Its `ErrorInfo`
/// has the reason, such as `TOKEN_EXPIRED`, and the missing `scope` if that is the reason.
#[must_use]
pub fn status(refusal: &Refusal) -> Status {
    let code = match refusal.reason() {
        Reason::TokenMissing
        | Reason::TokenMalformed
        | Reason::TokenWrong
        | Reason::TokenExpired
        | Reason::CertificateMissing
        | Reason::CertificateUnknown => Code::Unauthenticated,
        Reason::KeysUnavailable => Code::Unavailable,
        Reason::PermissionDenied => Code::PermissionDenied,
    };
    let scope = refusal.missing_scope().map(|scope| ("scope", scope));
    error::status(
        code,
        refusal.message(),
        &refusal.reason().as_str().to_uppercase(),
        scope,
    )
}
