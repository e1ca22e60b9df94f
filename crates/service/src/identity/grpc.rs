//! Refusals as gRPC statuses.

use redeliver_proto::error;
use tonic::{Code, Status};

use super::{Reason, Refusal};

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
