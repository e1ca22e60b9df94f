//! A client for the gRPC API of the scheduler.

use bytes::Bytes;
use redeliver_core::job::{JobId, JobState, Priority};
use redeliver_core::{Headers, Timestamp};
use redeliver_proto::convert::{from_headers, from_priority, from_state, from_timestamp, to_timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use tonic::{Code, Request, Response, Status};

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::request::{JobRequest, When};

/// Schedules, looks up, lists, cancels and reschedules jobs. Clones share one connection.
#[derive(Clone, Debug)]
pub struct JobClient {
    service: JobServiceClient<Connection>,
    url: String,
}

/// The current state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The id.
    pub id: JobId,
    /// The application.
    pub app: String,
    /// The state.
    pub state: JobState,
    /// The priority.
    pub priority: Priority,
    /// The due time.
    pub scheduled_time: Timestamp,
    /// When the scheduler accepted the request.
    pub accepted_at: Timestamp,
    /// Starts at 1 and increases each time the job is rescheduled or another request takes its place.
    pub revision: u32,
    /// The idempotency key of the request, if it has one.
    pub idempotency_key: Option<String>,
    /// The request id; the id of the job if the client set none.
    pub request_id: String,
    /// The value of the record to dispatch; empty after the end of the job.
    pub data: Bytes,
    /// The key of the record to dispatch.
    pub key: Option<Bytes>,
    /// The headers of the record to dispatch.
    pub headers: Headers,
    /// The topic to which the job is dispatched; `None` if the scheduler did not return it.
    pub topic: Option<String>,
    /// When the job was dispatched, cancelled or expired.
    pub ended_at: Option<Timestamp>,
    /// The job is not dispatched after this time. `None` if it does not expire, or only after the year 9999.
    pub expires_at: Option<Timestamp>,
    /// Whether it is a failed record of the pipeline [`app`](Job::app) that waits longer than its longest tier. Only lists contain them.
    pub is_long_wait: bool,
    /// The id of the occurrence for which a recurring schedule has created the job, such as `nightly@2026-11-24T02:30:00.000Z`; `None`
    /// for other jobs.
    pub occurrence: Option<String>,
}

/// Which waiting jobs to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListJobs {
    /// Only jobs of this application, or long waits of this pipeline. Default: all.
    pub app: Option<String>,
    /// Only jobs that are due at or after this time.
    pub due_from: Option<Timestamp>,
    /// Only jobs that are due before this time.
    pub due_until: Option<Timestamp>,
    /// The maximum number of jobs of a page, at most 1000; 0 means 100.
    pub page_size: u16,
    /// [`JobPage::next_page_token`] of the previous page. Empty: the first page.
    pub page_token: String,
}

/// A page of jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPage {
    /// The jobs without key, data and headers, those that are due next first.
    pub jobs: Vec<Job>,
    /// The token of the next page; `None` on the last page.
    pub next_page_token: Option<String>,
}

/// The response to an accepted request.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// The outcome of cancelling or rescheduling a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobOutcome {
    /// The job is cancelled and will never be dispatched.
    Cancelled,
    /// The job has a new due time.
    Rescheduled,
    /// The job was already dispatched.
    AlreadyDispatched,
    /// The job was already cancelled.
    AlreadyCancelled,
    /// The job was already expired.
    Expired,
    /// The job of the idempotency key has ended and is no longer kept: it was dispatched, cancelled or expired.
    Ended,
    /// No job has this id or idempotency key, or the job of this id has ended and is no longer kept.
    Unknown,
}

impl JobOutcome {
    /// The name of the outcome in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Rescheduled => "rescheduled",
            Self::AlreadyDispatched => "already_dispatched",
            Self::AlreadyCancelled => "already_cancelled",
            Self::Expired => "expired",
            Self::Ended => "ended",
            Self::Unknown => "unknown",
        }
    }
}

/// The final answer to cancelling or rescheduling a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The outcome.
    pub outcome: JobOutcome,
    /// The id of the job; `None` if it is unknown.
    pub id: Option<JobId>,
    /// The job after the command; `None` if it is unknown, or if it has ended and the scheduler no longer keeps more than its id.
    pub job: Option<Job>,
}

/// The number of scheduled jobs, by due time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStats {
    /// The number of jobs that are scheduled.
    pub scheduled: u64,
    /// The number of jobs that are due and not dispatched yet.
    pub due: u64,
    /// The earliest due time.
    pub next_due: Option<Timestamp>,
    /// The number of jobs due in each of the next minutes.
    pub per_minute: Vec<u64>,
    /// The number of jobs due after those minutes.
    pub later: u64,
}

impl JobClient {
    /// The maximum number of jobs of a batch.
    pub const MAX_BATCH: usize = 1_000;

    /// Connects to a scheduler.
    ///
    /// # Errors
    /// If the endpoint is invalid or the scheduler cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: JobServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Schedules a job. When this returns, the job is accepted and durable.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`] if a different request used the same idempotency key, [`Code::NotFound`] for an unknown
    /// application, [`Code::InvalidArgument`] for an invalid field.
    pub async fn schedule(&self, job: &JobRequest) -> Result<Scheduled, ClientError> {
        self.send(job, false).await?.try_into()
    }

    /// Like [`JobClient::schedule`], but returns as soon as the request is written to Kafka. The job has the returned
    /// id, unless the request is a duplicate, takes the place of another one, or is rejected.
    ///
    /// # Errors
    /// If the request is invalid or cannot be written.
    pub async fn schedule_without_waiting(&self, job: &JobRequest) -> Result<JobId, ClientError> {
        id(&self.send(job, true).await?.id)
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

    async fn send(&self, job: &JobRequest, no_wait: bool) -> Result<v1::ScheduleJobResponse, ClientError> {
        let mut request = Request::new(v1::ScheduleJobRequest {
            job: Some(job.to_spec()?),
            no_wait,
        });
        if let Some(trace) = job.trace_context() {
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
        self.answer(self.service.clone().schedule_job(request).await)
            .await
    }

    /// Gets a job; `None` if it is unknown.
    ///
    /// # Errors
    /// If the scheduler is unavailable.
    pub async fn get(&self, id: JobId) -> Result<Option<Job>, ClientError> {
        let request = v1::GetJobRequest { id: id.to_string() };
        match self.service.clone().get_job(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            answer => Job::try_from(self.answer(answer).await?).map(Some),
        }
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
        let answer = self.service.clone().cancel_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
    }

    /// Like [`JobClient::cancel`], for the newest job of an application with this idempotency key, as long as the key is in use: by
    /// default for 24 hours after its newest request was accepted.
    ///
    /// # Errors
    /// Like [`JobClient::cancel`], and [`Code::NotFound`] for an unknown application.
    pub async fn cancel_by_key(&self, app: &str, key: &str) -> Result<Answer, ClientError> {
        let request = v1::CancelJobRequest {
            app: app.to_owned(),
            idempotency_key: key.to_owned(),
            ..v1::CancelJobRequest::default()
        };
        let answer = self.service.clone().cancel_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
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
        let answer = self.service.clone().reschedule_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
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
        let answer = self.service.clone().reschedule_job(request).await;
        let answer = self.answer(answer).await?;
        answer_of(answer.outcome(), answer.job)
    }

    /// Lists a page of the waiting jobs.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`] for an invalid range or token. [`Code::Unavailable`] while the index of the scheduler lacks jobs, for
    /// example while it is rebuilt.
    pub async fn list(&self, list: &ListJobs) -> Result<JobPage, ClientError> {
        let request = v1::ListJobsRequest {
            app: list.app.clone().unwrap_or_default(),
            due_from: list.due_from.map(to_timestamp),
            due_until: list.due_until.map(to_timestamp),
            state: v1::JobState::Scheduled.into(),
            page_size: i32::from(list.page_size),
            page_token: list.page_token.clone(),
        };
        let answer = self.service.clone().list_jobs(request).await;
        let answer = self.answer(answer).await?;
        let jobs = answer.jobs.into_iter().map(Job::try_from);
        Ok(JobPage {
            jobs: jobs.collect::<Result<_, _>>()?,
            next_page_token: text(answer.next_page_token),
        })
    }

    /// Counts the scheduled jobs of an application, or of all (`None`), in total and for each of the next `minutes` (at most 1440; 0
    /// means 60).
    ///
    /// # Errors
    /// [`Code::Unavailable`] while the index of the scheduler lacks jobs, for example while it is rebuilt.
    pub async fn stats(&self, app: Option<&str>, minutes: u32) -> Result<JobStats, ClientError> {
        let request = v1::GetStatsRequest {
            minutes,
            app: app.unwrap_or_default().to_owned(),
        };
        let answer = self.service.clone().get_stats(request).await;
        let stats = self.answer(answer).await?;
        Ok(JobStats {
            scheduled: stats.scheduled,
            due: stats.due,
            next_due: time(stats.next_due),
            per_minute: stats.per_minute,
            later: stats.later,
        })
    }

    async fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
        error::answer(&self.url, answer).await
    }
}

fn answer_of(outcome: v1::Outcome, job: Option<v1::Job>) -> Result<Answer, ClientError> {
    let outcome = match outcome {
        v1::Outcome::Cancelled => JobOutcome::Cancelled,
        v1::Outcome::Rescheduled => JobOutcome::Rescheduled,
        v1::Outcome::AlreadyDispatched => JobOutcome::AlreadyDispatched,
        v1::Outcome::AlreadyCancelled => JobOutcome::AlreadyCancelled,
        v1::Outcome::Expired => JobOutcome::Expired,
        v1::Outcome::Ended => JobOutcome::Ended,
        v1::Outcome::Unknown => JobOutcome::Unknown,
        // Not an answer to a cancellation or a new due time.
        _ => return Err(ClientError::InvalidResponse("outcome")),
    };
    Ok(Answer {
        outcome,
        id: job.as_ref().map(|job| id(&job.id)).transpose()?,
        job: details(job)?,
    })
}

/// The job of an answer; `None` if the answer contains only what the scheduler knows without the job's record: its id and application.
fn details(job: Option<v1::Job>) -> Result<Option<Job>, ClientError> {
    let job = job.filter(|job| job.state != v1::JobState::Unspecified as i32);
    job.map(Job::try_from).transpose()
}

fn id(text: &str) -> Result<JobId, ClientError> {
    text.parse().map_err(|_| ClientError::InvalidResponse("id"))
}

/// A time of an answer. One that is out of range is as good as none: it must not make the rest of the answer unreadable.
pub(crate) fn time(time: Option<prost_types::Timestamp>) -> Option<Timestamp> {
    from_timestamp(&time?)
}

/// In protobuf, a missing string is empty.
pub(crate) fn text(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

impl TryFrom<v1::ScheduleJobResponse> for Scheduled {
    type Error = ClientError;

    fn try_from(response: v1::ScheduleJobResponse) -> Result<Self, ClientError> {
        Ok(Self {
            id: id(&response.id)?,
            is_duplicate: response.outcome() == v1::Outcome::Duplicate,
            is_replacement: response.outcome() == v1::Outcome::Replaced,
            job: details(response.job)?,
        })
    }
}

impl TryFrom<v1::Job> for Job {
    type Error = ClientError;

    fn try_from(job: v1::Job) -> Result<Self, ClientError> {
        Ok(Self {
            id: id(&job.id)?,
            state: from_state(job.state()).ok_or(ClientError::InvalidResponse("state"))?,
            priority: from_priority(job.priority()),
            scheduled_time: time(job.scheduled_time).ok_or(ClientError::InvalidResponse("scheduled_time"))?,
            accepted_at: time(job.accepted_at).ok_or(ClientError::InvalidResponse("accepted_at"))?,
            ended_at: time(job.ended_at),
            expires_at: time(job.expires_at),
            headers: from_headers(&job.headers),
            idempotency_key: text(job.idempotency_key),
            request_id: job.request_id,
            topic: text(job.topic),
            occurrence: text(job.occurrence),
            is_long_wait: job.long_wait,
            app: job.app,
            revision: job.revision,
            data: job.data,
            key: job.key,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> v1::Job {
        v1::Job {
            id: JobId::new(Timestamp::from_millis(1_763_722_800_123), 3, 4).to_string(),
            app: "sms".to_owned(),
            state: v1::JobState::Dispatched.into(),
            scheduled_time: Some(to_timestamp(Timestamp::from_millis(5))),
            accepted_at: Some(to_timestamp(Timestamp::from_millis(4))),
            ended_at: Some(to_timestamp(Timestamp::from_millis(6))),
            topic: "sms-jobs".to_owned(),
            revision: 2,
            ..v1::Job::default()
        }
    }

    #[test]
    fn missing_job_field_is_none() {
        let job = Job::try_from(sent()).unwrap();
        assert_eq!(
            (job.state, job.priority, job.revision),
            (JobState::Dispatched, Priority::Normal, 2)
        );
        assert_eq!(job.ended_at, Some(Timestamp::from_millis(6)));
        assert_eq!((job.idempotency_key, job.key, job.expires_at), (None, None, None));
        assert_eq!(job.topic.as_deref(), Some("sms-jobs"));
    }

    #[test]
    fn answer_about_forgotten_job_has_id() {
        let known = v1::Job {
            id: sent().id,
            app: "sms".to_owned(),
            ..v1::Job::default()
        };
        let answer = answer_of(v1::Outcome::Ended, Some(known.clone())).unwrap();
        let ended = Answer {
            outcome: JobOutcome::Ended,
            id: known.id.parse().ok(),
            job: None,
        };
        assert_eq!(answer, ended);
        let duplicate = v1::ScheduleJobResponse {
            id: known.id.clone(),
            outcome: v1::Outcome::Duplicate.into(),
            job: Some(known.clone()),
        };
        let scheduled = Scheduled::try_from(duplicate).unwrap();
        assert_eq!((scheduled.id.to_string(), scheduled.job), (known.id, None));
        assert!(scheduled.is_duplicate);
    }

    #[test]
    fn expiry_after_year_9999_is_read() {
        let job = v1::Job {
            expires_at: Some(prost_types::Timestamp {
                seconds: 253_402_300_800,
                nanos: 0,
            }),
            ..sent()
        };
        assert_eq!(Job::try_from(job).unwrap().expires_at, None);
        let job = v1::Job {
            expires_at: Some(to_timestamp(Timestamp::from_millis(7))),
            ..sent()
        };
        let expires = Job::try_from(job).unwrap().expires_at;
        assert_eq!(expires, Some(Timestamp::from_millis(7)));
    }

    #[test]
    fn invalid_response_names_the_field() {
        let cases = [
            (
                v1::Job {
                    id: "x".to_owned(),
                    ..sent()
                },
                "id",
            ),
            (v1::Job { state: 99, ..sent() }, "state"),
            (
                v1::Job {
                    scheduled_time: None,
                    ..sent()
                },
                "scheduled_time",
            ),
            (
                v1::Job {
                    accepted_at: None,
                    ..sent()
                },
                "accepted_at",
            ),
        ];
        for (job, field) in cases {
            let error = Job::try_from(job).unwrap_err();
            assert!(
                matches!(error, ClientError::InvalidResponse(found) if found == field),
                "{error}"
            );
        }
        assert!(answer_of(v1::Outcome::Scheduled, None).is_err());
    }
}
