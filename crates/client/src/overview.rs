//! A client for the overview of all pipelines. The inspector serves it over gRPC.

use std::time::Duration;

use redeliver_proto::v1::overview_service_client::OverviewServiceClient;
use redeliver_proto::v1::{GetOverviewRequest, Overview, OverviewSelection, WatchOverviewRequest};
use tonic::Streaming;

use crate::endpoint::client;
use crate::error::ClientError;

/// A watch fails if it receives nothing for this long. The inspector sends an overview at least every 15 seconds, unless its survey hangs.
const STREAM_TIMEOUT: Duration = Duration::from_secs(45);

client! {
    /// What happens in all pipelines, and what is wrong. Clones share one connection.
    OverviewClient(OverviewServiceClient);
}

impl OverviewClient {
    /// The overview now. The first one after a while has no rates.
    ///
    /// # Errors
    /// If the inspector is unavailable, or refuses the selection.
    pub async fn overview(&self, selection: OverviewSelection) -> Result<Overview, ClientError> {
        let request = GetOverviewRequest {
            selection: Some(selection),
        };
        self.answer(self.service.clone().get_overview(request).await)
            .await
    }

    /// The overview now, and again with each change.
    ///
    /// # Errors
    /// As [`OverviewClient::overview`].
    pub async fn watch_overview(&self, selection: OverviewSelection) -> Result<OverviewWatch, ClientError> {
        let request = WatchOverviewRequest {
            selection: Some(selection),
        };
        let answer = self.service.clone().watch_overview(request).await;
        Ok(OverviewWatch {
            stream: self.answer(answer).await?,
            url: self.url.clone(),
        })
    }
}

/// A stream of overviews. After a [transient error](ClientError::is_transient), a new watch continues.
#[derive(Debug)]
pub struct OverviewWatch {
    stream: Streaming<Overview>,
    url: String,
}

impl OverviewWatch {
    /// The next overview, which replaces the one before.
    ///
    /// # Errors
    /// If the connection is lost, the inspector ends the stream, or nothing arrives for 45 seconds.
    pub async fn next(&mut self) -> Result<Overview, ClientError> {
        let received = tokio::time::timeout(STREAM_TIMEOUT, self.stream.message()).await;
        let Ok(message) = received else {
            return Err(ClientError::StreamTimeout(STREAM_TIMEOUT));
        };
        let message = message.map_err(|status| ClientError::from_status(&self.url, &status))?;
        message.ok_or(ClientError::Ended)
    }
}
