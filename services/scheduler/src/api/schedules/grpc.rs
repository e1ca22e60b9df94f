//! `redeliver.v1.ScheduleService`.

use std::sync::Arc;

use redeliver_core::{Failure, Timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::change_schedule::{Change, Delete, Pause, Resume, Trigger};
use redeliver_proto::v1::schedule_service_server::ScheduleService;
use redeliver_service::identity::grpc::caller;
use tonic::{Request, Response, Status};

use super::{Expected, PreviewRequest, Previewed, changed};
use crate::api::error::RequestError;
use crate::api::grpc::{asked, named};
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

fn status(error: impl Into<RequestError>) -> Status {
    error.into().into_status()
}

fn required(spec: Option<v1::ScheduleSpec>) -> Result<v1::ScheduleSpec, Status> {
    spec.ok_or_else(|| status(Field("spec").malformed(FORMAT, "is missing; set it to the definition")))
}

fn after(request: &v1::PreviewScheduleRequest) -> Result<Option<Timestamp>, Failure> {
    let after = request.after.as_ref();
    after
        .map(|after| read_timestamp(Field("after"), after))
        .transpose()
}

#[tonic::async_trait]
impl<I: Index> ScheduleService for Service<I> {
    async fn create_schedule(
        &self,
        request: Request<v1::CreateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::CreateScheduleRequest { id, spec } = request.into_inner();
        let created = self
            .0
            .create_schedule(&caller, id, required(spec)?, None, FORMAT, asked)
            .await;
        let (schedule, _) = created.map_err(status)?;
        Ok(Response::new(schedule))
    }

    async fn get_schedule(
        &self,
        request: Request<v1::GetScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let caller = caller(&request)?;
        let schedule = self.0.get_schedule(&caller, &request.get_ref().id, FORMAT).await;
        schedule.map(Response::new).map_err(status)
    }

    async fn list_schedules(
        &self,
        request: Request<v1::ListSchedulesRequest>,
    ) -> Result<Response<v1::ListSchedulesResponse>, Status> {
        let caller = caller(&request)?;
        let v1::ListSchedulesRequest {
            app,
            page_size,
            page_token,
        } = request.into_inner();
        let list = ListSchedules {
            app: named(&app).map(str::to_owned),
            page_size,
            page_token,
        };
        let page = self.0.list_schedules(&caller, &list, FORMAT).await;
        let SchedulePage {
            schedules,
            unreadable,
            next_page_token,
        } = page.map_err(status)?;
        Ok(Response::new(v1::ListSchedulesResponse {
            schedules,
            next_page_token,
            unreadable,
        }))
    }

    async fn update_schedule(
        &self,
        request: Request<v1::UpdateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::UpdateScheduleRequest {
            id,
            spec,
            expected_revision,
        } = request.into_inner();
        let expected = Expected {
            state: None,
            revision: expected_revision,
        };
        let updated = self
            .0
            .update_schedule(&caller, id, required(spec)?, expected, FORMAT, asked)
            .await;
        updated.map(Response::new).map_err(status)
    }

    async fn pause_schedule(
        &self,
        request: Request<v1::PauseScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let id = request.into_inner().id;
        let paused = self
            .0
            .change_schedule(&caller, id, Change::Pause(Pause {}), FORMAT, asked)
            .await;
        let schedule = paused.and_then(changed).map_err(status)?;
        Ok(Response::new(schedule))
    }

    async fn resume_schedule(
        &self,
        request: Request<v1::ResumeScheduleRequest>,
    ) -> Result<Response<v1::ResumeScheduleResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let v1::ResumeScheduleRequest { id, catch_up } = request.into_inner();
        let resumed = self
            .0
            .change_schedule(&caller, id, Change::Resume(Resume { catch_up }), FORMAT, asked)
            .await;
        let v1::CommandOutcome {
            schedule, skipped, ..
        } = resumed.map_err(status)?;
        Ok(Response::new(v1::ResumeScheduleResponse { schedule, skipped }))
    }

    async fn trigger_schedule(
        &self,
        request: Request<v1::TriggerScheduleRequest>,
    ) -> Result<Response<v1::TriggerScheduleResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let id = request.into_inner().id;
        let triggered = self
            .0
            .change_schedule(&caller, id, Change::Trigger(Trigger {}), FORMAT, asked)
            .await;
        let job = triggered.map_err(status)?.job.unwrap_or_default();
        Ok(Response::new(v1::TriggerScheduleResponse { job_id: job.id }))
    }

    async fn preview_schedule(
        &self,
        request: Request<v1::PreviewScheduleRequest>,
    ) -> Result<Response<v1::PreviewScheduleResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let after = after(&request).map_err(status)?;
        let schedule = match request.schedule {
            Some(v1::preview_schedule_request::Schedule::Id(id)) => Previewed::Id(id),
            Some(v1::preview_schedule_request::Schedule::Spec(spec)) => Previewed::Definition(Box::new(spec)),
            None => {
                let problem = "is missing; set it, or set `spec`";
                return Err(status(Field("id").malformed(FORMAT, problem)));
            }
        };
        let request = PreviewRequest {
            schedule,
            after,
            count: request.count,
        };
        let occurrences = self.0.preview_schedule(&caller, request, FORMAT).await;
        let occurrences = occurrences.map_err(status)?;
        Ok(Response::new(v1::PreviewScheduleResponse { occurrences }))
    }

    async fn delete_schedule(
        &self,
        request: Request<v1::DeleteScheduleRequest>,
    ) -> Result<Response<v1::DeleteScheduleResponse>, Status> {
        let (caller, asked) = (caller(&request)?, asked(request.metadata())?);
        let id = request.into_inner().id;
        let deleted = self
            .0
            .change_schedule(&caller, id, Change::Delete(Delete {}), FORMAT, asked)
            .await;
        deleted.map_err(status)?;
        Ok(Response::new(v1::DeleteScheduleResponse {}))
    }
}
