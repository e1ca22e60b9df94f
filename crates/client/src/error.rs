//! Errors of calls.

use std::error::Error;
use std::io;
use std::time::Duration;

use redeliver_core::job::JobId;
use redeliver_proto::auth::UnusableToken;
use redeliver_proto::convert::from_duration;
use redeliver_proto::{error as proto, v1};
use tonic::{Code, Response, Status};

use crate::caller::is_silence;
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
    /// The token would be sent to another machine in plaintext, and was not. See
    /// [`Endpoint::allow_plaintext_token`](crate::Endpoint::allow_plaintext_token).
    #[error("the token is not sent to {url} in plaintext; use https://")]
    PlaintextToken {
        /// The address.
        url: String,
    },
    /// The service cannot be reached, or the connection was lost. Try again later.
    #[error("the connection to {url} failed")]
    Unreachable {
        /// The address.
        url: String,
        /// The scheme of the address, if it is wrong. Otherwise the innermost cause: the errors that wrap it contain no further
        /// information.
        source: Box<dyn Error + Send + Sync>,
        /// Whether the connection was refused. Then nothing was sent.
        is_refused: bool,
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
        /// Details from the service.
        details: Box<ErrorDetails>,
    },
    /// A field of the response is invalid.
    #[error("field `{0}` of the response is missing or out of range")]
    InvalidResponse(&'static str),
    /// The service ended a stream that should not end. Open a new one.
    #[error("the service ended the stream")]
    Ended,
    /// A stream received no event and no heartbeat for this long. Open a new one.
    #[error("the stream received no event and no heartbeat for {0:?}")]
    StreamTimeout(Duration),
}

/// What a service says about a rejected call, besides code, message and reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorDetails {
    /// When to send the same call again. Then nothing was written, so a repetition has no effect twice, also without an idempotency key.
    /// `None` if a repetition makes no sense, or could have an effect twice.
    pub retry_after: Option<Duration>,
    /// The invalid field of the request.
    pub field: Option<String>,
    /// The error code of an invalid job, such as `request.app`.
    pub error_code: Option<String>,
    /// The job that the error is about: the one with the idempotency key, or the one whose outcome is unknown.
    pub job_id: Option<JobId>,
    /// Of a command that has its turn later: where it is in the ingest topic, as `topic/partition/offset`.
    pub position: Option<String>,
    /// The scope that the caller lacks, such as `jobs:write:sms`.
    pub scope: Option<String>,
}

impl ErrorDetails {
    fn of(status: &Status) -> Self {
        let mut metadata = proto::metadata(status);
        Self {
            retry_after: proto::retry_after(status),
            field: proto::field(status),
            error_code: metadata.remove("code"),
            job_id: metadata.remove("job_id").and_then(|id| id.parse().ok()),
            position: metadata.remove("position"),
            scope: metadata.remove("scope"),
        }
    }
}

impl From<v1::JobError> for ClientError {
    /// From the error of one job of a batch.
    fn from(error: v1::JobError) -> Self {
        let text = |text: String| (!text.is_empty()).then_some(text);
        let retry_after = error.retry_after.as_ref().and_then(from_duration);
        Self::Refused {
            code: Code::from(error.code),
            message: error.message,
            reason: text(error.reason),
            details: Box::new(ErrorDetails {
                retry_after: retry_after.map(Duration::from),
                field: text(error.field),
                error_code: text(error.error_code),
                job_id: error.job_id.parse().ok(),
                position: text(error.position),
                // A batch does not say it.
                scope: None,
            }),
        }
    }
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
            reason: proto::reason(status),
            details: Box::new(ErrorDetails::of(status)),
        }
    }

    pub(crate) fn unreachable(url: &str, error: &dyn Error) -> Self {
        let (mut innermost, mut is_refused) = (error, false);
        while let Some(cause) = innermost.source() {
            let io = cause.downcast_ref::<io::Error>();
            is_refused |= io.is_some_and(|io| io.kind() == io::ErrorKind::ConnectionRefused);
            innermost = cause;
        }
        Self::Unreachable {
            url: url.to_owned(),
            source: innermost.to_string().into(),
            is_refused,
        }
    }

    /// Replaces the cause of a failed connection if it is the scheme of the address; see [`scheme`].
    pub(crate) async fn explained(self) -> Self {
        match self {
            Self::Unreachable {
                url,
                source,
                is_refused,
            } => Self::Unreachable {
                is_refused,
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

    /// Details from the service, if it rejected the call.
    #[must_use]
    pub fn details(&self) -> Option<&ErrorDetails> {
        match self {
            Self::Refused { details, .. } => Some(details),
            _ => None,
        }
    }

    /// When to send the same call again, if the service has asked for it. Then it has written nothing, so a
    /// repetition has no effect twice.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.details()?.retry_after
    }

    /// Whether the scheduler does not know if the call took effect. Repeat it only with the same idempotency key.
    #[must_use]
    pub fn has_unknown_outcome(&self) -> bool {
        let is_unknown = |reason: &String| {
            matches!(
                reason.as_str(),
                proto::reasons::PENDING | proto::reasons::UNCONFIRMED
            )
        };
        matches!(self, Self::Refused { reason, .. } if reason.as_ref().is_some_and(is_unknown))
    }

    /// Whether the same call may succeed later, because the service is unavailable, not ready or overloaded. After [`ClientError::Unreachable`], unless
    /// the connection was refused, a call that changes something may have taken effect: schedule a job again only with the same idempotency key. If
    /// the scheduler says that it does not know the outcome ([`ClientError::has_unknown_outcome`]), the error is not transient.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Ended | Self::StreamTimeout(_) => true,
            Self::Refused { code, .. } => matches!(
                code,
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted
            ),
            Self::Endpoint { .. }
            | Self::Token(_)
            | Self::PlaintextToken { .. }
            | Self::Invalid(_)
            | Self::InvalidResponse(_) => false,
        }
    }
}

/// What the service at this address answered to a call.
pub(crate) async fn answer<T>(url: &str, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
    match answer {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) if is_silence(&status) => Err(ClientError::from_status(url, &status)),
        Err(status) => Err(ClientError::from_status(url, &status).explained().await),
    }
}

/// An answer about something that may not exist.
pub(crate) fn found<T>(answer: Result<T, ClientError>) -> Result<Option<T>, ClientError> {
    match answer {
        Err(error) if error.code() == Some(Code::NotFound) => Ok(None),
        answer => answer.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_has_code_and_reason() {
        let status = redeliver_proto::error::status(Code::NotFound, "no such application `x`", "APP", []);
        let error = ClientError::from_status("http://x", &status);
        assert_eq!(error.to_string(), "no such application `x` (NOT_FOUND)");
        assert_eq!(error.code(), Some(Code::NotFound));
        assert!(matches!(&error, ClientError::Refused { reason: Some(reason), .. } if reason == "APP"));
        assert!(!error.is_transient());
        assert!(!error.has_unknown_outcome());
        assert_eq!(error.details(), Some(&ErrorDetails::default()));
        let position = ("position", "ingest/3/41".to_owned());
        let pending = redeliver_proto::error::status(Code::Unknown, "shutting down", "PENDING", [position]);
        let error = ClientError::from_status("http://x", &pending);
        assert!(error.has_unknown_outcome() && !error.is_transient());
        assert_eq!(error.details().unwrap().position.as_deref(), Some("ingest/3/41"));
    }

    #[test]
    fn rejection_has_delay_and_fields() {
        let wait = Duration::from_millis(1_500);
        let busy = proto::retry_later(Code::ResourceExhausted, "busy", "BUSY", wait);
        let error = ClientError::from_status("http://x", &busy);
        assert_eq!((error.retry_after(), error.is_transient()), (Some(wait), true));
        let metadata = [("code", "request.appName".to_owned())];
        let invalid = proto::invalid("app", "is empty", "REQUEST_INVALID", metadata);
        let details = ClientError::from_status("http://x", &invalid);
        let details = details.details().unwrap();
        assert_eq!(
            (details.field.as_deref(), details.error_code.as_deref()),
            (Some("app"), Some("request.appName"))
        );
        let id = "01KAJQ6Z2B0003000000000A7X";
        let metadata = [("job_id", id.to_owned()), ("scope", "jobs:read".to_owned())];
        let other = proto::status(Code::AlreadyExists, "conflict", "IDEMPOTENCY_CONFLICT", metadata);
        let details = ClientError::from_status("http://x", &other);
        let details = details.details().unwrap();
        assert_eq!(
            (details.job_id, details.scope.as_deref()),
            (id.parse().ok(), Some("jobs:read"))
        );
    }

    #[test]
    fn batch_errors_have_all_details() {
        let id = "01KAJQ6Z2B0003000000000A7X";
        let error = ClientError::from(v1::JobError {
            code: Code::Unavailable.into(),
            message: "shutting down".to_owned(),
            reason: "SHUTTING_DOWN".to_owned(),
            error_code: "request.app".to_owned(),
            field: "app".to_owned(),
            job_id: id.to_owned(),
            position: "ingest/3/41".to_owned(),
            retry_after: Some(prost_types::Duration {
                seconds: 1,
                nanos: 500_000_000,
            }),
        });
        assert_eq!(error.code(), Some(Code::Unavailable));
        assert_eq!(
            error.details(),
            Some(&ErrorDetails {
                retry_after: Some(Duration::from_millis(1_500)),
                field: Some("app".to_owned()),
                error_code: Some("request.app".to_owned()),
                job_id: id.parse().ok(),
                position: Some("ingest/3/41".to_owned()),
                scope: None,
            })
        );
        let plain = ClientError::from(v1::JobError::default());
        assert_eq!(plain.details(), Some(&ErrorDetails::default()));
    }

    #[test]
    fn unready_service_is_reachable() {
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
            assert!(
                matches!(
                    error,
                    ClientError::Unreachable {
                        is_refused: false,
                        ..
                    }
                ) && error.is_transient()
            );
            assert_eq!(error.source().unwrap().to_string(), "refused");
        }
        let mut refused = Status::new(Code::Unavailable, "tcp connect error");
        let cause = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        refused.set_source(std::sync::Arc::new(cause));
        let error = ClientError::from_status("http://x", &refused);
        assert!(matches!(error, ClientError::Unreachable { is_refused: true, .. }));
    }
}
