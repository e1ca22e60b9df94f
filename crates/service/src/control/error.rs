//! Why a request for control failed.

use std::time::Duration;

use redeliver_proto::error;
use tonic::{Code, Status};

use super::change::{ChangeError, RefusedChange};
use super::name::ControlName;
use crate::identity::{self, Refusal};

/// When to repeat a request that was not carried out.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request for control failed.
#[derive(Debug)]
pub enum ControlError {
    /// The caller is unknown, or may not do this.
    Refused(Refusal),
    /// A field of the request is invalid.
    Invalid {
        /// The field.
        field: ControlField,
        /// What is wrong with it.
        problem: String,
    },
    /// Nothing has this name.
    Unknown(ControlName),
    /// The value has another revision than the request expects.
    Revised {
        /// The change.
        name: ControlName,
        /// The revision that it has.
        revision: u64,
    },
    /// This version would lose something of the value.
    Newer(String),
    /// Nothing can be released, because the topic has no id.
    NoTopicIds,
    /// This process does not know yet what applies.
    NotReady,
    /// Kafka does not take the change; nothing was written.
    Unavailable(String),
    /// The change may or may not be written.
    Unconfirmed(String),
}

/// A field of a request for control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlField {
    /// `name`.
    Name,
    /// `reason`.
    Reason,
    /// `rate`.
    Rate,
    /// `page_token`.
    PageToken,
}

impl ControlField {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Reason => "reason",
            Self::Rate => "rate",
            Self::PageToken => "page_token",
        }
    }
}

impl From<Refusal> for ControlError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl ControlError {
    /// The error of a change of this name.
    #[must_use]
    pub fn of(name: &ControlName, error: ChangeError) -> Self {
        match error {
            ChangeError::Revised(revision) => Self::Revised {
                name: name.clone(),
                revision,
            },
            error @ ChangeError::Unsupported(_) => Self::Newer(format!(
                "{name} {error}; upgrade this process, change it with the version that wrote it, or see docs/control.md"
            )),
            ChangeError::Refused(refused @ RefusedChange::Impossible) => Self::Invalid {
                field: ControlField::Name,
                problem: refused.to_string(),
            },
            ChangeError::Refused(refused @ RefusedChange::Overtaken(_)) => {
                Self::Unavailable(format!("{name} {refused}, and again after each repetition"))
            }
            ChangeError::Unavailable(reason) => Self::Unavailable(reason),
            ChangeError::Unconfirmed(reason) => Self::Unconfirmed(reason),
        }
    }

    /// When to send the same request again.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        matches!(self, Self::Unavailable(_) | Self::NotReady).then_some(RETRY_AFTER)
    }

    /// The code of gRPC.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(_) => Code::PermissionDenied,
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            Self::Revised { .. } => Code::Aborted,
            Self::Newer(_) | Self::NoTopicIds => Code::FailedPrecondition,
            Self::NotReady | Self::Unavailable(_) => Code::Unavailable,
            // No usual retry policy repeats a request after it, as it would after UNAVAILABLE.
            Self::Unconfirmed(_) => Code::Unknown,
        }
    }

    /// The reason, for programs.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused(_) => "PERMISSION_DENIED",
            Self::Invalid { .. } => "REQUEST_INVALID",
            Self::Unknown(ControlName::Application(_)) => "APPLICATION_UNKNOWN",
            Self::Unknown(_) => "CONTROL_UNKNOWN",
            Self::Revised { .. } => "CONTROL_REVISED",
            Self::Newer(_) => "CONTROL_UNKNOWN_FORMAT",
            Self::NoTopicIds => "NO_TOPIC_IDS",
            Self::NotReady => "NOT_READY",
            Self::Unavailable(_) => "KAFKA_UNAVAILABLE",
            Self::Unconfirmed(_) => error::reasons::UNCONFIRMED,
        }
    }

    /// What happened, for humans.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Refused(refusal) => refusal.message().to_owned(),
            Self::Invalid { field, problem } => format!("{}: {problem}", field.as_str()),
            Self::Unknown(ControlName::Application(app)) => format!("no such application: {app}"),
            Self::Unknown(name) => format!("no such pipeline or tier in the configuration: {name}"),
            Self::Revised { name, revision } => {
                format!("{name} has revision {revision}; get it again before you change it")
            }
            Self::Newer(message) => message.clone(),
            Self::NoTopicIds => {
                "a release needs the id of the tier's topic, which this Kafka does not have: it needs Kafka 2.8".to_owned()
            }
            Self::NotReady => "this process has not read the control topic yet; nothing was written".to_owned(),
            Self::Unavailable(reason) => {
                format!("Kafka did not take the change; nothing was written ({reason})")
            }
            Self::Unconfirmed(reason) => format!(
                "Kafka did not confirm the change, so it may or may not take effect; it can be repeated ({reason})"
            ),
        }
    }

    /// The error as a gRPC status.
    #[must_use]
    pub fn into_status(self) -> Status {
        match &self {
            Self::Refused(refusal) => identity::grpc::status(refusal),
            Self::Invalid { field, problem } => {
                let field = field.as_str();
                let code = ("code", format!("request.{field}"));
                error::invalid(field, problem, self.reason(), [code])
            }
            other => match other.retry_after() {
                Some(after) => error::retry_later(self.code(), self.message(), self.reason(), after),
                None => error::status(self.code(), self.message(), self.reason(), []),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unconfirmed_changes_are_not_retried() {
        let reason = || "timed out".to_owned();
        for (error, is_unknown, reason, code) in [
            (
                ChangeError::Unconfirmed(reason()),
                true,
                "UNCONFIRMED",
                Code::Unknown,
            ),
            (
                ChangeError::Unavailable(reason()),
                false,
                "KAFKA_UNAVAILABLE",
                Code::Unavailable,
            ),
        ] {
            let error = ControlError::of(&ControlName::application("sms"), error);
            assert_eq!(error.retry_after().is_none(), is_unknown);
            assert_eq!(error.reason(), reason);
            let status = error.into_status();
            assert_eq!(
                (status.code(), error::retry_after(&status).is_none()),
                (code, is_unknown)
            );
            assert!(status.message().contains("timed out"), "{}", status.message());
        }
    }
}
