//! Calls that notice a service that is silent.

use std::error::Error;
use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_proto::auth::SendToken;
use redeliver_proto::v1::GetAccessRequest;
use redeliver_proto::v1::access_service_client::AccessServiceClient;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, StdError, http};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

/// A channel that adds the token to each call.
type Sender = InterceptedService<Channel, SendToken>;

/// After a silence was noticed, calls fail at once for this long: a page that makes several calls one after the other waits once.
const KNOWN: Duration = Duration::from_millis(500);
/// The part of the patience after which the service is asked whether it is there. Most calls are answered before.
const ASKED_AFTER: u32 = 8;

/// The service has answered neither a call nor a small question.
#[derive(Debug, thiserror::Error)]
#[error("it does not answer within {0:?}")]
struct Silence(Duration);

/// How long a service may be silent, and when it was last. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    limit: Duration,
    noticed: Arc<Mutex<Option<Instant>>>,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            noticed: Arc::default(),
        }
    }

    fn is_known_silent(&self) -> bool {
        let noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        noticed.is_some_and(|noticed| noticed.elapsed() < KNOWN)
    }

    /// Returns once the service is silent for too long; never as long as it answers a question that costs it nothing. Any answer is one: a service can be older
    /// than the question, or refuse the token.
    async fn exhausted(&self, sender: Sender) {
        let mut client = AccessServiceClient::new(sender);
        let mut heard = Instant::now();
        let mut pause = self.limit / ASKED_AFTER;
        loop {
            sleep(pause).await;
            // If there is no connection, the call itself tells why.
            let asked = timeout_at(heard + self.limit, client.get_access(GetAccessRequest {})).await;
            if asked.is_err() {
                *self.noticed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                return;
            }
            (heard, pause) = (Instant::now(), self.limit / 2);
        }
    }
}

/// Makes calls.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    sender: Sender,
    patience: Option<Patience>,
}

impl Caller {
    pub(crate) fn new(channel: Channel, sent: SendToken, patience: Option<Patience>) -> Self {
        Self {
            sender: InterceptedService::new(channel, sent),
            patience,
        }
    }
}

impl Service<http::Request<Body>> for Caller {
    type Response = <Sender as Service<http::Request<Body>>>::Response;
    type Error = StdError;
    type Future = BoxFuture<Self::Response, StdError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.sender, context).map_err(StdError::from)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Some(patience) = self.patience.clone() else {
            let answer = self.sender.call(request);
            return Box::pin(async move { answer.await.map_err(StdError::from) });
        };
        let silence = Silence(patience.limit);
        if patience.is_known_silent() {
            let silent: Result<Self::Response, StdError> = Err(silence.into());
            return Box::pin(ready(silent));
        }
        let (answer, sender) = (self.sender.call(request), self.sender.clone());
        Box::pin(async move {
            tokio::select! {
                answer = answer => answer.map_err(StdError::from),
                () = patience.exhausted(sender) => Err(silence.into()),
            }
        })
    }
}

/// Whether a call has failed because the service is silent.
pub(crate) fn is_silence(status: &Status) -> bool {
    status
        .source()
        .is_some_and(<dyn std::error::Error + 'static>::is::<Silence>)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use redeliver_proto::v1::OverviewSelection;
    use redeliver_testkit::{FakeEndpoint, Reply, Request};

    use crate::{ClientError, Code, Endpoint, OverviewClient};

    const PATIENCE: Duration = Duration::from_millis(400);

    /// Refuses a call.
    fn refuse() -> Reply {
        let headers = [("content-type", "application/grpc"), ("grpc-status", "7")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Reply::Status(200, headers.to_vec(), Vec::new().into())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn slow_answers_are_not_silence() {
        let service = FakeEndpoint::start(|request: &Request| match request.path.as_str() {
            path if path.ends_with("/GetAccess") => refuse(),
            _ => Reply::Delay(3 * PATIENCE, Box::new(refuse())),
        });
        let endpoint = Endpoint::new(service.url()).patience(PATIENCE);
        let client = OverviewClient::new(&endpoint.connect_lazily().unwrap());
        let call = async || client.overview(OverviewSelection::default()).await.unwrap_err();
        assert_eq!(call().await.code(), Some(Code::PermissionDenied));

        service.behave(|_| Reply::Hang);
        let silent = call().await;
        assert!(
            matches!(
                silent,
                ClientError::Unreachable {
                    is_refused: false,
                    ..
                }
            ),
            "{silent:?}"
        );
        // The next call knows it.
        let began = Instant::now();
        assert!(matches!(call().await, ClientError::Unreachable { .. }) && began.elapsed() < PATIENCE);

        service.behave(|_| refuse());
        // Until then, it is not asked.
        tokio::time::sleep(super::KNOWN).await;
        assert_eq!(call().await.code(), Some(Code::PermissionDenied));
    }
}
