//! Listeners of all ports.
//!
//! Responses are often one small packet. Nagle's algorithm would delay it until the peer has acknowledged the previous
//! packet, which takes 40 ms with delayed acknowledgements. So [`Listener`] sets `TCP_NODELAY` on every connection.

use std::io;
use std::net::SocketAddr;

use futures::{Stream, stream};
use tokio::net::{TcpListener, TcpStream};

/// Why a listener cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process uses the port.
    #[error("{field}: {address} is in use by another process; choose another port, or 0 for a free one")]
    InUse {
        /// The configuration field of the address.
        field: &'static str,
        /// The configured address.
        address: SocketAddr,
    },
    /// Any other error.
    #[error("{field}: cannot listen on {address}")]
    Bind {
        /// The configuration field of the address.
        field: &'static str,
        /// The configured address.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// A bound listener, for axum directly and for tonic through [`Listener::incoming`].
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Binds the address without blocking. `field` is its configuration field. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the address is in use or cannot be bound.
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

    /// The bound address, which contains the actual port if port 0 was configured.
    ///
    /// # Errors
    /// When the operating system cannot tell the address.
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
        // axum retries after a second if the process has no file descriptors left.
        let (connection, peer) = axum::serve::Listener::accept(&mut self.0).await;
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY; connection already closed");
        }
        (connection, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}
