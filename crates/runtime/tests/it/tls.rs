//! Listeners with TLS on real sockets: client certificates, protocols, and files that change.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Extension;
use axum::routing::get;
use http_body_util::Empty;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prometheus_client::registry::Registry;
use redeliver_core::SystemClock;
use redeliver_runtime::admin::{self, Admin};
use redeliver_runtime::config::{Config, ServerTlsConfig};
use redeliver_runtime::health::Health;
use redeliver_runtime::http_server::{HttpLimits, serve};
use redeliver_runtime::listen::{Listener, PeerCertificates};
use redeliver_runtime::metrics;
use redeliver_runtime::tls::{
    ClientCertificates, Protocols, ServerTls, TlsMetrics, certificates, client_builder, private_key,
    trusted_roots,
};
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{ensure, eventually_async};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(60);

/// The files of a server, below a symbolic link that is swapped as Kubernetes swaps that of a Secret.
struct Files {
    scratch: Scratch,
    generation: u32,
    clients: Authority,
}

impl Files {
    fn new() -> Self {
        let mut files = Self {
            scratch: Scratch::new("tls").unwrap(),
            generation: 0,
            clients: Authority::new().unwrap(),
        };
        files.swap(|_| {});
        files
    }

    fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// Replaces all files at once, by those of a new authority and a change of them. Returns the new authority.
    fn swap(&mut self, change: impl FnOnce(&Path)) -> Authority {
        let authority = Authority::new().unwrap();
        self.generation += 1;
        let name = format!("..{}", self.generation);
        let directory = self.directory().join(&name);
        std::fs::create_dir(&directory).unwrap();
        authority.sign().unwrap().write(&directory, "tls").unwrap();
        self.clients.write(&directory, "ca.crt").unwrap();
        authority.write(&directory, "own-ca.crt").unwrap();
        change(&directory);
        let new = self.directory().join("..new");
        std::os::unix::fs::symlink(&name, &new).unwrap();
        std::fs::rename(&new, self.directory().join("..data")).unwrap();
        authority
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory().join("..data").join(name)
    }

    fn config(&self, requires_client_certificate: bool) -> ServerTlsConfig {
        ServerTlsConfig {
            cert_file: Some(self.path("tls.crt")),
            key_file: Some(self.path("tls.key")),
            client_ca_file: requires_client_certificate.then(|| self.path("ca.crt")),
        }
    }

    /// A client that trusts the current server, with this certificate.
    fn client(&self, certificate: Option<&Authority>) -> Client {
        let builder = client_builder()
            .unwrap()
            .with_root_certificates(trusted_roots(Some(&self.path("own-ca.crt"))).unwrap());
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let signed = authority.sign().unwrap();
                let (certificate, key) = signed.write(self.directory(), "client").unwrap();
                let chain = certificates(&certificate).unwrap();
                let key = private_key(&key).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        Client(config)
    }
}

#[derive(Clone)]
struct Client(rustls::ClientConfig);

impl Client {
    async fn connect(&self, address: SocketAddr, protocol: &str) -> std::io::Result<TlsStream<TcpStream>> {
        let mut config = self.0.clone();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    /// The status and the body of a page, over a new connection.
    async fn get(&self, address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
        let mut stream = self.connect(address, "http/1.1").await?;
        request(&mut stream, path, "close").await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        let (head, body) = response.split_once("\r\n\r\n").unwrap_or_default();
        let status = head.split(' ').nth(1).unwrap_or_default().parse();
        status
            .map(|status| (status, body.to_owned()))
            .map_err(|_| std::io::Error::other(format!("not a response: {response:?}")))
    }

    /// Whether the server accepts the client's certificate. With TLS 1.3, a client learns that after its handshake.
    async fn is_accepted(&self, address: SocketAddr) -> bool {
        self.get(address, "/").await.is_ok()
    }
}

async fn request(stream: &mut TlsStream<TcpStream>, path: &str, connection: &str) -> std::io::Result<()> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\r\n");
    stream.write_all(request.as_bytes()).await
}

/// The certificate of the server at the other end.
fn certificate_of(stream: &TlsStream<TcpStream>) -> Vec<u8> {
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    chain[0].to_vec()
}

/// A server that says how many certificates the client presented.
struct Server {
    address: SocketAddr,
    registry: Registry,
    _task: JoinSet<std::io::Result<()>>,
}

impl Server {
    fn start(config: &ServerTlsConfig, clients: ClientCertificates) -> Self {
        let routes = Router::new().route(
            "/",
            get(
                async |Extension(PeerCertificates(peer)): Extension<PeerCertificates>| {
                    format!("{} certificates\n", peer.len())
                },
            ),
        );
        let tls = ServerTls::load("scheduler", config, Protocols::Http, clients)
            .unwrap()
            .unwrap();
        let listener = Listener::bind("scheduler.listen", any_port())
            .unwrap()
            .with_tls(tls);
        let mut registry = Registry::default();
        listener.observe(&TlsMetrics::register(&mut registry));
        let address = listener.local_addr().unwrap();
        let mut task = JoinSet::new();
        task.spawn(serve(
            listener,
            routes,
            HttpLimits::default(),
            std::future::pending(),
        ));
        Self {
            address,
            registry,
            _task: task,
        }
    }

    /// The value of a metric of this listener.
    fn metric(&self, name: &str) -> i64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let prefix = format!("{name}{{listener=\"scheduler\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&prefix));
        value
            .unwrap_or_else(|| panic!("{name} in {text}"))
            .parse()
            .unwrap()
    }
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[tokio::test]
async fn listener_speaks_http1_and_h2() {
    let files = Files::new();
    let server = Server::start(&files.config(true), ClientCertificates::Required);
    let client = files.client(Some(&files.clients));
    let answer = client.get(server.address, "/").await.unwrap();
    assert_eq!(answer, (200, "1 certificates\n".to_owned()));

    let stream = client.connect(server.address, "h2").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    let mut running = JoinSet::new();
    running.spawn(connection);
    let request = axum::http::Request::get("https://127.0.0.1/")
        .body(Empty::<Bytes>::new())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.version(), axum::http::Version::HTTP_2);

    assert!(
        client.connect(server.address, "http/0.9").await.is_err(),
        "an unknown protocol"
    );
    let plain = Server::start(&files.config(false), ClientCertificates::Required);
    let answer = files.client(None).get(plain.address, "/").await.unwrap();
    assert_eq!(answer, (200, "0 certificates\n".to_owned()));
}

#[tokio::test]
async fn foreign_certificates_are_rejected() {
    let files = Files::new();
    let server = Server::start(&files.config(true), ClientCertificates::Required);
    assert!(
        files
            .client(Some(&files.clients))
            .is_accepted(server.address)
            .await
    );
    assert_eq!(server.metric("tls_handshake_failures_total"), 0);
    let other = Authority::new().unwrap();
    for certificate in [None, Some(&other)] {
        assert!(!files.client(certificate).is_accepted(server.address).await);
    }
    // A client without TLS.
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"));
    eventually_async("three failures", DEADLINE, async || {
        let count = server.metric("tls_handshake_failures_total");
        ensure(count == 3, count)
    })
    .await;
}

#[tokio::test]
async fn admin_pages_need_a_certificate() {
    let files = Files::new();
    let mut config = Config::default();
    config.admin.tls = files.config(true);
    let tls = ServerTls::of_admin(&config.admin.tls).unwrap().unwrap();
    let listener = Listener::bind("admin.listen", any_port()).unwrap().with_tls(tls);
    let address = listener.local_addr().unwrap();
    let admin = Admin {
        health: Health::new(),
        registry: Arc::new(Mutex::new(metrics::registry("enricher", "e-0", &SystemClock))),
        config: Arc::new(config),
        effective: "{}".into(),
        shutdown: CancellationToken::new(),
    };
    let mut server = JoinSet::new();
    server.spawn(admin::serve(listener, admin));
    let (with, without) = (files.client(Some(&files.clients)), files.client(None));
    for path in ["/livez", "/readyz"] {
        assert_eq!(without.get(address, path).await.unwrap().0, 200, "{path}");
    }
    for path in ["/", "/metrics", "/config"] {
        let (status, body) = without.get(address, path).await.unwrap();
        assert_eq!(status, 403, "{path}");
        assert_eq!(
            body,
            "this path requires a client certificate that a CA in admin.tls.client_ca_file has signed\n"
        );
        assert_eq!(with.get(address, path).await.unwrap().0, 200, "{path}");
    }
    let other = files.client(Some(&Authority::new().unwrap()));
    assert!(
        !other.is_accepted(address).await,
        "a certificate of another authority"
    );
}

/// Sends a request over an open connection, and reads the whole answer.
async fn exchange(stream: &mut TlsStream<TcpStream>) {
    request(stream, "/", "keep-alive").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"certificates\n") {
        let read = stream.read_buf(&mut answer).await.unwrap();
        assert_ne!(read, 0, "the connection was closed");
    }
}

#[tokio::test]
async fn swapped_certificate_serves_new_connections() {
    let mut files = Files::new();
    let server = Server::start(&files.config(true), ClientCertificates::Required);
    let previous = files.client(Some(&files.clients));
    let mut open = previous.connect(server.address, "http/1.1").await.unwrap();
    exchange(&mut open).await;

    // A new certificate of a new authority, and another authority for clients.
    let previous_clients = std::mem::replace(&mut files.clients, Authority::new().unwrap());
    files.swap(|_| {});
    let renewed = files.client(Some(&files.clients));
    eventually_async("the new certificate is served", DEADLINE, async || {
        renewed
            .get(server.address, "/")
            .await
            .map_err(|error| error.to_string())
    })
    .await;
    let new = renewed.connect(server.address, "http/1.1").await.unwrap();
    assert_ne!(certificate_of(&new), certificate_of(&open));
    exchange(&mut open).await;
    assert!(
        !previous.is_accepted(server.address).await,
        "the previous authority"
    );
    let revoked = files.client(Some(&previous_clients));
    assert!(
        !revoked.is_accepted(server.address).await,
        "a client of the previous authority"
    );
    assert_eq!(server.metric("tls_files_unusable"), 0);
}

#[tokio::test]
async fn unusable_files_change_nothing() {
    let mut files = Files::new();
    let server = Server::start(&files.config(true), ClientCertificates::Required);
    let other_key = Authority::new().unwrap().sign().unwrap().key;
    let until_unusable = async |expected| {
        eventually_async("the files are read", DEADLINE, async || {
            let unusable = server.metric("tls_files_unusable");
            ensure(unusable == expected, unusable)
        })
        .await;
    };
    let client = files.client(Some(&files.clients));
    files.swap(|directory| std::fs::write(directory.join("tls.key"), other_key).unwrap());
    until_unusable(1).await;
    assert!(client.is_accepted(server.address).await);
    // Usable files are used again.
    files.swap(|_| {});
    until_unusable(0).await;
    let client = files.client(Some(&files.clients));
    assert!(client.is_accepted(server.address).await);
}

#[test]
fn unusable_files_fail_the_start() {
    let files = Files::new();
    let directory = files.directory();
    let usable = files.config(true);
    let (_, other_key) = Authority::new()
        .unwrap()
        .sign()
        .unwrap()
        .write(directory, "other")
        .unwrap();
    let text = directory.join("text");
    std::fs::write(&text, "text\n").unwrap();
    let broken = directory.join("broken");
    std::fs::write(
        &broken,
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    let missing = directory.join("missing");
    let large = directory.join("large");
    std::fs::write(&large, vec![b' '; (4 << 20) + 1]).unwrap();
    let certificate = usable.cert_file.clone().unwrap().display().to_string();
    for (field, path, expected) in [
        ("cert_file", &missing, "cannot read PATH: No such file"),
        ("cert_file", &text, "PATH contains no PEM certificate"),
        ("cert_file", &broken, "PATH contains an invalid certificate: "),
        ("cert_file", &large, "PATH is larger than 4 MiB"),
        ("key_file", &text, "PATH contains no PEM private key"),
        (
            "key_file",
            &other_key,
            "PATH does not contain the private key of the certificate in CERTIFICATE",
        ),
        ("client_ca_file", &text, "PATH contains no PEM certificate"),
        (
            "client_ca_file",
            &broken,
            "PATH contains an invalid certificate: ",
        ),
    ] {
        let mut config = usable.clone();
        let setting = match field {
            "cert_file" => &mut config.cert_file,
            "key_file" => &mut config.key_file,
            _ => &mut config.client_ca_file,
        };
        *setting = Some(path.clone());
        let error = ServerTls::of_admin(&config).unwrap_err().to_string();
        let expected = expected
            .replace("PATH", &path.display().to_string())
            .replace("CERTIFICATE", &certificate);
        let expected = format!("admin.tls.{field}: {expected}");
        assert!(error.starts_with(&expected), "{error}\nexpected: {expected}");
    }
    assert!(ServerTls::of_admin(&usable).unwrap().is_some());
    assert!(
        ServerTls::of_admin(&ServerTlsConfig::default())
            .unwrap()
            .is_none()
    );
}

#[tokio::test]
async fn certificate_expiry_is_a_metric() {
    let mut files = Files::new();
    let authority = Authority::new().unwrap();
    files.swap(|directory| {
        authority.sign_expired().unwrap().write(directory, "tls").unwrap();
    });
    let server = Server::start(&files.config(false), ClientCertificates::Required);
    // 2020-01-31T00:00:00Z.
    assert_eq!(
        server.metric("tls_certificate_expiry_timestamp_seconds"),
        1_580_428_800
    );
}
