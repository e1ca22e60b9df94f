//! What both protocols report of an error, and commands without an outcome.

use std::time::Duration;

use axum::http::StatusCode;
use redeliver_core::Position;
use tonic::Code;

use crate::job::JobId;

/// What both protocols report of an error.
pub(super) struct ErrorParts {
    pub(super) grpc: Code,
    pub(super) http: StatusCode,
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) job: Option<JobId>,
    /// The id of a schedule.
    pub(super) schedule: Option<String>,
    /// Of a pending command.
    pub(super) position: Option<Position>,
}

impl ErrorParts {
    pub(super) fn new(grpc: Code, http: StatusCode, reason: &'static str, message: String) -> Self {
        Self {
            grpc,
            http,
            reason,
            message,
            job: None,
            schedule: None,
            position: None,
        }
    }
}

/// The job of a command without an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PendingJob {
    /// It has this id.
    Id(JobId),
    /// It has this id, unless the idempotency key of the request was in use: then the job of the key keeps its id.
    New(JobId),
    /// The command names it by its idempotency key.
    Key,
    /// It is the long wait with this id, on which the command acts.
    OfAct(JobId),
}

/// A command that is in Kafka and has its turn later.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Its position in the ingest topic.
    pub(crate) position: Position,
    pub(crate) reason: NoOutcome,
}

/// Why a request did not wait any longer for the outcome of its command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoOutcome {
    #[error("no outcome within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("this scheduler is shutting down")]
    ShuttingDown,
}

/// What a client gets that cannot know whether its command took effect. No usual retry policy repeats requests after these, as
/// it would after UNAVAILABLE, DEADLINE_EXCEEDED, and all statuses from 500 on. A repetition without an idempotency key could
/// schedule the job again.
pub(super) const UNKNOWN_OUTCOME: (Code, StatusCode) = (Code::Unknown, StatusCode::FAILED_DEPENDENCY);
