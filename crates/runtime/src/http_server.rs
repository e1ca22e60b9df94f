//! Serves HTTP/1.1 and HTTP/2 with limits for its clients.
//!
//! A client that sends nothing, sends slowly, or does not read keeps a connection and its memory. So everything that waits for a client
//! has a limit:
//!
//! | what waits | limit |
//! |---|---|
//! | a connection, for the headers of its first request | [`HttpLimits::header_timeout`] |
//! | a connection, for the headers of a further request | [`HttpLimits::idle_timeout`] |
//! | a handler, for the body of a request | [`HttpLimits::body_timeout`] |
//! | a connection, until its client reads; with HTTP/2 also a stream, until its window opens | [`HttpLimits::write_timeout`] |
//! | a connection of HTTP/2, for the answer to a ping | [`HttpLimits::ping_timeout`] |
//! | a connection that is closed, until its client has stopped sending | [`HttpLimits::linger`] |
//!
//! The time for a body counts while the handler waits for it, and not while the handler does something else.
//!
//! A request is in progress until its response is sent. Neither the time that a handler takes, nor that of a stream whose
//! client reads, is limited.
//!
//! When there are too many connections, a new one replaces the one that has been idle for the longest. Only requests count that the
//! server has accepted ([`Protection`]), for example those of callers that it knows; a server that accepts none, as that of the admin
//! port, replaces the oldest connection. Of other requests of HTTP/2, such as watches of
//! the health, a new one ends the oldest one when there are too many ([`HttpLimits::unprotected_streams`]). So clients with many
//! connections that are idle, or have only such requests in progress, lock no client out, and use a bounded part of the memory.
//!
//! hyper has limits for headers of HTTP/1.1, pings, streams of a connection and sizes of headers, which are used here. The others are
//! our own, because those of hyper and tower-http leave gaps:
//!
//! - hyper limits the time for headers with HTTP/1.1 only.
//! - `TimeoutBody` of tower-http starts again with each frame, so that a client that sends a byte now and then is never too slow. For
//!   a response, it is not polled while hyper waits for the window of the client.
//! - `ConcurrencyLimitLayer` of tower releases its permit before the body of the response is sent, and lets new requests wait for old
//!   ones.
//! - `GracefulShutdown` of hyper-util neither ends idle connections nor replaces them.

mod activity;
mod descriptors;
mod lingering_close;
mod stall;
mod streams;
mod timed_body;
mod timed_writes;
mod unprotected;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, Request, Response, Version, header};
use axum::serve::Listener as _;
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use prometheus_client::metrics::counter::Counter;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tower::{Layer as _, ServiceExt as _};

use crate::listen::{Connection, Listener};

use activity::Activity;
pub use activity::Protection;
use lingering_close::LingeringClose;
use streams::{ResponseBody, StreamExecutor};
pub use timed_body::BodyTimeout;
use timed_body::{Abandoned, TimedBody};
use timed_writes::TimedWrites;
use unprotected::Unprotected;

/// The maximum number of requests in progress on a connection of HTTP/2.
const MAX_STREAMS: u32 = 100;
/// The least that hyper accepts for the headers of HTTP/1.1.
const MIN_HEADER_BYTES: usize = 8 << 10;
/// How long a client may take to close its connection when it is asked to.
const CLOSING: Duration = Duration::from_secs(5);

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// The maximum number of open connections, and no more than half of the file descriptors allow. A further one replaces the one
    /// that has been idle for the longest, where only accepted requests count ([`Protection`]). It is closed at once if none is idle.
    pub connections: usize,
    /// The maximum number of requests in progress with HTTP/2 that do not protect their connection from that, of all connections. A
    /// further one resets the oldest one.
    pub unprotected_streams: usize,
    /// Serves HTTP/2 only: no browser uses it without TLS, so that no web page can call a server of gRPC.
    pub http2_only: bool,
    /// How long a client may take to send the headers of its first request.
    pub header_timeout: Duration,
    /// How long a connection may have no request in progress afterwards, until the headers of the next one are complete.
    pub idle_timeout: Duration,
    /// How long a handler waits in all for a client to send the body of a request.
    pub body_timeout: Duration,
    /// How long a client may read nothing of what the server has to send.
    pub write_timeout: Duration,
    /// How long a connection that is closed reads and discards what its client still sends, so that the client can read the response.
    pub linger: Duration,
    /// How often a client of HTTP/2 that sends nothing gets a ping.
    pub ping_interval: Duration,
    /// How long it may take to answer.
    pub ping_timeout: Duration,
    /// The maximum size of the headers of a request, in bytes. At least 8 KiB with HTTP/1.1.
    pub header_bytes: u32,
    /// Counts connections that were closed, and streams that were reset, because there were too many.
    pub too_many: Counter,
    /// Counts requests whose body did not arrive in time.
    pub slow_bodies: Counter,
    /// Counts connections, and streams of HTTP/2, that were closed because the client did not read.
    pub not_read: Counter,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            unprotected_streams: 2_000,
            http2_only: false,
            header_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(120),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            linger: Duration::from_secs(1),
            ping_interval: Duration::from_secs(30),
            ping_timeout: Duration::from_secs(20),
            header_bytes: 64 << 10,
            too_many: Counter::default(),
            slow_bodies: Counter::default(),
            not_read: Counter::default(),
        }
    }
}

/// An open connection.
struct Open {
    activity: Activity,
    task: AbortHandle,
}

/// Serves HTTP/1.1 and HTTP/2. Each request has the address of its client in its extensions, as [`ConnectInfo`]. Accepts connections
/// until `shutdown` completes, and then until requests in progress have ended.
///
/// # Errors
/// None at present: errors of a connection end this connection only.
pub async fn serve(
    mut listener: Listener,
    routes: Router,
    limits: HttpLimits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let most = descriptors::at_most_half(limits.connections);
    let unprotected = Unprotected::new(limits.unprotected_streams, limits.too_many.clone());
    let closing = CancellationToken::new();
    let mut running = JoinSet::new();
    let mut open = HashMap::new();
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            (connection, peer) = listener.accept() => {
                if open.len() >= most {
                    limits.too_many.inc();
                    let Some(idle) = longest_idle(&open).and_then(|id| open.remove(&id)) else {
                        tracing::debug!(%peer, "connection closed: there are too many");
                        continue;
                    };
                    idle.task.abort();
                }
                let activity = Activity::new();
                let task = running.spawn(serve_connection(
                    connection,
                    peer,
                    routes.clone(),
                    limits.clone(),
                    activity.clone(),
                    unprotected.clone(),
                    closing.clone(),
                ));
                open.insert(task.id(), Open { activity, task });
            }
            Some(ended) = running.join_next_with_id() => {
                open.remove(&note(ended));
            }
            () = &mut shutdown => break,
        }
    }
    drop(listener);
    closing.cancel();
    while let Some(ended) = running.join_next_with_id().await {
        note(ended);
    }
    Ok(())
}

/// The connection that no request in progress has protected for the longest time; `None` if one protects each.
fn longest_idle(open: &HashMap<Id, Open>) -> Option<Id> {
    let idle = open
        .iter()
        .filter_map(|(id, connection)| Some((connection.activity.unprotected_since()?, *id)));
    idle.min().map(|(_, id)| id)
}

/// Panics are reported by the hook of the process. They end only their connection.
fn note(ended: Result<(Id, ()), JoinError>) -> Id {
    match ended {
        Ok((id, ())) => id,
        Err(error) => {
            tracing::debug!(%error, "a connection was replaced, or ended with a panic");
            error.id()
        }
    }
}

async fn serve_connection(
    connection: Connection,
    peer: SocketAddr,
    routes: Router,
    limits: HttpLimits,
    activity: Activity,
    unprotected: Unprotected,
    closing: CancellationToken,
) {
    let header_bytes = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
    let mut builder = Builder::new(StreamExecutor {
        write_timeout: limits.write_timeout,
        not_read: limits.not_read.clone(),
    });
    builder
        .http1()
        .timer(TokioTimer::new())
        // The time without a request is limited for both protocols below.
        .header_read_timeout(None)
        .max_buf_size(header_bytes.max(MIN_HEADER_BYTES));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(limits.ping_interval))
        .keep_alive_timeout(limits.ping_timeout)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(limits.header_bytes);
    if limits.http2_only {
        builder = builder.http2_only();
    }

    let of_request = Extension(connection.peer_certificates()).layer(routes);
    let requests = activity.clone();
    let (body_timeout, slow) = (limits.body_timeout, limits.slow_bodies);
    let abandoned = Abandoned::default();
    let of_requests = abandoned.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let in_progress = requests.begin();
        let (is_http1, abandoned) = (request.version() < Version::HTTP_2, of_requests.clone());
        let mut request =
            request.map(|body| TimedBody::new(body, body_timeout, slow.clone(), abandoned.clone()));
        request.extensions_mut().insert(in_progress.protection());
        request.extensions_mut().insert(ConnectInfo(peer));
        let response = of_request.clone().oneshot(request);
        let unprotected = unprotected.clone();
        async move {
            streams::limit(&unprotected, &in_progress);
            let mut response: Response<_> = response.await?;
            if is_http1 && abandoned.get() {
                // hyper closes the connection then. A client that does not know would send its next request in vain.
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, in_progress)))
        }
    });
    let io = TimedWrites::new(
        connection,
        limits.write_timeout,
        activity.clone(),
        limits.not_read,
    );
    let io = LingeringClose::new(io, limits.linger, abandoned);
    let mut serving = pin!(builder.serve_connection(TokioIo::new(io), service));
    let must_close = async {
        tokio::select! {
            () = activity.idle(limits.header_timeout, limits.idle_timeout) => {}
            () = closing.cancelled() => {}
        }
    };
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = must_close => {
            // Requests that arrive meanwhile are served.
            serving.as_mut().graceful_shutdown();
            tokio::select! {
                result = serving => result,
                () = activity.idle(CLOSING, CLOSING) => {
                    tracing::debug!("connection closed: its client did not");
                    return;
                }
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(error = %error, "connection ended");
    }
}
