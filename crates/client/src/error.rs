//! Why a call failed.

use std::error::Error;

use redeliver_proto::auth::UnusableToken;
use tonic::{Code, Status};

use crate::request::InvalidRequest;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address, or what belongs to it, cannot be used.
    #[error("`{url}` {problem}")]
    Endpoint {
        /// The address.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The token cannot be sent.
    #[error("the token cannot be used")]
    Token(#[source] UnusableToken),
    /// Nobody answers there, or not any more. It is worth trying again later.
    #[error("the connection to {url} failed")]
    Unreachable {
        /// The address.
        url: String,
        /// Why: the innermost cause, as those around it only say that there was one.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No scheduler would accept the request, which was not sent.
    #[error("the request is not valid")]
    Invalid(#[from] InvalidRequest),
    /// The service refused.
    #[error("{message} ({})", redeliver_proto::error::code_name(*.code))]
    Refused {
        /// The kind of refusal.
        code: Code,
        /// In the service's words.
        message: String,
        /// The reason of the `ErrorInfo`, for programs.
        reason: Option<String>,
    },
    /// The service answered what this client does not understand.
    #[error("the answer's field `{0}` is missing or out of range")]
    Answer(&'static str),
    /// The service ended a stream that has no end. A new one may be begun.
    #[error("the service ended the stream")]
    Ended,
    /// A stream that should have shown a sign of life did not.
    #[error("nothing came for {0:?}, not even a heartbeat")]
    Silent(std::time::Duration),
}

impl ClientError {
    /// From an answer of the service at this address.
    pub(crate) fn from_status(url: &str, status: &Status) -> Self {
        // With an error inside, it is not the service's answer but the connection's end, whatever the code.
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

    /// The service's kind of refusal, if it was the service that refused.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the same call may succeed later: nobody answered, or not in time, or the service is not ready.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Ended | Self::Silent(_) => true,
            Self::Refused { code, .. } => matches!(
                code,
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted
            ),
            Self::Endpoint { .. } | Self::Token(_) | Self::Invalid(_) | Self::Answer(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_shown_with_its_kind_and_reason() {
        let status = redeliver_proto::error::status(Code::NotFound, "no such application `x`", "APP", []);
        let error = ClientError::from_status("http://x", &status);
        assert_eq!(error.to_string(), "no such application `x` (NOT_FOUND)");
        assert_eq!(error.code(), Some(Code::NotFound));
        assert!(matches!(&error, ClientError::Refused { reason: Some(reason), .. } if reason == "APP"));
        assert!(!error.is_passing());
    }

    #[test]
    fn a_service_that_is_not_ready_differs_from_one_that_is_not_there() {
        let not_ready = ClientError::from_status("http://x", &Status::unavailable("catching up"));
        assert_eq!(not_ready.code(), Some(Code::Unavailable));
        assert!(not_ready.is_passing());
        for (code, message) in [
            (Code::Unavailable, "tcp connect error"),
            (Code::Unknown, "h2 protocol error"),
        ] {
            let mut broken = Status::new(code, message);
            broken.set_source(std::sync::Arc::new(std::io::Error::other("refused")));
            let gone = ClientError::from_status("http://x", &broken);
            assert!(matches!(gone, ClientError::Unreachable { .. }) && gone.is_passing());
            assert_eq!(gone.source().unwrap().to_string(), "refused");
        }
    }
}
