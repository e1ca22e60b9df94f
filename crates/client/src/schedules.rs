//! A client for the recurring schedules of the scheduler.

use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1::schedule_service_client::ScheduleServiceClient;
use redeliver_proto::v1::{self, OccurrencePreview, Schedule, ScheduleSpec, UnreadableSchedule};
use tonic::{Code, Response, Status};

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::jobs::text;

/// Creates, looks up, lists and changes recurring schedules. Schedules and their definitions are the messages of the API. Clones
/// share one connection.
#[derive(Clone, Debug)]
pub struct ScheduleClient {
    service: ScheduleServiceClient<Connection>,
    url: String,
}

/// Which schedules to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListSchedules {
    /// Only schedules of this application; `None`: of all.
    pub app: Option<String>,
    /// The maximum number of schedules of the page, at most 1000; 0 means 100.
    pub page_size: u32,
    /// The `next_page_token` of the previous page; empty for the first one.
    pub page_token: String,
}

/// A page of schedules.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulePage {
    /// By the due time of the next occurrence, without the data and headers of their jobs; paused and finished ones come last.
    pub schedules: Vec<Schedule>,
    /// What the scheduler cannot read, for example because another version wrote it.
    pub unreadable: Vec<UnreadableSchedule>,
    /// `None` on the last page.
    pub next_page_token: Option<String>,
}

/// What to preview.
#[derive(Clone, Debug, PartialEq)]
pub enum PreviewOf {
    /// The schedule with this id.
    Schedule(String),
    /// A definition. Its job may be missing.
    Definition(Box<ScheduleSpec>),
}

/// The response to a resumption.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// The schedule.
    pub schedule: Schedule,
    /// The number of occurrences that fell due during the pause and are skipped.
    pub skipped: u64,
}

impl ScheduleClient {
    /// Connects to a scheduler.
    ///
    /// # Errors
    /// If the endpoint is invalid or the scheduler cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: ScheduleServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Creates a schedule. When this returns, it is durable. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`] if another schedule has the id, [`Code::NotFound`] for an unknown application,
    /// [`Code::InvalidArgument`] for an invalid field.
    pub async fn create(&self, id: &str, spec: ScheduleSpec) -> Result<Schedule, ClientError> {
        let request = v1::CreateScheduleRequest {
            id: id.to_owned(),
            spec: Some(spec),
        };
        self.answer(self.service.clone().create_schedule(request).await)
            .await
    }

    /// Gets a schedule; `None` if it is unknown.
    ///
    /// # Errors
    /// If the scheduler is unavailable, or the id is invalid.
    pub async fn get(&self, id: &str) -> Result<Option<Schedule>, ClientError> {
        let request = v1::GetScheduleRequest { id: id.to_owned() };
        match self.service.clone().get_schedule(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            answer => self.answer(answer).await.map(Some),
        }
    }

    /// Lists a page of schedules. One that changes while pages are read can be on two pages, or on none.
    ///
    /// # Errors
    /// If the scheduler is unavailable, or the page token is invalid.
    pub async fn list(&self, request: &ListSchedules) -> Result<SchedulePage, ClientError> {
        let request = v1::ListSchedulesRequest {
            app: request.app.clone().unwrap_or_default(),
            page_size: request.page_size,
            page_token: request.page_token.clone(),
        };
        let answer = self.service.clone().list_schedules(request).await;
        let page = self.answer(answer).await?;
        Ok(SchedulePage {
            schedules: page.schedules,
            unreadable: page.unreadable,
            next_page_token: text(page.next_page_token),
        })
    }

    /// Replaces the definition of a schedule.
    ///
    /// # Errors
    /// [`Code::NotFound`] if it is unknown, [`Code::Aborted`] if it has another revision than the expected one,
    /// [`Code::InvalidArgument`] for an invalid field.
    pub async fn update(
        &self,
        id: &str,
        spec: ScheduleSpec,
        expected_revision: Option<u32>,
    ) -> Result<Schedule, ClientError> {
        let request = v1::UpdateScheduleRequest {
            id: id.to_owned(),
            spec: Some(spec),
            expected_revision,
        };
        self.answer(self.service.clone().update_schedule(request).await)
            .await
    }

    /// Pauses a schedule. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::NotFound`] if it is unknown.
    pub async fn pause(&self, id: &str) -> Result<Schedule, ClientError> {
        let request = v1::PauseScheduleRequest { id: id.to_owned() };
        self.answer(self.service.clone().pause_schedule(request).await)
            .await
    }

    /// Resumes a schedule. With `catch_up`, what fell due during the pause is subject to the misfire policy; otherwise, it is skipped.
    ///
    /// # Errors
    /// [`Code::NotFound`] if it is unknown.
    pub async fn resume(&self, id: &str, catch_up: bool) -> Result<Resumed, ClientError> {
        let request = v1::ResumeScheduleRequest {
            id: id.to_owned(),
            catch_up,
        };
        let answer = self.service.clone().resume_schedule(request).await;
        let answer = self.answer(answer).await?;
        Ok(Resumed {
            schedule: answer.schedule.ok_or(ClientError::InvalidResponse("schedule"))?,
            skipped: answer.skipped,
        })
    }

    /// Creates one additional job now, and returns its id. A repeated call creates another job.
    ///
    /// # Errors
    /// [`Code::NotFound`] if the schedule is unknown.
    pub async fn trigger(&self, id: &str) -> Result<JobId, ClientError> {
        let request = v1::TriggerScheduleRequest { id: id.to_owned() };
        let answer = self.service.clone().trigger_schedule(request).await;
        let id = self.answer(answer).await?.job_id;
        id.parse().map_err(|_| ClientError::InvalidResponse("job_id"))
    }

    /// Computes the next occurrences after a time (`None`: now), at most `count` (at most 1000; 0 means 10).
    ///
    /// # Errors
    /// [`Code::NotFound`] if the schedule is unknown, [`Code::InvalidArgument`] for an invalid definition.
    pub async fn preview(
        &self,
        of: PreviewOf,
        after: Option<Timestamp>,
        count: u32,
    ) -> Result<Vec<OccurrencePreview>, ClientError> {
        let request = v1::PreviewScheduleRequest {
            schedule: Some(match of {
                PreviewOf::Schedule(id) => v1::preview_schedule_request::Schedule::Id(id),
                PreviewOf::Definition(spec) => v1::preview_schedule_request::Schedule::Spec(*spec),
            }),
            after: after.map(to_timestamp),
            count,
        };
        let answer = self.service.clone().preview_schedule(request).await;
        Ok(self.answer(answer).await?.occurrences)
    }

    /// Deletes a schedule; `false` if it is unknown. Jobs that it has created stay.
    ///
    /// # Errors
    /// If the scheduler is unavailable. The call can be repeated.
    pub async fn delete(&self, id: &str) -> Result<bool, ClientError> {
        let request = v1::DeleteScheduleRequest { id: id.to_owned() };
        match self.service.clone().delete_schedule(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(false),
            answer => self.answer(answer).await.map(|_| true),
        }
    }

    async fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
        error::answer(&self.url, answer).await
    }
}
