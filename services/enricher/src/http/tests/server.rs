//! A server that misbehaves: truncated responses, bytes that are not HTTP, TLS with test certificates. It counts its
//! connections.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// The reaction to a request.
pub(super) enum Answer {
    /// Sends these bytes and keeps the connection open for the next request.
    Open(Vec<u8>),
    /// Sends these bytes and closes the connection.
    Last(Vec<u8>),
}

pub(super) struct Server {
    pub(super) address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Server {
    /// Serves until the test process exits.
    pub(super) fn start(answer: impl Fn(&[u8]) -> Answer + Clone + Send + 'static) -> Self {
        Self::listen(move |stream| converse(stream, &answer))
    }

    /// As [`Server::start`], with TLS.
    pub(super) fn start_tls(
        config: ServerConfig,
        answer: impl Fn(&[u8]) -> Answer + Clone + Send + 'static,
    ) -> Self {
        let config = Arc::new(config);
        Self::listen(move |stream| {
            let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
            converse(StreamOwned::new(connection, stream), &answer)
        })
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn listen(serve: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
        };
        let connections = server.connections.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                connections.fetch_add(1, Ordering::SeqCst);
                let serve = serve.clone();
                // An error means that the client has closed the connection or rejected the certificate.
                std::thread::spawn(move || drop(serve(stream.unwrap())));
            }
        });
        server
    }
}

fn converse(mut stream: impl Read + Write, answer: &impl Fn(&[u8]) -> Answer) -> io::Result<()> {
    let mut pending = Vec::new();
    loop {
        let request = read_request(&mut stream, &mut pending)?;
        match answer(&request) {
            Answer::Open(bytes) => {
                stream.write_all(&bytes)?;
                stream.flush()?;
            }
            Answer::Last(bytes) => {
                stream.write_all(&bytes)?;
                return stream.flush();
            }
        }
    }
}

/// Reads one request, head and body.
fn read_request(stream: &mut impl Read, pending: &mut Vec<u8>) -> io::Result<Vec<u8>> {
    loop {
        if let Some(end) = pending.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&pending[..end]).to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            let total = end + 4 + length.map_or(0, |length| length.parse::<usize>().unwrap());
            if pending.len() >= total {
                return Ok(pending.drain(..total).collect());
            }
        }
        let mut buffer = [0; 16 * 1024];
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => pending.extend_from_slice(&buffer[..count]),
        }
    }
}
