//! `redeliver.v1.JobService`.

use std::sync::Arc;

use redeliver_proto::convert::from_state;
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_server::JobService;
use redeliver_service::grpc::Reply;
use tonic::{Request, Response};

use super::call::Call;
use super::error::RequestError;
use super::jobs::{Accepted, Jobs};
use super::list::{JobPage, ListJobs};
use crate::index::Index;
use crate::request::{Field, Format, JobRef, read_id, read_job_ref, read_timestamp, read_when};

/// The gRPC service.
pub(crate) struct Service<I>(Arc<Jobs<I>>);

impl<I> Service<I> {
    pub(crate) fn new(jobs: Arc<Jobs<I>>) -> Self {
        Self(jobs)
    }
}

/// The application of a request; `None` if it names none.
pub(super) fn named(app: &str) -> Option<&str> {
    (!app.is_empty()).then_some(app)
}

fn list_jobs(request: v1::ListJobsRequest) -> Result<ListJobs, RequestError> {
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

fn parse_job_ref(id: &str, app: &str, key: &str) -> Result<JobRef, RequestError> {
    Ok(read_job_ref(Field("id"), Format::Protobuf, id, app, key)?)
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
    async fn schedule_job(&self, request: Request<v1::ScheduleJobRequest>) -> Reply<v1::ScheduleJobResponse> {
        let (call, v1::ScheduleJobRequest { job, no_wait }) = Call::of(request)?;
        let accepted = self.0.schedule(&call, job.unwrap_or_default(), !no_wait).await?;
        Ok(Response::new(schedule_response(accepted)))
    }

    async fn batch_schedule_jobs(
        &self,
        request: Request<v1::BatchScheduleJobsRequest>,
    ) -> Reply<v1::BatchScheduleJobsResponse> {
        let (call, v1::BatchScheduleJobsRequest { jobs, no_wait }) = Call::of(request)?;
        self.0.check_batch(&call, jobs.len())?;
        let specs = jobs.into_iter().map(Ok).collect();
        let results = self.0.schedule_batch(&call, specs, !no_wait).await.into_iter();
        let results = results.map(|result| v1::BatchScheduleResult {
            result: Some(match result {
                Ok(accepted) => v1::batch_schedule_result::Result::Scheduled(schedule_response(accepted)),
                Err(error) => v1::batch_schedule_result::Result::Error(error.into_job_error()),
            }),
        });
        let results = results.collect();
        Ok(Response::new(v1::BatchScheduleJobsResponse { results }))
    }

    async fn get_job(&self, request: Request<v1::GetJobRequest>) -> Reply<v1::Job> {
        let (call, v1::GetJobRequest { id }) = Call::of(request)?;
        let id = read_id(Field("id"), Format::Protobuf, &id).map_err(RequestError::from)?;
        Ok(Response::new(self.0.get(&call, id).await?))
    }

    async fn cancel_job(&self, request: Request<v1::CancelJobRequest>) -> Reply<v1::CancelJobResponse> {
        let (call, request) = Call::of(request)?;
        let job = parse_job_ref(&request.id, &request.app, &request.idempotency_key)?;
        let v1::CommandOutcome { outcome, job, .. } = self.0.cancel(&call, &job).await?;
        Ok(Response::new(v1::CancelJobResponse { outcome, job }))
    }

    async fn reschedule_job(
        &self,
        request: Request<v1::RescheduleJobRequest>,
    ) -> Reply<v1::RescheduleJobResponse> {
        let (call, request) = Call::of(request)?;
        let job = parse_job_ref(&request.id, &request.app, &request.idempotency_key)?;
        let when = request.when.map(|when| match when {
            v1::reschedule_job_request::When::ScheduledTime(time) => {
                v1::reschedule_job::When::ScheduledTime(time)
            }
            v1::reschedule_job_request::When::Delay(delay) => v1::reschedule_job::When::Delay(delay),
        });
        let when = read_when(when.as_ref()).map_err(RequestError::from)?;
        let v1::CommandOutcome { outcome, job, .. } = self.0.reschedule(&call, &job, when).await?;
        Ok(Response::new(v1::RescheduleJobResponse { outcome, job }))
    }

    async fn act_on_long_wait(
        &self,
        request: Request<v1::ActOnLongWaitRequest>,
    ) -> Reply<v1::ActOnLongWaitResponse> {
        let (call, v1::ActOnLongWaitRequest { id, action }) = Call::of(request)?;
        let act = v1::ActOnLongWait {
            id,
            action,
            ..v1::ActOnLongWait::default()
        };
        let v1::CommandOutcome { outcome, job, .. } = self.0.act_on_wait(&call, act).await?;
        Ok(Response::new(v1::ActOnLongWaitResponse { outcome, job }))
    }

    async fn list_jobs(&self, request: Request<v1::ListJobsRequest>) -> Reply<v1::ListJobsResponse> {
        let (call, request) = Call::of(request)?;
        let JobPage {
            jobs,
            next_page_token,
        } = self.0.list(&call, &list_jobs(request)?).await?;
        Ok(Response::new(v1::ListJobsResponse {
            jobs,
            next_page_token,
        }))
    }

    async fn get_stats(&self, request: Request<v1::GetStatsRequest>) -> Reply<v1::Stats> {
        let (call, v1::GetStatsRequest { minutes, app }) = Call::of(request)?;
        let stats = self.0.stats(&call, named(&app), minutes).await?;
        Ok(Response::new(stats))
    }

    async fn list_applications(
        &self,
        request: Request<v1::ListApplicationsRequest>,
    ) -> Reply<v1::ListApplicationsResponse> {
        let (call, _) = Call::of(request)?;
        let applications = self.0.applications(&call).await?;
        Ok(Response::new(v1::ListApplicationsResponse { applications }))
    }
}
