//! A client for the recurring schedules of the scheduler.

use redeliver_core::job::JobId;
use redeliver_proto::v1::schedule_service_client::ScheduleServiceClient;
use redeliver_proto::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListSchedulesRequest,
    ListSchedulesResponse, PauseScheduleRequest, PreviewScheduleRequest, PreviewScheduleResponse,
    ResumeScheduleRequest, ResumeScheduleResponse, Schedule, TriggerScheduleRequest, UpdateScheduleRequest,
};

use crate::endpoint::client;
use crate::error::{ClientError, found};

client! {
    /// Creates, looks up, lists and changes recurring schedules. Clones share one connection.
    ScheduleClient(ScheduleServiceClient);

    /// Creates a schedule. When this returns, it is durable. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`](crate::Code::AlreadyExists) if another schedule has the id, [`Code::NotFound`](crate::Code::NotFound) for an unknown
    /// application, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for an invalid field.
    create = create_schedule(CreateScheduleRequest) -> Schedule;

    /// Lists a page of schedules, without the data and headers of their jobs. One that changes while pages are read can be on two pages,
    /// or on none.
    ///
    /// # Errors
    /// If the scheduler is unavailable, or the page token is invalid.
    list = list_schedules(ListSchedulesRequest) -> ListSchedulesResponse;

    /// Replaces the definition of a schedule.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it is unknown, [`Code::Aborted`](crate::Code::Aborted) if it has another revision than the expected
    /// one, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for an invalid field.
    update = update_schedule(UpdateScheduleRequest) -> Schedule;

    /// Pauses a schedule. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it is unknown.
    pause = pause_schedule(PauseScheduleRequest) -> Schedule;

    /// Resumes a schedule. With `catch_up`, what fell due during the pause is subject to the misfire policy; otherwise, it is skipped.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it is unknown.
    resume = resume_schedule(ResumeScheduleRequest) -> ResumeScheduleResponse;

    /// Computes the next occurrences of a schedule, or of a definition whose job may be missing.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if the schedule is unknown, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for an invalid
    /// definition.
    preview = preview_schedule(PreviewScheduleRequest) -> PreviewScheduleResponse;
}

impl ScheduleClient {
    /// Gets a schedule; `None` if it is unknown.
    ///
    /// # Errors
    /// If the scheduler is unavailable, or the id is invalid.
    pub async fn get(&self, id: &str) -> Result<Option<Schedule>, ClientError> {
        let request = GetScheduleRequest { id: id.to_owned() };
        found(
            self.answer(self.service.clone().get_schedule(request).await)
                .await,
        )
    }

    /// Creates one additional job now, and returns its id. A repeated call creates another job.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if the schedule is unknown.
    pub async fn trigger(&self, id: &str) -> Result<JobId, ClientError> {
        let request = TriggerScheduleRequest { id: id.to_owned() };
        let answer = self.service.clone().trigger_schedule(request).await;
        let id = self.answer(answer).await?.job_id;
        id.parse().map_err(|_| ClientError::InvalidResponse("job_id"))
    }

    /// Deletes a schedule; `false` if it is unknown. Jobs that it has created stay.
    ///
    /// # Errors
    /// If the scheduler is unavailable. The call can be repeated.
    pub async fn delete(&self, id: &str) -> Result<bool, ClientError> {
        let request = DeleteScheduleRequest { id: id.to_owned() };
        let answer = self.service.clone().delete_schedule(request).await;
        Ok(found(self.answer(answer).await)?.is_some())
    }
}
