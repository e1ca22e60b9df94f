//! Why a request for control failed.

use std::error::Error;
use std::time::Duration;

use axum::http::StatusCode;
use redeliver_kafka::exclusive::ExclusiveError;
use redeliver_runtime::error_chain::error_chain;
use redeliver_service::control::change::{ChangeError, RefusedChange};
use tonic::Code;

use crate::api::error::{ErrorParts, RequestError, UNKNOWN_OUTCOME};

/// When to repeat a change that Kafka did not take.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request for control failed.
#[derive(Debug)]
pub(crate) enum ControlError {
    /// No application has this name.
    Unknown(String),
    /// The value has another revision than the request expects.
    Revised { app: String, revision: u64 },
    /// This version would lose something of the value.
    Newer(String),
    /// Kafka does not take the change; nothing was written.
    Unavailable(String),
    /// The change may or may not be written.
    Unconfirmed(String),
}

impl From<ControlError> for RequestError {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl ControlError {
    /// The error of a change of this application.
    pub(super) fn of(app: &str, error: ChangeError) -> Self {
        match error {
            ExclusiveError::Refused(RefusedChange::Revised(value)) => Self::Revised {
                app: app.to_owned(),
                revision: value.map_or(0, |value| value.revision),
            },
            ExclusiveError::Refused(refused @ RefusedChange::Unknown(_)) => Self::Newer(format!(
                "app/{app} {refused}; change it with the version that wrote it, or see docs/control.md"
            )),
            error @ ExclusiveError::Unavailable { .. } => Self::Unavailable(chain(&error)),
            error @ ExclusiveError::Unknown(_) => Self::Unconfirmed(chain(&error)),
        }
    }

    /// When to send the same request again.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        matches!(self, Self::Unavailable(_)).then_some(RETRY_AFTER)
    }

    pub(crate) fn into_parts(self) -> ErrorParts {
        let (grpc, http, reason, message) = match self {
            Self::Unknown(app) => (
                Code::NotFound,
                StatusCode::NOT_FOUND,
                "APPLICATION_UNKNOWN",
                format!("no such application: {app}"),
            ),
            Self::Revised { app, revision } => (
                Code::Aborted,
                StatusCode::CONFLICT,
                "CONTROL_REVISED",
                format!("app/{app} has revision {revision}; get it again before you change it"),
            ),
            Self::Newer(message) => (
                Code::FailedPrecondition,
                StatusCode::CONFLICT,
                "CONTROL_UNKNOWN_FORMAT",
                message,
            ),
            Self::Unavailable(reason) => (
                Code::Unavailable,
                StatusCode::SERVICE_UNAVAILABLE,
                "KAFKA_UNAVAILABLE",
                format!("Kafka did not take the change; nothing was written ({reason})"),
            ),
            Self::Unconfirmed(reason) => (
                UNKNOWN_OUTCOME.0,
                UNKNOWN_OUTCOME.1,
                "UNCONFIRMED",
                format!(
                    "Kafka did not confirm the change, so it may or may not take effect; it can be repeated ({reason})"
                ),
            ),
        };
        ErrorParts {
            grpc,
            http,
            reason,
            message,
            job: None,
            schedule: None,
        }
    }
}

fn chain(error: &(dyn Error + 'static)) -> String {
    error_chain(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_that_was_not_written_is_to_be_repeated_without_a_look() {
        let unavailable = |is_unknown: bool| -> ChangeError {
            let source = "timed out".into();
            if is_unknown {
                ExclusiveError::Unknown(source)
            } else {
                ExclusiveError::Unavailable {
                    step: "committing",
                    source,
                }
            }
        };
        for (is_unknown, code) in [(true, "UNCONFIRMED"), (false, "KAFKA_UNAVAILABLE")] {
            let error = ControlError::of("sms", unavailable(is_unknown));
            assert_eq!(error.retry_after().is_none(), is_unknown);
            let parts = error.into_parts();
            assert_eq!(parts.reason, code);
            assert!(parts.message.contains("timed out"), "{}", parts.message);
        }
    }
}
