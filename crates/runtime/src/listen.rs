//! Listening sockets: one way to take a port, and one place where accepted connections are prepared.
//!
//! An answer of ours is often one small packet. Nagle's algorithm would hold it back until the peer has acknowledged the
//! packet before it, which a peer with delayed acknowledgements does after 40 ms. So every accepted connection has
//! `TCP_NODELAY` set.

use std::io;
use std::net::SocketAddr;

use futures::{Stream, stream};
use tokio::net::{TcpListener, TcpStream};

/// A port cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The port belongs to another process.
    #[error("{field}: {address} is in use by another process; choose another port, or 0 for a free one")]
    InUse {
        /// The configuration's field that names the address.
        field: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("{field}: cannot listen on {address}")]
    Bind {
        /// The configuration's field that names the address.
        field: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// A port that is taken. It serves as a listener of axum, and by [`Listener::incoming`] as one of tonic.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Takes the address, without waiting. `field` is the configuration's field that names it. Must be called inside of
    /// a runtime.
    ///
    /// # Errors
    /// When the address is in use or cannot be listened on.
    pub fn bind(field: &'static str, address: SocketAddr) -> Result<Self, ListenError> {
        let bind = || {
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        match bind() {
            Ok(listener) => Ok(Self(listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Err(ListenError::InUse { field, address })
            }
            Err(source) => Err(ListenError::Bind {
                field,
                address,
                source,
            }),
        }
    }

    /// The address that is listened on.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Accepts connections until it is dropped.
    pub fn incoming(self) -> impl Stream<Item = io::Result<TcpStream>> {
        stream::unfold(self, async |mut listener| {
            let (connection, _) = axum::serve::Listener::accept(&mut listener).await;
            Some((Ok(connection), listener))
        })
    }
}

impl axum::serve::Listener for Listener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        // This one waits a second when the process has no file descriptor left, and tries again.
        let (connection, peer) = axum::serve::Listener::accept(&mut self.0).await;
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "the connection has ended already");
        }
        (connection, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}
