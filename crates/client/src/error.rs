//! Errors of calls.

use std::error::Error;

use redeliver_proto::auth::UnusableToken;
use tonic::{Code, Response, Status};

use crate::request::InvalidRequest;
use crate::scheme;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The endpoint is invalid.
    #[error("`{url}` {problem}")]
    Endpoint {
        /// The address.
        url: String,
        /// What is wrong, and what is expected.
        problem: String,
    },
    /// The token contains characters that cannot be sent.
    #[error("the token cannot be used")]
    Token(#[source] UnusableToken),
    /// The service cannot be reached, or the connection was lost. Try again later.
    #[error("the connection to {url} failed")]
    Unreachable {
        /// The address.
        url: String,
        /// The scheme of the address, if it is wrong. Otherwise the innermost cause: the errors that wrap it contain no further
        /// information.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The request is invalid and was not sent.
    #[error("the request is not valid")]
    Invalid(#[from] InvalidRequest),
    /// The service rejected the call.
    #[error("{message} ({})", redeliver_proto::error::code_name(*.code))]
    Refused {
        /// The gRPC status code.
        code: Code,
        /// The message of the service.
        message: String,
        /// The reason in the `ErrorInfo` of the status, if there is one.
        reason: Option<String>,
    },
    /// A field of the response is invalid.
    #[error("field `{0}` of the response is missing or out of range")]
    InvalidResponse(&'static str),
    /// The service ended a stream that should not end. Open a new one.
    #[error("the service ended the stream")]
    Ended,
    /// A stream received no event and no heartbeat for this long. Open a new one.
    #[error("the stream received no event and no heartbeat for {0:?}")]
    StreamTimeout(std::time::Duration),
}

impl ClientError {
    /// From a status that a call to this address returned.
    pub(crate) fn from_status(url: &str, status: &Status) -> Self {
        // A status with a source does not come from the service: the connection failed.
        if status.source().is_some() {
            return Self::unreachable(url, status);
        }
        Self::Refused {
            code: status.code(),
            message: status.message().to_owned(),
            reason: redeliver_proto::error::reason(status),
        }
    }

    pub(crate) fn unreachable(url: &str, error: &dyn Error) -> Self {
        let mut innermost = error;
        while let Some(cause) = innermost.source() {
            innermost = cause;
        }
        Self::Unreachable {
            url: url.to_owned(),
            source: innermost.to_string().into(),
        }
    }

    /// Replaces the cause of a failed connection if it is the scheme of the address; see [`scheme`].
    pub(crate) async fn explained(self) -> Self {
        match self {
            Self::Unreachable { url, source } => Self::Unreachable {
                source: match scheme::check(&url).await {
                    Some(wrong) => wrong.into(),
                    None => source,
                },
                url,
            },
            error => error,
        }
    }

    /// The gRPC status code, if the service rejected the call.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the scheduler does not know if the call took effect. Repeat it only with the same idempotency key.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        let undecided = |reason: &String| matches!(reason.as_str(), "UNDECIDED" | "UNCONFIRMED");
        matches!(self, Self::Refused { reason, .. } if reason.as_ref().is_some_and(undecided))
    }

    /// Whether the same call may succeed later, because the service is unavailable, not ready or overloaded. A call whose outcome is
    /// unknown is not transient: repeating it without an idempotency key could schedule the job twice.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            // Older schedulers answer with codes that mean a repetition otherwise.
            _ if self.is_undecided() => false,
            Self::Unreachable { .. } | Self::Ended | Self::StreamTimeout(_) => true,
            Self::Refused { code, .. } => matches!(
                code,
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted
            ),
            Self::Endpoint { .. } | Self::Token(_) | Self::Invalid(_) | Self::InvalidResponse(_) => false,
        }
    }
}

/// What the service at this address answered to a call.
pub(crate) async fn answer<T>(url: &str, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
    match answer {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) => Err(ClientError::from_status(url, &status).explained().await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_call_has_code_message_and_reason() {
        let status = redeliver_proto::error::status(Code::NotFound, "no such application `x`", "APP", []);
        let error = ClientError::from_status("http://x", &status);
        assert_eq!(error.to_string(), "no such application `x` (NOT_FOUND)");
        assert_eq!(error.code(), Some(Code::NotFound));
        assert!(matches!(&error, ClientError::Refused { reason: Some(reason), .. } if reason == "APP"));
        assert!(!error.is_transient());
        assert!(!error.is_undecided());
        let undecided = redeliver_proto::error::status(Code::Unknown, "shutting down", "UNDECIDED", []);
        let error = ClientError::from_status("http://x", &undecided);
        assert!(error.is_undecided() && !error.is_transient());
    }

    #[test]
    fn a_service_that_is_not_ready_differs_from_one_that_is_unreachable() {
        let not_ready = ClientError::from_status("http://x", &Status::unavailable("catching up"));
        assert_eq!(not_ready.code(), Some(Code::Unavailable));
        assert!(not_ready.is_transient());
        for (code, message) in [
            (Code::Unavailable, "tcp connect error"),
            (Code::Unknown, "h2 protocol error"),
        ] {
            let mut broken = Status::new(code, message);
            broken.set_source(std::sync::Arc::new(std::io::Error::other("refused")));
            let error = ClientError::from_status("http://x", &broken);
            assert!(matches!(error, ClientError::Unreachable { .. }) && error.is_transient());
            assert_eq!(error.source().unwrap().to_string(), "refused");
        }
    }
}
