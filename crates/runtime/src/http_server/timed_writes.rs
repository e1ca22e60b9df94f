//! A connection that fails when its client does not read.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::activity::{Activity, InProgress};
use super::stall::Stall;

/// Fails a write that has made no progress for some time. A connection with such a write is not idle.
#[derive(Debug)]
pub(super) struct TimedWrites<C> {
    connection: C,
    stall: Stall,
    activity: Activity,
    blocked: Option<InProgress>,
    not_read: Counter,
}

impl<C> TimedWrites<C> {
    pub(super) fn new(connection: C, limit: Duration, activity: Activity, not_read: Counter) -> Self {
        Self {
            connection,
            stall: Stall::new(limit),
            activity,
            blocked: None,
            not_read,
        }
    }

    fn watch<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall.clear();
            self.blocked = None;
            return written;
        }
        if self.blocked.is_none() {
            self.blocked = Some(self.activity.begin_write());
        }
        std::task::ready!(self.stall.poll(0, context));
        self.not_read.inc();
        let error = io::Error::new(io::ErrorKind::TimedOut, "the client does not read");
        Poll::Ready(Err(error))
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for TimedWrites<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for TimedWrites<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.connection).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.connection).poll_flush(context);
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.connection).poll_shutdown(context);
        self.watch(shut_down, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.connection).poll_write_vectored(context, bytes);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }
}
