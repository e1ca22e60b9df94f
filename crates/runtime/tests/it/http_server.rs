//! The limits of the HTTP server, on real sockets. HTTP/2 is written as frames where no client library would behave like that.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use http_body_util::BodyExt as _;
use hyper::body::Frame;
use redeliver_runtime::http_server::{BodyTimeout, HttpLimits, Protection, serve};
use redeliver_runtime::listen::Listener;
use redeliver_testkit::{DEADLINE, chaos_random};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(600);

/// Limits that no test reaches.
fn no_limits() -> HttpLimits {
    HttpLimits {
        header_timeout: LONG,
        idle_timeout: LONG,
        body_timeout: LONG,
        write_timeout: LONG,
        ping_interval: LONG,
        ping_timeout: LONG,
        linger: LONG,
        ..HttpLimits::default()
    }
}

/// What the routes of a server wait for, and what they report.
#[derive(Clone)]
struct Shared {
    /// Each answer of `/wait`, and each part of that of `/parts`, takes a permit.
    permits: Arc<Semaphore>,
    /// A permit for each request of `/wait`.
    started: Arc<Semaphore>,
    /// A permit for each end of an answer of `/endless`.
    dropped: Arc<Semaphore>,
}

struct Server {
    address: SocketAddr,
    limits: HttpLimits,
    shared: Shared,
    _running: JoinSet<std::io::Result<()>>,
}

/// A body without end.
struct Endless(Arc<Semaphore>);

impl HttpBody for Endless {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 65_536])))))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

/// A body that waits for a permit before each part.
struct Parts(Arc<Semaphore>);

impl Parts {
    fn body(self) -> Body {
        Body::from_stream(futures::stream::unfold(self.0, async |permits| {
            permits.acquire().await.unwrap().forget();
            Some((Ok::<_, std::io::Error>(Bytes::from_static(b"part")), permits))
        }))
    }
}

/// Waits for a permit before the request is handled.
async fn wait_first(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    shared.permits.acquire().await.unwrap().forget();
    next.run(request).await
}

impl Server {
    fn start(limits: HttpLimits) -> Self {
        let listener = Listener::bind("test.listen", "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Shared {
            permits: Arc::new(Semaphore::new(0)),
            started: Arc::new(Semaphore::new(0)),
            dropped: Arc::new(Semaphore::new(0)),
        };
        let read = post(async |body: Body| match body.collect().await {
            Ok(body) => (StatusCode::OK, format!("{} bytes", body.to_bytes().len())),
            Err(error) => match BodyTimeout::in_chain(&error) {
                Some(timeout) => (StatusCode::REQUEST_TIMEOUT, timeout.to_string()),
                None => (StatusCode::BAD_REQUEST, error.to_string()),
            },
        });
        let routes = Router::new()
            .route("/", get(async || "hello"))
            .route("/read", read.clone())
            .route(
                "/late",
                read.layer(middleware::from_fn_with_state(shared.clone(), wait_first)),
            )
            .route("/ignore", post(async || "ignored"))
            .route(
                "/wait",
                get(
                    async |State(shared): State<Shared>, Extension(protection): Extension<Protection>| {
                        protection.protect();
                        shared.started.add_permits(1);
                        shared.permits.acquire().await.unwrap().forget();
                        "done"
                    },
                ),
            )
            .route(
                "/parts",
                get(async |State(shared): State<Shared>| Parts(shared.permits).body()),
            )
            .route(
                "/endless",
                get(async |State(shared): State<Shared>| Body::new(Endless(shared.dropped))),
            )
            .with_state(shared.clone());
        let mut running = JoinSet::new();
        running.spawn(serve(listener, routes, limits.clone(), std::future::pending()));
        Self {
            address,
            limits,
            shared,
            _running: running,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn connect_h2(&self, settings: &[(u16, u32)]) -> H2 {
        H2::new(self.connect().await, settings).await
    }

    /// Waits until as much time has passed as closes an idle connection, twice.
    async fn outlast_idle(&self) {
        for _ in 0..2 {
            let mut idle = self.connect().await;
            exchange(&mut idle, "/").await;
            read_to_end(&mut idle).await;
        }
    }

    /// Waits until this many requests of `/wait` are in progress.
    async fn are_started(&self, requests: u32) {
        let started = tokio::time::timeout(DEADLINE, self.shared.started.acquire_many(requests));
        started.await.expect("requests are in progress").unwrap().forget();
    }

    /// Waits until the answer of `/endless` is dropped.
    async fn endless_is_dropped(&self) {
        let dropped = tokio::time::timeout(DEADLINE, self.shared.dropped.acquire());
        dropped.await.expect("the response ends").unwrap().forget();
    }
}

async fn send(stream: &mut TcpStream, path: &str) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// Reads until this text arrives.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut read = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&read).contains(text) {
            let count = stream.read_buf(&mut read).await.unwrap();
            assert_ne!(count, 0, "closed after {:?}", String::from_utf8_lossy(&read));
        }
    };
    tokio::time::timeout(DEADLINE, reading).await.expect(text);
    String::from_utf8(read).unwrap()
}

async fn exchange(stream: &mut TcpStream, path: &str) {
    send(stream, path).await;
    read_until(stream, "hello").await;
}

/// Reads until the server closes the connection. A connection that is reset is closed, too.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    let reading = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut read));
    drop(reading.await.expect("the server closes the connection"));
    String::from_utf8_lossy(&read).into_owned()
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// `CANCEL`.
const CANCEL: u32 = 8;

/// A connection of HTTP/2 that answers neither pings nor settings.
struct H2(TcpStream);

impl H2 {
    async fn new(mut stream: TcpStream, settings: &[(u16, u32)]) -> Self {
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        let mut own = Self(stream);
        let settings = settings
            .iter()
            .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat());
        own.write(SETTINGS, 0, 0, &settings.collect::<Vec<u8>>()).await;
        own
    }

    async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    async fn request(&mut self, stream: u32, method: &str, path: &str, flags: u8) {
        // RFC 7541: indexed fields of the static table, and literals with indexed names.
        let mut fields = vec![if method == "GET" { 0x82 } else { 0x83 }, 0x86];
        for (name, value) in [(0x04, path), (0x01, "localhost")] {
            fields.extend([name, u8::try_from(value.len()).unwrap()]);
            fields.extend(value.as_bytes());
        }
        self.write(HEADERS, END_HEADERS | flags, stream, &fields).await;
    }

    async fn get(&mut self, stream: u32, path: &str) {
        self.request(stream, "GET", path, END_STREAM).await;
    }

    /// Reads frames until one of this kind arrives on a stream. Returns its payload.
    async fn until(&mut self, stream: u32, kind: u8) -> Vec<u8> {
        let reading = async {
            loop {
                let mut head = [0; 9];
                self.0.read_exact(&mut head).await.unwrap();
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
                let mut payload = vec![0; usize::try_from(length).unwrap()];
                self.0.read_exact(&mut payload).await.unwrap();
                let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                if (id, head[3]) == (stream, kind) {
                    return payload;
                }
            }
        };
        tokio::time::timeout(DEADLINE, reading).await.expect("a frame")
    }
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let server = Server::start(HttpLimits {
        header_timeout: SHORT,
        idle_timeout: SHORT,
        ..no_limits()
    });
    let sent = [
        "",
        "GET / HTTP/1.1\r\nhost: loc",
        "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\nhost: loc",
        "PRI * HTTP/2.0\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    let closed = sent.map(async |sent| {
        let mut stream = server.connect().await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        let answer = read_to_end(&mut stream).await;
        let is_answered = sent.contains("localhost\r\n\r\n");
        assert_eq!(answer.contains("hello"), is_answered, "{sent}: {answer}");
    });
    let answered = async {
        let mut h2 = server.connect_h2(&[]).await;
        h2.get(1, "/").await;
        assert_eq!(h2.until(1, DATA).await, b"hello");
        read_to_end(&mut h2.0).await;
    };
    let half = async {
        let mut h2 = server.connect_h2(&[]).await;
        h2.write(HEADERS, END_STREAM, 1, &[0x82, 0x86, 0x84]).await;
        read_to_end(&mut h2.0).await;
    };
    tokio::join!(futures::future::join_all(closed), answered, half);
}

#[tokio::test]
async fn http2_connections_end_orderly() {
    let server = Server::start(HttpLimits {
        idle_timeout: SHORT,
        ..no_limits()
    });
    let io = hyper_util::rt::TokioIo::new(server.connect().await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let mut running = JoinSet::new();
    running.spawn(connection);
    let request = axum::http::Request::get("http://localhost/")
        .body(Body::empty())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
    let ended = tokio::time::timeout(DEADLINE, running.join_next()).await;
    // An orderly end is not an error.
    ended.expect("the connection ends").unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn busy_connections_are_kept() {
    let server = Server::start(HttpLimits {
        header_timeout: SHORT,
        idle_timeout: SHORT,
        write_timeout: SHORT,
        body_timeout: SHORT,
        ..no_limits()
    });
    for (path, answer) in [("/wait", "done"), ("/parts", "part")] {
        let mut stream = server.connect().await;
        send(&mut stream, path).await;
        let mut h2 = server.connect_h2(&[]).await;
        h2.get(1, path).await;
        server.outlast_idle().await;
        server.shared.permits.add_permits(2);
        read_until(&mut stream, answer).await;
        assert_eq!(h2.until(1, DATA).await, answer.as_bytes());
        if path == "/parts" {
            server.outlast_idle().await;
            server.shared.permits.add_permits(2);
            read_until(&mut stream, answer).await;
            assert_eq!(h2.until(1, DATA).await, answer.as_bytes());
        }
    }
}

#[tokio::test]
async fn slow_bodies_fail() {
    let server = Server::start(HttpLimits {
        body_timeout: SHORT,
        ..no_limits()
    });
    let part =
        |path: &str| format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n1");
    let mut stream = server.connect().await;
    stream.write_all(part("/read").as_bytes()).await.unwrap();
    let answer = read_to_end(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(
        answer.contains("the body of the request did not arrive within"),
        "{answer}"
    );
    // The time of a body that is not read does not count.
    let mut stream = server.connect().await;
    stream.write_all(part("/ignore").as_bytes()).await.unwrap();
    let answer = read_to_end(&mut stream).await;
    assert!(answer.contains("ignored"), "{answer}");
    assert!(answer.contains("connection: close\r\n"), "{answer}");
    // A body that is read leaves its connection open.
    let mut stream = server.connect().await;
    let whole = part("/read").replace("length: 100", "length: 1");
    stream.write_all(whole.as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "1 bytes").await;
    assert!(!answer.contains("connection: close"), "{answer}");
    exchange(&mut stream, "/").await;

    let mut h2 = server.connect_h2(&[]).await;
    h2.request(1, "POST", "/read", 0).await;
    h2.write(DATA, 0, 1, b"1").await;
    let answer = h2.until(1, DATA).await;
    assert!(String::from_utf8_lossy(&answer).contains("did not arrive within"));
    h2.request(3, "POST", "/ignore", 0).await;
    assert_eq!(h2.until(3, DATA).await, b"ignored");
    h2.request(5, "POST", "/read", 0).await;
    h2.write(DATA, END_STREAM, 5, b"1").await;
    assert_eq!(h2.until(5, DATA).await, b"1 bytes");
    assert_eq!(server.limits.slow_bodies.get(), 2);
}

#[tokio::test]
async fn unread_body_time_does_not_count() {
    let server = Server::start(HttpLimits {
        header_timeout: SHORT,
        idle_timeout: SHORT,
        body_timeout: SHORT,
        ..no_limits()
    });
    let mut stream = server.connect().await;
    let head = "POST /late HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n1";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut h2 = server.connect_h2(&[]).await;
    h2.request(1, "POST", "/late", 0).await;
    h2.write(DATA, 0, 1, b"1").await;
    // Longer than a body may take.
    server.outlast_idle().await;
    stream.write_all(b"2").await.unwrap();
    h2.write(DATA, END_STREAM, 1, b"2").await;
    server.shared.permits.add_permits(2);
    read_until(&mut stream, "2 bytes").await;
    assert_eq!(h2.until(1, DATA).await, b"2 bytes");
    assert_eq!(server.limits.slow_bodies.get(), 0);
}

#[tokio::test]
async fn sending_client_reads_the_answer() {
    const BODY: usize = 64 << 20;
    let server = Server::start(no_limits());
    let head = format!("POST /ignore HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY}\r\n\r\n");
    let headers = "x: 0123456789\r\n".repeat(BODY / 15);
    // An unread body, and headers that are too large.
    for (sent, says) in [
        (head + &"1".repeat(BODY), "HTTP/1.1 200 OK"),
        (format!("GET / HTTP/1.1\r\n{headers}\r\n"), "HTTP/1.1 431 "),
    ] {
        let mut stream = server.connect().await;
        // It reads nothing before it has sent everything.
        let sending = tokio::time::timeout(DEADLINE, stream.write_all(sent.as_bytes()));
        sending.await.expect("the server reads on").unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(says), "{answer}");
    }
}

#[tokio::test]
async fn unread_connection_is_closed() {
    let server = Server::start(HttpLimits {
        write_timeout: SHORT,
        ..no_limits()
    });
    let mut stream = server.connect().await;
    send(&mut stream, "/endless").await;
    server.endless_is_dropped().await;
    assert_eq!(server.limits.not_read.get(), 1);

    let mut h2 = server.connect_h2(&[(INITIAL_WINDOW_SIZE, 0x7fff_ffff)]).await;
    h2.write(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes())
        .await;
    h2.get(1, "/endless").await;
    server.endless_is_dropped().await;
    assert_eq!(server.limits.not_read.get(), 2);
}

#[tokio::test]
async fn blocked_stream_is_reset() {
    let server = Server::start(HttpLimits {
        write_timeout: SHORT,
        ..no_limits()
    });
    // No answer fits into the window, not even a byte.
    let mut h2 = server.connect_h2(&[(INITIAL_WINDOW_SIZE, 0)]).await;
    h2.get(1, "/wait").await;
    for (stream, path) in [(3, "/"), (5, "/endless")] {
        h2.get(stream, path).await;
        assert_eq!(h2.until(stream, RST_STREAM).await, CANCEL.to_be_bytes(), "{path}");
    }
    server.endless_is_dropped().await;
    assert_eq!(server.limits.not_read.get(), 2);
    h2.write(WINDOW_UPDATE, 0, 1, &4_u32.to_be_bytes()).await;
    server.shared.permits.add_permits(1);
    assert_eq!(h2.until(1, DATA).await, b"done");
}

#[tokio::test]
async fn unanswered_pings_close_connection() {
    let server = Server::start(HttpLimits {
        ping_interval: SHORT,
        ping_timeout: SHORT,
        ..no_limits()
    });
    let mut h2 = server.connect_h2(&[]).await;
    h2.get(1, "/wait").await;
    read_to_end(&mut h2.0).await;
}

#[tokio::test]
async fn unprotected_connections_are_replaced() {
    let server = Server::start(HttpLimits {
        connections: 2,
        ..no_limits()
    });
    let mut h2 = server.connect_h2(&[]).await;
    let mut h1 = server.connect().await;
    h2.get(1, "/parts").await;
    server.shared.permits.add_permits(1);
    assert_eq!(h2.until(1, DATA).await, b"part");
    send(&mut h1, "/parts").await;
    read_until(&mut h1, "200 OK").await;
    let mut busy = Vec::new();
    for replaced in [&mut h2.0, &mut h1] {
        let mut stream = server.connect().await;
        send(&mut stream, "/wait").await;
        server.are_started(1).await;
        read_to_end(replaced).await;
        busy.push(stream);
    }
    // Other requests protect their connections.
    let mut refused = server.connect().await;
    assert_eq!(read_to_end(&mut refused).await, "");
    server.shared.permits.add_permits(2);
    for stream in &mut busy {
        read_until(stream, "done").await;
    }
}

#[tokio::test]
async fn oldest_unprotected_stream_is_replaced() {
    let server = Server::start(HttpLimits {
        unprotected_streams: 2,
        ..no_limits()
    });
    let (mut one, mut other) = (server.connect_h2(&[]).await, server.connect_h2(&[]).await);
    one.get(1, "/wait").await;
    server.are_started(1).await;
    // Neither the protected one, nor those that have ended count.
    for stream in [3, 5, 7] {
        one.get(stream, "/").await;
        assert_eq!(one.until(stream, DATA).await, b"hello");
    }
    for stream in [9, 11] {
        one.get(stream, "/parts").await;
        one.until(stream, HEADERS).await;
    }
    for (stream, oldest) in [(1, 9), (3, 11)] {
        other.get(stream, "/parts").await;
        assert_eq!(one.until(oldest, RST_STREAM).await, CANCEL.to_be_bytes());
    }
    assert_eq!(server.limits.too_many.get(), 2);
    server.shared.permits.add_permits(1);
    assert_eq!(one.until(1, DATA).await, b"done");
}

#[tokio::test]
async fn mixed_clients_block_no_others() {
    let server = Server::start(HttpLimits {
        connections: 5,
        unprotected_streams: 10,
        ..no_limits()
    });
    let mut random = chaos_random("mixed_clients_block_no_others");
    let sent = [
        "",
        "GET / HTTP/1.1\r\nhost: loc",
        "GET /parts HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n1",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    let mut held = Vec::new();
    for _ in 0..100 {
        match sent.get(random.usize(..=sent.len())) {
            Some(sent) => {
                let mut stream = server.connect().await;
                stream.write_all(sent.as_bytes()).await.unwrap();
                held.push(stream);
            }
            None => {
                let mut h2 = server.connect_h2(&[(INITIAL_WINDOW_SIZE, 0)]).await;
                for stream in (1..random.u32(1..20)).step_by(2) {
                    match random.u32(0..3) {
                        0 => h2.get(stream, "/parts").await,
                        1 => h2.get(stream, "/endless").await,
                        _ => h2.request(stream, "POST", "/read", 0).await,
                    }
                }
                held.push(h2.0);
            }
        }
        let mut other = server.connect().await;
        exchange(&mut other, "/").await;
        let mut other = server.connect_h2(&[]).await;
        other.get(1, "/").await;
        assert_eq!(other.until(1, DATA).await, b"hello");
    }
}

#[tokio::test]
async fn http2_server_refuses_http1() {
    let server = Server::start(HttpLimits {
        http2_only: true,
        ..no_limits()
    });
    let mut h1 = server.connect().await;
    send(&mut h1, "/").await;
    assert!(!read_to_end(&mut h1).await.contains("hello"));
    let mut h2 = server.connect_h2(&[]).await;
    h2.get(1, "/").await;
    assert_eq!(h2.until(1, DATA).await, b"hello");
}

#[tokio::test]
async fn longest_idle_connection_is_replaced() {
    let server = Server::start(HttpLimits {
        connections: 3,
        ..no_limits()
    });
    let mut busy = server.connect().await;
    send(&mut busy, "/wait").await;
    let mut idle = BTreeMap::new();
    for number in 0..2 {
        let mut stream = server.connect().await;
        exchange(&mut stream, "/").await;
        idle.insert(number, stream);
    }
    for number in 2..5 {
        let mut stream = server.connect().await;
        exchange(&mut stream, "/").await;
        idle.insert(number, stream);
        let (_, mut longest) = idle.pop_first().unwrap();
        read_to_end(&mut longest).await;
    }
    assert_eq!(server.limits.too_many.get(), 3);
    // Requests in progress are not replaced.
    for stream in idle.values_mut() {
        send(stream, "/wait").await;
    }
    server.are_started(3).await;
    let mut refused = server.connect().await;
    drop(
        refused
            .write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await,
    );
    assert_eq!(read_to_end(&mut refused).await, "");
    assert_eq!(server.limits.too_many.get(), 4);
    server.shared.permits.add_permits(3);
    for stream in idle.values_mut().chain([&mut busy]) {
        read_until(stream, "done").await;
    }
}
