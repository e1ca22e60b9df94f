//! The memory for the bodies of requests, which all requests of the process share, see [`MemoryBudget`].
//!
//! A request reserves the size of its body before it is read. A body without a declared size reserves the maximum, except that of gRPC,
//! which begins with its size. Once the body is read, the request keeps what it has read until it is answered, because what is parsed
//! refers to the body. A request whose client disconnects is dropped with its reservation.
//!
//! Requests of HTTP/1.1 wait for a bounded time. Requests of HTTP/2 do not wait: the streams of a connection share a window of flow
//! control, and what the client sends on a stream that waits would fill this window, so that a stream which holds memory could not be
//! read.
//!
//! Callers are authenticated before, so others use nothing of the budget. What a client of HTTP/1.1 sends while its request waits
//! stays in the buffers of its connection.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::{Request, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use prometheus_client::metrics::counter::Counter;
use redeliver_service::grpc::is_grpc;
use redeliver_service::identity::Identity;
use redeliver_service::limit_metrics::LimitMetrics;
use redeliver_service::memory_budget::{Caller, MemoryBudget, Reservation};
use tonic::Status;

use super::error::RequestError;
use super::problem::Problem;

/// How long a request waits until there is room for its body.
const WAIT: Duration = Duration::from_secs(5);
/// What a message of gRPC begins with: whether it is compressed, and its size in 4 bytes.
const GRPC_PREFIX: usize = 5;

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    memory: MemoryBudget,
    refused: Counter,
}

impl BodyBudget {
    /// A budget of this many bytes.
    pub(crate) fn new(bytes: u64, metrics: &LimitMetrics) -> Self {
        Self {
            memory: MemoryBudget::new(bytes),
            refused: metrics.of("request_bytes"),
        }
    }

    /// Reserves this many bytes for a caller, and waits for them if it may. `None`: there was no room in time.
    async fn reserve(&self, caller: &Caller, bytes: u64, may_wait: bool) -> Option<Reservation> {
        let reservation = if may_wait {
            let waiting = tokio::time::timeout(WAIT, self.memory.reserve(caller, bytes));
            waiting.await.ok().flatten()
        } else {
            self.memory.try_reserve(caller, bytes)
        };
        if reservation.is_none() {
            self.refused.inc();
        }
        reservation
    }
}

/// Reserves memory for the body of a request of a caller that a layer outside of this one has authenticated. The body has at most
/// `max` bytes.
pub(crate) async fn reserve_body(
    budget: BodyBudget,
    max: usize,
    Extension(identity): Extension<Identity>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let is_grpc = is_grpc(request.headers());
    let (parts, body) = request.into_parts();
    let max = u64::try_from(max).unwrap_or(u64::MAX);
    let begun = if is_grpc {
        BegunBody::of_message(body, max).await
    } else {
        BegunBody::of(body, max)
    };
    if begun.size == 0 {
        return next.run(Request::from_parts(parts, begun.body)).await;
    }
    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
    let caller = Caller::of(&identity, peer.map(|ConnectInfo(address)| *address));
    let may_wait = parts.version < Version::HTTP_2;
    match budget.reserve(&caller, begun.size, may_wait).await {
        Some(reservation) => {
            let body = Body::new(ReservedBody::new(begun, reservation.clone()));
            let response = next.run(Request::from_parts(parts, body)).await;
            drop(reservation);
            response
        }
        None if is_grpc => RequestError::Overloaded.into_status().into_http(),
        None => Problem::from(RequestError::Overloaded).into_response(),
    }
}

/// A body of which as much is read as tells its size.
struct BegunBody {
    /// How much it may have, in bytes.
    size: u64,
    /// Whether this reader must check that it has no more.
    is_checked_here: bool,
    /// The read parts, in reverse.
    read: Vec<Result<Frame<Bytes>, axum::Error>>,
    body: Body,
}

impl BegunBody {
    fn of(body: Body, max: u64) -> Self {
        let size = body.size_hint().upper().unwrap_or(max).min(max);
        Self {
            size,
            // The one who reads it refuses it.
            is_checked_here: false,
            read: Vec::new(),
            body,
        }
    }

    /// The body of a call with one message of at most `max` bytes. An end or an error is found again by the one who reads on.
    async fn of_message(mut body: Body, max: u64) -> Self {
        let (mut read, mut prefix) = (Vec::new(), Vec::with_capacity(GRPC_PREFIX));
        while prefix.len() < GRPC_PREFIX {
            let Some(frame) = body.frame().await else { break };
            let data = frame.as_ref().ok().and_then(Frame::data_ref);
            let Some(data) = data else {
                read.push(frame);
                break;
            };
            prefix.extend(data.iter().take(GRPC_PREFIX - prefix.len()));
            if !data.is_empty() {
                read.push(frame);
            }
        }
        read.reverse();
        let message = match prefix[..] {
            [_, a, b, c, d] => u64::from(u32::from_be_bytes([a, b, c, d])),
            // Without a message.
            _ => 0,
        };
        Self {
            size: GRPC_PREFIX as u64 + message.min(max),
            is_checked_here: message <= max,
            read,
            body,
        }
    }
}

/// A body that is read within its reservation. Once it is read or dropped, the reservation is as large as the
/// body.
#[derive(Debug)]
struct ReservedBody {
    begun: Vec<Result<Frame<Bytes>, axum::Error>>,
    body: Body,
    /// How much it may have, if that is checked here.
    limit: Option<u64>,
    read: u64,
    reservation: Reservation,
}

impl ReservedBody {
    fn new(begun: BegunBody, reservation: Reservation) -> Self {
        Self {
            limit: begun.is_checked_here.then_some(begun.size),
            begun: begun.read,
            body: begun.body,
            read: 0,
            reservation,
        }
    }
}

impl HttpBody for ReservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = match self.begun.pop() {
            Some(frame) => Some(frame),
            None => std::task::ready!(Pin::new(&mut self.body).poll_frame(context)),
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.read += data.len() as u64;
            if self.limit.is_some_and(|limit| self.read > limit) {
                let status = Status::invalid_argument("the request is larger than its first message");
                return Poll::Ready(Some(Err(axum::Error::new(status))));
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.begun.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let begun = self.begun.iter().flatten().filter_map(Frame::data_ref);
        let begun: u64 = begun.map(|data| data.len() as u64).sum();
        let (mut hint, rest) = (SizeHint::new(), self.body.size_hint());
        hint.set_lower(rest.lower() + begun);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + begun);
        }
        hint
    }
}

impl Drop for ReservedBody {
    fn drop(&mut self) {
        self.reservation.shrink_to(self.read);
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use tokio::time::Instant;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A budget of which 15 MiB are for all bodies, and 1 MiB for small ones.
    fn budget() -> BodyBudget {
        BodyBudget::new(16 * MIB, &LimitMetrics::default())
    }

    fn caller(name: &str) -> Caller {
        Caller::Named(redeliver_service::identity::CallerName::recorded(name))
    }

    fn body(parts: &[&[u8]]) -> Body {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| Ok::<_, Infallible>(Bytes::copy_from_slice(part)))
            .collect();
        Body::from_stream(stream::iter(parts))
    }

    #[tokio::test(start_paused = true)]
    async fn request_wait_is_bounded() {
        let (budget, a) = (budget(), caller("a"));
        let _all = budget.reserve(&a, u64::MAX, false).await.unwrap();
        let began = Instant::now();
        assert!(budget.reserve(&a, MIB, false).await.is_none());
        assert_eq!((began.elapsed(), budget.refused.get()), (Duration::ZERO, 1));
        assert!(budget.reserve(&a, MIB, true).await.is_none());
        assert_eq!((began.elapsed(), budget.refused.get()), (WAIT, 2));
    }

    #[tokio::test]
    async fn undeclared_size_reserves_the_maximum() {
        assert_eq!(BegunBody::of(body(&[b"123"]), 10).size, 10);
        assert_eq!(BegunBody::of(Body::from("123"), 10).size, 3);
        assert_eq!(BegunBody::of(Body::from("1234"), 3).size, 3);
        assert_eq!(BegunBody::of(Body::empty(), 10).size, 0);
        let message = [0, 0, 0, 0, 3, 1, 2, 3];
        for (sent, max, size) in [
            (&[&message[..]][..], 10, 8),
            (&[&message[..2], &[], &message[2..6], &message[6..]], 10, 8),
            // The one who reads it refuses it.
            (&[&message], 2, 7),
            (&[&message[..4]], 10, 5),
            (&[], 10, 5),
        ] {
            let begun = BegunBody::of_message(body(sent), max).await;
            assert_eq!(begun.size, size, "{sent:?}");
            let reservation = budget().reserve(&caller("a"), 100, false).await.unwrap();
            let read = ReservedBody::new(begun, reservation.clone());
            let read = Body::new(read).collect().await;
            assert_eq!(read.unwrap().to_bytes(), sent.concat());
            let kept = sent.concat().len() as u64;
            assert_eq!(reservation.bytes(), kept);
        }
    }

    #[tokio::test]
    async fn call_sends_only_reserved_bytes() {
        let begun = BegunBody::of_message(body(&[&[0, 0, 0, 0, 1, 7], &[0; 50]]), 100).await;
        let reservation = budget().reserve(&caller("a"), begun.size, false).await.unwrap();
        let read = Body::new(ReservedBody::new(begun, reservation)).collect().await;
        assert!(
            read.unwrap_err()
                .to_string()
                .contains("larger than its first message")
        );
    }
}
