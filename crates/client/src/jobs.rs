//! A client for the gRPC API of the scheduler.

use redeliver_core::job::JobId;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_proto::v1::{
    self, Application, Job, JobState, ListJobsRequest, ListJobsResponse, LongWaitAction, Outcome, Stats,
};
use tonic::Request;

use crate::endpoint::client;
use crate::error::{ClientError, found};
use crate::request::{JobRequest, When};

client! {
    /// Schedules, looks up, lists, cancels and reschedules jobs. Clones share one connection.
    JobClient(JobServiceClient);

    /// Lists a page of the waiting jobs, without key, data and headers, those that are due next first.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument) for an invalid range or token. [`Code::Unavailable`](crate::Code::Unavailable) while the index of
    /// the scheduler lacks jobs, for example while it is rebuilt.
    list = list_jobs(ListJobsRequest) -> ListJobsResponse;
}

/// The response to an accepted request.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduled {
    /// The id of the job.
    pub id: JobId,
    /// Whether the request is a duplicate; then the job is that of the first request.
    pub is_duplicate: bool,
    /// Whether the request took the place of a waiting job, see [`JobRequest::replace`]. If it has the same priority and topic, it is
    /// the same job with new content; otherwise it is a new one, and the other one is cancelled.
    pub is_replacement: bool,
    /// The job; `None` if it has ended and the scheduler no longer keeps more than its id.
    pub job: Option<Job>,
}

/// The final answer to cancelling or rescheduling a job, or to acting on a long wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The outcome.
    pub outcome: Outcome,
    /// The id of the job; `None` if it is unknown.
    pub id: Option<JobId>,
    /// The job after the command; `None` if it is unknown, or if it has ended and the scheduler no longer keeps more than its id.
    pub job: Option<Job>,
}

impl JobClient {
    /// The maximum number of jobs of a batch.
    pub const MAX_BATCH: usize = 1_000;

    /// Schedules a job. When this returns, the job is accepted and durable.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`](crate::Code::AlreadyExists) if a different request used the same idempotency key, [`Code::NotFound`](crate::Code::NotFound) for an unknown
    /// application, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for an invalid field.
    pub async fn schedule(&self, job: &JobRequest) -> Result<Scheduled, ClientError> {
        let mut request = Request::new(v1::ScheduleJobRequest {
            job: Some(job.to_spec()?),
            no_wait: false,
        });
        if let Some(trace) = &job.trace {
            let pairs = [
                ("traceparent", Some(&trace.traceparent)),
                ("tracestate", trace.tracestate.as_ref()),
            ];
            for (name, value) in pairs {
                // An invalid trace context is dropped: tracing must not make the call fail.
                if let Some(Ok(value)) = value.map(|value| value.parse()) {
                    request.metadata_mut().insert(name, value);
                }
            }
        }
        let answer = self.service.clone().schedule_job(request).await;
        self.answer(answer).await?.try_into()
    }

    /// Schedules up to [`MAX_BATCH`](JobClient::MAX_BATCH) jobs with one call. The results are in the order of the jobs; each job
    /// succeeds or fails on its own, as with [`JobClient::schedule`]. Trace contexts of jobs are not sent.
    ///
    /// # Errors
    /// If the call as a whole fails. Unless the connection was lost, nothing was written then.
    pub async fn schedule_batch(
        &self,
        jobs: &[JobRequest],
    ) -> Result<Vec<Result<Scheduled, ClientError>>, ClientError> {
        let specs: Result<Vec<v1::JobSpec>, _> = jobs.iter().map(JobRequest::to_spec).collect();
        let request = v1::BatchScheduleJobsRequest {
            jobs: specs?,
            no_wait: false,
        };
        let answer = self.service.clone().batch_schedule_jobs(request).await;
        let results = self.answer(answer).await?.results;
        if results.len() != jobs.len() {
            return Err(ClientError::InvalidResponse("results"));
        }
        let read = |result: v1::BatchScheduleResult| match result.result {
            Some(v1::batch_schedule_result::Result::Scheduled(scheduled)) => scheduled.try_into(),
            Some(v1::batch_schedule_result::Result::Error(error)) => Err(error.into()),
            None => Err(ClientError::InvalidResponse("result")),
        };
        Ok(results.into_iter().map(read).collect())
    }

    /// Gets a job; `None` if it is unknown.
    ///
    /// # Errors
    /// If the scheduler is unavailable.
    pub async fn get(&self, id: JobId) -> Result<Option<Job>, ClientError> {
        let request = v1::GetJobRequest { id: id.to_string() };
        found(self.answer(self.service.clone().get_job(request).await).await)
    }

    /// Cancels a job if it is not dispatched yet.
    ///
    /// # Errors
    /// If the scheduler is unavailable. Then it is unknown whether the job was cancelled; the call can be repeated.
    pub async fn cancel(&self, id: JobId) -> Result<Answer, ClientError> {
        let request = v1::CancelJobRequest {
            id: id.to_string(),
            ..v1::CancelJobRequest::default()
        };
        self.cancel_job(request).await
    }

    /// Like [`JobClient::cancel`], for the newest job of an application with this idempotency key, as long as the key is in use: by
    /// default for 24 hours after its newest request was accepted.
    ///
    /// # Errors
    /// Like [`JobClient::cancel`], and [`Code::NotFound`](crate::Code::NotFound) for an unknown application.
    pub async fn cancel_by_key(&self, app: &str, key: &str) -> Result<Answer, ClientError> {
        let request = v1::CancelJobRequest {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            ..v1::CancelJobRequest::default()
        };
        self.cancel_job(request).await
    }

    /// Like [`JobClient::reschedule`], for the job that [`JobClient::cancel_by_key`] would cancel.
    ///
    /// # Errors
    /// Like [`JobClient::cancel_by_key`], and if the new time is out of range.
    pub async fn reschedule_by_key(&self, app: &str, key: &str, when: When) -> Result<Answer, ClientError> {
        let request = v1::RescheduleJobRequest {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            when: Some(when.to_request()?),
            ..v1::RescheduleJobRequest::default()
        };
        self.reschedule_job(request).await
    }

    /// Reschedules a job if it is not dispatched yet.
    ///
    /// # Errors
    /// Like [`JobClient::cancel`], and if the new time is out of range.
    pub async fn reschedule(&self, id: JobId, when: When) -> Result<Answer, ClientError> {
        let request = v1::RescheduleJobRequest {
            id: id.to_string(),
            when: Some(when.to_request()?),
            ..v1::RescheduleJobRequest::default()
        };
        self.reschedule_job(request).await
    }

    async fn cancel_job(&self, request: v1::CancelJobRequest) -> Result<Answer, ClientError> {
        let answer = self.service.clone().cancel_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
    }

    async fn reschedule_job(&self, request: v1::RescheduleJobRequest) -> Result<Answer, ClientError> {
        let answer = self.service.clone().reschedule_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
    }

    /// Retries a record that waits with the scheduler now, or moves it to the dead letters of its pipeline.
    ///
    /// # Errors
    /// If the scheduler is unavailable, or the dead-letter topic is. The call can be repeated.
    pub async fn act_on_long_wait(&self, id: JobId, action: LongWaitAction) -> Result<Answer, ClientError> {
        let request = v1::ActOnLongWaitRequest {
            id: id.to_string(),
            action: action.into(),
        };
        let answer = self.service.clone().act_on_long_wait(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
    }

    /// Counts the scheduled jobs of an application, or of all (`None`), in total and for each of the next `minutes` (at most 1440; 0
    /// means 60).
    ///
    /// # Errors
    /// [`Code::Unavailable`](crate::Code::Unavailable) while the index of the scheduler lacks jobs, for example while it is rebuilt.
    pub async fn stats(&self, app: Option<&str>, minutes: u32) -> Result<Stats, ClientError> {
        let request = v1::GetStatsRequest {
            minutes,
            app: app.unwrap_or_default().to_owned(),
        };
        self.answer(self.service.clone().get_stats(request).await).await
    }

    /// Lists the applications in the configuration of the scheduler, by name, as far as the caller may read their jobs.
    ///
    /// # Errors
    /// As [`JobClient::stats`].
    pub async fn applications(&self) -> Result<Vec<Application>, ClientError> {
        let request = v1::ListApplicationsRequest {};
        let answer = self.service.clone().list_applications(request).await;
        Ok(self.answer(answer).await?.applications)
    }
}

fn answer_of(outcome: Outcome, job: Option<Job>) -> Result<Answer, ClientError> {
    use Outcome::{
        AlreadyCancelled, AlreadyDispatched, Cancelled, Dead, Ended, Expired, Rescheduled, Unknown,
    };
    let answers = [
        Cancelled,
        Dead,
        Rescheduled,
        AlreadyDispatched,
        AlreadyCancelled,
        Expired,
        Ended,
        Unknown,
    ];
    if !answers.contains(&outcome) {
        return Err(ClientError::InvalidResponse("outcome"));
    }
    Ok(Answer {
        outcome,
        id: job.as_ref().map(|job| id(&job.id)).transpose()?,
        job: details(job),
    })
}

/// The job of an answer; `None` if the answer contains only what the scheduler knows without the job's record: its id and application.
fn details(job: Option<Job>) -> Option<Job> {
    job.filter(|job| job.state != JobState::Unspecified as i32)
}

fn id(text: &str) -> Result<JobId, ClientError> {
    text.parse().map_err(|_| ClientError::InvalidResponse("id"))
}

impl TryFrom<v1::ScheduleJobResponse> for Scheduled {
    type Error = ClientError;

    fn try_from(response: v1::ScheduleJobResponse) -> Result<Self, ClientError> {
        Ok(Self {
            id: id(&response.id)?,
            is_duplicate: response.outcome() == Outcome::Duplicate,
            is_replacement: response.outcome() == Outcome::Replaced,
            job: details(response.job),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forgotten_job_has_an_id() {
        let known = Job {
            id: "01KAJQ6Z2B0003000000000A7X".to_owned(),
            app: "sms".to_owned(),
            ..Job::default()
        };
        let answer = answer_of(Outcome::Ended, Some(known.clone())).unwrap();
        let ended = Answer {
            outcome: Outcome::Ended,
            id: known.id.parse().ok(),
            job: None,
        };
        assert_eq!(answer, ended);
        let duplicate = v1::ScheduleJobResponse {
            id: known.id.clone(),
            outcome: Outcome::Duplicate.into(),
            job: Some(known.clone()),
        };
        let scheduled = Scheduled::try_from(duplicate).unwrap();
        assert_eq!((scheduled.id.to_string(), scheduled.job), (known.id, None));
        assert!(scheduled.is_duplicate);
    }

    #[test]
    fn invalid_ids_are_errors() {
        let job = Job {
            id: "x".to_owned(),
            ..Job::default()
        };
        let error = answer_of(Outcome::Cancelled, Some(job)).unwrap_err();
        assert!(matches!(error, ClientError::InvalidResponse("id")), "{error}");
        let error = answer_of(Outcome::Scheduled, None).unwrap_err();
        assert!(
            matches!(error, ClientError::InvalidResponse("outcome")),
            "{error}"
        );
    }
}
