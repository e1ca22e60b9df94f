//! Errors of requests, and how gRPC and REST report them.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::WWW_AUTHENTICATE;
use redeliver_core::{ErrorClass, Failure};
use redeliver_kafka::producer::ProduceError;
use redeliver_proto::error::{self, reasons};
use redeliver_proto::v1;
use redeliver_runtime::error_chain::error_chain;
use redeliver_service::control::{ControlError, ControlField};
use redeliver_service::identity::{self, Reason, Refusal};
use tonic::{Code, Status};

use super::control::error::parts_of;
use super::error_parts::{ErrorParts, Pending, PendingJob, UNKNOWN_OUTCOME};
use super::problem::Problem;
use super::schedules::error::ScheduleError;
use super::schedules::view::ScheduleView;
use super::view::JobView;
use crate::admission::{RETRY_AFTER, RejectedForNow};
use crate::answers::CannotWait;
use crate::index::IndexError;
use crate::job::JobId;
use crate::request::{CONTENT_TYPE, Field, Format, NOT_JSON};

/// When a client should send a request again whose problem usually passes soon.
const SOON: Duration = Duration::from_secs(1);

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// The caller is unknown, or may not do this.
    Refused(Refusal),
    /// The request is invalid; nothing was written.
    Invalid(Failure),
    /// A request with different content used the idempotency key before.
    Conflict {
        /// The job of that request.
        job: Box<v1::Job>,
        reason: String,
    },
    /// The request is valid here, but the scheduler that owns the shard rejected it: its configuration differs.
    Rejected(String),
    /// No job has this id or, if there is none, the idempotency key of the request.
    UnknownJob(Option<JobId>),
    /// A request for a recurring schedule failed.
    Schedule(ScheduleError),
    /// A request for control failed.
    Control(ControlError),
    /// The command is in Kafka, and there was no outcome in time.
    Pending(PendingJob, Pending),
    /// Kafka did not confirm the command: it may or may not be written.
    Unconfirmed(String),
    /// The same of an act on this long wait.
    UnconfirmedAct(JobId, String),
    /// Kafka refused the command; nothing was written.
    KafkaUnavailable(String),
    /// The change could not be recorded in the audit topic; nothing was changed.
    NotRecorded,
    /// The request was not written, or the shard rejected it.
    RejectedForNow(RejectedForNow, String),
    /// The request cannot wait for an outcome; nothing was written.
    CannotWait(CannotWait),
    /// The caller sends too many requests; this is how long it has to wait.
    RateLimited(Duration),
    /// There was no memory for the body of the request in time; it was not read.
    Overloaded,
    IndexUnavailable(String),
    /// The index of the shard is being rebuilt.
    IndexIncomplete,
}

impl From<ScheduleError> for RequestError {
    fn from(error: ScheduleError) -> Self {
        Self::Schedule(error)
    }
}

impl From<ControlError> for RequestError {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Refused(refusal) => Self::Refused(refusal),
            ControlError::Invalid { field, problem } => {
                let field = match field {
                    ControlField::Reason => Field("reason"),
                    ControlField::Rate => Field("rate"),
                    ControlField::PageToken => Field("pageToken"),
                    ControlField::Name => Field("name"),
                };
                field.malformed(Format::Json, &problem).into()
            }
            error => Self::Control(error),
        }
    }
}

impl From<Refusal> for RequestError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> Self {
        match RejectedForNow::of(&failure.code) {
            Some(reason) => Self::RejectedForNow(reason, failure.message),
            None => Self::Invalid(failure),
        }
    }
}

/// An outcome other than those that a command asks for. The request is valid here, so the configuration of its shard differs, or
/// the job is rejected for now.
impl From<v1::CommandOutcome> for RequestError {
    fn from(outcome: v1::CommandOutcome) -> Self {
        match RejectedForNow::of(&outcome.code) {
            Some(reason) => Self::RejectedForNow(reason, outcome.reason),
            None => Self::Rejected(outcome.reason),
        }
    }
}

impl From<CannotWait> for RequestError {
    fn from(error: CannotWait) -> Self {
        Self::CannotWait(error)
    }
}

impl From<ProduceError> for RequestError {
    fn from(error: ProduceError) -> Self {
        let reason = error_chain(&error);
        if error.is_refusal() {
            Self::KafkaUnavailable(reason)
        } else {
            Self::Unconfirmed(reason)
        }
    }
}

impl From<IndexError> for RequestError {
    fn from(error: IndexError) -> Self {
        Self::IndexUnavailable(error_chain(&error))
    }
}

impl RequestError {
    fn parts(self) -> ErrorParts {
        let parts = ErrorParts::new;
        let unavailable = |reason, message| {
            parts(
                Code::Unavailable,
                StatusCode::SERVICE_UNAVAILABLE,
                reason,
                message,
            )
        };
        let unknown = |reason, message| {
            let (grpc, http) = UNKNOWN_OUTCOME;
            parts(grpc, http, reason, message)
        };
        match self {
            Self::Refused(refusal) => refused(&refusal),
            Self::Invalid(failure) => invalid(failure),
            Self::Conflict { job, reason } => ErrorParts {
                job: job.id.parse().ok(),
                ..parts(
                    Code::AlreadyExists,
                    StatusCode::CONFLICT,
                    "IDEMPOTENCY_CONFLICT",
                    reason,
                )
            },
            Self::Rejected(reason) => parts(
                Code::InvalidArgument,
                StatusCode::UNPROCESSABLE_ENTITY,
                "REJECTED",
                reason,
            ),
            Self::UnknownJob(job) => ErrorParts {
                job,
                ..parts(
                    Code::NotFound,
                    StatusCode::NOT_FOUND,
                    "JOB_UNKNOWN",
                    job.map_or_else(
                        || "no job of the application uses this idempotency key, or the job ended and is no longer kept".to_owned(),
                        |id| format!("no such job: {id}; it never existed, or it ended and is no longer kept"),
                    ),
                )
            },
            Self::Schedule(error) => error.into_parts(),
            Self::Control(error) => parts_of(&error),
            Self::Pending(job, Pending { position, reason }) => {
                let (id, message) = match job {
                    PendingJob::Key => (
                        None,
                        format!(
                            "{reason}; the command is in Kafka ({position}) and will take effect; it can be repeated"
                        ),
                    ),
                    PendingJob::Id(id) => (
                        Some(id),
                        format!(
                            "{reason}; the command for job {id} is in Kafka ({position}) and will take effect; get the job \
                             later, and repeat the request only with the same idempotency key"
                        ),
                    ),
                    PendingJob::OfAct(id) => (
                        Some(id),
                        format!(
                            "{reason}; the command for job {id} is in Kafka ({position}) and will take effect; it can be \
                             repeated"
                        ),
                    ),
                    PendingJob::New(id) => (
                        Some(id),
                        format!(
                            "{reason}; the request is in Kafka ({position}) and will take effect; its job is {id}, unless the \
                             idempotency key was in use: then no job has this id; repeat the request with the same key \
                             to get the id of its job"
                        ),
                    ),
                };
                ErrorParts {
                    job: id,
                    position: Some(position),
                    ..unknown(reasons::PENDING, message)
                }
            }
            Self::Unconfirmed(reason) => unknown(
                reasons::UNCONFIRMED,
                format!(
                    "Kafka did not confirm the command, so it may or may not take effect; repeat the request only with \
                     the same idempotency key ({reason})"
                ),
            ),
            Self::UnconfirmedAct(id, reason) => ErrorParts {
                job: Some(id),
                ..unknown(
                    reasons::UNCONFIRMED,
                    format!(
                        "Kafka did not confirm the command for job {id}, so it may or may not take effect; it can be \
                         repeated ({reason})"
                    ),
                )
            },
            Self::KafkaUnavailable(reason) => unavailable(
                "KAFKA_UNAVAILABLE",
                format!("Kafka refused the command; nothing was written ({reason})"),
            ),
            Self::NotRecorded => unavailable(
                "AUDIT_UNAVAILABLE",
                "cannot record the change in the audit topic; nothing was changed; retry later".to_owned(),
            ),
            Self::RejectedForNow(rejected, message) => {
                let (http, reason) = match rejected {
                    RejectedForNow::IndexFull => (StatusCode::SERVICE_UNAVAILABLE, "INDEX_FULL"),
                    RejectedForNow::QuotaExceeded => (StatusCode::TOO_MANY_REQUESTS, "QUOTA_EXCEEDED"),
                };
                parts(Code::ResourceExhausted, http, reason, message)
            }
            Self::CannotWait(error) => {
                let message = format!("{error}; nothing was written; retry later");
                match error {
                    CannotWait::TooMany => parts(
                        Code::ResourceExhausted,
                        StatusCode::TOO_MANY_REQUESTS,
                        "BUSY",
                        message,
                    ),
                    CannotWait::NotFollowing => unavailable("NOT_READY", message),
                    CannotWait::ShuttingDown => unavailable("SHUTTING_DOWN", message),
                }
            }
            Self::RateLimited(_) => parts(
                Code::ResourceExhausted,
                StatusCode::TOO_MANY_REQUESTS,
                "RATE_LIMITED",
                "the caller exceeds scheduler.limits.requests_per_second; nothing was written; retry later"
                    .to_owned(),
            ),
            Self::Overloaded => unavailable(
                "OVERLOADED",
                "the bodies of requests in progress use all of scheduler.limits.request_bytes, or the share of this caller; \
                 nothing was written; retry later"
                    .to_owned(),
            ),
            Self::IndexUnavailable(reason) => unavailable("INDEX_UNAVAILABLE", reason),
            Self::IndexIncomplete => unavailable(
                "INDEX_INCOMPLETE",
                "the index is being rebuilt from Kafka; retry later".to_owned(),
            ),
        }
    }

    /// When to send the same request again. `None` if that is pointless, or could repeat its effect.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RejectedForNow(..) => Some(RETRY_AFTER),
            Self::RateLimited(wait) => Some(*wait),
            Self::Control(error) => error.retry_after(),
            Self::Refused(refusal) => (refusal.reason() == Reason::KeysUnavailable).then_some(SOON),
            Self::KafkaUnavailable(_)
            | Self::NotRecorded
            | Self::CannotWait(_)
            | Self::Overloaded
            | Self::IndexUnavailable(_)
            | Self::IndexIncomplete => Some(SOON),
            Self::Invalid(_)
            | Self::Conflict { .. }
            | Self::Rejected(_)
            | Self::UnknownJob(_)
            | Self::Schedule(_)
            | Self::Pending(..)
            | Self::Unconfirmed(_)
            | Self::UnconfirmedAct(..) => None,
        }
    }

    /// The error as a gRPC status.
    pub(crate) fn into_status(self) -> Status {
        let retry_after = self.retry_after();
        if let (Self::Refused(refusal), None) = (&self, retry_after) {
            return identity::grpc::status(refusal);
        }
        if let Self::Invalid(failure) = &self
            && let Some(field) = Field::of(failure)
            && !is_unknown_app(failure)
        {
            let name = field.name(Format::Protobuf);
            let problem = failure.message.strip_prefix(&format!("`{name}` "));
            let code = ("code", failure.code.clone());
            let problem = problem.unwrap_or(&failure.message);
            return error::invalid(&name, problem, "REQUEST_INVALID", [code]);
        }
        let parts = self.parts();
        if let Some(after) = retry_after {
            return error::retry_later(parts.grpc, parts.message, &parts.reason.to_uppercase(), after);
        }
        let job = parts.job.map(|id| ("job_id", id.to_string()));
        let schedule = parts.schedule.map(|id| ("schedule_id", id));
        let position = parts.position.map(|at| ("position", at.to_string()));
        let details = job.into_iter().chain(schedule).chain(position);
        error::status(parts.grpc, parts.message, parts.reason, details)
    }

    /// The error of one job of a batch.
    pub(crate) fn into_job_error(self) -> v1::JobError {
        let retry_after = self.retry_after();
        let (error_code, field) = match &self {
            Self::Invalid(failure) => (
                failure.code.clone(),
                Field::of(failure).map(|field| field.name(Format::Protobuf).into_owned()),
            ),
            _ => (String::new(), None),
        };
        let parts = self.parts();
        v1::JobError {
            code: parts.grpc.into(),
            message: parts.message,
            reason: parts.reason.to_uppercase(),
            error_code,
            field: field.unwrap_or_default(),
            job_id: parts.job.map(|id| id.to_string()).unwrap_or_default(),
            position: parts.position.map(|at| at.to_string()).unwrap_or_default(),
            retry_after: retry_after.map(|after| prost_types::Duration {
                seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                nanos: i32::try_from(after.subsec_nanos()).unwrap_or(0),
            }),
        }
    }

    /// The error as a problem document.
    pub(crate) fn into_problem(self) -> Problem {
        let (code, field) = match &self {
            Self::Invalid(failure) => (
                Some(failure.code.clone()),
                Field::of(failure).map(|field| field.0.into()),
            ),
            _ => (None, None),
        };
        let job = match &self {
            Self::Conflict { job, .. } => Some(JobView::from((**job).clone())),
            _ => None,
        };
        let schedule = match &self {
            Self::Schedule(error) => error.schedule().cloned().map(ScheduleView::from),
            _ => None,
        };
        let retry_after = self.retry_after();
        let challenge = match &self {
            Self::Refused(refusal) if retry_after.is_none() => refusal
                .challenge()
                .and_then(|challenge| Some((WWW_AUTHENTICATE, challenge.try_into().ok()?))),
            _ => None,
        };
        let parts = self.parts();
        let code = code.unwrap_or_else(|| parts.reason.to_lowercase());
        let mut problem = Problem::new(parts.http, &code, &parts.message);
        problem.header = challenge.map(Box::new);
        let body = &mut *problem.body;
        body.field = field;
        body.job_id = parts.job.map(|id| id.to_string());
        body.job = job;
        body.schedule_id = parts.schedule;
        body.schedule = schedule;
        body.position = parts.position.map(|at| at.to_string());
        body.retry_after = retry_after.map(whole_seconds);
        problem
    }
}

/// Rounded up, because `Retry-After` has whole seconds.
fn whole_seconds(duration: Duration) -> u32 {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

impl<E: Into<RequestError>> From<E> for Problem {
    fn from(error: E) -> Self {
        error.into().into_problem()
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        error.into_status()
    }
}

fn refused(refusal: &Refusal) -> ErrorParts {
    let status = identity::grpc::status(refusal);
    let http = match status.code() {
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::UNAUTHORIZED,
    };
    let message = refusal.message().to_owned();
    ErrorParts::new(status.code(), http, refusal.reason().as_str(), message)
}

fn invalid(failure: Failure) -> ErrorParts {
    let (grpc, reason) = if is_unknown_app(&failure) {
        (Code::NotFound, "APPLICATION_UNKNOWN")
    } else {
        (Code::InvalidArgument, "REQUEST_INVALID")
    };
    let http = match failure.code.as_str() {
        NOT_JSON => StatusCode::BAD_REQUEST,
        CONTENT_TYPE => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        _ => StatusCode::UNPROCESSABLE_ENTITY,
    };
    ErrorParts::new(grpc, http, reason, failure.message)
}

fn is_unknown_app(failure: &Failure) -> bool {
    failure.class == ErrorClass::Permanent && Field::of(failure) == Some(Field("appName"))
}

#[cfg(test)]
mod tests {
    use redeliver_core::{Position, Timestamp};
    use tonic_types::StatusExt as _;

    use super::*;
    use crate::api::error_parts::NoOutcome;

    fn id() -> JobId {
        JobId::new(Timestamp::from_millis(1_763_722_800_000), 1, 2)
    }

    #[test]
    fn invalid_field_is_named_by_protocol() {
        let failure = || Field("idempotencyKey").malformed(Format::Protobuf, "is empty; omit it instead");
        let status = RequestError::Invalid(failure()).into_status();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "idempotency_key: is empty; omit it instead");
        let problem = RequestError::Invalid(failure()).into_problem();
        assert_eq!(problem.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(
            (problem.body.field.as_deref(), &*problem.body.code),
            (Some("idempotencyKey"), "request.idempotencyKey")
        );
        let app = Field("appName").rejected(Format::Protobuf, "is `x`, which is not an application");
        assert_eq!(
            RequestError::Invalid(app.clone()).into_status().code(),
            Code::NotFound
        );
        assert_eq!(
            RequestError::Invalid(app).into_problem().status,
            StatusCode::UNPROCESSABLE_ENTITY
        );
    }

    #[test]
    fn temporary_rejections_permit_retries() {
        for (rejected, reason, problem_status, problem_code) in [
            (
                RejectedForNow::IndexFull,
                "INDEX_FULL",
                StatusCode::SERVICE_UNAVAILABLE,
                "index_full",
            ),
            (
                RejectedForNow::QuotaExceeded,
                "QUOTA_EXCEEDED",
                StatusCode::TOO_MANY_REQUESTS,
                "quota_exceeded",
            ),
        ] {
            let failure = || rejected.failure("full".to_owned());
            let status = RequestError::from(failure()).into_status();
            assert_eq!(
                (status.code(), status.message()),
                (Code::ResourceExhausted, "full")
            );
            assert_eq!(error::reason(&status).as_deref(), Some(reason));
            let problem = RequestError::from(failure()).into_problem();
            assert_eq!(
                (problem.status, &*problem.body.code),
                (problem_status, problem_code)
            );
            assert_eq!(RequestError::from(failure()).retry_after(), Some(RETRY_AFTER));
        }
    }

    #[test]
    fn unknown_outcome_forbids_retries() {
        let position = || Position {
            topic: "ingest".into(),
            partition: 1,
            offset: 41,
        };
        let pending = |job| {
            let reason = NoOutcome::Timeout(Duration::from_secs(10));
            let position = position();
            RequestError::Pending(job, Pending { position, reason })
        };
        let status = pending(PendingJob::Id(id())).into_status();
        assert_eq!(status.code(), Code::Unknown);
        let says = "is in Kafka (ingest/1/41) and will take effect";
        assert!(status.message().contains(says), "{}", status.message());
        assert_eq!(error::reason(&status).as_deref(), Some("PENDING"));
        assert_eq!(error::metadata(&status)["position"], position().to_string());
        assert_eq!(pending(PendingJob::Key).into_job_error().position, "ingest/1/41");
        assert!(status.message().contains(&id().to_string()));
        assert!(status.get_details_retry_info().is_none());
        let problem = pending(PendingJob::Id(id())).into_problem();
        assert_eq!(problem.status, StatusCode::FAILED_DEPENDENCY);
        assert_eq!(
            (&*problem.body.code, problem.body.position.as_deref()),
            ("pending", Some("ingest/1/41"))
        );
        assert_eq!(problem.body.job_id.as_deref(), Some(&*id().to_string()));
        assert!(problem.body.retry_after.is_none());
        // A key that was in use belongs to another job.
        let keyed = pending(PendingJob::New(id())).into_problem();
        assert_eq!(keyed.body.job_id.as_deref(), Some(&*id().to_string()));
        let says = "unless the idempotency key was in use: then no job has this id";
        assert!(keyed.body.detail.contains(says), "{}", keyed.body.detail);
        let unconfirmed = RequestError::Unconfirmed("timed out".to_owned()).into_status();
        assert_eq!(unconfirmed.code(), Code::Unknown);
        // An act has no idempotency key.
        let unconfirmed = RequestError::UnconfirmedAct(id(), "timed out".to_owned());
        for act in [pending(PendingJob::OfAct(id())), unconfirmed] {
            let problem = act.into_problem();
            assert_eq!(problem.status, StatusCode::FAILED_DEPENDENCY);
            assert_eq!(problem.body.job_id.as_deref(), Some(&*id().to_string()));
            assert!(
                problem.body.detail.contains("it can be repeated"),
                "{}",
                problem.body.detail
            );
        }
    }

    #[test]
    fn retryable_errors_say_when() {
        let errors: [fn() -> RequestError; 9] = [
            || RequestError::RateLimited(Duration::from_millis(20)),
            || RequestError::Overloaded,
            || CannotWait::TooMany.into(),
            || CannotWait::NotFollowing.into(),
            || CannotWait::ShuttingDown.into(),
            || RequestError::RejectedForNow(RejectedForNow::IndexFull, "full".to_owned()),
            || RequestError::IndexUnavailable("down".to_owned()),
            || RequestError::IndexIncomplete,
            || RequestError::KafkaUnavailable("no".to_owned()),
        ];
        for error in errors {
            let status = error().into_status();
            assert!(status.get_details_retry_info().is_some(), "{status:?}");
            let problem = error().into_problem();
            assert!(problem.body.retry_after.unwrap() > 0);
            assert_eq!(
                error::reason(&status).unwrap().to_lowercase(),
                *problem.body.code,
                "{status:?}"
            );
        }
    }
}
