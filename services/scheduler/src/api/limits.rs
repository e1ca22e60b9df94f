//! Limits for clients: the hosts that requests may name, the time to send a body, and the rate of requests of a caller. Limits of
//! connections and headers are those of [`redeliver_runtime::http_server`].

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use governor::clock::{Clock as _, DefaultClock};
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use http_body::{Frame, SizeHint};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use redeliver_proto::error;
use redeliver_service::identity::Identity;
use tokio::time::Sleep;
use tonic::{Code, Status};

use super::problem::Problem;

/// The number of callers from which on those that have been idle are forgotten.
const MANY_CALLERS: usize = 10_000;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitLabel {
    limit: &'static str,
}

/// Counts what the limits have refused.
#[derive(Clone, Debug, Default)]
pub(crate) struct LimitMetrics(Family<LimitLabel, Counter>);

impl LimitMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        for limit in ["body_timeout", "connections", "host", "rate"] {
            drop(metrics.of(limit));
        }
        registry.register(
            "scheduler_api_limited",
            "Connections and requests of the job API that a limit has refused, by limit",
            metrics.0.clone(),
        );
        metrics
    }

    pub(crate) fn of(&self, limit: &'static str) -> Counter {
        self.0.get_or_create(&LimitLabel { limit }).clone()
    }
}

/// Limits the rate of requests of each caller. Clones share their state.
#[derive(Clone)]
pub(crate) struct CallerRates(Option<Arc<Rates>>);

struct Rates {
    limiter: RateLimiter<String, HashMapStateStore<String>, DefaultClock>,
    burst: NonZeroU32,
    refused: Counter,
}

impl CallerRates {
    /// `None`: no limit.
    pub(crate) fn new(per_second: Option<u32>, metrics: &LimitMetrics) -> Self {
        let burst = per_second.and_then(NonZeroU32::new);
        Self(burst.map(|burst| {
            Arc::new(Rates {
                limiter: RateLimiter::hashmap(Quota::per_second(burst)),
                burst,
                refused: metrics.of("rate"),
            })
        }))
    }

    /// Takes note of a number of requests, or of none of them.
    ///
    /// # Errors
    /// How long the caller has to wait before it sends them again.
    pub(crate) fn take(&self, caller: &Identity, requests: usize) -> Result<(), Duration> {
        let Some(rates) = &self.0 else { return Ok(()) };
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let Some(requests) = NonZeroU32::new(requests) else {
            return Ok(());
        };
        if rates.limiter.len() > MANY_CALLERS {
            rates.limiter.retain_recent();
        }
        // A batch that is larger than the burst takes all of it, because it could never be sent otherwise.
        let requests = requests.min(rates.burst);
        match rates.limiter.check_key_n(&caller.name().to_owned(), requests) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(not_until)) => {
                rates.refused.inc();
                Err(not_until.wait_time_from(DefaultClock::default().now()))
            }
            // Not possible: no more than the burst is taken.
            Err(_) => Ok(()),
        }
    }
}

/// Whether a request uses gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// Refuses requests that name another host than these, in lower case.
pub(crate) async fn check_host(
    accepted: Arc<[String]>,
    refused: Counter,
    request: Request<Body>,
    next: Next,
) -> Response {
    let named = request.uri().authority().map(axum::http::uri::Authority::as_str);
    let header = request.headers().get(header::HOST);
    let named = named.or_else(|| header.and_then(|value| value.to_str().ok()));
    let host = named.map(host_of).unwrap_or_default();
    if accepted.contains(&host) {
        return next.run(request).await;
    }
    refused.inc();
    let problem = "this server does not accept requests for this host; see scheduler.allowed_hosts";
    if is_grpc(request.headers()) {
        return error::status(Code::PermissionDenied, problem, "HOST", []).into_http();
    }
    Problem::new(StatusCode::MISDIRECTED_REQUEST, "host", problem).into_response()
}

/// The host without port and brackets, in lower case.
fn host_of(authority: &str) -> String {
    let host = match authority.strip_prefix('[') {
        Some(address) => address.split(']').next(),
        None => authority.split(':').next(),
    };
    host.unwrap_or_default().to_ascii_lowercase()
}

/// The body of a request did not arrive in time.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the body of the request did not arrive within {} s", .0.as_secs())]
pub(crate) struct BodyTimeout(Duration);

impl BodyTimeout {
    /// The time-out, if an error is caused by one.
    pub(crate) fn in_chain(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(timeout) = error.downcast_ref() {
                return Some(*timeout);
            }
            cause = error.source();
        }
        None
    }
}

/// Limits the time for the body of a request.
pub(crate) fn limit_body(request: Request<Body>, limit: Duration, refused: &Counter) -> Request<Body> {
    let is_grpc = is_grpc(request.headers());
    request.map(|inner| {
        if inner.is_end_stream() {
            return inner;
        }
        Body::new(TimedBody {
            inner,
            limit,
            elapsed: Box::pin(tokio::time::sleep(limit)),
            refused: refused.clone(),
            is_grpc,
        })
    })
}

struct TimedBody {
    inner: Body,
    limit: Duration,
    elapsed: Pin<Box<Sleep>>,
    refused: Counter,
    is_grpc: bool,
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(context) {
            return Poll::Ready(frame);
        }
        std::task::ready!(self.elapsed.as_mut().poll(context));
        self.refused.inc();
        let timeout = BodyTimeout(self.limit);
        Poll::Ready(Some(Err(if self.is_grpc {
            // tonic looks for a status among the causes of an error.
            let status: Status =
                error::status(Code::DeadlineExceeded, timeout.to_string(), "BODY_TIMEOUT", []);
            axum::Error::new(status)
        } else {
            axum::Error::new(timeout)
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_neither_port_nor_brackets() {
        for (authority, host) in [
            ("LocalHost:50052", "localhost"),
            ("localhost", "localhost"),
            ("[::1]:50052", "::1"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("", ""),
        ] {
            assert_eq!(host_of(authority), host);
        }
    }
}
