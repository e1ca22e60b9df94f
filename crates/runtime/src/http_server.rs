//! Serves HTTP/1.1 and HTTP/2 with limits for its clients.
//!
//! A client that sends nothing, or sends slowly, keeps a connection and its memory. So the number of connections is limited, and
//! so are the time to the first request, the time to send the headers of a request, and their size.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Request;
use axum::serve::Listener as _;
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::{Layer as _, ServiceExt as _};

use crate::listen::{Connection, Listener};

/// The least that hyper accepts for the headers of HTTP/1.1.
/// The maximum number of requests in progress on a connection of HTTP/2.
const MAX_STREAMS: u32 = 100;
const MIN_HEADER_BYTES: usize = 8 << 10;

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// The maximum number of open connections. A further one is closed at once.
    pub connections: usize,
    /// How long a client may take to send its first request, and the headers of each request of HTTP/1.1.
    pub header_timeout: Duration,
    /// The maximum size of the headers of a request, in bytes. At least 8 KiB with HTTP/1.1.
    pub header_bytes: u32,
    /// Counts connections that were closed because there were too many.
    pub too_many: Counter,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            header_timeout: Duration::from_secs(60),
            header_bytes: 64 << 10,
            too_many: Counter::default(),
        }
    }
}

/// Serves HTTP/1.1 and HTTP/2 until `shutdown` completes, and then until requests in progress have ended.
///
/// # Errors
/// None at present: errors of a connection end this connection only.
pub async fn serve(
    mut listener: Listener,
    routes: Router,
    limits: HttpLimits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let closing = CancellationToken::new();
    let mut running = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            (connection, peer) = listener.accept() => {
                let Ok(slot) = slots.clone().try_acquire_owned() else {
                    limits.too_many.inc();
                    tracing::debug!(%peer, "connection closed: there are too many");
                    continue;
                };
                let serving = serve_connection(connection, routes.clone(), limits.clone(), closing.clone());
                running.spawn(async move {
                    let _slot = slot;
                    serving.await;
                });
            }
            Some(ended) = running.join_next() => note(ended),
            () = &mut shutdown => break,
        }
    }
    drop(listener);
    closing.cancel();
    while let Some(ended) = running.join_next().await {
        note(ended);
    }
    Ok(())
}

/// Panics are reported by the hook of the process. They end only their connection.
fn note(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended with a panic");
    }
}

async fn serve_connection(
    connection: Connection,
    routes: Router,
    limits: HttpLimits,
    closing: CancellationToken,
) {
    let header_bytes = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(header_bytes.max(MIN_HEADER_BYTES));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(Duration::from_secs(30)))
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(limits.header_bytes);

    let has_request = Arc::new(Notify::new());
    let of_request = Extension(connection.peer_certificates()).layer(routes);
    let noted = has_request.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        noted.notify_one();
        of_request.clone().oneshot(request)
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(connection), service));
    let may_stay = async {
        tokio::select! {
            () = has_request.notified() => std::future::pending().await,
            () = tokio::time::sleep(limits.header_timeout) => {}
            () = closing.cancelled() => {}
        }
    };
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = async { tokio::select! { () = may_stay => {}, () = closing.cancelled() => {} } } => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(error = %error, "connection ended");
    }
}
