//! Streams of HTTP/2 whose clients keep their windows closed.
//!
//! Such a client reads from its connection, so no write fails. A stream is a task that runs the handler and then sends its response.
//! hyper asks the response for a part only after the window had room for the previous one, so a part that is not followed by another
//! question waits for the window. The task ends when that takes too long, which resets the stream and no other one.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use futures::future::{AbortHandle, abortable};
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use hyper_util::rt::TokioExecutor;
use prometheus_client::metrics::counter::Counter;

use super::activity::InProgress;
use super::stall::Stall;
use super::unprotected::Unprotected;

/// The maximum size of a part. A client that has room for this much within the limit is not too slow.
const PART: usize = 16 << 10;

tokio::task_local! {
    /// Of the stream of HTTP/2 that runs.
    static OUTBOX: Arc<Outbox>;
}

/// What a stream has to send.
#[derive(Debug)]
struct Outbox {
    /// Ends the stream.
    abort: AbortHandle,
    /// The number of parts so far.
    parts: AtomicU64,
    /// Whether the last one waits for the window.
    is_waiting: AtomicBool,
}

/// Runs the streams of a connection.
#[derive(Clone, Debug)]
pub(super) struct StreamExecutor {
    pub(super) write_timeout: Duration,
    pub(super) not_read: Counter,
}

impl<S: Future<Output = ()> + Send + 'static> Executor<S> for StreamExecutor {
    fn execute(&self, stream: S) {
        TokioExecutor::new().execute(limited(stream, self.write_timeout, self.not_read.clone()));
    }
}

/// Counts the request of the stream that runs. Without an effect with HTTP/1.1: its connections are limited.
pub(super) fn limit(unprotected: &Unprotected, request: &InProgress) {
    if let Ok(abort) = OUTBOX.try_with(|outbox| outbox.abort.clone()) {
        request.count(unprotected.begin(abort));
    }
}

async fn limited(stream: impl Future<Output = ()>, limit: Duration, not_read: Counter) {
    let (stream, abort) = abortable(stream);
    let outbox = Arc::new(Outbox {
        abort,
        parts: AtomicU64::new(0),
        is_waiting: AtomicBool::new(false),
    });
    let mut stream = pin!(OUTBOX.scope(outbox.clone(), stream));
    let mut stall = Stall::new(limit);
    std::future::poll_fn(|context| {
        if stream.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        if !outbox.is_waiting.load(Ordering::Relaxed) {
            stall.clear();
            return Poll::Pending;
        }
        std::task::ready!(stall.poll(outbox.parts.load(Ordering::Relaxed), context));
        not_read.inc();
        tracing::debug!("stream reset: the client does not read");
        Poll::Ready(())
    })
    .await;
}

/// The body of a response, which is in progress until it is dropped.
#[derive(Debug)]
pub(super) struct ResponseBody {
    inner: Body,
    /// What is left of the data of the last frame.
    rest: Bytes,
    /// `None` with HTTP/1.1.
    outbox: Option<Arc<Outbox>>,
    _in_progress: InProgress,
}

impl ResponseBody {
    /// The body of a response of the task that runs.
    pub(super) fn new(inner: Body, in_progress: InProgress) -> Self {
        Self {
            inner,
            rest: Bytes::new(),
            outbox: OUTBOX.try_with(Clone::clone).ok(),
            _in_progress: in_progress,
        }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let body = &mut *self;
        let Some(outbox) = &body.outbox else {
            return Pin::new(&mut body.inner).poll_frame(context);
        };
        outbox.is_waiting.store(false, Ordering::Relaxed);
        if body.rest.is_empty() {
            match std::task::ready!(Pin::new(&mut body.inner).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => body.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
        let part = body.rest.split_to(body.rest.len().min(PART));
        outbox.parts.fetch_add(1, Ordering::Relaxed);
        outbox.is_waiting.store(true, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.inner.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tokio::time::Instant;

    use super::super::activity::Activity;
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// Sends a response as hyper does, to a client that takes this many seconds for each part.
    async fn send(size: usize, seconds: u64) -> (u64, u64) {
        let not_read = Counter::default();
        let started = Instant::now();
        let stream = async move {
            let mut body = ResponseBody::new(Body::from(vec![0; size]), Activity::new().begin());
            let mut sent = 0;
            while let Some(part) = body.frame().await {
                sent += part.unwrap().into_data().unwrap().len();
                tokio::time::sleep(Duration::from_secs(seconds)).await;
            }
            assert_eq!(sent, size);
        };
        limited(stream, LIMIT, not_read.clone()).await;
        (started.elapsed().as_secs(), not_read.get())
    }

    #[tokio::test(start_paused = true)]
    async fn slow_client_is_tolerated() {
        assert_eq!(send(10 * PART, 29).await, (290, 0));
        assert_eq!(send(10 * PART, 31).await, (30, 1));
        assert_eq!(send(1, 31).await, (30, 1));
        assert_eq!(send(0, 31).await, (0, 0));
    }

    #[tokio::test]
    async fn parts_match_the_body() {
        let body = async {
            let mut body = ResponseBody::new(Body::from(vec![7; PART + 1]), Activity::new().begin());
            let mut sizes = Vec::new();
            loop {
                let exact = body.size_hint().exact().unwrap();
                sizes.push((exact, body.is_end_stream()));
                match body.frame().await {
                    Some(frame) => assert!(frame.unwrap().is_data()),
                    None => break,
                }
            }
            let part = PART as u64;
            assert_eq!(sizes, [(part + 1, false), (1, false), (0, true)]);
        };
        limited(body, LIMIT, Counter::default()).await;
    }
}
