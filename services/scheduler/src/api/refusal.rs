//! Why something is not done, in the words of gRPC and of HTTP.

use std::time::Duration;

use axum::http::StatusCode;
use redeliver_core::{ErrorClass, Failure};
use redeliver_kafka::producer::ProduceError;
use redeliver_proto::{error, v1};
use redeliver_runtime::error_chain::error_chain;
use tonic::{Code, Status};

use super::rest::Problem;
use crate::answers::TooMany;
use crate::index::IndexError;
use crate::job::JobId;
use crate::request::{Field, Format};
use crate::room::{INDEX_FULL, RETRY_AFTER};

/// Why something is not done.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The request is wrong; nothing was written.
    Wrong(Failure),
    /// Another request has the idempotency key.
    Conflict {
        /// The job that it asked for.
        job: Box<v1::Job>,
        /// In words.
        reason: String,
    },
    /// The scheduler did not take what was right here: its configuration differs.
    Rejected(String),
    /// No such job is known.
    UnknownJob(JobId),
    /// The command is written, and its outcome is not known in time.
    Undecided(JobId, Duration),
    /// The command is written, and this process is ending.
    Leaving(JobId),
    /// Kafka has not confirmed the command: it may be written or not.
    Unconfirmed,
    /// Kafka has refused the command, or could not be reached.
    Unwritten(String),
    /// The index has no room for a job that is due so late; in words.
    NoRoom(String),
    /// Too many wait already; nothing was written.
    Busy(TooMany),
    /// The index does not answer.
    Index(String),
    /// The index of a shard is empty, and will be built again.
    NoIndex,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        if failure.code == INDEX_FULL {
            return Self::NoRoom(failure.message);
        }
        Self::Wrong(failure)
    }
}

impl From<TooMany> for Refusal {
    fn from(too_many: TooMany) -> Self {
        Self::Busy(too_many)
    }
}

impl From<ProduceError> for Refusal {
    fn from(error: ProduceError) -> Self {
        Self::Unwritten(error_chain(&error))
    }
}

impl From<IndexError> for Refusal {
    fn from(error: IndexError) -> Self {
        Self::Index(error_chain(&error))
    }
}

/// What both protocols say of a refusal.
struct Said {
    grpc: Code,
    http: StatusCode,
    reason: &'static str,
    message: String,
    job: Option<JobId>,
}

impl Refusal {
    fn said(self) -> Said {
        let said = |grpc, http, reason, message: String| Said {
            grpc,
            http,
            reason,
            message,
            job: None,
        };
        let unavailable = |reason, message| {
            said(
                Code::Unavailable,
                StatusCode::SERVICE_UNAVAILABLE,
                reason,
                message,
            )
        };
        match self {
            Self::Wrong(failure) => wrong(failure),
            Self::Conflict { job, reason } => Said {
                job: job.id.parse().ok(),
                ..said(
                    Code::AlreadyExists,
                    StatusCode::CONFLICT,
                    "IDEMPOTENCY_CONFLICT",
                    reason,
                )
            },
            Self::Rejected(reason) => said(
                Code::InvalidArgument,
                StatusCode::UNPROCESSABLE_ENTITY,
                "REJECTED",
                reason,
            ),
            Self::UnknownJob(id) => Said {
                job: Some(id),
                ..said(
                    Code::NotFound,
                    StatusCode::NOT_FOUND,
                    "JOB_UNKNOWN",
                    format!("no job {id} is known; jobs that have ended are forgotten after a while"),
                )
            },
            Self::Undecided(id, patience) => Said {
                job: Some(id),
                ..said(
                    Code::DeadlineExceeded,
                    StatusCode::GATEWAY_TIMEOUT,
                    "UNDECIDED",
                    format!(
                        "no outcome within {} s; the command for job {id} is safe in Kafka and will take effect: \
                         ask for the job later, and do not send the command again without the same idempotency key",
                        patience.as_secs()
                    ),
                )
            },
            Self::Leaving(id) => Said {
                job: Some(id),
                ..unavailable(
                    "UNDECIDED",
                    format!(
                        "this scheduler is ending; the command for job {id} is safe in Kafka and will take effect: \
                         ask another one for the job"
                    ),
                )
            },
            Self::Unconfirmed => said(
                Code::DeadlineExceeded,
                StatusCode::GATEWAY_TIMEOUT,
                "UNCONFIRMED",
                "Kafka has not confirmed the command in time, so it may take effect or not: send it again with \
                 the same idempotency key"
                    .to_owned(),
            ),
            Self::Unwritten(reason) => unavailable(
                "KAFKA_UNAVAILABLE",
                format!(
                    "Kafka has not taken the command, so it may take effect or not: send it again with the same \
                     idempotency key ({reason})"
                ),
            ),
            Self::NoRoom(message) => said(
                Code::ResourceExhausted,
                StatusCode::SERVICE_UNAVAILABLE,
                "INDEX_FULL",
                message,
            ),
            Self::Busy(too_many) => said(
                Code::ResourceExhausted,
                StatusCode::TOO_MANY_REQUESTS,
                "BUSY",
                format!("{too_many}; nothing was written, come again later"),
            ),
            Self::Index(reason) => unavailable("INDEX_UNAVAILABLE", reason),
            Self::NoIndex => unavailable(
                "INDEX_INCOMPLETE",
                "the index is being built from Kafka; come again later".to_owned(),
            ),
        }
    }

    /// As gRPC says it.
    pub(crate) fn into_status(self) -> Status {
        if let Self::NoRoom(message) = self {
            return error::retry_later(Code::ResourceExhausted, message, "INDEX_FULL", RETRY_AFTER);
        }
        if let Self::Wrong(failure) = &self
            && let Some(field) = Field::of(failure)
            && !is_unknown_app(failure)
        {
            let name = field.protobuf();
            let problem = failure.message.strip_prefix(&format!("`{name}` "));
            let code = ("code", failure.code.clone());
            let problem = problem.unwrap_or(&failure.message);
            return error::invalid(name, problem, "REQUEST_INVALID", [code]);
        }
        let said = self.said();
        let job = said.job.map(|id| ("job_id", id.to_string()));
        error::status(said.grpc, said.message, said.reason, job)
    }

    /// As HTTP says it.
    pub(crate) fn into_problem(self) -> Problem {
        let (code, field) = match &self {
            Self::Wrong(failure) => (Some(failure.code.clone()), Field::of(failure)),
            _ => (None, None),
        };
        let shown = match &self {
            Self::Conflict { job, .. } => Some(job.clone()),
            _ => None,
        };
        let retry_after = matches!(self, Self::NoRoom(_)).then_some(RETRY_AFTER);
        let said = self.said();
        Problem {
            status: said.http,
            code: code.unwrap_or_else(|| said.reason.to_lowercase()),
            detail: said.message,
            field: field.map(|field| field.name(Format::Json)),
            job_id: said.job.map(|id| id.to_string()),
            job: shown,
            outcome: None,
            retry_after,
        }
    }
}

fn wrong(failure: Failure) -> Said {
    let (grpc, reason) = if is_unknown_app(&failure) {
        (Code::NotFound, "APPLICATION_UNKNOWN")
    } else {
        (Code::InvalidArgument, "REQUEST_INVALID")
    };
    let http = match failure.code.as_str() {
        "request.json" => StatusCode::BAD_REQUEST,
        "request.contentType" => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    };
    Said {
        grpc,
        http,
        reason,
        message: failure.message,
        job: None,
    }
}

fn is_unknown_app(failure: &Failure) -> bool {
    failure.class == ErrorClass::Permanent && Field::of(failure) == Some(Field::App)
}

#[cfg(test)]
mod tests {
    use redeliver_core::Timestamp;

    use super::*;

    fn id() -> JobId {
        JobId::new(Timestamp::from_millis(1_763_722_800_000), 1, 2)
    }

    #[test]
    fn a_wrong_field_is_named_as_its_protocol_calls_it() {
        let failure = || Field::IdempotencyKey.malformed(Format::Protobuf, "is empty; leave it out instead");
        let status = Refusal::Wrong(failure()).into_status();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(
            status.message(),
            "idempotency_key: is empty; leave it out instead"
        );
        let problem = Refusal::Wrong(failure()).into_problem();
        assert_eq!(problem.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(
            (problem.field, &*problem.code),
            (Some("idempotencyKey"), "request.idempotencyKey")
        );
        let app = Field::App.refused(Format::Protobuf, "names no application `x`");
        assert_eq!(Refusal::Wrong(app.clone()).into_status().code(), Code::NotFound);
        assert_eq!(
            Refusal::Wrong(app).into_problem().status,
            StatusCode::UNPROCESSABLE_ENTITY
        );
    }

    #[test]
    fn a_job_that_finds_no_room_may_come_again() {
        let failure = || Failure::permanent(INDEX_FULL, "no room");
        let status = Refusal::from(failure()).into_status();
        assert_eq!(
            (status.code(), status.message()),
            (Code::ResourceExhausted, "no room")
        );
        assert_eq!(error::reason(&status).as_deref(), Some("INDEX_FULL"));
        let problem = Refusal::from(failure()).into_problem();
        assert_eq!(
            (problem.status, &*problem.code, problem.retry_after),
            (StatusCode::SERVICE_UNAVAILABLE, "index_full", Some(RETRY_AFTER))
        );
    }

    #[test]
    fn what_is_not_decided_says_that_it_will_be() {
        let status = Refusal::Undecided(id(), Duration::from_secs(10)).into_status();
        assert_eq!(status.code(), Code::DeadlineExceeded);
        assert!(status.message().contains("is safe in Kafka and will take effect"));
        assert!(status.message().contains(&id().to_string()));
        let problem = Refusal::Leaving(id()).into_problem();
        assert_eq!(problem.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(problem.job_id, Some(id().to_string()));
    }
}
