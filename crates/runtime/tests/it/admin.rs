//! The admin port over real sockets.

use std::sync::{Arc, Mutex};

use prometheus_client::metrics::counter::Counter;
use redeliver_core::SystemClock;
use redeliver_runtime::admin::{Admin, serve};
use redeliver_runtime::config::{Config, ProgramConfig};
use redeliver_runtime::health::Health;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::metrics;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

struct Response {
    head: String,
    body: String,
}

impl Response {
    fn status(&self) -> &str {
        self.head.split(' ').nth(1).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

async fn get(address: std::net::SocketAddr, path: &str) -> Response {
    get_as(address, "admin", path).await
}

async fn get_as(address: std::net::SocketAddr, host: &str, path: &str) -> Response {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    Response {
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

fn any_port() -> Listener {
    Listener::bind("admin.listen", "127.0.0.1:0".parse().unwrap()).unwrap()
}

#[tokio::test]
async fn port_serves_all_pages() {
    let mut registry = metrics::registry("enricher", "e-0", &SystemClock);
    let counter: Counter = Counter::default();
    registry.register("records", "Records that were read", counter.clone());
    counter.inc();
    let mut config = <ProgramConfig>::default();
    config.shared.kafka.properties.set("sasl.password", "hunter2");
    let admin = Admin {
        health: Health::new(),
        registry: Arc::new(Mutex::new(registry)),
        effective: config.to_json().into(),
        config: Arc::new(config.shared),
        shutdown: CancellationToken::new(),
    };
    let listener = any_port();
    let address = listener.local_addr().unwrap();
    let mut server = JoinSet::new();
    server.spawn(serve(listener, admin.clone()));

    assert_eq!(get(address, "/livez").await.status(), "200");
    assert!(get(address, "/").await.body.contains("/readyz"));
    assert_eq!(get(address, "/nowhere").await.status(), "404");

    let (kafka, lane) = (admin.health.part("kafka"), admin.health.part("lane-0"));
    lane.ready();
    kafka.not_ready("no broker answers");
    let waiting = get(address, "/readyz").await;
    assert_eq!(waiting.status(), "503");
    let parts = json!({ "kafka": "waiting: no broker answers", "lane-0": "ready" });
    assert_eq!(waiting.json(), json!({ "ready": false, "parts": parts }));
    kafka.ready();
    assert_eq!(get(address, "/readyz").await.status(), "200");

    let metrics = get(address, "/metrics").await;
    assert!(
        metrics
            .head
            .contains("application/openmetrics-text; version=1.0.0")
    );
    assert!(
        metrics.body.contains("redeliver_records_total 1\n"),
        "{}",
        metrics.body
    );
    assert!(metrics.body.ends_with("# EOF\n"));

    let config = get(address, "/config").await;
    assert_eq!(config.json()["kafka"]["brokers"], "localhost:9092");
    assert_eq!(
        config.json()["kafka"]["properties"]["sasl.password"],
        "<redacted>"
    );
    assert!(!config.body.contains("hunter2"));

    admin.shutdown.cancel();
    let readiness = get(address, "/readyz").await;
    assert_eq!(
        (readiness.status(), &readiness.json()["parts"]["process"]),
        ("503", &"shutting down".into())
    );
    assert_eq!(get(address, "/livez").await.status(), "200");
}

#[tokio::test]
async fn a_web_page_can_read_nothing() {
    let config = "admin: { allowed_hosts: [Metrics.example, '2001:db8::a'] }";
    let admin = Admin {
        health: Health::new(),
        registry: Arc::new(Mutex::new(metrics::registry("enricher", "e-0", &SystemClock))),
        config: Arc::new(Config::from_yaml(config).unwrap()),
        effective: "{}".into(),
        shutdown: CancellationToken::new(),
    };
    admin.health.part("kafka").ready();
    let listener = any_port();
    let address = listener.local_addr().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let subscriber = tracing_subscriber::fmt().with_ansi(false);
    let subscriber = subscriber.with_writer(log.reopen().unwrap()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut server = JoinSet::new();
    server.spawn(serve(listener, admin));
    for path in ["/metrics", "/config", "/readyz", "/"] {
        for host in [
            "rebound.example",
            "rebound.example:9464",
            "127.0.0.1.rebound.example",
            "[::1",
        ] {
            let refused = get_as(address, host, path).await;
            assert_eq!(refused.status(), "421", "{host} {path}");
            assert!(refused.body.contains("admin.allowed_hosts"), "{}", refused.body);
        }
        // The kubelet and Prometheus name the address of the pod, others a container, or what the configuration allows.
        for host in [
            "10.1.2.3:9464",
            "[2001:db8::1]:9464",
            "localhost",
            "enricher:9464",
            "metrics.example",
        ] {
            assert_eq!(get_as(address, host, path).await.status(), "200", "{host} {path}");
        }
    }
    assert_eq!(get_as(address, "rebound.example", "/livez").await.status(), "200");
    let log = std::fs::read_to_string(&log).unwrap();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert!((1..4).contains(&warnings.len()), "for 16 requests: {log}");
    assert!(
        warnings[0].contains("host=\"rebound.example\"") && warnings[0].contains("admin.allowed_hosts"),
        "{log}"
    );
}

#[tokio::test]
async fn held_connections_block_no_probe() {
    let admin = Admin {
        health: Health::new(),
        registry: Arc::new(Mutex::new(metrics::registry("enricher", "e-0", &SystemClock))),
        config: Arc::new(Config::default()),
        effective: "{}".into(),
        shutdown: CancellationToken::new(),
    };
    let listener = any_port();
    let address = listener.local_addr().unwrap();
    let mut server = JoinSet::new();
    server.spawn(serve(listener, admin));
    // A request of HTTP/2 whose client has no room for any answer.
    let request =
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0\0\0\x11\x01\x05\0\0\0\x01\
        \x82\x86\x04\x06/livez\x01\x05admin";
    for sent in [&b""[..], request] {
        let mut held = Vec::new();
        for _ in 0..201 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent).await.unwrap();
            held.push(stream);
            assert_eq!(get(address, "/livez").await.status(), "200");
        }
        // There were too many, so the first one was replaced.
        drop(held[0].read_to_end(&mut Vec::new()).await);
    }
}
