//! The messages of a call that answers with a stream.

use std::time::Duration;

use tonic::{Response, Status, Streaming};

use crate::error::{self, ClientError};

/// A stream with heartbeats fails if it receives nothing for this long. The inspector sends something every 15 seconds.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(45);

/// The messages of a stream.
#[derive(Debug)]
pub(crate) struct Messages<M> {
    stream: Streaming<M>,
    url: String,
    timeout: Duration,
}

impl<M> Messages<M> {
    /// Those of the service at `url`, which has answered the call.
    ///
    /// # Errors
    /// If the call failed.
    pub(crate) async fn of(
        url: &str,
        answer: Result<Response<Streaming<M>>, Status>,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        Ok(Self {
            stream: error::answer(url, answer).await?,
            url: url.to_owned(),
            timeout,
        })
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// If the connection is lost, or nothing arrives within the timeout.
    pub(crate) async fn next(&mut self) -> Result<Option<M>, ClientError> {
        let received = tokio::time::timeout(self.timeout, self.stream.message()).await;
        let message = received.map_err(|_| ClientError::StreamTimeout(self.timeout))?;
        message.map_err(|status| ClientError::from_status(&self.url, &status))
    }
}
