//! A client for the overview of all pipelines. The inspector serves it over gRPC.

use redeliver_proto::v1::overview_service_client::OverviewServiceClient;
use redeliver_proto::v1::{GetOverviewRequest, Overview, OverviewSelection, WatchOverviewRequest};

use crate::endpoint::client;
use crate::error::ClientError;
use crate::stream::{HEARTBEAT_TIMEOUT, Messages};

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
        let overviews = Messages::of(&self.url, answer, HEARTBEAT_TIMEOUT).await?;
        Ok(OverviewWatch(overviews))
    }
}

/// A stream of overviews. After a [transient error](ClientError::is_transient), a new watch continues.
#[derive(Debug)]
pub struct OverviewWatch(Messages<Overview>);

impl OverviewWatch {
    /// The next overview, which replaces the one before.
    ///
    /// # Errors
    /// If the connection is lost, the inspector ends the stream, or nothing arrives for 45 seconds, for example while its survey hangs.
    pub async fn next(&mut self) -> Result<Overview, ClientError> {
        self.0.next().await?.ok_or(ClientError::Ended)
    }
}
