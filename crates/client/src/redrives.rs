//! A client for redrives, discards and restores of dead letters, which the inspector serves over gRPC.

use redeliver_proto::v1::redrive_service_client::RedriveServiceClient;
use redeliver_proto::v1::{
    ChangeRedriveRequest, GetRedriveRequest, ListRedriveItemsRequest, ListRedriveItemsResponse,
    ListRedrivesRequest, ListRedrivesResponse, PlanEditRequest, PlanRedriveRequest, Redrive, RedrivePreview,
    SetRedriveRateRequest,
};

use crate::endpoint::client;

client! {
    /// Plans, starts and watches redrives. Clones share one connection.
    RedriveClient(RedriveServiceClient);

    /// Plans a job. Nothing is done before it is started.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if no dead letter can be taken, and if the caller lacks a permission or the request is invalid.
    plan = plan_redrive(PlanRedriveRequest) -> Redrive;

    /// Plans a redrive of one dead letter with other contents. Nothing is done before it is started.
    ///
    /// # Errors
    /// [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if the inspector accepts no edits, [`Code::Aborted`](crate::Code::Aborted) if the dead
    /// letter has another content, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for headers that cannot be set, and if the record would
    /// be too large. Otherwise as for [`RedriveClient::plan`].
    plan_edit = plan_edit(PlanEditRequest) -> Redrive;

    /// Starts a planned job, now or at a time in the future. Until a delayed job begins, this gives it another time, or begins it now.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it does not exist, [`Code::Aborted`](crate::Code::Aborted) if it has another revision,
    /// [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if it is cancelled, or has begun and `start_at` is another time.
    start = start_redrive(ChangeRedriveRequest) -> Redrive;

    /// Pauses a job.
    ///
    /// # Errors
    /// As for [`RedriveClient::start`]; [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if it does not run.
    pause = pause_redrive(ChangeRedriveRequest) -> Redrive;

    /// Continues a paused job.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    resume = resume_redrive(ChangeRedriveRequest) -> Redrive;

    /// Cancels a job for good.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    cancel = cancel_redrive(ChangeRedriveRequest) -> Redrive;

    /// Sets the rate of a job; 0: as fast as possible.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    set_rate = set_redrive_rate(SetRedriveRateRequest) -> Redrive;

    /// Gets a job.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it does not exist, or the caller does not see all of its topics.
    get = get_redrive(GetRedriveRequest) -> Redrive;

    /// What a redrive would write for some of its dead letters.
    ///
    /// # Errors
    /// As for [`RedriveClient::get`].
    preview = get_redrive_preview(GetRedriveRequest) -> RedrivePreview;

    /// Lists a page of jobs, newest first.
    ///
    /// # Errors
    /// If the inspector is unavailable, or the token is invalid.
    list = list_redrives(ListRedrivesRequest) -> ListRedrivesResponse;

    /// Lists a page of what became of each dead letter of a job, in the order of its plan.
    ///
    /// # Errors
    /// As for [`RedriveClient::get`].
    items = list_redrive_items(ListRedriveItemsRequest) -> ListRedriveItemsResponse;
}
