//! Listeners of all ports, with or without TLS.
//!
//! Responses are often one small packet. Nagle's algorithm would delay it until the peer has acknowledged the previous
//! packet, which takes 40 ms with delayed acknowledgements. So [`Listener`] sets `TCP_NODELAY` on every connection.
//!
//! With TLS, a handshake is a task of its own. A client that sends nothing delays no other client.

use std::convert::Infallible;
use std::future::ready;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::IncomingStream;
use axum::{Extension, Router};
use futures::{Stream, stream};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tonic::transport::server::Connected;
use tower::Layer as _;

use crate::tls::{ServerTls, TlsMetrics};
use crate::watched_files::CHECK_INTERVAL;

/// Maximum number of handshakes in progress on a listener. Further connections wait in the queue of the operating system.
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

/// A bound listener, for axum through [`serve`] and for tonic through [`Listener::incoming`].
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
    is_checking: bool,
    file_checks: Interval,
}

/// How a task of a listener with TLS ended.
enum Ended {
    Accepted(Connection, SocketAddr),
    /// The handshake failed, which is reported.
    Failed,
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
/// Each request that arrives through a [`Listener`] has this in its extensions, with axum and with tonic.
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

    /// Accepts connections until it is dropped.
    pub fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        stream::unfold(self, async |mut listener| {
            let (connection, _) = axum::serve::Listener::accept(&mut listener).await;
            Some((Ok(connection), listener))
        })
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
                (stream, address) = accept_tcp(&mut self.tcp), if tls.running.len() < MAX_HANDSHAKES => {
                    let server = tls.server.clone();
                    tls.running.spawn(async move {
                        match server.handshake(stream, address).await {
                            Some(stream) => Ended::Accepted(Connection::of_tls(stream), address),
                            None => Ended::Failed,
                        }
                    });
                }
                Some(ended) = tls.running.join_next() => match ended {
                    Ok(Ended::Accepted(connection, address)) => return (connection, address),
                    Ok(Ended::Failed) => {}
                    Ok(Ended::Checked) => tls.is_checking = false,
                    Err(error) => {
                        tls.is_checking = false;
                        tracing::error!(%error, "a TLS handshake or a check of certificate files panicked");
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

impl Connected for Connection {
    type ConnectInfo = PeerCertificates;

    fn connect_info(&self) -> PeerCertificates {
        self.peer.clone()
    }
}

/// Serves HTTP/1.1 and HTTP/2 until `shutdown` completes, and then until requests in progress have ended.
///
/// # Errors
/// When connections can no longer be accepted.
pub async fn serve(
    listener: Listener,
    routes: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let of_connection = tower::service_fn(move |stream: IncomingStream<'_, Listener>| {
        let peer = Extension(stream.io().peer.clone());
        ready(Ok::<_, Infallible>(peer.layer(routes.clone())))
    });
    axum::serve(listener, of_connection)
        .with_graceful_shutdown(shutdown)
        .await
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
    use super::*;

    #[test]
    fn a_process_that_listens_on_all_interfaces_is_reached_on_the_loopback_interface() {
        for (listen, address) in [
            ("0.0.0.0:5", "127.0.0.1:5"),
            ("[::]:5", "[::1]:5"),
            ("10.1.2.3:5", "10.1.2.3:5"),
        ] {
            assert_eq!(reachable(listen.parse().unwrap()), address.parse().unwrap());
        }
    }
}
