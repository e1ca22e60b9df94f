//! `redeliver.v1.ControlService`.

use std::sync::Arc;

use redeliver_proto::v1;
use redeliver_proto::v1::control_service_server::ControlService;
use redeliver_service::control::change::Change;
use redeliver_service::control::value::Run;
use tonic::{Request, Response, Status};

use super::{ChangeControl, app_of, read_limit};
use crate::api::error::RequestError;
use crate::api::grpc::caller;
use crate::api::jobs::Jobs;
use crate::index::Index;
use crate::request::Format;

const FORMAT: Format = Format::Protobuf;

/// The gRPC service.
pub(crate) struct Service<I>(Arc<Jobs<I>>);

impl<I: Index> Service<I> {
    pub(crate) fn new(jobs: Arc<Jobs<I>>) -> Self {
        Self(jobs)
    }

    async fn change(
        &self,
        request: Request<v1::ChangeControlRequest>,
        change: Change,
    ) -> Result<Response<v1::Control>, Status> {
        let caller = caller(&request)?;
        let v1::ChangeControlRequest {
            name,
            why,
            expected_revision,
        } = request.into_inner();
        let request = ChangeControl {
            app: app_of(&name, FORMAT).map_err(RequestError::into_status)?,
            change,
            why,
            expected_revision,
        };
        let changed = self.0.change_control(&caller, request, FORMAT).await;
        changed.map(Response::new).map_err(RequestError::into_status)
    }
}

#[tonic::async_trait]
impl<I: Index> ControlService for Service<I> {
    async fn get_control(
        &self,
        request: Request<v1::GetControlRequest>,
    ) -> Result<Response<v1::Control>, Status> {
        let caller = caller(&request)?;
        let app = app_of(&request.get_ref().name, FORMAT).map_err(RequestError::into_status)?;
        let control = self.0.get_control(&caller, &app);
        control.map(Response::new).map_err(RequestError::into_status)
    }

    async fn list_controls(
        &self,
        request: Request<v1::ListControlsRequest>,
    ) -> Result<Response<v1::ListControlsResponse>, Status> {
        let controls = self.0.list_controls(&caller(&request)?);
        let controls = controls.map_err(RequestError::into_status)?;
        Ok(Response::new(v1::ListControlsResponse { controls }))
    }

    async fn pause_control(
        &self,
        request: Request<v1::ChangeControlRequest>,
    ) -> Result<Response<v1::Control>, Status> {
        self.change(request, Change::Run(Run::Paused)).await
    }

    async fn resume_control(
        &self,
        request: Request<v1::ChangeControlRequest>,
    ) -> Result<Response<v1::Control>, Status> {
        self.change(request, Change::Run(Run::Running)).await
    }

    async fn set_control_rate(
        &self,
        request: Request<v1::SetControlRateRequest>,
    ) -> Result<Response<v1::Control>, Status> {
        let caller = caller(&request)?;
        let v1::SetControlRateRequest {
            name,
            rate,
            why,
            expected_revision,
        } = request.into_inner();
        let request = ChangeControl {
            app: app_of(&name, FORMAT).map_err(RequestError::into_status)?,
            change: read_limit(rate.as_ref(), FORMAT).map_err(RequestError::into_status)?,
            why,
            expected_revision,
        };
        let changed = self.0.change_control(&caller, request, FORMAT).await;
        changed.map(Response::new).map_err(RequestError::into_status)
    }

    async fn reset_control(
        &self,
        request: Request<v1::ChangeControlRequest>,
    ) -> Result<Response<v1::Control>, Status> {
        self.change(request, Change::Reset).await
    }
}
