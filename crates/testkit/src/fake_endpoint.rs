//! An HTTP server whose behaviour a test defines: it responds, responds late, never responds, or hangs up.
//!
//! The reply is a function of the request and of how often the same key and the same body were received before, so a failing
//! run can be repeated. The server runs on its own thread, so that synchronous tests can use it too, and ends with the value.
//!
//! It speaks HTTP/1.1 and HTTP/2. It uses hyper instead of axum, because a handler of axum cannot fail, and a failing handler is how a connection is closed
//! without a response.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use crate::hash::stable_hash;
use crate::until_seen;

/// The header that marks repetitions of a call.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// One call, as the behaviour sees it.
#[derive(Clone, Debug)]
pub struct Request {
    /// `POST` for example.
    pub method: String,
    /// With the query, if there is one.
    pub path: String,
    /// The version of HTTP.
    pub version: hyper::Version,
    /// As received.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
    /// The value of [`IDEMPOTENCY_KEY`], if there is one.
    pub key: Option<String>,
    /// How many calls with this key came before; 0 without a key.
    pub earlier_calls_of_key: u32,
    /// How many calls with this body came before, with any key.
    pub earlier_calls_of_body: u32,
}

/// The reply to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A response: status, headers, body.
    Status(u16, Vec<(String, String)>, Bytes),
    /// 200 with this body, whose length the response does not announce.
    Streamed(Bytes),
    /// 200 with the beginning of a body whose end never comes.
    Endless(Bytes),
    /// Nothing, for as long as the client waits.
    Hang,
    /// The end of the connection, without a response.
    Close,
    /// The other reply, later.
    Delay(Duration, Box<Reply>),
}

impl Reply {
    /// 200 with this body.
    pub fn ok(body: impl Into<Bytes>) -> Self {
        Self::Status(200, Vec::new(), body.into())
    }

    /// An empty response with this status.
    pub fn status(status: u16) -> Self {
        Self::Status(status, Vec::new(), Bytes::new())
    }
}

type Behaviour = Arc<dyn Fn(&Request) -> Reply + Send + Sync>;

/// The server; see the module.
pub struct FakeEndpoint {
    address: SocketAddr,
    shared: Arc<Shared>,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    behaviour: RwLock<Behaviour>,
    tls: Tls,
    is_down: watch::Sender<bool>,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    connections: u64,
    calls: u64,
    by_key: HashMap<String, u32>,
    // By hash, because a benchmark sends millions of bodies.
    by_body: HashMap<u64, u32>,
    in_flight: usize,
    most_in_flight: usize,
}

impl FakeEndpoint {
    /// Starts a server on a free port of 127.0.0.1. The behaviour is called on the server's only thread:
    /// it must not block. To respond late, it returns [`Reply::Delay`].
    ///
    /// # Panics
    /// If no port can be bound or no thread started.
    pub fn start(behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::try_start(Tls::off(), Arc::new(behaviour)).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// As [`FakeEndpoint::start`], with TLS.
    ///
    /// # Panics
    /// If no port can be bound or no thread started.
    #[cfg(feature = "https")]
    pub fn start_tls(
        tls: rustls::ServerConfig,
        behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let tls = Tls(Some(Arc::new(tls).into()));
        Self::try_start(tls, Arc::new(behaviour)).unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn try_start(tls: Tls, behaviour: Behaviour) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("binding the fake endpoint")?;
        listener
            .set_nonblocking(true)
            .context("making the fake endpoint's socket non-blocking")?;
        let address = listener
            .local_addr()
            .context("reading the fake endpoint's address")?;
        let shared = Arc::new(Shared {
            behaviour: RwLock::new(behaviour),
            tls,
            is_down: watch::Sender::new(false),
            counts: Mutex::new(Counts::default()),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the fake endpoint's runtime")?;
        let (shutdown, stopped) = oneshot::channel();
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("fake-endpoint".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = serve(listener, serving) => {}
                        _ = stopped => {}
                    }
                });
            })
            .context("starting the fake endpoint's thread")?;
        Ok(Self {
            address,
            shared,
            shutdown: Some(shutdown),
            thread: Some(thread),
        })
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://127.0.0.1:port`, or `https://127.0.0.1:port` with TLS, without a slash at the end.
    pub fn url(&self) -> String {
        let scheme = if self.shared.tls.is_on() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// How many connections have been opened in all.
    pub fn connections(&self) -> u64 {
        self.shared.counts().connections
    }

    /// Changes the behaviour from the next call on, for example for an outage.
    pub fn behave(&self, behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static) {
        *self
            .shared
            .behaviour
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(behaviour);
    }

    /// Stops listening and ends all connections, so that the next ones are refused, until it is called with `false`.
    pub fn down(&self, is_down: bool) {
        self.shared.is_down.send_replace(is_down);
    }

    /// How many calls have come in all.
    pub fn calls(&self) -> u64 {
        self.shared.counts().calls
    }

    /// How many calls have come with this idempotency key.
    pub fn calls_of_key(&self, key: &str) -> u32 {
        self.shared.counts().by_key.get(key).copied().unwrap_or(0)
    }

    /// How many calls have come with this body.
    pub fn calls_of_body(&self, body: &[u8]) -> u32 {
        self.shared
            .counts()
            .by_body
            .get(&stable_hash(body))
            .copied()
            .unwrap_or(0)
    }

    /// The idempotency keys seen, each with its number of calls.
    pub fn calls_by_key(&self) -> HashMap<String, u32> {
        self.shared.counts().by_key.clone()
    }

    /// How many calls wait for their reply now.
    pub fn in_flight(&self) -> usize {
        self.shared.counts().in_flight
    }

    /// Waits until exactly this many calls wait for their reply.
    ///
    /// # Panics
    /// If they do not within [`DEADLINE`](crate::DEADLINE).
    #[track_caller]
    pub fn until_in_flight(&self, count: usize) {
        until_seen("calls in flight", || self.in_flight(), |seen| *seen == count);
    }

    /// Waits until this many calls have come in all.
    ///
    /// # Panics
    /// If they do not within [`DEADLINE`](crate::DEADLINE).
    #[track_caller]
    pub fn until_calls(&self, count: u64) {
        until_seen("calls", || self.calls(), |seen| *seen >= count);
    }

    /// The most calls that ever waited for their reply at once.
    pub fn max_concurrency(&self) -> usize {
        self.shared.counts().most_in_flight
    }
}

impl Drop for FakeEndpoint {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let Some(thread) = self.thread.take() {
            // Only a behaviour can panic there, and the client has noticed: its connection was closed.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply(&self, request: &Request) -> Reply {
        let behaviour = Arc::clone(&self.behaviour.read().unwrap_or_else(PoisonError::into_inner));
        behaviour(request)
    }

    /// Counts a call, and sets its numbers of earlier calls.
    fn enter(self: &Arc<Self>, request: &mut Request) -> InFlight {
        let mut counts = self.counts();
        counts.calls += 1;
        let of_body = counts.by_body.entry(stable_hash(&request.body)).or_default();
        request.earlier_calls_of_body = *of_body;
        *of_body += 1;
        if let Some(key) = &request.key {
            let of_key = counts.by_key.entry(key.clone()).or_default();
            request.earlier_calls_of_key = *of_key;
            *of_key += 1;
        }
        counts.in_flight += 1;
        counts.most_in_flight = counts.most_in_flight.max(counts.in_flight);
        InFlight(Arc::clone(self))
    }
}

/// One call that waits for its reply; dropped with it, also when the client gives up.
struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.counts().in_flight -= 1;
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut is_down = shared.is_down.subscribe();
    let mut listener = tokio::net::TcpListener::from_std(listener)
        .unwrap_or_else(|error| panic!("listening as the fake endpoint: {error}"));
    let address = listener.local_addr();
    loop {
        tokio::select! {
            () = accept(&listener, &shared) => {}
            _ = is_down.wait_for(|is_down| *is_down) => {}
        }
        drop(listener);
        // The sender is in `shared`, so the channel is never closed.
        let _ = is_down.wait_for(|is_down| !is_down).await;
        listener = match &address {
            Ok(address) => tokio::net::TcpListener::bind(address)
                .await
                .unwrap_or_else(|error| panic!("listening again as the fake endpoint: {error}")),
            Err(error) => panic!("reading the fake endpoint's address: {error}"),
        };
    }
}

async fn accept(listener: &tokio::net::TcpListener, shared: &Arc<Shared>) {
    // Dropping the set ends every connection, so that nothing outlives the endpoint.
    let mut connections = JoinSet::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => panic!("accepting a connection as the fake endpoint: {error}"),
        };
        while connections.try_join_next().is_some() {}
        let shared = Arc::clone(shared);
        connections.spawn(async move {
            shared.counts().connections += 1;
            shared.tls.clone().converse(stream, &shared).await;
        });
    }
}

/// Whether and how connections are encrypted.
#[derive(Clone)]
#[cfg(feature = "https")]
struct Tls(Option<tokio_rustls::TlsAcceptor>);

#[derive(Clone)]
#[cfg(not(feature = "https"))]
struct Tls;

impl Tls {
    #[cfg(feature = "https")]
    fn off() -> Self {
        Self(None)
    }

    #[cfg(not(feature = "https"))]
    fn off() -> Self {
        Self
    }

    #[cfg(feature = "https")]
    fn is_on(&self) -> bool {
        self.0.is_some()
    }

    #[cfg(not(feature = "https"))]
    #[expect(clippy::unused_self, reason = "as with TLS")]
    fn is_on(&self) -> bool {
        false
    }

    async fn converse(self, stream: TcpStream, shared: &Arc<Shared>) {
        #[cfg(feature = "https")]
        if let Some(acceptor) = self.0 {
            // The client may reject the certificate.
            if let Ok(stream) = acceptor.accept(stream).await {
                converse(stream, shared).await;
            }
            return;
        }
        converse(stream, shared).await;
    }
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, shared: &Arc<Shared>) {
    let shared = Arc::clone(shared);
    let service = service_fn(move |request| respond(Arc::clone(&shared), request));
    let mut server = auto::Builder::new(TokioExecutor::new());
    // As services do.
    server.http2().max_header_list_size(64 << 10);
    // An error here is either our own hanging up or the client's.
    drop(server.serve_connection(TokioIo::new(stream), service).await);
}

async fn respond(
    shared: Arc<Shared>,
    request: hyper::Request<Incoming>,
) -> io::Result<hyper::Response<ReplyBody>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let key = head
        .headers
        .get(IDEMPOTENCY_KEY)
        .map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned());
    let mut request = Request {
        method: head.method.to_string(),
        path: head
            .uri
            .path_and_query()
            .map_or_else(|| "/".to_owned(), ToString::to_string),
        version: head.version,
        headers: head.headers,
        body,
        key,
        earlier_calls_of_key: 0,
        earlier_calls_of_body: 0,
    };
    let _in_flight = shared.enter(&mut request);
    let mut reply = shared.reply(&request);
    loop {
        match reply {
            Reply::Status(status, headers, body) => {
                return response(status, &headers, ReplyBody::new(body, End::Announced));
            }
            Reply::Streamed(body) => return response(200, &[], ReplyBody::new(body, End::Unannounced)),
            Reply::Endless(beginning) => return response(200, &[], ReplyBody::new(beginning, End::Never)),
            Reply::Hang => std::future::pending().await,
            Reply::Close => return Err(io::Error::other("hanging up, as told")),
            Reply::Delay(pause, later) => {
                tokio::time::sleep(pause).await;
                reply = *later;
            }
        }
    }
}

/// The body of a response.
struct ReplyBody {
    rest: Option<Bytes>,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The length is known from the beginning.
    Announced,
    Unannounced,
    Never,
}

impl ReplyBody {
    fn new(body: Bytes, end: End) -> Self {
        Self {
            rest: Some(body).filter(|body| !body.is_empty()),
            end,
        }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.rest.take() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None if self.end == End::Never => Poll::Pending,
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.end == End::Announced && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        if self.end == End::Announced {
            SizeHint::with_exact(self.rest.as_ref().map_or(0, |rest| rest.len() as u64))
        } else {
            SizeHint::default()
        }
    }
}

fn response(
    status: u16,
    headers: &[(String, String)],
    body: ReplyBody,
) -> io::Result<hyper::Response<ReplyBody>> {
    let mut response = hyper::Response::new(body);
    *response.status_mut() = hyper::StatusCode::from_u16(status).map_err(io::Error::other)?;
    for (name, value) in headers {
        let name = HeaderName::try_from(name).map_err(io::Error::other)?;
        response
            .headers_mut()
            .append(name, HeaderValue::try_from(value).map_err(io::Error::other)?);
    }
    Ok(response)
}

#[cfg(test)]
impl Request {
    /// A call with this body that came after so many others like it.
    pub(crate) fn example(body: &'static [u8], earlier_calls_of_body: u32) -> Self {
        Self {
            method: "POST".into(),
            path: "/".into(),
            version: hyper::Version::HTTP_11,
            headers: HeaderMap::new(),
            body: Bytes::from_static(body),
            key: None,
            earlier_calls_of_key: 0,
            earlier_calls_of_body,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Sends a request and returns the connection, unread.
    fn send(endpoint: &FakeEndpoint, key: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(endpoint.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST /enrich?a=b HTTP/1.1\r\nhost: test\r\nconnection: close\r\nidempotency-key: {key}\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// Sends a request and reads until the server closes.
    fn call(endpoint: &FakeEndpoint, key: &str, body: &str) -> String {
        let mut answer = String::new();
        send(endpoint, key, body).read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn endless_body_does_not_end() {
        let endpoint = FakeEndpoint::start(|_| Reply::Endless("the beginning".into()));
        let mut stream = send(&endpoint, "a", "body");
        let mut answer = Vec::new();
        while !answer.ends_with(b"the beginning\r\n") {
            let mut part = [0; 1024];
            let read = stream.read(&mut part).unwrap();
            assert_ne!(read, 0, "{}", String::from_utf8_lossy(&answer));
            answer.extend(&part[..read]);
        }
        stream.set_nonblocking(true).unwrap();
        let error = stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn calls_count_by_key_and_body() {
        let endpoint = FakeEndpoint::start(|request| {
            Reply::ok(format!(
                "{} {}",
                request.earlier_calls_of_key, request.earlier_calls_of_body
            ))
        });
        let answers =
            [("a", "x"), ("a", "y"), ("b", "x"), ("a", "x")].map(|(key, body)| call(&endpoint, key, body));
        for (answer, earlier) in answers.iter().zip(["0 0", "1 0", "0 1", "2 2"]) {
            assert!(answer.ends_with(earlier), "{answer}");
        }
        assert_eq!(
            (
                endpoint.calls(),
                endpoint.calls_of_key("a"),
                endpoint.calls_of_body(b"x")
            ),
            (4, 3, 3)
        );
        assert_eq!(
            endpoint.calls_by_key(),
            HashMap::from([("a".into(), 3), ("b".into(), 1)])
        );
        assert_eq!(endpoint.max_concurrency(), 1);
    }

    #[test]
    fn hang_ends_with_its_client() {
        let endpoint = FakeEndpoint::start(|_| Reply::Hang);
        let mut waiting = [send(&endpoint, "k", "first"), send(&endpoint, "k", "second")];
        endpoint.until_in_flight(2);
        waiting[0]
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let error = waiting[0].read(&mut [0]).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
            "{error}"
        );
        drop(waiting);
        endpoint.until_in_flight(0);
        assert_eq!(endpoint.max_concurrency(), 2);
    }
}
