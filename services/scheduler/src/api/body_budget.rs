//! The memory for the bodies of requests, which all requests of the process share.
//!
//! A request reserves the size of its body before it is read, all of it at once. So no request waits for memory while it keeps
//! others from theirs. A body without a declared size reserves the maximum, except that of gRPC, which begins with its size. Once the
//! body is read, the request keeps what it has read until it is answered, because what is parsed refers to the body. A request whose
//! client disconnects is dropped with its reservation.
//!
//! So that no caller locks others out, the memory is divided twice:
//!
//! - A sixteenth is for small bodies, which also use the rest while it has room.
//! - A caller has a quarter of each of these two parts. A body that is larger than this share takes all of it.
//!
//! Requests of HTTP/1.1 wait in the order in which they came, for a bounded time: first for the share of their caller, and then for the
//! part. This order is always the same, so they do not wait for each other in a circle. Requests of HTTP/2 do not wait: the
//! streams of a connection share a window of flow control, and what the client sends on a stream that waits would fill this window, so
//! that a stream which holds memory could not be read.
//!
//! Callers are authenticated before, so others use nothing of the budget. What a client of HTTP/1.1 sends while its request waits
//! stays in the buffers of its connection.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
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
use redeliver_service::identity::Identity;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use super::error::RequestError;
use super::limits::{LimitMetrics, is_grpc};
use super::problem::Problem;

/// How long a request waits until there is room for its body.
const WAIT: Duration = Duration::from_secs(5);
/// The maximum size of a small body, in bytes. The least budget has room for one in the part for them.
const SMALL: u64 = 64 << 10;
/// Which part of the budget is only for small bodies.
const SMALL_PART: u32 = 16;
/// Which part of the memory a caller may use.
const CALLER_PART: u32 = 4;
/// The number of callers from which on those that hold no memory are forgotten.
const MANY_CALLERS: usize = 10_000;
/// What a message of gRPC begins with: whether it is compressed, and its size in 4 bytes.
const GRPC_PREFIX: usize = 5;

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    of_all: SharedMemory,
    of_small: SharedMemory,
    refused: Counter,
}

/// There was no room in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NoRoom;

/// Who shares a part of the memory: everybody with the same identity, or every anonymous caller with the same address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Caller {
    Named(String),
    Anonymous(Option<IpAddr>),
}

impl Caller {
    fn of(identity: &Identity, address: Option<IpAddr>) -> Self {
        if identity.is_anonymous() {
            Self::Anonymous(address.map(|address| address.to_canonical()))
        } else {
            Self::Named(identity.name().to_owned())
        }
    }
}

/// Memory of which no caller may use more than its share. Clones share it.
#[derive(Clone, Debug)]
struct SharedMemory {
    /// A permit for each byte.
    free: Arc<Semaphore>,
    bytes: u32,
    callers: Arc<Mutex<Callers>>,
}

/// What is free of the share of each caller.
#[derive(Debug, Default)]
struct Callers {
    free: HashMap<Caller, Arc<Semaphore>>,
    /// The number of callers from which on some are forgotten.
    many: usize,
}

impl Callers {
    /// The share of a caller, which has this size in bytes.
    fn share(&mut self, caller: &Caller, bytes: u32) -> Arc<Semaphore> {
        if let Some(free) = self.free.get(caller) {
            return free.clone();
        }
        if self.free.len() >= self.many.max(MANY_CALLERS) {
            // Reservations, and those who wait for one, refer to the share.
            self.free.retain(|_, free| Arc::strong_count(free) > 1);
            // If most of them stay, looking again soon would cost much and gain little.
            self.many = 2 * self.free.len();
        }
        let free = Arc::new(Semaphore::new(usize::try_from(bytes).unwrap_or(usize::MAX)));
        self.free.insert(caller.clone(), free.clone());
        free
    }
}

/// What is reserved for a body.
#[derive(Debug)]
struct Reserved {
    of_caller: OwnedSemaphorePermit,
    of_all: OwnedSemaphorePermit,
}

/// Gives back what is more than this many bytes.
fn shrink(permit: &mut OwnedSemaphorePermit, bytes: u64) {
    let kept = usize::try_from(bytes).unwrap_or(usize::MAX);
    let rest = permit.num_permits().saturating_sub(kept);
    drop(permit.split(rest));
}

impl SharedMemory {
    fn new(bytes: u32) -> Self {
        Self {
            free: Arc::new(Semaphore::new(usize::try_from(bytes).unwrap_or(usize::MAX))),
            bytes,
            callers: Arc::default(),
        }
    }

    /// The share of a caller, and how many bytes of it and of all a body of this size takes: no more than there are.
    fn shares(&self, caller: &Caller, bytes: u64) -> (Arc<Semaphore>, u32, u32) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let share = self.bytes / CALLER_PART;
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        (
            callers.share(caller, share),
            bytes.min(share),
            bytes.min(self.bytes),
        )
    }

    async fn reserve(&self, caller: &Caller, bytes: u64) -> Result<Reserved, NoRoom> {
        let (share, of_caller, of_all) = self.shares(caller, bytes);
        let reserving = async {
            Ok::<_, tokio::sync::AcquireError>(Reserved {
                of_caller: share.acquire_many_owned(of_caller).await?,
                of_all: self.free.clone().acquire_many_owned(of_all).await?,
            })
        };
        // Nobody closes the semaphores.
        match tokio::time::timeout(WAIT, reserving).await {
            Ok(Ok(reserved)) => Ok(reserved),
            Ok(Err(_)) | Err(_) => Err(NoRoom),
        }
    }

    /// Reserves what is free at once, unless others wait for it.
    fn try_reserve(&self, caller: &Caller, bytes: u64) -> Result<Reserved, NoRoom> {
        let (share, of_caller, of_all) = self.shares(caller, bytes);
        let of_caller = share.try_acquire_many_owned(of_caller).map_err(|_| NoRoom)?;
        let of_all = self.free.clone().try_acquire_many_owned(of_all);
        let of_all = of_all.map_err(|_| NoRoom)?;
        Ok(Reserved { of_caller, of_all })
    }
}

/// What a request has reserved. Clones share it.
#[derive(Clone, Debug)]
struct Reservation(Arc<Mutex<Reserved>>);

impl BodyBudget {
    /// A budget of this many bytes.
    pub(crate) fn new(bytes: u64, metrics: &LimitMetrics) -> Self {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let of_small = bytes / SMALL_PART;
        Self {
            of_all: SharedMemory::new(bytes - of_small),
            of_small: SharedMemory::new(of_small),
            refused: metrics.of("request_bytes"),
        }
    }

    /// Reserves this many bytes for a caller, and waits for them if it may. A body for which there are not so many takes all of its
    /// caller's share.
    async fn reserve(&self, caller: &Caller, bytes: u64, may_wait: bool) -> Result<Reservation, NoRoom> {
        let reserved = match self.of_all.try_reserve(caller, bytes) {
            Ok(reserved) => Ok(reserved),
            Err(NoRoom) => {
                let memory = if bytes <= SMALL {
                    &self.of_small
                } else {
                    &self.of_all
                };
                match may_wait {
                    true => memory.reserve(caller, bytes).await,
                    false => memory.try_reserve(caller, bytes),
                }
            }
        };
        match reserved {
            Ok(reserved) => Ok(Reservation(Arc::new(Mutex::new(reserved)))),
            Err(NoRoom) => {
                self.refused.inc();
                Err(NoRoom)
            }
        }
    }
}

impl Reservation {
    /// Gives back what is more than this many bytes.
    fn shrink_to(&self, bytes: u64) {
        let mut reserved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shrink(&mut reserved.of_all, bytes);
        shrink(&mut reserved.of_caller, bytes);
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
    let caller = Caller::of(&identity, peer.map(|ConnectInfo(address)| address.ip()));
    let may_wait = parts.version < Version::HTTP_2;
    match budget.reserve(&caller, begun.size, may_wait).await {
        Ok(reservation) => {
            let body = Body::new(ReservedBody::new(begun, reservation.clone()));
            let response = next.run(Request::from_parts(parts, body)).await;
            drop(reservation);
            response
        }
        Err(NoRoom) if is_grpc => RequestError::Overloaded.into_status().into_http(),
        Err(NoRoom) => Problem::from(RequestError::Overloaded).into_response(),
    }
}

/// A body of which as much is read as tells its size.
struct BegunBody {
    /// How much it may have, in bytes.
    size: u64,
    /// Whether nobody else checks that it has no more.
    is_checked_here: bool,
    /// What was read, in reverse.
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

/// A body that is read within its reservation. Once it is read or dropped, the reservation is as large as what was read.
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

    use futures::FutureExt as _;
    use futures::stream;
    use tokio::time::Instant;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A budget of which 15 MiB are for all bodies, and 1 MiB for small ones.
    fn budget() -> BodyBudget {
        BodyBudget::new(16 * MIB, &LimitMetrics::default())
    }

    fn caller(name: &str) -> Caller {
        Caller::Named(name.to_owned())
    }

    /// How many bytes of the share of a caller and of all a reservation holds.
    fn held(reservation: &Reservation) -> (u64, u64) {
        let reserved = reservation.0.lock().unwrap();
        let bytes = |permit: &OwnedSemaphorePermit| permit.num_permits() as u64;
        (bytes(&reserved.of_caller), bytes(&reserved.of_all))
    }

    fn free(memory: &SharedMemory) -> u64 {
        memory.free.available_permits() as u64
    }

    fn body(parts: &[&[u8]]) -> Body {
        let parts: Vec<_> = parts
            .iter()
            .map(|part| Ok::<_, Infallible>(Bytes::copy_from_slice(part)))
            .collect();
        Body::from_stream(stream::iter(parts))
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_holds_its_share_keeps_neither_others_nor_its_small_requests_from_theirs() {
        let (budget, a) = (budget(), caller("a"));
        let mut large = Vec::new();
        for _ in 0..3 {
            large.push(budget.reserve(&a, MIB, false).await.unwrap());
        }
        // It has 3.75 MiB of 15.
        assert_eq!(budget.reserve(&a, MIB, false).await.err(), Some(NoRoom));
        let mut waiting = Box::pin(budget.reserve(&a, MIB, true));
        assert!(waiting.as_mut().now_or_never().is_none());
        // Those that wait hold nothing of what others use.
        assert_eq!(free(&budget.of_all), 12 * MIB);
        for name in ["b", "c", "d"] {
            large.push(budget.reserve(&caller(name), 3 * MIB, false).await.unwrap());
        }
        // Small ones have memory of their own, also of this no more than a quarter.
        let mut small = Vec::new();
        while let Ok(reservation) = budget.reserve(&a, SMALL, false).await {
            small.push(reservation);
        }
        assert_eq!(free(&budget.of_small), 3 * MIB / 4);
        for name in ["b", "e"] {
            budget.reserve(&caller(name), SMALL, false).await.unwrap();
        }
        drop(large);
        waiting.now_or_never().unwrap().unwrap();
        drop(small);
        assert_eq!((free(&budget.of_all), free(&budget.of_small)), (15 * MIB, MIB));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_for_room_in_their_order_and_for_a_bounded_time() {
        let (budget, a) = (budget(), caller("a"));
        let first = budget.reserve(&a, 3 * MIB, true).await.unwrap();
        let mut large = Box::pin(budget.reserve(&a, 3 * MIB, true));
        assert!(large.as_mut().now_or_never().is_none());
        // It would fit, but does not overtake.
        let mut next = Box::pin(budget.reserve(&a, MIB / 2, true));
        assert!(next.as_mut().now_or_never().is_none());
        first.shrink_to(MIB / 2);
        let large = large.now_or_never().unwrap().unwrap();
        assert!(next.as_mut().now_or_never().is_none());
        drop(first);
        drop(next.now_or_never().unwrap().unwrap());
        let began = Instant::now();
        assert_eq!(budget.reserve(&a, MIB, true).await.err(), Some(NoRoom));
        assert_eq!((began.elapsed(), budget.refused.get()), (WAIT, 1));
        drop(large);
        assert_eq!(free(&budget.of_all), 15 * MIB);
    }

    #[tokio::test]
    async fn a_body_that_is_larger_than_the_share_of_its_caller_takes_all_of_it() {
        let (budget, a) = (budget(), caller("a"));
        let large = budget.reserve(&a, 8 * MIB, false).await.unwrap();
        assert_eq!(held(&large), (15 * MIB / 4, 8 * MIB));
        assert_eq!(budget.reserve(&a, MIB, false).await.err(), Some(NoRoom));
        drop(large);
        let all = budget.reserve(&a, u64::MAX, false).await.unwrap();
        assert_eq!(held(&all), (15 * MIB / 4, 15 * MIB));
        // It needs the memory of others while it is read.
        assert_eq!(budget.reserve(&caller("b"), MIB, false).await.err(), Some(NoRoom));
        budget.reserve(&caller("b"), SMALL, false).await.unwrap();
        all.shrink_to(5);
        assert_eq!(held(&all), (5, 5));
    }

    #[tokio::test]
    async fn a_small_body_fits_into_the_least_budget_while_others_use_the_rest() {
        let budget = BodyBudget::new(MIB, &LimitMetrics::default());
        let _large = budget.reserve(&caller("a"), 8 * MIB, false).await.unwrap();
        budget.reserve(&caller("a"), SMALL, false).await.unwrap();
        let small = budget.reserve(&caller("b"), SMALL, false).await.unwrap();
        assert_eq!(held(&small), (SMALL / 4, SMALL));
    }

    #[tokio::test]
    async fn callers_that_hold_nothing_are_forgotten() {
        let budget = budget();
        let kept = budget.reserve(&caller("kept"), 1, false).await.unwrap();
        for number in 0..MANY_CALLERS {
            let other = caller(&number.to_string());
            budget.reserve(&other, 1, false).await.unwrap();
        }
        let known: Vec<Caller> = {
            let callers = budget.of_all.callers.lock().unwrap();
            callers.free.keys().cloned().collect()
        };
        assert_eq!(known.len(), 2);
        assert!(known.contains(&caller("kept")));
        drop(kept);
    }

    #[tokio::test]
    async fn a_body_without_a_declared_size_reserves_the_maximum_and_one_of_grpc_its_message() {
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
            assert_eq!(held(&reservation), (kept, kept));
        }
    }

    #[tokio::test]
    async fn a_call_cannot_send_more_than_the_message_for_which_it_has_reserved() {
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
