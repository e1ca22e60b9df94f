//! Why a request for a recurring schedule failed.

use axum::http::StatusCode;
use redeliver_proto::v1;
use tonic::Code;

use crate::api::error::{ErrorParts, RequestError, UNKNOWN_OUTCOME, Undecided};

/// Why a request for a recurring schedule failed.
#[derive(Debug)]
pub(crate) enum ScheduleError {
    /// No schedule has this id, or the caller may not know it.
    Unknown(String),
    /// A schedule with another definition has the id.
    Exists {
        id: String,
        /// That schedule, if the caller may know it.
        schedule: Option<Box<v1::Schedule>>,
    },
    /// The schedule has another revision than the request expects.
    Revised {
        id: String,
        schedule: Option<Box<v1::Schedule>>,
    },
    /// The command is in Kafka, and there was no outcome in time.
    Undecided { id: String, why: Undecided },
    /// Kafka did not confirm the command: it may or may not be written.
    Unconfirmed { id: String, reason: String },
}

impl From<ScheduleError> for RequestError {
    fn from(error: ScheduleError) -> Self {
        Self::Schedule(error)
    }
}

impl ScheduleError {
    /// The schedule as it is.
    pub(crate) fn schedule(&self) -> Option<&v1::Schedule> {
        match self {
            Self::Exists { schedule, .. } | Self::Revised { schedule, .. } => schedule.as_deref(),
            Self::Unknown(_) | Self::Undecided { .. } | Self::Unconfirmed { .. } => None,
        }
    }

    pub(crate) fn into_parts(self) -> ErrorParts {
        let (unknown_grpc, unknown_http) = UNKNOWN_OUTCOME;
        let (grpc, http, reason, message) = match &self {
            Self::Unknown(id) => (
                Code::NotFound,
                StatusCode::NOT_FOUND,
                "SCHEDULE_UNKNOWN",
                format!("no such schedule: {id}"),
            ),
            Self::Exists { id, .. } => (
                Code::AlreadyExists,
                StatusCode::CONFLICT,
                "SCHEDULE_EXISTS",
                format!("schedule {id} exists with another definition; update it, or choose another id"),
            ),
            Self::Revised { id, schedule } => (
                Code::Aborted,
                StatusCode::CONFLICT,
                "SCHEDULE_REVISED",
                format!(
                    "schedule {id} has revision {}; get it again before you update it",
                    schedule.as_ref().map_or(0, |schedule| schedule.revision)
                ),
            ),
            Self::Undecided { id, why } => (
                unknown_grpc,
                unknown_http,
                "UNDECIDED",
                format!(
                    "{why}; the command for schedule {id} is in Kafka and will take effect; get the schedule before you \
                     repeat the request"
                ),
            ),
            Self::Unconfirmed { id, reason } => (
                unknown_grpc,
                unknown_http,
                "UNCONFIRMED",
                format!(
                    "Kafka did not confirm the command for schedule {id}, so it may or may not take effect; get the schedule \
                     before you repeat the request ({reason})"
                ),
            ),
        };
        let id = match self {
            Self::Unknown(id)
            | Self::Exists { id, .. }
            | Self::Revised { id, .. }
            | Self::Undecided { id, .. }
            | Self::Unconfirmed { id, .. } => id,
        };
        ErrorParts {
            grpc,
            http,
            reason,
            message,
            job: None,
            schedule: Some(id),
        }
    }
}
