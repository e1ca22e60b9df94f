//! A client for control: what operators pause and limit at run time.

use std::time::Duration;

use redeliver_proto::v1::control_service_client::ControlServiceClient;
use redeliver_proto::v1::{
    ChangeControlRequest, Control, GetControlRequest, ListControlsRequest, ReleaseWholeTierRequest,
    SetControlRateRequest, TierReleaseResult,
};

use crate::endpoint::client;
use crate::error::ClientError;
use crate::stream::Messages;

/// The longest time between two results of the release of a tier of all pipelines.
const RESULT_TIMEOUT: Duration = Duration::from_secs(60);

client! {
    /// Pauses, resumes and limits applications, pipelines and tiers at run time, by names such as `app/sms`, `pipeline/docs` or
    /// `tier/docs/30s`. Clones share one connection.
    ControlClient(ControlServiceClient);

    /// The desired and the effective state.
    ///
    /// # Errors
    /// [`Code::NotFound`](tonic::Code::NotFound) if the name is unknown, [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if it is not a name.
    get = get_control(GetControlRequest) -> Control;

    /// Pauses it. When this returns, the change is durable. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::NotFound`](tonic::Code::NotFound) if the name is unknown, [`Code::Aborted`](tonic::Code::Aborted) if it has another revision than the expected one.
    pause = pause_control(ChangeControlRequest) -> Control;

    /// Lets it run, whatever the configuration says. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`].
    resume = resume_control(ChangeControlRequest) -> Control;

    /// Sets the limit of its rate; without one, the configuration applies. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if the rate is out of range.
    set_rate = set_control_rate(SetControlRateRequest) -> Control;

    /// Releases what waits now in a tier of a pipeline, or in the scheduler (`tier/docs/scheduler`), without waiting for its due times. Each call releases what waits then.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if nothing waits in what has this name.
    release = release_tier(ChangeControlRequest) -> Control;

    /// Returns it to the configuration. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`].
    reset = reset_control(ChangeControlRequest) -> Control;
}

impl ControlClient {
    /// The controls that were changed, or that the configuration pauses or limits, by name.
    ///
    /// # Errors
    /// If the server is unavailable.
    pub async fn list(&self) -> Result<Vec<Control>, ClientError> {
        let (mut controls, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = ListControlsRequest { page_token };
            let answer = self.service.clone().list_controls(request).await;
            let page = self.answer(answer).await?;
            controls.extend(page.controls);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(controls);
            }
        }
    }

    /// Releases what waits now in a tier of all pipelines, such as `tier/30s`: a release for each of them, whose results come one after the other. Some of
    /// them can fail; then the call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if it is not a tier of all pipelines.
    pub async fn release_whole_tier(
        &self,
        request: ReleaseWholeTierRequest,
    ) -> Result<TierReleases, ClientError> {
        let answer = self.service.clone().release_whole_tier(request).await;
        let results = Messages::of(&self.url, answer, RESULT_TIMEOUT).await?;
        Ok(TierReleases(results))
    }
}

/// The results of the release of a tier of all pipelines.
#[derive(Debug)]
pub struct TierReleases(Messages<TierReleaseResult>);

impl TierReleases {
    /// The next result; `None` after that of the last pipeline.
    ///
    /// # Errors
    /// If the connection is lost, or no result arrives for 60 seconds: the tiers without a result may be released or not.
    pub async fn next(&mut self) -> Result<Option<TierReleaseResult>, ClientError> {
        self.0.next().await
    }
}
