//! `redeliver.v1.ScheduleService`.

use std::sync::Arc;

use redeliver_core::Failure;
use redeliver_proto::v1;
use redeliver_proto::v1::change_schedule::{Change, Delete, Pause, Resume, Trigger};
use redeliver_proto::v1::schedule_service_server::ScheduleService;
use redeliver_service::grpc::Reply;
use tonic::{Request, Response};

use super::{Expected, PreviewRequest, Previewed, changed};
use crate::api::call::Call;
use crate::api::error::RequestError;
use crate::api::grpc::named;
use crate::api::jobs::Jobs;
use crate::api::list::{ListSchedules, SchedulePage};
use crate::index::Index;
use crate::request::{Field, Format, read_timestamp};

const FORMAT: Format = Format::Protobuf;

/// The gRPC service.
pub(crate) struct Service<I>(Arc<Jobs<I>>);

impl<I> Service<I> {
    pub(crate) fn new(jobs: Arc<Jobs<I>>) -> Self {
        Self(jobs)
    }
}

fn required(spec: Option<v1::ScheduleSpec>) -> Result<v1::ScheduleSpec, RequestError> {
    let missing = || Field("spec").malformed(FORMAT, "is missing; set it to the definition");
    Ok(spec.ok_or_else(missing)?)
}

fn preview(request: v1::PreviewScheduleRequest) -> Result<PreviewRequest, Failure> {
    use v1::preview_schedule_request::Schedule;
    let after = request.after.as_ref();
    Ok(PreviewRequest {
        after: after
            .map(|after| read_timestamp(Field("after"), after))
            .transpose()?,
        schedule: match request.schedule {
            Some(Schedule::Id(id)) => Previewed::Id(id),
            Some(Schedule::Spec(spec)) => Previewed::Definition(Box::new(spec)),
            None => return Err(Field("id").malformed(FORMAT, "is missing; set it, or set `spec`")),
        },
        count: request.count,
    })
}

#[tonic::async_trait]
impl<I: Index> ScheduleService for Service<I> {
    async fn create_schedule(&self, request: Request<v1::CreateScheduleRequest>) -> Reply<v1::Schedule> {
        let (call, v1::CreateScheduleRequest { id, spec }) = Call::of(request)?;
        let (schedule, _) = self.0.create_schedule(&call, id, required(spec)?, None).await?;
        Ok(Response::new(schedule))
    }

    async fn get_schedule(&self, request: Request<v1::GetScheduleRequest>) -> Reply<v1::Schedule> {
        let (call, v1::GetScheduleRequest { id }) = Call::of(request)?;
        Ok(Response::new(self.0.get_schedule(&call, &id).await?))
    }

    async fn list_schedules(
        &self,
        request: Request<v1::ListSchedulesRequest>,
    ) -> Reply<v1::ListSchedulesResponse> {
        let (call, request) = Call::of(request)?;
        let list = ListSchedules {
            app: named(&request.app).map(str::to_owned),
            page_size: request.page_size,
            page_token: request.page_token,
        };
        let SchedulePage {
            schedules,
            unreadable,
            next_page_token,
        } = self.0.list_schedules(&call, &list).await?;
        Ok(Response::new(v1::ListSchedulesResponse {
            schedules,
            next_page_token,
            unreadable,
        }))
    }

    async fn update_schedule(&self, request: Request<v1::UpdateScheduleRequest>) -> Reply<v1::Schedule> {
        let (call, request) = Call::of(request)?;
        let expected = Expected {
            state: None,
            revision: request.expected_revision,
        };
        let spec = required(request.spec)?;
        let updated = self.0.update_schedule(&call, request.id, spec, expected).await?;
        Ok(Response::new(updated))
    }

    async fn pause_schedule(&self, request: Request<v1::PauseScheduleRequest>) -> Reply<v1::Schedule> {
        let (call, v1::PauseScheduleRequest { id }) = Call::of(request)?;
        let paused = self.0.change_schedule(&call, id, Change::Pause(Pause {})).await?;
        Ok(Response::new(changed(paused)?))
    }

    async fn resume_schedule(
        &self,
        request: Request<v1::ResumeScheduleRequest>,
    ) -> Reply<v1::ResumeScheduleResponse> {
        let (call, v1::ResumeScheduleRequest { id, catch_up }) = Call::of(request)?;
        let change = Change::Resume(Resume { catch_up });
        let v1::CommandOutcome {
            schedule, skipped, ..
        } = self.0.change_schedule(&call, id, change).await?;
        Ok(Response::new(v1::ResumeScheduleResponse { schedule, skipped }))
    }

    async fn trigger_schedule(
        &self,
        request: Request<v1::TriggerScheduleRequest>,
    ) -> Reply<v1::TriggerScheduleResponse> {
        let (call, v1::TriggerScheduleRequest { id }) = Call::of(request)?;
        let change = Change::Trigger(Trigger {});
        let triggered = self.0.change_schedule(&call, id, change).await?;
        let job_id = triggered.job.unwrap_or_default().id;
        Ok(Response::new(v1::TriggerScheduleResponse { job_id }))
    }

    async fn preview_schedule(
        &self,
        request: Request<v1::PreviewScheduleRequest>,
    ) -> Reply<v1::PreviewScheduleResponse> {
        let (call, request) = Call::of(request)?;
        let request = preview(request).map_err(RequestError::from)?;
        let occurrences = self.0.preview_schedule(&call, request).await?;
        Ok(Response::new(v1::PreviewScheduleResponse { occurrences }))
    }

    async fn delete_schedule(
        &self,
        request: Request<v1::DeleteScheduleRequest>,
    ) -> Reply<v1::DeleteScheduleResponse> {
        let (call, v1::DeleteScheduleRequest { id }) = Call::of(request)?;
        let change = Change::Delete(Delete {});
        self.0.change_schedule(&call, id, change).await?;
        Ok(Response::new(v1::DeleteScheduleResponse {}))
    }
}
