//! Why a request for a recurring schedule failed.

use axum::http::StatusCode;
use redeliver_proto::error::reasons;
use redeliver_proto::v1;
use tonic::Code;

use crate::api::error_parts::{ErrorParts, Pending, UNKNOWN_OUTCOME};
use crate::job::JobId;

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
    Pending {
        id: String,
        /// The job that a trigger creates.
        job: Option<JobId>,
        pending: Pending,
    },
    /// Kafka did not confirm the command: it may or may not be written.
    Unconfirmed {
        id: String,
        is_trigger: bool,
        reason: String,
    },
}

impl ScheduleError {
    /// The schedule as it is.
    pub(crate) fn schedule(&self) -> Option<&v1::Schedule> {
        match self {
            Self::Exists { schedule, .. } | Self::Revised { schedule, .. } => schedule.as_deref(),
            Self::Unknown(_) | Self::Pending { .. } | Self::Unconfirmed { .. } => None,
        }
    }

    pub(in crate::api) fn into_parts(self) -> ErrorParts {
        let (unknown_grpc, unknown_http) = UNKNOWN_OUTCOME;
        let (grpc, http, reason, message) = match &self {
            Self::Unknown(id) => (
                Code::NotFound,
                StatusCode::NOT_FOUND,
                reasons::SCHEDULE_UNKNOWN,
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
            Self::Pending { id, job, pending } => {
                let Pending { position, reason } = pending;
                let advice = job.map_or_else(
                    || "get the schedule before you repeat the request".to_owned(),
                    |job| format!("the job is {job}; get it before you trigger again"),
                );
                (
                    unknown_grpc,
                    unknown_http,
                    reasons::PENDING,
                    format!(
                        "{reason}; the command for schedule {id} is in Kafka ({position}) and will take effect; {advice}"
                    ),
                )
            }
            Self::Unconfirmed {
                id,
                is_trigger,
                reason,
            } => {
                let advice = if *is_trigger {
                    "triggering again may create another job"
                } else {
                    "get the schedule before you repeat the request"
                };
                (
                    unknown_grpc,
                    unknown_http,
                    reasons::UNCONFIRMED,
                    format!(
                        "Kafka did not confirm the command for schedule {id}, so it may or may not take effect; {advice} \
                         ({reason})"
                    ),
                )
            }
        };
        let (id, job, position) = match self {
            Self::Pending { id, job, pending } => (id, job, Some(pending.position)),
            Self::Unknown(id)
            | Self::Exists { id, .. }
            | Self::Revised { id, .. }
            | Self::Unconfirmed { id, .. } => (id, None, None),
        };
        ErrorParts {
            grpc,
            http,
            reason,
            message,
            job,
            schedule: Some(id),
            position,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redeliver_core::{Position, Timestamp};

    use super::*;
    use crate::api::error_parts::NoOutcome;

    #[test]
    fn uncertain_trigger_says_how_to_check() {
        let id = "nightly".to_owned();
        let job = JobId::new(Timestamp::from_millis(1_763_722_800_000), 3, 7);
        let position = Position {
            topic: "ingest".into(),
            partition: 3,
            offset: 7,
        };
        let pending = |job| ScheduleError::Pending {
            id: id.clone(),
            job,
            pending: Pending {
                position: position.clone(),
                reason: NoOutcome::Timeout(Duration::from_secs(10)),
            },
        };
        let unconfirmed = |is_trigger| ScheduleError::Unconfirmed {
            id: id.clone(),
            is_trigger,
            reason: "timed out".to_owned(),
        };
        let of_job = format!("the job is {job}; get it before you trigger again");
        let of_schedule = "get the schedule before you repeat the request";
        for (error, says, named) in [
            (pending(Some(job)), &*of_job, Some(job)),
            (pending(None), of_schedule, None),
            (unconfirmed(true), "triggering again may create another job", None),
            (unconfirmed(false), of_schedule, None),
        ] {
            let parts = error.into_parts();
            assert!(parts.message.contains(says), "{}", parts.message);
            assert_eq!(parts.job, named, "{}", parts.message);
        }
    }
}
