//! The scheduler's gRPC service in plain types.

use bytes::Bytes;
use redeliver_core::job::{JobId, Priority, State};
use redeliver_core::{Headers, Timestamp};
use redeliver_proto::convert::{from_headers, from_priority, from_state, from_timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use tonic::{Code, Request};

use crate::endpoint::{Connection, Endpoint, LARGEST_ANSWER};
use crate::error::ClientError;
use crate::request::{JobRequest, When};

/// Schedules, looks up, cancels and reschedules jobs. Cheap to clone.
#[derive(Clone, Debug)]
pub struct JobClient {
    service: JobServiceClient<Connection>,
    url: String,
}

/// A job as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: JobId,
    /// The application.
    pub app: String,
    /// Where it stands.
    pub state: State,
    /// Which of several due ones goes first.
    pub priority: Priority,
    /// When it is due.
    pub scheduled_time: Timestamp,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// Counts reschedulings, from 1.
    pub revision: u32,
    /// The key of its request, if it had one.
    pub idempotency_key: Option<String>,
    /// The name of its request, if it had one.
    pub request_id: Option<String>,
    /// The value that its topic receives; empty once it has ended.
    pub data: Bytes,
    /// The key that its topic receives.
    pub key: Option<Bytes>,
    /// The headers that its topic receives.
    pub headers: Headers,
    /// Its topic, if the scheduler says so.
    pub topic: Option<String>,
    /// When it was dispatched, cancelled or expired.
    pub ended_at: Option<Timestamp>,
    /// After this it is not dispatched any more.
    pub expires_at: Option<Timestamp>,
}

/// A job that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// Its name.
    pub id: JobId,
    /// Whether the same request had been accepted before, and this is the job of that one.
    pub is_duplicate: bool,
    /// The job as it stands.
    pub job: Option<Job>,
}

/// What became of a command for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobOutcome {
    /// It will never be dispatched.
    Cancelled,
    /// It has a new time.
    Rescheduled,
    /// It had been dispatched before.
    AlreadyDispatched,
    /// It had been cancelled before.
    AlreadyCancelled,
    /// It had expired before.
    Expired,
    /// No job of this id is known; ended ones are forgotten after 24 hours.
    Unknown,
}

impl JobOutcome {
    /// As it is written.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Rescheduled => "rescheduled",
            Self::AlreadyDispatched => "already_dispatched",
            Self::AlreadyCancelled => "already_cancelled",
            Self::Expired => "expired",
            Self::Unknown => "unknown",
        }
    }
}

/// The certain answer to a command for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What became of it.
    pub outcome: JobOutcome,
    /// The job afterwards.
    pub job: Option<Job>,
}

/// How many jobs wait, and until when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStats {
    /// All that wait.
    pub scheduled: u64,
    /// Those whose time is over and that are not dispatched yet.
    pub due: u64,
    /// The time of the first one.
    pub next_due: Option<Timestamp>,
    /// Those due in each of the next minutes.
    pub per_minute: Vec<u64>,
    /// Those due after these.
    pub later: u64,
}

impl JobClient {
    /// Connects to a scheduler.
    ///
    /// # Errors
    /// When the endpoint cannot be used or nobody answers there.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: JobServiceClient::new(connection).max_decoding_message_size(LARGEST_ANSWER),
            url: endpoint.url().to_owned(),
        })
    }

    /// Schedules a job; when this returns it is accepted, durably.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`] when another request had this idempotency key, [`Code::NotFound`] for an unknown
    /// application, [`Code::InvalidArgument`] with the field at fault.
    pub async fn schedule(&self, job: &JobRequest) -> Result<Scheduled, ClientError> {
        let answer = self.send(job, false).await?;
        Ok(Scheduled {
            id: id(&answer.id)?,
            is_duplicate: answer.outcome() == v1::Outcome::Duplicate,
            job: answer.job.map(Job::try_from).transpose()?,
        })
    }

    /// As [`JobClient::schedule`], but returns as soon as the request is safe in Kafka. The id is that of the job
    /// to be, unless the request turns out a duplicate or is rejected.
    ///
    /// # Errors
    /// When the request is not valid or could not be written.
    pub async fn schedule_without_waiting(&self, job: &JobRequest) -> Result<JobId, ClientError> {
        id(&self.send(job, true).await?.id)
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
                // What is no header value is no trace context either, and a trace is worth no failure.
                if let Some(Ok(value)) = value.map(|value| value.parse()) {
                    request.metadata_mut().insert(name, value);
                }
            }
        }
        let answer = self.service.clone().schedule_job(request).await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(|status| self.error(&status))
    }

    /// A job by its id; `None` when none is known.
    ///
    /// # Errors
    /// When the scheduler does not answer.
    pub async fn get(&self, id: JobId) -> Result<Option<Job>, ClientError> {
        let request = v1::GetJobRequest { id: id.to_string() };
        match self.service.clone().get_job(request).await {
            Ok(answer) => Job::try_from(answer.into_inner()).map(Some),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(self.error(&status)),
        }
    }

    /// Cancels a job that has not been dispatched.
    ///
    /// # Errors
    /// When the scheduler does not answer: then it is not known whether the job was cancelled, and the call may
    /// be made again.
    pub async fn cancel(&self, id: JobId) -> Result<Answer, ClientError> {
        let request = v1::CancelJobRequest { id: id.to_string() };
        let answer = self.service.clone().cancel_job(request).await;
        let answer = answer.map_err(|status| self.error(&status))?.into_inner();
        answer_of(answer.outcome(), answer.job)
    }

    /// Gives a job that has not been dispatched a new time.
    ///
    /// # Errors
    /// As [`JobClient::cancel`], and when the time is not possible.
    pub async fn reschedule(&self, id: JobId, when: When) -> Result<Answer, ClientError> {
        let request = v1::RescheduleJobRequest {
            id: id.to_string(),
            when: Some(when.to_request()?),
        };
        let answer = self.service.clone().reschedule_job(request).await;
        let answer = answer.map_err(|status| self.error(&status))?.into_inner();
        answer_of(answer.outcome(), answer.job)
    }

    /// How many jobs wait, and how many are due in each of the next minutes (0: 60; at most 1440).
    ///
    /// # Errors
    /// When the scheduler does not answer.
    pub async fn stats(&self, minutes: u32) -> Result<JobStats, ClientError> {
        let request = v1::GetStatsRequest { minutes };
        let answer = self.service.clone().get_stats(request).await;
        let stats = answer.map_err(|status| self.error(&status))?.into_inner();
        Ok(JobStats {
            scheduled: stats.scheduled,
            due: stats.due,
            next_due: time(stats.next_due, "next_due")?,
            per_minute: stats.per_minute,
            later: stats.later,
        })
    }

    fn error(&self, status: &tonic::Status) -> ClientError {
        ClientError::from_status(&self.url, status)
    }
}

fn answer_of(outcome: v1::Outcome, job: Option<v1::Job>) -> Result<Answer, ClientError> {
    let outcome = match outcome {
        v1::Outcome::Cancelled => JobOutcome::Cancelled,
        v1::Outcome::Rescheduled => JobOutcome::Rescheduled,
        v1::Outcome::AlreadyDispatched => JobOutcome::AlreadyDispatched,
        v1::Outcome::AlreadyCancelled => JobOutcome::AlreadyCancelled,
        v1::Outcome::Expired => JobOutcome::Expired,
        v1::Outcome::Unknown => JobOutcome::Unknown,
        v1::Outcome::Unspecified
        | v1::Outcome::Scheduled
        | v1::Outcome::Duplicate
        | v1::Outcome::Conflict
        | v1::Outcome::Rejected => return Err(ClientError::Answer("outcome")),
    };
    let job = job.map(Job::try_from).transpose()?;
    Ok(Answer { outcome, job })
}

fn id(text: &str) -> Result<JobId, ClientError> {
    text.parse().map_err(|_| ClientError::Answer("id"))
}

/// A time that may be left out.
pub(crate) fn time(
    time: Option<prost_types::Timestamp>,
    field: &'static str,
) -> Result<Option<Timestamp>, ClientError> {
    let read = |time| from_timestamp(&time).ok_or(ClientError::Answer(field));
    time.map(read).transpose()
}

/// A text that is empty when there is none.
pub(crate) fn text(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

impl TryFrom<v1::Job> for Job {
    type Error = ClientError;

    fn try_from(job: v1::Job) -> Result<Self, ClientError> {
        Ok(Self {
            id: id(&job.id)?,
            state: from_state(job.state()).ok_or(ClientError::Answer("state"))?,
            priority: from_priority(job.priority()),
            scheduled_time: time(job.scheduled_time, "scheduled_time")?
                .ok_or(ClientError::Answer("scheduled_time"))?,
            accepted_at: time(job.accepted_at, "accepted_at")?.ok_or(ClientError::Answer("accepted_at"))?,
            ended_at: time(job.ended_at, "ended_at")?,
            expires_at: time(job.expires_at, "expires_at")?,
            headers: from_headers(&job.headers),
            idempotency_key: text(job.idempotency_key),
            request_id: text(job.request_id),
            topic: text(job.topic),
            app: job.app,
            revision: job.revision,
            data: job.data,
            key: job.key,
        })
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::convert::to_timestamp;

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
    fn a_job_is_read_and_what_is_left_out_is_none() {
        let job = Job::try_from(sent()).unwrap();
        assert_eq!(
            (job.state, job.priority, job.revision),
            (State::Dispatched, Priority::Normal, 2)
        );
        assert_eq!(job.ended_at, Some(Timestamp::from_millis(6)));
        assert_eq!((job.idempotency_key, job.key, job.expires_at), (None, None, None));
        assert_eq!(job.topic.as_deref(), Some("sms-jobs"));
    }

    #[test]
    fn an_answer_that_makes_no_sense_names_its_field() {
        let none = || None::<prost_types::Timestamp>;
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
                    scheduled_time: none(),
                    ..sent()
                },
                "scheduled_time",
            ),
            (
                v1::Job {
                    accepted_at: none(),
                    ..sent()
                },
                "accepted_at",
            ),
        ];
        for (job, field) in cases {
            let error = Job::try_from(job).unwrap_err();
            assert!(
                matches!(error, ClientError::Answer(found) if found == field),
                "{error}"
            );
        }
        let early = prost_types::Timestamp {
            seconds: 0,
            nanos: -1,
        };
        let impossible = v1::Job {
            ended_at: Some(early),
            ..sent()
        };
        assert!(Job::try_from(impossible).is_err());
        assert!(answer_of(v1::Outcome::Scheduled, None).is_err());
    }
}
