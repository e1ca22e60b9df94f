//! A client for control: what operators pause and limit at run time.

use std::time::Duration;

use redeliver_proto::v1::control_service_client::ControlServiceClient;
use redeliver_proto::v1::rate_limit::Limit;
use redeliver_proto::v1::{self, Control, TierReleaseResult};
use tonic::{Response, Status, Streaming};

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};

/// The longest time between two results of the release of a tier of all pipelines.
const RESULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Pauses, resumes and limits applications, pipelines and tiers at run time. Clones share one connection.
#[derive(Clone, Debug)]
pub struct ControlClient {
    service: ControlServiceClient<Connection>,
    url: String,
}

/// A change of what runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlChange {
    /// What to change, such as `app/sms`, `pipeline/docs` or `tier/docs/30s`.
    pub name: String,
    /// Why, for others; at most 1000 bytes.
    pub why: String,
    /// The revision that it must have; 0: nobody has changed it yet. `None`: any.
    pub expected_revision: Option<u64>,
}

/// A limit of a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateLimit {
    /// So many per second, by all processes together: from 0.001 to 1000000.
    PerSecond(f64),
    /// No limit, whatever the configuration says.
    Unlimited,
    /// As the configuration says.
    Configured,
}

impl ControlClient {
    /// Connects to a scheduler or an inspector.
    ///
    /// # Errors
    /// If the endpoint is invalid or the server cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: ControlServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// What is wanted, and what applies.
    ///
    /// # Errors
    /// [`Code::NotFound`](tonic::Code::NotFound) if the name is unknown, [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if it is not a name.
    pub async fn get(&self, name: &str) -> Result<Control, ClientError> {
        let request = v1::GetControlRequest {
            name: name.to_owned(),
        };
        self.answer(self.service.clone().get_control(request).await).await
    }

    /// What somebody has changed, and what the configuration pauses or limits, by name.
    ///
    /// # Errors
    /// If the server is unavailable.
    pub async fn list(&self) -> Result<Vec<Control>, ClientError> {
        let (mut controls, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = v1::ListControlsRequest { page_token };
            let answer = self.service.clone().list_controls(request).await;
            let page = self.answer(answer).await?;
            controls.extend(page.controls);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(controls);
            }
        }
    }

    /// Pauses it. When this returns, the change is durable. The call can be repeated.
    ///
    /// # Errors
    /// [`Code::NotFound`](tonic::Code::NotFound) if the name is unknown, [`Code::Aborted`](tonic::Code::Aborted) if it has another revision than the expected one.
    pub async fn pause(&self, change: &ControlChange) -> Result<Control, ClientError> {
        self.answer(self.service.clone().pause_control(request(change)).await)
            .await
    }

    /// Lets it run, whatever the configuration says. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`].
    pub async fn resume(&self, change: &ControlChange) -> Result<Control, ClientError> {
        self.answer(self.service.clone().resume_control(request(change)).await)
            .await
    }

    /// Sets or removes the limit of its rate. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if the rate is out of range.
    pub async fn set_rate(&self, change: &ControlChange, rate: RateLimit) -> Result<Control, ClientError> {
        let limit = match rate {
            RateLimit::PerSecond(rate) => Some(Limit::PerSecond(rate)),
            RateLimit::Unlimited => Some(Limit::Unlimited(true)),
            RateLimit::Configured => None,
        };
        let v1::ChangeControlRequest {
            name,
            why,
            expected_revision,
        } = request(change);
        let request = v1::SetControlRateRequest {
            name,
            rate: limit.map(|limit| v1::RateLimit { limit: Some(limit) }),
            why,
            expected_revision,
        };
        self.answer(self.service.clone().set_control_rate(request).await)
            .await
    }

    /// Releases what waits now in a tier of a pipeline, or in the scheduler (`tier/docs/scheduler`), without waiting for its due times. Each call releases what waits then.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if nothing waits in what has this name.
    pub async fn release(&self, change: &ControlChange) -> Result<Control, ClientError> {
        self.answer(self.service.clone().release_tier(request(change)).await)
            .await
    }

    /// Releases what waits now in a tier of all pipelines, such as `tier/30s`: a release for each of them, whose results come one after the other. Some of
    /// them can fail; then the call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`]; [`Code::InvalidArgument`](tonic::Code::InvalidArgument) if it is not a tier of all pipelines.
    pub async fn release_whole_tier(&self, name: &str, why: &str) -> Result<TierReleases, ClientError> {
        let request = v1::ReleaseWholeTierRequest {
            name: name.to_owned(),
            why: why.to_owned(),
        };
        let answer = self.service.clone().release_whole_tier(request).await;
        Ok(TierReleases {
            stream: self.answer(answer).await?,
            url: self.url.clone(),
        })
    }

    /// Returns it to the configuration. The call can be repeated.
    ///
    /// # Errors
    /// As for [`ControlClient::pause`].
    pub async fn reset(&self, change: &ControlChange) -> Result<Control, ClientError> {
        self.answer(self.service.clone().reset_control(request(change)).await)
            .await
    }

    async fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
        error::answer(&self.url, answer).await
    }
}

/// The results of the release of a tier of all pipelines.
#[derive(Debug)]
pub struct TierReleases {
    stream: Streaming<TierReleaseResult>,
    url: String,
}

impl TierReleases {
    /// The next result; `None` after that of the last pipeline.
    ///
    /// # Errors
    /// If the connection is lost, or no result arrives for 60 seconds: the tiers without a result may be released or not.
    pub async fn next(&mut self) -> Result<Option<TierReleaseResult>, ClientError> {
        let received = tokio::time::timeout(RESULT_TIMEOUT, self.stream.message()).await;
        let Ok(message) = received else {
            return Err(ClientError::StreamTimeout(RESULT_TIMEOUT));
        };
        message.map_err(|status| ClientError::from_status(&self.url, &status))
    }
}

fn request(change: &ControlChange) -> v1::ChangeControlRequest {
    v1::ChangeControlRequest {
        name: change.name.clone(),
        why: change.why.clone(),
        expected_revision: change.expected_revision,
    }
}
