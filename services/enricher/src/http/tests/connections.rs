//! Versions of HTTP, proxies, and how long connections are used.

use std::net::{Ipv4Addr, SocketAddr};

use hyper::Version;
use redeliver_runtime::config::{ConnectionsConfig, HttpVersion, Url};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::*;

fn with(url: impl Into<String>, change: impl FnOnce(&mut ConnectionsConfig)) -> HttpSettings {
    let mut settings = settings(url);
    change(&mut settings.connections);
    settings
}

/// The body is the version of HTTP.
fn version_of_request(request: &redeliver_testkit::Request) -> Reply {
    Reply::ok(format!("{:?}", request.version))
}

#[tokio::test]
async fn plain_http2_must_be_configured() {
    let endpoint = FakeEndpoint::start(version_of_request);
    for (version, expected) in [
        (HttpVersion::Auto, Version::HTTP_11),
        (HttpVersion::Http1, Version::HTTP_11),
        (HttpVersion::Http2, Version::HTTP_2),
    ] {
        let settings = with(endpoint.url(), |connections| connections.version = version);
        let produced = call(settings).await.unwrap();
        assert_eq!(value(&produced), format!("{expected:?}").as_bytes());
    }
}

#[tokio::test]
async fn tls_negotiates_http2() {
    let (scratch, ours) = (Scratch::new("http").unwrap(), Authority::new());
    let ca_file = ours.write(scratch.path().join("ours.crt"));
    for (offered, version, expected) in [
        (&["h2", "http/1.1"][..], HttpVersion::Auto, Some(Version::HTTP_2)),
        (&["http/1.1"], HttpVersion::Auto, Some(Version::HTTP_11)),
        (&[], HttpVersion::Auto, Some(Version::HTTP_11)),
        (&["h2", "http/1.1"], HttpVersion::Http1, Some(Version::HTTP_11)),
        (&["h2", "http/1.1"], HttpVersion::Http2, Some(Version::HTTP_2)),
        (&["http/1.1"], HttpVersion::Http2, None),
    ] {
        let mut tls = ours.server(None);
        tls.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
        let endpoint = FakeEndpoint::start_tls(tls, version_of_request);
        let mut settings = with(endpoint.url(), |connections| connections.version = version);
        settings.tls.ca_file = Some(ca_file.clone());
        let ended = call(settings).await;
        let code = ended.as_ref().map_err(|failure| failure.code.as_str());
        let text = expected.map(|version| format!("{version:?}"));
        match &text {
            Some(text) => assert_eq!(code.map(value), Ok(text.as_bytes()), "{offered:?} {version:?}"),
            None => assert_eq!(code.map(value), Err("http.connect"), "{offered:?} {version:?}"),
        }
    }
}

#[tokio::test]
async fn http2_calls_share_a_connection() {
    let endpoint = FakeEndpoint::start(|_| Reply::Delay(Duration::from_secs(1), Box::new(Reply::ok("late"))));
    let settings = with(endpoint.url(), |connections| {
        connections.version = HttpVersion::Http2;
    });
    let handler = handler(settings);
    assert!(run(&handler, attempt(Some(b"doc"), &[])).await.is_ok());
    let calls = [(); 20].map(|()| run(&handler, attempt(Some(b"doc"), &[])));
    assert!(futures::future::join_all(calls).await.iter().all(Result::is_ok));
    assert_eq!((endpoint.connections(), endpoint.max_concurrency()), (1, 20));
}

#[tokio::test]
async fn reset_stream_is_a_closed_connection() {
    let endpoint = FakeEndpoint::start(|_| Reply::Close);
    let settings = with(endpoint.url(), |connections| {
        connections.version = HttpVersion::Http2;
    });
    let failure = failure(settings).await;
    assert_scope(&failure, "http.closed", FailureScope::Endpoint);
}

/// Forwards connections to `target` until the set of tasks is dropped. The first connection is frozen on a notification: it stays
/// open, and nothing passes any more.
async fn freezing_proxy(target: SocketAddr, tasks: &mut JoinSet<()>) -> (SocketAddr, Arc<Notify>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (address, freeze) = (listener.local_addr().unwrap(), Arc::new(Notify::new()));
    let mut of_first = Some(freeze.clone());
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (client, _) = listener.accept().await.unwrap();
            connections.spawn(forward(client, target, of_first.take()));
        }
    });
    (address, freeze)
}

async fn forward(mut client: TcpStream, target: SocketAddr, freeze: Option<Arc<Notify>>) {
    let mut server = TcpStream::connect(target).await.unwrap();
    let frozen = async {
        match freeze {
            Some(freeze) => freeze.notified().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => {}
        () = frozen => std::future::pending().await,
    }
}

#[tokio::test]
async fn frozen_http2_connection_is_replaced() {
    let endpoint = FakeEndpoint::start(|_| Reply::ok("ok"));
    let mut tasks = JoinSet::new();
    let (proxy, freeze) = freezing_proxy(endpoint.address(), &mut tasks).await;
    let settings = with(format!("http://{proxy}"), |connections| {
        connections.version = HttpVersion::Http2;
    });
    let settings = HttpSettings {
        timeout: Duration::from_secs(600),
        ..settings
    };
    let handler = handler(settings);
    assert!(run(&handler, attempt(Some(b"doc"), &[])).await.is_ok());
    freeze.notify_one();
    // Pings find out that the connection is dead.
    let failure = run(&handler, attempt(Some(b"doc"), &[])).await.unwrap_err();
    assert_scope(&failure, "http.timeout", FailureScope::Endpoint);
    assert!(run(&handler, attempt(Some(b"doc"), &[])).await.is_ok());
    assert_eq!(endpoint.connections(), 2);
}

/// Calls until a new connection is opened.
async fn until_another_connection(handler: &HttpHandler, endpoint: &FakeEndpoint) {
    eventually_async("another connection", Duration::from_secs(30), async || {
        assert!(run(handler, attempt(Some(b"doc"), &[])).await.is_ok());
        ensure(endpoint.connections() > 1, "one connection")
    })
    .await;
}

#[tokio::test]
async fn busy_connection_ends_at_max_age() {
    let endpoint = FakeEndpoint::start(|_| Reply::ok("ok"));
    let settings = with(endpoint.url(), |connections| {
        connections.max_age = HumanDuration::from_secs(1);
        connections.idle_timeout = HumanDuration::from_secs(3_600);
    });
    let handler = handler(settings);
    until_another_connection(&handler, &endpoint).await;
}

#[tokio::test]
async fn calls_use_the_configured_proxy() {
    // A proxy that answers by itself.
    let proxy = FakeEndpoint::start(|request| {
        // "me:secret" in base64.
        assert_eq!(request.headers["proxy-authorization"], "Basic bWU6c2VjcmV0");
        assert_eq!(request.headers["host"], "endpoint.example");
        Reply::ok("proxied")
    });
    let url = format!("http://me:secret@{}", proxy.address());
    let settings = with("http://endpoint.example/call", |connections| {
        connections.proxy = Some(Url::new(url));
    });
    let shown = format!("{settings:?}");
    assert!(!shown.contains("secret"), "{shown}");
    assert_eq!(value(&call(settings).await.unwrap()), b"proxied");
    assert_eq!(proxy.calls(), 1);
}
