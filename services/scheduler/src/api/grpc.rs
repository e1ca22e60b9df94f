//! `redeliver.v1.JobService`.

use std::sync::Arc;

use redeliver_core::{Failure, Headers};
use redeliver_proto::convert::from_state;
use redeliver_proto::v1::job_service_server::JobService;
use redeliver_proto::{auth, v1};
use redeliver_service::identity::grpc::caller;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use super::changes::{Asked, read_reason};
use super::error::RequestError;
use super::jobs::{Accepted, Jobs, trace_headers};
use super::list::{JobPage, ListJobs};
use crate::index::Index;
use crate::job::JobId;
use crate::request::{Field, Format, JobRef, read_id, read_job_ref, read_timestamp, read_when};

/// The gRPC service.
pub(crate) struct Service<I>(Arc<Jobs<I>>);

impl<I> Service<I> {
    pub(crate) fn new(jobs: Arc<Jobs<I>>) -> Self {
        Self(jobs)
    }
}

pub(super) fn trace(metadata: &MetadataMap) -> Headers {
    trace_headers(|name| metadata.get(name).map(MetadataValue::as_bytes))
}

/// What comes with a request for a change.
pub(super) fn asked(metadata: &MetadataMap) -> Result<Asked, Status> {
    let encoded = metadata
        .get(auth::REASON)
        .map_or(&b""[..], MetadataValue::as_bytes);
    let reason = read_reason(encoded).map_err(|failure| RequestError::from(failure).into_status())?;
    let trace = trace(metadata);
    Ok(Asked { trace, reason })
}

fn parse_id(text: &str) -> Result<JobId, Status> {
    read_id(Field("id"), Format::Protobuf, text).map_err(|failure| RequestError::from(failure).into_status())
}

/// The application of a request; `None` if it names none.
pub(super) fn named(app: &str) -> Option<&str> {
    (!app.is_empty()).then_some(app)
}

fn list_jobs(request: v1::ListJobsRequest) -> Result<ListJobs, Failure> {
    let state = v1::JobState::try_from(request.state).map_err(|_| {
        let problem = format!(
            "is {}; expected 1 (scheduled), or 0 for the default",
            request.state
        );
        Field("state").malformed(Format::Protobuf, &problem)
    })?;
    let time = |field, time: Option<prost_types::Timestamp>| {
        time.map(|time| read_timestamp(field, &time)).transpose()
    };
    Ok(ListJobs {
        app: named(&request.app).map(str::to_owned),
        due_from: time(Field("dueFrom"), request.due_from)?,
        due_until: time(Field("dueUntil"), request.due_until)?,
        state: from_state(state),
        page_size: request.page_size,
        page_token: request.page_token,
    })
}

fn parse_job_ref(id: &str, app: &str, key: &str) -> Result<JobRef, Status> {
    let job = read_job_ref(Field("id"), Format::Protobuf, id, app, key);
    job.map_err(|failure| RequestError::from(failure).into_status())
}

fn schedule_response(accepted: Accepted) -> v1::ScheduleJobResponse {
    let (outcome, job) = match accepted.result {
        Some((outcome, job)) => (outcome, Some(job)),
        None => (v1::Outcome::Unspecified, None),
    };
    v1::ScheduleJobResponse {
        id: accepted.id.to_string(),
        outcome: outcome.into(),
        job,
    }
}

#[tonic::async_trait]
impl<I: Index> JobService for Service<I> {
    async fn schedule_job(
        &self,
        request: Request<v1::ScheduleJobRequest>,
    ) -> Result<Response<v1::ScheduleJobResponse>, Status> {
        let (caller, trace) = (caller(&request)?, trace(request.metadata()));
        let v1::ScheduleJobRequest { job, no_wait } = request.into_inner();
        let scheduled = self
            .0
            .schedule(
                &caller,
                job.unwrap_or_default(),
                Format::Protobuf,
                !no_wait,
                trace,
            )
            .await;
        let accepted = scheduled.map_err(RequestError::into_status)?;
        Ok(Response::new(schedule_response(accepted)))
    }

    async fn batch_schedule_jobs(
        &self,
        request: Request<v1::BatchScheduleJobsRequest>,
    ) -> Result<Response<v1::BatchScheduleJobsResponse>, Status> {
        let (caller, trace) = (caller(&request)?, trace(request.metadata()));
        let v1::BatchScheduleJobsRequest { jobs, no_wait } = request.into_inner();
        let checked = self.0.check_batch(&caller, jobs.len(), Format::Protobuf);
        checked.map_err(RequestError::into_status)?;
        let specs = jobs.into_iter().map(Ok).collect();
        let batch = self
            .0
            .schedule_batch(&caller, specs, Format::Protobuf, !no_wait, trace)
            .await;
        let results = batch.map_err(RequestError::into_status)?.into_iter();
        let results = results.map(|result| v1::BatchScheduleResult {
            result: Some(match result {
                Ok(accepted) => v1::batch_schedule_result::Result::Scheduled(schedule_response(accepted)),
                Err(error) => v1::batch_schedule_result::Result::Error(error.into_job_error()),
            }),
        });
        let results = results.collect();
        Ok(Response::new(v1::BatchScheduleJobsResponse { results }))
    }

    async fn get_job(&self, request: Request<v1::GetJobRequest>) -> Result<Response<v1::Job>, Status> {
        let id = parse_id(&request.get_ref().id)?;
        let job = self.0.get(&caller(&request)?, id).await;
        job.map(Response::new).map_err(RequestError::into_status)
    }

    async fn cancel_job(
        &self,
        request: Request<v1::CancelJobRequest>,
    ) -> Result<Response<v1::CancelJobResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::CancelJobRequest {
            id,
            app,
            idempotency_key,
        } = request.into_inner();
        let job = parse_job_ref(&id, &app, &idempotency_key)?;
        let cancelled = self.0.cancel(&caller, job, Format::Protobuf, asked).await;
        let v1::CommandOutcome { outcome, job, .. } = cancelled.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::CancelJobResponse { outcome, job }))
    }

    async fn reschedule_job(
        &self,
        request: Request<v1::RescheduleJobRequest>,
    ) -> Result<Response<v1::RescheduleJobResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::RescheduleJobRequest {
            id,
            when,
            app,
            idempotency_key,
        } = request.into_inner();
        let job = parse_job_ref(&id, &app, &idempotency_key)?;
        let when = when.map(|when| match when {
            v1::reschedule_job_request::When::ScheduledTime(time) => {
                v1::reschedule_job::When::ScheduledTime(time)
            }
            v1::reschedule_job_request::When::Delay(delay) => v1::reschedule_job::When::Delay(delay),
        });
        let when = read_when(when.as_ref()).map_err(|failure| RequestError::from(failure).into_status())?;
        let rescheduled = self
            .0
            .reschedule(&caller, job, when, Format::Protobuf, asked)
            .await;
        let v1::CommandOutcome { outcome, job, .. } = rescheduled.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::RescheduleJobResponse { outcome, job }))
    }

    async fn act_on_long_wait(
        &self,
        request: Request<v1::ActOnLongWaitRequest>,
    ) -> Result<Response<v1::ActOnLongWaitResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::ActOnLongWaitRequest { id, action } = request.into_inner();
        let act = v1::ActOnLongWait {
            id,
            action,
            ..v1::ActOnLongWait::default()
        };
        let acted = self.0.act_on_wait(&caller, act, Format::Protobuf, asked).await;
        let v1::CommandOutcome { outcome, job, .. } = acted.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::ActOnLongWaitResponse { outcome, job }))
    }

    async fn list_jobs(
        &self,
        request: Request<v1::ListJobsRequest>,
    ) -> Result<Response<v1::ListJobsResponse>, Status> {
        let caller = caller(&request)?;
        let list =
            list_jobs(request.into_inner()).map_err(|failure| RequestError::from(failure).into_status())?;
        let page = self.0.list(&caller, &list, Format::Protobuf).await;
        let JobPage {
            jobs,
            next_page_token,
        } = page.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::ListJobsResponse {
            jobs,
            next_page_token,
        }))
    }

    async fn get_stats(&self, request: Request<v1::GetStatsRequest>) -> Result<Response<v1::Stats>, Status> {
        let caller = caller(&request)?;
        let v1::GetStatsRequest { minutes, app } = request.into_inner();
        let stats = self
            .0
            .stats(&caller, named(&app), minutes, Format::Protobuf)
            .await;
        stats.map(Response::new).map_err(RequestError::into_status)
    }

    async fn list_applications(
        &self,
        request: Request<v1::ListApplicationsRequest>,
    ) -> Result<Response<v1::ListApplicationsResponse>, Status> {
        let applications = self.0.applications(&caller(&request)?).await;
        let applications = applications.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::ListApplicationsResponse { applications }))
    }
}
