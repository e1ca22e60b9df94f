//! A connection that is closed only after its client could read the last response.
//!
//! If a server closes a socket while its client still sends, the operating system resets the connection, and the client may lose the
//! response that it has not read yet. That concerns refusals: they are sent before the body of the request has arrived. So the server
//! first ends only what it sends, and discards what the client sends until the client ends, too, or until a time has passed.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::timed_body::Abandoned;

/// How many bytes are discarded at once.
const PART: usize = 16 << 10;

/// Reads and discards, before its end, what the client still sends.
#[derive(Debug)]
pub(super) struct LingeringClose<C> {
    connection: C,
    limit: Duration,
    /// Whether the client may be sending an unread body.
    abandoned: Abandoned,
    /// Exists once the connection has sent its end.
    discarding: Option<Pin<Box<Sleep>>>,
}

impl<C> LingeringClose<C> {
    pub(super) fn new(connection: C, limit: Duration, abandoned: Abandoned) -> Self {
        Self {
            connection,
            limit,
            abandoned,
            discarding: None,
        }
    }
}

impl<C: AsyncRead + Unpin> LingeringClose<C> {
    /// Completes when the client has ended or reset the connection. `Pending`: it may send more.
    fn poll_discard(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut part = [0; PART];
        loop {
            let mut buffer = ReadBuf::new(&mut part);
            let read = std::task::ready!(Pin::new(&mut self.connection).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(());
            }
            self.abandoned.set();
        }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for LingeringClose<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl<C: AsyncRead + AsyncWrite + Unpin> AsyncWrite for LingeringClose<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.discarding.is_none() {
            std::task::ready!(Pin::new(&mut this.connection).poll_shutdown(context))?;
            this.discarding = Some(Box::pin(tokio::time::sleep(this.limit)));
        }
        if this.poll_discard(context).is_ready() || !this.abandoned.get() {
            return Poll::Ready(Ok(()));
        }
        match &mut this.discarding {
            Some(elapsed) => elapsed.as_mut().poll(context).map(Ok),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    /// How many milliseconds the end of a connection takes whose client does this, and what the client has read until then.
    async fn close(
        is_abandoned: bool,
        client: impl AsyncFnOnce(&mut tokio::io::DuplexStream),
    ) -> (u128, String) {
        let (near, mut far) = tokio::io::duplex(64);
        let abandoned = Abandoned::default();
        if is_abandoned {
            abandoned.set();
        }
        let mut connection = LingeringClose::new(near, LIMIT, abandoned);
        let started = Instant::now();
        let serve = async {
            connection.write_all(b"refused").await.unwrap();
            connection.shutdown().await.unwrap();
            started.elapsed().as_millis()
        };
        let ((), took) = tokio::join!(client(&mut far), serve);
        drop(connection);
        let mut read = String::new();
        far.read_to_string(&mut read).await.unwrap();
        (took, read)
    }

    #[tokio::test(start_paused = true)]
    async fn late_bytes_are_discarded() {
        let answer = "refused".to_owned();
        let nothing = async |_: &mut tokio::io::DuplexStream| {};
        assert_eq!(close(false, nothing).await, (0, answer.clone()));
        // The client may be about to send more.
        assert_eq!(close(true, nothing).await, (1_000, answer.clone()));
        for is_abandoned in [true, false] {
            // Unread data shows that the client is sending.
            let sends = async |client: &mut tokio::io::DuplexStream| {
                for _ in 0..5 {
                    client.write_all(&[0; 64]).await.unwrap();
                    tokio::time::sleep(LIMIT / 10).await;
                }
                client.shutdown().await.unwrap();
            };
            assert_eq!(close(is_abandoned, sends).await, (500, answer.clone()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn endless_sender_is_disconnected() {
        let for_ever = async |client: &mut tokio::io::DuplexStream| {
            // The connection is dropped at the end of its time.
            let sending = async {
                loop {
                    client.write_all(&[0; 64]).await.unwrap();
                    tokio::time::sleep(LIMIT / 10).await;
                }
            };
            tokio::time::timeout(2 * LIMIT, sending).await.unwrap_err();
        };
        let ended = tokio::time::timeout(4 * LIMIT, close(true, for_ever));
        assert_eq!(ended.await.unwrap().0, 1_000);
    }
}
