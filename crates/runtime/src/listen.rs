//! Listeners of all ports, with or without TLS.
//!
//! Responses are often one small packet. Nagle's algorithm would delay it until the peer has acknowledged the previous
//! packet, which takes 40 ms with delayed acknowledgements. So [`Listener`] sets `TCP_NODELAY` on every connection.
//!
//! With TLS, a handshake is a task of its own, and the oldest one makes room for a new one. So clients that send nothing
//! delay no other client.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Interval, MissedTickBehavior};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use crate::tls::{ServerTls, TlsMetrics};
use crate::watched_files::CHECK_INTERVAL;

/// Number of handshakes in progress on a listener at which the oldest one is aborted.
const MAX_HANDSHAKES: usize = 1_024;

/// Why a listener cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process uses the port.
    #[error("{field}: {address} is in use by another process; choose another port, or 0 for a free one")]
    InUse {
        /// The configuration field of the address.
        field: String,
        /// The configured address.
        address: SocketAddr,
    },
    /// Any other error.
    #[error("{field}: cannot listen on {address}")]
    Bind {
        /// The configuration field of the address.
        field: String,
        /// The configured address.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// A bound listener, for [`serve`](crate::http_server::serve).
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    tls: Option<Handshakes>,
}

#[derive(Debug)]
struct Handshakes {
    server: ServerTls,
    /// Handshakes in progress, and at most one check of the files.
    running: JoinSet<Ended>,
    /// The handshakes that are not known to have ended, by the order in which they began.
    pending: BTreeMap<u64, AbortHandle>,
    begun: u64,
    max_pending: usize,
    is_checking: bool,
    file_checks: Interval,
}

/// How a task of a listener with TLS ended.
enum Ended {
    /// The handshake with this number. `None` if it failed, which is reported.
    Handshake(u64, Option<(Connection, SocketAddr)>),
    Checked,
}

/// An accepted connection, after its TLS handshake if it has one.
#[derive(Debug)]
pub struct Connection {
    io: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    peer: PeerCertificates,
}

/// The certificates that the client presented, its own one first. They are verified: the chain ends at one of the CA
/// certificates of the listener, and the client has the private key. Empty without TLS, and if the client presented none.
///
/// Each request that arrives through a [`Listener`] has this in its extensions.
#[derive(Clone, Debug)]
pub struct PeerCertificates(pub Arc<[CertificateDer<'static>]>);

impl PeerCertificates {
    fn none() -> Self {
        Self(Arc::new([]))
    }
}

impl Listener {
    /// Binds the address without blocking. `field` is its configuration field. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the address is in use or cannot be bound.
    pub fn bind(field: impl Into<String>, address: SocketAddr) -> Result<Self, ListenError> {
        let bind = || {
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        match bind() {
            Ok(tcp) => Ok(Self { tcp, tls: None }),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(ListenError::InUse {
                field: field.into(),
                address,
            }),
            Err(source) => Err(ListenError::Bind {
                field: field.into(),
                address,
                source,
            }),
        }
    }

    /// Accepts only TLS. Changed certificate files are used within seconds. Connections that exist stay open.
    #[must_use]
    pub fn with_tls(mut self, server: ServerTls) -> Self {
        let mut file_checks = tokio::time::interval(CHECK_INTERVAL);
        file_checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.tls = Some(Handshakes {
            server,
            running: JoinSet::new(),
            pending: BTreeMap::new(),
            begun: 0,
            max_pending: MAX_HANDSHAKES,
            is_checking: false,
            file_checks,
        });
        self
    }

    /// Exposes the state of TLS, if the listener uses it.
    pub fn observe(&self, metrics: &TlsMetrics) {
        if let Some(tls) = &self.tls {
            tls.server.observe(metrics);
        }
    }

    /// The bound address, which contains the actual port if port 0 was configured.
    ///
    /// # Errors
    /// When the operating system cannot tell the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

impl axum::serve::Listener for Listener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let Some(tls) = &mut self.tls else {
            let (stream, address) = accept_tcp(&mut self.tcp).await;
            let connection = Connection {
                io: Either::Left(stream),
                peer: PeerCertificates::none(),
            };
            return (connection, address);
        };
        // Handshakes are tasks, so those in progress continue when this future is dropped.
        loop {
            tokio::select! {
                // Waits at most until a task has ended that was aborted.
                (stream, address) = accept_tcp(&mut self.tcp), if tls.running.len() <= tls.max_pending => {
                    tls.begin(stream, address);
                }
                Some(ended) = tls.running.join_next() => match ended {
                    Ok(Ended::Handshake(number, accepted)) => {
                        tls.pending.remove(&number);
                        if let Some(accepted) = accepted {
                            return accepted;
                        }
                    }
                    Ok(Ended::Checked) => tls.is_checking = false,
                    Err(error) if error.is_cancelled() => tls.server.handshake_aborted(),
                    Err(error) => {
                        tls.is_checking = false;
                        tls.pending.retain(|_, handshake| !handshake.is_finished());
                        tracing::error!(%error, "TLS handshake or check of certificate files panicked");
                    }
                },
                _ = tls.file_checks.tick(), if !tls.is_checking => {
                    let server = tls.server.clone();
                    tls.is_checking = true;
                    tls.running.spawn_blocking(move || {
                        server.check_files();
                        Ended::Checked
                    });
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

impl Handshakes {
    /// Begins a handshake, and aborts the oldest one if that makes too many.
    fn begin(&mut self, stream: TcpStream, address: SocketAddr) {
        let (server, number) = (self.server.clone(), self.begun);
        self.begun += 1;
        let handshake = self.running.spawn(async move {
            let accepted = server.handshake(stream, address).await;
            let connection = accepted.map(|stream| (Connection::of_tls(stream), address));
            Ended::Handshake(number, connection)
        });
        self.pending.insert(number, handshake);
        if self.pending.len() >= self.max_pending
            && let Some((_, oldest)) = self.pending.pop_first()
        {
            oldest.abort();
        }
    }
}

async fn accept_tcp(listener: &mut TcpListener) -> (TcpStream, SocketAddr) {
    // axum retries after a second if the process has no file descriptors left.
    let (stream, address) = axum::serve::Listener::accept(listener).await;
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY; connection already closed");
    }
    (stream, address)
}

impl Connection {
    fn of_tls(stream: TlsStream<TcpStream>) -> Self {
        let peer = match stream.get_ref().1.peer_certificates() {
            Some(certificates) => PeerCertificates(certificates.into()),
            None => PeerCertificates::none(),
        };
        Self {
            io: Either::Right(Box::new(stream)),
            peer,
        }
    }

    /// The socket.
    #[must_use]
    pub fn tcp(&self) -> &TcpStream {
        match &self.io {
            Either::Left(stream) => stream,
            Either::Right(stream) => stream.get_ref().0,
        }
    }

    /// The certificates of the client.
    pub(crate) fn peer_certificates(&self) -> PeerCertificates {
        self.peer.clone()
    }

    fn io(self: Pin<&mut Self>) -> Pin<&mut Either<TcpStream, Box<TlsStream<TcpStream>>>> {
        Pin::new(&mut self.get_mut().io)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.io().poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.io().poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.io().poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.io().poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// The address at which this host reaches a process that listens on `listen`: a process that listens on all interfaces
/// is reached on the loopback interface.
#[must_use]
pub fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::registry::Registry;
    use redeliver_testkit::certificates::Authority;
    use redeliver_testkit::scratch::Scratch;
    use rustls::pki_types::ServerName;
    use tokio::io::AsyncReadExt as _;
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::config::ServerTlsConfig;
    use crate::tls::{ClientCertificates, Protocols, client_builder, trusted_roots};

    #[tokio::test]
    async fn excess_handshakes_replace_the_oldest() {
        let scratch = Scratch::new("handshakes").unwrap();
        let authority = Authority::new().unwrap();
        let (certificate, key) = authority.sign().unwrap().write(scratch.path(), "tls").unwrap();
        let config = ServerTlsConfig {
            cert_file: Some(certificate),
            key_file: Some(key),
            client_ca_file: None,
        };
        let tls = ServerTls::load(
            "scheduler",
            &config,
            Protocols::Http,
            ClientCertificates::Required,
        );
        let listener = Listener::bind("scheduler.listen", "127.0.0.1:0".parse().unwrap());
        let mut listener = listener.unwrap().with_tls(tls.unwrap().unwrap());
        let address = listener.local_addr().unwrap();
        let mut registry = Registry::default();
        listener.observe(&TlsMetrics::register(&mut registry));
        listener.tls.as_mut().unwrap().max_pending = 4;
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let first = axum::serve::Listener::accept(&mut listener).await;
            (first, listener)
        });

        let mut silent = Vec::new();
        for _ in 0..3 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let ca = authority.write(scratch.path(), "ca.crt").unwrap();
        let roots = trusted_roots(Some(&ca)).unwrap();
        let client = client_builder()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let connected = TlsConnector::from(Arc::new(client)).connect(name, stream).await;
        let ((connection, _), mut listener) = accepting.join_next().await.unwrap().unwrap();
        assert_eq!(
            connection.tcp().peer_addr().unwrap(),
            connected.unwrap().get_ref().0.local_addr().unwrap()
        );

        // Only the oldest one was closed.
        let mut oldest = silent.remove(0);
        assert_eq!(oldest.read(&mut [0]).await.unwrap(), 0);
        for stream in &silent {
            let read = stream.try_read(&mut [0]);
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        let aborted = tokio::time::timeout(Duration::from_secs(60), async {
            tokio::select! {
                (_, peer) = axum::serve::Listener::accept(&mut listener) => panic!("accepted {peer}"),
                () = async {
                    loop {
                        let mut text = String::new();
                        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
                        if text.contains("tls_handshake_failures_total{listener=\"scheduler\"} 1\n") {
                            break;
                        }
                        tokio::task::yield_now().await;
                    }
                } => {}
            }
        });
        aborted.await.expect("the aborted handshake is counted");
    }

    #[test]
    fn all_interfaces_are_reached_on_loopback() {
        for (listen, address) in [
            ("0.0.0.0:5", "127.0.0.1:5"),
            ("[::]:5", "[::1]:5"),
            ("10.1.2.3:5", "10.1.2.3:5"),
        ] {
            assert_eq!(reachable(listen.parse().unwrap()), address.parse().unwrap());
        }
    }
}
