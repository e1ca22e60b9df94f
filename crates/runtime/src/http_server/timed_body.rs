//! Bodies of requests that have to arrive in time.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, Sleep};

/// The body of a request did not arrive in time.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the body of the request did not arrive within {} s", .0.as_secs_f64())]
pub struct BodyTimeout(Duration);

impl BodyTimeout {
    /// The time-out, if an error is caused by one.
    #[must_use]
    pub fn in_chain(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
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

/// Whether the rest of the body stays unread of a request of a connection. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The body of a request, for which its reader waits no longer than a limit in all. Fails with [`BodyTimeout`].
///
/// Only time in which the reader waits counts: the client may have sent it long ago, or flow control keeps
/// the client from sending it.
#[derive(Debug)]
pub(super) struct TimedBody {
    inner: Incoming,
    limit: Duration,
    /// How much of the limit is left.
    left: Duration,
    waiting: Option<Waiting>,
    slow: Counter,
    has_ended: bool,
    abandoned: Abandoned,
}

/// The reader waits for a part of a body.
#[derive(Debug)]
struct Waiting {
    since: Instant,
    elapsed: Pin<Box<Sleep>>,
}

impl TimedBody {
    pub(super) fn new(inner: Incoming, limit: Duration, slow: Counter, abandoned: Abandoned) -> Self {
        Self {
            inner,
            limit,
            left: limit,
            waiting: None,
            slow,
            has_ended: false,
            abandoned,
        }
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let body = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut body.inner).poll_frame(context) {
            body.has_ended = frame.is_none();
            if let Some(waiting) = body.waiting.take() {
                body.left = body.left.saturating_sub(waiting.since.elapsed());
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(axum::Error::new)));
        }
        let left = body.left;
        let waiting = body.waiting.get_or_insert_with(|| Waiting {
            since: Instant::now(),
            elapsed: Box::pin(tokio::time::sleep(left)),
        });
        std::task::ready!(waiting.elapsed.as_mut().poll(context));
        body.slow.inc();
        Poll::Ready(Some(Err(axum::Error::new(BodyTimeout(body.limit)))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for TimedBody {
    fn drop(&mut self) {
        if !self.has_ended && !self.inner.is_end_stream() {
            self.abandoned.set();
        }
    }
}
